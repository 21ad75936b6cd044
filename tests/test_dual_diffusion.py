"""Section 6, DualDiffusion: verifiers by hand, shadows by their definition, the loop against
its slow form, what a verifier sees and by which logits it judges."""
import itertools
import math
from functools import partial

import pytest
import torch
import transformers
from helpers import M, Table, oracle, random_ids, tiny_llama, tiny_qwen2, tiny_qwen3

import dlm_spec
from dlm_spec import (
    Decode,
    Denoiser,
    DualView,
    KVCache,
    sample_dual_diffusion,
    sample_fast_dllm,
    shadowed,
    verify_confidence,
    verify_kl,
    verify_trust,
    view_cover,
    view_leave_one_out,
    view_visible,
    windowed,
)

VIEWS = [view_visible, view_leave_one_out, view_cover]
MODELS = [(tiny_llama, False), (tiny_qwen2, True)]
every_view = pytest.mark.parametrize("view", VIEWS)
every_model = pytest.mark.parametrize("make, shift", MODELS)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def reject_all(judged, tokens):
    return torch.ones_like(tokens, dtype=torch.bool)


def accept_all(judged, tokens):
    """verify_trust without its shortcut: the verifier runs."""
    return torch.zeros_like(tokens, dtype=torch.bool)


def logits_of(*rows):
    return torch.tensor(rows).log()


def flags(B, L, *positions):
    """(B, L) bool, True at these (row, column)."""
    out = torch.zeros(B, L, dtype=torch.bool)
    for row, column in positions:
        out[row, column] = True
    return out


# -------------------------------------------------------------------------------------------
# Verifiers

def test_confidence_has_two_readings():
    """CASES 26: a committed token with p=.1 is taken back, one with p=.9 is not; the largest
    probability is another question than the token's own."""
    judged, tokens = logits_of([.9, .1], [.9, .1], [.5, .5]), torch.tensor([0, 1, 1])
    assert verify_confidence(judged, tokens, tau=.6).tolist() == [False, True, True]
    assert verify_confidence(judged, tokens, tau=.6, of="max").tolist() == [False, False, True]
    with pytest.raises(ValueError, match="of is 'min'"):
        verify_confidence(judged, tokens, of="min")


def test_kl_is_from_the_verifier_to_the_draft():
    """KL([.5, .5] || [.9, .1]) = .5108 nats, the other way round .3681; banned ids count
    nothing."""
    p, q = logits_of([.5, .5, 0.0]), logits_of([.9, .1, 0.0])
    token = torch.tensor([0])
    for judged, draft, kl in ((p, q, .5108), (q, p, .3681)):
        assert verify_kl(judged, token, draft, tau=kl - .001).item()
        assert not verify_kl(judged, token, draft, tau=kl + .001).item()


def test_trust_accepts_everything():
    assert verify_trust(torch.randn(5, 9), torch.arange(5)).tolist() == [False] * 5


def test_verifiers_at_equality():
    """p < tau and KL > tau: what is equal is kept."""
    logits = torch.full((1, 8), -math.inf)
    logits[:, [3, 7]] = 0.0
    token = torch.tensor([3])
    assert not verify_confidence(logits, token, tau=.5).item()
    assert verify_confidence(logits, token, tau=.5001).item()
    assert not verify_kl(logits, token, logits, tau=0.0).item()


# -------------------------------------------------------------------------------------------
# Shadows: a token judged without itself

def shadows_by_definition(model, ids, shadow, visible=None, shift=False):
    """The logits (S, V) of the shadows of the positions `shadow` (B, L). Row by row, the table
    in `shadowed` filled in cell by cell, by the slow definition of the model."""
    found = []
    for b, row in enumerate(ids.tolist()):
        L, at = len(row), shadow[b].nonzero()[:, 0].tolist()
        real = [True] * L if visible is None else visible[b].tolist()
        position = [max(sum(real[:i + 1]) - 1, 0) for i in range(L)]
        source = [i - (shift and position[i] > 0) for i in at]      # where each is read
        tokens = row + [M if j == i else row[j] for i, j in zip(at, source)]
        # the canvas sees the canvas alone; a shadow of i sees all of it but i, and the shadows
        # that are not x[i]
        look = [real + [False] * len(at) for _ in row]
        look += [[real[j] and j != i for j in range(L)]
                 + [s == t or not shift or source[t] != i for t in range(len(at))]
                 for s, i in enumerate(at)]
        positions = torch.tensor([position + [position[j] for j in source]])
        logits, _ = oracle(model, torch.tensor([tokens]), torch.tensor([look]), positions)
        found.append(logits[0, L:])
    return torch.cat(found)


