# SPDX-License-Identifier: MIT
"""Section 5, caches: the K/V cache against stale keys written out, Fast-dLLM and dKV-Cache
against slow emulations, their rules by hand."""
import math
from functools import partial

import pytest
import torch
from helpers import (
    VOCAB,
    M,
    Table,
    no_mask,
    oracle,
    padded,
    random_ids,
    sharp_table,
    tiny_llama,
    tiny_qwen2,
    tiny_qwen3,
)

import dlm_spec
from dlm_spec import Denoiser, KVCache, sample_dkv, sample_fast_dllm, sample_llada, windowed

MODELS = {
    "llama": lambda n: tiny_llama(n),
    "llama_gqa": lambda n: tiny_llama(n, kv_heads=2),
    "qwen2_gqa": lambda n: tiny_qwen2(n),
    "qwen3_gqa": lambda n: tiny_qwen3(n),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())

SAMPLERS = {"threshold": sample_fast_dllm, "factor": partial(sample_fast_dllm, factor=1.0),
            "prefix": partial(sample_fast_dllm, cache="prefix"),
            "dual": partial(sample_fast_dllm, cache="dual"),
            "dual, factor": partial(sample_fast_dllm, cache="dual", factor=1.0),
            "dkv": partial(sample_dkv, refresh=4),
            "dkv, quota": partial(sample_dkv, refresh=3, steps=8)}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
CACHES = {"prefix": partial(sample_fast_dllm, cache="prefix"),
          "dual": partial(sample_fast_dllm, cache="dual"), "dkv": sample_dkv}
every_cache = pytest.mark.parametrize("sampler", CACHES.values(), ids=CACHES.keys())


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def close(a, b, atol=1e-5):
    return torch.allclose(a, b, atol=atol, rtol=1e-5)


def at(positions, L):
    """(B, n) columns -> (B, L) bool."""
    return torch.zeros(len(positions), L, dtype=torch.bool).scatter(1, positions, True)


def read(denoiser, x, ask, attention_mask=None, **how):
    """The logits of `windowed` alone."""
    return windowed(denoiser, x, ask, attention_mask, **how)[0]


def stored(kv):
    """All keys and values of a cache."""
    return [*kv.k.values(), *kv.v.values()]


# ---------------------------------------------------------------------------------------------
# The K/V cache

@every_model
@pytest.mark.parametrize("shift", [False, True])
def test_window_of_unchanged_tokens_equals_the_full_forward(make, shift):
    """CASES 34: different columns per row, as many or not, with padding: the logits are those
    of a full forward, in row-major order of `ask`; keys are stored with their own number of
    heads."""
    model = make(3)
    denoiser = Denoiser(model, M, shift=shift)
    ids, visible = padded([random_ids(1, 9)[0], random_ids(1, 7, seed=1)[0]], 9)
    kv = KVCache(ids)
    full = read(denoiser, ids, visible, visible, kv=kv)
    assert close(full, denoiser(ids, visible, visible))
    for columns in ([[8, 2, 0, 5], [7, 3, 6, 7]], [[3, 6, 3, 3], [2, 4, 8, 8]]):
        ask = at(torch.tensor(columns), 9)
        got = read(denoiser, ids, ask, visible, kv=kv, window=ask)
        assert got.shape == (ask.sum(), VOCAB) and close(got, full[ask[visible]])
    heads = model.config.num_key_value_heads
    assert [t.shape for t in stored(kv)] == [(2, heads, 9, 8)] * 6


@every_model
def test_stored_keys_are_not_rotated_twice(make):
    """CASES 20: storing the same tokens again, window after window,
    leaves the cache and all logits as they were."""
    model, ids = make(2), random_ids(2, 8)
    denoiser, kv, everywhere = Denoiser(model, M), KVCache(ids), torch.ones(2, 8).bool()
    full = read(denoiser, ids, everywhere, kv=kv).view(2, 8, -1)
    before = [t.clone() for t in stored(kv)]
    for columns in ([4, 5, 6, 7], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]):
        ask = at(torch.tensor(columns).expand(2, -1), 8)
        assert close(read(denoiser, ids, ask, kv=kv, window=ask), full[ask])
    assert all(map(close, before, stored(kv)))


