"""The three families: splits, graders, the sandbox, and the tokenizer that covers them."""
import ast
import json
import random
import re
from itertools import pairwise

import pytest
import tasks
import torch
import train

SANE = [(f, s) for f in tasks.FAMILIES for s in tasks.SPLITS]


@pytest.fixture(scope="module")
def tokenizer():
    return train.build_tokenizer()


@pytest.mark.parametrize("family, split", SANE)
def test_every_reference_answer_is_graded_right(family, split):
    """All answer forms: so many problems draw each of them several times. (A program takes a
    hundred times as long to grade.)"""
    n = 50 if family == "code" else 150
    problems = tasks.problems(family, split, n, seed=5)
    assert all(tasks.grade_all(problems, [p.answer for p in problems]))
    assert len({p.prompt for p in problems}) == n


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_another_problem_s_answer_is_graded_wrong(family):
    n = 40 if family == "code" else 60
    problems = tasks.problems(family, "test", n)
    pairs = [(p, q) for p, q in pairwise(problems) if p.gold != q.gold]
    marks = tasks.grade_all([p for p, _ in pairs], [q.answer for _, q in pairs])
    assert not any(marks) and len(marks) > 30
    assert not any(tasks.grade_all(problems, [""] * n))


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_splits_share_no_problem_whatever_the_seed(family):
    """The key decides, and the key does not depend on wording, names or the order of
    options."""
    keys = {s: {p.key for seed in range(3) for p in tasks.problems(family, s, 300, seed=seed)}
            for s in tasks.SPLITS}
    assert not keys["train"] & keys["test"] and not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    assert all(tasks.split_of(k) == s for s, some in keys.items() for k in some)


def test_equal_seeds_give_equal_problems():
    assert tasks.problems("math", "test", 20) == tasks.problems("math", "test", 20)
    assert tasks.problems("math", "test", 20) != tasks.problems("math", "test", 20, seed=1)


