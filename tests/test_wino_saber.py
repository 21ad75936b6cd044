"""Section 7, WINO and Saber: each against its slow form, caps and thresholds by hand; and what
all three samplers that take tokens back while they fill (these two and COVER) must do."""
import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from helpers import M, Table, lively, sharp_table, tiny_llama, tiny_qwen2
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dual_diffusion import shadows_by_definition

import dlm_spec
from dlm_spec import Denoiser, sample_cover, sample_saber, sample_wino, wino_cap

REVOCABLE = [sample_wino, sample_saber, sample_cover, partial(sample_cover, cache="prefix"),
             partial(sample_cover, cache="dual", refresh=3),
             partial(sample_wino, threshold=.5, threshold_back=.99),
             partial(sample_cover, threshold=.5, tau_replace=.3, tau_remask=1.0)]
every_revocable = pytest.mark.parametrize("sampler", REVOCABLE)
every_model = pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
ROWS = [[4, 8, 15], [16, M, 7, 2, M, 1], [3]]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def halves(L=64):
    """Two tokens with probability 1/2 each, to the bit, at every position."""
    table = torch.full((L, 40), -math.inf)
    table[:, [3, 7]] = 0.0
    return Denoiser(Table(table), M)


# -------------------------------------------------------------------------------------------
# WINO

def slow_wino(d, prompt, G, block_length, tau_1, tau_2):
    """WINO for one row: loops over positions, shadows by their definition. Returns the canvas,
    the forwards, and [(position, token), ...] of what was taken back."""
    P, L = len(prompt), len(prompt) + G
    x, forwards, events = torch.tensor([prompt + [M] * G]), 0, []
    column = torch.arange(L)[None]
    for start in range(P, L, block_length):
        end = min(start + block_length, L)
        block = (column >= start) & (column < end)
        committed_before, earlier = 30, set()
        while (x[block] == M).any():
            masks = [i for i in range(start, end) if x[0, i] == M]
            p = d(x, column >= 0).softmax(-1)
            shadow = shadows_by_definition(d.model, x, block, shift=d.shift)
            shadow[:, M] = -math.inf
            p_shadow = {i: shadow[i - start].softmax(-1)[x[0, i]].item() for i in earlier}
            sure = {i: p[i].max().item() for i in masks}
            order = sorted(masks, key=lambda i: (-sure[i], i))
            cap = min(max(int(len(masks) * .7), 5), 20)
            commit = [i for i in order if sure[i] > tau_1][:cap] or order[:1]
            back = []
            if len(commit) > 1:
                unlikely = sorted((q, i) for i, q in p_shadow.items() if q < tau_2)
                back = [i for _, i in unlikely[:committed_before - 1]]
            for i in commit:
                x[0, i] = p[i].argmax()
            for i in back:
                events.append((i, int(x[0, i])))
                x[0, i] = M
            earlier = (earlier | set(commit)) - set(back)
            committed_before, forwards = len(commit), forwards + 1
    return x, forwards, events


@every_model
def test_wino_is_its_slow_form(make, shift):
    """Tokens, forwards and what was taken back; two blocks, the last one short; every forward
    processes the canvas and its block's shadows."""
    taken_back = 0
    for seed in range(3):
        d = Denoiser(make(2, seed=seed, dtype=torch.float64), M, shift=shift)
        for tau_1, tau_2, G in ((.2, .9, 14), (.05, .5, 14), (.2, .9, 20)):
            out = sample_wino(d, [[1, 2, 3]], gen_length=G, block_length=14, threshold=tau_1,
                              threshold_back=tau_2)
            x, forwards, events = slow_wino(d, [1, 2, 3], G, 14, tau_1, tau_2)
            assert torch.equal(out.sequences, x) and int(out.nfe) == forwards
            assert sorted((r.position, r.old) for r in out.revisions) == sorted(events)
            taken_back += len(events)
            if G == 14:
                assert int(out.positions) == forwards * (17 + 14)
    assert taken_back > 5


