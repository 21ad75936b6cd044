"""WINO, Saber, COVER: the two views of a forward, seeds, outcomes, statistics."""
import itertools
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    HEAD_DIM,
    HEADS,
    M,
    Table,
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
    Denoiser,
    KVCache,
    flip_flops,
    revision_statistics,
    sample_cover,
    sample_fast_dllm,
    sample_saber,
    sample_wino,
)

MODELS = [(tiny_llama, False), (tiny_qwen2, False), (tiny_qwen3, True), (tiny_qwen2, True)]


def lively(make, layers, seed=0, dtype=torch.float32):
    """A tiny model sure enough of itself that thresholds let some tokens through, not all."""
    model = make(layers, seed=seed, dtype=dtype)
    model.lm_head.weight.mul_(2.5)
    return model


REVOCABLE = [sample_wino, sample_saber, sample_cover, partial(sample_cover, cache="prefix"),
             partial(sample_cover, cache="dual"), partial(sample_cover, uncertainty="commit"),
             partial(sample_wino, threshold=.5, threshold_back=.99),
             partial(sample_cover, threshold=.5, tau_replace=.3, tau_remask=1.0)]
revocable = pytest.mark.parametrize("sampler", REVOCABLE)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def some_seeds(rows, *positions):
    seeds = torch.zeros(rows, 12, dtype=torch.bool)
    for row, i in positions:
        seeds[row, i] = True
    return seeds


def dual_view_by_definition(model, ids, seeds, stored, visible, shift):
    """COVER's forward by the oracle, every query with keys and values of its own: everyone sees the
    stored ones of the held columns; the row where a seed is read sees the fresh ones of its own.
    Returns (B, L, V) logits, row i those of position i."""
    position = (visible.cumsum(1) - 1).clamp(min=0)
    late = shift * (position > 0).long()
    fresh = torch.ones(*ids.shape, ids.shape[1], dtype=torch.bool)
    for b, i in seeds.nonzero().tolist():
        fresh[b, :, [i, i - int(late[b, i])]] = False
    for b, i in seeds.nonzero().tolist():
        r = i - int(late[b, i])
        fresh[b, r, [i, r]] = True
    stale = [(stored.k[n].transpose(1, 2), stored.v[n].transpose(1, 2)) for n in stored.k]
    logits, _ = oracle(model, ids.masked_fill(seeds, M), visible, position, stale, fresh)
    return logits.gather(1, (torch.arange(ids.shape[1]) - late)[..., None].expand_as(logits))


def copy_of(kv):
    out = KVCache(kv.probe_layers)
    out.k, out.v = ({i: t.clone() for i, t in d.items()} for d in (kv.k, kv.v))
    return out


# ---------------------------------------------------------------------------------------------
# The dual view

VISIBLE = torch.tensor([[True] * 12, [False] * 3 + [True] * 9])
SEEDS = some_seeds(2, (0, 4), (0, 8), (0, 11), (1, 6))


@pytest.mark.parametrize("make, shift", MODELS)
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_the_dual_view_is_its_definition(make, shift, dtype, atol):
    """Three layers, seeds of different number per row, padding, grouped heads; the canvas has
    changed since the stored forward. In fp64 the rope tables of transformers stay fp32."""
    model, ids = make(3, dtype=dtype), random_ids(2, 12)
    d, kv = Denoiser(model, M, shift=shift), KVCache()
    d(ids, VISIBLE, VISIBLE, kv=kv)
    before, changed = copy_of(kv), ids.clone()
    changed[:, [5, 10]] = (changed[:, [5, 10]] + 3) % M
    got = d(changed, VISIBLE, VISIBLE, kv=kv, seeds=SEEDS)
    want = dual_view_by_definition(model, changed, SEEDS, before, VISIBLE, shift)
    atol = max(atol, 1e-4) if dtype == torch.float64 else atol
    assert torch.allclose(got[:, :M], want[VISIBLE][:, :M], atol=atol)


