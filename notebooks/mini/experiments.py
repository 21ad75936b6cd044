# SPDX-License-Identifier: MIT
"""The experiments of the notebooks: samplers against each other on the embedded model.

    python notebooks/mini/experiments.py run validation -n 300     # every setting, to choose from
    python notebooks/mini/experiments.py choose                    # by the rule of `choose`
    python notebooks/mini/experiments.py run test -n 2000          # every setting, once
    python notebooks/mini/experiments.py run validation -n 1000 --settings ablations
    python notebooks/mini/experiments.py run validation -n 100 --settings long --gen-length 256 \\
        --block-length 32 --exam 4
    python notebooks/mini/experiments.py table

Results go into notebooks/results/<split>_<family>_<length>[_<block length>].json, a record per
setting with one mark (0 or 1) per problem, so that every comparison can be paired. A run that
was stopped goes on where it was; records of at least n prompts are kept, shorter ones are
continued. Seconds are processor time of one thread (set OMP_NUM_THREADS=1).
"""
import argparse
import contextlib
import functools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import command_line
import tasks
import torch
from evaluate import evaluate

import dlm_spec

RESULTS = HERE.parent / "results"


class Setting(NamedTuple):
    """A row of a table: a decoder, what is varied in it, whose it is, and how it is run."""
    decoder: str
    value: str
    whose: str          # the paper whose method and numbers these are, or "ours"
    sampler: str
    knobs: dict


