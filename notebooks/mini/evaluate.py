# SPDX-License-Identifier: MIT
"""Grade the embedded model: accuracy by family and by forwards, with 95 % intervals.

    python notebooks/mini/evaluate.py -n 1000                    # the table of the model card
    python notebooks/mini/evaluate.py --gen-length 256 --exam 4 --split validation
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
    """Decode and grade `problems` (or exams) with a `sample_*` function and its keywords.

    Returns a dict: n, right, accuracy, interval (95 %), counted by problem, an exam being
    several; nfe, positions and tokens (before the first end of text), means per prompt;
    seconds (processor time of all); marks (a list of bool), texts, revisions (the counts of
    `dlm_spec.revision_statistics`, summed).
    """
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].prompt))    # little padding
    texts, total, revisions = [None] * len(problems), Counter(), Counter()
    start = time.process_time()
    for at in range(0, len(order), batch_size):
        some = order[at : at + batch_size]
        ids, mask = denoiser.encode([problems[i].prompt for i in some])
        out = sampler(denoiser, ids, attention_mask=mask, **knobs)
        for i, text in zip(some, denoiser.decode(out.generated)):
            texts[i] = text
        total.update(nfe=int(out.nfe.sum()), positions=int(out.positions.sum()),
                     tokens=round(float((out.tokens_per_forward * out.nfe).sum())))
        found = dlm_spec.revision_statistics(out)
        revisions.update({k: v for k, v in found.items() if isinstance(v, int)})
    seconds = time.process_time() - start
    marks = tasks.grade_all(problems, texts)
    return dict(n=len(marks), right=sum(marks), accuracy=sum(marks) / len(marks),
                interval=tasks.wilson(sum(marks), len(marks)), seconds=seconds, marks=marks,
                texts=texts, revisions=dict(revisions),
                **{k: v / len(problems) for k, v in total.items()})


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("-n", type=int, default=200, help="held-out prompts per family")
    cli.add_argument("--model", help="model folder (default: the embedded model)")
    cli.add_argument("--split", choices=("validation", "test"), default="test")
    cli.add_argument("--families", nargs="+", choices=tasks.FAMILIES, default=tasks.FAMILIES)
    cli.add_argument("--exam", type=int, default=1, help="problems per prompt")
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--block-length", type=int)
    cli.add_argument("--per-forward", type=int, nargs="+", default=[1, 4],
                     help="tokens committed per forward")
    cli.add_argument("--batch", type=int, default=100)
    cli.add_argument("--json", type=Path, help="write the figures here as well")
    args = cli.parse_args()
    denoiser, rows = dlm_spec.load_denoiser(args.model), []
    for family in args.families:
        problems = (tasks.problems(family, args.split, args.n) if args.exam == 1 else
                    tasks.exams(family, args.split, args.n, args.exam))
        for per_forward in args.per_forward:
            r = evaluate(denoiser, dlm_spec.sample_llada, problems, batch_size=args.batch,
                         steps=args.gen_length // per_forward, gen_length=args.gen_length,
                         block_length=args.block_length)
            low, high = r["interval"]
            rows.append({"family": family, "per_forward": per_forward,
                         **{k: r[k] for k in r if k not in ("marks", "texts", "revisions")}})
            print(f"{family:7s} {per_forward:3d} per forward  {r['right']}/{r['n']} = "
                  f"{100 * r['accuracy']:.1f} %  [{100 * low:.1f}, {100 * high:.1f}]  "
                  f"{r['seconds']:.0f} s  ({torch.get_num_threads()} threads)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
