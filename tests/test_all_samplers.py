# SPDX-License-Identifier: MIT
"""What holds for every sampler, whatever the model and the knobs.

Recorded decodes of the public samplers, random knobs on random models, models that do not
cooperate, batches, precisions, threads, Ctrl-C, memory, devices, and how often the host waits.

The files in `data/` were recorded by `record_traces.py`, which runs public code, unchanged, on
the small drafter (`notebooks/mini/small`) in fp64 on a CPU, one prompt at a time, but for Dream
at temperature 0:

    llada_traces.json      `generate` of ML-GSAI/LLaDA (generate.py, commit b7e6c35)
    fast_dllm_traces.json  `generate`, `generate_with_prefix_cache` and
                           `generate_with_dual_cache` of NVlabs/Fast-dLLM (llada/generate.py,
                           commit 24cc59e), which run one forward more for a block that is full
                           after its first: `wasted`; on the LLaDA model of that repository
    revocable_traces.json  `decoding_wino` of Feng-Hong/WINO-DLLM
                           (LLaDA/decoding.py, commit 9549a1d)
                           and `generate_with_saber` of zhaoyMa/Saber (decoding.py, commit
                           2f061e2)
    dkv_traces.json        `generate` of horseee/dKV-Cache (llada_dkv_cache_decode.py and its
                           LLaDA modelling code, commit 49a76fc) with enable_cache, on that
                           model's weights under LLaDA's names, a bias of attn_out
                           added; `positions` are the tokens its forwards were given
    dream_traces.json      `_sample` of Dream's generation_utils.py as NVlabs/Fast-dLLM
                           carries it (dream/model/, commit 24cc59e), at temperature and top_p,
                           with eps=-.01, which makes it commit one token per forward, logits
                           rolled by one, which it shifts back, and Gumbel-max over our random
                           numbers in the place of torch's Categorical
    eos_traces.json        LLaDA's `generate` again with confidence_eos_eot_inf, its ids of
                           EOS and EOT set to that model's end of text and padding

The model is wrapped so that its logits of M and of ids past the tokenizer are -inf (the
public samplers do not ban them) and so that every canvas it was given is kept; a trace holds
the forward at which each generated position stopped being M, or the tokens that became M
again. In fp32 the tokens are the same too, but ends of text whose confidences differ by 1e-6
change places.
"""
import gc
import inspect
import io
import json
import math
import os
import signal
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import command_line
import pytest
import torch
from devices import CUDA, FakeCuda, OnCuda
from helpers import M, Table, lively, random_ids, sharp_table, tiny_llama, tiny_qwen2
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, TopPLogitsWarper
from waits import waits

import dlm_spec
from dlm_spec import (
    SAMPLERS,
    Denoiser,
    verify_confidence,
    verify_kl,
    verify_trust,
    view_cover,
    view_leave_one_out,
    view_visible,
)

every_sampler = pytest.mark.parametrize("name", SAMPLERS)
VIEWS = (view_leave_one_out, view_visible, view_cover)
VARIANTS = {            # each sampler, cache and view, with knobs that make something happen
    "llada": ("llada", dict(steps=9)),
    "llada, guided": ("llada", dict(steps=9, cfg_scale=.5)),
    "llada, entropy": ("llada", dict(remasking="entropy")),
    "fast_dllm": ("fast_dllm", dict(threshold=.3)),
    "fast_dllm, prefix": ("fast_dllm", dict(cache="prefix", threshold=.3)),
    "fast_dllm, dual": ("fast_dllm", dict(cache="dual", factor=1.0)),
    "dkv": ("dkv", dict(threshold=.5, refresh=3)),
    "dual, leave one out": ("dual_diffusion", dict(threshold=.1)),
    "dual, visible": ("dual_diffusion", dict(view=view_visible, adaptive=True, cache="dkv",
                                             threshold=.1, draft_steps=2)),
    "dual, cover": ("dual_diffusion", dict(view=view_cover, threshold=.1, verify=verify_kl,
                                           cache="prefix")),
    "wino": ("wino", dict(threshold=.1)),
    "saber": ("saber", {}),
    "cover": ("cover", dict(threshold=.1, max_seeds=4, tau_remask=.9)),
    "cover, prefix": ("cover", dict(threshold=.1, tau_replace=.5, cache="prefix",
                                    commit_cap=False)),
    "cover, dual": ("cover", dict(threshold=.1, cache="dual", refresh=3)),
}
PROMPTS = [[1, 2, 3], [4, 5, 6]]
every_variant = pytest.mark.parametrize("name, knobs", VARIANTS.values(), ids=VARIANTS)


def reject_all(judged, tokens):
    """A verifier's rule."""
    return torch.ones_like(tokens, dtype=torch.bool)