def settings():
    """All settings by name, as {name: Setting}; the thresholds are the same for all."""
    out = {}

    def add(name, decoder, value, whose, sampler, **knobs):
        out[name] = Setting(decoder, value, whose, sampler, knobs)

    for n, word in ((1, "one"), (2, "two"), (4, "four"), (8, "eight"), (16, "sixteen")):
        add(f"{word}-per-forward", "LLaDA", f"{n} per forward", "LLaDA", "llada", per_forward=n)
    for t in (.5, .6, .7, .8, .9):
        whose, t_ = "Fast-dLLM" if t == .9 else "Fast-dLLM, our threshold", f"{t:g}"[1:]
        add(f"threshold{t_}", "threshold", t_, whose, "fast_dllm", threshold=t)
        if t not in (.5, .8):
            for cache in ("prefix", "dual"):
                add(f"threshold{t_}-{cache}", f"threshold, {cache} cache", t_, whose, "fast_dllm",
                    threshold=t, cache=cache)
            add(f"dkv{t_}", "dKV", t_, "dKV-Cache, Fast-dLLM's rule", "dkv", threshold=t)
    add("dkv-one-per-forward", "dKV", "1 per forward", "dKV-Cache", "dkv", per_forward=1)
    # DualDiffusion as its paper words it: the verifier sees the draft as it is, K = 16, four
    # rounds; drafted with Fast-dLLM's dual cache or with dKV-Cache. The thresholds are ours.
    published = dict(view="visible", draft_steps=16, max_rounds=4, threshold=.9)
    for cache, words in (("dual", ""), ("dkv", ", dKV drafter")):
        for name, rule in (("trust", {}), ("kl", {}), ("confidence", dict(of="max"))):
            add(f"dual_diffusion-{name}" + "-dkv" * (cache == "dkv"),
                f"DualDiffusion, {name}{words}", "K 16, 4 rounds", "DualDiffusion, our thresholds",
                "dual_diffusion", **published, verify=name, cache=cache, **rule)
    # Then what we change, one thing at a time: fewer forwards per round and no limit on rounds;
    # the probability of the token; the token judged without itself (WINO's shadow block).
    changes = dict(K=dict(view="visible", verify="confidence", of="max"),
                   token=dict(view="visible", verify="confidence"),
                   out=dict(), cover=dict(view="cover"))
    words_of = dict(K="largest probability", token="probability of the token",
                    out="leave one out", cover="leave one out by COVER's view")
    for name, knobs in changes.items():
        whose = "ours, after WINO" if name == "out" else "ours"
        for t in (.5, .6, .7, .9) if name == "out" else (.6, .9):
            add(f"dual_diffusion-{name}{t:g}".replace("0.", "."),
                f"DualDiffusion, {words_of[name]}", f"{t:g}"[1:], whose, "dual_diffusion",
                draft_steps=2, threshold=t, **knobs)
    add("dual_diffusion-exact.5", "DualDiffusion, leave one out, no cache", ".5", "ours",
        "dual_diffusion", draft_steps=2, threshold=.5, cache=None)
    for name in ("token", "out"):
        add(f"dual_diffusion-{name}.9-dkv", f"DualDiffusion, {words_of[name]}, dKV drafter", ".9",
            "ours, after WINO" if name == "out" else "ours", "dual_diffusion", draft_steps=2,
            threshold=.9, cache="dkv", **changes[name])
    # And with a drafter that is another network: the model in the folder `small`.
    for t in (.6, .9):
        add(f"dual_diffusion-small{t:g}".replace("0.", "."),
            "DualDiffusion, leave one out, small drafter", f"{t:g}"[1:], "ours",
            "dual_diffusion", draft_steps=2, threshold=t, drafter="small")
    for t in (.3, .4, .5, .6, .7, .8, .9):
        t_ = f"{t:g}"[1:]
        add(f"wino{t_}", "WINO", t_, "WINO" if t in (.6, .7, .8) else "WINO, our threshold", "wino",
            threshold=t)
    for n in (2, 4, 8):
        add(f"saber{n}", "Saber", f"n {n}", "Saber" if n == 2 else "Saber, our n", "saber", n=n)
    # COVER as its paper words it: few seeds by score, replaced when sure. The numbers are ours.
    few = dict(max_seeds=8, max_checks=2, tau_replace=.9, tau_remask=.2, commit_cap=False)
    for t in (.5, .6, .7, .8, .9):
        add(f"cover-few{t:g}".replace("0.", "."), "COVER, few seeds", f"{t:g}"[1:],
            "COVER, our numbers",
            "cover", threshold=t, **few)
    for t in (.4, .5, .6, .7, .8, .9):
        t_ = f"{t:g}"[1:]
        add(f"cover{t_}", "COVER, all seeds", t_, "ours", "cover", threshold=t)
    for t in (.5, .7, .8, .9):     # two seeds; and all, which everybody sees as M
        add(f"cover-two{t:g}".replace("0.", "."), "COVER, two seeds", f"{t:g}"[1:], "ours",
            "cover", threshold=t, max_seeds=2)
        add(f"cover-masked{t:g}".replace("0.", "."), "COVER, all seeds, no override",
            f"{t:g}"[1:], "ours", "cover", threshold=t, override=False)
    for t in (.5, .7, .9):
        add(f"cover{t:g}-prefix".replace("0.", "."), "COVER, all seeds, prefix cache",
            f"{t:g}"[1:], "ours", "cover", threshold=t, cache="prefix")
    return out


def ablations():
    """Parts of COVER taken out or changed, as {name: Setting}; `without`: see PATCHES."""
    out = {}
    for threshold in (.5, .7):
        for part, knobs in (("nothing", {}), ("override", dict(override=False)),
                            ("correction", dict(without="correction"))):
            for seeds in (None, 4):
                out[f"{part} out, {seeds or 'all'} seeds, {threshold:g}"] = dict(
                    threshold=threshold, max_seeds=seeds, **knobs)
        for part in ("u alone", "random score", "inverted score", "d_in", "d_out"):
            out[f"{part}, 4 seeds, {threshold:g}"] = dict(threshold=threshold, max_seeds=4,
                                                          without=part)
        for seeds in (1, 2, 8):
            out[f"{seeds} seeds, {threshold:g}"] = dict(threshold=threshold, max_seeds=seeds)
        out[f"no cap, {threshold:g}"] = dict(threshold=threshold, commit_cap=False)
        out[f"2 checks, {threshold:g}"] = dict(threshold=threshold, max_checks=2)
        out[f"replace at .9, {threshold:g}"] = dict(threshold=threshold, tau_replace=.9)
    for part, knobs in (("nothing", {}), ("override", dict(override=False))):
        out[f"{part} out, all seeds, 0.9"] = dict(threshold=.9, **knobs)
        for threshold in (.5, .7, .9):      # seeds that are checked with no consequence
            out[f"{part} out, no re-masks, {threshold:g}"] = dict(threshold=threshold,
                                                                  tau_remask=0.0, **knobs)
    return {name: Setting("COVER", name, "ours", "cover", knobs) for name, knobs in out.items()}


