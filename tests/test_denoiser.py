# SPDX-License-Identifier: MIT
"""Section 1, the denoiser: bidirectional attention in a stock model, and a model as a function
of the canvas. On tiny random models and on tables."""
import pytest
import torch
import transformers
from helpers import (
    HEAD_DIM,
    HEADS,
    VOCAB,
    M,
    Table,
    no_mask,
    oracle,
    padded,
    random_ids,
    tiny_llama,
    tiny_qwen2,
    tiny_qwen3,
)

import dlm_spec
from dlm_spec import Denoiser, KVCache

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
    """The bare model with the bidirectional attention."""
    model.set_attn_implementation("dlm_spec")
    return model


def close(a, b, atol=1e-5):
    return torch.allclose(a, b, atol=atol, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# Attention

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
    """The last token reaches position 0; with transformers' own causal attention it does
    not."""
    model, ids = make(2), random_ids(1, 6)
    other = ids.clone()
    other[0, -1] += 1
    model.set_attn_implementation("sdpa")
    causal = model(ids, use_cache=False).logits
    assert torch.equal(causal[:, 0], model(other, use_cache=False).logits[:, 0])
    hooked(model)
    both_ways = model(ids, use_cache=False).logits
    assert (both_ways[:, 0] - model(other, use_cache=False).logits[:, 0]).abs().max() > 1e-2
    assert (both_ways - causal)[:, :-1].abs().amax(-1).min() > 1e-2


@every_model
def test_left_padding_changes_nothing_for_the_row(make):
    """CASES 1: a row alone == left-padded by 5 with its mask, with and without position_ids;
    without the mask not."""
    model, row = hooked(make(2)), random_ids(1, 3)
    ids, visible = padded(row, 8)
    alone = model(row, use_cache=False).logits
    mask, positions = visible[:, None, None], (visible.cumsum(1) - 1).clamp(min=0)
    for kw in ({}, {"position_ids": positions}):
        assert close(model(ids, attention_mask=mask, use_cache=False, **kw).logits[:, 5:],
                     alone, 1e-4)
        assert not close(model(ids, use_cache=False, **kw).logits[:, 5:], alone, 1e-2)


def test_a_two_dimensional_mask_given_to_the_model_itself_is_a_padding_mask():
    """CASES 37: (B, L), as transformers' own callers give it."""
    model, row = hooked(tiny_llama(2)), random_ids(1, 3)
    ids, visible = padded(row, 8)
    got = model(ids, attention_mask=visible.long(), use_cache=False,
                position_ids=(visible.cumsum(1) - 1).clamp(min=0)).logits[:, 5:]
    assert close(got, model(row, use_cache=False).logits, 1e-4)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_queries_that_see_nothing_do_not_spread_nan(make, dtype):
    """CASES 4: two layers, padding rows fully masked by a (B, 1, L, L) mask:
    real rows are finite and unaffected."""
    model = hooked(make(2).to(dtype))
    ids, visible = padded([random_ids(1, 3)[0], random_ids(1, 8)[0]], 8)
    columns = visible[:, None, None]
    plain = model(ids, attention_mask=columns, use_cache=False).logits
    square = model(ids, attention_mask=columns & visible[:, None, :, None],
                   use_cache=False).logits
    assert plain.isfinite().all() and square[visible].isfinite().all()
    assert close(plain[visible].float(), square[visible].float(),
                 1e-5 if dtype == torch.float32 else .05)


def test_the_scaling_of_the_model_is_used():
    """Some models scale scores by something else than 1/sqrt(d): doubling it is doubling q,
    cached or not."""
    model, twice, ids = hooked(tiny_llama(2)), hooked(tiny_llama(2)), random_ids(1, 6)
    for a, b in zip(model.model.layers, twice.model.layers, strict=True):
        a.self_attn.scaling *= 2
        b.self_attn.q_proj.weight *= 2
    want = oracle(twice, ids)[0]
    kv = KVCache(ids)
    kv.begin(torch.arange(1), None, ids)
    assert close(model(ids, use_cache=False).logits, want)
    assert close(model(ids, use_cache=False, kv=kv).logits, want)


@every_model
def test_kv_keyword_reaches_every_layer(make):
    """`model(..., kv=object)` arrives in the hook; keys come with their own number of
    heads."""
    seen = []

    class Spy:
        def attend(self, layer, q, k, v, mask, scaling):
            seen.append((layer, tuple(q.shape), tuple(k.shape), k.shape == v.shape, mask,
                         scaling))
            return torch.zeros_like(q)

    model = make(3)
    hooked(model)(random_ids(2, 5), use_cache=False, kv=Spy())
    heads = model.config.num_key_value_heads
    assert seen == [(n, (2, 4, 5, 8), (2, heads, 5, 8), True, None, 8 ** -.5)
                    for n in range(3)]


# ---------------------------------------------------------------------------------------------
# Models that are accepted, and models that are not

SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
LAYERS = dict(SIZES, intermediate_size=48, num_key_value_heads=2)
EXPERTS = dict(LAYERS, head_dim=HEAD_DIM, num_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=16)


def stock(name, **config):
    """A random transformers model of the architecture `name`."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**config)
    return getattr(transformers, name + "ForCausalLM")(config).eval()


BEHIND_THE_HEAD = {     # what the model does with the logits after its vocabulary head
    "Cohere": (dict(LAYERS, logit_scale=.25), lambda logits: logits * .25),
    "Granite": (dict(LAYERS, logits_scaling=4.0), lambda logits: logits / 4),
    "Gemma2": (dict(LAYERS, head_dim=HEAD_DIM, final_logit_softcapping=.5, pad_token_id=0,
                    attn_logit_softcapping=None, layer_types=["full_attention"] * 2),
               lambda logits: (logits / .5).tanh() * .5)}


@pytest.mark.parametrize("name", BEHIND_THE_HEAD)
def test_what_a_model_does_behind_its_head_is_done(name):
    """Logits that are scaled or capped behind the vocabulary head are those of the model's own
    forward over the whole canvas, at the asked positions of every row."""
    config, behind = BEHIND_THE_HEAD[name]
    model, head = stock(name, **config), []
    x, visible = padded([random_ids(1, 7)[0], random_ids(1, 5, seed=1)[0]], 7)
    ask = torch.zeros(2, 7, dtype=torch.bool)
    ask[[0, 0, 1], [6, 1, 4]] = True
    got = Denoiser(model, M)(x, ask, visible)
    hook = model.get_output_embeddings().register_forward_hook
    with hook(lambda _, args, out: head.append(out)):
        whole = model(x, attention_mask=visible[:, None, None], use_cache=False,
                      position_ids=(visible.cumsum(1) - 1).clamp(min=0)).logits
    assert close(got, no_mask(whole[ask]))
    assert close(whole, behind(head[0])) and not close(whole, head[0], 1e-2)


@pytest.mark.parametrize("name, config", [
    ("Mistral", dict(LAYERS, sliding_window=None)), ("Qwen3Moe", EXPERTS)])
def test_other_models_with_full_attention_are_accepted(name, config):
    """CASES 34: and every token sees every other."""
    denoiser, x = Denoiser(stock(name, **config), M), random_ids(1, 6)
    other, first = x.clone(), torch.arange(6)[None] == 0
    other[0, -1] = (other[0, -1] + 1) % M
    difference = denoiser(x, first)[:, :M] - denoiser(other, first)[:, :M]
    assert difference.abs().max() > 1e-6


@pytest.mark.parametrize("name, config, words", [
    ("Gemma2", dict(LAYERS, head_dim=HEAD_DIM, pad_token_id=0), "sliding_attention"),
    ("Mistral", dict(LAYERS, sliding_window=3), "sliding"),
    ("Qwen3Next", dict(EXPERTS, layer_types=["linear_attention", "full_attention"],
                       shared_expert_intermediate_size=16, linear_num_value_heads=4,
                       linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
     "linear_attention"),
    ("Mamba", dict(SIZES, state_size=4), "Mamba"), ("Falcon", SIZES, "Falcon")],
    ids=["Gemma2", "Mistral", "Qwen3Next", "Mamba", "Falcon"])
def test_models_that_cannot_be_bidirectional_are_refused(name, config, words):
    """CASES 34, 35: sliding windows, recurrent layers, and attention that is not taken from
    transformers' interface and so would stay causal."""
    with pytest.raises(ValueError, match=words):
        Denoiser(stock(name, **config), M)


def test_soft_capped_attention_is_refused():
    """It would silently be left out."""
    model = stock("Gemma2", **dict(LAYERS, head_dim=HEAD_DIM, attn_logit_softcapping=.5,
                                   layer_types=["full_attention"] * 2, pad_token_id=0))
    with pytest.raises(ValueError, match="soft cap"):
        Denoiser(model, M)(random_ids(1, 4), torch.ones(1, 4, dtype=torch.bool))


# ---------------------------------------------------------------------------------------------
# The denoiser

@every_model
@pytest.mark.parametrize("pad", [False, True])
def test_the_asked_positions_come_in_row_major_order(make, pad):
    """(N, V) logits == the full logits indexed with `ask`; the vocabulary head runs on the
    columns that any row asks for, and on no others."""
    model, head_rows = make(2), []
    denoiser = Denoiser(model, M)
    ids, visible = padded([random_ids(1, 7)[0], random_ids(1, 4 if pad else 7, seed=1)[0]], 7)
    ask = torch.zeros(2, 7, dtype=torch.bool)
    ask[[0, 0, 1, 1], [6, 3, 3, 5]] = True
    model.lm_head.register_forward_hook(lambda _, args, out: head_rows.append(args[0].shape))
    got = denoiser(ids, ask, visible if pad else None)
    assert head_rows == [(2, 3, 32)]                        # columns 3, 5 and 6
    want = oracle(model, ids, visible, (visible.cumsum(1) - 1).clamp(min=0))[0]
    assert close(got, no_mask(want)[ask])


def test_any_callable_is_a_model():
    """A table in place of a model gives the table's rows."""
    table, ask = torch.randn(5, 8), torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]).bool()
    got = Denoiser(Table(table), 20)(torch.zeros(2, 5).long(), ask)
    assert torch.equal(got, table[[1, 4, 0]])


