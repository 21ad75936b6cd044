"""The hook, the K/V cache and the denoiser (sections 1 and 2),
on tiny random models and on tables."""
import warnings

import numpy as np
import pytest
import torch
from helpers import VOCAB, M, Table, no_mask, oracle, random_ids, tiny_llama, tiny_qwen2, tiny_qwen3
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedTokenizerFast

import dlm_spec
from dlm_spec import (
    Denoiser,
    KVCache,
    Work,
    load_denoiser,
    sample_cover,
    sample_fast_dllm,
)

NINF = -torch.inf
MODELS = {
    "llama": lambda n: tiny_llama(n),
    "llama_gqa": lambda n: tiny_llama(n, kv_heads=2),
    "llama_mqa": lambda n: tiny_llama(n, kv_heads=1),
    "qwen2_gqa": lambda n: tiny_qwen2(n),
    "qwen3_gqa": lambda n: tiny_qwen3(n),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def hooked(model):
    """The bare model with our attention."""
    model.set_attn_implementation("dlm_spec")
    return model


def padded(rows, L):
    """Rows of ids -> (B, L) left-padded ids and mask; padded with an ordinary token,
    so that seeing it matters."""
    ids = torch.stack([torch.cat([torch.full((L - len(r),), 7), r]) for r in rows])
    return ids, torch.stack([torch.arange(L) >= L - len(r) for r in rows])


def close(a, b, atol=1e-5):
    return torch.allclose(a, b, atol=atol, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# The hook

@every_model
@pytest.mark.parametrize("B", [1, 2])
def test_hooked_model_equals_a_transformer_written_out(make, B):
    """RMSNorm, RoPE, grouped heads, SwiGLU, no causal mask: the stock model with the hook is
    exactly that."""
    model, ids = hooked(make(2)), random_ids(B, 9)
    assert close(model(ids, use_cache=False).logits, oracle(model, ids)[0])
    visible = torch.arange(9) >= torch.tensor([3, 0][:B])[:, None]
    got = model(ids, attention_mask=visible[:, None, None], use_cache=False).logits
    want = oracle(model, ids, visible)[0]
    assert close(got[visible], want[visible])
    assert not close(got[:1, 3:], model(ids, use_cache=False).logits[:1, 3:])


@every_model
def test_attention_is_bidirectional(make):
    """The last token reaches position 0; with transformers' own causal attention it does not."""
    model, ids = make(2), random_ids(1, 6)
    other = ids.clone()
    other[0, -1] += 1
    model.set_attn_implementation("sdpa")
    causal = model(ids, use_cache=False).logits
    assert torch.equal(causal[:, 0], model(other, use_cache=False).logits[:, 0])
    hooked(model)
    ours = model(ids, use_cache=False).logits
    assert (ours[:, 0] - model(other, use_cache=False).logits[:, 0]).abs().max() > 1e-2
    assert (ours - causal)[:, :-1].abs().amax(-1).min() > 1e-2


@every_model
def test_left_padding_changes_nothing_for_the_row(make):
    """CASES 1: a row alone == left-padded by 5 with its mask, with and without position_ids;
    without the mask not."""
    model, row = hooked(make(2)), random_ids(1, 3)
    ids, visible = padded(row, 8)
    alone = model(row, use_cache=False).logits
    mask, positions = visible[:, None, None], (visible.cumsum(1) - 1).clamp(min=0)
    for kw in ({}, {"position_ids": positions}):
        assert close(model(ids, attention_mask=mask, use_cache=False, **kw).logits[:, 5:], alone,
                     1e-4)
        assert not close(model(ids, use_cache=False, **kw).logits[:, 5:], alone, 1e-2)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_queries_that_see_nothing_do_not_spread_nan(make, dtype):
    """CASES 4: two layers, padding rows fully masked by a (B, 1, L, L) mask:
    real rows are finite and unaffected."""
    model = hooked(make(2).to(dtype))
    ids, visible = padded([random_ids(1, 3)[0], random_ids(1, 8)[0]], 8)
    columns = visible[:, None, None]
    plain = model(ids, attention_mask=columns, use_cache=False).logits
    square = model(ids, attention_mask=columns & visible[:, None, :, None], use_cache=False).logits
    assert plain.isfinite().all() and square[visible].isfinite().all()
    assert close(plain[visible].float(), square[visible].float(),
                 1e-5 if dtype == torch.float32 else .05)


@every_model
def test_shadow_tokens_do_not_disturb_the_canvas(make):
    """Appended M tokens with repeated position ids and a 4-D mask: ordinary logits stay;
    on one layer each shadow token gives what a forward with that token masked gives,
    whatever the token (CASES 25)."""
    B, L = 2, 6
    ids, checked = random_ids(B, L), torch.tensor([1, 4])
    both = torch.cat([ids, torch.full((B, 2), M)], 1)
    positions = torch.cat([torch.arange(L), checked]).expand(B, -1)
    look = torch.zeros(L + 2, L + 2, dtype=torch.bool)
    look[:, :L] = True
    look[L:, L:] = torch.eye(2, dtype=torch.bool)
    look[[L, L + 1], checked] = False
    for layers in (1, 2):
        model = hooked(make(layers))
        got = model(both, attention_mask=look.expand(B, 1, -1, -1), position_ids=positions,
                    use_cache=False).logits
        assert close(got[:, :L], model(ids, use_cache=False).logits)
        for s, i in enumerate(checked):
            masked = ids.clone()
            masked[:, i] = M
            assert close(got[:, L + s],
                         model(masked, use_cache=False).logits[:, i]) == (layers == 1)


def test_hook_uses_the_scaling_of_the_model():
    """Some models scale scores by something else than 1/sqrt(d): doubling it is doubling q,
    cached or not."""
    model, twice, ids = hooked(tiny_llama(2)), hooked(tiny_llama(2)), random_ids(1, 6)
    for a, b in zip(model.model.layers, twice.model.layers, strict=True):
        a.self_attn.scaling *= 2
        b.self_attn.q_proj.weight *= 2
    want = oracle(twice, ids)[0]
    assert close(model(ids, use_cache=False).logits, want)
    assert close(model(ids, use_cache=False, kv=KVCache()).logits, want)


@every_model
def test_kv_keyword_reaches_every_layer(make):
    """`model(..., kv=object)` arrives in the hook; keys come with their own number of heads."""
    seen = []

    class Spy:
        def attend(self, layer, q, k, v, mask, scaling):
            seen.append((layer, tuple(q.shape), tuple(k.shape), k.shape == v.shape, mask, scaling))
            return torch.zeros_like(q)

    model = make(3)
    hooked(model)(random_ids(2, 5), use_cache=False, kv=Spy())
    heads = model.config.num_key_value_heads
    assert seen == [(n, (2, 4, 5, 8), (2, heads, 5, 8), True, None, 8 ** -.5) for n in range(3)]


# ---------------------------------------------------------------------------------------------
# The K/V cache

def window(positions, L):
    """(B, n) columns -> (B, L) bool."""
    return torch.zeros(len(positions), L, dtype=torch.bool).scatter(1, positions, True)


@every_model
def test_window_of_unchanged_tokens_equals_the_full_forward(make):
    """Different, unsorted columns per row, one of them twice, with padding: the logits are those of
    a full forward, in row-major order of `ask`; the stored keys stay unrepeated."""
    model = make(3)
    denoiser, kv = Denoiser(model, M), KVCache()
    ids, visible = padded([random_ids(1, 9)[0], random_ids(1, 7, seed=1)[0]], 9)
    full = denoiser(ids, visible, visible, kv=kv)
    want = no_mask(oracle(model, ids, visible, visible.cumsum(1) - 1)[0])
    assert close(full, want[visible])
    positions = torch.tensor([[8, 2, 0, 5], [7, 3, 6, 7]])
    ask = window(positions, 9)
    ask[0, 5] = False
    got = denoiser(ids, ask, visible, kv=kv, window=window(positions, 9))
    assert got.shape == (6, VOCAB) and close(got, want[ask])
    heads = model.config.num_key_value_heads
    assert [t.shape for t in (*kv.k.values(), *kv.v.values())] == [(2, heads, 9, 8)] * 6


@every_model
def test_stored_keys_are_not_rotated_twice(make):
    """CASES 20: storing the same tokens again, window after window,
    leaves the cache and all logits as they were."""
    model, ids = make(2), random_ids(2, 8)
    denoiser, kv, everywhere = Denoiser(model, M), KVCache(), torch.ones(2, 8, dtype=torch.bool)
    full = denoiser(ids, everywhere, kv=kv).view(2, 8, -1)
    k, v = ([t.clone() for t in side.values()] for side in (kv.k, kv.v))
    for columns in ([4, 5, 6, 7], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]):
        positions = torch.tensor(columns).expand(2, -1)
        got = denoiser(ids, window(positions, 8), kv=kv, window=window(positions, 8))
        assert close(got, full[window(positions, 8)])
    assert all(close(a, b) for a, b in zip(k + v, (*kv.k.values(), *kv.v.values()), strict=True))


@every_model
def test_cache_is_exact_on_one_layer_and_approximate_on_two(make):
    """CASES 18: after a token of the window changed, one layer gives the full forward's
    logits, two do not."""
    ids, positions = random_ids(2, 8), torch.tensor([[2, 3, 4], [5, 6, 7]])
    ask, changed = window(positions, 8), ids.clone()
    changed[[0, 1], [3, 5]] += 1
    for layers in (1, 2):
        model, kv = make(layers), KVCache()
        denoiser = Denoiser(model, M)
        denoiser(ids, torch.ones_like(ask), kv=kv)
        got = denoiser(changed, ask, kv=kv, window=ask)
        assert close(got, no_mask(oracle(model, changed)[0])[ask]) == (layers == 1)


@every_model
def test_cache_equals_stale_keys_written_out(make):
    """CASES 18: three layers, several windows in a row, tokens changing each time, with
    padding: the logits are those of a slow forward in which every other column keeps its old
    keys and values."""
    model, kv = make(3), KVCache()
    denoiser = Denoiser(model, M)
    ids, visible = padded([random_ids(1, 8)[0], random_ids(1, 5, seed=1)[0]], 8)
    position_ids = (visible.cumsum(1) - 1).clamp(min=0)
    denoiser(ids, visible, visible, kv=kv)
    stale = oracle(model, ids, visible, position_ids)[1]
    for columns in ([[2, 3, 4], [5, 6, 7]], [[4, 0, 7], [3, 4, 5]], [[1, 2, 3], [7, 6, 4]]):
        positions = torch.tensor(columns)
        ask = window(positions, 8)
        ids[[0, 1], positions[:, 1]] = (ids[[0, 1], positions[:, 1]] + 5) % M
        want, stale = oracle(model, ids, visible, position_ids, stale, ask)
        got = denoiser(ids, ask, visible, kv=kv, window=ask)
        assert close(got, no_mask(want)[ask])
        assert not close(got, no_mask(oracle(model, ids, visible, position_ids)[0])[ask], 1e-3)


def test_full_forward_refreshes_a_used_cache():
    """After windows, a forward without `window` recomputes everything,
    also on a longer canvas."""
    model, kv = tiny_llama(2), KVCache()
    denoiser, positions = Denoiser(model, M), torch.tensor([[1, 2], [3, 4]])
    denoiser(random_ids(2, 6), window(positions, 6), kv=kv)
    denoiser(random_ids(2, 6), window(positions, 6), kv=kv, window=window(positions, 6))
    for L in (6, 8):
        ids, everywhere = random_ids(2, L, seed=L), torch.ones(2, L, dtype=torch.bool)
        assert close(denoiser(ids, everywhere, kv=kv), no_mask(oracle(model, ids)[0])[everywhere])


@every_model
def test_rows_that_ask_for_nothing_keep_their_cache(make):
    """Idle rows are not forwarded and their keys stay bitwise; the others see the same as in a
    batch of their own; a storing forward of some rows serves later windows of those rows."""
    model, ids = make(2), random_ids(3, 6)
    denoiser, kv, alone = Denoiser(model, M), KVCache(), KVCache()
    everywhere = torch.ones(3, 6, dtype=torch.bool)
    some = everywhere.clone()
    some[1] = False
    denoiser(ids, some, kv=kv)
    denoiser(ids[[0, 2]], everywhere[:2], kv=alone)
    ids[:, 2] = (ids[:, 2] + 3) % M
    before = [t[0].clone() for t in (*kv.k.values(), *kv.v.values())]
    last = torch.zeros_like(some)
    last[2, 2:4] = True
    got = denoiser(ids, last, kv=kv, window=last)
    both = torch.zeros_like(some[:2])
    both[1, 2:4] = True
    assert close(got, denoiser(ids[[0, 2]], both, kv=alone, window=both))
    assert all(torch.equal(a, t[0]) for a, t in zip(before, (*kv.k.values(), *kv.v.values()),
                                                    strict=True))


def test_asking_outside_the_window_is_an_error():
    """Logits that this forward does not compute cannot be read."""
    denoiser, kv, ids = Denoiser(tiny_llama(1), M), KVCache(), random_ids(1, 6)
    ask = window(torch.tensor([[4]]), 6)
    denoiser(ids, ask, kv=kv)
    with pytest.raises(ValueError, match="outside the window"):
        denoiser(ids, ask, kv=kv, window=window(torch.tensor([[2, 3]]), 6))


# ---------------------------------------------------------------------------------------------
# The denoiser

@every_model
@pytest.mark.parametrize("pad", [False, True])
def test_denoiser_gives_the_asked_rows_in_row_major_order(make, pad):
    """(N, V) logits == the full logits indexed with `ask`; the vocabulary head runs on N
    rows and no more."""
    model, head_rows = make(2), []
    denoiser = Denoiser(model, M)
    ids, visible = padded([random_ids(1, 7)[0], random_ids(1, 4 if pad else 7, seed=1)[0]], 7)
    ask = torch.zeros(2, 7, dtype=torch.bool)
    ask[[0, 0, 1, 1], [6, 1, 3, 5]] = True
    model.lm_head.register_forward_hook(
        lambda _, args, out: head_rows.append((args[0].shape, out.shape)))
    got = denoiser(ids, ask, visible if pad else None)
    assert head_rows == [((4, 32), (4, VOCAB))]
    want = oracle(model, ids, visible, (visible.cumsum(1) - 1).clamp(min=0))[0]
    assert close(got, no_mask(want)[ask])


def test_denoiser_takes_any_callable():
    """A table in place of a model gives the table's rows."""
    table, ask = torch.randn(5, 8), torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]).bool()
    got = Denoiser(Table(table), 20)(torch.zeros(2, 5).long(), ask)
    assert torch.equal(got, table[[1, 4, 0]])