VISIBLE = torch.tensor([[True] * 8, [False] * 3 + [True] * 5])


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen3, False),
                                         (tiny_qwen2, True), (tiny_qwen3, True)])
def test_shadows_are_their_definition(make, shift):
    """Three layers, neighbours, shadows of different number per row, padding, a row's first
    token; more shadows than checked positions, as in WINO."""
    d, ids = Denoiser(make(3), M, shift=shift), random_ids(2, 8)
    shadow = flags(2, 8, (0, 0), (0, 3), (0, 4), (0, 5), (0, 7), (1, 3), (1, 6))
    checked = flags(2, 8, (0, 0), (0, 4), (0, 5), (1, 3), (1, 6))
    want = shadows_by_definition(d.model, ids, shadow, VISIBLE, shift)
    for part in (shadow, checked):
        got = shadowed(d, ids, ids < 0, VISIBLE, checked=part, shadow=shadow)[1]
        assert torch.allclose(got[:, :M], want[part[shadow]][:, :M], atol=1e-4)


@every_model
def test_a_token_does_not_vouch_for_itself(make, shift):
    """CASES 25: on one layer the logits of a checked position stay, bitwise, when its token
    changes; through two layers it leaks by way of the others."""
    ids, checked = random_ids(2, 8), flags(2, 8, (0, 3), (0, 5), (1, 6))
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 7) % M
    for layers in (1, 2):
        d = Denoiser(make(layers), M, shift=shift)
        a, b = (shadowed(d, x, ids < 0, checked=checked)[1] for x in (ids, other))
        assert torch.equal(a[0], b[0]) == (layers == 1)
        assert not torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2])
def test_one_checked_token_on_one_layer_is_a_true_leave_one_out(make):
    """Equal to masking that token in a plain forward; padded rows too."""
    d, ids = Denoiser(make(1), M), random_ids(2, 8)
    checked = flags(2, 8, (0, 4), (1, 5))
    got = shadowed(d, ids, ids < 0, VISIBLE, checked=checked)[1]
    want = d(ids.masked_fill(checked, M), checked, VISIBLE)
    assert torch.allclose(got, want, atol=1e-5)


@every_model
def test_a_shadow_changes_nothing_for_the_canvas(make, shift):
    """The canvas' logits, and the keys and values stored, are those of a plain forward."""
    d, ids = Denoiser(make(3), M, shift=shift), random_ids(2, 8)
    ask, checked = torch.arange(8).expand(2, 8) >= 6, ids < 20
    kv, plain = KVCache(ids), KVCache(ids)
    got = shadowed(d, ids, ask, checked=checked & ~ask, kv=kv)[0]
    assert torch.allclose(got, windowed(d, ids, ask, kv=plain)[0], atol=1e-5)
    assert torch.equal(kv.shown, plain.shown)
    for i in plain.k:
        assert torch.allclose(kv.k[i], plain.k[i], atol=1e-5)
        assert torch.allclose(kv.v[i], plain.v[i], atol=1e-5)


# -------------------------------------------------------------------------------------------
# The loop

ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]
SECOND = Denoiser(tiny_llama(1, seed=9, dtype=torch.float64), M)
KNOBS = [*(dict(view=view, cache=cache) for view in VIEWS
           for cache in (None, "dual", "prefix", "dkv")),
         *(dict(view=view, drafter=SECOND) for view in VIEWS),
         dict(verify=partial(verify_kl, tau=.05)),
         dict(cache="dkv", adaptive=True), dict(cache=None, verify=reject_all),
         dict(view=view_cover, draft_steps=4), dict(view=view_cover, verify=reject_all),
         dict(adaptive=True, verify=partial(verify_confidence, tau=.9), threshold=.6),
         dict(max_rounds=1, draft_steps=1)]


