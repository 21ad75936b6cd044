"""Models and rules that do not cooperate: what test_properties.py does not have yet."""
import inspect
import math

import pytest
import torch
from helpers import M, Table, random_ids, tiny_llama
from test_cover import lively
from test_numerics import VARIANTS
from test_properties import check, flips, moody, one_token, uniform, wants_the_mask

from dlm_spec import SAMPLERS, Denoiser, log_likelihood, verify_kl, verify_trust

every_sampler = pytest.mark.parametrize("name", SAMPLERS)
MODELS = dict(uniform=lambda: uniform, mask=lambda: wants_the_mask, one=lambda: one_token,
              flips=lambda: flips, moody=moody)
HARSH = {     # every check rejects, every token is doubted
    "wino": [dict(threshold=0.0, threshold_back=1.0), dict(threshold=1.0, threshold_back=1.0)],
    "saber": [dict(n=1), dict(n=9)],
    "cover": [dict(threshold=0.0, tau_replace=r, tau_remask=1.0, seed_share=1.0, max_checks=c,
                   min_score=-1.0, score=lambda u, d_in, d_out: torch.ones_like(u))
              for r in (0.0, 1.0) for c in (1, 99)],
    "dual_diffusion": [dict(verify=lambda j, t, q: torch.ones_like(t, dtype=torch.bool), view=v,
                            max_revisions=4, threshold=0.0, draft_steps=1)
                       for v in ("visible", "leave_one_out", "cover")],
}


@pytest.mark.parametrize("name, knobs", [(n, k) for n, some in HARSH.items() for k in some])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("shift", [False, True])
def test_rules_that_take_back_all_they_may_end(name, knobs, make, shift):
    """Shifted and plain; prompts of unequal lengths with holes; the bounds of `check`."""
    check(Denoiser(Table(make()), M, shift=shift), name, [[1, 2], [3, M, 4, M]],
          dict(gen_length=9, block_length=5, **knobs))


@pytest.mark.parametrize("name, knobs", VARIANTS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_breaks_down_later_is_an_error(name, knobs, bad):
    """The second forward's logits are not usable; in one row of two is enough. It is said at the
    third, or at the end."""
    calls = [0]

    def model(ids, position_ids):
        calls[0] += 1
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(calls[0]))
        if calls[0] > 1:
            out[-1] = bad
        return out
    with pytest.raises(ValueError, match="logits are not usable at forward"):
        SAMPLERS[name](Denoiser(Table(model), M), [[1, 2], [3]], gen_length=8, block_length=8,
                       **{**knobs, **({} if "threshold" not in knobs else {"threshold": 1.0})})


@every_sampler
def test_logits_that_nobody_asked_for_may_be_anything(name):
    """NaN at the prompt's positions and on the mask's row of the vocabulary changes nothing."""
    def model(fill):
        def logits(ids, position_ids):
            out = torch.randn(1, 20, 40, generator=torch.Generator().manual_seed(3))
            out = out[0][position_ids].index_fill(2, torch.tensor([M]), fill)
            return out.masked_fill((position_ids < 3)[..., None], fill)
        return logits
    a, b = (SAMPLERS[name](Denoiser(Table(model(fill)), M), [[1, 2, 3]], gen_length=6,
                           block_length=3) for fill in (0.0, math.nan))
    assert torch.equal(a.sequences, b.sequences) and torch.equal(a.nfe, b.nfe)


@every_sampler
def test_logits_that_are_minus_infinity_throughout_are_an_error(name):
    d = Denoiser(Table(lambda ids, at: torch.full((*ids.shape, 40), -math.inf)), M)
    with pytest.raises(ValueError, match="every token is -inf"):
        SAMPLERS[name](d, [[1, 2]], gen_length=4, block_length=4)


@every_sampler
def test_a_processor_that_bans_everything_is_an_error(name):
    d = Denoiser(Table(uniform), M)
    with pytest.raises(ValueError, match="every token is -inf"):
        SAMPLERS[name](d, [[1, 2]], gen_length=4, block_length=4,
                       logits_processor=lambda x, logits: logits.fill_(-math.inf))


@every_sampler
def test_a_model_that_wants_only_the_end_ends(name):
    """All eos: postponed or suppressed, the canvas is filled within the same bounds."""
    def eos(ids, position_ids):
        return torch.zeros(*ids.shape, 40).index_fill(2, torch.tensor([5]), 50.0)
    d = Denoiser(Table(eos), M, eos_ids=(5,))
    for knobs in ({}, dict(postpone_eos=True), dict(suppress_eos=True)):
        out = check(d, name, [[1, 2], [3, M]], dict(gen_length=6, block_length=4, **knobs))
        assert ((out.generated == 5).all() if "suppress_eos" not in knobs
                else (out.generated != 5).all())
    out = SAMPLERS[name](d, [[1, 2]], gen_length=9, block_length=3, early_stop=True)
    assert (out.generated == 5).all() and (out.commit_step[0, 5:] == 0).all()


# -------------------------------------------------- what every sampler does with its arguments

AT_ONCE = {"llada": dict(steps=1), "saber": dict(n=4)}