def test_winos_cap_is_seventy_percent_within_five_and_twenty():
    masks = torch.tensor([4, 6, 8, 10, 20, 28, 29, 60])
    assert wino_cap(masks).tolist() == [5, 5, 5, 7, 14, 19, 20, 20]


@pytest.mark.parametrize("G, commits", [(4, [4]), (6, [5, 1]), (10, [7, 3]),
                                        (40, [20, 14, 5, 1])])
def test_wino_commits_no_more_than_its_cap(G, commits):
    """All confidences are above the threshold: 70 % of 40 masks are 28, the cap is 20; then
    70 % of 20, then 5 at least."""
    out = sample_wino(halves(), [[1]], gen_length=G, block_length=G, threshold=0.0,
                      threshold_back=0.0)
    assert torch.bincount(out.commit_step[0])[1:].tolist() == commits


@pytest.mark.parametrize("sampler", [partial(sample_wino, threshold_back=0.0), sample_cover])
def test_a_confidence_equal_to_the_threshold_is_not_above_it(sampler):
    """Confidence .5 everywhere, threshold .5: the best one only, in each forward."""
    out = sampler(halves(), [[1]], gen_length=4, block_length=4, threshold=.5)
    assert int(out.nfe) == 4 and not out.revisions


def test_wino_takes_back_what_is_below_the_threshold_not_what_is_equal():
    """Every shadow gives .5. Of 10 masks 7 are committed, then 3: then up to 6 of the 7 may be
    taken back, at .51 they are, at .5 none."""
    for threshold_back, remasked in ((.5, 0), (.51, 6)):
        out = sample_wino(halves(), [[1]], gen_length=10, block_length=10, threshold=0.0,
                          threshold_back=threshold_back)
        assert sum(r.forward == 2 for r in out.revisions) == remasked


def test_winos_shadows_are_judged_by_what_may_be_chosen():
    """CASES 33: logits 3 at id 0 (end of text, which may not be chosen), 2 at id 1, -9 at M,
    else 0. Id 1 has probability .71 among those that may be chosen, .24 among all."""
    table = torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0, -9.0]).expand(40, 6)
    d = Denoiser(Table(table), 5, eos_ids=(0,))
    processor = transformers.generation.SuppressTokensLogitsProcessor([0])
    for ban in (dict(suppress_eos=True), dict(logits_processor=processor)):
        out = sample_wino(d, [[3, 3]], gen_length=16, block_length=16, threshold=.2,
                          threshold_back=.7, **ban)
        assert out.generated[0].tolist() == [1] * 16
        assert not out.revisions and int(out.nfe) == 2      # 11 commits and 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_shadows_that_break_down_are_an_error(bad):
    """The block's logits are sound, those of the shadows behind the canvas are not."""
    def model(ids, position_ids):
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(0))
        out[:, 10:] = bad
        return out
    with pytest.raises(ValueError, match="logits"):
        sample_wino(Denoiser(Table(model), M), [[1, 2]], gen_length=8, block_length=8,
                    threshold=.9)


# -------------------------------------------------------------------------------------------
# Saber