def name_of(value):
    """For pytest: knobs by their values' names."""
    if isinstance(value, dict):
        return ",".join(f"{k}={name_of(v)}" for k, v in value.items())
    if isinstance(value, Denoiser):
        return "another"
    return getattr(getattr(value, "func", value), "__name__", str(value))


@pytest.mark.parametrize("knobs", KNOBS, ids=name_of)
@every_model
def test_rows_of_a_batch_equal_single_runs(make, shift, knobs):
    """CASES 2: unequal prompts, holes, rows verified at different times, each view and cache;
    with a second drafter too. fp64, greedy."""
    d = Denoiser(make(2, dtype=torch.float64), M, shift=shift)
    knobs = {"gen_length": 8, "block_length": 4, "draft_steps": 2, **knobs}
    out = sample_dual_diffusion(d, ROWS[1:], **knobs)
    for i, row in enumerate(ROWS[1:]):
        one = sample_dual_diffusion(d, [row], **knobs)
        assert torch.equal(out.sequences[i, -8 - len(row):], one.sequences[0])
        for name in ("nfe", "positions", "draft_nfe", "verify_nfe"):
            assert getattr(out, name)[i] == getattr(one, name)[0], name
        padding = out.prompt_length - len(row)
        assert [(r.forward, r.position - padding, *r[3:]) for r in out.revisions
                if r.row == i] == [tuple(r[1:]) for r in one.revisions]
    assert (out.sequences != M).all()
    assert torch.equal(out.nfe, out.draft_nfe + out.verify_nfe)


