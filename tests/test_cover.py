"""Section 8, COVER: the two views of one forward against their definition, which tokens become
seeds, what is done with them; and what revisions were worth."""
import copy
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import (
    HEAD_DIM,
    HEADS,
    M,
    Table,
    lively,
    oracle,
    random_ids,
    tiny_llama,
    tiny_qwen2,
    tiny_qwen3,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_spec
from dlm_spec import (
    Decode,
    Denoiser,
    DualView,
    KVCache,
    columns_of,
    judge_seeds,
    sample_cover,
    sample_fast_dllm,
    sample_wino,
    windowed,
)

MODELS = [(tiny_llama, False), (tiny_qwen2, False), (tiny_qwen3, True), (tiny_qwen2, True)]
every_model = pytest.mark.parametrize("make, shift", MODELS)
plain_and_shifted = pytest.mark.parametrize("make, shift", [(tiny_llama, False),
                                                            (tiny_qwen2, True)])
ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def some_seeds(rows, *positions, L=12):
    seeds = torch.zeros(rows, L, dtype=torch.bool)
    for row, i in positions:
        seeds[row, i] = True
    return seeds


VISIBLE = torch.tensor([[True] * 12, [False] * 3 + [True] * 9])
SEEDS = some_seeds(2, (0, 4), (0, 8), (0, 11), (1, 6))


def stored(d, ids, visible=VISIBLE):
    """A cache filled by a plain forward of this canvas, and the logits of that forward."""
    kv = KVCache(ids)
    return kv, windowed(d, ids, visible, visible, kv=kv)[0]


def dual(d, ids, ask, kv, seeds, visible=VISIBLE, **how):
    """A forward with seeds: the logits of `ask`."""
    view = DualView(d, ids, visible, kv, seeds)
    return windowed(d, ids, ask, visible, kv=view, **how)[0]


# -------------------------------------------------------------------------------------------
# The dual view

def dual_view_by_definition(model, ids, seeds, kv, visible, shift):
    """COVER's forward by the oracle, every query with keys and values of its own: everyone
    sees the stored ones of the held columns; the row where a seed is read sees the fresh ones
    of its own. Returns (B, L, V) logits, row i those of position i."""
    position = (visible.cumsum(1) - 1).clamp(min=0)
    late = shift * (position > 0).long()
    fresh = torch.ones(*ids.shape, ids.shape[1], dtype=torch.bool)
    for b, i in seeds.nonzero().tolist():
        fresh[b, :, [i, i - int(late[b, i])]] = False
    for b, i in seeds.nonzero().tolist():
        r = i - int(late[b, i])
        fresh[b, r, [i, r]] = True
    stale = [(kv.k[n].transpose(1, 2), kv.v[n].transpose(1, 2)) for n in kv.k]
    logits, _ = oracle(model, ids.masked_fill(seeds, M), visible, position, stale, fresh)
    return logits.gather(1, (torch.arange(ids.shape[1]) - late)[..., None].expand_as(logits))


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_dual_view_is_its_definition(make, shift, dtype):
    """Three layers, seeds of different number per row, padding, grouped heads; the canvas has
    changed since the stored forward. (In fp64, too, transformers' rope tables are fp32.)"""
    d, ids = Denoiser(make(3, dtype=dtype), M, shift=shift), random_ids(2, 12)
    kv, _ = stored(d, ids)
    before, changed = copy.deepcopy(kv), ids.clone()
    changed[:, [5, 10]] = (changed[:, [5, 10]] + 3) % M
    got = dual(d, changed, VISIBLE, kv, SEEDS)
    want = dual_view_by_definition(d.model, changed, SEEDS, before, VISIBLE, shift)
    assert torch.allclose(got[:, :M], want[VISIBLE][:, :M], atol=1e-4)


@every_model
def test_a_window_changes_nothing_but_what_is_recomputed(make, shift):
    """A windowed dual view over the same stored canvas equals the full one, one layer."""
    d, ids = Denoiser(make(1), M, shift=shift), random_ids(2, 12)
    kv, _ = stored(d, ids)
    window = VISIBLE & (torch.arange(12) > 3)
    seeds = SEEDS & torch.tensor([[True], [False]])             # a row without seeds, too
    full = dual(d, ids, window, copy.deepcopy(kv), seeds)
    part = dual(d, ids, window, copy.deepcopy(kv), seeds, window=window)
    assert torch.allclose(full, part, atol=1e-5)


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, False),
                                         (tiny_qwen2, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_seeds_change_nothing_for_the_others(make, shift, dtype, layers):
    """Bitwise: the stored forward was plain and of this canvas; then tokens become seeds. No
    seeds is a plain forward; and the cache keeps what it had."""
    d, ids = Denoiser(make(layers, dtype=dtype), M, shift=shift), random_ids(2, 12)
    kv, plain = stored(d, ids)
    before = copy.deepcopy(kv)
    assert torch.equal(plain, d(ids, VISIBLE, VISIBLE))
    assert torch.equal(plain, dual(d, ids, VISIBLE, copy.deepcopy(kv), SEEDS & False))
    got = dual(d, ids, VISIBLE, kv, SEEDS)
    # a shifted model reads i+1 where i is the input, which is M while i is a seed
    behind_a_seed = SEEDS.roll(1, 1) & torch.tensor(shift)
    others = ~(SEEDS | behind_a_seed)[VISIBLE]
    assert torch.equal(got[others], plain[others]) and not torch.equal(got, plain)
    assert torch.equal(kv.shown, before.shown)
    for i in kv.k:
        at = VISIBLE[:, None, :, None].expand_as(kv.k[i])
        assert torch.equal(kv.k[i][at], before.k[i][at])
        assert torch.equal(kv.v[i][at], before.v[i][at])


def test_a_hole_at_the_start_is_not_disturbed_by_a_seed_behind_it():
    """In a shifted model a row's first token is read at itself, where the second one is read
    as well: while the first is a mask, the second cannot be a seed."""
    d, ids = Denoiser(tiny_qwen2(2), M, shift=True), random_ids(2, 12)
    ids[0, 0] = ids[1, 3] = M
    masks, run = VISIBLE & (ids == M), Decode(d, ids, attention_mask=VISIBLE, gen_length=0)
    kv, plain = stored(d, ids)
    seeds = dlm_spec.eligible(run, kv, some_seeds(2, (0, 1), (1, 4)), masks)
    assert torch.equal(dual(d, ids, masks, kv, seeds), plain[masks[VISIBLE]])


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_seed_does_not_see_itself(make, shift, dtype):
    """CASES 25: in one layer neither a seed's token nor its stored keys and values, however
    large, change a bit of the row where it is read; that row equals a true leave-one-out. From
    two layers on it leaks through the others."""
    for layers in (1, 2):
        d, ids = Denoiser(make(layers, dtype=dtype), M, shift=shift), random_ids(2, 12)
        seeds = some_seeds(2, (0, 4), (1, 6))
        kv, _ = stored(d, ids)
        here = dual(d, ids, seeds, copy.deepcopy(kv), seeds)
        changed, loud = ids.masked_scatter(seeds, (ids[seeds] + 5) % M), copy.deepcopy(kv)
        for b, i in seeds.nonzero().tolist():
            for layer in loud.k:
                loud.k[layer][b, :, i] *= 40
                loud.v[layer][b, :, i] += 100
        there = dual(d, changed, seeds, loud, seeds)
        assert torch.equal(here, there) == (layers == 1)
        if layers == 1:
            alone = d(ids.masked_fill(seeds, M), seeds, VISIBLE)
            assert torch.allclose(here[:, :M].float(), alone[:, :M].float(),
                                  atol=1e-4 if dtype == torch.float32 else .15)


@every_model
def test_a_seed_in_the_first_column_of_a_short_window(make, shift):
    """Short windows of a batch are padded by repeating their first column; a seed that is read
    there has the logits that the row has alone."""
    d, ids = Denoiser(make(3, dtype=torch.float64), M, shift=shift), random_ids(2, 12)
    window = some_seeds(2, *((0, i) for i in range(2, 12)), *((1, i) for i in range(8, 12)))
    seeds = some_seeds(2, (1, 8), (0, 5))
    kv, _ = stored(d, ids)
    both = dual(d, ids, seeds, copy.deepcopy(kv), seeds, window=window)
    kv, _ = stored(d, ids[1:], VISIBLE[1:])
    alone = dual(d, ids[1:], seeds[1:], kv, seeds[1:], visible=VISIBLE[1:], window=window[1:])
    assert torch.allclose(both[1, :M], alone[0, :M], atol=1e-9)


def corrected(q, K, V, i, k_new, v_new, how):
    """One seed's attention output: by the closed form, or with its own column left out and
    the fresh one appended."""
    s = K @ q / len(q) ** .5
    new = k_new @ q / len(q) ** .5
    if how == "closed":         # o' = (o - a v + r v_new) / (1 - a + r)
        p, Z = s.softmax(0), s.logsumexp(0)
        a, r = p[i], (new - Z).exp()
        return (p @ V - a * V[i] + r * v_new) / (1 - a + r)
    s = torch.cat([s.index_fill(0, torch.tensor([i]), -torch.inf), new[None]])
    return s.softmax(0) @ torch.cat([V, v_new[None]])


@pytest.mark.parametrize("weight, error", [(.9, 1e-5), (.99999, 1e-3), (.9999999, 1e-1)])
def test_the_closed_form_breaks_where_the_seed_row_does_not(weight, error):
    """Subtracting the own column is exact on paper (fp64) and loses its digits in fp32 as the
    own weight nears 1; leaving it out of one softmax never does."""
    g = torch.Generator().manual_seed(0)
    K, V, q, k_new, v_new = (torch.randn(*n, generator=g, dtype=torch.float64)
                             for n in ((32, 16), (32, 16), (16,), (16,), (16,)))
    s = K @ q / 4
    rest = s.index_fill(0, torch.tensor([5]), -torch.inf).logsumexp(0)
    own = rest + torch.log(torch.tensor(weight / (1 - weight), dtype=torch.float64))
    K[5] = q * own * 4 / (q @ q)                # its weight among all is now `weight`
    want = corrected(q, K, V, 5, k_new, v_new, "closed")
    single = [t.float() for t in (q, K, V)], [t.float() for t in (k_new, v_new)]
    off = {how: (corrected(*single[0], 5, *single[1], how) - want).abs().max()
           for how in ("closed", "rows")}
    assert off["rows"] < 1e-5
    assert off["closed"] > error / 100 if weight > .99 else off["closed"] < error
    exact = corrected(q, K, V, 5, k_new, v_new, "rows")
    assert torch.allclose(exact, want, atol=1e-7)


# -------------------------------------------------------------------------------------------
# Which tokens become seeds

@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("in_window", [False, True])
def test_probed_attention_is_the_attention(make, in_window, monkeypatch):
    """Against maps computed from the stored keys and the queries, in the middle and the last
    of three layers."""
    d, ids = Denoiser(make(3), M), random_ids(2, 12)
    kv, _ = stored(d, ids)
    probe, window = some_seeds(2, (0, 5), (0, 7), (1, 9)), VISIBLE & (torch.arange(12) > 4)
    view = DualView(d, ids, VISIBLE, kv, SEEDS & False, columns_of(probe))
    windowed(d, ids, window, VISIBLE, kv=view, window=window if in_window else None)
    queries, sdpa = [], dlm_spec.sdpa
    monkeypatch.setattr(dlm_spec, "sdpa", lambda q, *a: (queries.append(q), sdpa(q, *a))[1])
    windowed(d, ids, VISIBLE, VISIBLE, kv=copy.deepcopy(kv))
    want = torch.zeros(2, 2, 12)
    for b, m, i in ((0, 0, 5), (0, 1, 7), (1, 0, 9), (1, 1, 9)):
        for layer in (1, 2):
            for h in range(HEADS):
                k = kv.k[layer][b, h * kv.k[layer].shape[1] // HEADS]
                s = k @ queries[layer][b, h, i] / HEAD_DIM ** .5
                want[b, m] += s.masked_fill(~VISIBLE[b], -torch.inf).softmax(0) / HEADS / 2
    assert torch.allclose(view.attention, want, atol=1e-5)
    assert view.rows.tolist() == [0, 1]


@pytest.mark.parametrize("shift", [False, True])
def test_dependence_is_its_slow_definition(shift):
    """d_in: mean over the masks left; d_out: sum over what was drafted; each divided by its
    largest."""
    g = torch.Generator().manual_seed(1)
    probe = some_seeds(3, *((0, i) for i in range(3, 12)), *((2, i) for i in range(5, 9)))
    maps = torch.rand(2, 9, 12, generator=g)
    maps[1, 4:] = maps[1, :1]       # a row with fewer tokens repeats its first one
    masks = some_seeds(3, (0, 9), (0, 11), (2, 8))
    drafted = some_seeds(3, (0, 5), (0, 6), (2, 7))
    candidates = some_seeds(3, (0, 4), (0, 7), (0, 8), (2, 5), (2, 6))
    d = Denoiser(Table(torch.zeros(12, 40)), M, shift=shift)
    view = SimpleNamespace(attention=maps, rows=torch.tensor([0, 2]), probe=columns_of(probe))
    readers = d.read_columns(masks, torch.ones_like(masks))
    d_in, d_out = dlm_spec.dependence(view, readers, drafted, candidates)
    for row, r in ((0, 0), (2, 1)):
        at = probe[row].nonzero()[:, 0].tolist()
        raw_in, raw_out = torch.zeros(12), torch.zeros(12)
        looking = [m - shift for m in masks[row].nonzero()[:, 0].tolist() if m - shift in at]
        for i in candidates[row].nonzero()[:, 0].tolist():
            raw_in[i] = sum(maps[r, at.index(m), i] for m in looking) / max(len(looking), 1)
            raw_out[i] = sum(maps[r, at.index(i), j] for j in drafted[row].nonzero()[:, 0])
        assert torch.allclose(d_in[row], raw_in / raw_in.max())
        assert torch.allclose(d_out[row], raw_out / raw_out.max())
    assert not d_in[1].any() and not d_out[1].any()             # 0/0 = 0


def test_the_score_prefers_uncertain_wanted_stable_tokens():
    zero, one = torch.tensor([0.0]), torch.tensor([1.0])
    score = dlm_spec.seed_score
    assert score(one, one, zero) == 2 and score(one, zero, one) == .5
    assert score(zero, one, zero) == 0


@pytest.mark.parametrize("shift", [False, True])
def test_eligible_is_its_slow_definition(shift):
    """A token whose stored keys and values are of itself; a shifted model reads i at i-1: that
    column's are as well, i+1 is no mask, which would be read where M is the input, and i-1 is
    no seed. (A mask at the start of a row has a test of its own.)"""
    g = torch.Generator().manual_seed(0)
    B, L = 40, 12
    tokens, valid, masks = torch.rand(3, B, L, generator=g) < .7
    masks, x = masks & ~tokens, torch.randint(0, M, (B, L), generator=g)
    masks[:, 0] = False
    x = x.masked_fill(masks, M)
    d, kv = Denoiser(Table(torch.zeros(L, 40)), M, shift=shift), KVCache(x)
    kv.shown = torch.where(valid, x, x - 1)
    got = dlm_spec.eligible(Decode(d, x, gen_length=0), kv, tokens, masks)
    for b, i in itertools.product(range(B), range(L)):      # in order: i-1 is decided before i
        want = tokens[b, i] and valid[b, i]
        if shift:
            want = want and (i == 0 or valid[b, i - 1]) and not masks[b, i + 1:i + 2].any()
            want = want and (i == 0 or not got[b, i - 1])
        assert got[b, i] == want


def watch_seeds(monkeypatch):
    """Records of every forward's seeds, canvas and window, of decodes of one row."""
    seen, form = [], dlm_spec.windowed

    def watch(denoiser, x, ask, mask=None, *, kv=None, window=None, **how):
        seen.append(SimpleNamespace(x=x, seeds=kv.seeds, window=window))
        return form(denoiser, x, ask, mask, kv=kv, window=window, **how)
    monkeypatch.setattr(dlm_spec, "windowed", watch)
    return seen


@plain_and_shifted
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_only_tokens_with_a_valid_entry_become_seeds(make, shift, cache, monkeypatch):
    """A token committed at t is shown at t+1 and a seed at t+2 at the earliest, so that its
    stored keys are of itself; never in two forwards running, at most max_checks times, at most
    max_seeds together, none when the block is full; in shifted models never adjacent and never
    before a mask that is read. Without max_seeds these are all that can be."""
    seen, total = watch_seeds(monkeypatch), 0
    for seed, most in itertools.product(range(3), (2, None)):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        seen.clear()
        sample_cover(d, [[1, 2, 3]], gen_length=32, block_length=16, threshold=.6, cache=cache,
                     tau_replace=.4, tau_remask=.9, max_seeds=most, max_checks=2)
        checks = torch.zeros(35, dtype=torch.long)
        for t, now in enumerate(seen):
            seeds = now.seeds[0]
            total += int(seeds.sum())
            if most is None and t and not shift and (now.x == M).any():
                start = 3 + 16 * bool(now.x[0, 3:19].ne(M).all())   # the block at work
                could = (now.x[0] != M) & (seen[t - 1].x == now.x)[0] & ~seen[t - 1].seeds[0]
                could &= (checks < 2) & (torch.arange(35) >= start)
                first = (seen[t - 1].x[0, start:start + 16] == M).all()
                assert first or torch.equal(seeds[start:start + 16], could[start:start + 16])
            checks += seeds
            if not seeds.any():
                continue
            was = seen[t - 1]
            assert torch.equal(now.x[0][seeds], was.x[0][seeds])
            assert not (seeds & was.seeds[0]).any()
            assert (now.x[0][seeds] != M).all() and not seeds[:3].any() and (now.x == M).any()
            assert seeds.sum() <= (most or 99)
            if shift:
                assert not (seeds[1:] & seeds[:-1]).any()
                after, last = torch.roll(now.x[0], -1), torch.arange(35) % 16 == 2
                assert (after[seeds & ~last] != M).all()    # behind a block's last nothing is read
                before = torch.roll(now.x[0], 1), torch.roll(was.x[0], 1)
                assert torch.equal(before[0][seeds], before[1][seeds])
        assert checks.max() <= 2
    assert total > 5


def test_the_checks_are_counted(monkeypatch):
    """No position is a seed more than max_checks times, with 0 none is, and some are that
    often; a forward has at most max_seeds."""
    seen, d = watch_seeds(monkeypatch), Denoiser(lively(tiny_llama, 3, seed=1), M)
    for checks, most in ((0, 9), (1, 9), (2, 9), (9, 1), (9, 0), (9, 2)):
        seen.clear()
        sample_cover(d, [[1, 2, 3]], gen_length=48, block_length=48, threshold=.7,
                     max_checks=checks, max_seeds=most, tau_replace=.4, tau_remask=.9)
        seeds = torch.cat([now.seeds for now in seen]).long()
        per_position, per_forward = seeds.sum(0).max(), seeds.sum(1).max()
        assert per_position <= checks and per_forward <= most
        if most == 9:
            assert per_position == checks
        else:
            assert per_forward == most


@pytest.mark.parametrize("window", [False, True])
def test_without_the_override_a_forward_is_a_plain_one_of_the_masked_canvas(window):
    d, ids = Denoiser(lively(tiny_llama, 3, dtype=torch.float64), M), random_ids(2, 12)
    seeds = torch.zeros(2, 12, dtype=torch.bool)
    seeds[0, 7], seeds[1, 9] = True, True
    ask = (torch.arange(12) > 5).expand(2, 12)
    kv, masked = KVCache(ids), ids.masked_fill(seeds, M)
    windowed(d, ids, ask, kv=kv)
    how = dict(window=ask) if window else {}
    want = windowed(d, masked, ask, kv=copy.deepcopy(kv), **how)[0]
    view = DualView(d, ids, None, kv, seeds, override=False)
    assert torch.equal(windowed(d, ids, ask, kv=view, **how)[0], want)
    assert (kv.shown == masked).all()


# -------------------------------------------------------------------------------------------
# What is done with them

def judged_run(x, checked, p):
    """A Decode after a forward that checked these tokens: p (C, V) their probabilities."""
    run = Decode(Denoiser(Table(torch.zeros(12, 40)), M), x, gen_length=0)
    run.checked, run.judged, run.tokens = checked, p.log(), run.x
    run.confidence = torch.ones(x.shape)
    return run


def test_outcomes_keep_replace_remask():
    """Four seeds: predicted again; another at .95; another at .6 and itself at .1; another at
    .6 and itself at .15. A token that is looked at without being a seed has an entropy, and
    nothing is done with it."""
    p = torch.full((5, 40), 1e-9)
    p[0, 5], p[0, 6] = .3, .25
    p[1, 7], p[1, 5] = .95, .05
    p[2, 7], p[2, 6], p[2, 5] = .6, .3, .1
    p[3, 7], p[3, 6], p[3, 5] = .6, .25, .15
    p[4, 7], p[4, 6] = .5, .5
    x, seeds = torch.full((1, 12), 5), some_seeds(1, (0, 1), (0, 2), (0, 3), (0, 4))
    checked = seeds | some_seeds(1, (0, 8))
    for tau_remask, remasked in ((.2, [3, 4]), (.12, [3]), (0.0, [])):
        run = judged_run(x, checked, p)
        u, replace, remask = judge_seeds(run, seeds, .9, tau_remask)
        assert run.confidence[0, 2] == pytest.approx(.95, abs=1e-4)
        assert replace[0].nonzero()[:, 0].tolist() == [2] and run.tokens[0, 2] == 7
        assert remask[0].nonzero()[:, 0].tolist() == remasked
        assert run.tokens[0, 8] == 5 and run.confidence[0, 8] == 1
        assert u[0, 8] == pytest.approx(.6931, abs=1e-3)        # log 2
        assert u[0, 2] == pytest.approx(.1985, abs=1e-3)        # -.95 log .95 - .05 log .05


def test_without_tau_replace_not_even_certainty_replaces():
    """In float32 a softmax reaches 1."""
    p = torch.nn.functional.one_hot(torch.tensor([7]), 40).float()
    x, seeds = torch.full((1, 12), 5), some_seeds(1, (0, 1))
    for tau_replace, replaced in ((1.0, True), (None, False)):
        _, replace, remask = judge_seeds(judged_run(x, seeds, p), seeds, tau_replace, .5)
        assert replace[0, 1] == replaced and remask[0, 1] != replaced


def test_a_postponed_end_of_text_replaces_nothing():
    """It is filled last, so it may not come in by a replacement: the seed is re-masked."""
    p = torch.nn.functional.one_hot(torch.tensor([7]), 40).float()
    x, seeds = torch.full((1, 12), 5), some_seeds(1, (0, 1))
    for postpone in (False, True):
        run = judged_run(x, seeds, p)
        run.postpone_eos, run.denoiser.eos_ids = postpone, (7,)
        _, replace, remask = judge_seeds(run, seeds, .9, .5)
        assert replace[0, 1] != postpone and remask[0, 1] == postpone


@pytest.mark.parametrize("knobs", [dict(tau_replace=.6), dict(tau_remask=.7, tau_replace=1.0)])
def test_seeds_are_judged_by_what_may_be_chosen(knobs, monkeypatch):
    """CASES 33: logits 3 at id 0 (end of text, which may not be chosen), 2 at id 1, -9 at M,
    else 0. Id 1 has probability .71 among those that may be chosen, .24 among all, where id 0
    has .66."""
    seen = watch_seeds(monkeypatch)
    table = torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0, -9.0]).expand(40, 6)
    d = Denoiser(Table(table), 5, eos_ids=(0,))
    processor = transformers.generation.SuppressTokensLogitsProcessor([0])
    for ban in (dict(suppress_eos=True), dict(logits_processor=processor)):
        seen.clear()
        out = sample_cover(d, [[3, 3]], gen_length=16, block_length=16, threshold=.9, **knobs,
                           **ban)
        assert out.generated[0].tolist() == [1] * 16 and not out.revisions
        assert torch.cat([now.seeds for now in seen]).any()


