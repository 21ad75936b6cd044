# SPDX-License-Identifier: MIT
"""Grade the embedded model: accuracy by family and by forwards, with 95 % Wilson intervals.

    python notebooks/mini/evaluate.py -n 1000                    # the table of the model card
    python notebooks/mini/evaluate.py --steps 16 --families math --split validation
"""
import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import tasks
import torch

import dlm_spec


def evaluate(denoiser, sampler, problems, *, batch_size=100, **knobs):
    """Decode and grade `problems` (of any families) with a `sample_*` function and its knobs.

    Returns a dict: n, right, accuracy, interval (95 % Wilson), nfe (mean per problem),
    positions, tokens_per_forward, seconds, marks (a list of bool), texts, revisions (the
    counts of `dlm_spec.revision_statistics`, summed).
    """
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].prompt))    # little padding
    texts, nfe, positions, speed = [None] * len(problems), 0, 0, 0.0
    revisions = Counter()
    start = time.perf_counter()
    for at in range(0, len(order), batch_size):
        some = order[at : at + batch_size]
        ids, mask = denoiser.encode([problems[i].prompt for i in some])
        out = sampler(denoiser, ids, attention_mask=mask, **knobs)
        for i, text in zip(some, denoiser.decode(out.generated)):
            texts[i] = text
        nfe, positions = nfe + int(out.nfe.sum()), positions + int(out.positions.sum())
        speed += float(out.tokens_per_forward.sum())
        found = dlm_spec.revision_statistics(out)
        revisions.update({k: v for k, v in found.items() if isinstance(v, int)})
    seconds, n = time.perf_counter() - start, len(problems)
    marks = tasks.grade_all(problems, texts)
    return dict(n=n, right=sum(marks), accuracy=sum(marks) / n,
                interval=tasks.wilson(sum(marks), n), nfe=nfe / n, positions=positions / n,
                tokens_per_forward=speed / n, seconds=seconds, marks=marks, texts=texts,
                revisions=dict(revisions))


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("-n", type=int, default=200, help="held-out problems per family")
    cli.add_argument("--model", help="model folder (default: the embedded model)")
    cli.add_argument("--split", choices=("validation", "test"), default="test")
    cli.add_argument("--families", nargs="+", choices=tasks.FAMILIES, default=tasks.FAMILIES)
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--block-length", type=int)
    cli.add_argument("--steps", type=int, nargs="+", default=[64, 16], help="forwards per problem")
    cli.add_argument("--batch", type=int, default=100)
    cli.add_argument("--json", type=Path, help="write the figures here as well")
    args = cli.parse_args()
    denoiser, rows = dlm_spec.load_denoiser(args.model), []
    for family in args.families:
        problems = tasks.problems(family, args.split, args.n)
        for steps in args.steps:
            r = evaluate(denoiser, dlm_spec.sample_llada, problems, batch_size=args.batch,
                         steps=steps, gen_length=args.gen_length, block_length=args.block_length)
            low, high = r["interval"]
            rows.append({"family": family, "steps": steps,
                         **{k: r[k] for k in r if k not in ("marks", "texts", "revisions")}})
            print(f"{family:7s} {steps:3d} steps  {r['right']}/{r['n']} = "
                  f"{100 * r['accuracy']:.1f} %  [{100 * low:.1f}, {100 * high:.1f}]  "
                  f"{r['seconds']:.0f} s  ({torch.get_num_threads()} threads)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