def slow_saber(d, prompt, G, block_length, n):
    """Saber for one row: loops over positions. Returns the canvas, the forwards, and
    [(position, token, start of the block), ...] of what was taken back."""
    P, L = len(prompt), len(prompt) + G
    x, forwards, events = torch.tensor([prompt + [M] * G]), 0, []
    latest, before = {}, dict.fromkeys(range(L), 0.0)   # confidences: at commit, a forward ago
    for start in range(P, L, block_length):
        end = min(start + block_length, L)
        while any(x[0, i] == M for i in range(P, end)):
            top, tokens = d(x, torch.ones_like(x).bool()).softmax(-1).max(-1)
            masks = [i for i in range(P, end) if x[0, i] == M]
            mean = sum(latest.values()) / len(latest) if latest else 1.0
            commit = [i for i in masks if top[i] > mean]
            if len(commit) < n:
                commit = sorted(masks, key=lambda i: (-top[i].item(), i))[:n]
            for i in commit:
                x[0, i], latest[i] = tokens[i], top[i].item()
            if any(x[0, i] == M for i in range(P, end)):
                most = min(max(n // 2, math.ceil(len(commit) / 8)), len(commit) - 1)
                fall = sorted((top[i].item() - before[i], i) for i in range(P, end)
                              if x[0, i] != M and i in before)
                for _, i in fall[:most]:
                    events.append((i, int(x[0, i]), start))
                    x[0, i] = M
            before, forwards = {i: top[i].item() for i in range(P, end)}, forwards + 1
    return x, forwards, events


@every_model
def test_saber_is_its_slow_form(make, shift):
    """Tokens, forwards and what was taken back: n of 1 to 9, blocks after which earlier ones
    may be reopened, and a short last block."""
    taken_back, in_earlier_blocks = 0, 0
    for seed, (n, block_length) in enumerate(((2, 24), (2, 10), (5, 10), (1, 10), (9, 24))):
        d = Denoiser(lively(make, 2, seed, dtype=torch.float64), M, shift=shift)
        out = sample_saber(d, [[1, 2, 3]], gen_length=24, block_length=block_length, n=n)
        x, forwards, events = slow_saber(d, [1, 2, 3], 24, block_length, n)
        assert torch.equal(out.sequences, x) and int(out.nfe) == forwards
        assert sorted((r.position, r.old) for r in out.revisions) == sorted(
            (position, token) for position, token, _ in events)
        taken_back += len(events)
        in_earlier_blocks += sum(position < start for position, _, start in events)
    assert taken_back > 10 and in_earlier_blocks


def test_saber_does_not_reopen_a_block_in_its_first_forward():
    """A mask has confidence .03, a shown token .1 and .04 more for each one that is shown: the
    first block rises by .04 at least, which is more than what a new commit has. Still, the
    second block's first forward takes back a token of the first block."""
    def model(ids, position_ids):
        n_shown = (ids != M).sum(1, keepdim=True)
        p = torch.where(ids == M, .03, .1 + .04 * n_shown)
        logits = torch.zeros(*ids.shape, 40)
        logits[..., M] = -torch.inf
        logits[..., 7] = (38 * p / (1 - p)).log()
        return logits
    out = sample_saber(Denoiser(Table(model), M), [[1]], gen_length=12, block_length=6,
                       history=True)
    one_full = [t for t, x in enumerate(out.history)
                if (x[0, :7] != M).all() and (x[0, 7:] == M).all()]
    back = [r.position for r in out.revisions if r.forward == one_full[0] + 1]
    assert len(back) == 1 and back[0] < 7


@pytest.mark.parametrize("n", [1, 2, 6, 9])
def test_saber_takes_back_half_of_n_or_an_eighth_of_the_commits(n):
    """max(n // 2, ceil(D / 8)) but fewer than the D commits, until the block is full."""
    seen = set()
    for seed in range(3):
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


@settings(max_examples=12, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_wino_and_saber_end_for_every_threshold(threshold, threshold_back, n, seed):
    d = Denoiser(tiny_llama(1, seed=seed), M)
    for out in (sample_wino(d, ROWS, gen_length=10, block_length=5, threshold=threshold,
                            threshold_back=threshold_back),
                sample_saber(d, ROWS, gen_length=10, block_length=5, n=n)):
        assert (out.nfe <= 12).all() and (out.sequences != M).all()


# -------------------------------------------------------------------------------------------
# What all three must do

@every_revocable
@every_model
def test_rows_of_a_batch_equal_single_runs(sampler, make, shift):
    """CASES 2: fp64, greedy; tokens, NFE, positions, revisions; given tokens never change."""
    d = Denoiser(lively(make, 2, dtype=torch.float64), M, shift=shift)
    out = sampler(d, ROWS, gen_length=12, block_length=6)
    for i, row in enumerate(ROWS):
        one = sampler(d, [row], gen_length=12, block_length=6)
        assert torch.equal(out.sequences[i, -12 - len(row):], one.sequences[0])
        assert out.nfe[i] == one.nfe[0] and out.positions[i] == one.positions[0]
        padding = out.prompt_length - len(row)
        assert [(r.forward, r.position - padding, *r[3:]) for r in out.revisions
                if r.row == i] == [tuple(r[1:]) for r in one.revisions]
        prompt = torch.tensor(row)
        assert torch.equal(one.sequences[0, :len(row)][prompt != M], prompt[prompt != M])
    assert (out.sequences != M).all()


@every_revocable
def test_forwards_are_counted_and_bounded(sampler):
    """CASES 15: never more forwards than masks; COVER's re-masks come on top of them."""
    for seed in range(3):
        model, rows = lively(tiny_llama, 2, seed), []
        denoiser = Denoiser(model, M)
        model.model.register_forward_pre_hook(lambda *a, rows=rows: rows.append(
            len(a[2]["input_ids"])), with_kwargs=True)
        out = sampler(denoiser, ROWS, gen_length=16, block_length=8)
        assert sum(rows) == out.nfe.sum() and len(rows) == out.calls
        granted = torch.bincount(torch.tensor([r.row for r in out.revisions]).long(), minlength=3)
        bound = torch.tensor([16, 18, 16]) + granted * ("cover" in str(sampler))
        assert (out.nfe <= bound).all() and (out.sequences != M).all()


@every_revocable
def test_a_model_that_is_never_sure_still_ends(sampler):
    """CASES 7, 9: all confidences about .3, the model wants M or padded rows."""
    table = torch.full((40, 40), -20.0)
    table[:, :3] = torch.tensor([0.2, 0.1, 0.0])
    table[:, M], table[:, 30] = 9.0, 8.0
    d = Denoiser(Table(table), M, n_tokens=30)
    out = sampler(d, [[1, 2]], gen_length=8, block_length=8)
    assert int(out.nfe) <= 8 and (out.generated == 0).all()


@every_revocable
def test_infilling_short_blocks_and_early_stop(sampler):
    """CASES 12, 14, 16."""
    d = Denoiser(tiny_llama(2), M, eos_ids=(4,))
    assert sampler(d, [[1, 2, 3]], gen_length=6, block_length=4).sequences.shape == (1, 9)
    out = sampler(d, torch.tensor([[5, M, 7, M]]), gen_length=0, block_length=4)
    assert out.sequences[0, ::2].tolist() == [5, 7] and (out.sequences != M).all()
    table = sharp_table([0, 2, 8] + [4] * 10, vocab=10)
    d = Denoiser(Table(table), 9, eos_ids=(8,))
    out = sampler(d, [[1]], gen_length=12, block_length=3, early_stop=True)
    assert out.generated.tolist() == [[2] + [8] * 11] and int(out.nfe) <= 3


@every_revocable
def test_shifted_decoding(sampler):
    """CASES 19: position p of the table says "token p+1"."""
    table = sharp_table(torch.arange(1, 25), logits=torch.linspace(1, 5, 24))
    d = Denoiser(Table(table), M, shift=True)
    out = sampler(d, [[7, 7]], gen_length=12, block_length=4)
    assert out.generated[0].tolist() == list(range(2, 14))


def test_revocation_reaches_committed_tokens():
    """CASES 26: position 1 is committed as 3; once 5 is shown the model gives 3 there less
    than .1 and wants 4. WINO and COVER take 3 back and nothing of the sure rest."""
    def model(ids, position_ids):
        shown = (ids == 5).any(1)[:, None]
        want = torch.where(position_ids == 1, torch.where(shown, 4, 3),
                           torch.where(position_ids == 2, 5, 7))
        # first 1, 2 and 3 at once, then two at a time: there is time and leave to take back
        step = (ids != M).sum(1, keepdim=True)
        sure = torch.where(position_ids <= step + 2, 9.0, 1.0).where(position_ids != 1, 6.5)
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], sure[..., None])
    d = Denoiser(Table(model), M)
    for sampler, knobs in ((sample_wino, {}), (sample_cover, dict(max_seeds=1, tau_replace=.9))):
        out = sampler(d, [[1]], gen_length=16, block_length=16, threshold=.65, **knobs)
        assert [(r.position, r.old, r.new) for r in out.revisions] == [(1, 3, 4)], sampler
        assert out.generated[0].tolist() == [4, 5] + [7] * 14


@every_revocable
def test_the_revisions_retell_the_history(sampler):
    """Every change of a shown token is a revision, with the token that came next."""
    d = Denoiser(lively(tiny_llama, 3, seed=3), M)
    out = sampler(d, [[1, 2, 3], [4, 5]], gen_length=32, block_length=32, history=True)
    for row, i in {(r.row, r.position) for r in out.revisions}:
        events = [r for r in out.revisions if (r.row, r.position) == (row, i)]
        assert all(a.new == b.old for a, b in itertools.pairwise(events))
        assert events[-1].new == out.sequences[row, i]
    for row in range(2):
        # a row's canvas after each of its own forwards; it stands still once it is full
        canvases = [x[row] for x in out.history[:int(out.nfe[row]) + 1]]
        assert all(torch.equal(x[row], canvases[-1]) for x in out.history[len(canvases):])
        changed = sum(int(((a != M) & (a != b)).sum())
                      for a, b in itertools.pairwise(canvases))
        revisions = [r for r in out.revisions if r.row == row]
        # Saber takes back what it committed in the same forward, too
        at_once = sum(r.kind == "remask" and int(canvases[r.forward - 1][r.position]) == M
                      for r in revisions)
        assert changed == len(revisions) - at_once


def flips(ids, position_ids):
    """Wants 3 where it sees nothing or 4, and 4 where it sees 3: a check never agrees."""
    return torch.zeros(*ids.shape, 40).scatter(2, torch.where(ids == 3, 4, 3)[..., None], 9.0)


def moody():
    """Another answer at every call."""
    calls = itertools.count(1)

    def model(ids, position_ids):
        n = next(calls)
        want = (position_ids + n) % 38
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 4.0 + n % 3)
    return model