@pytest.mark.parametrize("make, shift", MODELS)
def test_a_window_changes_nothing_but_what_is_recomputed(make, shift):
    """A windowed dual view over the same stored canvas equals the full one, one layer."""
    model, ids = make(1), random_ids(2, 12)
    d, kv = Denoiser(model, M, shift=shift), KVCache()
    d(ids, VISIBLE, VISIBLE, kv=kv)
    window = VISIBLE.clone()
    window[:, :4] = False
    seeds = SEEDS & torch.tensor([[True], [False]])             # a row without seeds, too
    full = d(ids, window, VISIBLE, kv=copy_of(kv), seeds=seeds)
    part = d(ids, window, VISIBLE, kv=copy_of(kv), seeds=seeds, window=window)
    assert torch.allclose(full, part, atol=1e-5)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_seeds_change_nothing_for_the_others(make, dtype, layers):
    """Bitwise: the stored forward was plain and of this canvas; then tokens become seeds. No seeds
    is a plain forward; and the store keeps what it had."""
    d, ids = Denoiser(make(layers, dtype=dtype), M), random_ids(2, 12)
    kv = KVCache()
    plain = d(ids, VISIBLE, VISIBLE, kv=kv)
    before = copy_of(kv)
    assert torch.equal(plain, d(ids, VISIBLE, VISIBLE))
    assert torch.equal(plain, d(ids, VISIBLE, VISIBLE, kv=copy_of(kv), seeds=SEEDS & False))
    got = d(ids, VISIBLE, VISIBLE, kv=kv, seeds=SEEDS)
    others = ~SEEDS[VISIBLE]
    assert torch.equal(got[others], plain[others]) and not torch.equal(got, plain)
    for name in "kv":
        a, b = getattr(kv, name), getattr(before, name)
        assert all(torch.equal(a[i], b[i]) for i in a)


