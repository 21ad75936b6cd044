"""Section 11: what is refused, because it would be wrong in silence.

An error is a ValueError that names the argument. What Python or torch says by itself (an
unknown keyword, a prompt that is a text) is not repeated here.
"""
import math
import re
import warnings

import command_line
import numpy as np
import pytest
import tasks
import torch
from helpers import M, Table, tiny_llama

from dlm_spec import (
    SAMPLERS,
    Denoiser,
    KVCache,
    log_likelihood,
    mdlm_loss,
    verify_confidence,
    verify_kl,
    windowed,
)

IDS, NAN, INF = torch.tensor([[1, 2]]), math.nan, math.inf
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def denoiser(model):
    return Denoiser(model, M, eos_ids=(5,))


def table(*rows):
    """Rows (given, word of the message), named by both, but without addresses of objects."""
    return pytest.mark.parametrize("given, message", [
        pytest.param(*row, id=f"{row[1]} {re.sub(' at 0x[0-9a-f]+', '', str(row[0]))[:40]}")
        for row in rows])


def refused(message, call, *args, **kw):
    """call(...) is a ValueError, no subclass of it, and its text has `message`."""
    with warnings.catch_warnings(), pytest.raises(ValueError) as e:
        warnings.simplefilter("ignore")
        call(*args, **kw)
    assert type(e.value) is ValueError and re.search(message, str(e.value)), repr(e.value)


# -------------------------------------------------- every knob of every sampler

COUNTS = ("block_length", "steps", "refresh", "draft_steps", "n")
FROM_ZERO = ("gen_length", "max_revisions", "max_rounds", "max_seeds", "max_checks")
SHARES = ("threshold", "threshold_back", "tau_replace", "tau_remask")
POSITIVE = ("temperature", "cfg_scale", "factor")
SWITCHES = ("suppress_eos", "postpone_eos", "early_stop", "tempered_confidence", "adaptive",
            "commit_cap", "override")
VALUES = {  # knob -> values that are outside its limits
    **dict.fromkeys(COUNTS, (0, -1, 2.5, "4", True, NAN)),
    **dict.fromkeys(FROM_ZERO, (-1, 2.5, "4", True, NAN)),
    **dict.fromkeys(SHARES, (-.1, 1.5, NAN, "0.9", True)),
    **dict.fromkeys(POSITIVE, (-1.0, NAN, INF, "1", True)),
    **dict.fromkeys(SWITCHES, ("no", 1, 0)),
    "remasking": ("lowconfidence", 3), "cache": ("dkw", True, 0),
}
ENDS = {    # knob -> the least value that it takes, and the largest if there is one
    **dict.fromkeys(COUNTS, (1,)), **dict.fromkeys(FROM_ZERO + POSITIVE, (0,)),
    **dict.fromkeys(SHARES, (0, 1)), **dict.fromkeys(SWITCHES, (False, True)),
}
NOT_LIMITED = {"attention_mask", "logits_processor", "generator", "callback", "history",
               "verify", "view", "drafter"}


def test_every_knob_is_in_the_table_of_wrong_values():
    """A new knob has to be refused, too, or to be named as one that takes anything."""
    knobs = set().union(*map(command_line.knobs_of, SAMPLERS.values()))
    assert knobs == VALUES.keys() | NOT_LIMITED


@every_sampler
def test_each_knob_of_each_sampler_has_limits(denoiser, name):
    """CASES 27: a value outside of them is refused by the knob's name and the value, and
    before anything is forwarded."""
    calls, knobs = [], command_line.knobs_of(SAMPLERS[name])
    for knob in sorted(knobs & VALUES.keys()):
        values = VALUES[knob] + (
            ("dkv",) if knob == "cache" and name != "dual_diffusion" else ()
        )
        for value in values:
            given = {"gen_length": 4, "callback": calls.append, knob: value}
            message = rf"{knob} is {re.escape(repr(value))}, expected"
            refused(message, SAMPLERS[name], denoiser, IDS, **given)
    assert calls == []