# -------------------------------------------------------------------------------------------
# The sampler

def test_cover_without_seeds_is_threshold_decoding():
    for cache in (None, "prefix", "dual"):
        d = Denoiser(tiny_llama(2, dtype=torch.float64), M)
        knobs = dict(gen_length=16, block_length=8, threshold=.3, cache=cache)
        out = sample_cover(d, ROWS, max_seeds=0, commit_cap=False, **knobs)
        want = sample_fast_dllm(d, ROWS, **knobs)
        assert torch.equal(out.sequences, want.sequences) and torch.equal(out.nfe, want.nfe)
        assert torch.equal(out.positions, want.positions) and not out.revisions


@plain_and_shifted
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_refresh_in_every_forward_is_no_cache(make, shift, cache):
    for seed in range(2):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        knobs = dict(gen_length=16, block_length=8, threshold=.5, tau_remask=.9,
                     tau_replace=.8)
        want = sample_cover(d, [[1, 2, 3], [4]], **knobs)
        every = sample_cover(d, [[1, 2, 3], [4]], cache=cache, refresh=1, **knobs)
        other = sample_cover(d, [[1, 2, 3], [4]], cache=cache, refresh=2, **knobs)
        assert torch.equal(every.sequences, want.sequences)
        assert torch.equal(every.nfe, want.nfe)
        assert torch.equal(every.positions, want.positions)
        assert int(other.positions.sum()) < int((other.nfe * torch.tensor([19, 17])).sum())


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_padded_row_that_begins_with_a_mask(cache):
    """In a shifted model the column before it is padding, which is in no window."""
    d, rows = Denoiser(lively(tiny_qwen2, 2), M, shift=True), [[M, 1, 2], [1, 2, 3, 4, 5]]
    knobs = dict(gen_length=8, block_length=12, threshold=.6, cache=cache)
    out = sample_cover(d, rows, **knobs)
    for row, x in zip(rows, out.sequences):
        assert torch.equal(x[-8 - len(row):], sample_cover(d, [row], **knobs).sequences[0])


