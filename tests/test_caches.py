"""Fast-dLLM and dKV-Cache: their rules by hand, their caches against stale keys written out."""
import pytest
import torch
from helpers import Table, no_mask, oracle, random_ids, tiny_llama, tiny_qwen2

import dlm_spec
from dlm_spec import Denoiser, sample_dkv, sample_fast_dllm, sample_llada

M = 39


def fast(cache=None, **kw):
    return lambda d, prompt, **more: sample_fast_dllm(d, prompt, cache=cache, **{**kw, **more})


def dkv(**kw):
    return lambda d, prompt, **more: sample_dkv(d, prompt, **{**kw, **more})


SAMPLERS = {"threshold": fast(), "factor": fast(factor=1.0), "prefix": fast("prefix"),
            "dual": fast("dual"), "dual, factor": fast("dual", factor=1.0),
            "dkv": dkv(refresh=4), "dkv, quota": dkv(refresh=3, steps=8)}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
every_cache = pytest.mark.parametrize(
    "sampler", [fast("prefix"), fast("dual"), dkv()], ids=["prefix", "dual", "dkv"])


# ---------------------------------------------------------------------------------------------
# Rules

@pytest.mark.parametrize("confidences, n", [
    ([.9, .3], 1), ([.9, .8, .3], 2), ([.99, .99, .99, .9, .3], 4), ([.99] * 3, 3), ([.1, .05], 1)])
def test_the_factor_rule_accepts_by_rank(confidences, n):
    """CASES 8: rank n passes while c(n) >= 1 - 1 / (n + 1); the first rank always."""
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


@every_sampler
def test_a_model_that_is_never_sure_still_ends(sampler):
    """CASES 7: all confidences about .3, block 8: one token per forward, 8 forwards; and a model
    that wants M, or ids past the tokenizer, is overruled (CASES 9)."""
    t = torch.full((40, 40), -20.0)
    t[:, :3] = torch.tensor([0.2, 0.1, 0.0])
    t[:, M], t[:, 30] = 9.0, 8.0
    d = Denoiser(Table(t), M, n_tokens=30)
    out = sampler(d, [[1, 2]], gen_length=8, block_length=8)
    assert out.nfe.tolist() == [8] and (out.generated == 0).all()


# ---------------------------------------------------------------------------------------------
# Every sampler

ROWS = [[4, 8, 15], [16, 23, 7, 2, 9, 1], [3]]


