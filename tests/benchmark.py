# SPDX-License-Identifier: MIT
"""What a step costs: every figure a ratio of medians within one run, so that a slow or shared
machine changes both sides alike.

    python tests/benchmark.py                            # medium shape on a CPU, minutes
    python tests/benchmark.py --shape llada-8b --device cuda --dtype bfloat16 --json out.json

    overhead   a sampler's wall time / that of its own forwards replayed bare: same canvases, same
               positions, same keys and values
    kinds      one forward of each kind / a plain full forward
    head       token and confidence at V = 126,464 / softmax of the whole (B, L, V) in float64:
               seconds and largest temporary
    scaling    seconds of a COVER step / of a bare forward, over L and B
    batch      rows per second in a batch of 8 / one by one
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dlm_spec
from dlm_spec import Denoiser, KVCache

SHAPES = {      # d, layers, heads, intermediate, vocabulary
    "mini": (192, 7, 4, 512, 512), "medium": (768, 12, 12, 2048, 8192),
    "llada-8b": (4096, 32, 32, 12288, 126464)}
SAMPLERS = {
    "llada": dict(steps=16), "fast_dllm": dict(threshold=0.9), "dkv": dict(threshold=0.9),
    "dual_diffusion": dict(threshold=0.5), "wino": {}, "saber": {}, "cover": {}}


def build(shape, device, dtype):
    """A random model of a shape, weights made on the device; sharp enough to vary its answers."""
    d, layers, heads, inner, V = SHAPES[shape]
    config = LlamaConfig(vocab_size=V, hidden_size=d, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads,
                         intermediate_size=inner, max_position_embeddings=8192,
                         tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.lm_head.weight.data.mul_(20)
    return Denoiser(model, V - 1)


def wait(device):
    """Until the device is idle."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()


def ratio(a, b, device, repeats):
    """Median seconds of a() / those of b(), run in turns after a warm-up; and b's."""
    times = [], []
    for i in range(repeats + 1):
        for f, kept in zip((a, b), times):
            wait(device)
            start = time.perf_counter()
            f()
            wait(device)
            if i:
                kept.append(time.perf_counter() - start)
    x, y = map(statistics.median, times)
    return x / y, y


def overhead(denoiser, name, knobs, prompt, G, repeats):
    """A decode against its forwards alone."""
    seen, inner, begin = [], Denoiser._forward, KVCache.begin

    def record(self, x, row, column, mask, position_ids, kv):
        seen.append((x.clone(), row, column, mask, position_ids, kv, kv and kv.last))
        return inner(self, x, row, column, mask, position_ids, kv)

    def remember(self, *a, **k):
        self.last = (a, k)
        return begin(self, *a, **k)

    def decode():
        return dlm_spec.SAMPLERS[name](denoiser, prompt, gen_length=G, block_length=32, **knobs)

    Denoiser._forward, KVCache.begin = record, remember
    try:
        out = decode()
    finally:
        Denoiser._forward, KVCache.begin = inner, begin

    def replay():
        for x, row, column, mask, position_ids, kv, last in seen:
            if kv is not None:
                kv.begin(*last[0], **last[1])
            inner(denoiser, x, row, column, mask, position_ids, kv)

    r, _ = ratio(decode, replay, denoiser.device, repeats)
    return dict(ratio=r, forwards=out.calls)


