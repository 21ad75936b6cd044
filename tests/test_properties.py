"""What holds for every sampler, every model and every knob."""
import gc
from functools import partial

import pytest
import torch
from helpers import M, Table, random_ids, tiny_llama, tiny_qwen2
from hypothesis import given, settings
from hypothesis import strategies as st

import dlm_spec
from dlm_spec import Denoiser, verify_confidence, verify_kl, verify_trust

UNIT = st.floats(0, 1)
KNOBS = {
    "llada": dict(remasking=st.sampled_from(dlm_spec.REMASKING), steps=st.integers(4, 20)),
    "fast_dllm": dict(threshold=UNIT, cache=st.sampled_from([None, "prefix", "dual"])),
    "dkv": dict(threshold=UNIT, refresh=st.integers(1, 5)),
    "dual_diffusion": dict(
        threshold=UNIT, draft_steps=st.integers(1, 4), adaptive=st.booleans(),
        cache=st.sampled_from([None, "prefix", "dual", "dkv"]), max_revisions=st.integers(0, 3),
        view=st.sampled_from(["visible", "leave_one_out", "cover"]),
        verify=st.one_of(st.just(verify_trust), UNIT.map(lambda t: partial(verify_kl, tau=t)),
                         UNIT.map(lambda t: partial(verify_confidence, tau=t)))),
    "wino": dict(threshold=UNIT, threshold_back=UNIT),
    "saber": dict(n=st.integers(1, 5)),
    "cover": dict(threshold=UNIT, tau_replace=UNIT, tau_remask=UNIT, max_seeds=st.integers(0, 5),
                  seed_share=UNIT, max_checks=st.integers(0, 3),
                  cache=st.sampled_from([None, "prefix", "dual"]),
                  uncertainty=st.sampled_from(["entropy", "commit"])),
}
assert KNOBS.keys() == dlm_spec.SAMPLERS.keys()
every_sampler = pytest.mark.parametrize("name", KNOBS)


@st.composite
def decodes(draw, name):
    """A prompt batch with holes, lengths, and knobs for a sampler."""
    rows = draw(st.lists(st.lists(st.integers(0, M), min_size=1, max_size=5), min_size=1,
                         max_size=3))
    knobs = {k: draw(v) for k, v in KNOBS[name].items()}
    return rows, dict(gen_length=draw(st.integers(1, 12)), block_length=draw(st.integers(3, 12)),
                      **knobs)


def check(denoiser, name, rows, knobs, history=True):
    """Decode and check what must hold; the output comes back."""
    out = dlm_spec.SAMPLERS[name](denoiser, rows, history=history, **knobs)
    G, P = knobs["gen_length"], max(map(len, rows))
    assert out.sequences.shape == (len(rows), P + G) and (out.sequences != M).all()
    for i, row in enumerate(rows):
        given_, got = torch.tensor(row), out.sequences[i, P - len(row):P]
        assert torch.equal(got[given_ != M], given_[given_ != M])
    masks = G + torch.tensor([row.count(M) for row in rows])
    assert (out.nfe <= 2 * (masks + len(out.revisions)) + 2).all()
    # a shown token changes only by a revision
    revised = {(r.row, r.position) for r in out.revisions}
    for a, b in zip(out.history, out.history[1:]):
        changed = ((a != M) & (a != b)).nonzero().tolist()
        assert {tuple(c) for c in changed} <= revised
    assert torch.equal(out.history[-1], out.sequences) and all(r.new >= 0 for r in out.revisions)
    commits = (out.commit_step > 0).sum(1)
    assert torch.equal(commits, masks)
    return out