@every_model
def test_cache_is_exact_on_one_layer_and_approximate_on_two(make):
    """CASES 18: after a token of the window changed, one layer gives the full forward's
    logits, two do not."""
    ids, ask = random_ids(2, 8), at(torch.tensor([[2, 3, 4], [5, 6, 7]]), 8)
    changed = ids.clone()
    changed[[0, 1], [3, 5]] += 1
    for layers in (1, 2):
        model, kv = make(layers), KVCache(ids)
        denoiser = Denoiser(model, M)
        read(denoiser, ids, torch.ones_like(ask), kv=kv)
        got = read(denoiser, changed, ask, kv=kv, window=ask)
        assert close(got, no_mask(oracle(model, changed)[0])[ask]) == (layers == 1)


@every_model
def test_cache_equals_stale_keys_written_out(make):
    """CASES 18: three layers, several windows in a row, tokens changing each time, with
    padding: the logits are those of a slow forward in which every other column keeps its old
    keys and values."""
    model = make(3)
    denoiser = Denoiser(model, M)
    ids, visible = padded([random_ids(1, 8)[0], random_ids(1, 5, seed=1)[0]], 8)
    position_ids = (visible.cumsum(1) - 1).clamp(min=0)
    kv = KVCache(ids)
    read(denoiser, ids, visible, visible, kv=kv)
    stale = oracle(model, ids, visible, position_ids)[1]
    for columns in ([[2, 3, 4], [5, 6, 7]], [[4, 0, 7], [3, 4, 5]], [[1, 2, 3], [7, 6, 4]]):
        ask = at(torch.tensor(columns), 8)
        ids[[0, 1], [columns[0][1], columns[1][1]]] += 5
        ids %= M
        want, stale = oracle(model, ids, visible, position_ids, stale, ask)
        got = read(denoiser, ids, ask, visible, kv=kv, window=ask)
        assert close(got, no_mask(want)[ask])
        assert not close(got, no_mask(oracle(model, ids, visible, position_ids)[0])[ask], 1e-3)


def test_what_is_shown_are_the_tokens_that_were_stored():
    """kv.shown: -1 before any forward, then the canvas, then only the window's new tokens."""
    ids, denoiser = random_ids(2, 6), Denoiser(tiny_llama(1), M)
    kv, ask = KVCache(ids), at(torch.tensor([[1, 2], [3, 3]]), 6)
    assert (kv.shown == -1).all()
    read(denoiser, ids, ask, kv=kv)
    assert torch.equal(kv.shown, ids)
    other = (ids + 1) % M
    read(denoiser, other, ask, kv=kv, window=ask)
    assert torch.equal(kv.shown, torch.where(ask, other, ids))


def test_full_forward_refreshes_a_used_cache():
    """After windows, a forward without `window` recomputes everything."""
    model, x, ask = tiny_llama(2), random_ids(2, 6), at(torch.tensor([[1, 2], [3, 4]]), 6)
    denoiser, kv, everywhere = Denoiser(model, M), KVCache(x), torch.ones(2, 6).bool()
    read(denoiser, x, ask, kv=kv)
    read(denoiser, (x + 1) % M, ask, kv=kv, window=ask)
    ids = random_ids(2, 6, seed=6)
    assert close(read(denoiser, ids, everywhere, kv=kv),
                 no_mask(oracle(model, ids)[0])[everywhere])


@every_model
def test_rows_that_take_no_part_keep_their_cache(make):
    """`rows` says which rows of the batch a forward is of: the keys of the others stay
    bitwise, and these rows get what they get in a batch of their own."""
    model, ids = make(2), random_ids(3, 6)
    denoiser, everywhere = Denoiser(model, M), torch.ones(3, 6, dtype=torch.bool)
    kv, alone, two = KVCache(ids), KVCache(ids[:2]), torch.tensor([0, 2])
    read(denoiser, ids[two], everywhere[two], kv=kv, rows=two)
    read(denoiser, ids[two], everywhere[two], kv=alone)
    ids[:, 2] = (ids[:, 2] + 3) % M
    before = [t[:2].clone() for t in stored(kv)]
    ask = at(torch.tensor([[2, 3]]), 6)
    got = read(denoiser, ids[2:], ask, kv=kv, window=ask, rows=torch.tensor([2]))
    want = read(denoiser, ids[2:], ask, kv=alone, window=ask, rows=torch.tensor([1]))
    assert close(got, want)
    assert all(torch.equal(a, t[:2]) for a, t in zip(before, stored(kv), strict=True))