@pytest.mark.parametrize("make, shift", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_seed_does_not_see_itself(make, shift, dtype):
    """CASES 25: in one layer neither a seed's token nor its stored keys and values, however large,
    change a bit of the row where it is read; that row equals a true leave-one-out. From two layers
    on it leaks through the others."""
    for layers in (1, 2):
        d, ids = Denoiser(make(layers, dtype=dtype), M, shift=shift), random_ids(2, 12)
        seeds = some_seeds(2, (0, 4), (1, 6))
        kv = KVCache()
        d(ids, VISIBLE, VISIBLE, kv=kv)
        a = d(ids, seeds, VISIBLE, kv=copy_of(kv), seeds=seeds)
        changed, loud = ids.masked_scatter(seeds, (ids[seeds] + 5) % M), copy_of(kv)
        for b, i in seeds.nonzero().tolist():
            for layer in loud.k:
                loud.k[layer][b, :, i] *= 40
                loud.v[layer][b, :, i] += 100
        b = d(changed, seeds, VISIBLE, kv=loud, seeds=seeds)
        assert torch.equal(a, b) == (layers == 1)
        if layers == 1:
            alone = d(ids.masked_fill(seeds, M), seeds, VISIBLE)
            assert torch.allclose(a[:, :M].float(), alone[:, :M].float(),
                                  atol=1e-4 if dtype == torch.float32 else .15)


def corrected(q, K, V, i, k_new, v_new, how):
    """One seed's attention output: closed form, or with its own column left out and appended."""
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
    """Subtracting the own column is exact on paper (fp64) and loses its digits in fp32 as the own
    weight nears 1; leaving it out of one softmax never does."""
    g = torch.Generator().manual_seed(0)
    K, V, q, k_new, v_new = (torch.randn(*n, generator=g, dtype=torch.float64)
                             for n in ((32, 16), (32, 16), (16,), (16,), (16,)))
    s = K @ q / 4
    rest = s.index_fill(0, torch.tensor([5]), -torch.inf).logsumexp(0)
    own = rest + torch.log(torch.tensor(weight / (1 - weight), dtype=torch.float64))
    K[5] = q * own * 4 / (q @ q)                # its weight among all is now `weight`
    want = corrected(q, K, V, 5, k_new, v_new, "closed")
    low = [t.float() for t in (q, K, V)], [t.float() for t in (k_new, v_new)]
    off = {how: (corrected(*low[0], 5, *low[1], how) - want).abs().max() for how in ("closed",
                                                                                     "rows")}
    assert off["rows"] < 1e-5
    assert off["closed"] > error / 100 if weight > .99 else off["closed"] < error
    exact = corrected(q, K, V, 5, k_new, v_new, "rows")
    assert torch.allclose(exact, want, atol=1e-7)


# ---------------------------------------------------------------------------------------------
# Seeds

@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
@pytest.mark.parametrize("windowed", [False, True])
def test_probed_attention_is_the_attention(make, windowed):
    """Against maps computed from the stored keys and the oracle's queries, two probe layers."""
    model, ids = make(3), random_ids(2, 12)
    kv, d = KVCache((0, 2)), Denoiser(model, M)
    d(ids, VISIBLE, VISIBLE, kv=kv)
    probe = some_seeds(2, (0, 5), (0, 7), (1, 9))
    window = VISIBLE & (torch.arange(12) > 4)
    d(ids, window, VISIBLE, kv=kv, probe=probe, window=window if windowed else None)
    queries = []
    keep = dlm_spec.sdpa
    try:
        dlm_spec.sdpa = lambda q, *a: (queries.append(q), keep(q, *a))[1]
        d(ids, VISIBLE, VISIBLE, kv=copy_of(kv))
    finally:
        dlm_spec.sdpa = keep
    want = torch.zeros(2, 2, 12)
    for b, m, i in ((0, 0, 5), (0, 1, 7), (1, 0, 9), (1, 1, 9)):
        for layer in (0, 2):
            for h in range(HEADS):
                k = kv.k[layer][b, h * kv.k[layer].shape[1] // HEADS]
                s = k @ queries[layer][b, h, i] / HEAD_DIM ** .5
                want[b, m] += s.masked_fill(~VISIBLE[b], -torch.inf).softmax(0) / HEADS / 2
    assert torch.allclose(kv.attention, want, atol=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_dependence_is_its_slow_definition(shift):
    """d_in: mean over the masks left; d_out: sum over what was drafted; each over its largest."""
    g = torch.Generator().manual_seed(1)
    probe = some_seeds(3, *((0, i) for i in range(3, 12)), *((2, i) for i in range(5, 9)))
    maps = torch.rand(2, 9, 12, generator=g)
    maps[1, 4:] = maps[1, :1]       # a row with fewer tokens repeats its first one
    masks, drafted = some_seeds(3, (0, 9), (0, 11), (2, 8)), some_seeds(3, (0, 5), (0, 6), (2, 7))
    candidates = some_seeds(3, (0, 4), (0, 7), (0, 8), (2, 5), (2, 6))
    d_in, d_out = dlm_spec.dependence(maps, probe, masks, drafted, candidates, shift)
    for row, r in ((0, 0), (2, 1)):
        at = probe[row].nonzero()[:, 0].tolist()
        raw_in, raw_out = torch.zeros(12), torch.zeros(12)
        readers = [m - shift for m in masks[row].nonzero()[:, 0].tolist() if m - shift in at]
        for i in candidates[row].nonzero()[:, 0].tolist():
            raw_in[i] = sum(maps[r, at.index(m), i] for m in readers) / max(len(readers), 1)
            raw_out[i] = sum(maps[r, at.index(i), j] for j in drafted[row].nonzero()[:, 0])
        assert torch.allclose(d_in[row], raw_in / raw_in.max())
        assert torch.allclose(d_out[row], raw_out / raw_out.max())
    assert not d_in[1].any() and not d_out[1].any()             # 0/0 = 0


def test_the_score_prefers_uncertain_wanted_stable_tokens():
    u, zero, one = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
    score = dlm_spec.seed_score
    assert score(u, one, zero) == 2 and score(u, zero, one) == .5 and score(zero, one, zero) == 0


def watch_seeds(monkeypatch):
    """Records of every forward's seeds and canvas."""
    seen, call = [], Denoiser.__call__
    def spy(self, x, ask, attention_mask=None, *, seeds=None, window=None, **kw):
        if ask[0].any():        # else there is no forward
            seen.append(SimpleNamespace(x=x, seeds=seeds, window=window))
        return call(self, x, ask, attention_mask, seeds=seeds, window=window, **kw)
    monkeypatch.setattr(Denoiser, "__call__", spy)
    return seen


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_only_tokens_with_a_valid_entry_become_seeds(make, shift, cache, monkeypatch):
    """A token committed at t is shown at t+1 and a seed at t+2 at the earliest, so that its stored
    keys are of itself; never in two forwards running, at most twice, at most |D|-1, none when the
    block is full; in shifted models never adjacent and never before a mask."""
    seen, total = watch_seeds(monkeypatch), 0
    for seed in range(4):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        seen.clear()
        sample_cover(d, [[1, 2, 3]], gen_length=32, block_length=16, threshold=.6, cache=cache,
                     tau_replace=.4, tau_remask=.9, max_seeds=4, seed_share=.5)
        checks = torch.zeros(35, dtype=torch.long)
        for t, now in enumerate(seen):
            seeds = now.seeds[0]
            total += int(seeds.sum())
            checks += seeds
            if not seeds.any():
                continue
            was = seen[t - 1]
            assert torch.equal(now.x[0][seeds], was.x[0][seeds])
            assert not (seeds & was.seeds[0]).any()
            assert (now.x[0][seeds] != M).all() and not seeds[:3].any() and (now.x == M).any()
            drafted = int(((was.x == M) & (now.x != M)).sum())
            assert seeds.sum() <= min(4, max(drafted - 1, 0))
            if shift:
                assert not (seeds[1:] & seeds[:-1]).any()
                after = torch.roll(now.x[0], -1)
                assert (after[seeds] != M)[: int(seeds[:-1].sum())].all()
                before = torch.roll(now.x[0], 1), torch.roll(was.x[0], 1)
                assert torch.equal(before[0][seeds], before[1][seeds])
        assert checks.max() <= 2
    assert total > 5


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_refresh_in_every_forward_is_no_cache(make, shift, cache):
    for seed in range(3):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        knobs = dict(gen_length=16, block_length=8, threshold=.5, tau_remask=.9, tau_replace=.8)
        want = sample_cover(d, [[1, 2, 3], [4]], **knobs)
        got = sample_cover(d, [[1, 2, 3], [4]], cache=cache, refresh=1, **knobs)
        some = sample_cover(d, [[1, 2, 3], [4]], cache=cache, refresh=2, **knobs)
        assert torch.equal(got.sequences, want.sequences) and torch.equal(got.nfe, want.nfe)
        assert torch.equal(got.positions, want.positions)
        assert int(some.positions.sum()) < int((some.nfe * torch.tensor([19, 17])).sum())


@pytest.mark.parametrize("uncertainty", ["entropy", "commit"])
@pytest.mark.parametrize("cache", [None, "dual"])
def test_closing_checks_the_last_tokens_of_a_block(uncertainty, cache, monkeypatch):
    """With enough of it every generated token is a seed once, two forwards after its commit at the
    earliest; it ends, no forward is spent on a block that has nothing unchecked, and no token of a
    full block is checked twice on the same canvas."""
    seen = watch_seeds(monkeypatch)
    for seed in range(3):
        d = Denoiser(lively(tiny_llama, 3, seed), M)
        for closing in (0, 1, 2, 40):
            seen.clear()
            out = sample_cover(d, [[1, 2, 3]], gen_length=16, block_length=8, threshold=.5,
                               closing=closing, uncertainty=uncertainty, cache=cache,
                               tau_remask=.9, tau_replace=.8)
            full = [now for now in seen if not (now.x == M).any()
                    or (not (now.x[0, 3:11] == M).any() and now.x[0, 11:].eq(M).all()
                    and now.seeds[0, :11].any())]
            assert (out.sequences != M).all()
            assert int(out.nfe) <= 16 + len(out.revisions) + 2 * closing
            assert len(full) <= 2 * closing
            if closing == 0:
                assert not full
            if closing == 40:
                checked = torch.stack([now.seeds[0] for now in seen]).any(0)
                assert checked[3:].all() and not checked[:3].any() and full


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_padded_row_that_begins_with_a_mask(cache):
    """In a shifted model the column before it is padding, which is in no window."""
    d, rows = Denoiser(lively(tiny_qwen2, 2), M, shift=True), [[M, 1, 2], [1, 2, 3, 4, 5]]
    knobs = dict(gen_length=8, block_length=12, threshold=.6, cache=cache)
    out = sample_cover(d, rows, **knobs)
    for row, x in zip(rows, out.sequences):
        assert torch.equal(x[-8 - len(row):], sample_cover(d, [row], **knobs).sequences[0])


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_a_cap_on_commits_and_none_on_re_masks(make, shift):
    """The cap is WINO's, whose first forward commits the same tokens; without a limit a forward may
    re-mask more than it commits, and max_checks alone ends it."""
    knobs = dict(gen_length=40, block_length=40, threshold=0.0)
    beyond = 0
    for seed in range(6):
        d = Denoiser(lively(make, 3, seed), M, shift=shift)
        first = [s(d, [[1, 2, 3]], history=True, **knobs, **k).history[1] for s, k in
                 ((sample_cover, dict(commit_cap=True)), (sample_wino, {}))]
        assert torch.equal(*first) and (first[0] != M).sum() == 3 + 20
        for limit in (True, False):
            out = sample_cover(d, [[1, 2, 3]], commit_cap=True, remask_limit=limit, tau_replace=1.0,
                               tau_remask=1.0, max_seeds=30, seed_share=1.0, max_checks=3,
                               history=True, **knobs)
            assert (out.sequences != M).all() and int(out.nfe) <= 40 + len(out.revisions)
            assert all(n <= 3 for n in Counter(r.position for r in out.revisions).values())
            back = Counter(r.forward for r in out.revisions)
            for t, (before, after) in enumerate(itertools.pairwise(out.history), 1):
                commits = int(((before == M) & (after != M)).sum())
                assert not limit or back[t] < max(commits, 1)
                beyond += back[t] >= commits
    assert beyond


def test_a_full_block_is_not_checked_twice_when_nothing_changes(monkeypatch):
    seen, forwards = watch_seeds(monkeypatch), []
    for seed in range(3):
        d = Denoiser(lively(tiny_llama, 3, seed), M)
        for tau_remask, tau_replace in ((0, 1), (.9, .8)):
            seen.clear()
            sample_cover(d, [[1, 2, 3]], gen_length=16, block_length=16, threshold=.5, closing=40,
                         max_checks=9, tau_remask=tau_remask, tau_replace=tau_replace)
            done = torch.zeros(1, 19, dtype=torch.bool)
            for last, now in itertools.pairwise(seen):
                done = (done | last.seeds) & torch.equal(now.x, last.x)
                assert not (done & now.seeds).any()
            forwards.append(sum(not (now.x == M).any() for now in seen))
    assert max(forwards[::2]) <= 3      # nothing changes: stored, the rest checked


def test_two_closing_forwards_check_what_is_left(monkeypatch):
    """All candidates at once, whatever max_seeds is: the first has those of earlier forwards, the
    second those of the last one."""
    seen = watch_seeds(monkeypatch)
    for closing in (1, 2):
        seen.clear()
        sample_cover(Denoiser(lively(tiny_llama, 3), M), [[1, 2, 3]], gen_length=12,
                     block_length=12, threshold=.5, closing=closing, max_seeds=1, max_checks=1,
                     tau_remask=0.0, tau_replace=1.0)
        checked = torch.stack([now.seeds[0, 3:] for now in seen]).any(0)
        assert checked.any() and checked.all() == (closing == 2)


def test_outcomes_keep_replace_remask():
    """Four seeds: predicted again; another at .95; another at .6 and itself at .1; another at .6
    and itself at .3. And the cap keeps the unlikeliest."""
    d = Denoiser(Table(torch.zeros(12, 40)), M)
    p = torch.full((4, 40), 1e-9)
    p[0, 5], p[0, 6] = .3, .25
    p[1, 7], p[1, 5] = .95, .05
    p[2, 7], p[2, 6], p[2, 5] = .6, .3, .1
    p[3, 7], p[3, 6], p[3, 5] = .6, .25, .15
    x, seeds = torch.full((1, 12), 5), some_seeds(1, (0, 1), (0, 2), (0, 3), (0, 4))
    for most, remasked in ((3, [3, 4]), (1, [3]), (0, []), (-1, [])):
        replace, remask, wait, better, sure = dlm_spec.judge_seeds(
            d, x, seeds, p.log(), {}, tau_replace=.9, tau_remask=.2, spacing=4,
            most=torch.tensor([most]))
        assert sure[0, 2] == pytest.approx(.95, abs=1e-4)
        assert replace[0].nonzero()[:, 0].tolist() == [2] and better[0, 2] == 7
        assert remask[0].nonzero()[:, 0].tolist() == remasked and not wait.any()
    _, remask, *_ = dlm_spec.judge_seeds(d, x, seeds, p.log(), {}, tau_replace=.9, tau_remask=.12,
                                         spacing=0, most=torch.tensor([3]))
    assert remask[0].nonzero()[:, 0].tolist() == [3]


def test_of_close_replacements_the_surest_is_made_and_the_others_wait():
    d, p = Denoiser(Table(torch.zeros(12, 40)), M), torch.full((4, 40), 1e-9)
    for seed, sure in enumerate((.95, .99, .96, .97)):          # at 1, 2, 4 and 9
        p[seed, 7], p[seed, 5] = sure, 1 - sure
    x, seeds = torch.full((1, 12), 5), some_seeds(1, (0, 1), (0, 2), (0, 4), (0, 9))
    for spacing, made in ((0, [1, 2, 4, 9]), (1, [2, 4, 9]), (2, [2, 9]), (4, [2, 9]), (7, [2])):
        replace, remask, wait, *_ = dlm_spec.judge_seeds(
            d, x, seeds, p.log(), {}, tau_replace=.9, tau_remask=1., spacing=spacing,
            most=torch.tensor([9]))
        assert replace[0].nonzero()[:, 0].tolist() == made and not remask.any()
        assert torch.equal(replace | wait, seeds) and not (replace & wait).any()


def test_apart_is_its_slow_definition():
    g = torch.Generator().manual_seed(0)
    for spacing in range(5):
        score = torch.randint(0, 4, (20, 15), generator=g) / 2.0        # with ties
        candidates = torch.rand(20, 15, generator=g) < .7
        got = dlm_spec.apart(score, candidates, spacing)
        for b in range(20):
            for i in range(15):
                near = [j for j in range(15) if candidates[b, j] and abs(i - j) <= spacing]
                best = max(near, key=lambda j: (score[b, j], -j), default=-1)
                assert got[b, i] == (candidates[b, i] & (best == i))


# ---------------------------------------------------------------------------------------------
# The samplers

ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]


@revocable
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(sampler, make, shift):
    """CASES 2: fp64, greedy; tokens, NFE, positions, revisions; given tokens never change."""
    d = Denoiser(lively(make, 2, dtype=torch.float64), M, shift=shift)
    out = sampler(d, ROWS, gen_length=12, block_length=6)
    for i, row in enumerate(ROWS):
        one = sampler(d, [row], gen_length=12, block_length=6)
        assert torch.equal(out.sequences[i, -12 - len(row):], one.sequences[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
        pad = out.prompt_length - len(row)
        assert [(r.forward, r.position - pad, *r[3:]) for r in out.revisions if r.row == i] == [
            tuple(r[1:]) for r in one.revisions]
        given = torch.tensor(row)
        assert torch.equal(one.sequences[0, :len(row)][given != M], given[given != M])
    assert (out.sequences != M).all()


@revocable
def test_nfe_is_counted_and_bounded(sampler):
    """CASES 15: never more forwards than masks and revisions."""
    for seed in range(4):
        model, rows = lively(tiny_llama, 2, seed), []
        model.model.register_forward_pre_hook(lambda *a, rows=rows: rows.append(
            len(a[2]["input_ids"])), with_kwargs=True)
        out = sampler(Denoiser(model, M), ROWS, gen_length=16, block_length=8)
        assert sum(rows) == out.nfe.sum() and len(rows) == out.calls
        assert (out.nfe <= 18).all() and (out.sequences != M).all()


@revocable
def test_a_model_that_is_never_sure_still_ends(sampler):
    """CASES 7, 9: all confidences about .3, the model wants M or padded rows."""
    t = torch.full((40, 40), -20.0)
    t[:, :3] = torch.tensor([0.2, 0.1, 0.0])
    t[:, M], t[:, 30] = 9.0, 8.0
    out = sampler(Denoiser(Table(t), M, n_tokens=30), [[1, 2]], gen_length=8, block_length=8)
    assert int(out.nfe) <= 8 and (out.generated == 0).all()


@revocable
def test_infilling_short_blocks_and_early_stop(sampler):
    """CASES 12, 14, 16."""
    d = Denoiser(tiny_llama(2), M, eos_ids=(4,))
    assert sampler(d, [[1, 2, 3]], gen_length=6, block_length=4).sequences.shape == (1, 9)
    out = sampler(d, torch.tensor([[5, M, 7, M]]), gen_length=0, block_length=4)
    assert out.sequences[0, ::2].tolist() == [5, 7] and (out.sequences != M).all()
    t = torch.full((13, 10), -9.0)
    t[torch.arange(13), torch.tensor([0, 2, 8] + [4] * 10)] = 9.0
    out = sampler(Denoiser(Table(t), 9, eos_ids=(8,)), [[1]], gen_length=12, block_length=3,
                  early_stop=True)
    assert out.generated.tolist() == [[2] + [8] * 11] and int(out.nfe) <= 3


@revocable
def test_shifted_decoding(sampler):
    """CASES 19: position p of the table says "token p+1"."""
    t = torch.full((24, 40), -9.0)
    t[torch.arange(24), torch.arange(24) + 1] = torch.linspace(1, 5, 24)
    out = sampler(Denoiser(Table(t), M, shift=True), [[7, 7]], gen_length=12, block_length=4)
    assert out.generated[0].tolist() == list(range(2, 14))


def test_cover_without_seeds_is_threshold_decoding():
    for cache in (None, "prefix", "dual"):
        d = Denoiser(tiny_llama(2, dtype=torch.float64), M)
        knobs = dict(gen_length=16, block_length=8, threshold=.3, cache=cache)
        out, want = sample_cover(d, ROWS, max_seeds=0, **knobs), sample_fast_dllm(d, ROWS, **knobs)
        assert torch.equal(out.sequences, want.sequences) and torch.equal(out.nfe, want.nfe)
        assert torch.equal(out.positions, want.positions) and not out.revisions


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 5), st.integers(0, 3),
       st.sampled_from([None, "prefix", "dual"]), st.booleans(), st.integers(0, 99))
def test_cover_ends_for_every_threshold(threshold, replace, remask, seeds, checks, cache, shift,
                                        seed):
    """Every forward leaves fewer masks, whatever the knobs."""
    d = Denoiser(tiny_llama(1, seed=seed), M, shift=shift)
    out = sample_cover(d, [[1, M, 3], [4, 5]], gen_length=10, block_length=5, threshold=threshold,
                       tau_replace=replace, tau_remask=remask, max_seeds=seeds, max_checks=checks,
                       seed_share=1.0, cache=cache)
    assert (out.nfe <= 11).all() and (out.sequences != M).all()
    assert out.sequences[0, [0, 2]].tolist() == [1, 3]


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_wino_and_saber_end_for_every_threshold(threshold, back, n, seed):
    d = Denoiser(tiny_llama(1, seed=seed), M)
    for out in (sample_wino(d, ROWS, gen_length=10, block_length=5, threshold=threshold,
                            threshold_back=back),
                sample_saber(d, ROWS, gen_length=10, block_length=5, n=n)):
        assert (out.nfe <= 12).all() and (out.sequences != M).all()


def slow_wino(d, prompt, G, tau1, tau2):
    """WINO for one row and one block, loops over positions."""
    P, x = len(prompt), torch.tensor([prompt + [M] * G])
    block = torch.arange(P + G)[None] >= P
    last, events, steps = 30, [], 0
    earlier = set()
    while (x == M).any():
        masks = [i for i in range(P, P + G) if x[0, i] == M]
        logits, shadow = d.leave_one_out(x, block, block)
        p, back = logits.softmax(-1), shadow.softmax(-1)
        c = {i: p[i - P].max().item() for i in masks}
        order = sorted(masks, key=lambda i: (-c[i], i))
        cap = min(max(int(len(masks) * .7), 5), 20)
        commit = [i for i in order if c[i] > tau1][:cap] or order[:1]
        bad = sorted((back[i - P, x[0, i]].item(), i) for i in earlier
                     if back[i - P, x[0, i]] < tau2)[:last - 1] if len(commit) > 1 else []
        for i in commit:
            x[0, i] = p[i - P].argmax()
        for _, i in bad:
            events.append((i, int(x[0, i])))
            x[0, i] = M
        earlier = (earlier | set(commit)) - {i for _, i in bad}
        last, steps = len(commit), steps + 1
    return x, steps, events


def test_wino_is_its_slow_form():
    total = 0
    for seed in range(6):
        d = Denoiser(tiny_llama(2, seed=seed, dtype=torch.float64), M)
        for tau1, tau2 in ((.2, .9), (.05, .5)):
            out = sample_wino(d, [[1, 2, 3]], gen_length=14, block_length=14, threshold=tau1,
                              threshold_back=tau2)
            x, steps, events = slow_wino(d, [1, 2, 3], 14, tau1, tau2)
            assert torch.equal(out.sequences, x) and int(out.nfe) == steps
            assert sorted((r.position, r.old) for r in out.revisions) == sorted(events)
            total += len(events)
    assert total > 5


def test_revocation_reaches_committed_tokens():
    """CASES 26: position 1 is committed as 3; once 5 is shown the model gives 3 there less than .1
    and wants 4. Every sampler that looks again takes 3 back and nothing of the sure rest."""
    def model(ids, position_ids):
        seen = (ids == 5).any(1)[:, None]
        want = torch.where(position_ids == 1, torch.where(seen, 4, 3),
                           torch.where(position_ids == 2, 5, 7))
        # first 1, 2 and 3 at once, then two at a time, so that there is time and leave to revoke
        step = (ids != M).sum(1, keepdim=True)
        sure = torch.where(position_ids <= step + 2, 9.0, 1.0).where(position_ids != 1, 6.5)
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], sure[..., None])
    d = Denoiser(Table(model), M)
    for sampler, knobs in ((sample_wino, {}), (sample_cover, dict(max_seeds=1))):
        out = sampler(d, [[1]], gen_length=16, block_length=16, threshold=.65, **knobs)
        assert [(r.position, r.old, r.new) for r in out.revisions] == [(1, 3, 4)], sampler
        assert out.generated[0].tolist() == [4, 5] + [7] * 14