@every_sampler
def test_every_knob_on_random_models(name):
    """Given tokens stay, nothing is masked or banned, commits and revisions tell the history, the
    number of forwards is bounded; greedy decoding ignores the seed."""
    @settings(max_examples=25, deadline=None)
    @given(decodes(name), st.integers(0, 50), st.booleans())
    def run(case, seed, shift):
        rows, knobs = case
        blocks = -(-knobs["gen_length"] // knobs["block_length"])
        if knobs.get("steps", blocks) < blocks:
            knobs["steps"] = blocks
        d = Denoiser((tiny_qwen2 if shift else tiny_llama)(1, seed=seed), M, shift=shift)
        out = check(d, name, rows, knobs)
        if knobs.get("remasking") != "random":
            again = dlm_spec.SAMPLERS[name](d, rows, **knobs,
                                            generator=torch.Generator().manual_seed(seed))
            assert torch.equal(out.sequences, again.sequences)
    run()


def uniform(ids, position_ids):
    return torch.zeros(*ids.shape, 40)


def wants_the_mask(ids, position_ids):
    return torch.zeros(*ids.shape, 40).index_fill(2, torch.tensor([M]), 50.0)


def one_token(ids, position_ids):
    return torch.zeros(*ids.shape, 40).index_fill(2, torch.tensor([7]), 50.0)


def flips(ids, position_ids):
    """Wants 3 where it sees nothing or 4, and 4 where it sees 3: a check never agrees."""
    want = torch.where(ids == 3, 4, 3)
    return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 9.0)


def moody():
    """Another answer at every call."""
    calls = [0]
    def model(ids, position_ids):
        calls[0] += 1
        want = (position_ids + calls[0]) % 38
        return torch.zeros(*ids.shape, 40).scatter(2, want[..., None], 4.0 + calls[0] % 3)
    return model


@every_sampler
@pytest.mark.parametrize("make", [lambda: uniform, lambda: wants_the_mask, lambda: one_token,
                                  lambda: flips, moody], ids=["uniform", "mask", "one", "flips",
                                                              "moody"])
def test_adversarial_models_end(name, make):
    """CASES 7, 9: bounded forwards, whatever the model says; a Table ignores kv."""
    for threshold in (0.0, 0.3, 0.9, 1.0):
        knobs = {"threshold": threshold} if "threshold" in KNOBS[name] else {}
        d = Denoiser(Table(make()), M)
        for extra in ([{}] if name != "dual_diffusion" else
                      [dict(view=v, verify=lambda j, t, q: torch.ones_like(t, dtype=torch.bool))
                       for v in ("visible", "leave_one_out", "cover")]):
            check(d, name, [[1, 2], [3, M, 4, M]],
                  dict(gen_length=9, block_length=4, **knobs, **extra))


@every_sampler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unusable_logits_are_an_error(name, bad):
    d = Denoiser(Table(lambda ids, at: torch.full((*ids.shape, 40), bad)), M)
    with pytest.raises(ValueError, match="logits are not usable"):
        dlm_spec.SAMPLERS[name](d, [[1, 2]], gen_length=4, block_length=4)


@every_sampler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_precision_and_the_smallest_shapes(name, dtype):
    """One generated token, block 1, one layer; and more."""
    d = Denoiser(tiny_llama(1, dtype=dtype), M)
    for G, block in ((1, 1), (3, 1), (9, 4)):
        check(d, name, [[5]], dict(gen_length=G, block_length=block))


@every_sampler
def test_equal_seeds_reproduce_and_row_generators_make_rows_independent(name):
    """T > 0: the same generators give the same text, in a batch or alone."""
    d = Denoiser(tiny_llama(2, dtype=torch.float64), M)
    rows, knobs = [[1, 2, 3], [4]], dict(gen_length=8, block_length=4, temperature=0.8)
    def seeds():
        return [torch.Generator().manual_seed(i) for i in (3, 4)]
    a, b = (dlm_spec.SAMPLERS[name](d, rows, generator=seeds(), **knobs) for _ in range(2))
    assert torch.equal(a.sequences, b.sequences)
    alone = dlm_spec.SAMPLERS[name](d, rows[1:], generator=seeds()[1:], **knobs)
    assert torch.equal(alone.generated[0], a.generated[1])


@every_sampler
def test_memory_does_not_grow(name):
    """Decoding again and again keeps no tensors."""
    d = Denoiser(tiny_llama(1), M)
    def live():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    run = partial(dlm_spec.SAMPLERS[name], d, random_ids(2, 3), gen_length=6, block_length=3)
    run()
    before = live()
    for _ in range(6):
        run()
    assert live() <= before + 2