def test_the_model_is_given_a_four_dimensional_mask_and_position_ids():
    """transformers drops a 2-D mask in silence for an attention it does not know, so it must
    be (B, 1, 1, L); positions count from a row's first token."""
    x, visible = padded([random_ids(1, 2)[0], random_ids(1, 4)[0]], 4)
    for given in (visible, visible.long()):
        model = Table(torch.zeros(4, VOCAB))
        Denoiser(model, M)(x, visible, given)
        assert torch.equal(model.last["attention_mask"], visible[:, None, None])
        assert model.last["position_ids"].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    Denoiser(model, M)(x, visible)
    assert model.last["attention_mask"] is None


@every_model
@pytest.mark.parametrize("shift", [False, True])
def test_padded_batch_equals_single_rows(make, shift):
    """CASES 1: through the denoiser each row is what it is alone; a plain forward, and a
    shifted one."""
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 8, 5)]
    x, visible = padded(rows, 8)
    denoiser = Denoiser(make(2), M, shift=shift)
    alone = [denoiser(r[None], torch.ones(1, len(r), dtype=torch.bool)) for r in rows]
    assert close(denoiser(x, visible, visible), torch.cat(alone), 1e-4)


def test_mask_and_padded_vocabulary_are_never_predicted():
    """M and ids >= n_tokens are -inf, nothing else is, and the model's own table is left
    alone."""
    table, everywhere = torch.randn(3, 10), torch.ones(1, 3, dtype=torch.bool)
    before = table.clone()
    for mask_id, n_tokens, banned in ((4, 8, [4, 8, 9]), (9, None, [9]), (12, 10, []),
                                      (9, 9, [9])):
        got = Denoiser(Table(table), mask_id, n_tokens=n_tokens)(
            torch.zeros(1, 3).long(), everywhere)
        assert torch.equal(got, before.index_fill(1, torch.tensor(banned).long(), -torch.inf))
        assert torch.equal(table, before)
    model, ids = tiny_llama(1), random_ids(1, 4)
    got = Denoiser(model, 3, n_tokens=30)(ids, torch.ones(1, 4, dtype=torch.bool))
    assert (got == -torch.inf).nonzero()[:, 1].unique().tolist() == [3, *range(30, VOCAB)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_unusable_logits_are_an_error_where_they_are_asked_for(bad):
    """A row of logits with a NaN or +inf, or that is -inf throughout; the same on the mask's
    own id, or at a position that nobody asks for, changes nothing."""
    x, ask = torch.zeros(1, 4).long(), torch.tensor([[False, True, True, False]])
    table = torch.randn(4, VOCAB)
    want = Denoiser(Table(table), M)(x, ask)
    table[0], table[:, M] = bad, bad
    assert torch.equal(Denoiser(Table(table), M)(x, ask), want)
    table[2, 5 if bad != -torch.inf else slice(None)] = bad
    with pytest.raises(ValueError, match="logits cannot be used"):
        Denoiser(Table(table), M)(x, ask)


def test_shift_reads_one_position_earlier():
    """CASES 19: position p of the table says token p+1; a shifted model gives the position, 1
    for its first token, which is read at itself, also behind left padding."""
    table = torch.eye(9)[1:]                                       # (8, 9)
    x, visible = padded([random_ids(1, 6)[0], random_ids(1, 4)[0]], 6)
    shifted, plain = (Denoiser(Table(table), 20, shift=shift) for shift in (True, False))
    assert shifted(x, visible, visible).argmax(1).tolist() == [1, 1, 2, 3, 4, 5] + [1, 1, 2, 3]
    assert plain(x, visible, visible).argmax(1).tolist() == [1, 2, 3, 4, 5, 6] + [1, 2, 3, 4]


@pytest.mark.parametrize("shift", [False, True])
def test_read_columns_are_the_columns_where_positions_are_read(shift):
    """`read_columns` of a set of positions is the set of their `read_at`, whatever the padding."""
    denoiser = Denoiser(Table(torch.zeros(1, 1)), 9, shift=shift)
    generator = torch.Generator().manual_seed(0)
    visible = torch.arange(7) >= torch.tensor([0, 3, 6, 1])[:, None]
    for _ in range(20):
        positions = (torch.rand(4, 7, generator=generator) < .4) & visible
        read_at = denoiser.layout(visible.long(), visible)[3]
        want = torch.zeros_like(positions)
        for row, column in positions.nonzero().tolist():
            want[row, read_at[row, column]] = True
        assert torch.equal(denoiser.read_columns(positions, visible), want)


def hooks_of(model):
    """All hooks that are registered on the model's modules."""
    kinds = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]
    return [hook for m in model.modules() for kind in kinds
            for hook in getattr(m, kind).values()]