def test_rows_that_ask_for_nothing_are_not_forwarded():
    """Three rows, the middle one full: two canvases go through the model,
    and each keeps its own logits and mask."""
    model = Table(lambda ids, positions: torch.nn.functional.one_hot(ids, 10).float()
                  + positions[..., None])
    x, ask = (torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
              torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 1]]).bool())
    visible = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]]).bool()
    got = Denoiser(model, 0)(x, ask, visible)
    assert model.rows == 2 and got.argmax(1).tolist() == [2, 9]
    assert torch.equal(model.last["attention_mask"], visible[[0, 2], None, None])
    assert model.last["position_ids"].tolist() == [[0, 0, 1], [0, 1, 2]]


def test_denoiser_gives_a_four_dimensional_mask():
    """transformers drops a 2-D mask in silence for an attention it does not know,
    so it must be (B, 1, 1, L)."""
    x, visible = padded([random_ids(1, 2)[0], random_ids(1, 4)[0]], 4)
    for given in (visible, visible.long()):
        model = Table(torch.zeros(4, VOCAB))
        for cfg_scale, B in ((0., 2), (1., 4)):
            Denoiser(model, M)(x, visible, given, cfg_scale=cfg_scale, given=visible)
            assert model.last["attention_mask"].shape == (B, 1, 1, 4)
            assert model.last["attention_mask"].dtype == torch.bool


