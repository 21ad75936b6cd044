# SPDX-License-Identifier: MIT
"""Every sampler on a LLaDA-8B-shaped model with random weights on a CUDA device, in bf16.

    python tests/gpu_check.py --json gpu.json        # minutes; says so and ends where there is none

Checks that nothing is masked or NaN, that COVER's dual view agrees with a forward per query in
plain torch, and counts forwards, tokens per second, peak memory and read-backs to the host.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import benchmark

import dlm_spec
from dlm_spec import KVCache, sdpa


def dual_view_error(dtype, device):
    """One layer's dual view against the definition: each query with keys and values of its own,
    in float64. The largest absolute difference."""
    g = torch.Generator(device).manual_seed(0)
    B, H, L, d, seeds = 2, 32, 512, 128, [100, 300, 301]
    q, k, v, old_k, old_v = (torch.randn(B, H, L, d, generator=g, device=device, dtype=dtype)
                             for _ in range(5))
    at = torch.zeros(B, L, dtype=torch.bool, device=device)
    at[:, seeds] = True
    visible, kv = torch.ones_like(at), KVCache()
    kv.k[0], kv.v[0] = old_k.clone(), old_v.clone()
    kv.begin(B, seeds=dlm_spec.dual_view(at, torch.zeros(B, L, dtype=torch.long, device=device),
                                         visible, False))
    got = kv.attend(0, q, k, v, None, None)
    memory = [torch.where(at[:, None, :, None], old, new).double()
              for old, new in ((old_k, k), (old_v, v))]
    want = sdpa(q.double(), *memory)
    for i in seeds:
        K, V = (m.clone() for m in memory)
        K[:, :, i], V[:, :, i] = k[:, :, i].double(), v[:, :, i].double()
        want[:, :, i] = sdpa(q[:, :, i:i + 1].double(), K, V)[:, :, 0]
    return float((got.double() - want).abs().max())


def read_backs(f):
    """How often f() copies something from the device to the host."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        f()
    return sum(e.count for e in p.key_averages() if "DtoH" in e.key)


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--shape", choices=benchmark.SHAPES, default="llada-8b")
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device here")
        return
    torch.set_grad_enabled(False)
    error = dual_view_error(torch.bfloat16, "cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; "
          f"dual view off by {error:.4f}")
    assert error < 0.02, error
    denoiser, rows = benchmark.build(args.shape, "cuda", torch.bfloat16), []
    for label, (name, knobs) in benchmark.SAMPLERS.items():
        for lengths in ([40], [40, 23, 31, 9]):
            g = torch.Generator().manual_seed(1)
            prompts = [torch.randint(0, denoiser.mask_id, (n,), generator=g) for n in lengths]

            def decode(prompts=prompts, name=name, knobs=knobs):
                return dlm_spec.SAMPLERS[name](denoiser, prompts, gen_length=args.gen_length,
                                               block_length=32, **knobs)

            decode()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            out = decode()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            assert (out.sequences != denoiser.mask_id).all()
            assert out.commit_confidence.isfinite().all()
            rows.append(dict(sampler=label, B=len(lengths), forwards=out.calls, seconds=seconds,
                             forwards_per_second=out.calls / seconds,
                             tokens_per_second=len(lengths) * args.gen_length / seconds,
                             peak_gib=torch.cuda.max_memory_allocated() / 2 ** 30,
                             read_backs_per_forward=read_backs(decode) / out.calls))
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                            for k, v in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(dict(device=torch.cuda.get_device_name(),
                                             torch=torch.__version__, dual_view_error=error,
                                             rows=rows), indent=1))


if __name__ == "__main__":
    main()