@every_sampler
def test_every_row_is_sampled_at_a_temperature(name):
    """CASES 5: rows peaked on ids 3 and 7, by their prompts, give 3s and 7s."""
    def peaked(ids, position_ids):
        want = torch.where(ids[:, :1] == 1, 3, 7).expand_as(ids)
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 50.0)
    out = SAMPLERS[name](Denoiser(Table(peaked), M), [[1], [2]], gen_length=4, temperature=1.0,
                         **AT_ONCE.get(name, dict(threshold=0.0)))
    assert out.generated.tolist() == [[3] * 4, [7] * 4]


@every_sampler
def test_a_row_that_is_full_stays_as_it_is(name):
    """CASES 6: B=2, one row without masks."""
    out = SAMPLERS[name](Denoiser(tiny_llama(1), M), [[5, 6, 7], [5, M, M]], gen_length=0)
    assert out.sequences[0].tolist() == [5, 6, 7] and int(out.nfe[0]) == 0 < int(out.nfe[1])
    assert (out.sequences != M).all()


SHARED = [dict(block_length=6), dict(temperature=2.0), dict(suppress_eos=True),
          dict(postpone_eos=True), dict(early_stop=True),
          dict(logits_processor=lambda x, logits: -logits)]
OTHERS = {
    "llada": [dict(steps=8), dict(remasking="margin"), dict(remasking="entropy"),
              dict(remasking="random"), dict(cfg_scale=1.0),
              dict(temperature=2.0, tempered_confidence=True)],
    "fast_dllm": [dict(threshold=.2), dict(factor=1.5), dict(cache="prefix"), dict(cache="dual")],
    "dkv": [dict(threshold=.2), dict(steps=8), dict(refresh=2)],
    "dual_diffusion": [dict(threshold=.2), dict(factor=1.5), dict(draft_steps=1), dict(cache=None),
                       dict(cache="prefix"), dict(cache="dkv"), dict(verify=verify_trust),
                       dict(verify=verify_kl), dict(view="visible"), dict(view="cover"),
                       dict(drafter=Denoiser(tiny_llama(1), M, eos_ids=(8, 12))),
                       dict(max_revisions=0), dict(max_rounds=1), dict(adaptive=True)],
    "wino": [dict(threshold=.2), dict(threshold_back=.3)],
    "saber": [dict(n=5)],
    "cover": [dict(threshold=.3), dict(tau_replace=.2), dict(tau_remask=1.0), dict(max_seeds=1),
              dict(seed_share=.9), dict(min_score=3.5), dict(max_checks=1), dict(spacing=9),
              dict(closing=4), dict(commit_cap=True), dict(remask_limit=False),
              dict(uncertainty="commit"), dict(probe_layers=(0,)),
              dict(cache="dual"), dict(cache="dual", refresh=2),
              dict(score=lambda u, d_in, d_out: 9 - u)],
}
NO_RULE = {"denoiser", "prompt", "attention_mask", "gen_length", "generator", "callback", "history",
           "streamer"}


@every_sampler
@torch.no_grad()
def test_every_keyword_changes_something(name):
    """CASES 27: each value gives another decode than the defaults, and than all others here; no
    keyword of a sampler is missing."""
    d = Denoiser(lively(tiny_llama, 3, dtype=torch.float64), M, eos_ids=(8, 12))
    seen = {}
    base = dict(gen_length=32, block_length=16)
    if name == "cover":
        base = dict(gen_length=48, block_length=48, threshold=.6, tau_remask=.1)
    for knobs in [{}, *SHARED, *OTHERS[name]]:
        out = SAMPLERS[name](d, random_ids(6, 4), **{**base, **knobs},
                             generator=torch.Generator().manual_seed(0))
        what = str((out.sequences.tolist(), out.revisions, out.positions.tolist(),
                    out.commit_step.tolist()))
        assert what not in seen, (knobs, seen[what])
        seen[what] = knobs
    given = {k for knobs in SHARED + OTHERS[name] for k in knobs}
    assert given == inspect.signature(SAMPLERS[name]).parameters.keys() - NO_RULE


@pytest.mark.parametrize("view", ["leave_one_out", "visible", "cover"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_verifier_that_breaks_down_is_an_error(view, bad):
    """Its logits of drafted tokens are looked at as well, where nothing is asked beside them."""
    def model(ids, position_ids):
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(0))
        return torch.full_like(out, bad) if not (ids[:, 2:6] == M).any() else out
    with pytest.raises(ValueError, match="logits are not usable at forward"):
        SAMPLERS["dual_diffusion"](Denoiser(Table(model), M), [[1, 2]], gen_length=4,
                                   block_length=4, threshold=0.0, view=view, max_revisions=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_shadows_that_break_down_are_an_error(bad):
    """WINO: the block's logits are sound, those of the shadows behind the canvas are not."""
    def model(ids, position_ids):
        out = torch.randn(*ids.shape, 40, generator=torch.Generator().manual_seed(0))
        out[:, 10:] = bad
        return out
    with pytest.raises(ValueError, match="logits are not usable at forward 2"):
        SAMPLERS["wino"](Denoiser(Table(model), M), [[1, 2]], gen_length=8, block_length=8,
                         threshold=.9)


def test_a_likelihood_of_unusable_logits_is_an_error():
    d = Denoiser(Table(lambda ids, at: torch.full((*ids.shape, 40), math.nan)), M)
    with pytest.raises(ValueError, match="logits are not usable"):
        log_likelihood(d, [[1]], [[2, 3]], n_samples=4)