@every_sampler
def test_the_ends_of_the_limits_are_taken(denoiser, name):
    """The least and the largest value decode, one knob at a time."""
    knobs = command_line.knobs_of(SAMPLERS[name]) & ENDS.keys()
    for knob in sorted(knobs - {"tempered_confidence"}):    # that one needs a temperature
        for value in ENDS[knob]:
            given = {"gen_length": 4, "block_length": 4, knob: value}
            if knob == "refresh" and name == "cover":
                given["cache"] = "dual"
            out = SAMPLERS[name](denoiser, IDS, **given)
            assert out.generated.shape == (1, given["gen_length"])
            assert (out.generated != M).all()


@every_sampler
def test_numbers_of_numpy_do_as_well(denoiser, name):
    """Whole numbers of numpy are whole numbers, its floats are floats."""
    want = SAMPLERS[name](denoiser, IDS, gen_length=4, block_length=2)
    for whole in (np.int64, np.int32):
        got = SAMPLERS[name](denoiser, IDS, gen_length=whole(4), block_length=whole(2),
                             temperature=np.float32(0))
        assert torch.equal(got.sequences, want.sequences)


# -------------------------------------------------- what all samplers share

@every_sampler
@table(
    (dict(gen_length=300), r"2 \+ 300.*256"),
    (dict(generator=[torch.Generator()] * 2), "generator is a list of 2, the batch has 1"),
    (dict(attention_mask=[[1, 0]]), "attention_mask must be left padding"),
    (dict(suppress_eos=True, early_stop=True), "can still be emitted"),
    (dict(suppress_eos=True, postpone_eos=True), "can still be emitted"),
    (dict(prompt=torch.zeros(0, 3, dtype=torch.long)), r"\(0, 3\)"),
    (dict(prompt=IDS[:, :0], gen_length=0), "nothing to decode"),
    (dict(prompt=torch.zeros(1, 2)), "prompt holds torch.float32, expected ids"),
    (dict(prompt=[[1.5, 2.0]]), "prompt holds torch.float32, expected ids"),
    (dict(prompt=torch.ones(1, 2, dtype=torch.bool)), "prompt holds torch.bool"),
    (dict(prompt=torch.tensor([[1, -2]])), "prompt holds .*-2.*vocabulary of 40"),
    (dict(prompt=torch.tensor([[1, 40]])), "prompt holds .*40.*vocabulary of 40"),
    (dict(prompt=[[3], [1, 1 << 40]]), "prompt holds .*1099511627776.*vocabulary of 40"),
    (dict(prompt=torch.zeros(1, 257, dtype=torch.long)), r"257 \+ 4.*256"),
    (
        dict(prompt=[[1], [1, 2]], attention_mask=[[0, 1], [1, 1]]),
        "attention_mask: drop yours",
    ),
)
def test_what_every_sampler_refuses(denoiser, name, given, message):
    given = {"prompt": IDS, "gen_length": 4, **given}
    refused(message, SAMPLERS[name], denoiser, **given)


@every_sampler
@pytest.mark.parametrize("knob", ["early_stop", "postpone_eos", "suppress_eos"])
def test_an_end_of_text_needs_its_ids(model, name, knob):
    refused("need a denoiser with eos_ids", SAMPLERS[name], Denoiser(model, M), IDS,
            **{knob: True})


@every_sampler
@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
def test_logits_that_cannot_be_used_are_refused(name, bad):
    """At once, at the forward that gave them, and not as M or id 0 in a text."""
    logits = torch.zeros(8, 40)
    logits[4, 7] = bad
    refused(
        "logits cannot be used", SAMPLERS[name], Denoiser(Table(logits), M), IDS, gen_length=4
    )


# -------------------------------------------------- what is only doubtful: a warning

@every_sampler
@pytest.mark.parametrize("prompt", [[[0, 7, 7], [7, 7, 7]], [[7, 7, 7], [7, 7, 0]]],
                         ids=["left", "right"])