# ---------------------------------------------------------------------------------------------
# Statistics

def output(*revisions, row=0):
    events = [dlm_spec.Revision(row, t, i, old, kind, new) for t, i, old, kind, new in revisions]
    return SimpleNamespace(revisions=events, commit_step=torch.ones(1, 10, dtype=torch.long),
                           sequences=torch.zeros(1, 10), prompt_length=0)


def test_flip_flops_are_counted_by_what_comes_back():
    out = output((2, 1, 5, "remask", 5), (2, 2, 5, "remask", 6),        # A A; A B
                 (3, 3, 5, "replace", 6), (5, 3, 6, "remask", 5),       # A B A: both
                 (3, 4, 5, "replace", 6), (5, 4, 6, "replace", 7))      # A B C: neither
    assert flip_flops(out) == [True, False, True, True, False, False]
    stats = revision_statistics(out, torch.tensor([[0, 5, 6, 5, 7, 0, 0, 0, 0, 0]]))
    assert (stats["events"], stats["remasks"], stats["replaces"], stats["commits"]) == (6, 3, 3, 16)
    assert stats["effective_share"] == .5 and stats["wasted_share"] == 1 / 16
    assert stats["effective_share_remask"] == pytest.approx(1 / 3)
    assert (stats["became_right"], stats["became_wrong"]) == (3, 1)
    assert revision_statistics(output())["effective_share"] is None
    with pytest.raises(ValueError, match="reference has shape"):
        revision_statistics(out, torch.zeros(2, 10))