@plain_and_shifted
def test_a_cap_on_commits_and_no_limit_on_re_masks(make, shift):
    """The cap is WINO's, whose first forward commits the same tokens; a forward may re-mask
    more than it commits, and max_checks alone ends it."""
    knobs = dict(gen_length=40, block_length=40, threshold=0.0)
    beyond = 0
    for seed in range(3):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        first = [s(d, [[1, 2, 3]], history=True, **knobs).history[1]
                 for s in (sample_cover, sample_wino)]
        assert torch.equal(*first) and (first[0] != M).sum() == 3 + 20
        out = sample_cover(d, [[1, 2, 3]], tau_remask=1.0, max_checks=3, history=True, **knobs)
        assert (out.sequences != M).all() and int(out.nfe) <= 40 + len(out.revisions)
        assert all(n <= 3 for n in Counter(r.position for r in out.revisions).values())
        back = Counter(r.forward for r in out.revisions)
        for t, (before, after) in enumerate(itertools.pairwise(out.history), 1):
            beyond += back[t] > int(((before == M) & (after != M)).sum())
    assert beyond


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1),
       st.none() | st.integers(0, 5), st.integers(0, 3),
       st.sampled_from([None, "prefix", "dual"]), st.booleans(), st.integers(0, 99))
def test_cover_ends_for_every_threshold(threshold, replace, remask, seeds, checks, cache,
                                        shift, seed):
    """A forward leaves fewer masks or takes something back, which max_checks bounds."""
    d = Denoiser(tiny_llama(1, seed=seed), M, shift=shift)
    out = sample_cover(d, [[1, M, 3], [4, 5]], gen_length=10, block_length=5, cache=cache,
                       threshold=threshold, tau_replace=replace, tau_remask=remask,
                       max_seeds=seeds, max_checks=checks)
    assert (out.nfe <= 11 + len(out.revisions)).all() and (out.sequences != M).all()
    assert out.sequences[0, [0, 2]].tolist() == [1, 3]
