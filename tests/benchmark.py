# SPDX-License-Identifier: MIT
"""What a step costs: every figure is of ratios of two runs side by side, so that a slow or
shared machine changes both sides alike: [the median, the least, the most] of the repeats.

    python tests/benchmark.py                            # medium shape on a CPU
    python tests/benchmark.py --parts speed --threads 1 --json out.json    # keeps other parts
    python tests/benchmark.py --shape llada-8b --device cuda --dtype bfloat16 --json out.json

    overhead   a sampler's wall time / that of its own forwards alone, run bare: same canvases,
               same positions, same keys and values
    kinds      one forward of each kind / a plain full forward
    compiled   a forward with faster layers (CUDA graphs; torch.compile on a CPU) / one
               without, kind by kind
    roofline   seconds of a full forward of 512 positions / those of its operations at the rate
               of a large square product, or of reading all weights at that of a large copy,
               whichever is more; and of a window of 32, bare and compiled / reading the
               weights
    head       token and confidence of 32 of 128 positions at V = 126,464, and of all of them,
               against softmax of the whole (B, L, V) in float64: seconds and peak of memory
    scaling    a COVER step, all that its loop does included, / a plain forward, over L, B, V
    speed      tokens per second / those of one token per forward: embedded model, some of
               the settings of experiments.py
    batch      rows per second in a batch of 8 / one by one, embedded model
"""
import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks"), str(ROOT / "notebooks" / "mini")]
import cuda_graphs
import experiments
import tasks

import dlm_spec
from dlm_spec import Denoiser, DualView, KVCache, shadowed, windowed

SHAPES = {      # d, layers, heads, intermediate, vocabulary
    "mini": (192, 7, 4, 512, 512), "medium": (768, 12, 12, 2048, 8192),
    "llada-8b": (4096, 32, 32, 12288, 126464)}
SAMPLERS = {    # label: sampler, knobs
    "llada": ("llada", dict(steps=8)), "fast_dllm": ("fast_dllm", {}),
    "fast_dllm, prefix": ("fast_dllm", dict(cache="prefix")),
    "fast_dllm, dual": ("fast_dllm", dict(cache="dual")), "dkv": ("dkv", {}),
    "dual_diffusion": ("dual_diffusion", dict(threshold=0.5)), "wino": ("wino", {}),
    "saber": ("saber", {}), "cover": ("cover", {}),
    "cover, dual": ("cover", dict(cache="dual"))}
SPEED = ("one-per-forward", "four-per-forward", "threshold.6", "threshold.9", "threshold.9-dual",
         "dkv.9", "dual_diffusion-out.6", "wino.4", "wino.6", "saber2", "cover-few.6", "cover.5",
         "cover.7", "cover.7-prefix")       # of experiments.settings(); the first is the base