def slow_dual_diffusion(judge, drafter, prompt, G, K, verify, view, max_revisions=2,
                        max_rounds=None, adaptive=False):
    """The loop for one row, one block, no cache, threshold .6: written out. Returns the
    canvas, both counts of forwards, and [(position, token), ...] of what was taken back."""
    P, L = len(prompt), len(prompt) + G
    x, everywhere = torch.tensor([prompt + [M] * G]), torch.ones(1, P + G, dtype=torch.bool)
    revised, checks, longest = [0] * L, [0] * L, 4 * K
    drafted, stale, draft_logits, events = set(), set(), {}, []
    drafts = rounds = 0

    def masks():
        return [i for i in range(P, L) if x[0, i] == M]

    def draft(logits):
        p = logits.softmax(-1)
        sure = {i: p[i].max().item() for i in masks()}
        best = min(sure, key=lambda i: (-sure[i], i), default=None)
        committed = {i for i in sure if sure[i] >= .6 or i == best}
        for i in committed:
            x[0, i], draft_logits[i] = p[i].argmax(), logits[i]
        return committed

    def changed(positions):
        for i in positions if adaptive else ():
            near = range(max(i - 4, 0), min(i + 5, L))
            stale.update(j for j in near if checks[j] > 0 and j not in positions)

    while True:
        step = 0
        while masks() and (step < K or rounds == max_rounds):
            committed = draft(drafter(x, everywhere))
            changed(committed)
            drafted, step, drafts = drafted | committed, step + 1, drafts + 1
        if not drafted or rounds == max_rounds:
            return x, drafts, rounds, events
        again = {i for i in stale if x[0, i] != M and checks[i] <= max_revisions}
        checked = sorted(drafted | again)
        tokens, at = x[0, checked], flags(1, L, *((0, i) for i in checked))
        logits = judge(x, everywhere)
        judged = (logits[checked] if view is view_visible else
                  shadows_by_definition(judge.model, x, at).index_fill(1, torch.tensor([M]),
                                                                       -torch.inf))
        bad = verify(judged, tokens, torch.stack([draft_logits[i] for i in checked]))
        likely = judged.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        doubtful = sorted((p, i) for p, i, b in zip(likely, checked, bad.tolist())
                          if b and revised[i] < max_revisions)
        back = {i for _, i in doubtful[:len(drafted) - 1]}
        committed = draft(logits)
        for i in back:
            events.append((i, int(x[0, i])))
            x[0, i], revised[i] = M, revised[i] + 1
        for i in checked:
            checks[i] += 1
        stale.clear()
        if adaptive and len(back) > len(checked) / 4:
            K = max(K // 2, 1)
        elif adaptive and not back:
            K = min(2 * K, longest)
        changed(committed | back)
        drafted, rounds = committed, rounds + 1


SLOW = [(view_visible, None, .3, False, {}), (view_visible, None, .3, True, {}),
        (view_visible, .1, None, False, dict(adaptive=True, max_revisions=1)),
        (view_visible, .1, None, True, {}), (view_leave_one_out, None, .3, False, {}),
        (view_leave_one_out, .1, None, True, dict(max_rounds=4)),
        (view_leave_one_out, None, .5, False, dict(adaptive=True))]


@pytest.mark.parametrize("view, kl, confidence, second, knobs", SLOW, ids=name_of)
def test_the_loop_equals_its_slow_form(view, kl, confidence, second, knobs):
    """Tokens, both counts of forwards, what was taken back; with a second drafter too."""
    def slow_verify(judged, tokens, draft):
        return (verify_kl(judged, tokens, draft, tau=kl) if confidence is None else
                verify_confidence(judged, tokens, tau=confidence))
    verify = slow_verify if confidence is None else partial(verify_confidence, tau=confidence)
    taken_back = 0
    for seed in range(4):
        judge, other = (Denoiser(tiny_llama(layers, seed=seed, dtype=torch.float64), M)
                        for layers in (2, 1))
        prompt, drafter = random_ids(1, 4, seed=seed)[0].tolist(), other if second else judge
        out = sample_dual_diffusion(judge, [prompt], gen_length=14, block_length=14, view=view,
                                    cache=None, draft_steps=2, threshold=.6, verify=verify,
                                    drafter=other if second else None, **knobs)
        x, drafts, rounds, events = slow_dual_diffusion(judge, drafter, prompt, 14, 2,
                                                        slow_verify, view, **knobs)
        assert torch.equal(out.sequences, x)
        assert (int(out.draft_nfe), int(out.verify_nfe)) == (drafts, rounds)
        assert sorted((r.position, r.old) for r in out.revisions) == sorted(events)
        taken_back += len(events)
    assert taken_back > 5


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("cache", ["dual", "prefix", None])
def test_trust_is_the_drafter_alone(cache, second):
    """CASES 23: accept all, several rounds: the draft, at the draft's price."""
    d, other = (Denoiser(tiny_llama(2, seed, dtype=torch.float64), M) for seed in (0, 1))
    knobs = dict(gen_length=12, block_length=6, cache=cache, threshold=.4)
    out = sample_dual_diffusion(d, ROWS, verify=verify_trust, draft_steps=2, max_rounds=2,
                                drafter=other if second else None, **knobs)
    want = sample_fast_dllm(other if second else d, ROWS, **knobs)
    assert torch.equal(out.sequences, want.sequences) and torch.equal(out.nfe, want.nfe)
    assert torch.equal(out.positions, want.positions) and out.verify_nfe.sum() == 0


def test_verification_costs_no_more_than_refreshing_every_k_steps():
    """A model that is never sure, nothing taken back, dual cache, K = 3, prompt 6, G 16,
    block 8. In each block forward 1 fills the cache, 4 and 8 verify, which is every refresh,
    and draft a token as well; the ninth checks the last token. So of 18 forwards 8 are full
    (22 positions) and 10 are windows (8)."""
    d = Denoiser(Table(torch.zeros(40, 40)), M)
    out = sample_dual_diffusion(d, random_ids(1, 6), gen_length=16, block_length=8,
                                draft_steps=3, view=view_visible, verify=accept_all)
    assert (int(out.draft_nfe), int(out.verify_nfe)) == (12, 6) and not out.revisions
    assert int(out.positions) == 8 * 22 + 10 * 8
    assert sorted(out.commit_step[0, 6:].tolist()) == [*range(1, 9), *range(10, 18)]


def test_given_tokens_are_never_taken_back():
    """CASES 24: whatever the verifier thinks of the prompt."""
    d, prompt = Denoiser(tiny_llama(2), M), torch.tensor([[5, M, 7, M, 9]])
    for view, adaptive in itertools.product(VIEWS, (False, True)):
        out = sample_dual_diffusion(d, prompt, gen_length=8, block_length=4, verify=reject_all,
                                    view=view, adaptive=adaptive)
        assert out.sequences[0, [0, 2, 4]].tolist() == [5, 7, 9]
        assert out.revisions and {r.position for r in out.revisions} <= {1, 3, *range(5, 13)}
        assert all(r.kind == "remask" and r.old != M for r in out.revisions)


@every_view
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_verifier_that_rejects_everything_ends(view, adaptive):
    """Progress: fewer are re-masked than drafted per round, each position at most
    max_revisions times; and without the cover view, which lets tokens wait, some position that
    often."""
    d = Denoiser(tiny_llama(2), M)
    for most in (0, 1, 2, 3):
        out = sample_dual_diffusion(d, [[1, 2, 3]], gen_length=16, block_length=8, view=view,
                                    draft_steps=2, threshold=.0, verify=reject_all,
                                    max_revisions=most, adaptive=adaptive)
        times = [sum(r.position == i for r in out.revisions) for i in range(19)]
        assert (out.sequences != M).all() and max(times) <= most
        assert int(out.nfe) <= 2 * (16 + len(out.revisions)) + 2
        assert view is view_cover or max(times) == most
    assert out.revisions


@every_view
@pytest.mark.parametrize("shift", [False, True])
def test_it_ends_for_models_that_never_agree(view, shift):
    """A model that wants 3 where it sees nothing or 4, and 4 where it sees 3; one that is
    never sure; one that wants the mask; one with another answer at every call. Every draft is
    rejected."""
    calls = itertools.count(1)

    def flips(ids, position_ids):
        want = torch.where(ids == 3, 4, 3)
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 9.0)

    def moody(ids, position_ids):
        n = next(calls)
        return torch.zeros(*ids.shape, 40).scatter(2, (position_ids + n)[..., None] % 38,
                                                   4.0 + n % 3)
    wants_the_mask = torch.zeros(40, 40).index_fill(1, torch.tensor([M]), 50.0)
    for table in (flips, torch.zeros(40, 40), wants_the_mask, moody):
        out = sample_dual_diffusion(Denoiser(Table(table), M, shift=shift),
                                    [[1, 2], [3, M, 4, M]], gen_length=9, block_length=5,
                                    verify=reject_all, view=view, max_revisions=4,
                                    threshold=0.0, draft_steps=1)
        assert (out.sequences != M).all()
        assert out.sequences[0, 2:4].tolist() == [1, 2]
        assert out.sequences[1, 0:3:2].tolist() == [3, 4]
        assert (out.nfe <= 2 * (11 + len(out.revisions)) + 2).all()