@revocable
def test_the_revisions_retell_the_history(sampler):
    """Every change of a shown token is a revision, with the token that came next."""
    d = Denoiser(lively(tiny_llama, 3, seed=3), M)
    out = sampler(d, [[1, 2, 3], [4, 5]], gen_length=32, block_length=32, history=True)
    for (row, i), events in {(r.row, r.position): [e for e in out.revisions if
                             (e.row, e.position) == (r.row, r.position)]
                             for r in out.revisions}.items():
        assert all(a.new == b.old for a, b in itertools.pairwise(events))
        assert events[-1].new == out.sequences[row, i]
    changed = sum(int(((a != M) & (a != b)).sum()) for a, b in zip(out.history, out.history[1:]))
    inside = sum(r.kind == "remask" and int(out.history[r.forward - 1][r.row, r.position]) == M
                 for r in out.revisions) if (out.nfe == out.calls).all() else None
    if inside is not None:      # Saber takes back what it committed in the same forward, too
        assert changed == len(out.revisions) - inside


def test_wino_commits_at_most_twenty():
    """70 % of 40 masks are 28; the cap is 20, then 70 % of 20, then 5 at least."""
    out = sample_wino(Denoiser(Table(torch.zeros(60, 40)), M), [[1]], gen_length=40,
                      block_length=40, threshold=0.0, threshold_back=0.0)
    assert torch.bincount(out.commit_step[0])[1:].tolist() == [20, 14, 5, 1]


