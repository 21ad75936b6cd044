# SPDX-License-Identifier: MIT
"""Every sampler on a LLaDA-8B-shaped model with random weights on a CUDA device, in bf16.

    python tests/gpu_check.py --json gpu.json       # minutes; without a device it says so
    python tests/gpu_check.py --compile             # and some of them by CUDA graphs
    python tests/gpu_check.py --device cpu --shape mini --gen-length 8  # every line, anywhere

Checks that no mask is left, that confidences are finite, and that COVER's dual view matches a
slow reference (one softmax per view), in one layer and in a whole forward; and counts forwards,
tokens per second, peak memory, and how often a forward makes the host wait, with the lines
that do (waits.py).
"""
import argparse
import json
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "notebooks")]
import benchmark
from command_line import named_knobs
from cuda_graphs import CudaGraphs
from waits import waits

import dlm_spec
from dlm_spec import Denoiser, DualView, KVCache, sdpa, windowed


class ByDefinition:
    """Stands in for a KVCache and says what the dual view is: all see the stored keys and
    values k[layer], v[layer] of `seeds` (B, L); a seed sees its own fresh ones. In `dtype`."""

    def __init__(self, seeds, k, v, dtype=torch.float32):
        self.seeds, self.k, self.v, self.dtype = seeds, k, v, dtype

    def begin(self, rows, columns, tokens):
        """Nothing to remember; the model is to see the tokens as they are."""
        return tokens

    def attend(self, layer, q, k, v, mask, scaling):
        """See KVCache.attend."""
        held, (new, old) = self.seeds[:, None, :, None], (
            (k, v), (self.k.get(layer, k), self.v.get(layer, v)))
        seen = [torch.where(held, b, a).to(self.dtype) for a, b in zip(new, old)]
        out = sdpa(q.to(self.dtype), *seen, mask, scaling)
        for i in self.seeds.any(0).nonzero()[:, 0].tolist():
            own = [s.clone() for s in seen]
            for o, a in zip(own, new):
                o[:, :, i] = a[:, :, i].to(self.dtype)
            alone = sdpa(q[:, :, i:i + 1].to(self.dtype), *own, mask, scaling)
            out[:, :, i:i + 1] = torch.where(self.seeds[:, i, None, None, None], alone,
                                             out[:, :, i:i + 1])
        return out.to(q.dtype)