# What is run on the long canvases of exams.
LONG = ("one-per-forward", "four-per-forward", "threshold.9", "threshold.9-prefix",
        "threshold.9-dual", "dkv.9", "dual_diffusion-confidence", "dual_diffusion-out.9",
        "wino.6", "cover.7", "cover.7-prefix")


class Uncorrected(dlm_spec.DualView):
    """COVER without its diagonal correction: a seed sees its own stored token."""
    def correct(self, out, *_):
        """As in DualView."""
        return out


PATCHES = {     # what an ablation puts in the place of a part of the module
    "correction": ("DualView", Uncorrected),
    "u alone": ("seed_score", lambda u, d_in, d_out: u),
    "random score": ("seed_score", lambda u, d_in, d_out: torch.rand_like(u) + 1e-6),
    "inverted score": ("seed_score", lambda u, d_in, d_out: 1 / (1e-6 + u * (1 + d_in)
                                                                 / (1 + d_out))),
    "d_in": ("seed_score", lambda u, d_in, d_out: u / (1 + d_out)),
    "d_out": ("seed_score", lambda u, d_in, d_out: u * (1 + d_in))}


@functools.cache
def drafter_of(folder):
    """The model in a folder beside this file, loaded once."""
    return dlm_spec.load_denoiser(HERE / folder)


def keywords_of(setting, gen_length):
    """A setting's keywords; so many tokens per forward become a number of steps, and the name
    of a drafter becomes that model."""
    knobs = {name: value for name, value in setting.knobs.items() if name != "without"}
    if "per_forward" in knobs:
        knobs["steps"] = gen_length // knobs.pop("per_forward")
    if "drafter" in knobs:
        knobs["drafter"] = drafter_of(knobs["drafter"])
    return knobs


def patch_of(part):
    """A context in which a part of the module is replaced as in PATCHES; None: nothing is."""
    return mock.patch.object(dlm_spec, *PATCHES[part]) if part else contextlib.nullcontext()


def call_of(setting, gen_length, block_length):
    """A setting's sampler and all keywords that it is called with."""
    lengths = dict(gen_length=gen_length, block_length=block_length)
    sampler = dlm_spec.SAMPLERS[setting.sampler]
    return sampler, command_line.named_knobs(sampler, keywords_of(setting, gen_length) | lengths)


def decode_and_grade(denoiser, setting, problems, gen_length, block_length, **how):
    """`evaluate` with a setting."""
    sampler, knobs = call_of(setting, gen_length, block_length)
    with patch_of(setting.knobs.get("without")):
        return evaluate(denoiser, sampler, problems, **knobs, **how)


def path_of(split, family, gen_length=64, block_length=None):
    """The file of these records."""
    block = "" if block_length in (None, gen_length) else f"_{block_length}"
    return RESULTS / f"{split}_{family}_{gen_length}{block}.json"


def prompts(split, family, n, exam=1):
    """The problems, or exams, of a run."""
    return (tasks.problems(family, split, n) if exam == 1 else
            tasks.exams(family, split, n, exam))