@every_model
def test_padded_batch_equals_single_rows(make):
    """CASES 1: through the denoiser, with guidance and with the shift too,
    each row is what it is alone."""
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 8, 5)]
    x, visible = padded(rows, 8)
    for kw in ({}, {"cfg_scale": 1.5}):
        for shift in (False, True):
            denoiser = Denoiser(make(2), M, shift=shift)
            got = denoiser(x, visible, visible, given=visible, **kw)
            everywhere = [torch.ones(1, len(r), dtype=torch.bool) for r in rows]
            want = [denoiser(r[None], e, given=e, **kw)
                    for r, e in zip(rows, everywhere, strict=True)]
            assert close(got, torch.cat(want), 1e-4)


def test_mask_and_padded_vocabulary_are_never_predicted():
    """M and ids >= n_tokens are -inf, nothing else is, and the model's own table is left alone."""
    table, everywhere = torch.randn(3, 10), torch.ones(1, 3, dtype=torch.bool)
    before = table.clone()
    for mask_id, n_tokens, banned in ((4, 8, [4, 8, 9]), (9, None, [9]), (12, 10, []), (9, 9, [9])):
        got = Denoiser(Table(table), mask_id, n_tokens=n_tokens)(
            torch.zeros(1, 3).long(), everywhere)
        assert torch.equal(got, before.index_fill(1, torch.tensor(banned).long(), NINF))
        assert torch.equal(table, before)
    model, ids = tiny_llama(1), random_ids(1, 4)
    got = Denoiser(model, 3, n_tokens=30)(ids, torch.ones(1, 4, dtype=torch.bool))
    assert (got == NINF).nonzero()[:, 1].unique().tolist() == [3, *range(30, VOCAB)]