def sound(denoiser, name, rows, **knobs):
    """Decode and check what must hold for any model; the output comes back."""
    out = SAMPLERS[name](denoiser, rows, history=True, **knobs)
    G, P = knobs["gen_length"], max(map(len, rows))
    assert out.sequences.shape == (len(rows), P + G) and (out.sequences != M).all()
    for i, row in enumerate(rows):              # what is given stays
        prompt, got = torch.tensor(row), out.sequences[i, P - len(row):P]
        assert torch.equal(got[prompt != M], prompt[prompt != M])
    masks = G + torch.tensor([row.count(M) for row in rows])
    assert torch.equal((out.commit_step > 0).sum(1), masks)
    assert (out.nfe <= 2 * (masks + len(out.revisions)) + 2).all()
    revised = {(r.row, r.position) for r in out.revisions}      # only these may change
    for a, b in zip(out.history, out.history[1:]):
        assert {tuple(at) for at in ((a != M) & (a != b)).nonzero().tolist()} <= revised
    assert torch.equal(out.history[-1], out.sequences)
    assert all(r.new >= 0 for r in out.revisions)
    assert out.commit_confidence.isfinite().all() and (out.commit_confidence <= 1 + 1e-6).all()
    return out


# ---------------------------------------------------------------------------------------------
# The same tokens, committed and taken back in the same order, as the public samplers

TRACES = {path.stem.removesuffix("_traces"): json.loads(path.read_text())
          for path in (Path(__file__).parent / "data").glob("*_traces.json")}


@pytest.fixture(scope="module")
def recorded():
    """The model of the traces, in fp64."""
    return dlm_spec.load_denoiser(dlm_spec.EMBEDDED_MODEL.parent / "small", device="cpu",
                                  dtype=torch.float64)


@pytest.fixture(scope="module")
def embedded():
    """The embedded model in fp64."""
    return dlm_spec.load_denoiser(device="cpu", dtype=torch.float64)


def follows(trace, out):
    """Whether a decode has a trace's tokens, and its commits in the same order."""
    return (out.generated[0].tolist() == trace["tokens"]
            and out.commit_step[0, out.prompt_length:].tolist() == trace["commit_step"])


def test_llada_is_the_public_sampler(recorded):
    """Tokens, commit order, forwards. Five prompts in five settings."""
    for trace in TRACES["llada"][:30:7]:
        out = dlm_spec.sample_llada(recorded, [trace["prompt"]], **trace["knobs"])
        assert follows(trace, out) and out.nfe.tolist() == [trace["nfe"]], trace["knobs"]


def test_postponing_differs_from_the_public_code_only_in_its_softmax_without_eos(
        recorded, monkeypatch):
    """There `logits_with_noise` is `logits` itself at temperature 0, so that -inf for an end
    of text enters the confidence of all other tokens. With that done here the runs are the
    same."""
    ends = torch.tensor([recorded.eos_ids[0], recorded.pad_id])
    confidence_of = dlm_spec.confidence_of

    def without_eos(logits, *args):
        return confidence_of(logits.index_fill(1, ends, -torch.inf), *args)

    def same(trace):
        return follows(trace, dlm_spec.sample_llada(recorded, [trace["prompt"]],
                                                    postpone_eos=True, **trace["knobs"]))

    some = TRACES["eos"][2::6]
    assert not all(map(same, some))
    monkeypatch.setattr(dlm_spec, "confidence_of", without_eos)
    assert all(map(same, some))


def test_llada_at_a_temperature_is_dream_s_sampler(recorded):
    """Temperature, then top_p, then the entropy (probability, margin) of what remains."""
    for trace in (TRACES["dream"][i] for i in (3, 5)):
        def nucleus(ids, logits, t=trace):
            warped = TopPLogitsWarper(t["top_p"])(ids, logits / t["knobs"]["temperature"])
            return logits.masked_fill(warped.isneginf(), -torch.inf)

        out = dlm_spec.sample_llada(
            recorded, [trace["prompt"]], **trace["knobs"], tempered_confidence=True,
            logits_processor=nucleus if trace["top_p"] else None,
            generator=torch.Generator().manual_seed(trace["seed"]))
        assert follows(trace, out)


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_fast_dllm_is_the_public_sampler(recorded, cache):
    """Tokens and forwards, with and without a cache."""
    traces = [t for t in TRACES["fast_dllm"] if t["knobs"]["cache"] == cache]
    for trace in traces[::3]:
        out = dlm_spec.sample_fast_dllm(recorded, [trace["prompt"]], **trace["knobs"])
        assert out.generated[0].tolist() == trace["tokens"]
        assert out.nfe.tolist() == [trace["nfe"] - trace["wasted"]]


@pytest.mark.parametrize("refresh", [8, 4, 3])
def test_dkv_is_the_public_sampler(recorded, refresh):
    """Tokens, commit order, forwards and the positions that they process."""
    traces = [t for t in TRACES["dkv"] if t["knobs"]["refresh"] == refresh]
    for trace in traces[1::6]:
        out = dlm_spec.sample_dkv(recorded, [trace["prompt"]], **trace["knobs"])
        assert follows(trace, out)
        assert (out.nfe.tolist(), out.positions.tolist()) == (
            [trace["nfe"]], [trace["positions"]])


@pytest.mark.parametrize("name", ["wino", "saber"])
def test_wino_and_saber_are_the_public_samplers(recorded, name):
    """Tokens, forwards, and what is taken back when. A re-mask in a trace is a token that was
    shown to a forward and no longer to the next; what Saber takes back in the forward that
    committed it was never shown."""
    events = 0
    for trace in [t for t in TRACES["revocable"] if t["sampler"] == name][1::5]:
        out = SAMPLERS[name](recorded, [trace["prompt"]], **trace["knobs"], history=True)
        assert out.generated[0].tolist() == trace["tokens"]
        assert out.nfe.tolist() == [trace["nfe"]]
        shown = [[r.forward, r.position, r.old] for r in out.revisions
                 if out.history[r.forward - 1][0, r.position] == r.old]
        assert sorted(shown) == sorted(trace["remasks"])
        events += len(shown)
    assert events > 5