def test_shifted_window_reads_one_position_earlier():
    """CASES 19: position p of the table says token p+1; through a window of a padded batch a
    shifted model gives the position."""
    x, visible = padded([random_ids(1, 6)[0], random_ids(1, 4)[0]], 6)
    denoiser, kv = Denoiser(Table(torch.eye(9)[1:]), 20, shift=True), KVCache(x)
    ask = at(torch.tensor([[3, 4], [4, 5]]), 6)
    read(denoiser, x, ask, visible, kv=kv)
    got = read(denoiser, x, ask, visible, kv=kv, window=ask)
    assert got.argmax(1).tolist() == [3, 4, 2, 3]


def test_what_is_asked_and_checked_outside_the_window_is_added_to_it():
    """The columns processed are counted; asked and checked logits come apart."""
    x, denoiser = random_ids(2, 6), Denoiser(tiny_llama(2), M)
    kv, everywhere = KVCache(x), torch.ones(2, 6, dtype=torch.bool)
    full, _, cost = windowed(denoiser, x, everywhere, kv=kv)
    assert cost.tolist() == [6, 6]
    window, ask, checked = (at(torch.tensor(c), 6) for c in (
        [[2, 3], [2, 3]], [[3, 4], [3, 3]], [[0, 0], [2, 2]]))
    logits, judged, cost = windowed(denoiser, x, ask, kv=kv, window=window, checked=checked)
    assert close(logits, full[ask.flatten()]) and close(judged, full[checked.flatten()])
    assert cost.tolist() == [4, 2]              # columns 0 2 3 4, and 2 3


def test_columns_come_in_order_and_short_rows_repeat_their_first():
    flag = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    columns, real = dlm_spec.columns_of(flag)
    assert columns[:2].tolist() == [[1, 3, 4], [2, 2, 2]]
    assert real.tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_a_window_needs_a_filled_cache():
    denoiser, x, ask = Denoiser(tiny_llama(1), M), random_ids(1, 4), torch.ones(1, 4).bool()
    for kv in (None, KVCache(x)):
        with pytest.raises(ValueError,
                           match="a window needs a kv that an earlier forward has"):
            windowed(denoiser, x, ask, kv=kv, window=ask)


# ---------------------------------------------------------------------------------------------
# Rules

@pytest.mark.parametrize("confidences, n", [
    ([.9, .3], 1), ([.9, .8, .3], 2), ([.99, .99, .99, .9, .3], 4), ([.99] * 3, 3),
    ([.1, .05], 1)])
def test_the_factor_rule_accepts_by_rank(confidences, n):
    """CASES 8, 42: rank n passes while c(n) >= 1 - 1 / (n + 1); the first rank always."""
    score = torch.tensor([confidences])
    chosen = dlm_spec.by_factor(score.flip(1), torch.ones_like(score, dtype=torch.bool), 1.0)
    assert chosen.flip(1).tolist() == [[i < n for i in range(len(confidences))]]


def test_the_threshold_rule_takes_all_above_it_and_always_the_best():
    score = torch.tensor([[.95, .3, .9, .99], [.2, .3, .1, .99]])
    ask = torch.tensor([[True, True, True, False]] * 2)
    assert dlm_spec.above_threshold(score, ask, .9).tolist() == [
        [True, False, True, False], [False, True, False, False]]


def test_a_row_with_nothing_to_fill_gets_nothing():
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    for rule in (dlm_spec.above_threshold, dlm_spec.by_factor):
        assert not rule(torch.ones(1, 4), nothing, .5).any()


