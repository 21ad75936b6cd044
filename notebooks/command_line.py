# SPDX-License-Identifier: MIT
"""The command line of dlm_spec.py: watch a problem being solved, compare samplers, copy one out.

    python dlm_spec.py                                      # one problem, then all samplers
    python dlm_spec.py "What is 3 + 4?" --sampler wino threshold=.5 --model my/checkpoint
    python dlm_spec.py --preset wino.6                      # a setting of the experiments
    python dlm_spec.py --copy sample_cover > my_cover.py    # a file that stands alone

`keyword=value` goes to the sampler as it is: see help(dlm_spec.sample_cover) and of Decode.
"""
import argparse
import ast
import functools
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
import transformers

import dlm_spec
from dlm_spec import SAMPLERS

VERIFIERS = {"trust": dlm_spec.verify_trust, "kl": dlm_spec.verify_kl,
             "confidence": dlm_spec.verify_confidence}
VIEWS = {"leave_one_out": dlm_spec.view_leave_one_out, "visible": dlm_spec.view_visible,
         "cover": dlm_spec.view_cover}


def knobs_of(sampler):
    """The names of a sampler's keywords: its own, and those of Decode that all samplers take."""
    names = {*inspect.signature(sampler).parameters,
             *inspect.signature(dlm_spec.Decode).parameters}
    return names - {"denoiser", "prompt", "common"}


def named_knobs(sampler, given):
    """Keywords for a sampler from `given`, a dict in which rules and views are named ("kl",
    "cover") and a rule's options (tau, of) stand beside it. ValueError for a keyword that the
    sampler does not have, or a name that is none."""
    knobs, takes = dict(given), knobs_of(sampler)
    for name, choices in (("verify", VERIFIERS), ("view", VIEWS)):
        if isinstance(knobs.get(name), str):
            if knobs[name] not in choices:
                raise ValueError(f"{name} is {knobs[name]!r}, expected one of {', '.join(choices)}")
            knobs[name] = choices[knobs[name]]
    rule = knobs.get("verify", dlm_spec.verify_confidence)
    options = {"tau", "of"} & {*inspect.signature(rule).parameters} & {*knobs}
    if options and "verify" in takes:
        knobs["verify"] = functools.partial(rule, **{k: knobs.pop(k) for k in options})
        logits, token = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
        drafted = {"draft": logits} if "draft" in inspect.signature(rule).parameters else {}
        knobs["verify"](logits, token, **drafted)               # ValueError of a bad option
    if unknown := sorted(knobs.keys() - takes):
        raise ValueError(f"{sampler.__name__} has no {', '.join(unknown)}; it has "
                         f"{', '.join(sorted(takes))}")
    return knobs


class LiveCanvas:
    """A callback that shows the first row's canvas filling: redrawn in place on a terminal, else
    a line for the first forward and for every `every`-th."""

    def __init__(self, denoiser, out=None, every=1):
        denoiser.decode([])             # ValueError without a tokenizer
        self.denoiser, self.out, self.every, self.height = denoiser, out or sys.stdout, every, 0

    def text(self, ids):
        """The canvas as text: ░ a mask, · an end-of-text token; what trails behind a complete
        text is cut."""
        d = self.denoiser
        end = next((i for i, t in enumerate(ids) if t in d.eos_ids), len(ids))
        signs = {d.mask_id: "░"} | dict.fromkeys(d.eos_ids, "·")
        runs = itertools.groupby(ids if d.mask_id in ids[:end] else ids[:end],
                                 lambda token: signs.get(token, ""))
        return " ".join(sign * len([*run]) if sign else d.tokenizer.decode([*run])
                        for sign, run in runs)

    def __call__(self, step):
        """Show one step."""
        nfe = int(step["nfe"][0])
        text = self.text(step["x"][0, step["prompt_length"]:].tolist())
        if not self.out.isatty():
            if nfe == 1 or nfe % self.every == 0:
                print(f"{nfe:4d} | {' / '.join(text.splitlines())}", file=self.out, flush=True)
            return
        columns, rows = shutil.get_terminal_size()
        lines = [part for line in text.splitlines() or [""]
                 for part in textwrap.wrap(line, columns - 1) or [""]][2 - rows:]
        up = f"\033[{self.height}A\r\033[J" if self.height else ""
        print(f"{up}\033[33m" + "\n".join(lines) + f"\033[0m\n[forward {nfe}]", file=self.out,
              flush=True)
        self.height = len(lines) + 1


def copy_out(name):
    """The source of a module that stands alone: the definition `name` of dlm_spec.py and Denoiser,
    with all that they reach by name, in order, and the imports that these need."""
    name = f"sample_{name}" if name in SAMPLERS else name
    lines = Path(dlm_spec.__file__).read_text().splitlines()
    statements = ast.parse("\n".join(lines)).body[1:-1]     # but docstring and call of main
    imports = [s for s in statements if isinstance(s, ast.Import | ast.ImportFrom)]
    others = [s for s in statements if s not in imports]

    def names(*nodes):
        return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}

    def defines(statement):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return {a.asname or a.name.split(".")[0] for a in statement.names}
        if hasattr(statement, "name"):
            return {statement.name}
        return names(*(t for t in getattr(statement, "targets", ()) if isinstance(t, ast.Name)))

    def source(statement):
        first = min([statement, *getattr(statement, "decorator_list", ())], key=lambda n: n.lineno)
        return "\n".join(lines[first.lineno - 1:statement.end_lineno])

    if not any(name in defines(s) for s in others):
        raise ValueError(f"there is no {name!r} in dlm_spec.py")
    taken, wanted = [], {name, "Denoiser"}
    while more := [s for s in others if s not in taken
                   and (isinstance(s, ast.Expr) or defines(s) & wanted)]:
        taken += more           # an expression is no definition: it registers the attention
        wanted |= set().union(*map(names, more))
    head = f'{lines[0]}\n"""{name}, out of dlm_spec.py: python dlm_spec.py --copy {name}"""\n'
    head += "\n".join(source(s) for s in imports if defines(s) & wanted)
    return "\n\n".join([head, *(source(s) for s in others if s in taken)])