def run(chosen, split, n, families=tasks.FAMILIES, gen_length=64, block_length=None, exam=1,
        batch_size=100):
    """Evaluate settings, {name: Setting}, on n prompts of each family, and write the
    records."""
    RESULTS.mkdir(exist_ok=True)
    denoiser = dlm_spec.load_denoiser()
    for family in families:
        path = path_of(split, family, gen_length, block_length)
        some = prompts(split, family, n, exam)
        for name, setting in chosen.items():
            records = json.loads(path.read_text()) if path.exists() else []
            same = [r for r in records if r["name"] == name]
            so_far = same[0] if same else dict(n=0, marks="")
            done = so_far["n"] // exam
            if done >= n:
                continue
            r = decode_and_grade(denoiser, setting, some[done:], gen_length,
                                 block_length or gen_length, batch_size=batch_size)
            new = {"name": name, "exam": exam, "knobs": setting.knobs, **together(so_far, r)}
            records = [old for old in records if old not in same] + [new]
            tmp = path.with_suffix(".tmp")
            tmp.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            tmp.replace(path)
            print(f"{family:6s} {name:28s} {100 * new['right'] / new['n']:5.1f} % "
                  f"{new['nfe']:5.1f} forwards {new['positions']:6.0f} positions "
                  f"{new['tokens'] * new['n'] / exam / new['seconds']:6.1f} tokens/s "
                  f"{new['revisions'].get('events', 0)} revisions", flush=True)


def together(a, b):
    """The record of the problems of record `a` (n may be 0) and of `b`, a result of
    `evaluate`."""
    n = a["n"] + b["n"]
    marks = a["marks"] + "".join("01"[m] for m in b["marks"])
    sums = {k: a.get(k, 0) + b[k] for k in ("right", "seconds")}
    means = {k: (a.get(k, 0) * a["n"] + b[k] * b["n"]) / n for k in ("nfe", "positions", "tokens")}
    return dict(n=n, **sums, **means, marks=marks,
                revisions={k: a.get("revisions", {}).get(k, 0) + v
                           for k, v in b["revisions"].items()})