# ---------------------------------------------------------------------------------------------
# Random knobs on random models

UNIT = st.floats(0, 1)
KNOBS = {
    "llada": dict(remasking=st.sampled_from(dlm_spec.LIMITS["remasking"]),
                  steps=st.integers(4, 20), cfg_scale=st.sampled_from([0.0, 1.0])),
    "fast_dllm": dict(threshold=UNIT, cache=st.sampled_from([None, "prefix", "dual"])),
    "dkv": dict(threshold=UNIT, refresh=st.integers(1, 5)),
    "dual_diffusion": dict(
        threshold=UNIT, draft_steps=st.integers(1, 4), adaptive=st.booleans(),
        cache=st.sampled_from([None, "prefix", "dual", "dkv"]),
        max_revisions=st.integers(0, 3),
        view=st.sampled_from(VIEWS), max_rounds=st.sampled_from([None, 0, 1, 2]),
        verify=st.one_of(st.just(verify_trust), UNIT.map(lambda t: partial(verify_kl, tau=t)),
                         UNIT.map(lambda t: partial(verify_confidence, tau=t)))),
    "wino": dict(threshold=UNIT, threshold_back=UNIT),
    "saber": dict(n=st.integers(1, 5)),
    "cover": dict(threshold=UNIT, tau_replace=UNIT, tau_remask=UNIT,
                  max_seeds=st.none() | st.integers(1, 5), max_checks=st.integers(1, 3),
                  commit_cap=st.booleans(), override=st.booleans(),
                  cache=st.sampled_from([None, "prefix", "dual"])),
}
assert KNOBS.keys() == SAMPLERS.keys()


@st.composite
def decodes(draw, name):
    """A prompt batch with holes, lengths, and knobs for a sampler."""
    rows = draw(st.lists(st.lists(st.integers(0, M), min_size=1, max_size=5), min_size=1,
                         max_size=3))
    knobs = {knob: draw(values) for knob, values in KNOBS[name].items()}
    return rows, dict(gen_length=draw(st.integers(1, 12)),
                      block_length=draw(st.integers(3, 12)), **knobs)


@every_sampler
def test_every_knob_on_random_models(name):
    """Given tokens stay, nothing is masked or banned, commits and revisions tell the history,
    the number of forwards is bounded; greedy decoding ignores the seed."""
    @settings(max_examples=20, deadline=None, database=None)
    @given(decodes(name), st.integers(0, 50), st.booleans())
    def run(case, seed, shift):
        rows, knobs = case
        d = Denoiser((tiny_qwen2 if shift else tiny_llama)(1, seed=seed), M, shift=shift)
        out = sound(d, name, rows, **knobs)
        if knobs.get("remasking") != "random":
            seeded = SAMPLERS[name](d, rows, **knobs,
                                    generator=torch.Generator().manual_seed(seed))
            assert torch.equal(out.sequences, seeded.sequences)
    run()


SHARED = [dict(block_length=6), dict(temperature=2.0), dict(suppress_eos=True),
          dict(postpone_eos=True), dict(early_stop=True),
          dict(logits_processor=lambda x, logits: -logits)]
OWN = {
    "llada": [dict(steps=8), dict(remasking="margin"), dict(remasking="entropy"),
              dict(remasking="random"), dict(cfg_scale=1.0),
              dict(temperature=2.0, tempered_confidence=True)],
    "fast_dllm": [dict(threshold=.2), dict(factor=1.5), dict(cache="prefix"),
                  dict(cache="dual")],
    "dkv": [dict(threshold=.2), dict(steps=8), dict(refresh=2)],
    "dual_diffusion": [dict(threshold=.2), dict(draft_steps=1),
                       dict(cache=None),
                       dict(cache="prefix"), dict(cache="dkv"), dict(verify=verify_trust),
                       dict(verify=verify_kl), dict(view=view_visible), dict(view=view_cover),
                       dict(drafter=Denoiser(tiny_llama(1), M, eos_ids=(8, 12))),
                       dict(max_revisions=0), dict(max_rounds=1), dict(adaptive=True)],
    "wino": [dict(threshold=.2), dict(threshold_back=.3)],
    "saber": [dict(n=5)],
    "cover": [dict(threshold=.3), dict(tau_replace=.2), dict(tau_remask=1.0),
              dict(max_seeds=1), dict(max_checks=1), dict(commit_cap=False), dict(cache="dual"),
              dict(override=False),
              dict(cache="dual", refresh=2)],
}
NO_RULE = {"attention_mask", "gen_length", "generator", "callback", "history"}