HARSH = [partial(sample_wino, threshold=0.0, threshold_back=1.0),
         partial(sample_wino, threshold=1.0, threshold_back=1.0),
         partial(sample_saber, n=1), partial(sample_saber, n=9),
         *(partial(sample_cover, threshold=0.0, tau_replace=tau_replace, tau_remask=1.0,
                   max_checks=max_checks, max_seeds=max_seeds)
           for tau_replace in (0.0, 1.0) for max_checks in (1, 99) for max_seeds in (None, 2))]
STUBBORN = dict(never_sure=lambda: torch.zeros(40, 40), flips=lambda: flips, moody=moody,
                wants_the_mask=lambda: sharp_table([M] * 40),
                wants_one_token=lambda: sharp_table([7] * 40))


@pytest.mark.parametrize("sampler", HARSH)
@pytest.mark.parametrize("make", STUBBORN.values(), ids=STUBBORN)
def test_rules_that_take_back_all_they_may_end(sampler, make, monkeypatch):
    """CASES 7, 9: every token is doubted; shifted and plain; prompts of unequal lengths with
    holes. COVER's re-masks are bounded by its checks."""
    monkeypatch.setattr(dlm_spec, "seed_score", lambda u, d_in, d_out: torch.ones_like(u))
    for shift in (False, True):
        out = sampler(Denoiser(Table(make()), M, shift=shift), [[1, 2], [3, M, 4, M]],
                      gen_length=9, block_length=5, history=True)
        assert (out.sequences != M).all() and out.sequences[0, 2:4].tolist() == [1, 2]
        assert out.sequences[1, 0:3:2].tolist() == [3, 4]
        masks = torch.tensor([9, 11])
        assert (out.nfe <= masks + len(out.revisions)).all()
        revised = {(r.row, r.position) for r in out.revisions}
        for a, b in itertools.pairwise(out.history):
            assert {tuple(at) for at in ((a != M) & (a != b)).nonzero().tolist()} <= revised
        assert torch.equal(out.history[-1], out.sequences)
        assert torch.equal((out.commit_step > 0).sum(1), masks)