def layer_error(dtype, device, B=2, H=32, L=512, d=128):
    """One layer's dual view against its definition in float64, the largest difference.
    The seeds' stored keys are their own queries: uncorrected they would see little else."""
    g = torch.Generator(device).manual_seed(0)
    q, k, v, old_k, old_v = (torch.randn(B, H, L, d, generator=g, device=device, dtype=dtype)
                             for _ in range(5))
    x = torch.zeros(B, L, dtype=torch.long, device=device)
    seeds = torch.zeros_like(x, dtype=torch.bool)
    seeds[:, [L // 5, L // 2, L // 2 + 1]] = True
    old_k = torch.where(seeds[:, None, :, None], q, old_k)
    kv = KVCache(x)
    kv.k[0], kv.v[0], kv.filled = old_k, old_v, True
    view = DualView(Denoiser(lambda **_: None, 1), x, None, kv, seeds)
    view.begin(torch.arange(B, device=device), None, x)
    got = view.attend(0, q, k, v, None, None)
    definition = ByDefinition(seeds, {0: old_k}, {0: old_v}, torch.float64)
    want = definition.attend(0, q.double(), k, v, None, None)
    return float((got.double() - want).abs().max())


def forward_error(denoiser, L=160):
    """Logits of a forward against those with attention by its definition in float32: the mean
    difference as a share of their standard deviation, with seeds and without."""
    g, M = torch.Generator().manual_seed(0), denoiser.mask_id
    x = torch.randint(0, M, (2, L), generator=g).to(denoiser.device)
    visible, column = torch.ones_like(x, dtype=torch.bool), torch.arange(L, device=x.device)
    visible[1, :L // 4] = False                             # the second prompt is shorter
    masks = (column >= L // 2).expand(2, L)
    seeds = masks & (column % 9 == 4) & (column < L - 20)
    x = x.masked_fill(masks & ~seeds, M)
    kv = KVCache(x)
    windowed(denoiser, x, masks, visible, kv=kv)            # stores the seeds' keys and values
    found = []
    for checked, stored in ((seeds, (kv.k, kv.v)), (seeds & False, ({}, {}))):
        want = windowed(denoiser, x.masked_fill(checked, M), masks, visible,
                        kv=ByDefinition(checked, *map(dict, stored)))[0]
        got = windowed(denoiser, x, masks, visible,
                       kv=DualView(denoiser, x, visible, kv, checked))[0]
        at = got.isfinite()
        found.append(float((got[at] - want[at]).float().abs().mean() / want[at].float().std()))
    return found


@contextmanager
def driver_count(device):
    """A Counter, "seen": how often a CUDA driver says that the host waited; empty on a CPU."""
    count = Counter()
    if not str(device).startswith("cuda"):
        yield count
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    count["seen"] = sum("synchronizing" in str(w.message) for w in said)


def measure(denoiser, label, name, knobs, lengths, G, count=True):
    """One sampler on prompts of these lengths: a row of the table, a dict, and the tokens.
    count: count the waits, too. (A forward that is watched for them is never compiled.)"""
    g, device = torch.Generator().manual_seed(1), denoiser.device
    prompts = [torch.randint(0, denoiser.mask_id, (n,), generator=g) for n in lengths]

    def decode():
        sampler = dlm_spec.SAMPLERS[name]
        return sampler(denoiser, prompts, gen_length=G, block_length=min(32, G),
                       **named_knobs(sampler, knobs))

    found, driver = Counter(), Counter()
    if count:
        with driver_count(device) as driver, waits() as found:  # the warm-up too
            decode()
    else:
        decode()
        decode()        # what comes for the second time is captured
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    out = decode()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert (out.sequences != denoiser.mask_id).all(), name
    assert out.commit_confidence.isfinite().all(), name
    return dict(sampler=label, B=len(lengths), forwards=out.calls, seconds=seconds,
                forwards_per_s=out.calls / seconds, tokens_per_s=len(lengths) * G / seconds,
                peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30 if cuda else None,
                waits_per_forward=found.total() / out.calls if count else None,
                driver_waits_per_forward=(driver["seen"] / out.calls if cuda and count
                                          else None), revisions=len(out.revisions),
                where={f"{line} {name}": n for (line, name), n in found.most_common()}
                ), out.sequences


def show(row, width=25):
    """A row of the table, or its head, as a str."""
    return "  ".join(f"{v:>{width}.2f}" if isinstance(v, float) else
                     f"{'-' if v is None else v!s:>{width}.{width}}" for v in row)


def main(argv=None):
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=benchmark.SHAPES, default="llada-8b")
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--compile", action="store_true",
                     help="compare with faster layers: CUDA graphs, on a CPU torch.compile")
    cli.add_argument("--json", type=Path)
    args, begun = cli.parse_args(argv), time.perf_counter()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here")
        return None
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    with torch.no_grad():
        dtype = getattr(torch, args.dtype)
        denoiser = benchmark.build(args.shape, args.device, dtype)
        c = denoiser.model.config
        layer = layer_error(dtype, args.device, H=c.num_attention_heads, d=c.head_dim)
        seeds, plain = forward_error(denoiser)
        print(f"{device}, torch {torch.__version__}, {args.shape}, {args.dtype}: dual view "
              f"off by {layer:.4f} in a layer, {seeds:.1e} of the logits (a plain forward "
              f"{plain:.1e})")
        assert layer < 0.02, layer
        assert seeds < 2 * plain + 1e-5, (seeds, plain)
        rows, tokens, todo = [], {}, [(label, "") for label in benchmark.SAMPLERS]
        if args.compile:
            todo += [(label, ", compiled") for label in ("llada", "fast_dllm, dual", "cover")]
        for label, how in todo:
            name, knobs = benchmark.SAMPLERS[label]
            if how and not rows[-1]["sampler"].endswith(how):
                benchmark.make_faster(denoiser)
            for lengths in ([40], [40, 23, 31, 9]):
                row, x = measure(denoiser, label + how, name, knobs, lengths, args.gen_length,
                                 count=not how)
                eager = tokens.setdefault((label, len(lengths)), x)
                row["same_tokens"] = float((x == eager).float().mean())
                graphs = isinstance(denoiser.model.base_model.forward, CudaGraphs)
                assert row["same_tokens"] == 1 or not graphs, (label, "graphs change tokens")
                rows.append(row)
                cells = {k: v for k, v in row.items() if k != "where"}
                if len(rows) == 1:
                    print(show(k.replace("_per_", "/") for k in cells))
                print(show(cells.values()), flush=True)
    result = dict(device=device, torch=torch.__version__, shape=args.shape, dtype=args.dtype,
                  layer_error=layer, forward_error=seeds, plain_error=plain, rows=rows,
                  minutes=(time.perf_counter() - begun) / 60)
    print(f"{result['minutes']:.1f} minutes in all")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