@every_sampler
def test_every_keyword_changes_something(name):
    """CASES 27: each value gives another decode than the defaults, and than all others here;
    no keyword of a sampler is missing."""
    d = Denoiser(lively(tiny_llama, 3, dtype=torch.float64), M, eos_ids=(8, 12))
    seen = {}
    base = {"cover": dict(gen_length=48, block_length=48, threshold=.6, tau_remask=.1),
            "wino": dict(gen_length=32, block_length=16)}.get(
                name, dict(gen_length=16, block_length=8))
    for knobs in [{}, *SHARED, *OWN[name]]:
        out = SAMPLERS[name](d, random_ids(6, 4), **{**base, **knobs},
                             generator=torch.Generator().manual_seed(0))
        what = str((out.sequences.tolist(), out.revisions, out.positions.tolist(),
                    out.commit_step.tolist()))
        assert what not in seen, (knobs, seen[what])
        seen[what] = knobs
    tried = {k for knobs in SHARED + OWN[name] for k in knobs}
    assert tried == command_line.knobs_of(SAMPLERS[name]) - NO_RULE


@every_sampler
def test_the_docstring_says_where_the_common_keywords_are_documented(name):
    """`help(sample_cover)` names Decode and each of the sampler's own keywords; a keyword that
    neither has is Python's own TypeError."""
    sampler = SAMPLERS[name]
    text = inspect.getdoc(sampler)
    assert "see Decode" in text
    own = set(inspect.signature(sampler).parameters) - {"denoiser", "prompt", "common"}
    assert [knob for knob in own - {"block_length"} if knob not in text] == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'treshold'"):
        sampler(Denoiser(Table(torch.zeros(9, 40)), M), [[1]], gen_length=4, treshold=.5)


# ---------------------------------------------------------------------------------------------
# Models and rules that do not cooperate

def uniform(ids, position_ids):
    return torch.zeros(*ids.shape, 40)


def wants_the_mask(ids, position_ids):
    return torch.zeros(*ids.shape, 40).index_fill(2, torch.tensor([M]), 50.0)


def flips(ids, position_ids):
    """Wants 3 where it sees nothing or 4, and 4 where it sees 3: a check never agrees."""
    want = torch.where(ids == 3, 4, 3)
    return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 9.0)


def moody():
    """Another answer at every call."""
    calls = [0]

    def model(ids, position_ids):
        calls[0] += 1
        want = (position_ids + calls[0]) % 38
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 4.0 + calls[0] % 3)
    return model


ADVERSARIES = dict(uniform=lambda: uniform, wants_the_mask=lambda: wants_the_mask,
                   flips=lambda: flips, moody=moody)
every_adversary = pytest.mark.parametrize("make", ADVERSARIES.values(), ids=ADVERSARIES)
HARSH = {       # every check rejects, every token is doubted
    "wino": [dict(threshold=t, threshold_back=1.0) for t in (0.0, 1.0)],
    "saber": [dict(n=1), dict(n=9)],
    "cover": [dict(threshold=0.0, tau_replace=replace, tau_remask=1.0,
                   max_checks=checks) for replace in (0.0, 1.0) for checks in (1, 99)],
    "dual_diffusion": [dict(verify=reject_all, view=view, max_revisions=4, threshold=0.0,
                            draft_steps=1) for view in VIEWS],
}


@every_sampler
@every_adversary
def test_a_model_that_does_not_cooperate_is_decoded_to_an_end(name, make):
    """CASES 7, 9: bounded forwards, whatever the model says and whatever passes the
    threshold."""
    for threshold in (0.0, 0.3, 1.0):
        knobs = {"threshold": threshold} if "threshold" in KNOBS[name] else {}
        sound(Denoiser(Table(make()), M), name, [[1, 2], [3, M, 4, M]], gen_length=9,
              block_length=4, **knobs)


@pytest.mark.parametrize("name", HARSH)
@every_adversary
@pytest.mark.parametrize("shift", [False, True])
def test_rules_that_take_back_all_they_may_end(name, make, shift):
    """Shifted and plain; prompts of unequal lengths with holes."""
    for knobs in HARSH[name]:
        sound(Denoiser(Table(make()), M, shift=shift), name, [[1, 2], [3, M, 4, M]],
              gen_length=9, block_length=5, **knobs)


def breaks_down(call, spoil):
    """A model with random logits, in place spoilt by `spoil` from that call on."""
    def logits(ids, position_ids):
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(model.calls))
        if model.calls >= call:
            spoil(out)
        return out
    model = Table(logits)
    return model


@every_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unusable_logits_are_reported_at_the_forward_that_gave_them(name, knobs, bad):
    """In one row of two is enough; no further forward is run."""
    cautious = {**knobs, "threshold": 1.0} if "threshold" in knobs else knobs
    for last in (1, 2, 4):
        model = breaks_down(last, lambda out: out[-1].fill_(bad))
        with pytest.raises(ValueError, match="logits cannot be used"):
            SAMPLERS[name](Denoiser(model, M), [[1, 2], [3]], gen_length=8, block_length=8,
                           **cautious)
        assert model.calls == last


