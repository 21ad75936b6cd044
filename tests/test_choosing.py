# SPDX-License-Identifier: MIT
"""Section 3, choosing: which token is predicted, how sure the model is, which masks come
first."""
import math

import pytest
import torch

import dlm_spec
from dlm_spec import confidence_of, gumbel_argmax, predict, top_k

REMASKING = dlm_spec.LIMITS["remasking"]


def test_gumbel_noise_does_not_overflow_and_follows_the_softmax():
    """CASES 15, second half: logits 800 / 790 at T=1."""
    logits = torch.tensor([[800.0, 790.0]]).expand(1000, 2)
    assert (gumbel_argmax(logits, 1.0, torch.Generator().manual_seed(0))
            == 0).float().mean() > .99
    logits = torch.tensor([[801.0, 800.0, -torch.inf]]).expand(20000, 3)
    share = (gumbel_argmax(logits, 2.0, torch.Generator().manual_seed(0)) == 0).double().mean()
    p = 1 / (1 + math.exp(-.5))
    assert abs(share - p) < 4 * (p * (1 - p) / 20000) ** .5


def test_gumbel_noise_has_its_sign():
    """With two tokens the sign does not show, with four it does: frequencies are the
    softmax."""
    p = torch.tensor([.5, .3, .15, .05])
    drawn = gumbel_argmax(p.log().expand(100_000, 4), 1.0, torch.Generator().manual_seed(0))
    assert torch.allclose(torch.bincount(drawn) / 1e5, p, atol=.006)


def test_at_temperature_zero_the_largest_logit_wins():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_argmax(logits, 0), logits.argmax(1))


def test_confidence_at_a_temperature_by_both_rules():
    """CASES 29: logits [2, 1, 0], T=.5: .6652 untempered (LLaDA), .8668 tempered (Dream)."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(200, 1)
    for tempered, p in ((False, .6652), (True, .8668)):
        x0, c = predict(logits, temperature=.5, tempered_confidence=tempered,
                        generator=torch.Generator().manual_seed(0))
        assert torch.allclose(c[x0 == 0], torch.tensor(p), atol=1e-4)


def test_tempered_confidence_keeps_float64():
    """1e-9 apart, which float32 does not see at 1: the order of commits would be that of
    places."""
    logits = torch.tensor([[1.0, 0.0], [1.0 + 1e-9, 0.0]], dtype=torch.float64)
    _, c = predict(logits, temperature=.5, remasking="entropy", tempered_confidence=True)
    assert c.dtype == torch.float64 and c[1] > c[0]


@pytest.mark.parametrize("dtype",
                         [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [0, 1, 32, 33, 70])
def test_confidences_a_few_rows_at_a_time_are_those_of_all_at_once(N, dtype):
    """And the entropy is that of its definition, where a probability is 0 as well."""
    logits = (20 * torch.randn(N, 50, generator=torch.Generator().manual_seed(N))).to(dtype)
    logits[:, 7:9] = -torch.inf
    x0 = logits.max(1).indices
    p = logits.to(torch.promote_types(dtype, torch.float32)).softmax(1)
    two = p.topk(2, dim=1).values
    for name, want in (("low_confidence", p.gather(1, x0[:, None])[:, 0]),
                       ("margin", two[:, 0] - two[:, 1]),
                       ("entropy", -torch.special.entr(p).sum(1))):
        got = confidence_of(logits, x0, name)
        assert got.dtype == p.dtype and got.shape == (N,)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7) and (got <= 1).all()
        assert torch.equal(got, want) or name == "entropy"


def test_random_confidences_are_uniform_and_ignore_the_logits():
    a, b = (confidence_of(logits, torch.zeros(5000, dtype=torch.long), "random",
                          torch.Generator().manual_seed(0))
            for logits in (torch.zeros(5000, 3), torch.randn(5000, 3)))
    assert torch.equal(a, b) and (a >= 0).all() and (a < 1).all()
    assert torch.allclose(a.sort().values, torch.linspace(0, 1, 5000), atol=.03)


@pytest.mark.parametrize("remasking", REMASKING)
def test_a_vocabulary_of_one_token_has_a_confidence(remasking):
    """All but one id may be banned, or there may be no other."""
    x0, c = predict(torch.zeros(2, 1), remasking=remasking)
    assert x0.tolist() == [0, 0] and c.isfinite().all() and c.shape == (2,)


def test_top_k_takes_the_best_candidates_of_each_row():
    """Ties go to the lowest index; a candidate at -inf comes before what is no candidate; a
    row with fewer candidates than k gives all that it has."""
    low = -math.inf
    score = torch.tensor([[1.0, 3, 3, 2], [low, 9, low, 9], [1.0, 1, 1, 1], [5.0, 6, 7, 8]])
    ask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]]).bool()
    assert top_k(score, ask, torch.tensor([1, 1, 2, 3])).tolist() == [
        [False, True, False, False], [True, False, False, False], [True, True, False, False],
        [False, False, True, False]]
    assert top_k(score, ask, torch.tensor([2, 2, 0, 0])).sum(1).tolist() == [2, 2, 0, 0]


def test_top_k_equals_python_s_sort():
    """Random scores with many ties and some -inf, against sorting by hand."""
    g = torch.Generator().manual_seed(0)
    score = torch.randint(0, 4, (50, 12), generator=g).float()
    score[score == 0] = -math.inf
    ask = torch.rand(50, 12, generator=g) < .6
    k = torch.randint(0, 9, (50,), generator=g)
    for row, got in enumerate(top_k(score, ask, k)):
        candidates = sorted(ask[row].nonzero()[:, 0].tolist(), key=lambda i: -score[row, i])
        assert sorted(candidates[:k[row]]) == got.nonzero()[:, 0].tolist()