def test_two_rules_at_once_are_refused():
    """CASES 10: a threshold with a factor, and a quota of steps with a threshold."""
    denoiser = Denoiser(Table(torch.zeros(9, 40)), M)
    for sampler, knobs in ((sample_fast_dllm, dict(threshold=.9, factor=1.0)),
                           (sample_dkv, dict(threshold=.9, steps=4))):
        with pytest.raises(ValueError, match="pass one"):
            sampler(denoiser, [[1]], gen_length=4, **knobs)


@pytest.mark.parametrize("sampler, forwards", [
    (partial(sample_fast_dllm, threshold=.5), 1),       # at least the threshold
    (partial(sample_fast_dllm, threshold=.5, cache="dual"), 1),
    (partial(sample_dkv, threshold=.5), 1),
    (partial(sample_fast_dllm, factor=1.0), 4),         # .5 >= 1 - 1/2, .5 < 1 - 1/3
    (partial(sample_fast_dllm, factor=1.5), 2),         # .5 >= 1 - 1.5/3, .5 < .625
], ids=["threshold", "dual cache", "delayed cache", "factor 1", "factor 1.5"])
def test_a_confidence_equal_to_the_threshold_is_committed(sampler, forwards):
    """Two tokens with probability 1/2 each, to the bit, at every position."""
    table = torch.full((5, 40), -math.inf)
    table[:, [3, 7]] = 0.0
    out = sampler(Denoiser(Table(table), M), [[1]], gen_length=4, block_length=4)
    assert out.nfe.tolist() == [forwards] and not out.revisions


@every_sampler
def test_a_model_that_is_never_sure_still_ends(sampler):
    """CASES 7: all confidences about .3, block 8: one token per forward, 8 forwards; and a
    model that wants M, or ids past the tokenizer, is overruled (CASES 9)."""
    table = torch.full((40, 40), -20.0)
    table[:, :3] = torch.tensor([0.2, 0.1, 0.0])
    table[:, M], table[:, 30] = 9.0, 8.0
    out = sampler(Denoiser(Table(table), M, n_tokens=30), [[1, 2]], gen_length=8,
                  block_length=8)
    assert out.nfe.tolist() == [8] and (out.generated == 0).all()


# ---------------------------------------------------------------------------------------------
# The samplers

ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]


