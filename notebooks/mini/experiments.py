# SPDX-License-Identifier: MIT
"""The experiments of notebooks 03 and 04: samplers against each other on the embedded model.

    python notebooks/mini/experiments.py sweep -n 300        # choose knobs, on the validation split
    python notebooks/mini/experiments.py test -n 2000        # the chosen ones, on the test split
    python notebooks/mini/experiments.py table               # what there is, in markdown

Results go into notebooks/results/<split>_<family>.json, a record per sampler and knobs with
one mark (0 or 1) per problem, so that every comparison can be paired. A run that was stopped
goes on where it was; records of at least n problems are kept, shorter ones are continued.
"""
import argparse
import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import command_line
import tasks
from evaluate import evaluate

import dlm_spec

RESULTS = HERE.parent / "results"
G = 64
THRESHOLDS = (0.4, 0.5, 0.6, 0.7, 0.8)
# COVER with two additions of this module (spacing, closing), and thresholds that replace
# sooner
CHECKED = dict(spacing=4, closing=8, tau_replace=0.5, tau_remask=0.5)
# COVER that re-masks what it doubts instead of replacing it (unless the new token has a
# probability of 1), without a limit per forward, and commits at most as many tokens per
# forward as WINO does
REMASKING = dict(tau_replace=1.0, tau_remask=0.5, remask_limit=False, commit_cap=True, closing=2,
                 max_seeds=16, seed_share=0.5, max_checks=4)


def sweep():
    """Settings to choose from, as (sampler, knobs)."""
    yield from (("fast_dllm", dict(threshold=t)) for t in (*THRESHOLDS, 0.9))
    yield from (("wino", dict(threshold=t)) for t in (0.3, *THRESHOLDS[:4]))
    yield from (("saber", dict(n=n)) for n in (1, 2, 4))
    yield from (("cover", dict(threshold=t)) for t in THRESHOLDS)
    yield from (("cover", dict(threshold=t, **CHECKED)) for t in THRESHOLDS)
    yield from (("cover", dict(threshold=t, **REMASKING)) for t in THRESHOLDS[:4])
    yield from (("cover", dict(threshold=0.4) | REMASKING | more) for more in (
        dict(closing=1), dict(closing=4), dict(remask_limit=True), dict(commit_cap=False),
        dict(tau_replace=0.5), dict(max_seeds=64, seed_share=1.0, max_checks=8)))
    for more in (dict(closing=0), dict(spacing=0), dict(tau_replace=0.9, tau_remask=0.2),
                 dict(seed_share=1.0, max_seeds=16), dict(cache="prefix"),
                 dict(cache="prefix", refresh=2)):
        yield "cover", dict(threshold=0.6) | CHECKED | more
    for cache in (None, "dual"):
        yield from (("dual_diffusion", dict(threshold=t, draft_steps=2, cache=cache))
                    for t in THRESHOLDS[:4])
    for more in (dict(draft_steps=1), dict(draft_steps=4), dict(draft_steps=2, adaptive=True),
                 dict(draft_steps=2, view="cover"), dict(draft_steps=2, view="visible")):
        yield "dual_diffusion", dict(threshold=0.5, cache=None) | more
    yield from (("fast_dllm", dict(threshold=t, cache="dual")) for t in (0.5, 0.7, 0.9))


DUAL, DRAFT = dict(cache="dual"), dict(draft_steps=2)
CHOSEN = [      # one setting of each method, for all families
    ("llada", dict(steps=G)), ("llada", dict(steps=16)), ("cover", dict(threshold=0.7, **CHECKED)),
    ("wino", dict(threshold=0.6)), ("fast_dllm", dict(threshold=0.9)),
    ("fast_dllm", dict(threshold=0.6)), ("fast_dllm", dict(threshold=0.6, **DUAL)),
    ("dual_diffusion", dict(threshold=0.5, cache=None, **DRAFT)),
    ("dual_diffusion", dict(threshold=0.6, **DUAL, **DRAFT)),
    ("cover", dict(threshold=0.7, cache="prefix", refresh=2, **CHECKED)),
    ("wino", dict(threshold=0.4)), ("cover", dict(threshold=0.6)),
    ("cover", dict(threshold=0.7, **REMASKING))]
NAMES = {"llada": "LLaDA", "fast_dllm": "threshold", "dkv": "dKV", "wino": "WINO",
         "dual_diffusion": "DualDiffusion", "saber": "Saber", "cover": "COVER"}
# forwards against accuracy, for notebook 01
STEPS = [("llada", dict(steps=steps)) for steps in (4, 8, 16, 32, G)]
CURVES = [      # more settings of each, for cost against accuracy on MiniMath
    *(("cover", dict(threshold=t, **CHECKED)) for t in (0.4, 0.5, 0.6)),
    *(("cover", dict(threshold=t, **REMASKING)) for t in (0.4, 0.5, 0.6)),
    ("fast_dllm", dict(threshold=0.7)), ("wino", dict(threshold=0.5)),
    *(("fast_dllm", dict(threshold=t, **DUAL)) for t in (0.7, 0.9)),
    *(("saber", dict(n=n)) for n in (4, 8)),
    ("dual_diffusion", dict(threshold=0.6, cache=None, **DRAFT)), ("cover", dict(threshold=0.5)),
    ("dual_diffusion", dict(threshold=0.7, **DUAL, **DRAFT)), ("fast_dllm", dict(threshold=0.5)),
    ("wino", dict(threshold=0.3)), ("dual_diffusion", dict(threshold=0.4, cache=None, **DRAFT))]


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
            sampler = dlm_spec.SAMPLERS[name]
            given = command_line.named_knobs(sampler, {"gen_length": G, "block_length": G} | knobs)
            r = evaluate(denoiser, sampler, problems[so_far["n"]:], batch_size=batch_size, **given)
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
    """The record of the problems of record `a` (n may be 0) and of `b`, a result of
    `evaluate`."""
    n = a["n"] + b["n"]
    marks = a["marks"] + "".join("01"[m] for m in b["marks"])
    sums = {k: a.get(k, 0) + b[k] for k in ("right", "seconds")}
    means = {k: (a.get(k, 0) * a["n"] + b[k] * b["n"]) / n for k in ("nfe", "positions")}
    return dict(n=n, **sums, **means, marks=marks,
                revisions={k: a.get("revisions", {}).get(k, 0) + v
                           for k, v in b["revisions"].items()})