def test_shift_reads_one_position_earlier():
    """CASES 19: position p of the table says token p+1; a shifted model gives the
    position, 1 for its first token, which is read at itself, also behind left padding;
    the same through a cached window."""
    table = torch.eye(9)[1:]                                       # (8, 9)
    x, visible = padded([random_ids(1, 6)[0], random_ids(1, 4)[0]], 6)
    model = Table(table)
    denoiser, plain = Denoiser(model, 20, shift=True), Denoiser(model, 20)
    assert denoiser(x, visible, visible).argmax(1).tolist() == [1, 1, 2, 3, 4, 5] + [1, 1, 2, 3]
    assert plain(x, visible, visible).argmax(1).tolist() == [1, 2, 3, 4, 5, 6] + [1, 2, 3, 4]
    ask = window(torch.tensor([[3, 4], [4, 5]]), 6)
    got = denoiser(x, ask, visible, kv=KVCache(), window=ask)
    assert got.argmax(1).tolist() == [3, 4, 2, 3]


@every_model
def test_shifted_window_equals_the_full_forward(make):
    """A real model, shifted, padded, through a window: the row that is read is the one before."""
    model, kv = make(2), KVCache()
    denoiser = Denoiser(model, M, shift=True)
    ids, visible = padded([random_ids(1, 8)[0], random_ids(1, 5, seed=1)[0]], 8)
    full = denoiser(ids, visible, visible, kv=kv)
    ask = torch.zeros(2, 8, dtype=torch.bool)
    ask[[0, 0, 1, 1, 1], [3, 6, 3, 4, 7]] = True                   # (1, 3) is its row's first token
    assert close(denoiser(ids, ask, visible, kv=kv, window=ask), full[ask[visible]])


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("scale", [1., -.5, 2.5])
def test_guidance_on_a_table(pad, scale):
    """CASES 3: B=2, with and without a mask: u + (s+1)(c-u), where u sees the given tokens as M."""
    c, u = torch.randn(6, 10), torch.randn(6, 10)

    def logits(ids, positions):
        return torch.where((ids == 9).all(1)[:, None, None], u[positions], c[positions])

    x = torch.tensor([[1, 2, 3, 9, 9, 9], [5, 4, 3, 9, 9, 9]])
    visible = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1] if pad else [1] * 6]).bool()
    given, ask = x != 9, x == 9
    model = Table(logits)
    got = Denoiser(model, 9)(x, ask, visible if pad else None, cfg_scale=scale, given=given)
    at = torch.cat([torch.arange(3, 6), torch.arange(1, 4) if pad else torch.arange(3, 6)])
    want = (u + (scale + 1) * (c - u)).index_fill(1, torch.tensor([9]), NINF)[at]
    assert close(got, want) and model.calls == 1 and model.rows == 4