def main(argv=None):
    """`python dlm_spec.py`: one problem solved before your eyes, then by all samplers."""
    warnings.formatwarning = lambda message, *_: f"dlm_spec.py: {message}\n"
    cli = argparse.ArgumentParser(prog="dlm_spec.py", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("words", nargs="*", metavar="PROBLEM | KEYWORD=VALUE", help="what to solve, "
                     "and keywords of the sampler, for example threshold=.6 verify=kl seed=1")
    cli.add_argument("--sampler", choices=SAMPLERS, help="default: cover")
    cli.add_argument("--preset", help="a setting of the experiments, for example wino.6")
    cli.add_argument("--compare", action="store_true", help="all samplers, as a table")
    cli.add_argument("--model", help="a folder or hub id (default: the embedded model)")
    cli.add_argument("--device", help="default: cuda when there is one, else cpu")
    cli.add_argument("--copy", metavar="NAME", help="print one definition, with all it needs")
    args = cli.parse_intermixed_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        print(copy_out(args.copy)) if args.copy else solve(args)
    except ValueError as e:
        cli.exit(2, f"dlm_spec.py: {e}\n")
    except KeyboardInterrupt:
        cli.exit(130, "\nstopped\n")
    except BrokenPipeError:         # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cli.exit(141)


def solve(args):
    """What the command line asks for. What can be refused is refused before a model loads."""
    words = [re.fullmatch(r"([a-z_]+)=(.*)|(.*)", w, re.S).groups() for w in args.words]
    problems = [problem for _, _, problem in words if problem is not None]
    given = {name: value_of(text) for name, text, _ in words if name}
    if len(problems) > 1:
        raise ValueError(f"{len(problems)} problems were given: put one into quotes")
    if bool(args.sampler) + bool(args.preset) + args.compare > 1:
        raise ValueError("--sampler, --preset and --compare are three ways to choose: give one")
    seed = given.pop("seed", 0)
    shown, table = chosen(args, {"gen_length": 64} | given)
    if not args.words and not (args.sampler or args.preset or args.compare):
        table = {name: {"gen_length": 64} for name in SAMPLERS}
    transformers.utils.logging.disable_progress_bar()
    denoiser = dlm_spec.load_denoiser(args.model, device=args.device)
    problem = problems[0] if problems else dlm_spec.EXAMPLE
    ids, mask = denoiser.encode(problem)
    print("\n" + problem)

    def decode(sampler, knobs, callback=None):
        start = time.perf_counter()
        out = SAMPLERS[sampler](denoiser, ids, attention_mask=mask, callback=callback, **knobs,
                                generator=torch.Generator(denoiser.device).manual_seed(seed))
        answer = " / ".join(denoiser.decode(out.generated)[0].splitlines())
        return out, time.perf_counter() - start, answer

    for sampler, knobs in shown.items():
        live = LiveCanvas(denoiser, every=2 if sampler != "llada" else 8)
        out, seconds, answer = decode(sampler, knobs, live)
        print(f"-> {answer}\n   {sampler}: {int(out.nfe[0])} forwards, {seconds:.2f} s, "
              f"{float(out.tokens_per_forward[0]):.2f} tokens per forward")
    if table:
        print("\nsampler         forwards  positions  seconds  revisions  answer")
    for sampler, knobs in table.items():
        try:
            out, seconds, answer = decode(sampler, knobs)
        except ValueError as e:         # what one sampler refuses, the others may not
            print(f"{sampler:15s} {e}", flush=True)
            continue
        print(f"{sampler:15s} {int(out.nfe[0]):8d} {int(out.positions[0]):10d} {seconds:8.2f} "
              f"{len(out.revisions):10d}  {answer}", flush=True)


def chosen(args, given):
    """The samplers to show and those to compare, each a dict of name -> keywords."""
    if args.compare:
        known = set().union(*map(knobs_of, SAMPLERS.values())) | {"tau", "of"}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"no sampler has {', '.join(unknown)}")
        return {}, {name: named_knobs(sampler, {
            k: v for k, v in given.items() if k in knobs_of(sampler)
            or (k in ("tau", "of") and "verify" in knobs_of(sampler))})
            for name, sampler in SAMPLERS.items()}
    name = args.sampler or "cover"
    if args.preset:
        name, knobs = preset(args.preset, given["gen_length"])
        given = {"block_length": 64, **knobs, **given}
        print(f"{args.preset}: sample_{name} with", ", ".join(
            f"{k}={'a second model' if k == 'drafter' else v!r}" for k, v in given.items()))
    return {name: named_knobs(SAMPLERS[name], given)}, {}


def preset(name, gen_length):
    """A setting of the experiments: its sampler's name and keywords."""
    sys.path.insert(0, str(ROOT / "notebooks" / "mini"))
    import experiments
    known = experiments.settings()
    if name not in known:
        raise ValueError(f"there is no preset {name!r}, but {', '.join(known)}")
    return known[name].sampler, experiments.keywords_of(known[name], gen_length)


def value_of(text):
    """A keyword's value: a Python literal, else the text itself."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