def read(split, family, gen_length=64, block_length=None, known=None):
    """The records there are of `known` settings (default: settings()), {name: record}, those of
    the most problems alone, with the seconds per prompt as `cpu` and the clusters of their
    problems."""
    path = path_of(split, family, gen_length, block_length)
    records = json.loads(path.read_text()) if path.exists() else []
    records = [r for r in records if r.get("name") in (known or settings())]
    records = [r for r in records if r["n"] == max(o["n"] for o in records)]
    if not records:
        return {}
    found = prompts(split, family, records[0]["n"] // records[0]["exam"], records[0]["exam"])
    clusters = clusters_of(found)
    return {r["name"]: r | {"cpu": r["seconds"] / len(found), "clusters": clusters}
            for r in records}


def clusters_of(found):
    """For each mark the cluster it belongs to: prompts of one program hang together, and so do
    the problems of one exam; all others stand alone."""
    out = []
    for i, p in enumerate(found):
        if isinstance(p, tasks.Exam):
            out += [i] * len(p.problems)
        else:
            out.append(p.key if p.family == "code" else i)
    return out


# ---------------------------------------------------------------------------------------------
# Comparisons.

def mean_and_error(values, clusters):
    """The mean of values, and its standard error when those of a cluster hang together."""
    n = len(values)
    mean, sums = sum(values) / n, {}
    for v, c in zip(values, clusters):
        sums[c] = sums.get(c, 0.0) + v - mean
    return mean, sum(s * s for s in sums.values()) ** .5 / n


def accuracy(r):
    """Per cent right and the 95 % Wilson interval: (p, low, high). With clusters it is that of
    fewer problems: as many as would give this standard error if each stood alone."""
    p, error = mean_and_error([int(m) for m in r["marks"]], r["clusters"])
    n = r["n"] if error == 0 else min(r["n"], p * (1 - p) / error ** 2)
    z = 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return 100 * p, 100 * min(p, centre - half), 100 * max(p, centre + half)


def paired(a, b):
    """The accuracy of record a above that of b in points, with its 95 % interval."""
    differences = [int(x) - int(y) for x, y in zip(a["marks"], b["marks"])]
    mean = sum(differences) / len(differences)
    # two problems more, of which each solves one alone: when all marks agree, the interval must
    # not be without width (after Agresti and Min)
    _, error = mean_and_error([*differences, 1, -1], [*a["clusters"], "its own", "another"])
    return 100 * mean, 100 * (mean - 1.96 * error), 100 * (mean + 1.96 * error)


def rivals(records, name, cost):
    """Of all other decoders the most accurate setting that costs no more ("nfe", "positions" or
    "cpu") than this one, as its name; None if there is none."""
    mine, known = records[name], settings()
    others = [o for o in records if known[o].sampler != known[name].sampler
              and records[o][cost] <= mine[cost]]
    return max(others, key=lambda o: (records[o]["right"], -records[o][cost]), default=None)


def front(records, cost):
    """The names of the settings that no other one beats: none is as accurate at a lower cost,
    or more accurate at no higher one. The cheapest first."""
    out, best = [], -1
    for name in sorted(records, key=lambda o: (records[o][cost], -records[o]["right"])):
        if records[name]["right"] > best:
            out.append(name)
            best = records[name]["right"]
    return out


def choose(split="validation", within=1.0, gen_length=64):
    """The rule by which a decoder's setting is chosen: of those within a point of one token per
    forward in every family the one that takes least time in all three together. Returns
    {decoder: name, or None if there is no such setting}."""
    found = {family: read(split, family, gen_length) for family in tasks.FAMILIES}
    names = [n for n in settings() if all(n in records for records in found.values())]
    out = {}
    for name in names:
        setting = settings()[name]
        fits = all(100 * (records["one-per-forward"]["right"] - records[name]["right"])
                   <= within * records[name]["n"] for records in found.values())
        cost = sum(records[name]["cpu"] for records in found.values())
        out.setdefault(setting.decoder, []).append((not fits, cost, name))
    return {decoder: None if min(some)[0] else min(some)[2] for decoder, some in out.items()}


def effective(r):
    """Effective re-masks as COVER counts them: the share that did not come back as they were,
    of how many; and replacements, in words."""
    e = r["revisions"]
    if not e.get("events"):
        return "none", "0"
    share = f"{100 * e['effective_remasks'] / e['remasks']:.0f} %" if e["remasks"] else "none"
    return f"{share} of {e['remasks']}", str(e["replaces"])


def table(split="test", families=tasks.FAMILIES, samplers=None, gen_length=64, block_length=None,
          known=None):
    """The records of a split as a markdown table, a row for each setting there is; the chosen
    ones (see choose) in bold."""
    known, chosen, lines = known or settings(), {*choose().values()}, []
    for family in families:
        records = read(split, family, gen_length, block_length, known)
        base = records.get("one-per-forward")
        if not records:
            continue
        lines += [f"\n{family}, n = {next(iter(records.values()))['n']}\n",
                  "| decoder | preset | whose | accuracy | difference | forwards | positions "
                  "| tokens/s | effective re-masks | replacements |", "|---" * 10 + "|"]
        for name, setting in known.items():
            r = records.get(name)
            if r is None or (samplers and setting.sampler not in samplers):
                continue
            p, low, high = accuracy(r)
            d = "" if base is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*paired(r, base))
            label = f"{setting.decoder} {setting.value}"
            label = f"**{label}**" if name in chosen else label
            lines.append(f"| {label} | {name} | {setting.whose} | {p:.1f} % [{low:.1f}, "
                         f"{high:.1f}] | {d} | {r['nfe']:.1f} | {r['positions']:.0f} | "
                         f"{r['tokens'] / r['cpu']:.0f} | "
                         + " | ".join(effective(r)) + " |")
    return "\n".join(lines)


