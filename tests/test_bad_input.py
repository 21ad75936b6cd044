"""Wrong arguments, one per line: what is given, and what the error says (CASES 10 and 27 too).

An error names the argument, its value and what was expected.
"""
import math
import re
import warnings

import numpy as np
import pytest
import tasks
import torch
from helpers import M, copy_of_embedded, tiny_llama

import dlm_spec
from dlm_spec import (
    SAMPLERS,
    Denoiser,
    LiveCanvas,
    log_likelihood,
    mdlm_loss,
    revision_statistics,
    verify_confidence,
    verify_kl,
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
    """Rows (given, message), named by their messages."""
    return pytest.mark.parametrize("given, message", [pytest.param(*r, id=r[1]) for r in rows])


def refused(message, call, *args, kind=ValueError, **kw):
    with warnings.catch_warnings(), pytest.raises(kind) as e:
        warnings.simplefilter("ignore")
        call(*args, **kw)
    assert type(e.value) is kind and re.search(message, str(e.value)), repr(e.value)


# -------------------------------------------------- what all samplers share

@every_sampler
@table(
    (dict(gen_length=-1), "gen_length is -1, expected a whole number"),
    (dict(gen_length=2.5), "gen_length is 2.5, expected a whole number"),
    (dict(gen_length="4"), "gen_length is '4', expected a whole number"),
    (dict(gen_length=None), "gen_length is None, expected a whole number"),
    (dict(gen_length=NAN), "gen_length is nan, expected a whole number"),
    (dict(gen_length=True), "gen_length is True, expected a whole number"),
    (dict(gen_length=300), r"prompt \+ gen_length is 2 \+ 300 = 302 tokens, the model takes 256"),
    (dict(block_length=0), "block_length is 0, expected a whole number from 1"),
    (dict(block_length=-3), "block_length is -3, expected a whole number from 1"),
    (dict(block_length=2.5), "block_length is 2.5, expected a whole number"),
    (dict(block_length="4"), "block_length is '4', expected a whole number"),
    (dict(block_length=True), "block_length is True, expected a whole number"),
    (dict(temperature=-1.0), "temperature is -1.0, expected a finite number from 0"),
    (dict(temperature=NAN), "temperature is nan, expected a finite number"),
    (dict(temperature=INF), "temperature is inf, expected a finite number"),
    (dict(temperature="hot"), "temperature is 'hot', expected a finite number"),
    (dict(temperature=None), "temperature is None, expected a finite number"),
    (dict(generator=3), "generator is 3, expected"),
    (dict(generator=3, temperature=1.0), "generator is 3, expected "),
    (dict(generator=[torch.Generator()] * 2), "generator is a list of 2, the batch has 1 row"),
    (dict(generator=[7], temperature=1.0), r"generator is \[7\], expected"),
    (dict(logits_processor=3), "logits_processor is 3, expected a callable"),
    (dict(early_stop="no"), "early_stop is 'no', expected True or False"),
    (dict(suppress_eos=1), "suppress_eos is 1, expected True or False"),
    (dict(postpone_eos=None), "postpone_eos is None, expected True or False"),
    (dict(callback=3), "callback is 3, expected a callable"),
    (dict(streamer=3), "streamer is 3, expected an object with put and end"),
    (dict(attention_mask=torch.ones(1, 3)), r"attention_mask has shape \(1, 3\), the prompt \(1,"),
    (dict(attention_mask=[[1, 0]]), "attention_mask must be left padding"),
    (dict(attention_mask=[[0, 0]], gen_length=0), "attention_mask leaves nothing of row 0"),
)
def test_what_every_sampler_refuses(denoiser, name, given, message):
    refused(message, SAMPLERS[name], denoiser, IDS, **{"gen_length": 4, **given})


@every_sampler
@table(
    ([], "prompt is an empty list, expected at least one row"),
    ("text", "prompt is str 'text', expected integer ids"),
    (["text"], "prompt is str 'text', expected integer ids"),
    (None, "prompt is NoneType 'None', expected integer ids"),
    ([[1], None], "prompt is NoneType 'None', expected integer ids"),
    (7, "prompt has shape"),
    (torch.zeros(0, 3, dtype=torch.long), r"prompt has shape \(0, 3\): an empty batch"),
    (torch.zeros(1, 1, 1, dtype=torch.long), r"prompt has shape \(1, 1, 1\), expected \(B, P\)"),
    (torch.zeros(1, 2), "prompt holds torch.float32, expected integer ids"),
    (np.zeros((1, 2)), "prompt holds torch.float64, expected integer ids"),
    ([[1.5, 2.0]], "prompt holds torch.float32, expected integer ids"),
    (torch.ones(1, 2, dtype=torch.bool), "prompt holds torch.bool, expected integer ids"),
    ([[True, False]], "prompt holds torch.bool, expected integer ids"),
    ([[1, None]], r"prompt is list '\[1, None\]', expected integer ids"),
    ((IDS, torch.ones(1, 2)), "prompt holds torch.float32, expected integer ids"),
    ((IDS, torch.ones(1, 2, dtype=torch.bool)), "prompt is the pair that `encode` gives: ids,"),
    ([IDS, IDS], r"prompt is a list of \[\(1, 2\), \(1, 2\)\], expected rows of ids"),
    (torch.tensor([[1, -2]]), r"prompt\[0, 1\] is -2, outside the vocabulary of 40 ids"),
    (torch.tensor([[1, 40]]), r"prompt\[0, 1\] is 40, outside the vocabulary of 40 ids"),
    ([[3], [1, 1 << 40]], r"prompt\[1, 1\] is 1099511627776, outside the vocabulary of 40 ids"),
    ([[1, 1 << 70]], "prompt"),
    (torch.zeros(1, 257, dtype=torch.long), r"257 \+ 4 = 261 tokens, the model takes 256"),
)
def test_prompts_that_every_sampler_refuses(denoiser, name, given, message):
    refused(message, SAMPLERS[name], denoiser, given, gen_length=4)


@every_sampler
@table(
    ("LLaDA-8B", "denoiser is 'LLaDA-8B', expected a Denoiser"),
    ("model", r"(?s)denoiser is LlamaForCausalLM\(.*, expected a Denoiser"),
)
def test_what_is_no_denoiser(model, name, given, message):
    refused(message, SAMPLERS[name], model if given == "model" else given, IDS, gen_length=4)


@every_sampler
def test_an_unknown_keyword_is_python_s_own_error(denoiser, name):
    refused("unexpected keyword argument 'treshold'", SAMPLERS[name], denoiser, IDS, treshold=.5,
            kind=TypeError)


@every_sampler
@pytest.mark.parametrize("knob", ["early_stop", "postpone_eos", "suppress_eos"])
def test_an_end_of_text_needs_its_ids(model, name, knob):
    refused("need a denoiser with eos_ids", SAMPLERS[name], Denoiser(model, M), IDS, **{knob: True})


@every_sampler
def test_nothing_to_decode(denoiser, name):
    refused("nothing to decode", SAMPLERS[name], denoiser, IDS[:, :0], gen_length=0)


@every_sampler
def test_rows_of_different_lengths_have_a_mask_of_their_own(denoiser, name):
    refused("prompt is a list of rows of different lengths, .*: drop yours", SAMPLERS[name],
            denoiser, [[1], [1, 2]], gen_length=4, attention_mask=[[0, 1], [1, 1]])


@every_sampler
def test_numbers_of_numpy_do_as_well(denoiser, name):
    """Whole numbers of numpy are whole numbers, its floats are floats."""
    want = SAMPLERS[name](denoiser, IDS, gen_length=4, block_length=2)
    for whole in (np.int64, np.int32):
        got = SAMPLERS[name](denoiser, IDS, gen_length=whole(4), block_length=whole(2),
                             temperature=np.float32(0))
        assert torch.equal(got.sequences, want.sequences)


# -------------------------------------------------- each sampler's own knobs

WRONG = {
    "llada": [
        (dict(steps=0), "steps is 0, expected a whole number from 1"),
        (dict(steps=1, block_length=2), "steps is 1, expected a whole number from 2"),
        (dict(steps=2.0), "steps is 2.0, expected a whole number"),
        (dict(steps=True), "steps is True, expected a whole number"),
        (dict(steps="4"), "steps is '4', expected a whole number"),
        (dict(remasking="lowconfidence"), "remasking is 'lowconfidence', expected 'low"),
        (dict(remasking=None), "remasking is None, expected 'low"),
        (dict(remasking=[]), r"remasking is \[\], expected 'low"),
        (dict(cfg_scale=-2.0), "cfg_scale is -2.0, expected a finite number from 0"),
        (dict(cfg_scale=NAN), "cfg_scale is nan, expected a finite number"),
        (dict(cfg_scale="1"), "cfg_scale is '1', expected a finite number"),
        (dict(tempered_confidence=True), "tempered_confidence changes nothing at temperature 0"),
        (dict(suppress_eos=True, early_stop=True), "with suppress_eos no eos is ever emitted"),
    ],
    "fast_dllm": [
        (dict(threshold=NAN), "threshold is nan, expected a (finite )?number"),
        (dict(threshold=1.5), "threshold is 1.5, expected a number from 0 to 1"),
        (dict(threshold=-.1), "threshold is -0.1, expected a (finite )?number"),
        (dict(threshold="0.9"), "threshold is '0.9', expected a (finite )?number"),
        (dict(factor=NAN), "factor is nan, expected a (finite )?number"),
        (dict(factor=-1), "factor is -1, expected a (finite )?number"),
        (dict(factor=INF), "factor is inf, expected a (finite )?number"),
        (dict(factor="1"), "factor is '1', expected a (finite )?number"),
        (dict(threshold=.9, factor=1), "threshold and factor were given, .* pass one"),
        (dict(cache="dkv"), "cache is 'dkv', expected None, 'prefix' or 'dual'"),
        (dict(cache=True), "cache is True, expected None"),
        (dict(cache=[]), r"cache is \[\], expected None"),
        (dict(block_length=None), "block_length is None, expected a whole number"),
    ],
    "dkv": [
        (dict(steps=0), "steps is 0, expected a whole number from 1"),
        (dict(steps=1, block_length=1), "steps is 1, expected a whole number from 4"),
        (dict(steps=2.0), "steps is 2.0, expected a whole number"),
        (dict(steps=True), "steps is True, expected a whole number"),
        (dict(steps=4, threshold=.9), "threshold and steps were given, .* pass one"),
        (dict(threshold=NAN), "threshold is nan, expected a (finite )?number"),
        (dict(threshold="0.9"), "threshold is '0.9', expected a (finite )?number"),
        (dict(refresh=0), "refresh is 0, expected a whole number from 1"),
        (dict(refresh=1.5), "refresh is 1.5, expected a whole number"),
        (dict(refresh=True), "refresh is True, expected a whole number"),
    ],
    "dual_diffusion": [
        (dict(draft_steps=0), "draft_steps is 0, expected a whole number from 1"),
        (dict(draft_steps=1.5), "draft_steps is 1.5, expected a whole number"),
        (dict(draft_steps=True), "draft_steps is True, expected a whole number"),
        (dict(max_revisions=-1), "max_revisions is -1, expected a whole number from 0"),
        (dict(max_revisions=None), "max_revisions is None, expected a whole number"),
        (dict(max_revisions=True), "max_revisions is True, expected a whole number"),
        (dict(max_rounds=-1), "max_rounds is -1, expected a whole number from 0"),
        (dict(max_rounds=2.0), "max_rounds is 2.0, expected a whole number"),
        (dict(verify="kl"), "verify is 'kl', expected verify_trust, verify_kl"),
        (dict(verify=None), "verify is None, expected verify_trust"),
        (dict(verify=lambda j, t, q: None), "verify .*None.* expected bool"),
        (dict(verify=lambda j, t, q: t[:0] > 0), r"verify .*\(0,\).* expected"),
        (dict(verify=lambda j, t, q: t[:, None] > 0), r"verify .* expected"),
        (dict(verify=lambda j, t, q: t * .5), "verify .*float32.* expected"),
        (dict(view="loo"), "view is 'loo', expected 'visible', 'leave_one_out' or 'cover'"),
        (dict(view=None), "view is None, expected 'visible'"),
        (dict(drafter=3), "drafter is 3, expected a Denoiser"),
        (dict(drafter="other mask"), "the drafter's mask_id is 38, the verifier's 39"),
        (dict(drafter="other words"), "the drafter has 44 embeddings, the verifier 40"),
        (dict(adaptive="yes"), "adaptive is 'yes', expected True or False"),
        (dict(drafter="same", view="cover"), "view='cover' .* takes no second drafter"),
        (dict(cache="dkw"), "cache is 'dkw', expected None, 'prefix', 'dual' or 'dkv'"),
        (dict(threshold=NAN), "threshold is nan, expected a (finite )?number"),
        (dict(threshold=.9, factor=1), "threshold and factor were given, .* pass one"),
    ],
    "wino": [
        (dict(threshold=NAN), "threshold is nan, expected a number from 0 to 1"),
        (dict(threshold=1.5), "threshold is 1.5, expected a number from 0 to 1"),
        (dict(threshold="0.6"), "threshold is '0.6', expected a number from 0 to 1"),
        (dict(threshold=None), "threshold is None, expected a number from 0 to 1"),
        (dict(threshold_back=-1), "threshold_back is -1, expected a number from 0 to 1"),
        (dict(threshold_back=NAN), "threshold_back is nan, expected a number from 0 to 1"),
    ],
    "saber": [
        (dict(n=0), "n is 0, expected a whole number from 1"),
        (dict(n=2.0), "n is 2.0, expected a whole number from 1"),
        (dict(n="2"), "n is '2', expected a whole number from 1"),
        (dict(n=True), "n is True, expected a whole number from 1"),
    ],
    "cover": [
        (dict(threshold=NAN), "threshold is nan, expected a number from 0 to 1"),
        (dict(threshold="0.6"), "threshold is '0.6', expected a number from 0 to 1"),
        (dict(tau_replace=1.1), "tau_replace is 1.1, expected a number from 0 to 1"),
        (dict(tau_remask=NAN), "tau_remask is nan, expected a number from 0 to 1"),
        (dict(tau_remask=None), "tau_remask is None, expected a number from 0 to 1"),
        (dict(seed_share=-.1), "seed_share is -0.1, expected a number from 0 to 1"),
        (dict(max_seeds=-1), "max_seeds is -1, expected a whole number from 0"),
        (dict(max_seeds=2.5), "max_seeds is 2.5, expected a whole number"),
        (dict(max_seeds=True), "max_seeds is True, expected a whole number"),
        (dict(max_checks=-1), "max_checks is -1, expected a whole number from 0"),
        (dict(max_checks="2"), "max_checks is '2', expected a whole number"),
        (dict(min_score=NAN), "min_score is nan, expected a finite number"),
        (dict(min_score="0"), "min_score is '0', expected a finite number"),
        (dict(uncertainty="margin"), "uncertainty is 'margin', expected 'entropy' or 'commit'"),
        (dict(score=3), "score is 3, expected a callable"),
        (dict(score=0), "score is 0, expected a callable"),
        (dict(probe_layers=()), r"probe_layers is \(\), expected layers out of 0..0"),
        (dict(probe_layers=(1,)), r"probe_layers is \(1,\), expected layers out of 0..0"),
        (dict(probe_layers=(0.5,)), r"probe_layers is \(0.5,\), expected layers out of 0..0"),
        (dict(probe_layers=0), "probe_layers is 0, expected layers out of 0..0"),
        (dict(commit_cap=20), "commit_cap is 20, expected True or False"),
        (dict(remask_limit=None), "remask_limit is None, expected True or False"),
        (dict(closing=3, max_seeds=0), "closing is 3, but with max_seeds 0 and max_checks 2"),
        (dict(score=lambda u, i, o: u[0]), r"score gave \(6,\), expected a tensor of shape"),
        (dict(score=lambda u, i, o: 1.0), "score gave 1.0, expected a tensor of shape"),
        (dict(refresh=4), "refresh is 4, but without a cache every forward is full"),
        (dict(refresh=0, cache="dual"), "refresh is 0, expected a whole number from 1"),
        (dict(cache="dkv"), "cache is 'dkv', expected None, 'prefix' or 'dual'"),
    ],
}
assert WRONG.keys() == SAMPLERS.keys()


@pytest.mark.parametrize("name, given, message", [
    pytest.param(name, *row, id=f"{name}: {row[1]}")
    for name, rows in WRONG.items() for row in rows])
def test_wrong_knobs_of_one_sampler(denoiser, name, given, message):
    others = {"same": denoiser, "other mask": Denoiser(denoiser.model, M - 1),
              "other words": Denoiser(tiny_llama(1, vocab=44), M)}
    if isinstance(given.get("drafter"), str):
        given = {**given, "drafter": others[given["drafter"]]}
    refused(message, SAMPLERS[name], denoiser, IDS, **{"gen_length": 4, **given})


# -------------------------------------------------- the denoiser

@table(
    (dict(mask_id=None), "mask_id is None, expected the id of the mask token"),
    (dict(mask_id=-1), "mask_id is -1, expected the id"),
    (dict(mask_id=True), "mask_id is True, expected the id"),
    (dict(mask_id=1.0), "mask_id is 1.0, expected the id"),
    (dict(mask_id="<mask>"), "mask_id is '<mask>', expected the id"),
    (dict(mask_id=40), "mask_id is 40, but the model has 40 embeddings"),
    (dict(pad_id=40), "pad_id is 40, but the model has 40 embeddings"),
    (dict(pad_id=-1), "pad_id is -1, (expected|but the model has 40)"),
    (dict(pad_id="x"), "pad_id is 'x', expected"),
    (dict(pad_id=1.5), "pad_id is 1.5, expected"),
    (dict(eos_ids=5), "eos_ids is 5, expected a tuple of ids"),
    (dict(eos_ids="5"), "eos_ids is '5', expected a tuple of ids"),
    (dict(eos_ids=(5, 99)), "eos_ids is 99, but the model has 40 embeddings"),
    (dict(eos_ids=(-1,)), "eos_ids is -1, expected a whole number from 0"),
    (dict(eos_ids=(1.5,)), "eos_ids is 1.5, expected a whole number from 0"),
    (dict(eos_ids=(M,)), "eos_ids .*39.* mask"),
    (dict(n_tokens=0), "n_tokens is 0, expected"),
    (dict(n_tokens=-1), "n_tokens is -1, expected"),
    (dict(n_tokens="all"), "n_tokens is 'all', expected"),
    (dict(n_tokens=1.5), "n_tokens is 1.5, expected"),
    (dict(model=None), "model is None, expected"),
    (dict(model="GSAI-ML/LLaDA"), "model is 'GSAI-ML/LLaDA', .*load_denoiser"),
)
def test_wrong_ids_of_a_denoiser(model, given, message):
    refused(message, lambda model, mask_id, **kw: Denoiser(model, mask_id, **kw),
            **{"model": model, "mask_id": M, **given})


ASK, FULL = torch.tensor([[False, True]]), torch.ones(1, 2, dtype=torch.bool)


@table(
    ((IDS, ASK[:, :1]), r"ask is torch.bool of shape \(1, 1\) and x has shape \(1, 2\), expected"),
    ((IDS, ASK.long()), "ask .*int64.* expected bool"),
    ((IDS[0], ASK[0]), r"x has shape \(2,\), expected bool, both \(B, L\)"),
    ((IDS, ASK, None, dict(cfg_scale=1.0)), "cfg_scale is 1.0: guidance needs `given`"),
    ((IDS, ASK, None, dict(window=FULL)), "a window needs a kv that an earlier forward has filled"),
    ((IDS, ASK, None, dict(seeds=ASK)), "seeds needs a kv that an earlier forward has filled"),
)
def test_wrong_canvases(denoiser, given, message):
    x, ask, mask, kw = given if len(given) == 4 else (*given, None)[:3] + ({},)
    refused(message, denoiser, x, ask, mask, **kw)


@pytest.fixture(scope="module")
def embedded():
    return dlm_spec.load_denoiser(device="cpu")


@table(
    (None, "text is None, expected a str, a list"),
    ("", "text is '', expected a str, a list"),
    ([], r"text is \[\], expected a str, a list"),
    ([""], "prompt 0 is '', expected a text"),
    (["hi", " \n"], r"prompt 1 is ' \\n', expected a text"),
    (5, "text is 5, expected a str, a list"),
    (b"hi", "prompt 0 is 104, expected a text"),
    ({"role": "user", "content": "hi"}, "text is {.*}, expected a str, a list"),
    (["hi", None], "prompt 1 is None, expected"),
    (["hi", 5], "prompt 1 is 5, expected"),
    ([[]], r"prompt 0 is \[\], expected a text"),
    ([{"content": "hi"}], "prompt 0 is .* expected"),
    ([{"role": "user"}], "prompt 0 is .* expected"),
)
def test_text_that_is_no_prompt(embedded, given, message):
    refused(message, embedded.encode, given)


# -------------------------------------------------- verifiers, likelihood, loss, statistics

J, T = torch.zeros(3, 8), torch.tensor([1, 2, 3])


@table(
    ((verify_kl, J, T, J, dict(tau=-1)), "tau is -1, expected nats from 0"),
    ((verify_kl, J, T, J, dict(tau=NAN)), "tau is nan, expected nats from 0"),
    ((verify_kl, J, T, J, dict(tau=None)), "tau is None, expected nats from 0"),
    ((verify_kl, J, T, J, dict(tau="1")), "tau is '1', expected nats from 0"),
    ((verify_kl, J, T, J, dict(tau=0, stochastic=True)), "tau is 0, expected nats .*above 0"),
    ((verify_confidence, J, T, J, dict(tau=1.5)), "tau is 1.5, expected a number from 0 to 1"),
    ((verify_confidence, J, T, J, dict(tau=NAN)), "tau is nan, expected a number from 0 to 1"),
    ((verify_confidence, J, T, J, dict(tau="1")), "tau is '1', expected a number from 0 to 1"),
    ((verify_confidence, J, T, J, dict(of="mean")), "of is 'mean', expected 'token' or 'max'"),
)
def test_wrong_verifier_arguments(given, message):
    rule, *tensors, knobs = given
    refused(message, rule, *tensors, **knobs)


@table(
    (dict(n_samples=0), "n_samples is 0.* expected"),
    (dict(n_samples=2.5), "n_samples is 2.5.* expected"),
    (dict(n_samples="8"), "n_samples is '8'.* expected"),
    (dict(n_samples=True), "n_samples is True.* expected"),
    (dict(batch_size=0), "batch_size (is )?0, expected"),
    (dict(batch_size=1.5), "batch_size (is )?1.5.* expected"),
    (dict(cfg_scale=NAN), "cfg_scale is nan, expected"),
    (dict(cfg_scale=-1), "cfg_scale is -1, expected"),
    (dict(cfg_scale="1"), "cfg_scale is '1', expected"),
    (dict(answer=[[]]), "answer must be one list of ids per prompt, none of them empty"),
    (dict(answer=[]), "1 prompts but 0 answers"),
    (dict(answer=[[1], [2]]), "1 prompts but 2 answers"),
    (dict(answer=[1, 2]), "answer must be one list of ids per prompt"),
    (dict(answer="text"), "answer is str 't', expected integer ids"),
    (dict(answer=[[1.5]]), "answer holds torch.float32, expected integer ids"),
    (dict(answer=[[40]]), r"answer\[0, 0\] is 40, outside the vocabulary of 40"),
    (dict(answer=[[-1]]), r"answer\[0, 0\] is -1, outside the vocabulary of 40"),
    (dict(prompt=[[1], [2]], answer=[[3], [3, 40]]), r"answer\[1, 1\] is 40, outside the"),
    (dict(answer=[[M]]), "holds mask tokens"),
    (dict(answer=torch.zeros(1, 255, dtype=torch.long)), r"2 \+ 255 = 257 tokens, .* takes 256"),
    (dict(prompt=[[1, M]]), "holds mask tokens"),
    (dict(prompt=[]), "prompt is an empty list"),
    (dict(prompt="text"), "prompt is str 'text'"),
    (dict(attention_mask=torch.ones(1, 3)), r"attention_mask has shape \(1, 3\), the prompt"),
)
def test_wrong_likelihood_arguments(denoiser, given, message):
    refused(message, log_likelihood, denoiser, **{"prompt": [[1, 2]], "answer": [[3]],
                                                  "n_samples": 2, **given})


X = torch.tensor([[1, 2, 3]])
A = torch.tensor([[False, True, True]])


@table(
    (dict(answer=A[:, :2]), r"answer has shape \(1, 2\) and x \(1, 3\)"),
    (dict(answer=~A & A), "every row needs an answer token"),
    (dict(mask_id=None), "mask_id is None, expected"),
    (dict(mask_id=-1), "mask_id is -1, expected"),
    (dict(model="causal"), "causal attention: model.set_attn_implementation"),
)
def test_wrong_loss_arguments(denoiser, given, message):
    if given.get("model") == "causal":
        given = {"model": tiny_llama(1)}
    refused(message, mdlm_loss, **{"model": denoiser.model, "x": X, "answer": A, "mask_id": M,
                                   **given})


@pytest.fixture(scope="module")
def out(denoiser):
    return dlm_spec.sample_wino(denoiser, IDS, gen_length=8, threshold=.0, threshold_back=1.0)


@table(
    (torch.zeros(2, 10), r"reference has shape \(2, 10\), expected that of sequences, \(1, 10\)"),
    (torch.zeros(1, 9), r"reference has shape \(1, 9\), expected"),
    (torch.zeros(10), r"reference has shape \(10,\), expected that of sequences, \(1, 10\)"),
)
def test_wrong_references(out, given, message):
    refused(message, revision_statistics, out, given)


# -------------------------------------------------- the command line and the notebooks' tools

@pytest.mark.parametrize("option, message", [
    ("--threshold=nan", "threshold is nan"), ("--threshold=2", "threshold is 2"),
    ("--factor=1", "threshold and factor were given"), ("--temperature=nan", "temperature is nan"),
    ("--temperature=-1", "temperature is -1"), ("--block-length=0", "block_length is 0"),
    ("--gen-length=-1", "gen_length is -1"), ("--gen-length=four", "--gen-length: invalid int"),
    ("--mask-id=-3", "mask_id is -3"), ("--mask-id=9999", "mask_id is 9999"),
    ("--device=gpu", "device is 'gpu'"), ("--sampler=ar", "argument --sampler: invalid choice"),
    ("--model=README.md", "no checkpoint at 'README.md'"), ("--model=./x", "no model folder './x'"),
    ("--cache=dkv", "cache is 'dkv'"), ("--steps=4", "--sampler fast_dllm has no steps"),
    ("--verify=kl", "--sampler fast_dllm has no verify"),
    ("--seed=3", "--seed changes nothing at temperature 0"),
    ("--sampler=dual_diffusion --tau=7", "tau is 7.0"),
    (f"--temperature=1 --seed={2 ** 70}", "--seed is 1180591620717411303424"),
    ("--compare", "--compare runs all samplers and shows no canvas: drop --sampler and --quiet"),
])
def test_the_command_line_says_which_option_is_wrong(option, message, capsys):
    """Exit code 2, no traceback; an option that another makes meaningless is wrong, too."""
    argv = ["--device=cpu", "--quiet", "--gen-length=4", "--sampler=fast_dllm", "--threshold=.5"]
    with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dlm_spec.main([*argv, "What is it?", *option.split()])
    assert stop.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_a_live_canvas_without_a_tokenizer_says_so(denoiser):
    refused("tokenizer", LiveCanvas, denoiser)


@table(
    (("maths", "test", 1), "family is 'maths', expected one of"),
    ((None, "test", 1), "family is None, expected one of"),
    ((["math"], "test", 1), r"family is \['math'\], expected one of"),
    (("math", "dev", 1), "split is 'dev', expected one of"),
    (("math", "test", -1), "n is -1, expected"),
    (("math", "test", 2.5), "n is 2.5, expected"),
    (("math", "test", "2"), "n is '2', expected"),
    (("math", "test", None), "n is None, expected"),
    (("math", "test", NAN), "n is nan, expected"),
    (("math", "test", True), "n is True, expected"),
)
def test_wrong_requests_for_problems(given, message):
    refused(message, tasks.problems, *given)


@pytest.fixture(scope="module")
def problem():
    return {f: tasks.problems(f, "train", 1)[0] for f in tasks.FAMILIES}


@table(
    (("math", None), "text is None, expected a str"),
    (("math", 5), "text is 5, expected a str"),
    (("choice", b"Answer: A"), "text is b'Answer: A', expected a str"),
    (("code", None), "text is None, expected a str"),
    ((None, "text"), "problem is None, expected a Problem"),
    (("unknown", "text"), "family is 'poems', expected one of"),
)
def test_what_cannot_be_graded(problem, given, message):
    family, text = given
    p = tasks.Problem("poems", "", "", "", "") if family == "unknown" else problem.get(family)
    refused(message, tasks.grade, p, text)


def test_as_many_texts_as_problems(problem):
    refused("1 problems but 2 texts", tasks.grade_all, [problem["math"]], ["", ""])


@pytest.mark.parametrize("timeout", [0, -1, NAN, "2"])
def test_wrong_times_for_the_grader(problem, timeout):
    refused(f"timeout is {timeout!r}, expected seconds", tasks.grade_code,
            [(problem["code"], problem["code"].answer)], timeout)


@table(
    ((3, 2), "k is 3 and n is 2, expected"), ((-1, 2), "k is -1 and n is 2, expected"),
    ((0, 0), "k is 0 and n is 0, expected"), ((NAN, 2), "k is nan and n is 2, expected"),
    (("1", 2), "k is '1' and n is 2, expected"),
)
def test_wrong_shares(given, message):
    refused(message, tasks.wilson, *given)


# -------------------------------------------------- checkpoints

@table(
    (dict(device="gpu"), "device is 'gpu', expected"),
    (dict(device=3.5), "device is 3.5, expected"),
    (dict(dtype="float33"), "`dtype` provided as a `str` can only be"),
    (dict(dtype=3), "`dtype` can be .* but received 3"),
    (dict(dtype=torch.int8), "`dtype=torch.int8` as it's not a floating-point dtype"),
    (dict(mask_id="<mask>"), "mask_id is '<mask>', expected the id"),
    (dict(mask_id=-1), "mask_id is -1, expected the id"),
    (dict(mask_id=1 << 40), "mask_id is 1099511627776, but"),
    (dict(name_or_path=5), "no checkpoint at '5'"),
    (dict(name_or_path=""), "no (checkpoint at|config.json in) ''"),
    (dict(name_or_path=dlm_spec.__file__), "dlm_spec.py"),
    (dict(quantisation=3), "quantisation"),
)
def test_wrong_ways_to_load(given, message):
    kind = TypeError if "quantisation" in given else ValueError
    refused(message, dlm_spec.load_denoiser, **{"device": "cpu", "local_files_only": True,
                                               **given}, kind=kind)


@pytest.mark.parametrize("name, cut, message", [
    ("config.json", 40, "config.json"), ("config.json", 0, "config.json"),
    ("config.json", None, "config.json"), ("model.safetensors", 0, "weights .* cannot be read"),
    ("model.safetensors", 7, "weights .* cannot be read"),
    ("model.safetensors", 100_000, "weights .* cannot be read"),
    ("model.safetensors", None, "weights .* cannot be read")])
def test_half_a_checkpoint(tmp_path, name, cut, message):
    """Each file cut short, empty, or missing: what a killed download leaves."""
    folder = copy_of_embedded(tmp_path)
    half(folder / name, cut)
    refused(message, dlm_spec.load_denoiser, folder, device="cpu")


@pytest.mark.parametrize("cut", [0, 5000, None])
def test_half_a_tokenizer_is_a_warning(tmp_path, cut):
    """Ids can still be decoded; texts cannot, and that error says so."""
    folder = copy_of_embedded(tmp_path)
    half(folder / "tokenizer.json", cut)
    with pytest.warns(UserWarning, match="no tokenizer could be opened"):
        d = dlm_spec.load_denoiser(folder, device="cpu")
    assert dlm_spec.sample_llada(d, IDS, gen_length=2).sequences.shape == (1, 4)
    refused("this denoiser has no tokenizer", d.encode, "hi")
    refused("this denoiser has no tokenizer", d.decode, IDS)


def test_a_folder_that_cannot_be_written_is_read(tmp_path):
    folder = copy_of_embedded(tmp_path)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path == folder else 0o444)
    before = sorted(p.name for p in folder.iterdir())
    assert dlm_spec.load_denoiser(folder, device="cpu").tokenizer is not None
    assert sorted(p.name for p in folder.iterdir()) == before
    folder.chmod(0o755)


def half(path, cut):
    if cut is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:cut])