def test_guidance_without_given_or_with_a_cache_is_refused():
    """Guidance needs to know what to mask, and its two canvases do not share one cache."""
    denoiser, x, ask = (Denoiser(tiny_llama(1), M), random_ids(1, 4),
                        torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="given"):
        denoiser(x, ask, cfg_scale=1.)
    with pytest.raises(ValueError, match="kv"):
        denoiser(x, ask, cfg_scale=1., given=ask, kv=KVCache())


def test_work_counts_rows_without_padding():
    """nfe and positions per row, real tokens only; rows that ask for nothing stay;
    guidance counts two forwards."""
    denoiser = Denoiser(Table(torch.zeros(6, 10)), 9)
    x, visible = padded([random_ids(1, n, vocab=9)[0] for n in (6, 4, 5)], 6)
    work = Work(torch.zeros(3).long(), torch.zeros(3).long())
    ask = torch.zeros(3, 6, dtype=torch.bool)
    ask[[0, 1], [5, 5]] = True
    denoiser(x, ask, visible, work=work)
    assert (work.nfe.tolist(), work.positions.tolist(), work.calls) == ([1, 1, 0], [6, 4, 0], 1)
    denoiser(x, ask, visible, work=work, cfg_scale=.5, given=visible)
    assert (work.nfe.tolist(), work.positions.tolist(), work.calls) == ([3, 3, 0], [18, 12, 0], 2)
    denoiser(x, ask, work=work)
    assert (work.nfe.tolist(), work.positions.tolist(), work.calls) == ([4, 4, 0], [24, 18, 0], 3)
    ask = window(torch.tensor([[4, 5], [4, 5], [4, 5]]), 6)
    denoiser(x, ask, visible, work=work, kv=KVCache(), window=ask)
    assert (work.nfe.tolist(), work.positions.tolist(), work.calls) == ([5, 5, 1], [26, 20, 2], 4)