def test_a_token_that_is_distrusted_comes_back_different():
    """Position 1 is first filled with 3; once position 2 shows 5, the verifier wants 4."""
    def model(ids, position_ids):
        logits = torch.zeros(*ids.shape, 40)
        shown = (ids == 5).any(1)
        want = torch.where(shown, 4, 3)[:, None].expand_as(ids)
        want = torch.where(position_ids == 2, 5, want)
        return logits.scatter(2, want[..., None], 6.0)
    for view in (view_visible, view_leave_one_out):
        out = sample_dual_diffusion(Denoiser(Table(model), M), [[1]], gen_length=2, cache=None,
                                    block_length=2, view=view, threshold=.5)
        assert out.generated.tolist() == [[4, 5]]
        assert [(r.position, r.old, r.new) for r in out.revisions] == [(1, 3, 4)]


@pytest.mark.parametrize("view", [view_visible, view_leave_one_out])
def test_max_rounds_fills_the_rest_unchecked(view):
    d = Denoiser(tiny_llama(2), M)
    for rounds in (0, 1, 2):
        out = sample_dual_diffusion(d, [[1, 2]], gen_length=12, block_length=12, draft_steps=1,
                                    max_rounds=rounds, verify=reject_all, view=view)
        assert int(out.verify_nfe) == rounds and (out.sequences != M).all()


def test_adaptive_k_follows_the_share_that_was_taken_back():
    """Nothing taken back: K doubles, fewer verifications are needed; all: K halves."""
    d = Denoiser(Table(torch.zeros(80, 40)), M)
    knobs = dict(gen_length=64, block_length=64, view=view_visible, cache=None)
    (calm, adaptive_calm), (harsh, adaptive_harsh) = (
        [int(sample_dual_diffusion(d, [[1]], verify=verify, draft_steps=K, adaptive=adaptive,
                                   **knobs).verify_nfe) for adaptive in (False, True)]
        for verify, K in ((accept_all, 2), (reject_all, 8)))
    assert adaptive_calm < calm / 2 and adaptive_harsh > harsh