def summary(names, split="test", gen_length=64):
    """The table of the README: a row per setting, accuracy and forwards in each family; tokens
    per second and effective re-masks of all families together."""
    found, known = {f: read(split, f, gen_length) for f in tasks.FAMILIES}, settings()
    lines = ["| decoder | preset | whose | MiniMath | MiniChoice | MiniCode | tokens/s "
             "| effective re-masks |", "|---" * 8 + "|"]
    for name in names:
        rows = [found[family][name] for family in tasks.FAMILIES]
        cells = ["{:.1f} % [{:.1f}, {:.1f}] in ".format(*accuracy(r)) + f"{r['nfe']:.1f}"
                 for r in rows]
        speed = sum(r["tokens"] for r in rows) / sum(r["cpu"] for r in rows)
        total = {k: sum(r["revisions"].get(k, 0) for r in rows)
                 for k in ("events", "remasks", "effective_remasks", "replaces")}
        cells += [f"{speed:.0f}", effective(dict(revisions=total))[0]]
        lines.append(f"| {known[name].decoder} {known[name].value} | `{name}` | "
                     f"{known[name].whose} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def card(split="test"):
    """The table of the model card: accuracy by family and canvas, with one and with four tokens
    per forward."""
    lines = ["| family | canvas | problems per prompt | problems | one token per forward "
             "| four tokens per forward |", "|---|---|---|---|---|---|"]
    for family in tasks.FAMILIES:
        for gen_length in (64, 128, 256):
            records = read(split, family, gen_length)
            if {"one-per-forward", "four-per-forward"} <= records.keys():
                two = [records["one-per-forward"], records["four-per-forward"]]
                lines.append(f"| {family} | {gen_length} | {two[0]['exam']} | {two[0]['n']} | "
                             + " | ".join("{:.1f} % [{:.1f}, {:.1f}]".format(*accuracy(r))
                                          for r in two) + " |")
    return "\n".join(lines)


# What stands in the README.
README_SPLIT = "test"
README_ROWS = ("one-per-forward", "threshold.9-dual", "dkv.9", "dual_diffusion-kl-dkv",
               "dual_diffusion-token.9-dkv", "wino.6", "saber2", "cover-few.7", "cover.7",
               "cover-masked.9")


def against_rivals(name, split="test", families=tasks.FAMILIES, gen_length=64, block_length=None):
    """A line per family and cost: the best other decoder at no more forwards, positions and
    seconds, and this setting's points above it, paired, with the 95 % interval."""
    lines = []
    for family in families:
        records = read(split, family, gen_length, block_length)
        if name not in records:
            continue
        for cost, word in (("nfe", "forwards"), ("positions", "positions"), ("cpu", "seconds")):
            other = rivals(records, name, cost)
            d = None if other is None else paired(records[name], records[other])
            lines.append(f"{family:6s} {name:22s} at no more {word:9s}: " + (
                "no other decoder" if d is None else
                f"{other:24s} {d[0]:+5.1f} [{d[1]:+.1f}, {d[2]:+.1f}]"))
    return lines


def main():
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("what", choices=("run", "choose", "table", "summary", "card"))
    cli.add_argument("split", choices=("validation", "test"), nargs="?",
                     default=README_SPLIT)
    cli.add_argument("-n", type=int, default=300, help="prompts per family")
    cli.add_argument("--families", nargs="+", choices=tasks.FAMILIES, default=tasks.FAMILIES)
    cli.add_argument("--settings", nargs="+", default=["all"],
                     help="`all`, `ablations`, `long`, or names of settings")
    cli.add_argument("--gen-length", type=int, default=64)
    cli.add_argument("--block-length", type=int)
    cli.add_argument("--exam", type=int, default=1, help="problems per prompt")
    args = cli.parse_args()
    known = settings() | ablations()
    if args.what == "choose":       # on the validation split, whatever else is asked
        return print(json.dumps(choose(), indent=1))
    if args.what == "summary":
        return print(summary(README_ROWS, args.split))
    if args.what == "card":
        return print(card(args.split))
    if args.what == "table":
        return print(table(args.split, args.families, gen_length=args.gen_length,
                           block_length=args.block_length))
    groups = dict(all=settings(), ablations=ablations(), long={n: known[n] for n in LONG})
    if unknown := {*args.settings} - {*groups, *known}:
        cli.error(f"there is no setting {', '.join(unknown)}")
    chosen = {n: s for item in args.settings
              for n, s in groups.get(item, {item: known.get(item)}).items()}
    run(chosen, args.split, args.n, args.families, args.gen_length, args.block_length, args.exam)


if __name__ == "__main__":
    main()
