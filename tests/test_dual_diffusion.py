"""DualDiffusion: the verifiers by hand, the views, the loop against its slow form, termination."""
from functools import partial

import pytest
import torch
from helpers import Table, random_ids, tiny_llama, tiny_qwen2

import dlm_spec
from dlm_spec import (
    Denoiser,
    sample_dual_diffusion,
    sample_fast_dllm,
    verify_confidence,
    verify_kl,
    verify_trust,
)

M = 39


def reject_all(judged, tokens, draft):
    return torch.ones_like(tokens, dtype=torch.bool)


def logits_of(*rows):
    return torch.tensor(rows).log()


# ---------------------------------------------------------------------------------------------
# Verifiers

def test_confidence_has_two_readings():
    """CASES 26: a committed token with p=.1 is revoked, one with p=.9 is not; the largest
    probability is another question than the token's."""
    judged, tokens = logits_of([.9, .1], [.9, .1], [.5, .5]), torch.tensor([0, 1, 1])
    assert verify_confidence(judged, tokens, None, tau=.6).tolist() == [False, True, True]
    by_max = verify_confidence(judged, tokens, None, tau=.6, of="max")
    assert by_max.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="of is 'min'"):
        verify_confidence(judged, tokens, None, of="min")


def test_kl_is_from_the_verifier_to_the_draft():
    """KL([.5, .5] || [.9, .1]) = .5108 nats, the other way .3681; banned ids count nothing."""
    p, q = logits_of([.5, .5, 0.0]), logits_of([.9, .1, 0.0])
    t = torch.tensor([0])
    assert verify_kl(p, t, q, tau=.51).item() and not verify_kl(p, t, q, tau=.512).item()
    assert verify_kl(q, t, p, tau=.367).item() and not verify_kl(q, t, p, tau=.369).item()


def test_stochastic_kl_remasks_with_probability_one_minus_exp():
    p, q = logits_of([.5, .5]).expand(20000, 2), logits_of([.9, .1]).expand(20000, 2)
    got = verify_kl(p, torch.zeros(20000).long(), q, tau=.5, stochastic=True,
                    generator=torch.Generator().manual_seed(0)).double().mean()
    want = 1 - torch.exp(torch.tensor(-.5108 / .5))
    assert abs(got - want) < 4 * (.25 / 20000) ** .5
    same = verify_kl(p, torch.zeros(20000).long(), p, tau=.5, stochastic=True)
    assert not same.any() and not verify_trust(p, torch.zeros(20000).long(), q).any()


def test_verifiers_take_any_leading_shape():
    judged, draft = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    tokens = torch.randint(0, 7, (2, 3))
    for rule in (verify_trust, verify_kl, verify_confidence):
        flat = rule(judged.view(6, 7), tokens.view(6), draft.view(6, 7))
        assert torch.equal(rule(judged, tokens, draft), flat.view(2, 3))


# ---------------------------------------------------------------------------------------------
# Leave-one-out

def views(model, ids, checked, shift, visible=None):
    d = Denoiser(model, M, shift=shift)
    nothing = torch.zeros_like(checked)
    return d.leave_one_out(ids, nothing, checked, visible)[1]


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_a_token_does_not_vouch_for_itself(make, shift):
    """CASES 25: on one layer the logits of a checked position stay bitwise when its token
    changes; through two layers it leaks by way of the others, in the visible view it stays."""
    ids, checked = random_ids(2, 8), torch.zeros(2, 8, dtype=torch.bool)
    checked[0, [3, 5]] = checked[1, 6] = True
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 7) % M
    for layers in (1, 2):
        model = make(layers)
        a, b = (views(model, x, checked, shift) for x in (ids, other))
        assert torch.equal(a[0], b[0]) == (layers == 1)
        assert not torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
def test_one_checked_token_on_one_layer_is_a_true_leave_one_out(make):
    """Equal to masking that token in a plain forward; padded rows too."""
    model = make(1)
    ids = random_ids(2, 8)
    visible = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])
    checked = torch.zeros(2, 8, dtype=torch.bool)
    checked[0, 4] = checked[1, 5] = True
    got = views(model, ids, checked, False, visible)
    want = Denoiser(model, M)(ids.masked_fill(checked, M), checked, visible)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_the_shadow_changes_nothing_for_the_canvas(make, shift):
    """Ordinary logits, and the keys stored, are those of a plain forward."""
    model, ids = make(3), random_ids(2, 8)
    d, ask, checked = Denoiser(model, M, shift=shift), torch.zeros(2, 8, dtype=torch.bool), ids < 20
    ask[:, 6:] = True
    kv, plain = dlm_spec.KVCache(), dlm_spec.KVCache()
    got, _ = d.leave_one_out(ids, ask, checked & ~ask, kv=kv)
    assert torch.allclose(got, d(ids, ask, kv=plain), atol=1e-5)
    assert all(torch.allclose(kv.k[i], plain.k[i], atol=1e-5) for i in plain.k)