@pytest.mark.parametrize("K, rejected, second", [
    (4, 0, 5 + 9), (4, 1, 5 + 5), (4, 2, 5 + 3), (3, 1, 4 + 2), (2, 1, 3 + 2), (1, 0, 2 + 3)])
def test_adaptive_k_halves_above_a_quarter_and_doubles_at_nothing(K, rejected, second):
    """One token per forward: the first verification is forward K + 1, the second follows after
    2 K, K or K // 2 drafts."""
    model, calls = Table(torch.zeros(40, 40)), []

    def rule(judged, tokens):
        calls.append(model.calls)
        return (torch.arange(len(tokens)) < rejected) & (len(calls) == 1)
    sample_dual_diffusion(Denoiser(model, M), [[1]], gen_length=32, block_length=32,
                          verify=rule, draft_steps=K, view=view_visible, cache=None,
                          adaptive=True)
    assert calls[:2] == [K + 1, second]


def test_a_forward_that_could_check_nothing_yet_is_no_round():
    """By COVER's view a token can be checked once it is stored: with one round and K = 1 the
    first exact forward only stores it, and the round is spent by the next."""
    d = Denoiser(tiny_llama(2, seed=3), M)
    knobs = dict(gen_length=8, block_length=8, view=view_cover, max_rounds=1, draft_steps=1)
    checked = []

    def rule(judged, tokens):
        checked.append(len(tokens))
        return torch.zeros_like(tokens, dtype=torch.bool)
    out = sample_dual_diffusion(d, ROWS[:1], verify=rule, **knobs)
    assert checked[0] == 0 and sum(n > 0 for n in checked) == 1
    assert int(out.verify_nfe) == checked.index(max(checked)) + 1 == len(checked)


def test_a_second_model_can_draft():
    """Its own weights and cache; the forwards of each are counted apart."""
    judge, fast = (Denoiser(tiny_llama(n, seed=n, dtype=torch.float64), M) for n in (3, 1))
    calls = {"judge": 0, "fast": 0}
    for name, d in (("judge", judge), ("fast", fast)):
        def count(*_, name=name):
            calls[name] += 1
        d.model.model.register_forward_pre_hook(count)
    for view in VIEWS:
        calls.update(judge=0, fast=0)
        knobs = dict(gen_length=10, block_length=5, view=view)
        out = sample_dual_diffusion(judge, ROWS[:1], drafter=fast, **knobs)
        assert calls == {"judge": int(out.verify_nfe), "fast": int(out.draft_nfe)}
        same = sample_dual_diffusion(judge, ROWS[:1], **knobs)
        assert (out.sequences != M).all() and not torch.equal(out.sequences, same.sequences)


@every_view
@every_model
@pytest.mark.parametrize("second", [False, True])
def test_a_block_starts_with_a_full_forward(view, make, shift, second, monkeypatch):
    """The first forward of a block is full and fills a new cache: no forward of a window ever
    reads keys and values that were stored before its block. A dual cache's window is the
    block."""
    seen = []

    def watched(form):
        def watch(denoiser, x, ask, mask=None, *, kv=None, **how):
            filled = kv.kv.filled if isinstance(kv, DualView) else kv.filled
            first_asked = int(ask.nonzero()[0, 1]) if ask.any() else None
            seen.append((first_asked, how.get("window"), filled))
            return form(denoiser, x, ask, mask, kv=kv, **how)
        return watch
    monkeypatch.setattr(dlm_spec, "shadowed", watched(dlm_spec.shadowed))
    monkeypatch.setattr(dlm_spec, "windowed", watched(dlm_spec.windowed))
    drafter = Denoiser(make(1), M, shift=shift) if second else None
    d, windows = Denoiser(make(2), M, shift=shift), 0
    for rounds, K in ((None, 1), (1, 3), (4, 1)):
        seen.clear()
        sample_dual_diffusion(d, [[1, 2, 3]], view=view, gen_length=12, block_length=4,
                              max_rounds=rounds, draft_steps=K, threshold=.9, drafter=drafter,
                              verify=accept_all)
        block = -1
        for first_asked, window, filled in seen:
            if first_asked is not None and (first_asked - 3) // 4 > block:
                block = (first_asked - 3) // 4
                assert window is None and not filled
            elif window is not None:
                assert filled
                windows += 1
                columns = window[0].nonzero()[:, 0].tolist()
                assert columns == [*range(3 + 4 * block, 7 + 4 * block)]
        assert block == 2
    assert windows