def test_padding_without_a_mask_is_named(model, name, prompt):
    """CASES 41: in every sampler, on either side; with a mask, or as a list of rows of unequal
    length, it is none."""
    d, knobs = Denoiser(model, M, pad_id=0), dict(gen_length=2)
    with pytest.warns(UserWarning, match="padding id 0.*attention_mask"):
        SAMPLERS[name](d, torch.tensor(prompt), **knobs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAMPLERS[name](d, torch.tensor(prompt), attention_mask=torch.ones(2, 3), **knobs)
        SAMPLERS[name](d, [[7, 7, 7], [7, 7]], **knobs)
        SAMPLERS[name](d, torch.tensor([[7, 0, 7]]), **knobs)


def test_a_warning_comes_once(model):
    """As Python's own filter has it: for each text."""
    d = Denoiser(model, M, pad_id=0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            log_likelihood(d, torch.tensor([[0, 7]]), [[3]], n_samples=1)
    assert len(found) == 1


@every_sampler
def test_a_canvas_longer_than_in_training_is_named(name):
    """CASES 41: by `trained_gen_length` of the model's config; without it nothing is known."""
    model = tiny_llama(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAMPLERS[name](Denoiser(model, M), IDS, gen_length=6)
        model.config.trained_gen_length = 6
        SAMPLERS[name](Denoiser(model, M), IDS, gen_length=6)
    with pytest.warns(UserWarning, match=r"gen_length is 7, .* at most 6 tokens"):
        SAMPLERS[name](Denoiser(model, M), IDS, gen_length=7)


# -------------------------------------------------- knobs that depend on each other

@pytest.mark.parametrize("name, given, message", [
    ("llada", dict(steps=1, block_length=2), "steps is 1, but there are 2 blocks"),
    ("llada", dict(tempered_confidence=True), "tempered_confidence changes nothing"),
    ("llada", dict(tempered_confidence=True, temperature=1.0, remasking="random"),
     "tempered_confidence changes nothing"),
    ("fast_dllm", dict(threshold=.9, factor=1), "threshold and factor were given"),
    ("dkv", dict(steps=1, block_length=1), "steps is 1, but there are 4 blocks"),
    ("dkv", dict(steps=4, threshold=.9), "steps and threshold were given"),
    ("dual_diffusion", dict(verify=lambda judged, tokens: None), "verify gave None"),
    ("dual_diffusion", dict(verify=lambda judged, tokens: tokens[:0] > 0), "verify gave"),
    ("dual_diffusion", dict(verify=lambda judged, tokens: tokens[:, None] > 0), "verify gave"),
    ("dual_diffusion", dict(verify=lambda judged, tokens: tokens * .5), "verify gave .*bool"),
    ("cover", dict(refresh=4), "refresh .*cache"),
])
def test_knobs_that_exclude_each_other(denoiser, name, given, message):
    """CASES 10 and 27: two rules of which one would be ignored, an option without its base."""
    refused(message, SAMPLERS[name], denoiser, IDS, **{"gen_length": 4, **given})


@pytest.mark.parametrize("other", ["mask", "vocabulary"])
def test_a_drafter_of_another_vocabulary_is_refused(denoiser, other):
    drafter = (Denoiser(denoiser.model, M - 1) if other == "mask"
               else Denoiser(tiny_llama(1, vocab=44), M))
    refused("the drafter", SAMPLERS["dual_diffusion"], denoiser, IDS, gen_length=4,
            drafter=drafter)


# -------------------------------------------------- the denoiser

@table(
    (dict(mask_id=None), "mask_id is None.*mask_id="),
    (dict(mask_id=-1), "mask_id .*-1"), (dict(mask_id=40), "mask_id .*40 embeddings"),
    (dict(pad_id=40), "pad_id .*40 embeddings"), (dict(pad_id=-1), "pad_id .*-1"),
    (dict(eos_ids=(5, 99)), "eos_ids .*99"), (dict(eos_ids=(5, -1)), "eos_ids .*-1"),
    (dict(eos_ids=(M,)), "eos_ids .*mask_id"),
)
def test_wrong_ids_of_a_denoiser(model, given, message):
    """CASES 32."""
    refused(message, Denoiser, **{"model": model, "mask_id": M, **given})


def test_a_window_without_what_was_stored_is_refused(denoiser):
    ask = IDS > 1
    for kv in (None, KVCache(IDS)):
        refused("window", windowed, denoiser, IDS, ask, kv=kv, window=ask)


# -------------------------------------------------- verifiers, likelihood, loss, copies

JUDGED, TOKENS = torch.zeros(3, 8), torch.tensor([1, 2, 3])


@table(
    ((verify_kl, JUDGED, TOKENS, JUDGED, dict(tau=-1)), "tau.* is -1"),
    ((verify_kl, JUDGED, TOKENS, JUDGED, dict(tau=NAN)), "tau.* is nan"),
    ((verify_confidence, JUDGED, TOKENS, dict(tau=1.5)), "tau is 1.5"),
    ((verify_confidence, JUDGED, TOKENS, dict(tau=NAN)), "tau is nan"),
    ((verify_confidence, JUDGED, TOKENS, dict(of="mean")), "of is 'mean'"),
)
def test_wrong_verifier_arguments(given, message):
    rule, *tensors, knobs = given
    refused(message, rule, *tensors, **knobs)


@table(
    *((dict(n_samples=v), f"n_samples is {v!r}") for v in (0, 2.5, "8", True)),
    *((dict(batch_size=v), f"batch_size is {v!r}") for v in (0, 1.5)),
    *((dict(cfg_scale=v), f"cfg_scale is {v!r}") for v in (NAN, -1, "1")),
    (dict(answer=[[]]), "answer .*empty"),
    (dict(answer=[[1], [2]]), "answer has 2 rows, expected 1"),
    (dict(answer=[[1.5]]), "answer holds torch.float32"),
    (dict(answer=[[40]]), "answer holds .*40.*vocabulary of 40"),
    (dict(answer=[[-1]]), "answer holds .*-1.*vocabulary of 40"),
    (dict(prompt=[[1], [2]], answer=[[3], [3, 40]]), "answer holds .*40.*vocabulary"),
    (dict(answer=[[M]]), "mask"), (dict(prompt=[[1, M]]), "mask"),
    (dict(answer=torch.zeros(1, 255, dtype=torch.long)), r"2 \+ 255.*256"),
    (dict(prompt=[[1.5]]), "prompt holds torch.float32"),
)
def test_wrong_likelihood_arguments(denoiser, given, message):
    refused(message, log_likelihood, denoiser,
            **{"prompt": [[1, 2]], "answer": [[3]], "n_samples": 2, **given})


def test_a_row_without_an_answer_has_no_loss(denoiser):
    x, answer = torch.tensor([[1, 2, 3]]), torch.tensor([[False, True, True]])
    refused("every row", mdlm_loss, denoiser.model, x, ~answer & answer, mask_id=M)


def test_a_causal_model_has_no_loss():
    """CASES 31: its own attention would train it in silence, and wrongly."""
    x = torch.tensor([[1, 2, 3]])
    refused("causal.*set_attn_implementation", mdlm_loss, tiny_llama(1), x, x > 1, mask_id=M)


def test_a_name_that_is_not_in_the_module_cannot_be_copied():
    refused("'sample_beam'", command_line.copy_out, "sample_beam")


# -------------------------------------------------- the tools beside the notebooks

@table(
    (("maths", "test", 1), "family is 'maths'"), (("math", "dev", 1), "split is 'dev'"),
    (("math", "test", -1), "n is -1"), (("math", "test", 2.5), "n is 2.5"),
    (("math", "test", True), "n is True"),
)
def test_wrong_requests_for_problems(given, message):
    refused(message, tasks.problems, *given)


@table(
    ((tasks.Problem("math", "", "", "1", ""), None), "text is None"),
    ((None, "text"), "problem is None"),
    ((tasks.Problem("poems", "", "", "", ""), "text"), "family is 'poems'"),
)
def test_what_cannot_be_graded(given, message):
    refused(message, tasks.grade, *given)


def test_as_many_texts_as_problems():
    refused(
        "1 problems but 2 texts", tasks.grade_all, tasks.problems("math", "train", 1), ["", ""]
    )


@pytest.mark.parametrize("timeout", [0, -1, NAN, "2"])
def test_wrong_times_for_the_grader(timeout):
    problem = tasks.problems("code", "train", 1)[0]
    refused(f"timeout is {timeout!r}", tasks.grade_code, [(problem, problem.answer)], timeout)


@table(
    ((3, 2), "k is 3 and n is 2"), ((-1, 2), "k is -1"), ((0, 0), "n is 0"), ((NAN, 2), "nan")
)
def test_wrong_shares(given, message):
    refused(message, tasks.wilson, *given)