@pytest.mark.parametrize("view, call", [(view_leave_one_out, 2), (view_visible, 2),
                                        (view_cover, 3)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_verifier_that_breaks_down_is_an_error(view, call, bad):
    """Everything is drafted in the first forward, so that nothing is asked beside what is
    judged: in the second, by COVER's view in the third, since the second only stores what it
    will see."""
    model = breaks_down(2, lambda out: out.fill_(bad))
    with pytest.raises(ValueError, match="logits cannot be used"):
        SAMPLERS["dual_diffusion"](Denoiser(model, M), [[1, 2]], gen_length=4, block_length=4,
                                   threshold=0.0, view=view, max_revisions=0)
    assert model.calls == call


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_shadows_that_break_down_are_an_error(bad):
    """WINO: the block's logits are sound, those of the shadows behind the canvas are not."""
    model = breaks_down(1, lambda out: out[:, 10:].fill_(bad))
    with pytest.raises(ValueError, match="logits cannot be used"):
        SAMPLERS["wino"](Denoiser(model, M), [[1, 2]], gen_length=8, block_length=8,
                         threshold=.9)
    assert model.calls == 2         # in the first forward nothing is judged


@every_sampler
def test_logits_that_nobody_asked_for_may_be_anything(name):
    """NaN at the prompt's positions and on the mask's row of the vocabulary changes
    nothing."""
    def model(fill):
        def logits(ids, position_ids):
            out = torch.randn(1, 20, 40, generator=torch.Generator().manual_seed(3))
            out = out[0][position_ids].index_fill(2, torch.tensor([M]), fill)
            return out.masked_fill((position_ids < 3)[..., None], fill)
        return logits
    a, b = (SAMPLERS[name](Denoiser(Table(model(fill)), M), [[1, 2, 3]], gen_length=6,
                           block_length=3) for fill in (0.0, math.nan))
    assert torch.equal(a.sequences, b.sequences) and torch.equal(a.nfe, b.nfe)


@every_sampler
def test_a_processor_that_bans_everything_is_an_error(name):
    with pytest.raises(ValueError, match="logits cannot be used"):
        SAMPLERS[name](Denoiser(Table(uniform), M), [[1, 2]], gen_length=4, block_length=4,
                       logits_processor=lambda x, logits: logits.fill_(-math.inf))


# ---------------------------------------------------------------------------------------------
# Ends of text

@every_sampler
def test_a_model_that_wants_only_the_end_ends(name):
    """All eos: postponed or suppressed, the canvas is filled within the same bounds."""
    def logits(ids, position_ids):
        return torch.zeros(*ids.shape, 40).index_fill(2, torch.tensor([5]), 50.0)
    d = Denoiser(Table(logits), M, eos_ids=(5,))
    for knobs in ({}, dict(postpone_eos=True), dict(suppress_eos=True)):
        out = sound(d, name, [[1, 2], [3, M]], gen_length=6, block_length=4, **knobs)
        assert ((out.generated == 5) == ("suppress_eos" not in knobs)).all()
    out = SAMPLERS[name](d, [[1, 2]], gen_length=9, block_length=3, early_stop=True)
    assert (out.generated == 5).all() and (out.commit_step[0, 5:] == 0).all()


@every_sampler
def test_any_eos_id_stops_a_row_and_the_first_one_fills_it(name):
    """CASES 16: block 1 of 3 holds the second of two eos ids: one block's forwards, the rest
    is eos_ids[0]; tokens per forward count what comes before."""
    table = sharp_table([9, 9, 6, *[9] * 9], logits=20.0, floor=0.0)
    d = Denoiser(Table(table), M, eos_ids=(5, 6))
    out = SAMPLERS[name](d, [[1]], gen_length=9, block_length=3, early_stop=True)
    one = SAMPLERS[name](d, [[1]], gen_length=3, block_length=3)
    assert out.generated[0].tolist() == [9, 6, 5, 5, 5, 5, 5, 5, 5]
    assert torch.equal(out.nfe, one.nfe)
    assert torch.allclose(out.tokens_per_forward, 1 / out.nfe)
    assert out.commit_step[0, 3:].tolist() == [0] * 7


@pytest.mark.parametrize("name", ["fast_dllm", "dkv", "wino", "cover"])
def test_a_postponed_eos_waits_even_at_threshold_zero(name):
    """Everything is above 0, a postponed eos is not: a forward later, alone."""
    table = sharp_table([0, 9, 5, 8], logits=torch.tensor([0, 4.0, 30, 6]), floor=0.0)
    out = SAMPLERS[name](Denoiser(Table(table), M, eos_ids=(5,)), [[1]], gen_length=3,
                         block_length=3, threshold=0.0, postpone_eos=True)
    assert out.commit_step[0].tolist() == [0, 1, 2, 1]


# ---------------------------------------------------------------------------------------------
# Batches

AT_ONCE = {"llada": dict(steps=1), "saber": dict(n=4)}


@every_variant
@pytest.mark.parametrize("make, shift, temperature", [
    (tiny_llama, False, 0.0), (tiny_qwen2, True, 0.8)])
def test_rows_of_a_batch_equal_single_runs(name, knobs, make, shift, temperature):
    """CASES 2: prompts of different lengths, one with holes, fp64, greedy and at a temperature
    with a generator per row: tokens, forwards, commits and revisions."""
    d = Denoiser(lively(make, 2, dtype=torch.float64), M, shift=shift)
    rows = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]
    knobs = dict(gen_length=10, block_length=10, temperature=temperature, **knobs)

    def seeds():
        return [torch.Generator().manual_seed(i) for i in range(3)]
    out = SAMPLERS[name](d, rows, generator=seeds(), **knobs)
    for i, row in enumerate(rows):
        one, own = SAMPLERS[name](d, [row], generator=seeds()[i:i + 1], **knobs), 6 - len(row)
        assert torch.equal(out.sequences[i, own:], one.sequences[0])
        assert torch.equal(out.commit_step[i, own:], one.commit_step[0])
        assert (out.nfe[i], out.positions[i]) == (one.nfe[0], one.positions[0])
        revisions = [r for r in out.revisions if r.row == i]
        assert [(r.forward, r.position - own, *r[3:]) for r in revisions] == [
            (r.forward, *r[2:]) for r in one.revisions]


@every_sampler
def test_every_row_is_sampled_at_a_temperature(name):
    """CASES 5: rows peaked on ids 3 and 7, by their prompts, give 3s and 7s."""
    def peaked(ids, position_ids):
        want = torch.where(ids[:, :1] == 1, 3, 7).expand_as(ids)
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 50.0)
    out = SAMPLERS[name](Denoiser(Table(peaked), M), [[1], [2]], gen_length=4, temperature=1.0,
                         **AT_ONCE.get(name, dict(threshold=0.0)))
    assert out.generated.tolist() == [[3] * 4, [7] * 4]