# ---------------------------------------------------------------------------------------------
# The loop

ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]
KNOBS = [dict(), dict(view="visible", cache="prefix"), dict(verify=partial(verify_kl, tau=.05)),
         dict(cache="dkv", draft_steps=2, adaptive=True), dict(cache=None, verify=reject_all),
         dict(view="cover", draft_steps=2), dict(view="cover", cache=None, verify=reject_all),
         dict(adaptive=True, verify=partial(verify_confidence, tau=.9), factor=1.0)]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
def test_rows_of_a_batch_equal_single_runs(make, shift, knobs):
    """CASES 2: unequal prompts, holes, rows verified at different times; fp64, greedy."""
    d = Denoiser(make(2, dtype=torch.float64), M, shift=shift)
    out = sample_dual_diffusion(d, ROWS, gen_length=10, block_length=5, **knobs)
    for i, row in enumerate(ROWS):
        one = sample_dual_diffusion(d, [row], gen_length=10, block_length=5, **knobs)
        assert torch.equal(out.sequences[i, -10 - len(row):], one.sequences[0])
        for name in ("nfe", "positions", "draft_nfe", "verify_nfe"):
            assert getattr(out, name)[i] == getattr(one, name)[0], name
    assert (out.sequences != M).all()


@pytest.mark.parametrize("cache", ["dual", "prefix", None])
def test_trust_is_the_drafter_alone(cache):
    """CASES 23: accept all, several rounds: the draft, at the draft's price."""
    d = Denoiser(tiny_llama(2, dtype=torch.float64), M)
    knobs = dict(gen_length=12, block_length=6, cache=cache, threshold=.4)
    out = sample_dual_diffusion(d, ROWS, verify=verify_trust, draft_steps=2, max_rounds=2, **knobs)
    want = sample_fast_dllm(d, ROWS, **knobs)
    assert torch.equal(out.sequences, want.sequences) and torch.equal(out.nfe, want.nfe)
    assert torch.equal(out.positions, want.positions) and out.verify_nfe.sum() == 0


def slow(d, prompt, G, K, tau, max_revisions):
    """The loop for one row, one block, no cache, visible view, confidence: written out."""
    x, L, P = torch.cat([prompt, torch.full((1, G), M)], 1), prompt.shape[1] + G, prompt.shape[1]
    drafted, revised, since, drafts, verifications = set(), [0] * L, 0, 0, 0
    def p_of(x):
        everywhere = torch.ones_like(x, dtype=torch.bool)
        return d(x, everywhere).softmax(-1)
    def draft(p, skip):
        masks = [i for i in range(P, L) if x[0, i] == M and i not in skip]
        best = {i: p[i].max().item() for i in masks}
        for i in masks:
            if best[i] >= .6 or i == max(best, key=lambda j: (best[j], -j)):
                x[0, i] = p[i].argmax()
                drafted.add(i)
    while drafted or (x == M).any():
        if drafted and (since >= K or not (x == M).any()):
            p, verifications, since = p_of(x), verifications + 1, 0
            bad = sorted((i for i in drafted if p[i, x[0, i]] < tau and revised[i] < max_revisions),
                         key=lambda i: p[i, x[0, i]].item())[:len(drafted) - 1]
            drafted.clear()
            draft(p, bad)
            for i in bad:
                x[0, i], revised[i] = M, revised[i] + 1
        else:
            drafts, since = drafts + 1, since + 1
            draft(p_of(x), ())
    return x, drafts, verifications, sum(revised)


def test_the_loop_equals_its_slow_form():
    events = 0
    for seed in range(8):
        d = Denoiser(tiny_llama(2, seed=seed, dtype=torch.float64), M)
        prompt = random_ids(1, 4, seed=seed)
        out = sample_dual_diffusion(d, prompt, gen_length=12, block_length=12, draft_steps=2,
                                    view="visible", cache=None, threshold=.6,
                                    verify=partial(verify_confidence, tau=.3))
        x, drafts, verifications, revised = slow(d, prompt, 12, 2, .3, 2)
        assert torch.equal(out.sequences, x) and len(out.revisions) == revised
        assert (int(out.draft_nfe), int(out.verify_nfe)) == (drafts, verifications)
        events += revised
    assert events