@every_sampler
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(sampler, make, shift):
    """CASES 2: different lengths, holes in one prompt, greedy, fp64: tokens, NFE,
    positions."""
    d = Denoiser(make(2, dtype=torch.float64), M, shift=shift)
    out = sampler(d, ROWS, gen_length=10, block_length=4)
    for i, row in enumerate(ROWS):
        one = sampler(d, [row], gen_length=10, block_length=4)
        assert torch.equal(out.sequences[i, -10 - len(row):], one.sequences[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
    assert (out.sequences != M).all() and out.generated.shape == (3, 10)


@every_sampler
def test_nfe_is_the_number_of_canvases_forwarded(sampler):
    """CASES 15: counted at the model; never more than there are masks."""
    model, rows = tiny_llama(2), []
    denoiser = Denoiser(model, M)
    model.model.register_forward_pre_hook(lambda *a: rows.append(len(a[2]["input_ids"])),
                                          with_kwargs=True)
    out = sampler(denoiser, ROWS, gen_length=9, block_length=4)
    assert sum(rows) == out.nfe.sum() and len(rows) == out.calls
    assert (out.nfe <= torch.tensor([9, 11, 9])).all()


@every_cache
def test_a_full_block_costs_no_second_forward(sampler):
    """CASES 11: G 16, block 8, threshold 0: two forwards."""
    out = sampler(Denoiser(tiny_llama(2), M), random_ids(1, 6), gen_length=16, block_length=8,
                  threshold=0.0)
    assert out.nfe.tolist() == [2]


@every_sampler
def test_infilling_and_short_last_blocks(sampler):
    """CASES 12, 14: exactly 6 new tokens from blocks of 4; holes filled without new tokens."""
    d = Denoiser(tiny_llama(2), M)
    assert sampler(d, [[1, 2, 3]], gen_length=6, block_length=4).sequences.shape == (1, 9)
    out = sampler(d, torch.tensor([[5, M, 7, M]]), gen_length=0, block_length=4)
    assert out.sequences[0, ::2].tolist() == [5, 7] and (out.sequences != M).all()


@every_sampler
def test_shifted_decoding_with_a_window(sampler):
    """CASES 19: position p of the table says "token p+1"; shifted decoding gives the
    position."""
    table = sharp_table(range(1, 25), logits=torch.linspace(1, 5, 24))
    d = Denoiser(Table(table), M, shift=True)
    out = sampler(d, [[0], [0, 1, 2]], gen_length=12, block_length=4)
    assert out.generated.tolist() == [list(range(1, 13)), list(range(3, 15))]


# ---------------------------------------------------------------------------------------------
# What a cache costs

def two_at_a_time(ids, position_ids):
    """Certain of the first two masks it sees, of nothing else."""
    certain = (ids == M) & ((ids == M).cumsum(1) <= 2)
    logits = torch.zeros(*ids.shape, 40)
    logits[..., 5] = torch.where(certain, 20.0, .1)
    return logits


@pytest.mark.parametrize("cache, positions", [(None, 176), ("prefix", 116), ("dual", 92)])
def test_a_cache_processes_fewer_positions(cache, positions):
    """CASES 22: prompt 6, G 16, block 8, 8 forwards."""
    out = sample_fast_dllm(Denoiser(Table(two_at_a_time), M), random_ids(1, 6), gen_length=16,
                           block_length=8, cache=cache)
    assert out.nfe.tolist() == [8] and out.positions.tolist() == [positions]


def test_a_shifted_window_counts_the_column_before_it():
    """Shifted models: one more column in each of the 3 windows of both blocks."""
    def shifted(ids, position_ids):
        return torch.nn.functional.pad(two_at_a_time(ids, position_ids)[:, 1:], (0, 0, 0, 1))
    out = sample_fast_dllm(Denoiser(Table(shifted), M, shift=True), random_ids(1, 6),
                           gen_length=16, block_length=8, cache="dual")
    assert out.nfe.tolist() == [8] and out.positions.tolist() == [92 + 6]


@pytest.mark.parametrize("cache, windows", [
    (None, [10] * 8), ("prefix", [10, 8, 8, 8, 10, 4, 4, 4]), ("dual", [10, 4, 4, 4] * 2)])
def test_the_columns_of_a_window(cache, windows):
    """Prompt 2, two blocks of 4, one token per forward: what each forward processes."""
    seen = []

    def logits(ids, position_ids):
        seen.append(position_ids[0].tolist())
        return torch.zeros(*ids.shape, 40)
    sample_fast_dllm(Denoiser(Table(logits), M), [[1, 2]], gen_length=8, block_length=4,
                     threshold=1.0, cache=cache)
    starts = [{10: 0, 8: 2, 4: 2 + 4 * (i // 4)}[n] for i, n in enumerate(windows)]
    assert seen == [[*range(start, start + n)] for start, n in zip(starts, windows)]


@pytest.mark.parametrize("refresh, full", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 1, 2, 4]),
                                           (3, [0, 1, 3]), (5, [0, 1, 5]), (9, [0, 1])])
def test_the_delayed_cache_is_refreshed_at_these_forwards(refresh, full):
    """Six forwards of a canvas of 9, one token each: full ones process 9 positions; the
    others, of step s, what was masked one forward ago, 6 - (s - 1)."""
    out = sample_dkv(Denoiser(tiny_llama(1), M), [[1, 2, 3]], gen_length=6, block_length=6,
                     steps=6, refresh=refresh)
    assert out.positions.tolist() == [sum(9 if s in full else 7 - s for s in range(6))]


# ---------------------------------------------------------------------------------------------
# Cached decodes against slow ones

@every_cache
def test_one_layer_is_lossless_and_two_are_not(sampler):
    """CASES 18: with one layer keys and values depend on the token alone."""
    equal = {1: 0, 2: 0}
    for layers in equal:
        for seed in range(6):
            d = Denoiser(tiny_llama(layers, seed=seed, dtype=torch.float64), M)
            prompt = random_ids(1, 6, seed=seed)
            knobs = dict(gen_length=16, block_length=8, threshold=.6)
            want = sample_fast_dllm(d, prompt, **knobs).sequences
            equal[layers] += torch.equal(want, sampler(d, prompt, **knobs).sequences)
    assert equal[1] == 6 and equal[2] < 6


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_refreshing_every_step_is_the_uncached_sampler(make, shift):
    d = Denoiser(make(3, dtype=torch.float64), M, shift=shift)
    knobs = dict(gen_length=12, block_length=6, steps=8)
    assert torch.equal(sample_dkv(d, ROWS, refresh=1, **knobs).sequences,
                       sample_llada(d, ROWS, **knobs).sequences)


def emulate(model, prompt, G, block, window_at):
    """A cached decode the slow way: threshold .5, every stale key and value written out.

    window_at(step, x, before, start, end): (1, L) bool, the columns to recompute; None: all. x
    and before are the inputs of this forward and of the one before.
    """
    x = torch.cat([prompt, torch.full((1, G), M)], 1)
    L, P = x.shape[1], prompt.shape[1]
    for start in range(P, L, block):
        end, step, stale, before = min(start + block, L), 0, None, x
        while (x[:, start:end] == M).any():
            window = window_at(step, x, before, start, end) if step else None
            logits, stale = oracle(model, x, None, torch.arange(L)[None],
                                   None if window is None else stale, window)
            p, tokens = no_mask(logits).softmax(-1).max(-1)
            ask = (x == M) & (torch.arange(L) >= start) & (torch.arange(L) < end)
            p = p.masked_fill(~ask, -1)
            commit = ask & ((p >= .5) | (p == p.max()))
            before, x, step = x, torch.where(commit, tokens, x), step + 1
    return x


def prefix_window(step, x, before, start, end):
    return torch.arange(x.shape[1])[None] >= start


def dual_window(step, x, before, start, end):
    return prefix_window(step, x, before, start, end) & (torch.arange(x.shape[1]) < end)


def delayed_window(step, x, before, start, end):
    return None if step < 2 or step % 4 == 0 else before == M


def undelayed_window(step, x, before, start, end):
    """The fault of CASES 21: a token's entry stays the one of its mask."""
    return None if step < 2 or step % 4 == 0 else x == M


@pytest.mark.parametrize("sampler, window", [
    (CACHES["prefix"], prefix_window), (CACHES["dual"], dual_window),
    (partial(sample_dkv, refresh=4), delayed_window)], ids=["prefix", "dual", "dkv"])
def test_a_cached_decode_equals_its_slow_emulation(sampler, window):
    """CASES 18: three layers; the emulation differs from the uncached sampler somewhere."""
    differs = 0
    for seed in range(6):
        model = tiny_llama(3, seed=seed, dtype=torch.float64, kv_heads=2)
        d, prompt = Denoiser(model, M), random_ids(1, 5, seed=seed)
        out = sampler(d, prompt, gen_length=14, block_length=7, threshold=.5)
        assert torch.equal(out.sequences, emulate(model, prompt, 14, 7, window))
        plain = sample_fast_dllm(d, prompt, gen_length=14, block_length=7, threshold=.5)
        differs += not torch.equal(out.sequences, plain.sequences)
    assert differs


def test_storing_the_mask_s_keys_would_show():
    """CASES 21: on one layer the delayed cache is exact; without the delay it is not."""
    wrong = 0
    for seed in range(6):
        model = tiny_llama(1, seed=seed, dtype=torch.float64)
        prompt = random_ids(1, 5, seed=seed)
        want = sample_fast_dllm(Denoiser(model, M), prompt, gen_length=14, block_length=14,
                                threshold=.5).sequences
        assert torch.equal(want, emulate(model, prompt, 14, 14, delayed_window))
        wrong += not torch.equal(want, emulate(model, prompt, 14, 14, undelayed_window))
    assert wrong