@every_sampler
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(sampler, make, shift):
    """CASES 2: different lengths, holes in one prompt, greedy, fp64: tokens, NFE, positions."""
    d = Denoiser(make(2, dtype=torch.float64), M, shift=shift)
    rows = [ROWS[0], [16, M, 7, 2, M, 1], ROWS[2]]
    out = sampler(d, rows, gen_length=10, block_length=4)
    for i, row in enumerate(rows):
        one = sampler(d, [row], gen_length=10, block_length=4)
        assert torch.equal(out.sequences[i, -10 - len(row):], one.sequences[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
    assert (out.sequences != M).all() and out.generated.shape == (3, 10)


@every_sampler
def test_nfe_is_the_number_of_canvases_forwarded(sampler):
    """CASES 15: counted at the model; never more than there are masks."""
    model = tiny_llama(2)
    rows = []
    model.model.register_forward_pre_hook(lambda *a: rows.append(len(a[2]["input_ids"])),
                                          with_kwargs=True)
    out = sampler(Denoiser(model, M), ROWS, gen_length=9, block_length=4)
    assert sum(rows) == out.nfe.sum() and len(rows) == out.calls and (out.nfe <= 9).all()


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
def test_early_stop_costs_one_block(sampler):
    """CASES 16: an eos in block 1 of 4."""
    t = torch.full((13, 10), -9.0)
    t[torch.arange(13), torch.tensor([0, 2, 8] + [4] * 10)] = 9.0
    d = Denoiser(Table(t), 9, eos_ids=(8,))
    full = sampler(d, [[1]], gen_length=12, block_length=3)
    out = sampler(d, [[1]], gen_length=12, block_length=3, early_stop=True)
    assert out.generated.tolist() == [[2] + [8] * 11] and full.generated[0, 2:].eq(4).all()
    assert out.nfe[0] * 4 <= full.nfe[0] + 4 and out.nfe[0] < full.nfe[0]


@every_sampler
def test_shifted_decoding_with_a_window(sampler):
    """CASES 19: position p of the table says "token p+1"; shifted decoding gives the position."""
    t = torch.full((24, 40), -9.0)
    t[torch.arange(24), torch.arange(24) + 1] = torch.linspace(1, 5, 24)
    d = Denoiser(Table(t), M, shift=True)
    out = sampler(d, [[0], [0, 1, 2]], gen_length=12, block_length=4)
    assert out.generated.tolist() == [list(range(1, 13)), list(range(3, 15))]


# ---------------------------------------------------------------------------------------------
# Caches

def two_at_a_time(ids, position_ids):
    """Sure of the first two masks it sees, of nothing else."""
    sure = (ids == M) & ((ids == M).cumsum(1) <= 2)
    logits = torch.zeros(*ids.shape, 40)
    logits[..., 5] = torch.where(sure, 20.0, .1)
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


def test_delayed_caching_recomputes_masks_and_fresh_tokens():
    """G 6, one token per step, prompt 4: two full forwards of 10, then the masks at the input of
    the step before: 5, 4, 3, 2."""
    out = sample_dkv(Denoiser(tiny_llama(2), M), random_ids(1, 4), gen_length=6, steps=6)
    assert out.positions.tolist() == [10 + 10 + 5 + 4 + 3 + 2]


@every_cache
def test_one_layer_is_lossless_and_two_are_not(sampler):
    """CASES 18: with one layer keys and values depend on the token alone."""
    equal = {1: 0, 2: 0}
    for layers in equal:
        for seed in range(12):
            d = Denoiser(tiny_llama(layers, seed=seed, dtype=torch.float64), M)
            prompt = random_ids(1, 6, seed=seed)
            knobs = dict(gen_length=16, block_length=8, threshold=.6)
            want = sample_fast_dllm(d, prompt, **knobs).sequences
            equal[layers] += torch.equal(want, sampler(d, prompt, **knobs).sequences)
    assert equal[1] == 12 and equal[2] < 12


def test_refreshing_every_step_is_the_uncached_sampler():
    for make, shift in ((tiny_llama, False), (tiny_qwen2, True)):
        d = Denoiser(make(3, dtype=torch.float64), M, shift=shift)
        knobs = dict(gen_length=12, block_length=6, steps=8)
        assert torch.equal(sample_dkv(d, ROWS, refresh=1, **knobs).sequences,
                           sample_llada(d, ROWS, **knobs).sequences)


def emulate(model, prompt, G, block, window_at):
    """A cached decode the slow way: threshold .5, every stale key and value written out.

    window_at(step, x, before, start, end): (1, L) bool, the columns to recompute; None: all. x and
    before are the inputs of this forward and of the one before.
    """
    x = torch.cat([prompt, torch.full((1, G), M)], 1)
    L, P = x.shape[1], prompt.shape[1]
    for start in range(P, L, block):
        end, step, stale, before = min(start + block, L), 0, None, x
        while (x[:, start:end] == M).any():
            window = window_at(step, x, before, start, end) if step else None
            logits, stale = oracle(model, x, None, torch.arange(L)[None], stale if window is not
                                   None else None, window)
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
    (fast("prefix"), prefix_window), (fast("dual"), dual_window), (dkv(refresh=4), delayed_window)],
    ids=["prefix", "dual", "dkv"])
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
        model, prompt = tiny_llama(1, seed=seed, dtype=torch.float64), random_ids(1, 5, seed=seed)
        want = sample_fast_dllm(Denoiser(model, M), prompt, gen_length=14, block_length=14,
                                threshold=.5).sequences
        assert torch.equal(want, emulate(model, prompt, 14, 14, delayed_window))
        wrong += not torch.equal(want, emulate(model, prompt, 14, 14, undelayed_window))
    assert wrong