def test_verification_costs_no_more_than_refreshing_every_k_steps():
    """A model that is never sure, nothing taken back, dual cache, K = 3, prompt 6, G 16, block 8.
    In each block forwards 4 and 8 verify, which is every refresh, and draft a token as well; the
    ninth checks the last token. Block 2 starts with the keys and values of block 1's ninth, so of
    18 forwards 7 are full (22 positions) and 11 are windows (8)."""
    out = sample_dual_diffusion(Denoiser(Table(torch.zeros(40, 40)), M), random_ids(1, 6),
                                gen_length=16, block_length=8, draft_steps=3, view="visible",
                                verify=partial(verify_confidence, tau=0.0))
    assert (int(out.draft_nfe), int(out.verify_nfe)) == (12, 6) and not out.revisions
    assert int(out.positions) == 7 * 22 + 11 * 8
    assert sorted(out.commit_step[0, 6:].tolist()) == [*range(1, 9), *range(10, 18)]


def test_given_tokens_are_never_taken_back():
    """CASES 24: whatever the verifier thinks of the prompt."""
    d = Denoiser(tiny_llama(2), M)
    prompt = torch.tensor([[5, M, 7, M, 9]])
    out = sample_dual_diffusion(d, prompt, gen_length=8, block_length=4, verify=reject_all)
    assert out.sequences[0, [0, 2, 4]].tolist() == [5, 7, 9]
    assert out.revisions and {r[2] for r in out.revisions} <= {1, 3, *range(5, 13)}
    assert all(r.kind == "remask" and r.old != M for r in out.revisions)