def test_math_answers_work_out_their_steps():
    """Whatever the form, a step's numbers are a true equation, and the last result is the
    gold."""
    for p in tasks.problems("math", "test", 300):
        work, gold = p.answer.split("####")
        v = int(re.findall(r"\d+", p.prompt)[0])
        for step in re.findall(r"[^;,.]+[;,.]", work):
            op, = re.findall(r"[-+*/](?!>)", step)
            numbers = [int(n) for n in re.findall(r"\d+", step)]
            k = numbers[0] if "->" in step else numbers[2] if step.endswith(";") and re.match(
                r"\s*\d+ =", step) else numbers[1]
            v = {"+": v + k, "-": v - k, "*": v * k, "/": v // k}[op]
            assert v in numbers and 0 < v < 100
        assert v == int(gold) == int(p.gold)


def test_choice_answers_name_the_right_option():
    for p in tasks.problems("choice", "test", 300):
        options = dict(re.findall(r"^([A-D])\) (.+)$", p.prompt, re.M))
        assert len(set(options.values())) == 4 and p.gold in options
        if p.answer.endswith(options[p.gold]):
            assert p.answer.endswith(f"Answer: {p.gold}) {options[p.gold]}")


def test_code_answers_are_python_of_several_forms():
    bodies = [ast.parse(p.answer).body[0] for p in tasks.problems("code", "test", 200)]
    kinds = {type(node).__name__ for body in bodies for node in ast.walk(body)}
    assert {"If", "IfExp", "For", "ListComp", "AugAssign", "Call", "Slice"} <= kinds


def test_several_answers_are_right_for_one_prompt():
    """What makes parallel decoding hard: the same prompt has several equally right answers."""
    p = tasks.problems("math", "test", 1)[0]
    v, k, w = 12, 5, 17
    forms = [f"{v} + {k} = {w}; #### {p.gold}", f"+ {k} -> {w}, #### {p.gold}"]
    assert all(tasks.grade(p, form) for form in forms)


@pytest.mark.parametrize("text, right", [
    ("#### 7", True), ("7", False), ("#### 8", False), ("#### 8 #### 7", True), ("####7.", True),
    ("#### 77", False)])
def test_the_math_grader_reads_the_last_marked_number(text, right):
    assert tasks.grade(tasks.Problem("math", "", "", "7", ""), text) is right


@pytest.mark.parametrize("text, right", [
    ("Answer: B", True), ("Answer: A", False), ("B", False), ("it is so.\nAnswer: B) dog", True),
    ("Answer: BAD", False)])
def test_the_choice_grader_reads_the_last_letter(text, right):
    assert tasks.grade(tasks.Problem("choice", "", "", "B", ""), text) is right


HOSTILE = {
    "a loop that never ends": "def f(a):\n    while True:\n        pass",
    "a fork": "import os\nos.fork()\ndef f(a):\n    return a",
    "forks": "import posix, time\nfor _ in range(3):\n    posix.fork()\ntime.sleep(99)",
    "a shell": "import os\nos.system('true')\ndef f(a):\n    return a",
    "a large file": "open('x', 'w').write('x' * (1 << 22))\ndef f(a):\n    return a",
    "much memory": "x = 'x' * (1 << 33)\ndef f(a):\n    return a",
    "much output": "print('graded 0 True\\n' * 10000)\ndef f(a):\n    return 0",
    "an exit": "import sys\nsys.exit(0)",
    "no python": "def f(a: return",
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_program_is_wrong_and_harms_nobody(program, tmp_path, monkeypatch):
    """It ends by its limits, leaves no file here, and the next program is still graded
    right."""
    monkeypatch.chdir(tmp_path)
    asserts = "def check(candidate):\n    assert candidate(3) == 3\n"
    p = tasks.Problem("code", "", "", asserts, "", "f")
    marks = tasks.grade_code([(p, program), (p, "def f(a):\n    return a")], timeout=1.0)
    assert marks == [False, True]
    assert list(tmp_path.iterdir()) == []


def test_wilson_intervals_hold_known_values():
    assert tasks.wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert tasks.wilson(0, 10)[0] == pytest.approx(0)
    assert tasks.wilson(10, 10)[1] == pytest.approx(1)
    with pytest.raises(ValueError, match="k is 3 and n is 2"):
        tasks.wilson(3, 2)


@pytest.mark.parametrize("family, split", SANE)
def test_the_tokenizer_covers_and_restores_every_text(tokenizer, family, split):
    """Word-level, yet decode(encode(text)) == text, Python's indentation included."""
    for p in tasks.problems(family, split, 400, seed=7):
        for text, most in ((p.prompt, tasks.MAX_PROMPT - 2), (p.answer, tasks.MAX_ANSWER - 1)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids and len(ids) <= most
            assert tokenizer.decode(ids) == text


def test_numbers_below_a_hundred_are_one_token(tokenizer):
    def ids(n):
        return tokenizer(str(n), add_special_tokens=False)["input_ids"]
    assert all(len(ids(n)) == 1 for n in range(100)) and ids(100) == [tokenizer.unk_token_id]


def some_batches(tokenizer, steps):
    """{what: [(x, answer, real), ...]} of the curriculum's steps."""
    found = {}
    for step in steps:
        what, *rest = train.batch(tokenizer, step)
        found.setdefault(what, []).append(rest)
    return found


def test_training_batches_pad_prompts_left_and_answers_with_eos(tokenizer):
    """Of all families, at the start and in the middle of the curriculum; what is to be learned
    is no padding, and what is filled up behind an answer is end of text."""
    found = some_batches(tokenizer, [*range(30), *range(5000, 5020), *range(9000, 9020)])
    assert found.keys() == {*tasks.FAMILIES, "letter", "option", "sums", "whole"}
    for x, answer, real in (b for some in found.values() for b in some):
        assert x.shape == answer.shape == real.shape and answer.any(1).all()
        assert torch.equal(real == 0, x == tokenizer.pad_token_id)
        assert (real[:, 1:] >= real[:, :-1]).all() and not (answer & (real == 0)).any()
        assert not (answer & (x == tokenizer.mask_token_id)).any()
        for row in x:
            ids = row.tolist()
            ids = ids[ids.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1:]
            if tokenizer.eos_token_id in ids:
                end = ids.index(tokenizer.eos_token_id)
                assert {*ids[end:]} <= {tokenizer.eos_token_id, tokenizer.mask_token_id}


def test_letter_batches_teach_the_letter_alone(tokenizer):
    """At first all else is visible."""
    letters = tokenizer.convert_tokens_to_ids([*"ABCD"])
    for x, answer, _ in some_batches(tokenizer, range(60))["letter"]:
        assert (answer.sum(1) == 1).all() and {*x[answer].tolist()} <= {*letters}
        assert (x == tokenizer.mask_token_id).float().mean() < .02
        assert all("Give" in tokenizer.decode(row) for row in x)


def test_sums_ask_for_their_results(tokenizer):
    x, results = train.sums(tokenizer, random.Random(0))
    sums = 0
    for row, asked in zip(x, results):
        text = tokenizer.decode(row).split("<|assistant|>")[1]
        for v, op, k, w in re.findall(r"(\d+) ([-+*/]) (\d) (?:=|is) (\d+)", text):
            sums += 1
            assert int(w) == {"+": int(v) + int(k), "-": int(v) - int(k), "*": int(v) * int(k),
                              "/": int(v) // int(k)}[op]
        shown = tokenizer.decode(row.masked_fill(asked, tokenizer.mask_token_id))
        assert not re.search(r"\d (=|is|->) \d+ ?[;.,]|\d+ = \d+ [-+*/]", shown), shown
        assert shown.count("<|mask|>") == int(asked.sum()) > 5
    assert sums > 100


def test_option_batches_teach_the_word_behind_the_letter_or_both(tokenizer):
    asked, letters = set(), {*tokenizer.convert_tokens_to_ids([*"ABCD"])}
    hidden = {tokenizer.mask_token_id}
    for x, answer, _ in some_batches(tokenizer, range(60))["option"]:
        for row, learned in zip(x.tolist(), answer):
            *letter, word = learned.nonzero()[:, 0].tolist()
            assert letter in ([], [word - 2]) and row[word - 2] in letters | hidden
            assert row[word + 1] in hidden | {tokenizer.eos_token_id}
            asked.add(1 + len(letter))
    assert asked == {1, 2}


def test_some_batches_are_cut_as_block_by_block_decoding_leaves_them(tokenizer):
    """Known, then at most a block to be learned, then masks alone."""
    cut = 0
    for x, answer, _ in some_batches(tokenizer, range(9000, 9040))["math"]:
        for row, learned in zip(x, answer):
            behind = row[int(learned.nonzero()[-1]) + 1:]
            assert (behind == tokenizer.mask_token_id).all()
            cut += len(behind) > 0
    assert cut


def test_late_batches_ask_where_the_text_ends(tokenizer):
    """The last stage: eight tokens before the EOS that are shown, and all M before these. The
    eighth is an EOS or, where all EOS are shown, the text's last token."""
    eos, M, last = tokenizer.eos_token_id, tokenizer.mask_token_id, set()
    start = sum(stage.steps for stage in train.CURRICULUM[:-1])
    for x, answer, _ in some_batches(tokenizer, range(start, start + 80))["math"]:
        if (answer.sum(1) > 8).any() or not (x == M).any() or (x[:, -1] == M).any():
            continue
        for row, learned in zip(x.tolist(), answer):
            at = learned.nonzero()[:, 0].tolist()
            assert {*row[at[-1] + 1:]} <= {eos}
            assert {*row[row.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1:at[0]]} \
                <= {M}
            last.add(row[at[-1]] == eos)
    assert last == {True, False}


def test_the_learning_rate_rises_and_falls_to_zero():
    last = train.TOTAL - train.CURRICULUM[-1].steps
    rates = [train.learning_rate(step) / train.PEAK_LR
             for step in (0, 199, last, train.TOTAL - 1, train.TOTAL)]
    assert rates == pytest.approx([1 / 200, 1 - 199 / 20_000, 1 - last / 20_000, 8e-5, 0], abs=1e-5)


def test_training_sees_exams_steps_and_long_canvases(tokenizer):
    texts, widths = [], []
    for x, _, _ in some_batches(tokenizer, range(9000, 9040))["math"]:
        texts += tokenizer.batch_decode(x)
        widths.append(x.shape[1])
    assert any("\n4." in text for text in texts) and max(widths) > 256
    one_step = [text.count("####") == 1 and len(re.findall(r"[-+*/]", text)) <= 2
                for text in texts]
    assert any(one_step)


def test_a_batch_depends_on_the_seed_and_the_number_of_its_step_alone(tokenizer):
    (a, x, *_), (b, y, *_) = train.batch(tokenizer, 70), train.batch(tokenizer, 70)
    assert a == b and torch.equal(x, y)
    others = [train.batch(tokenizer, 70, 1)[1], train.batch(tokenizer, 71)[1]]
    assert not any(o.shape == x.shape and torch.equal(o, x) for o in others)


def test_the_curriculum_runs_through_its_stages():
    first, second = train.CURRICULUM[:2]
    assert train.stage_at(0) == (first, 0.0) and train.stage_at(first.steps) == (second, 0.0)
    assert train.stage_at(10 ** 9) == (train.CURRICULUM[-1], 1.0)
    assert train.between((2, 4), .5) == 3


def test_an_exam_holds_problems_of_its_split_and_grades_each(tokenizer):
    """In the right order, in another order of writing, and with one left out."""
    for family in tasks.FAMILIES:
        exams = tasks.exams(family, "test", 5)
        assert all(tasks.split_of(p.key) == "test" for e in exams for p in e.problems)
        assert all(tasks.grade_all(exams, [e.answer for e in exams]))
        assert all(tokenizer.decode(tokenizer(e.answer)["input_ids"]) == e.answer for e in exams)
        parts = exams[0].answer.split("\n4. ")
        assert tasks.grade_all(exams[:1], parts[:1]) == [True] * 3 + [False]
        assert tasks.grade_all(exams[:1], ["4. " + parts[1] + "\n" + parts[0]]) == [True] * 4
        assert not any(tasks.grade_all(exams[:1], [""]))


def test_problems_of_one_step():
    """Held out like the others, and not among those of the tables."""
    steps = tasks.problems("step", "test", 200)
    assert all(tasks.grade_all(steps, [p.answer for p in steps]))
    assert all(tasks.split_of(p.key) == "test" and p.answer.count(" ") <= 7 for p in steps)
    assert any(re.search("finds \\d more[.]", p.prompt) for p in steps)
    assert not {p.key for p in steps} & {p.key for p in tasks.problems("math", "test", 2000)}


def test_a_failed_save_leaves_the_old_file(tmp_path):
    """Disk full or a crash half way: the good file stays, no half file is left."""
    path = tmp_path / "last.pt"
    train.save_atomically(lambda p: p.write_text(json.dumps([1])), path)

    def full(p):
        p.write_text("[2, ")
        raise OSError("no space left on device")
    with pytest.raises(OSError):
        train.save_atomically(full, path)
    assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]
