# SPDX-License-Identifier: MIT
"""Section 4, sample_llada: orders worked out by hand on tables, schedules, guidance,
memory."""
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import Table, commit_order, random_ids, tiny_llama, tiny_qwen2
from torch.utils._python_dispatch import TorchDispatchMode

import dlm_spec
from dlm_spec import (
    Denoiser,
    draw,
    guided,
    is_eos,
    quota_schedule,
    sample_dkv,
    sample_llada,
    top_k,
)

M, V = 9, 10        # the tables below: ten ids, the last is the mask


def denoiser_of(logits, **kw):
    return Denoiser(Table(logits), M, **kw)


def probabilities(*rows):
    """Logits from probabilities, one dict {id: p} per position; the rest is spread evenly."""
    out = torch.full((len(rows), V), -torch.inf)
    for i, row in enumerate(rows):
        out[i, :M] = (1 - sum(row.values())) / (V - 1 - len(row))
        out[i, list(row)] = torch.tensor([*row.values()])
    return out.log()


def logits_of_order():
    """Position 0 is the prompt; position 1 has two likely tokens and so little entropy."""
    return torch.cat([torch.zeros(1, V),
                      probabilities({3: .6, 4: .38}, {5: .5}, {2: .9}, {7: .7})])


@pytest.mark.parametrize("remasking, expected", [
    ("low_confidence", [[2], [3], [0], [1]]),     # .9 .7 .6 .5
    ("margin", [[2], [3], [1], [0]]),             # .8875 .6625 .4375 .22
    ("entropy", [[2], [0], [3], [1]]),
])
def test_the_surest_mask_is_filled_first(remasking, expected):
    out = sample_llada(denoiser_of(logits_of_order()), torch.tensor([[1]]), gen_length=4,
                       remasking=remasking)
    assert out.sequences.tolist() == [[1, 3, 5, 2, 7]]
    assert commit_order(out) == expected
    assert out.nfe.tolist() == [4]


def test_random_remasking_follows_its_generator():
    """The order of commits is that of uniform numbers; the tokens are those of the table."""
    def run(seed):
        out = sample_llada(denoiser_of(logits_of_order()), [[1]], gen_length=4,
                           remasking="random", generator=torch.Generator().manual_seed(seed))
        assert out.generated.tolist() == [[3, 5, 2, 7]]
        return commit_order(out)
    assert run(0) == run(0) and len({str(run(seed)) for seed in range(8)}) > 3


def test_ties_go_to_the_lowest_index():
    out = sample_llada(denoiser_of(torch.zeros(5, V)), torch.tensor([[1]]), gen_length=4)
    assert commit_order(out) == [[0], [1], [2], [3]]


# ---------------------------------------------------------------------------------------------
# Schedules

@pytest.mark.parametrize("n, steps, expected", [(4, 4, [1, 1, 1, 1]), (10, 4, [3, 3, 2, 2]),
                                                (2, 5, [1, 1, 0, 0, 0]), (0, 3, [0, 0, 0])])
def test_quotas_are_even_and_the_first_steps_take_the_remainder(n, steps, expected):
    """CASES 13: 4 tokens over 4 steps is [1, 1, 1, 1]."""
    assert quota_schedule(torch.tensor([n]), steps).tolist() == [expected]


def test_steps_are_spread_over_the_blocks():
    """11 steps over 3 blocks: 4, 4, 3; without steps one forward per mask."""
    run = dlm_spec.Decode(denoiser_of(torch.zeros(20, V)), [[1]], gen_length=12,
                          block_length=4)
    assert dlm_spec.steps_per_block(11, run) == [4, 4, 3]
    assert dlm_spec.steps_per_block(None, run) == [None] * 3
    with pytest.raises(ValueError, match="steps is 2, but there are 3 blocks"):
        dlm_spec.steps_per_block(2, run)