def test_model_is_unchanged_afterwards():
    """No hook stays on the head, not even when the forward fails; the weights are the same;
    full logits come back."""
    class Broken(KVCache):
        def attend(self, *_):
            raise RuntimeError("broken")

    model, ids, ask = tiny_llama(2), random_ids(2, 5), torch.ones(2, 5, dtype=torch.bool)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    denoiser = Denoiser(model, M)
    want = oracle(model, ids)[0]
    denoiser(ids, ask)
    with pytest.raises(RuntimeError, match="broken"):
        denoiser(ids, ask, kv=Broken())
    with pytest.raises(IndexError):
        denoiser(ids + VOCAB, ask)
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert not hooks
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert close(model(ids, use_cache=False).logits, want)


def test_denoiser_switches_dropout_off():
    """A model left in training mode is put into evaluation, so that two forwards agree."""
    model = tiny_llama(1).train()
    Denoiser(model, M)
    assert not model.training


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_places_are_those_of_nonzero_without_asking_for_their_number(share):
    ask = torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) < share
    part = ask & (torch.arange(7) % 2 == 0)
    for flag in (ask, part, ask[0]):
        got = dlm_spec.places(flag, int(flag.sum()))
        assert all(map(torch.equal, got, flag.nonzero(as_tuple=True)))
    assert torch.equal(dlm_spec.among(part, ask, int(part.sum())), part[ask].nonzero()[:, 0])


def test_ids_of_numpy_are_ids():
    d = Denoiser(Table(torch.randn(4, VOCAB)), np.int64(3), eos_ids=np.array([1, 2]))
    assert (d.mask_id, d.eos_ids) == (3, (1, 2)) and type(d.mask_id) is type(d.eos_ids[0]) is int


@pytest.mark.parametrize("mask_id", [None, -1, True, 3.0, "5"])
def test_a_missing_mask_id_is_refused(mask_id):
    """CASES 32: a mask id that the checkpoint's files leave null is an error that says
    how to pass one."""
    with pytest.raises(ValueError, match="mask_id=126336"):
        Denoiser(Table(torch.zeros(1, 1)), mask_id)


def test_padding_filler():
    """Pad with pad_id, else the first eos id, else 0: never with None."""
    model = Table(torch.zeros(1, 1))
    for kw, pad_id in (({"pad_id": 0, "eos_ids": (5,)}, 0), ({"eos_ids": (5, 6)}, 5), ({}, 0)):
        assert Denoiser(model, 9, **kw).pad_id == pad_id


# ---------------------------------------------------------------------------------------------
# Text in, text out

WORDS = ["<unk>", "<eos>", "<user>", "<bot>", "<sys>", "how", "many", "apples", "two", "are",
         "left", "<pad>"]
TEMPLATE = ("{% for m in messages %}"
            "{{ '<user>' if m.role == 'user' else '<sys>' if m.role == 'system' else '<bot>' }} "
            "{{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}")


def talker(template=TEMPLATE):
    """A denoiser with a word-level tokenizer of twelve words."""
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="<unk>", eos_token="<eos>",
                                  pad_token="<pad>")
    tok.chat_template = template
    return Denoiser(Table(torch.zeros(1, 1)), 20, eos_ids=(1,), pad_id=11, tokenizer=tok)


def words(ids, mask):
    """Rows as words, and nothing but padding outside the mask."""
    assert mask.dtype == torch.bool and ids.dtype == torch.long and (ids[~mask] == 11).all()
    return [" ".join(WORDS[t] for t in row[m].tolist()) for row, m in zip(ids, mask, strict=True)]