def build(shape, device, dtype, V=None):
    """A random model of a shape, weights made on the device, large enough that attention and
    confidence vary from position to position."""
    d, layers, heads, inner, vocabulary = SHAPES[shape]
    config = LlamaConfig(vocab_size=V or vocabulary, hidden_size=d, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads,
                         intermediate_size=inner, max_position_embeddings=8192,
                         initializer_range=2 * d ** -.5, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.lm_head.weight.data.mul_(4)       # logits with a deviation of 8
    return Denoiser(model, config.vocab_size - 1)


def now(device):
    """A clock in seconds, once the device is idle. On a CPU with one thread it counts this
    process's own CPU time, which other processes hardly change."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(f, device):
    """Time of f()."""
    start = now(device)
    f()
    return now(device) - start


def spread(values):
    """The median, the least and the most of some values."""
    return [statistics.median(values), min(values), max(values)]


def ratio(a, b, device, repeats):
    """Seconds of a() / seconds of b(), after a warm-up; a and b take turns. See spread."""
    found = []
    for i in range(repeats + 1):
        times = {j: seconds((a, b)[j], device) for j in ((0, 1) if i % 2 else (1, 0))}
        found.append(times[0] / times[1])
    return spread(found[1:])


def overhead(denoiser, label, prompt, G, repeats):
    """A decode against its forwards alone: each is run once more, bare, right after itself (it
    stores the same keys and values twice), and the decode's time is what is left."""
    name, knobs = SAMPLERS[label]
    inner, device, bare, found = Denoiser.forward, denoiser.device, [], []

    def twice(self, *inputs):
        view = next((t for t in inputs if isinstance(t, DualView)), None)
        before = view and view.attention        # a forward adds its attention maps to these
        logits = inner(self, *inputs)
        after = view and view.attention
        if view:
            view.attention = before
        self.ban = lambda logits: logits        # what the module does with them is not bare
        bare.append(seconds(lambda: inner(self, *inputs), device))
        del self.ban
        if view:
            view.attention = after
        return logits

    def decode():
        dlm_spec.SAMPLERS[name](denoiser, prompt, gen_length=G, block_length=32, **knobs)

    Denoiser.forward = twice
    try:
        for _ in range(repeats):
            bare.clear()
            whole = seconds(decode, device)
            found.append(whole / sum(bare) - 1)
    finally:
        Denoiser.forward = inner
    return dict(ratio=spread(found), forwards=len(bare))


def forms(denoiser, L, B):
    """The kinds of forwards: name -> function; the block is 32 positions in the middle."""
    device = denoiser.device
    x = torch.randint(0, denoiser.mask_id, (B, L), device=device)
    column = torch.arange(L, device=device).expand(B, L)
    block = (column >= L // 2) & (column < L // 2 + 32)
    x = x.masked_fill(block & (column % 2 == 0), denoiser.mask_id)
    kv, probes = KVCache(x), dlm_spec.columns_of(block)
    windowed(denoiser, x, block, kv=kv)

    def window(columns):
        return lambda: windowed(denoiser, x, block, kv=kv, window=columns)

    def some(n):
        at = (L // 2 + 1 + 2 * torch.arange(n, device=device)).expand(B, n)
        return torch.zeros_like(block).scatter(1, at, True)

    def shadow(tokens):
        return lambda: shadowed(denoiser, x, block, checked=tokens)

    def dual_view(n, probe=None):
        return lambda: windowed(denoiser, x, block,
                                kv=DualView(denoiser, x, None, kv, some(n), probe))

    return {
        "plain": lambda: denoiser(x, block),
        "full, storing": window(None),
        "prefix window": window(column >= L // 2),
        "delayed, 64 positions": window(block | (column >= L - 32)),
        "dual window of 32": window(block),
        "shadow block of 32": shadow(block),
        "shadow of 8 tokens": shadow(some(8)),
        "probe layers": dual_view(0, probes),
        **{f"dual view, {n} seeds": dual_view(n) for n in (0, 4, 8, 16)},
        "dual view, 8 seeds, probes": dual_view(8, probes),
    }


def kinds(denoiser, L, B, repeats):
    """Each kind of forward against a plain full one."""
    found = forms(denoiser, L, B)
    return {k: ratio(f, found["plain"], denoiser.device, repeats) for k, f in found.items()}


def make_faster(denoiser):
    """The layers of a model as CUDA graphs, on a CPU by torch.compile: each kind of forward is
    compiled when it first comes, for all sizes at once. Returns the denoiser."""
    if denoiser.device.type == "cuda":
        return cuda_graphs.capture_layers(denoiser)
    limit = torch._dynamo.config.recompile_limit        # 8: fewer than there are kinds
    torch._dynamo.config.recompile_limit = max(limit, 64)
    denoiser.model.base_model.compile(dynamic=True)     # the head runs on other rows each time
    return denoiser


def compiled(denoiser, shape, L, B, repeats):
    """Some kinds of forwards with faster layers against the same without."""
    fast = make_faster(build(shape, denoiser.device, next(denoiser.model.parameters()).dtype))
    pairs = zip(forms(fast, L, B).items(), forms(denoiser, L, B).values())
    return {name: ratio(f, g, denoiser.device, repeats) for (name, f), g in pairs
            if name in ("plain", "dual window of 32", "dual view, 8 seeds")}


def roofline(denoiser, shape, repeats, L=512, asked=32):
    """A full forward and a window against what the device could do."""
    device, weights = denoiser.device, [*denoiser.model.base_model.layers.parameters(),
                                        *denoiser.model.lm_head.parameters()]
    dtype, c = weights[0].dtype, denoiser.model.config
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    big = torch.empty(2 ** 28 if device.type == "cuda" else 2 ** 26, device=device)
    per_s = 2 * n ** 3 / min(seconds(lambda: a @ a, device) for _ in range(repeats))
    copy = min(seconds(lambda: big.clone(), device) for _ in range(repeats))
    bytes_per_s = 8 * big.numel() / copy
    read = sum(w.numel() * w.element_size() for w in weights) / bytes_per_s
    layers = sum(w.numel() for w in denoiser.model.base_model.layers.parameters())
    operations = (2 * L * layers + 4 * L * L * c.hidden_size * c.num_hidden_layers
                  + 2 * asked * c.hidden_size * c.vocab_size)
    fast = make_faster(build(shape, device, dtype))

    def median(f):
        f(), f(), f()
        return statistics.median(seconds(f, device) for _ in range(repeats))

    plain, window = (forms(denoiser, L, 1)[k] for k in ("plain", "dual window of 32"))
    return dict(tera_per_s=per_s / 1e12, gb_per_s=bytes_per_s / 1e9,
                full=median(plain) / max(operations / per_s, read),
                window=median(window) / read,
                window_compiled=median(forms(fast, L, 1)["dual window of 32"]) / read)


def peak(f, device):
    """The most memory that f() holds at once beyond what was there, in bytes."""
    if str(device).startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        f()
    level = most = 0
    for e in p.profiler.kineto_results.events():
        if e.name() == "[memory]":
            level += e.nbytes()
            most = max(most, level)
    return most


def head(device, repeats, B=1, L=128, V=126_464, asked=32):
    """Token and confidence of the asked rows, and of all, against the whole in float64."""
    g = torch.Generator(device).manual_seed(0)
    logits = torch.randn(B, L, V, generator=g, device=device)
    some, every = logits[:, -asked:].flatten(0, 1), logits.flatten(0, 1)

    def textbook():
        p = logits.to(torch.float64).softmax(-1)
        x0 = logits.argmax(-1)
        return x0, p.gather(-1, x0[..., None])

    def asked_rows():
        return dlm_spec.predict(some)

    def all_rows():
        return dlm_spec.predict(every)

    return dict(faster=ratio(textbook, asked_rows, device, repeats),
                faster_same_rows=ratio(textbook, all_rows, device, repeats),
                mib=peak(asked_rows, device) / 2 ** 20,
                mib_textbook=peak(textbook, device) / 2 ** 20)


class Enough(Exception):
    """Ends a decode from its callback."""


def cover_step(denoiser, L, B, repeats, G=64):
    """COVER's third and fourth step (the first two have no seeds) against plain forwards."""
    device = denoiser.device
    g = torch.Generator(device).manual_seed(1)
    prompt = torch.randint(0, denoiser.mask_id, (B, L - G), generator=g, device=device)
    x = torch.cat([prompt, prompt.new_full((B, G), denoiser.mask_id)], 1)
    ask, found = x == denoiser.mask_id, []
    denoiser(x, ask)
    for _ in range(repeats):
        plain, times = seconds(lambda: denoiser(x, ask), device), []

        def clock(step, times=times):
            times.append(now(device))
            if len(times) == 4:
                raise Enough

        with contextlib.suppress(Enough):
            dlm_spec.sample_cover(denoiser, prompt, gen_length=G, block_length=G,
                                  callback=clock)
        found.append((plain, (times[3] - times[1]) / 2 / plain))
    plain, step = zip(*found)
    return dict(seconds=statistics.median(plain), step=spread(step))


def scaling(denoiser, shape, repeats):
    """A COVER step and a plain forward over L, B and V: seconds of this, and the ratio."""
    lengths, batches = (256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16, 32)
    found = {"L": {L: cover_step(denoiser, L, 1, repeats) for L in lengths},
             "B": {B: cover_step(denoiser, 128, B, repeats) for B in batches}, "V": {}}
    dtype = next(denoiser.model.parameters()).dtype
    for V in (8192, 32768, 126464):
        found["V"][V] = cover_step(build(shape, denoiser.device, dtype, V), 256, 1, repeats)
    return found


def speed(device, repeats, n=8, G=64):
    """Tokens per second of a batch of MiniMath problems, against one token per forward."""
    denoiser = dlm_spec.load_denoiser(device=device, dtype=torch.float32)
    problems = tasks.problems("math", "validation", n)
    prompts, mask = denoiser.encode([p.prompt for p in problems])
    calls = {name: experiments.call_of(experiments.settings()[name], G, G) for name in SPEED}
    found = {name: [] for name in SPEED}
    for _ in range(repeats + 1):
        for name, (sampler, knobs) in calls.items():
            start = now(device)
            out = sampler(denoiser, prompts, attention_mask=mask, **knobs)
            tokens = float((out.tokens_per_forward * out.nfe).sum())
            found[name].append(tokens / (now(device) - start))
    one = found[SPEED[0]]
    return {name: spread([r / base for r, base in zip(rates[1:], one[1:])])
            for name, rates in found.items()}


def batch(device, repeats, n=8, G=64):
    """Rows per second in a batch of n against one by one."""
    denoiser = dlm_spec.load_denoiser(device=device, dtype=torch.float32)
    problems = tasks.problems("math", "validation", n)
    prompts, mask = denoiser.encode([p.prompt for p in problems])

    def decode(prompts, mask=None):
        dlm_spec.sample_llada(denoiser, prompts, attention_mask=mask, gen_length=G, steps=16)

    rows = [p[m] for p, m in zip(prompts, mask)]
    return ratio(lambda: [decode(row) for row in rows], lambda: decode(prompts, mask),
                 device, repeats)


PARTS = ("overhead", "kinds", "compiled", "roofline", "head", "scaling", "speed", "batch")


def main(argv=None):
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=SHAPES, default="medium")
    cli.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cli.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    cli.add_argument("--threads", type=int, help="of a CPU; 1 measures CPU time")
    cli.add_argument("--repeats", type=int, default=5)
    cli.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    cli.add_argument("--json", type=Path, help="what is there of other parts is kept")
    args = cli.parse_args(argv)
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    denoiser = build(args.shape, args.device, getattr(torch, args.dtype))
    prompt = torch.randint(0, denoiser.mask_id, (1, 224), device=denoiser.device)
    denoiser(prompt, prompt >= 0)       # a first forward is slow
    fewer = max(args.repeats // 2, 1)
    measure = {
        "overhead": lambda: {label: overhead(denoiser, label, prompt, 32, fewer)
                             for label in SAMPLERS},
        "kinds": lambda: kinds(denoiser, 256, 1, args.repeats),
        "compiled": lambda: compiled(denoiser, args.shape, 256, 1, args.repeats),
        "roofline": lambda: roofline(denoiser, args.shape, args.repeats),
        "head": lambda: head(args.device, args.repeats),
        "scaling": lambda: scaling(denoiser, args.shape, fewer),
        "speed": lambda: speed(args.device, fewer), "batch": lambda: batch(args.device, fewer)}
    found = dict(shape=args.shape, dtype=args.dtype, device=args.device.split(":")[0],
                 threads=torch.get_num_threads(), torch=torch.__version__,
                 repeats=args.repeats)
    print(found)
    if args.json and args.json.exists() and {*args.parts} != {*PARTS}:
        # the conditions of these parts stand with them, those of the others stay
        old = json.loads(args.json.read_text())
        again = dict.fromkeys(args.parts, found)
        found = old | {"measured_again": old.get("measured_again", {}) | again}
    for part in args.parts:
        start = time.perf_counter()
        found[part] = measure[part]()
        print(f"{part} ({time.perf_counter() - start:.0f} s): "
              f"{json.dumps(found[part], indent=1)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
