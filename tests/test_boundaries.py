"""Where a rule turns: equalities, caps, and the forwards at which something starts or stops.

Each value is worked out by hand; a change of one sign or one number in the module fails here.
"""
import math
from functools import partial

import pytest
import torch
from helpers import M, Table, tiny_llama
from test_cover import lively

from dlm_spec import (
    SAMPLERS,
    Denoiser,
    apart,
    gumbel_argmax,
    sample_cover,
    sample_dkv,
    sample_dual_diffusion,
    sample_fast_dllm,
    sample_llada,
    sample_wino,
    verify_confidence,
    verify_kl,
)


def halves(L=64):
    """Two tokens with probability 1/2 each, to the bit, at every position."""
    table = torch.full((L, 40), -math.inf)
    table[:, [3, 7]] = 0.0
    return Denoiser(Table(table), M)


@pytest.mark.parametrize("sampler, forwards", [
    (partial(sample_fast_dllm, threshold=.5), 1),       # at least the threshold
    (partial(sample_fast_dllm, threshold=.5, cache="dual"), 1),
    (partial(sample_dkv, threshold=.5), 1),
    (partial(sample_dual_diffusion, threshold=.5, max_rounds=0), 1),
    (partial(sample_wino, threshold=.5, threshold_back=0.0), 4),    # above it: the best one only
    (partial(sample_cover, threshold=.5), 4),
    (partial(sample_fast_dllm, factor=1.0), 4),     # .5 >= 1 - 1/2, .5 < 1 - 1/3
    (partial(sample_fast_dllm, factor=1.5), 2),     # .5 >= 1 - 1.5/3, .5 < .625
], ids=str)
def test_a_confidence_equal_to_the_threshold(sampler, forwards):
    out = sampler(halves(), [[1]], gen_length=4, block_length=4)
    assert int(out.nfe) == forwards and not out.revisions


@pytest.mark.parametrize("G, first", [(4, 4), (6, 5), (8, 5), (10, 7), (20, 14), (29, 20),
                                      (60, 20)])
def test_wino_commits_seventy_percent_within_five_and_twenty(G, first):
    out = sample_wino(halves(), [[1]], gen_length=G, block_length=G, threshold=0.0,
                      threshold_back=0.0)
    assert int((out.commit_step == 1).sum()) == first


def test_wino_takes_back_what_is_below_the_threshold_not_what_is_equal():
    """Every shadow gives .5. Of 10 masks 7 are committed, then 3: then up to 6 of the 7 may be
    taken back, at .51 they are, at .5 none."""
    for back, remasked in ((.5, 0), (.51, 6)):
        d = halves()
        out = sample_wino(d, [[1]], gen_length=10, block_length=10, threshold=0.0,
                          threshold_back=back)
        assert sum(r.forward == 2 for r in out.revisions) == remasked


def test_verifiers_at_equality():
    """p < tau and KL > tau: equal is kept."""
    logits = torch.full((1, 8), -math.inf)
    logits[:, [3, 7]] = 0.0
    token = torch.tensor([3])
    assert not verify_confidence(logits, token, logits, tau=.5)
    assert verify_confidence(logits, token, logits, tau=.5001)
    assert not verify_kl(logits, token, logits, tau=0.0)


def test_the_divergence_is_the_verifier_s_from_the_draft():
    """KL((1/2, 1/2) || (9/10, 1/10)) = .5108, the other way round .3681."""
    judged, draft = torch.tensor([[.5, .5]]).log(), torch.tensor([[.9, .1]]).log()
    token = torch.tensor([0])
    for p, q, kl in ((judged, draft, .5108), (draft, judged, .3681)):
        assert verify_kl(p, token, q, tau=kl - .001) and not verify_kl(p, token, q, tau=kl + .001)


@pytest.mark.parametrize("refresh, full", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2, 4]),
                                           (3, [0, 1, 3]), (5, [0, 1, 5]), (9, [0, 1])])