def test_a_forward_registers_nothing_on_the_model():
    """Not while it runs, not afterwards, not when it fails; the weights and the forward
    methods are the same, and the model gives full logits as before."""
    found = []

    class Watched(KVCache):
        def attend(self, *args):
            found.append((hooks_of(model),
                          [m for m in model.modules() if "forward" in vars(m)]))
            if len(found) > 2:
                raise RuntimeError("broken")
            return super().attend(*args)

    model, ids = tiny_llama(2), random_ids(2, 5)
    ask = torch.ones(2, 5, dtype=torch.bool)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    want = oracle(model, ids)[0]
    denoiser = Denoiser(model, M)
    dlm_spec.windowed(denoiser, ids, ask, kv=Watched(ids))
    with pytest.raises(RuntimeError, match="broken"):
        dlm_spec.windowed(denoiser, ids, ask, kv=Watched(ids))
    with pytest.raises(IndexError):
        denoiser(ids + VOCAB, ask)
    assert found == [([], [])] * 3 and not hooks_of(model)
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    assert close(model(ids, use_cache=False).logits, want)


def test_dropout_is_switched_off():
    """A model left in training mode is put into evaluation, so that two forwards agree."""
    model = tiny_llama(1).train()
    Denoiser(model, M)
    assert not model.training


def test_padding_filler():
    """Pad with pad_id, else the first eos id, else 0: never with None."""
    model = Table(torch.zeros(1, 1))
    for kw, pad_id in (({"pad_id": 0, "eos_ids": (5,)}, 0), ({"eos_ids": (5, 6)}, 5), ({}, 0)):
        assert Denoiser(model, 9, **kw).pad_id == pad_id


def test_a_missing_mask_id_is_refused():
    """CASES 32: a mask id that the checkpoint's files leave null is an error that says how to
    pass one."""
    with pytest.raises(ValueError, match="mask_id=126336"):
        Denoiser(Table(torch.zeros(1, 1)), None)


def test_nothing_asked_gives_no_logits():
    """(0, V), of a model and of a table."""
    x = random_ids(2, 5)
    nothing = torch.zeros_like(x, dtype=torch.bool)
    for model in (tiny_llama(2), Table(torch.zeros(5, VOCAB))):
        assert Denoiser(model, M)(x, nothing).shape == (0, VOCAB)