# -------------------------------------------------------------------------------------------
# COVER's view

@every_model
@pytest.mark.parametrize("cache", [None, "dual", "prefix", "dkv"])
def test_the_cover_view_checks_only_what_is_stored(make, shift, cache, monkeypatch):
    """Every checked token's stored keys and values were made of itself; nearly every draft is
    checked in the end; no forward processes more than the canvas."""
    shown, checked_ever, form = torch.full((1, 23), -1), [], dlm_spec.windowed

    def also_where_read(t):
        return t | torch.cat([t[:, 1:], t[:, :1] & False], 1) if shift else t

    def spy(denoiser, x, ask, mask=None, *, kv=None, window=None, checked=None, **kw):
        fresh = torch.ones_like(x, dtype=torch.bool)
        if window is not None:
            fresh = also_where_read(window | ask)
        if isinstance(kv, DualView):
            at = also_where_read(kv.seeds)
            assert window is None and torch.equal(kv.seeds, checked)
            assert torch.equal(shown[at], x[at]) and (x[kv.seeds] != M).all()
            checked_ever.append(kv.seeds)
            fresh = fresh & ~at
        shown[fresh] = x[fresh]
        return form(denoiser, x, ask, mask, kv=kv, window=window, checked=checked, **kw)
    monkeypatch.setattr(dlm_spec, "windowed", spy)
    out = sample_dual_diffusion(Denoiser(make(2), M, shift=shift), [[1, 2, 3]], gen_length=20,
                                block_length=10, threshold=.1, draft_steps=2, view=view_cover,
                                cache=cache, verify=partial(verify_confidence, tau=0.0))
    checked_once = torch.stack(checked_ever).any(0)[0, 3:]
    assert checked_once.sum() >= 19 - shift * 2 and not out.revisions
    assert int(out.positions) <= 23 * int(out.nfe)


@pytest.mark.parametrize("shift", [False, True])
def test_what_covers_view_can_check_is_its_slow_definition(shift):
    """A token is checked if its stored keys and values are of itself; a shifted model reads i
    at i-1: both entries are valid, i+1 is no mask, and of neighbours every second waits. (A
    mask at the start of a row: see the tests of COVER.)"""
    g = torch.Generator().manual_seed(0)
    B, L = 40, 12
    tokens, valid, ask = torch.rand(3, B, L, generator=g) < .7
    ask, x = ask & ~tokens, torch.randint(0, M, (B, L), generator=g)
    ask[:, 0] = False
    d = Denoiser(Table(torch.zeros(L, 40)), M, shift=shift)
    run, kv = Decode(d, x.masked_fill(ask, M), gen_length=0), KVCache(x)
    kv.shown = torch.where(valid, run.x, run.x - 1)
    got, form, how = view_cover(run, kv, ask, tokens)
    assert form is windowed and torch.equal(how["kv"].seeds, got)
    for b in range(B):
        kept = set()
        for i in range(L):
            fine = tokens[b, i] and valid[b, i]
            if shift:
                fine = fine and (i == 0 or valid[b, i - 1]) and not ask[b, i + 1:i + 2].any()
                fine = fine and i - 1 not in kept
            if fine:
                kept.add(i)
        assert kept == set(got[b].nonzero()[:, 0].tolist())


# -------------------------------------------------------------------------------------------
# By which logits a draft is judged

EOS_FIRST = torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0, -9.0]).expand(40, 6)     # M is 5, eos is 0
BANS = [dict(suppress_eos=True),
        dict(logits_processor=transformers.generation.SuppressTokensLogitsProcessor([0]))]


@pytest.mark.parametrize("view, forwards", [
    (view_visible, 2), (view_leave_one_out, 2), (view_cover, 3)], ids=name_of)