@every_sampler
def test_a_row_that_is_full_stays_as_it_is(name):
    """CASES 6: B=2, one row without masks."""
    out = SAMPLERS[name](Denoiser(tiny_llama(1), M), [[5, 6, 7], [5, M, M]], gen_length=0)
    assert out.sequences[0].tolist() == [5, 6, 7] and int(out.nfe[0]) == 0 < int(out.nfe[1])
    assert (out.sequences != M).all()


# ---------------------------------------------------------------------------------------------
# Precisions and sizes

@every_variant
@pytest.mark.parametrize("make, dtype", [
    (tiny_llama, torch.float16), (tiny_qwen2, torch.bfloat16), (tiny_llama, torch.float64)])
def test_every_precision_gives_finite_confidences_and_no_mask(name, knobs, make, dtype):
    """Padded batches and holes; plain and shifted models of two layers."""
    d = Denoiser(make(2, dtype=dtype), M, shift=make is tiny_qwen2)
    sound(d, name, [[1, 2, 3], [4, M]], gen_length=7, block_length=4, **knobs)


@every_sampler
def test_single_precision_decodes_a_trained_model_to_the_same_tokens(embedded, name):
    single = dlm_spec.load_denoiser(device="cpu", dtype=torch.float32)
    ids, mask = single.encode(dlm_spec.EXAMPLE)
    a, b = (SAMPLERS[name](d, ids, attention_mask=mask, gen_length=16, block_length=16)
            for d in (single, embedded))
    assert torch.equal(a.sequences, b.sequences) and torch.equal(a.nfe, b.nfe)
    assert a.revisions == b.revisions
    assert torch.allclose(a.commit_confidence, b.commit_confidence, atol=1e-4)


@every_variant
@pytest.mark.parametrize("scale, floor", [(1e4, 0.0), (3e38, -3e38), (0.0, -math.inf)])
def test_saturated_logits_are_certain_tokens(name, knobs, scale, floor):
    """1e4, the largest floats, and -inf for all but one: that token, with confidence 1."""
    if floor != 0 and knobs.get("cfg_scale"):
        pytest.skip("guidance subtracts what cannot be subtracted")
    table = sharp_table([i % 38 for i in range(11)], logits=scale, floor=floor)
    for T in (0.0, 1.0):
        out = sound(Denoiser(Table(table), M), name, [[1, 2]], gen_length=9, block_length=5,
                    temperature=T, **knobs)
        assert out.generated[0].tolist() == [*range(2, 11)]
        assert all(r.old == r.new for r in out.revisions)       # Saber always takes some back
        assert name == "saber" or not out.revisions
        if knobs.get("remasking", "low_confidence") == "low_confidence":
            assert (out.commit_confidence == 1).all()


@every_variant
@pytest.mark.parametrize("vocab, mask", [(2, 1), (2, 0), (3, 2)])
def test_the_smallest_vocabulary_model_and_canvas(name, knobs, vocab, mask):
    """One or two tokens and M; one layer of one head; canvases of one position; blocks of
    one."""
    config = LlamaConfig(vocab_size=vocab, hidden_size=4, intermediate_size=4,
                         num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None)
    token = 1 - min(mask, 1)
    d = Denoiser(LlamaForCausalLM(config), mask, pad_id=token)
    for rows, G, block in (([[]], 1, 1), ([[mask]], 0, 1), ([[token]], 1, 1),
                           ([[token]], 3, 1), ([[mask, token], [token]], 3, 2)):
        out = SAMPLERS[name](d, rows, gen_length=G, block_length=block, **knobs)
        assert out.sequences.shape == (len(rows), max(map(len, rows)) + G)
        assert ((out.sequences >= 0) & (out.sequences < vocab) & (out.sequences != mask)).all()