def kinds(denoiser, L, B, repeats):
    """Each kind of forward against a plain full one; the block is 32 positions in the middle."""
    device = denoiser.device
    x = torch.randint(0, denoiser.mask_id, (B, L), device=device)
    column = torch.arange(L, device=device).expand(B, L)
    block = (column >= L // 2) & (column < L // 2 + 32)
    x = x.masked_fill(block & (column % 2 == 0), denoiser.mask_id)
    layers = denoiser.model.config.num_hidden_layers
    kv = KVCache((layers // 2, layers - 1))
    denoiser(x, block, kv=kv)

    def plain():
        denoiser(x, block)

    def seeds(n):
        at = (L // 2 + 1 + 2 * torch.arange(n, device=device)).expand(B, n)
        return torch.zeros_like(block).scatter(1, at, True)

    forms = {
        "full, storing": lambda: denoiser(x, block, kv=kv),
        "prefix window": lambda: denoiser(x, block, kv=kv, window=column >= L // 2),
        "dual window of 32": lambda: denoiser(x, block, kv=kv, window=block),
        "delayed, 64 positions": lambda: denoiser(x, block, kv=kv,
                                                  window=block | (column >= L - 32)),
        "shadow block of 32": lambda: denoiser.leave_one_out(x, block, block),
        "shadow of 8 tokens": lambda: denoiser.leave_one_out(x, block, seeds(8)),
        "probe layers": lambda: denoiser(x, block, kv=kv, probe=block),
        **{f"dual view, {n} seeds": lambda n=n: denoiser(x, block, kv=kv, seeds=seeds(n))
           for n in (4, 8, 16)},
        "dual view, 8 seeds, probes": lambda: denoiser(x, block, kv=kv, seeds=seeds(8),
                                                       probe=block),
    }
    return {name: ratio(f, plain, device, repeats)[0] for name, f in forms.items()}


def largest(f, device):
    """The largest single allocation of f(), in bytes (CPU), or its peak (CUDA)."""
    if str(device).startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        f()
    level = peak = 0
    for e in p.profiler.kineto_results.events():
        if e.name() == "[memory]":
            level += e.nbytes()
            peak = max(peak, level)
    return peak


def head(device, repeats, B=1, L=128, V=126_464, asked=32):
    """Token and confidence of the asked rows, against the whole canvas in float64."""
    g = torch.Generator(device).manual_seed(0)
    logits = torch.randn(B, L, V, generator=g, device=device)
    ask = (torch.arange(L, device=device) >= L - asked).expand(B, L)
    few = logits[ask]

    def textbook():
        p = logits.to(torch.float64).softmax(-1)
        x0 = logits.argmax(-1)
        return x0, p.gather(-1, x0[..., None])

    def ours():
        return dlm_spec.predict(few)

    r, _ = ratio(textbook, ours, device, repeats)
    return dict(faster=r, memory_share=largest(ours, device) / largest(textbook, device))


def scaling(denoiser, repeats, lengths, rows):
    """A COVER forward with 8 seeds and probes, against a plain one."""
    return {f"L {L}, B {B}": kinds_of_cover(denoiser, L, B, repeats)
            for L, B in [*((L, 1) for L in lengths), *((128, B) for B in rows)]}


def kinds_of_cover(denoiser, L, B, repeats):
    """The one line of `kinds` that a COVER step is."""
    return kinds(denoiser, L, B, repeats)["dual view, 8 seeds, probes"]


def batch(denoiser, repeats, G=32):
    """Rows per second in a batch of 8 against one by one."""
    prompt = torch.randint(0, denoiser.mask_id, (8, 16), device=denoiser.device)

    def decode(rows):
        dlm_spec.sample_llada(denoiser, rows, gen_length=G, steps=8)

    return ratio(lambda: [decode(prompt[i:i + 1]) for i in range(8)], lambda: decode(prompt),
                 denoiser.device, repeats)[0]


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=SHAPES, default="medium")
    cli.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cli.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    cli.add_argument("--repeats", type=int, default=5)
    cli.add_argument("--parts", nargs="+",
                     default=["overhead", "kinds", "head", "scaling", "batch"])
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    torch.set_grad_enabled(False)
    denoiser, found = build(args.shape, args.device, getattr(torch, args.dtype)), {}
    prompt = torch.randint(0, denoiser.mask_id, (1, 192), device=denoiser.device)
    print(f"{args.shape}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads, "
          f"medians of {args.repeats}")
    for part in args.parts:
        if part == "overhead":
            found[part] = {n: overhead(denoiser, n, k, prompt, 64, max(args.repeats // 2, 1))
                           for n, k in SAMPLERS.items()}
        elif part == "kinds":
            found[part] = kinds(denoiser, 256, 1, args.repeats)
        elif part == "head":
            found[part] = head(args.device, args.repeats)
        elif part == "scaling":
            found[part] = scaling(denoiser, max(args.repeats // 2, 1), (256, 512, 1024), (1, 8))
        else:
            found[part] = batch(denoiser, max(args.repeats // 2, 1))
        print(f"{part}: {json.dumps(found[part], indent=2)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(dict(vars(args), json=None, found=found), indent=1,
                                        default=str))


if __name__ == "__main__":
    main()