def test_fewer_are_checked_and_remasked_than_committed(monkeypatch):
    """Per row and forward there are fewer seeds than commits in the forward before; the cap on
    re-masks is one fewer than the forward's own commits."""
    caps, seeds, commits, judge = [], [], [], dlm_spec.judge_seeds
    def spy(d, x, checked, *args, most, **knobs):
        caps.append(most.tolist())
        seeds.append(checked.sum(1).tolist())
        return judge(d, x, checked, *args, most=most, **knobs)
    monkeypatch.setattr(dlm_spec, "judge_seeds", spy)
    sample_cover(Denoiser(lively(tiny_llama, 3), M), [[1, 2], [3]], gen_length=32, block_length=16,
                 threshold=.6, tau_replace=1.0, seed_share=1.0, max_seeds=16,
                 callback=lambda s: commits.append(s["committed"].sum(1).tolist()))
    assert caps == [[n - 1 for n in row] for row in commits] and max(map(max, caps)) > 0
    pairs = [(n, cap) for row, then in zip(caps, seeds[1:]) for cap, n in zip(row, then)]
    assert all(n <= max(cap, 0) for n, cap in pairs) and any(n == cap > 0 for n, cap in pairs)


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_saber_takes_back_half_of_n_or_an_eighth_of_the_commits(n):
    """max(n // 2, ceil(D / 8)) but fewer than D, until the block is full."""
    seen = set()
    for seed in range(4):
        d = Denoiser(lively(tiny_llama, 3, seed), M)
        out = sample_saber(d, [[1, 2, 3]], gen_length=40, block_length=40, n=n, history=True)
        back = Counter(r.forward for r in out.revisions)
        for t, (before, after) in enumerate(itertools.pairwise(out.history), 1):
            kept = ((before == M) & (after != M)).sum()
            own = {r.position for r in out.revisions if r.forward == t
                   and before[0, r.position] == M}
            D, full = int(kept) + len(own), not (after == M).any()
            want = 0 if full else min(max(n // 2, -(-max(D, n) // 8)), D - 1)
            assert back[t] == want, (t, D)
            seen.add(want)
    assert len(seen) > 1 or n == 1