@every_sampler
def test_a_canvas_of_4096_positions(name):
    config = LlamaConfig(vocab_size=40, hidden_size=8, intermediate_size=8,
                         num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None, max_position_embeddings=4096)
    ids = random_ids(1, 4092)
    out = SAMPLERS[name](Denoiser(LlamaForCausalLM(config), M), ids, gen_length=4,
                         block_length=4)
    assert torch.equal(out.sequences[:, :4092], ids) and (out.sequences != M).all()


# ---------------------------------------------------------------------------------------------
# Threads, Ctrl-C, memory

@every_variant
@pytest.mark.parametrize("shift", [False, True])
def test_two_threads_on_one_denoiser_get_what_each_gets_alone(name, knobs, shift):
    """CASES 39: prompts of 3 and of 6 tokens, several times each, at the same time."""
    d = Denoiser(lively(tiny_llama, 2, dtype=torch.float64), M, shift=shift)
    prompts, start = (random_ids(1, 3), random_ids(1, 6)), threading.Barrier(2)

    def decode(ids):
        out = SAMPLERS[name](d, ids, gen_length=8, block_length=8, **knobs)
        return out.sequences.tolist(), out.commit_step.tolist(), out.nfe.tolist()

    def repeat(i):
        start.wait()
        found[i] = [decode(prompts[i]) for _ in range(3)]

    want, found = [[decode(ids)] * 3 for ids in prompts], [None, None]
    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)         # change threads as often as possible
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == want


@every_sampler
@pytest.mark.parametrize("where", ["callback", "forward"])
def test_an_interrupted_sampler_leaves_its_denoiser_as_it_was(name, where, monkeypatch):
    """Ctrl-C in the callback, or in the middle of a forward: nothing stays on the model, and
    the next decode is the same as before."""
    d = Denoiser(tiny_llama(2), M, eos_ids=(5,))
    knobs = dict(gen_length=8, block_length=4)
    before, calls = SAMPLERS[name](d, random_ids(2, 3), **knobs), [0]
    attributes = [{*vars(m)} for m in d.model.modules()]

    def press_ctrl_c_at_the_third(*_, **__):
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        if where == "forward":
            m.setattr(d.model.model.layers[1].mlp.act_fn, "forward", press_ctrl_c_at_the_third)
            calls[0] = 2
        SAMPLERS[name](d, random_ids(2, 3), callback=press_ctrl_c_at_the_third, **knobs)
    assert [{*vars(m)} for m in d.model.modules()] == attributes
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in d.model.modules())
    after = SAMPLERS[name](d, random_ids(2, 3), **knobs)
    assert torch.equal(before.sequences, after.sequences)
    assert torch.equal(before.nfe, after.nfe) and before.revisions == after.revisions


@every_variant
def test_a_callback_that_returns_true_stops_the_decode_as_it_stands(name, knobs):
    """What was done before is as without it, no forward follows, and what was not filled is
    still M; a re-masked token that nothing has followed has no `new` one."""
    d = Denoiser(lively(tiny_llama, 2), M, eos_ids=(8,))
    given = dict(gen_length=12, block_length=6, history=True, **knobs)
    full = SAMPLERS[name](d, PROMPTS, **given)
    for k in range(1, full.calls):
        out = SAMPLERS[name](d, PROMPTS, **given, callback=lambda s, k=k: s["calls"] == k)
        open_ = out.sequences == M
        assert out.calls == k and torch.equal(out.sequences, full.history[k])
        assert open_.any() or k > 1     # a full canvas may still be checked
        assert all(map(torch.equal, out.history, full.history)) and len(out.history) == k + 1
        assert (out.commit_step[:, :3] == 0).all() and (out.nfe <= full.nfe).all()
        text = (out.generated != M) & ((out.generated == 8).cumsum(1) == 0)
        assert torch.equal(out.tokens_per_forward, text.sum(1) / out.nfe.clamp(min=1))
        assert [r[:5] for r in out.revisions] == [r[:5] for r in full.revisions][
            :len(out.revisions)]
        assert all(r.new == (f.new if r.new >= 0 else -1)
                   for r, f in zip(out.revisions, full.revisions))
        found = dlm_spec.revision_statistics(out)
        undone = sum(r.new < 0 for r in out.revisions)
        assert found["events"] == len(out.revisions) - undone
        assert found["commits"] == len(out.revisions) + int((~open_[:, 3:]).sum())


@every_variant
def test_caches_are_freed_when_a_decode_ends(name, knobs, monkeypatch):
    """At once, without the garbage collector: no cycle holds the keys and values."""
    made, KVCache = [], dlm_spec.KVCache

    class Watched(KVCache):
        def __init__(self, *a):
            super().__init__(*a)
            made.append(weakref.ref(self))
    monkeypatch.setattr(dlm_spec, "KVCache", Watched)
    d = Denoiser(tiny_llama(1), M)
    gc.disable()
    try:
        out = SAMPLERS[name](d, [[1, 2]], gen_length=6, block_length=3, **knobs)
        assert not any(ref() is not None for ref in made) and len(out.sequences) == 1
    finally:
        gc.enable()


def test_memory_does_not_grow():
    """Decoding again and again, with every sampler, keeps no tensors and no other objects."""
    d = Denoiser(tiny_llama(1), M)

    def alive_after(times):
        for name, knobs in [*VARIANTS.values()] * times:
            SAMPLERS[name](d, random_ids(2, 3), gen_length=6, block_length=3, **knobs)
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(issubclass(type(o), torch.Tensor) for o in objects)
    objects, tensors = alive_after(2)
    more_objects, more_tensors = alive_after(6)
    assert more_tensors <= tensors and more_objects < objects + 30