def read(split, family):
    """The records there are, those of the most problems alone."""
    path = RESULTS / f"{split}_{family}.json"
    records = json.loads(path.read_text()) if path.exists() else []
    return [r for r in records if r["n"] == max(o["n"] for o in records)]


def curves(split, family):
    """The records by decoder, cheapest first: {name: [record, ...]}."""
    out = {}
    for r in sorted(read(split, family), key=lambda r: r["nfe"]):
        out.setdefault(decoder(r), []).append(r)
    return out


def decoder(r):
    """A record's decoder and settings in words, without the threshold."""
    k, name = r["knobs"], NAMES[r["sampler"]]
    how = "re-masking" if k.get("commit_cap") else "closing" if k.get("closing") else ""
    return ", ".join([name, *([how] if how else []),
                      *([f"{k['cache']} cache"] if k.get("cache") else [])])


def setting(r):
    """A record's threshold (or n, or steps) as it is written in a table."""
    k = r["knobs"]
    return f"{k['threshold']:g}"[1:] if "threshold" in k else f"n {k['n']}" if "n" in k else (
        f"{G // k['steps']} per forward")


def marks_at(curve, cost, value):
    """The marks of a decoder at a cost ("nfe" or "positions"), in proportion from those of
    its two records on either side; None where it has none on one side."""
    curve = sorted(curve, key=lambda r: r[cost])
    for low, high in itertools.pairwise(curve):
        if low[cost] <= value <= high[cost]:
            w = (value - low[cost]) / (high[cost] - low[cost])
            return [(1 - w) * int(a) + w * int(b) for a, b in zip(low["marks"], high["marks"])]
    return None


def paired(a, b):
    """Difference of two lists of marks in points, and its 95 % interval: (d, low, high)."""
    d = [float(x) - float(y) for x, y in zip(a, b)]
    n, mean = len(d), sum(d) / len(d)
    half = 1.96 * ((sum(v * v for v in d) / n - mean * mean) / n) ** .5
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def at_equal_cost(name, rivals, cost, family="math"):
    """A line for each test record of the decoder `name`: its points above each of `rivals` at
    the same cost ("nfe" or "positions"), with paired 95 % intervals, where a rival was
    measured on both sides of that cost."""
    found, lines = curves("test", family), []
    for r in found.get(name, []):
        marks = {rival: marks_at(found.get(rival, []), cost, r[cost]) for rival in rivals}
        points = [f"{rival} {d:+.1f} [{low:+.1f}, {high:+.1f}]" for rival, m in marks.items() if m
                  for d, low, high in [paired(r["marks"], m)]]
        lines.append(f"{name} {setting(r)}, {r[cost]:.{1 if cost == 'nfe' else 0}f}: "
                     + ("; ".join(points) or "none has settings on both sides"))
    return lines


def table(families=tasks.FAMILIES, samplers=tuple(NAMES)):
    """The records of the test split as a markdown table: accuracy, paired difference from one
    token per forward, forwards, positions, share of effective revisions."""
    lines = []
    for family in families:
        records = read("test", family)
        base = next(r for r in records if r["knobs"] == {"steps": G})
        lines += [f"\n{family}, n = {base['n']}\n", "| decoder | accuracy | difference | forwards "
                  "| positions | effective revisions |", "|---|---|---|---|---|---|"]
        for r in sorted(records, key=lambda r: (decoder(r), r["nfe"])):
            if r["sampler"] not in samplers:
                continue
            low, high = (100 * v for v in tasks.wilson(r["right"], r["n"]))
            d, e = paired(r["marks"], base["marks"]), r["revisions"]
            lines.append(f"| {decoder(r)} {setting(r)} | {100 * r['right'] / r['n']:.1f} % "
                         f"[{low:.1f}, {high:.1f}] | {d[0]:+.1f} [{d[1]:+.1f}, {d[2]:+.1f}] | "
                         f"{r['nfe']:.1f} | {r['positions']:.0f} | "
                         + (f"{100 * (1 - e['flip_flops'] / e['events']):.0f} % of {e['events']} |"
                            if e.get("events") else "|"))
    return "\n".join(lines)


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("sweep", "test", "table"))
    cli.add_argument("-n", type=int, default=300, help="problems per family")
    cli.add_argument("--families", nargs="+", choices=tasks.FAMILIES, default=tasks.FAMILIES)
    cli.add_argument("--samplers", nargs="+", choices=sorted(dlm_spec.SAMPLERS),
                     default=sorted(dlm_spec.SAMPLERS))
    args = cli.parse_args()
    if args.what == "table":
        return print(table(args.families, args.samplers))
    for settings, families in ([([*sweep()], args.families)] if args.what == "sweep" else
                               [(CHOSEN, args.families),
                                (CURVES, {"math"} & {*args.families})]):
        run([s for s in settings if s[0] in args.samplers],
            "validation" if args.what == "sweep" else "test", args.n, families)


if __name__ == "__main__":
    main()