def test_short_last_block_and_too_many_steps():
    """CASES 12: exactly 6 new tokens from blocks of 4; steps > gen_length never costs more
    than gen_length."""
    d = Denoiser(tiny_llama(1), 39)
    for steps, nfe in ((None, 6), (50, 6), (3, 3)):
        out = sample_llada(d, random_ids(1, 3), gen_length=6, block_length=4, steps=steps)
        assert out.sequences.shape == (1, 9) and (out.sequences != 39).all()
        assert out.nfe.tolist() == [nfe]


def test_quotas_of_unequal_rows():
    """5 masks and 3 holes more, over 3 steps: 2 2 1 and 3 3 2; a remainder goes to the
    first."""
    out = sample_llada(denoiser_of(torch.zeros(20, V)), [[M, 1, M, M], [1]], gen_length=5,
                       steps=3)
    counts = [[int((row == s).sum()) for s in (1, 2, 3)] for row in out.commit_step]
    assert counts == [[3, 3, 2], [2, 2, 1]]


@pytest.mark.parametrize("sampler", [sample_llada, sample_dkv])
def test_steps_beyond_the_masks_are_named(sampler):
    """CASES 12: they cost nothing, but the caller may have meant something else. Holes of the
    prompt are masks too."""
    d = denoiser_of(torch.zeros(20, V))
    with pytest.warns(UserWarning, match="steps is 7, but no row has more than 6 masks"):
        out = sampler(d, [[1, M, 2]], gen_length=5, steps=7)
    assert out.nfe.tolist() == [6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler(d, [[1, M, 2], [1, 2, 2]], gen_length=5, steps=6)


JOINT = torch.tensor([[.50, .10], [.15, .25]])      # of two tokens


def two_tokens(input_ids, **_):
    """Each token's distribution given the other, or none (id 2 is M), by JOINT."""
    given_second = torch.cat([JOINT / JOINT.sum(0), JOINT.sum(1, keepdim=True)], 1).T
    given_first = torch.cat([JOINT / JOINT.sum(1, keepdim=True), JOINT.sum(0, keepdim=True)])
    p = torch.stack([given_second[input_ids[:, 1]], given_first[input_ids[:, 0]]], 1)
    return SimpleNamespace(logits=p.log())


@pytest.mark.parametrize("remasking, want", [
    ("random", JOINT), ("margin", JOINT), ("entropy", JOINT),
    ("low_confidence", torch.tensor([[.675, .035], [.2025, .0875]]))])
def test_the_order_decides_what_is_sampled_at_a_temperature(remasking, want):
    """Orders that do not look at the drawn tokens give the model's distribution. Low confidence
    keeps the likelier of two draws: the second 0, .65, whenever it is drawn, the first 0, .6,
    when it is drawn beside the second 1: [0, 0] has .65 * .5 / .65 + .6 * .35 * .5 / .6 = .675
    instead of .5. The bound, .02, is 2.5 standard errors of 4,000 rows."""
    out = sample_llada(Denoiser(two_tokens, 2), torch.zeros(4000, 0).long(), gen_length=2,
                       temperature=1.0, remasking=remasking,
                       generator=torch.Generator().manual_seed(0))
    found = torch.bincount(out.generated @ torch.tensor([2, 1]), minlength=4) / 4000
    assert (found.view(2, 2) - want).abs().max() < .02


@torch.no_grad()
def test_the_sampler_is_its_definition():
    """In each forward the surest masks of the block, as many as the quota says: written out
    for one row, with a model whose answers depend on the canvas."""
    d, x = Denoiser(tiny_llama(2, dtype=torch.float64), 39), torch.full((1, 12), 39)
    x[:, :4] = random_ids(1, 4)
    for start in (4, 8):
        block = (torch.arange(12) >= start) & (torch.arange(12) < start + 4)
        for quota in (2, 1, 1):
            ask = block & (x == 39)
            p, token = d(x, ask).softmax(-1).max(-1)
            commit = top_k(torch.zeros(1, 12).double().masked_scatter(ask, p), ask,
                           torch.tensor([quota]))
            x = torch.where(commit, x.masked_scatter(ask, token), x)
    out = sample_llada(d, random_ids(1, 4), gen_length=8, block_length=4, steps=6)
    assert torch.equal(out.sequences, x)


# ---------------------------------------------------------------------------------------------
# Batches

ROWS = [[4, 8, 15], [16, 23, 7, 2, 9, 1], [3]]


@pytest.mark.parametrize("knobs", [
    dict(), dict(block_length=4, steps=5), dict(remasking="margin", steps=6),
    dict(remasking="entropy", cfg_scale=.7, block_length=8, steps=4)])
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(make, shift, knobs):
    """CASES 2: three prompts of different lengths, greedy, fp64: the same tokens,
    NFE and positions."""
    d = Denoiser(make(2, dtype=torch.float64), 39, shift=shift)
    out = sample_llada(d, ROWS, gen_length=10, **knobs)
    for i, row in enumerate(ROWS):
        one = sample_llada(d, [row], gen_length=10, **knobs)
        assert torch.equal(out.generated[i], one.generated[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
        assert torch.equal(out.commit_step[i, -10:], one.commit_step[0, -10:])


@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
def test_rows_equal_single_runs_at_a_temperature_with_a_generator_per_row(remasking):
    d = Denoiser(tiny_llama(2, dtype=torch.float64), 39)

    def seeds():
        return [torch.Generator().manual_seed(i) for i in range(3)]
    knobs = dict(gen_length=8, steps=4, temperature=.8, remasking=remasking)
    out = sample_llada(d, ROWS, generator=seeds(), **knobs)
    for i, row in enumerate(ROWS):
        assert torch.equal(out.generated[i], sample_llada(
            d, [row], generator=[seeds()[i]], **knobs).generated[0])


def test_nfe_is_the_number_of_calls_of_the_model():
    """CASES 15, first half: counted by a wrapper around the model, guidance included."""
    for knobs, per_call in ((dict(), 1), (dict(cfg_scale=1.0), 2), (dict(steps=3), 1)):
        model = Table(torch.zeros(5, V))
        out = sample_llada(Denoiser(model, M), torch.tensor([[1], [2]]), gen_length=4, **knobs)
        assert out.nfe.sum() == model.rows and out.calls == model.calls
        assert (out.nfe == per_call * model.calls).all()


def test_processed_positions_of_the_uncached_sampler():
    """CASES 22: prompt 6, G 16, block 8, 8 steps: 8 x 22 = 176 positions; twice with
    guidance."""
    for scale, positions in ((0.0, 176), (1.0, 352)):
        out = sample_llada(Denoiser(tiny_llama(1), 39), random_ids(1, 6), gen_length=16,
                           block_length=8, steps=8, cfg_scale=scale)
        assert out.positions.tolist() == [positions]


def test_the_largest_temporary_is_bounded_by_the_candidate_rows():
    """CASES 30: no tensor of a step holds more than N x V numbers, N the masks of the
    block."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out])
                         if isinstance(t, torch.Tensor) and "embedding" not in str(func))
            return out

    vocab = 4000
    d = Denoiser(tiny_llama(1, vocab=vocab), vocab - 1)
    for knobs in (dict(temperature=1.0), dict(remasking="entropy"), dict(remasking="margin")):
        sizes.clear()
        with Sizes():
            sample_llada(d, random_ids(1, 50), gen_length=16, block_length=4, steps=4, **knobs)
        weights = vocab * 32
        assert max(s for s in sizes if s != weights) <= 4 * vocab


# ---------------------------------------------------------------------------------------------
# Guidance

@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("scale", [1., -.5, 2.5])
def test_guidance_on_a_table(pad, scale):
    """CASES 3: B=2, with and without a mask: u + (s+1)(c-u), where u sees the given tokens as
    M; one call of the model for both, and twice the positions."""
    c, u = torch.randn(6, 10), torch.randn(6, 10)

    def logits(ids, positions):
        return torch.where((ids == 9).all(1)[:, None, None], u[positions], c[positions])

    x = torch.tensor([[1, 2, 3, 9, 9, 9], [5, 4, 3, 9, 9, 9]])
    visible = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1] if pad else [1] * 6]).bool()
    model = Table(logits)
    got, judged, cost = guided(Denoiser(model, 9), x, x == 9, visible if pad else None,
                               given=x != 9, scale=scale)
    at = torch.cat([torch.arange(3, 6), torch.arange(1, 4) if pad else torch.arange(3, 6)])
    want = (u + (scale + 1) * (c - u)).index_fill(1, torch.tensor([9]), -torch.inf)[at]
    assert torch.allclose(got, want, atol=1e-5) and model.calls == 1 and model.rows == 4
    assert judged.shape == (0, 10) and torch.equal(cost, 2 * visible.sum(1))
    if pad:
        assert torch.equal(model.last["attention_mask"], visible.repeat(2, 1)[:, None, None])


@torch.no_grad()
def test_guidance_of_a_padded_row_is_that_of_the_row_alone():
    """CASES 3: on a model, whose attention would see the padding."""
    d = Denoiser(tiny_llama(2, dtype=torch.float64), 39)
    x = torch.tensor([[7, 7, 1, 39, 39], [1, 2, 3, 39, 39]])
    visible = torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).bool()
    got, _, _ = guided(d, x, x == 39, visible, given=visible & (x != 39), scale=1.5)
    alone, _, _ = guided(d, x[:1, 2:], x[:1, 2:] == 39, given=x[:1, 2:] != 39, scale=1.5)
    assert torch.allclose(got[:2], alone, atol=1e-9)


def test_guidance_moves_the_prediction_away_from_the_unconditional_one():
    def logits(ids, position_ids):
        out = torch.zeros(*ids.shape, V)
        out[..., 3], out[..., 4] = 1.0, 1.1
        seen = (ids != M).any(1)            # the prompt adds to 3
        out[seen, :, 3] += .05
        return out
    d = denoiser_of(logits)
    assert sample_llada(d, torch.tensor([[1]]), gen_length=1).generated.tolist() == [[4]]
    assert sample_llada(d, torch.tensor([[1]]), gen_length=1,
                        cfg_scale=2.0).generated.tolist() == [[3]]


# ---------------------------------------------------------------------------------------------
# Small functions

def test_a_cpu_generator_serves_any_device():
    """Numbers are drawn where the generator lives, then moved."""
    u = draw((3, 2), torch.Generator().manual_seed(0), None, dtype=torch.float64,
             device="meta")
    assert u.device.type == "meta" and u.shape == (3, 2)


def test_a_generator_per_row_draws_each_row_s_own_numbers():
    """Rows 0 and 2 have candidates: each gets what its generator alone gives, row 1's is not
    used."""
    def seeds():
        return [torch.Generator().manual_seed(i) for i in range(3)]
    generators, alone = seeds(), seeds()
    u = draw((5, 4), generators, torch.tensor([0, 0, 2, 2, 2]), dtype=torch.float32,
             device="cpu")
    assert torch.equal(u, torch.cat([torch.rand(2, 4, generator=alone[0]),
                                     torch.rand(3, 4, generator=alone[2])]))
    assert torch.equal(generators[1].get_state(), alone[1].get_state())


def test_ends_of_text_are_any_of_the_eos_ids():
    x = torch.tensor([[1, 8, 7], [8, 8, 2]])
    assert is_eos(x, denoiser_of(torch.zeros(1, V), eos_ids=(8, 7))).tolist() == [
        [False, True, True], [True, True, False]]
    assert not is_eos(x, denoiser_of(torch.zeros(1, V))).any()


def test_tempered_confidence_needs_a_temperature():
    for knobs in (dict(), dict(temperature=1.0, remasking="random")):
        with pytest.raises(ValueError, match="tempered_confidence changes nothing"):
            sample_llada(denoiser_of(torch.zeros(5, V)), [[1]], gen_length=4,
                         tempered_confidence=True, **knobs)