@pytest.mark.parametrize("verify", [partial(verify_kl, tau=0.01), verify_kl,
                                    verify_confidence], ids=name_of)
@pytest.mark.parametrize("ban", BANS, ids=["suppress_eos", "processor"])
def test_the_judged_logits_are_those_a_token_would_be_chosen_by(view, forwards, verify, ban):
    """CASES 33: drafter and verifier are the same function of the position, so a second look
    changes nothing: what may not be drafted is not in the judged logits either. (COVER's view
    stores the draft in forward 2 and checks it in forward 3.)"""
    d = Denoiser(Table(EOS_FIRST), 5, eos_ids=(0,))
    out = sample_dual_diffusion(d, [[3, 3]], gen_length=16, block_length=16, threshold=.2,
                                cache=None, verify=verify, view=view, **ban)
    assert out.generated[0].tolist() == [1] * 16
    assert not out.revisions and int(out.nfe) == forwards


def test_draft_logits_are_kept_only_for_a_rule_that_takes_them(monkeypatch):
    kept_ever, distrusted = [], dlm_spec.distrusted

    def spy(run, verify, kept, *args):
        kept_ever.append(len(kept))
        return distrusted(run, verify, kept, *args)
    monkeypatch.setattr(dlm_spec, "distrusted", spy)
    d = Denoiser(tiny_llama(1), M)
    for verify, wanted in ((verify_confidence, False), (reject_all, False), (verify_kl, True),
                           (lambda judged, tokens, draft: tokens < 9, True)):
        kept_ever.clear()
        sample_dual_diffusion(d, ROWS, gen_length=8, block_length=4, verify=verify)
        assert all((n > 0) == wanted for n in kept_ever) and kept_ever


@pytest.mark.parametrize("knobs", [dict(suppress_eos=True, temperature=1.0),
                                   dict(postpone_eos=True, cache="dual", view=view_visible),
                                   dict(logits_processor=lambda x, logits: logits.mul_(.5))],
                         ids=name_of)
def test_draft_logits_are_not_changed_by_what_comes_after(knobs, monkeypatch):
    """CASES 33: the rule is given, for each token, the logits by which it was committed, to
    the bit, however many forwards ago; even if it writes into what it is given."""
    kept, decode, step = {}, [], Decode.step

    def spy(self, commit, *args, **kw):
        decode[:] = [self]
        rows = self.logits[commit[self.asked]].clone()
        kept.update(zip(map(tuple, commit.nonzero().tolist()), rows))
        return step(self, commit, *args, **kw)
    monkeypatch.setattr(Decode, "step", spy)
    compared = []

    def rule(judged, tokens, draft):
        where = [tuple(at) for at in decode[0].checked.nonzero().tolist()]
        assert torch.equal(draft, torch.stack([kept[at] for at in where]))
        compared.append(len(where))
        draft.fill_(7.0)
        return tokens % 3 == 0
    d = Denoiser(tiny_llama(2), M, eos_ids=(4, 8))
    sample_dual_diffusion(d, ROWS, gen_length=12, block_length=6, threshold=.5, draft_steps=3,
                          adaptive=True, verify=rule, **knobs)
    assert sum(compared) > 30


def test_a_draft_of_exactly_the_threshold_is_committed():
    """Two tokens with probability 1/2 each, to the bit: one forward, none is checked."""
    halves = torch.full((9, 40), -math.inf)
    halves[:, [3, 7]] = 0.0
    d = Denoiser(Table(halves), M)
    out = sample_dual_diffusion(d, [[1]], gen_length=4, threshold=.5, max_rounds=0)
    assert int(out.nfe) == 1 and not out.revisions


@every_view
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_verifier_that_breaks_down_is_an_error(view, bad):
    """Its logits of drafted tokens are looked at as well, where nothing is asked beside
    them."""
    calls = itertools.count(1)

    def model(ids, position_ids):
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(0))
        return out if next(calls) == 1 else torch.full_like(out, bad)
    with pytest.raises(ValueError, match="logits"):
        sample_dual_diffusion(Denoiser(Table(model), M), [[1, 2]], gen_length=4,
                              block_length=4, threshold=0.0, view=view, max_revisions=0)