@pytest.mark.parametrize("view", ["visible", "leave_one_out", "cover"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_verifier_that_rejects_everything_ends(view, adaptive):
    """Progress: fewer re-masked than drafted per round, each position at most max_revisions."""
    d = Denoiser(tiny_llama(2), M)
    for most in (0, 1, 3):
        out = sample_dual_diffusion(d, [[1, 2, 3]], gen_length=16, block_length=8, draft_steps=2,
                                    threshold=.0, verify=reject_all, max_revisions=most, view=view,
                                    adaptive=adaptive)
        times = torch.bincount(torch.tensor([r[2] for r in out.revisions] + [0]))
        assert (out.sequences != M).all() and times[3:].sum() <= most * 16
        assert not out.revisions or times[3:].max() <= most
        assert int(out.nfe) <= 2 * (16 + len(out.revisions)) + 2
    assert out.revisions


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("cache", [None, "dual", "prefix"])
def test_the_cover_view_checks_only_what_is_stored(make, shift, cache, monkeypatch):
    """Every checked token's stored keys were made of itself; every draft is checked in the end; no
    forward processes more than the canvas."""
    shown, checked, call = torch.full((1, 23), -1), [], Denoiser.__call__
    def spy(self, x, ask, mask=None, *, seeds=None, window=None, **kw):
        def late(t):
            return t | torch.cat([t[:, 1:], t[:, :1] & False], 1) if shift else t
        if seeds is not None and seeds.any():
            assert torch.equal(shown[late(seeds)], x[late(seeds)]) and (x[seeds] != M).all()
            checked.append(seeds)
        fresh = torch.ones_like(x, dtype=torch.bool) if window is None else late(window)
        fresh = fresh if seeds is None else fresh & ~late(seeds)
        shown[fresh] = x[fresh]
        return call(self, x, ask, mask, seeds=seeds, window=window, **kw)
    monkeypatch.setattr(Denoiser, "__call__", spy)
    d = Denoiser(make(2), M, shift=shift)
    out = sample_dual_diffusion(d, [[1, 2, 3]], gen_length=20, block_length=10, threshold=.1,
                                draft_steps=2, view="cover", cache=cache,
                                verify=partial(verify_confidence, tau=0.0))
    assert torch.stack(checked).any(0)[0, 3:].sum() >= 19 - shift * 2 and not out.revisions
    assert int(out.positions) <= 23 * int(out.nfe)


def test_what_covers_view_can_check_is_its_slow_definition():
    """A shifted model reads i at i-1: both entries valid, i+1 not asked, no two neighbours."""
    tokens, valid, ask = torch.rand(3, 40, 12, generator=torch.Generator().manual_seed(0)) < .7
    ask &= ~tokens
    assert torch.equal(dlm_spec.eligible(tokens, valid, ask, False), tokens & valid)
    got = dlm_spec.every_other(dlm_spec.eligible(tokens, valid, ask, True))
    for b in range(40):
        kept = set()
        for i in range(12):
            if (tokens[b, i] and valid[b, i] and (i == 0 or valid[b, i - 1])
                    and not ask[b, i + 1:i + 2].any() and i - 1 not in kept):
                kept.add(i)
        assert kept == set(got[b].nonzero()[:, 0].tolist())


@pytest.mark.parametrize("view", ["visible", "leave_one_out", "cover"])
def test_a_block_starts_with_keys_and_values_of_its_canvas(view, monkeypatch):
    """The first forward of a block is full, but where the forward before was a full one of the
    same canvas that stored all of it."""
    starts, last, block = [], [None], [0]
    call, shadow = Denoiser.__call__, Denoiser.leave_one_out

    def spy(self, x, ask, mask=None, *, seeds=None, window=None, **kw):
        one = ask[0] if isinstance(ask, tuple) else ask
        now = (int(one.nonzero()[0, 1]) - 3) // 4
        if now > block[0] and (x[one] == M).all():
            starts.append(window is None)
            assert window is None or torch.equal(x, last[0])
            block[0] = now
        held = window is not None or (seeds is not None and seeds.any())
        last[0] = torch.zeros(0) if held else x.clone()
        return call(self, x, ask, mask, seeds=seeds, window=window, **kw)

    def spy_shadow(self, x, *args, **kw):
        last[0] = x.clone()
        return shadow(self, x, *args, **kw)
    monkeypatch.setattr(Denoiser, "__call__", spy)
    monkeypatch.setattr(Denoiser, "leave_one_out", spy_shadow)
    last_by_verifier = dict(threshold=1.0, draft_steps=3, max_rounds=1,
                            verify=partial(verify_confidence, tau=0.0))
    for seed in range(3):
        for knobs in (*(dict(max_rounds=n) for n in (None, 1, 4)), last_by_verifier):
            block[0] = 0
            knobs = {"draft_steps": 1, "threshold": .4, **knobs}
            sample_dual_diffusion(Denoiser(tiny_llama(2, seed=seed), M), [[1, 2, 3]], view=view,
                                  gen_length=20, block_length=4, **knobs)
    assert any(starts) and (view == "cover" or not all(starts))


def test_a_token_that_is_distrusted_comes_back_different():
    """Position 1 is first filled with 3; once position 2 shows 5, the verifier wants 4 there."""
    def model(ids, position_ids):
        logits = torch.zeros(*ids.shape, 40)
        seen = (ids == 5).any(1)
        want = torch.where(seen, 4, 3)[:, None].expand_as(ids)
        want = torch.where(position_ids == 2, 5, want)
        return logits.scatter(2, want[..., None], 6.0)
    out = sample_dual_diffusion(Denoiser(Table(model), M), [[1]], gen_length=2, block_length=2,
                                cache=None, view="visible", threshold=.5)
    assert out.generated.tolist() == [[4, 5]]
    assert [(r[2], r[3]) for r in out.revisions] == [(1, 3)]


def test_max_rounds_fills_the_rest_unchecked():
    d = Denoiser(tiny_llama(2), M)
    for rounds in (0, 1, 2):
        out = sample_dual_diffusion(d, [[1, 2]], gen_length=12, block_length=12, draft_steps=1,
                                    max_rounds=rounds, verify=reject_all)
        assert int(out.verify_nfe) == rounds and (out.sequences != M).all()


def test_adaptive_k_follows_the_revoked_share():
    """Nothing taken back: K doubles and fewer verifications are needed; all: K halves."""
    d = Denoiser(Table(torch.zeros(80, 40)), M)
    knobs = dict(gen_length=64, block_length=64, draft_steps=2, view="visible", cache=None)
    calm = partial(verify_confidence, tau=0.0)
    fixed, adaptive = (sample_dual_diffusion(d, [[1]], verify=calm, adaptive=a, **knobs)
                       for a in (False, True))
    assert int(adaptive.verify_nfe) < int(fixed.verify_nfe) / 2
    knobs["draft_steps"] = 8
    fixed, adaptive = (sample_dual_diffusion(d, [[1]], verify=reject_all, adaptive=a, **knobs)
                       for a in (False, True))
    assert int(adaptive.verify_nfe) > int(fixed.verify_nfe)


def test_a_second_model_can_draft():
    """Its own weights and cache; the verifier's forwards are counted apart."""
    judge, fast = (Denoiser(tiny_llama(n, seed=n, dtype=torch.float64), M) for n in (3, 1))
    out = sample_dual_diffusion(judge, ROWS, drafter=fast, gen_length=10, block_length=5)
    same = sample_dual_diffusion(judge, ROWS, gen_length=10, block_length=5)
    assert (out.sequences != M).all() and not torch.equal(out.sequences, same.sequences)
    assert torch.equal(out.nfe, out.draft_nfe + out.verify_nfe)
