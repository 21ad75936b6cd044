# SPDX-License-Identifier: MIT
"""The experiments of notebooks 03 and 04: samplers against each other on the embedded model.

    python notebooks/mini/experiments.py sweep -n 300        # choose knobs, on the validation split
    python notebooks/mini/experiments.py test -n 2000        # the chosen ones, on the test split

Results go into notebooks/results/<split>_<family>.json, a record per sampler and knobs with one
mark (0 or 1) per problem, so that every comparison can be paired. A run that was stopped goes on
where it was; records of at least n problems are kept, shorter ones are continued.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import tasks
from evaluate import evaluate

import dlm_spec

RESULTS = HERE.parent / "results"
G = 64
THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8)
# COVER with our two additions, and outcomes that replace sooner
CHECKED = dict(spacing=4, closing=8, tau_replace=0.5, tau_remask=0.5)


def sweep():
    """Settings to choose from, as (sampler, knobs)."""
    yield from (("fast_dllm", dict(threshold=t)) for t in (*THRESHOLDS, 0.9))
    yield from (("wino", dict(threshold=t)) for t in (0.3, *THRESHOLDS[:4]))
    yield from (("saber", dict(n=n)) for n in (1, 2, 4))
    yield from (("cover", dict(threshold=t)) for t in THRESHOLDS)
    yield from (("cover", dict(threshold=t, **CHECKED)) for t in THRESHOLDS)
    for more in (dict(spacing=4), dict(tau_remask=0.5), dict(uncertainty="commit"),
                 dict(seed_share=1.0, max_seeds=16), dict(tau_replace=0.7),
                 dict(cache="prefix"), dict(cache="prefix", refresh=2)):
        yield "cover", dict(threshold=0.6) | (CHECKED if "spacing" not in more else {}) | more
    for cache in (None, "dual"):
        yield from (("dual_diffusion", dict(threshold=t, draft_steps=2, cache=cache))
                    for t in THRESHOLDS[:4])
    for more in (dict(draft_steps=1), dict(draft_steps=4), dict(draft_steps=2, adaptive=True),
                 dict(draft_steps=2, view="cover"), dict(draft_steps=2, view="visible")):
        yield "dual_diffusion", dict(threshold=0.5, cache=None) | more
    yield from (("fast_dllm", dict(threshold=t, cache="dual")) for t in (0.5, 0.7, 0.9))


DUAL, DRAFT = dict(cache="dual"), dict(draft_steps=2)
CHOSEN = [      # one setting of each method, for all families
    ("llada", dict(steps=G)), ("llada", dict(steps=16)), ("cover", dict(threshold=0.6, **CHECKED)),
    ("wino", dict(threshold=0.6)), ("saber", dict(n=2)), ("fast_dllm", dict(threshold=0.9)),
    ("fast_dllm", dict(threshold=0.6)), ("fast_dllm", dict(threshold=0.6, **DUAL)),
    ("dual_diffusion", dict(threshold=0.5, cache=None, **DRAFT)),
    ("dual_diffusion", dict(threshold=0.6, **DUAL, **DRAFT)), ("cover", dict(threshold=0.6)),
    ("cover", dict(threshold=0.6, cache="prefix", refresh=2, **CHECKED)),
    ("wino", dict(threshold=0.4)), ("cover", dict(threshold=0.4, **CHECKED))]
CURVES = [      # more settings of each, for cost against accuracy on MiniMath
    *(("cover", dict(threshold=t, **CHECKED)) for t in (0.5, 0.7)),
    *(("fast_dllm", dict(threshold=t)) for t in (0.5, 0.7, 0.8)), ("wino", dict(threshold=0.5)),
    *(("fast_dllm", dict(threshold=t, **DUAL)) for t in (0.5, 0.7, 0.9)),
    *(("dual_diffusion", dict(threshold=t, cache=None, **DRAFT)) for t in (0.4, 0.6)),
    *(("dual_diffusion", dict(threshold=t, **DUAL, **DRAFT)) for t in (0.5, 0.7)),
    ("cover", dict(threshold=0.5)), ("saber", dict(n=4)), ("wino", dict(threshold=0.3))]


def run(settings, split, n, families=tasks.FAMILIES, batch_size=100):
    """Evaluate settings on n problems of each family; all records so far come back."""
    RESULTS.mkdir(exist_ok=True)
    denoiser, everything = dlm_spec.load_denoiser(), []
    for family in families:
        path, problems = RESULTS / f"{split}_{family}.json", tasks.problems(family, split, n)
        records = json.loads(path.read_text()) if path.exists() else []
        for name, knobs in settings:
            same = [r for r in records if (r["sampler"], r["knobs"]) == (name, knobs)]
            so_far = same[0] if same else dict(n=0, marks="")
            if so_far["n"] >= n:
                continue
            full = {"gen_length": G, "block_length": G} | knobs
            r = evaluate(denoiser, dlm_spec.SAMPLERS[name], problems[so_far["n"]:],
                         batch_size=batch_size, **full)
            records = [old for old in records if old not in same]
            records.append({"family": family, "sampler": name, "knobs": knobs, "split": split,
                            **together(so_far, r)})
            tmp = path.with_suffix(".tmp")
            tmp.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            tmp.replace(path)
            r = records[-1]
            percent = 100 * r["right"] / r["n"]
            print(f"{family:6s} {name:14s} {json.dumps(knobs):60s} {percent:5.1f} % "
                  f"{r['nfe']:5.1f} forwards {r['positions']:6.0f} positions {r['seconds']:4.0f} s "
                  f"{r['revisions'].get('events', 0)} revisions", flush=True)
        everything += records
    return everything


def together(a, b):
    """The record of the problems of record `a` (n may be 0) and of `b`, a result of `evaluate`."""
    n = a["n"] + b["n"]
    marks = a["marks"] + "".join("01"[m] for m in b["marks"])
    sums = {k: a.get(k, 0) + b[k] for k in ("right", "seconds")}
    means = {k: (a.get(k, 0) * a["n"] + b[k] * b["n"]) / n for k in ("nfe", "positions")}
    return dict(n=n, **sums, **means, marks=marks,
                revisions={k: a.get("revisions", {}).get(k, 0) + v
                           for k, v in b["revisions"].items()})


def paired(a, b):
    """Difference of two records' accuracies in points, and its 95 % interval: (d, low, high)."""
    n = min(len(a["marks"]), len(b["marks"]))
    d = [int(x) - int(y) for x, y in zip(a["marks"][:n], b["marks"][:n])]
    mean = sum(d) / n
    half = 1.96 * ((sum(v * v for v in d) / n - mean * mean) / n) ** .5
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("sweep", "test"))
    cli.add_argument("-n", type=int, default=300, help="problems per family")
    cli.add_argument("--families", nargs="+", choices=tasks.FAMILIES, default=tasks.FAMILIES)
    cli.add_argument("--samplers", nargs="+", choices=sorted(dlm_spec.SAMPLERS),
                     default=sorted(dlm_spec.SAMPLERS))
    args = cli.parse_args()
    for settings, families in ([([*sweep()], args.families)] if args.what == "sweep" else
                               [(CHOSEN, args.families),
                                (CURVES, {"math"} & {*args.families})]):
        run([s for s in settings if s[0] in args.samplers],
            "validation" if args.what == "sweep" else "test", args.n, families)


if __name__ == "__main__":
    main()