# ---------------------------------------------------------------------------------------------
# On a device, shown without one (devices.py, waits.py)

@pytest.fixture
def cuda():
    """The stand-in for a CUDA device, in use."""
    with FakeCuda() as found:
        yield found


@every_variant
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_a_decode_stays_on_the_device(name, knobs, make, shift, cuda):
    d = Denoiser(cuda.move(make(1)), M, shift=shift, eos_ids=(1, 2))
    assert d.device == CUDA
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    out = SAMPLERS[name](
        d, [[1, 2, 3, M, 4], [5]], gen_length=9, block_length=6, temperature=.7,
        generator=generators if shift else generators[0], postpone_eos=True, early_stop=True,
        history=True, logits_processor=LogitsProcessorList([TopPLogitsWarper(.9)]), **knobs)
    for t in (out.sequences, out.nfe, out.positions, out.tokens_per_forward, out.commit_step,
              out.commit_confidence, *out.history):
        assert t.device == CUDA
    dlm_spec.revision_statistics(out, out.sequences)


@every_variant
def test_same_tokens_there_and_here(name, knobs, cuda):
    """Grouped heads: with a mask, attention repeats keys and values on a device."""
    there, here = (Denoiser(m, M, shift=True)
                   for m in (cuda.move(tiny_qwen2(2)), tiny_qwen2(2)))
    a, b = (SAMPLERS[name](d, [[1, 2, 3, M, 4], [5]], gen_length=8, block_length=6, **knobs)
            for d in (there, here))
    assert b.sequences.device.type == "cpu" and torch.equal(a.sequences.cpu(), b.sequences)


def test_a_prompt_and_a_mask_from_the_cpu_are_brought_to_the_device(cuda):
    d = Denoiser(cuda.move(tiny_llama(1)), M)
    ids, mask = random_ids(2, 5), torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    assert not isinstance(ids, OnCuda)
    out = dlm_spec.sample_llada(d, ids, attention_mask=mask, gen_length=4)
    assert out.sequences.device == CUDA


def test_likelihood_and_loss_stay_on_the_device(cuda):
    model = cuda.move(tiny_llama(2))
    x = cuda.put(random_ids(3, 9))
    answers = [[1, 2], [3], [4, 5, 6]]
    assert dlm_spec.log_likelihood(Denoiser(model, M), x, answers, n_samples=4).device == CUDA
    loss = dlm_spec.mdlm_loss(model, x, x > 3, mask_id=M)
    assert loss.device == CUDA and loss.isfinite()


def test_text_goes_to_the_device_and_comes_back():
    here = dlm_spec.load_denoiser(device="cpu")
    texts, knobs = [dlm_spec.EXAMPLE, "Ann has 5 pens."], dict(gen_length=16, block_length=16)
    ids, mask = here.encode(texts)
    out = dlm_spec.sample_cover(here, ids, attention_mask=mask, **knobs)
    want = here.decode(out.generated)
    with FakeCuda() as cuda:        # the model is loaded before: it is not for filling weights
        d = Denoiser(cuda.move(here.model), here.mask_id, eos_ids=here.eos_ids,
                     n_tokens=here.n_tokens, tokenizer=here.tokenizer)
        ids, mask = d.encode(texts)
        out = dlm_spec.sample_cover(d, ids, attention_mask=mask, **knobs,
                                    callback=command_line.LiveCanvas(d, io.StringIO()))
        assert ids.device == mask.device == CUDA
        assert d.decode(out.generated) == want


@pytest.mark.parametrize("label", ["no device", "a mask", "the generator", "an index"])
def test_what_a_device_refuses_is_refused_by_its_stand_in(label, cuda):
    x = cuda.put(torch.randn(3, 4))
    wrong = {"no device": lambda: x + torch.ones(3, 4), "a mask": lambda: x[torch.ones(3) > 0],
             "the generator": lambda: torch.rand(3, generator=torch.Generator(),
                                                 device=x.device),
             "an index": lambda: torch.ones(3, 4)[x.argmax(0)]}[label]
    with pytest.raises(RuntimeError, match=r"on the CPU|a generator on cpu"):
        wrong()
    assert (x + torch.tensor(1.0)).device == CUDA       # a number is no tensor to a device


@every_variant
def test_a_forward_makes_the_host_wait_eight_times_at_most(name, knobs):
    """What happens once per block comes on top, and so does the list of revisions, which is
    made once, at the end."""
    d = Denoiser(lively(tiny_qwen2, 2), M, shift=True, eos_ids=(1, 2))
    with waits() as found:
        out = SAMPLERS[name](d, [*random_ids(1, 9), *random_ids(1, 5)], gen_length=32,
                             block_length=16, postpone_eos=True, early_stop=True, **knobs)
    lines, first = inspect.getsourcelines(dlm_spec.revisions_of)
    listing = sum(n for (line, _), n in found.items() if first <= line < first + len(lines))
    assert found.total() - listing <= 8 * (out.calls + 2), found