def test_encode_takes_text_messages_and_lists_of_them():
    """A str becomes a user message; messages go through the template as they are;
    lists give one row each."""
    d = talker()
    chat = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "two"},
            {"role": "user", "content": "apples"}]
    talk = "<user> how many <bot> two <user> apples <bot>"
    assert words(*d.encode("how many apples")) == ["<user> how many apples <bot>"]
    assert words(*d.encode("how many", system="two apples")) == [
        "<sys> two apples <user> how many <bot>"]
    assert words(*d.encode(chat)) == [talk]
    assert words(*d.encode(["apples", "how many"])) == [
        "<user> apples <bot>", "<user> how many <bot>"]
    assert words(*d.encode([chat, chat[:1], "left"])) == [
        talk, "<user> how many <bot>", "<user> left <bot>"]
    assert words(*d.encode("how many", chat=False)) == ["how many"]
    assert words(*talker(template=None).encode("how many")) == ["how many"]


def test_encode_pads_on_the_left():
    """Rows of 3 and 5 tokens end in the same column."""
    ids, mask = talker().encode(["apples", "how many are"])
    assert ids.shape == (2, 5) and mask.tolist() == [[False, False, True, True, True], [True] * 5]
    assert ids[:, -1].tolist() == [3, 3]


def test_encode_warns_of_unknown_words():
    """The words the model will not see are worth a warning that names the prompt;
    known ones are not."""
    with pytest.warns(UserWarning, match="prompt 1 .*<unk>"):
        talker().encode(["how many", "how many pears"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        talker().encode("how many apples")


@pytest.mark.parametrize("text", ["", "  \n", [], ["apples", ""], [[]], None], ids=repr)
def test_empty_prompts_are_refused(text):
    """No text is an error, in a list too."""
    with pytest.raises(ValueError, match=r"empty|expected a str"):
        talker().encode(text)


def test_system_that_would_be_ignored_is_refused():
    """`system` has a place only in front of a str in a chat template:
    elsewhere it is an error, not silence."""
    for d, text, kw in ((talker(), [{"role": "user", "content": "how"}], {}),
                        (talker(), "how", {"chat": False}), (talker(template=None), "how", {})):
        with pytest.raises(ValueError, match="system"):
            d.encode(text, system="two", **kw)


def test_decode_stops_at_the_first_eos():
    """Trimmed at eos unless asked not to, as whole rows with eos on the left want; a single row
    and tensors are fine; special tokens are not text."""
    d = talker()
    assert d.decode(torch.tensor([[5, 6, 1, 7], [5, 11, 7, 8], [1, 5, 6, 7]])) == [
        "how many", "how apples two", ""]
    assert d.decode([[5, 6, 1, 7]], trim=False) == ["how many apples"]
    assert d.decode([[1, 1, 5, 6, 1]]) == [""]
    assert d.decode([[1, 1, 5, 6, 1]], trim=False) == ["how many"]
    assert d.decode([5, 6]) == ["how many"] and d.decode(torch.tensor([5, 6])) == ["how many"]
    assert d.decode(torch.zeros(2, 0).long()) == ["", ""]
    assert d.decode([[5, 6], [7]]) == d.decode([torch.tensor([5, 6]), [7]]) == [
        "how many", "apples"]


def test_text_without_a_tokenizer_is_an_error():
    """Both directions say what is missing."""
    d = Denoiser(Table(torch.zeros(1, 1)), 9)
    with pytest.raises(ValueError, match="tokenizer"):
        d.encode("how many")
    with pytest.raises(ValueError, match="tokenizer"):
        d.decode([[1, 2]])


def test_attention_that_the_hook_does_not_do_is_refused():
    """Soft-capped logits and sliding windows would silently be left out."""
    config = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    capped = Gemma2ForCausalLM(Gemma2Config(attn_logit_softcapping=.5, **config,
                                            layer_types=["full_attention"] * 2))
    with pytest.raises(ValueError, match="soft-capped"):
        Denoiser(capped, M)(random_ids(1, 4), torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="sliding_attention"):
        Denoiser(Gemma2ForCausalLM(Gemma2Config(**config)), M)


@pytest.mark.parametrize("shift", [False, True])
def test_parts_of_one_forward_are_what_each_alone_would_get(shift):
    """A tuple of canvases is one forward over their union; parts may overlap, be empty, be all."""
    d, x = Denoiser(tiny_llama(2), M, shift=shift), random_ids(3, 8)
    one = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) < .4
    one[1] = False
    two, none = one & (torch.arange(8) % 2 == 0), one & False
    record = dlm_spec.Recorder(x, one | True, 0)
    got = d(x, (one, two, none), work=record.work)
    assert record.work.nfe.tolist() == [1, 0, 1] and record.work.calls == 1
    assert torch.equal(got[0], d(x, one)) and close(got[1], d(x, two)) and len(got[2]) == 0
    left, right = d(x, (two, one & ~two))
    assert close(left, got[1]) and close(right, d(x, one & ~two))
    alone, = d(x, (one,))
    assert torch.equal(alone, got[0])


def test_wrong_parts_are_named():
    d, x = Denoiser(tiny_llama(1), M), random_ids(2, 5)
    ask = torch.ones_like(x, dtype=torch.bool)
    for parts in ((ask, ask[:1]), (ask, x), (x, ask)):
        with pytest.raises(ValueError, match=r"ask is .* expected bool, both"):
            d(x, parts)
    with pytest.raises(ValueError, match="ask is an empty tuple"):
        d(x, ())


def test_nothing_asked_is_no_forward():
    d, x = Denoiser(tiny_llama(2), M), random_ids(2, 5)
    none = torch.zeros_like(x, dtype=torch.bool)
    work = dlm_spec.Recorder(x, ~none, 0).work
    for logits in (d(x, none, work=work), *d(x, (none, none), work=work),
                   *d.leave_one_out(x, none, none, work=work)):
        assert logits.shape == (0, d.n_embeddings)
    assert work.calls == 0 and work.nfe.tolist() == [0, 0]
    assert len(Denoiser(Table(torch.zeros(5, VOCAB)), M)(x, none)) == 0


def test_unusable_logits_have_no_confidence():
    """NaN, +inf or all -inf in one candidate: NaN there, and the other's number is its own."""
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[0, 3 if bad != -torch.inf else slice(None)] = bad
        for remasking in dlm_spec.REMASKING:
            g = [torch.Generator().manual_seed(1) for _ in range(2)]
            c, want = (dlm_spec.predict(t, remasking=remasking, generator=h)[1]
                       for t, h in zip((broken, logits), g))
            assert c[0].isnan() and c[1] == want[1]


def test_misuse_of_the_denoiser_is_named():
    denoiser, ask = Denoiser(tiny_llama(1), M), torch.ones(1, 4, dtype=torch.bool)
    for kv in (None, KVCache()):
        with pytest.raises(ValueError, match="a kv that an earlier forward has filled"):
            denoiser(random_ids(1, 4), ask, kv=kv, window=ask)
    with pytest.raises(ValueError, match="mask_id is 60, but the model has 40 embeddings"):
        Denoiser(tiny_llama(1), 60)
    with pytest.raises(ValueError, match="pad_id is 70"):
        Denoiser(tiny_llama(1), M, pad_id=70)


def test_a_compiled_model_gives_the_same_tokens_and_compiles_once():
    """A forward is one graph, without a break; a second decode adds none, not even of other sizes,
    but for those where a size is 1."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    eager, compiled = (Denoiser(tiny_qwen2(1), M, shift=True) for _ in range(2))
    compiled.compile(backend=backend, fullgraph=True)
    for sampler, knobs, more in ((sample_fast_dllm, dict(cache="dual"), 0),
                                 (sample_cover, dict(threshold=0.2), 3)):
        found = []
        for P, gen_length in ((6, 16), (6, 16), (9, 24)):
            prompts = [*random_ids(1, P), *random_ids(1, P - 2)]
            want, got = (sampler(d, prompts, gen_length=gen_length, block_length=8, **knobs)
                         for d in (eager, compiled))
            assert torch.equal(want.sequences, got.sequences)
            found.append(len(graphs))
        assert found[0] == found[1], sampler
        assert found[2] <= found[1] + more, sampler
    assert 3 < len(graphs) < 16


def test_options_of_compile_reach_it_even_when_there_are_none(monkeypatch):
    asked = []
    monkeypatch.setattr(Denoiser, "compile", lambda self, **options: asked.append(options))
    for compile in (False, True, {}, dict(mode="default")):
        load_denoiser(device="cpu", compile=compile)
    assert asked == [{}, {}, dict(mode="default")]
    with pytest.raises(ValueError, match="compile is 'yes'"):
        load_denoiser(device="cpu", compile="yes")


def test_a_plain_callable_is_not_compiled():
    with pytest.raises(ValueError, match="plain callable"):
        Denoiser(Table(torch.randn(4, VOCAB)), M).compile()