def test_the_delayed_cache_is_refreshed_at_these_forwards(refresh, full):
    """Six forwards of a canvas of 9: full ones process 9 positions; the others, of step s, what
    was masked one forward ago, 6 - (s - 1)."""
    d, steps = Denoiser(tiny_llama(1), M), []
    sample_dkv(d, [[1, 2, 3]], gen_length=6, block_length=6, steps=6, refresh=refresh,
               callback=lambda step: steps.append(step))
    out = sample_dkv(d, [[1, 2, 3]], gen_length=6, block_length=6, steps=6, refresh=refresh)
    assert int(out.positions) == sum(9 if s in full else 7 - s for s in range(6))
    assert len(steps) == 6


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_a_position_is_taken_back_max_revisions_times(most):
    """A rule that rejects everything takes some position back that often, and none more often."""
    d = Denoiser(tiny_llama(2), M)
    out = sample_dual_diffusion(d, [[1, 2]], gen_length=8, block_length=8, threshold=0.0,
                                verify=lambda j, t, q: torch.ones_like(t, dtype=torch.bool),
                                max_revisions=most)
    times = [sum(r.position == i for r in out.revisions) for i in range(10)]
    assert max(times) == most


@pytest.mark.parametrize("K, rejected, second", [
    (4, 0, 5 + 9), (4, 1, 5 + 5), (4, 2, 5 + 3), (3, 1, 4 + 2), (2, 1, 3 + 2), (1, 0, 2 + 3)])
def test_adaptive_k_halves_above_a_quarter_and_doubles_at_nothing(K, rejected, second):
    """One token per forward: the first verification is forward K + 1, the second follows after
    2 K, K or K // 2 drafts."""
    model, calls = Table(torch.zeros(40, 40)), []

    def rule(judged, tokens, draft):
        calls.append(model.calls)
        return (torch.arange(len(tokens)) < rejected) & (len(calls) == 1)
    sample_dual_diffusion(Denoiser(model, M), [[1]], gen_length=32, block_length=32, verify=rule,
                          draft_steps=K, view="visible", cache=None, adaptive=True)
    assert calls[:2] == [K + 1, second]


def test_gumbel_noise_has_its_sign():
    """With two tokens the sign does not show, with four it does: frequencies are the softmax."""
    p = torch.tensor([.5, .3, .15, .05])
    drawn = gumbel_argmax(p.log().expand(100_000, 4), 1.0, torch.Generator().manual_seed(0))
    assert torch.allclose(torch.bincount(drawn) / 1e5, p, atol=.006)


def test_seeds_of_equal_score_are_not_adjacent():
    """Shifted models: of a run the first; unequal ones by score."""
    run = torch.tensor([[False, True, True, True, False, True, True]])
    assert torch.equal(apart(torch.ones(1, 7), run, 1).nonzero()[:, 1], torch.tensor([1, 5]))
    score = torch.tensor([[9., 1, 2, 1, 9, 1, 2]])
    assert torch.equal(apart(score, run, 1).nonzero()[:, 1], torch.tensor([2, 6]))
    assert torch.equal(apart(score, run, 0), run)


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_eos_id_stops_a_row_and_the_first_one_fills_it(name):
    """Block 1 of 3 holds the second of two eos ids: one block's forwards, the rest is eos_ids[0];
    tokens per forward count what comes before."""
    table = torch.zeros(12, 40)
    table[torch.arange(12), [9, 9, 6, 9, 9, 9, 9, 9, 9, 9, 9, 9]] = 20.0
    d = Denoiser(Table(table), M, eos_ids=(5, 6))
    out = SAMPLERS[name](d, [[1]], gen_length=9, block_length=3, early_stop=True)
    one = SAMPLERS[name](d, [[1]], gen_length=3, block_length=3)
    assert out.generated[0].tolist() == [9, 6, 5, 5, 5, 5, 5, 5, 5]
    assert torch.equal(out.nfe, one.nfe)
    assert torch.allclose(out.tokens_per_forward, 1 / out.nfe)
    assert out.commit_step[0, 3:].tolist() == [0] * 7


def test_an_eos_that_is_postponed_is_filled_last_even_if_it_is_surest():
    """Position 2 wants eos with 1.0, the others their token with less: order 3, 1, 2 of the block,
    and eos is last; without postponing it is first."""
    table = torch.full((4, 40), 0.0)
    table[2, 5], table[1, 9], table[3, 8] = 30.0, 4.0, 6.0
    d = Denoiser(Table(table), M, eos_ids=(5,))
    for postpone, order in ((True, [2, 3, 1]), (False, [3, 1, 2])):
        out = sample_llada(d, [[1]], gen_length=3, postpone_eos=postpone)
        assert out.commit_step[0, 1:].tolist() == order


@pytest.mark.parametrize("remasking", ["low_confidence", "margin", "entropy"])
def test_a_postponed_eos_is_last_whatever_the_confidence_is(remasking):
    """Minus an entropy is never above 0: a postponed eos has to lose to that as well."""
    table = torch.zeros(4, 40)
    table[2, 5] = 30.0
    d = Denoiser(Table(table), M, eos_ids=(5,))
    out = sample_llada(d, [[1]], gen_length=3, postpone_eos=True, remasking=remasking)
    assert out.commit_step[0].tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("sampler", [sample_fast_dllm, sample_dkv, sample_wino, sample_cover])
def test_a_postponed_eos_waits_even_at_threshold_zero(sampler):
    """Everything is above 0, a postponed eos is not: a forward later, alone."""
    table = torch.zeros(4, 40)
    table[2, 5], table[1, 9], table[3, 8] = 30.0, 4.0, 6.0
    out = sampler(Denoiser(Table(table), M, eos_ids=(5,)), [[1]], gen_length=3, block_length=3,
                  threshold=0.0, postpone_eos=True)
    assert out.commit_step[0].tolist() == [0, 1, 2, 1]


def test_quotas_of_unequal_rows():
    """5 masks and 3 holes more, over 3 steps: 2 2 1 and 3 3 2; a remainder goes to the first."""
    out = sample_llada(halves(), [[M, 1, M, M], [1]], gen_length=5, steps=3)
    counts = [[int((row == s).sum()) for s in (1, 2, 3)] for row in out.commit_step]
    assert counts == [[3, 3, 2], [2, 2, 1]]


@pytest.mark.parametrize("cache, windows", [
    (None, [10] * 8), ("prefix", [10, 8, 8, 8, 10, 4, 4, 4]), ("dual", [10, 4, 4, 4] * 2)])
def test_the_columns_of_a_window(cache, windows):
    """Prompt 2, two blocks of 4, one token per forward: what each forward processes."""
    seen = []
    model = Table(torch.zeros(10, 40))

    def watched(input_ids, **kw):
        seen.append((input_ids.shape[1], kw["position_ids"][0].tolist()))
        return model(input_ids, **kw)
    sample_fast_dllm(Denoiser(watched, M), [[1, 2]], gen_length=8, block_length=4, threshold=1.0,
                     cache=cache)
    assert [n for n, _ in seen] == windows
    for i, (n, at) in enumerate(seen):
        start = {10: 0, 8: 2, 4: 2 + 4 * (i // 4)}[n]
        assert at == [*range(start, start + n)]


@torch.no_grad()
def test_the_checks_of_cover_are_counted(monkeypatch):
    """No position is a seed more than max_checks times, with 0 none is, and some are that often;
    a forward has at most max_seeds, and the share of the candidates."""
    seeds, call = [], Denoiser.__call__

    def spy(self, *a, **kw):
        seeds.append(kw["seeds"].clone())
        return call(self, *a, **kw)
    monkeypatch.setattr(Denoiser, "__call__", spy)
    model = lively(tiny_llama, 3, seed=1)
    for checks, most in ((0, 9), (1, 9), (2, 9), (9, 1), (9, 0), (9, 2)):
        seeds.clear()
        sample_cover(Denoiser(model, M), [[1, 2, 3]], gen_length=48, block_length=48, threshold=.7,
                     max_checks=checks, max_seeds=most, seed_share=1.0, tau_replace=.4,
                     tau_remask=.9)
        per_position, per_forward = sum(s.long() for s in seeds).max(), max(s.sum() for s in seeds)
        assert per_position <= checks and per_forward <= most
        if most == 9:
            assert per_position == checks
        else:
            assert per_forward == most
