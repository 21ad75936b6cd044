"""Precisions, saturated logits, the smallest and a long canvas, and memory over many decodes."""
import gc
import math
import weakref

import pytest
import torch
from helpers import M, Table, random_ids, tiny_llama, tiny_qwen2
from transformers import LlamaConfig, LlamaForCausalLM

import dlm_spec
from dlm_spec import SAMPLERS, Denoiser

every_sampler = pytest.mark.parametrize("name", SAMPLERS)
VARIANTS = [("llada", dict(cfg_scale=1.0)), ("llada", dict(remasking="entropy")),
            ("fast_dllm", dict(cache="dual", factor=1.0)), ("fast_dllm", dict(cache="prefix")),
            ("dkv", dict(threshold=.5, refresh=3)),
            ("dual_diffusion", dict(view="visible", adaptive=True, cache="dkv", threshold=.1)),
            ("dual_diffusion", dict(view="cover", threshold=.1, verify=dlm_spec.verify_kl)),
            ("dual_diffusion", dict(threshold=.1)),
            ("wino", dict(threshold=.1)), ("saber", {}),
            ("cover", dict(threshold=.1, max_seeds=4, seed_share=1.0, cache="prefix")),
            ("cover", dict(threshold=.1, max_seeds=4, seed_share=1.0, uncertainty="commit"))]
every_variant = pytest.mark.parametrize("name, knobs", VARIANTS, ids=lambda v: str(v))


def sane(out, vocab=40, mask=M):
    """No mask, no banned id, no NaN; probabilities are probabilities."""
    assert ((out.sequences >= 0) & (out.sequences < vocab) & (out.sequences != mask)).all()
    c = out.commit_confidence
    assert c.isfinite().all() and (c <= 1 + 1e-6).all() and out.tokens_per_forward.isfinite().all()
    return out


@every_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_precision_gives_finite_confidences_and_no_mask(name, knobs, dtype):
    """Padded batches and holes; plain and shifted models of two layers."""
    rows = [[1, 2, 3], [4, M]]
    for make, shift in ((tiny_llama, False), (tiny_qwen2, True)):
        d = Denoiser(make(2, dtype=dtype), M, shift=shift)
        sane(SAMPLERS[name](d, rows, gen_length=7, block_length=4, **knobs))


@pytest.fixture(scope="module")
def embedded():
    problem = "Ann has 5 pens. She buys 4 more. Then she loses 2. How many pens does Ann have now?"
    single, double = (dlm_spec.load_denoiser(device="cpu", dtype=t)
                      for t in (torch.float32, torch.float64))
    return single, double, *single.encode(problem)


@every_sampler
def test_double_precision_decodes_a_trained_model_to_the_same_tokens(embedded, name):
    single, double, ids, mask = embedded
    a, b = (SAMPLERS[name](d, ids, attention_mask=mask, gen_length=16, block_length=16)
            for d in (single, double))
    assert torch.equal(a.sequences, b.sequences) and torch.equal(a.nfe, b.nfe)
    assert a.revisions == b.revisions
    assert torch.allclose(a.commit_confidence, b.commit_confidence, atol=1e-4)


def hot(scale, floor):
    """Every position wants (its number % 38) with `scale` against `floor`."""
    def logits(ids, position_ids):
        out = torch.full((*ids.shape, 40), floor)
        return out.scatter(2, (position_ids % 38)[..., None], scale)
    return logits


@every_variant
@pytest.mark.parametrize("scale, floor", [(1e4, 0.0), (1e4, -1e4), (3e38, -3e38), (0.0, -math.inf)])
def test_saturated_logits_are_certain_tokens(name, knobs, scale, floor):
    """1e4, the largest floats, and -inf for all but one: that token, with confidence 1."""
    if floor == -math.inf and knobs.get("cfg_scale"):
        pytest.skip("guidance subtracts -inf from -inf")
    for T in (0.0, 1.0):
        out = sane(SAMPLERS[name](Denoiser(Table(hot(scale, floor)), M), [[1, 2]], gen_length=9,
                                  block_length=5, temperature=T))
        assert out.generated[0].tolist() == [*range(2, 11)]
        assert all(r.old == r.new for r in out.revisions)       # Saber always takes some back
        assert name == "saber" or not out.revisions
        if knobs.get("remasking", "low_confidence") == "low_confidence":
            assert (out.commit_confidence == 1).all()


@every_variant
@pytest.mark.parametrize("vocab, mask", [(2, 1), (2, 0), (3, 2)])
def test_the_smallest_vocabulary_model_and_canvas(name, knobs, vocab, mask):
    """One or two tokens and M; one layer of one head; canvases of one position; blocks of one."""
    config = LlamaConfig(vocab_size=vocab, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None)
    d = Denoiser(LlamaForCausalLM(config), mask, pad_id=1 - min(mask, 1))
    given = 1 - min(mask, 1)
    for rows, G, block in (([[]], 1, 1), ([[mask]], 0, 1), ([[given]], 1, 1), ([[given]], 3, 1),
                           ([[mask, given], [given]], 3, 2)):
        out = sane(SAMPLERS[name](d, rows, gen_length=G, block_length=block, **knobs), vocab, mask)
        assert out.sequences.shape == (len(rows), max(map(len, rows)) + G)


@every_sampler
def test_a_canvas_of_4096_positions(name):
    config = LlamaConfig(vocab_size=40, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, pad_token_id=None,
                         bos_token_id=None, eos_token_id=None, max_position_embeddings=4096)
    d = Denoiser(LlamaForCausalLM(config), M)
    ids = random_ids(1, 4092)
    out = sane(SAMPLERS[name](d, ids, gen_length=4, block_length=4))
    assert torch.equal(out.sequences[:, :4092], ids)


@every_variant
def test_caches_are_freed_when_a_decode_ends(name, knobs, monkeypatch):
    """At once, without the garbage collector: no cycle holds the keys and values."""
    made, KVCache = [], dlm_spec.KVCache

    class Watched(KVCache):
        def __init__(self, *a):
            super().__init__(*a)
            made.append(weakref.ref(self))
    monkeypatch.setattr(dlm_spec, "KVCache", Watched)
    d = Denoiser(tiny_llama(1), M)
    gc.disable()
    try:
        out = SAMPLERS[name](d, [[1, 2]], gen_length=6, block_length=3, **knobs)
        assert not any(ref() is not None for ref in made) and len(out.sequences) == 1
    finally:
        gc.enable()


@every_sampler
def test_two_thousand_decodes_take_no_more_memory_than_two_hundred(name):
    """Resident memory over 300 decodes of each of the seven samplers, after 60 to warm up; a kept
    canvas with its keys and values would be 2 MB each."""
    d = Denoiser(Table(lambda ids, at: torch.zeros(*ids.shape, 40)), M)

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096
    ids = random_ids(1, 3)

    def run(n):
        for _ in range(n):
            SAMPLERS[name](d, ids, gen_length=2, block_length=2)
        gc.collect()
        return resident()
    before = run(60)
    assert run(300) - before < 3 << 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [0, 1, 32, 33, 70])
def test_confidences_a_few_rows_at_a_time_are_those_of_all_at_once(N, dtype):
    """And the entropy is that of its definition, where a probability is 0 as well."""
    logits = (20 * torch.randn(N, 50, generator=torch.Generator().manual_seed(N))).to(dtype)
    logits[:, 7:9] = -torch.inf
    x0 = logits.max(1).indices
    p = logits.to(torch.promote_types(dtype, torch.float32)).softmax(1)
    two = p.topk(2, dim=1).values
    for name, want in (("low_confidence", p.gather(1, x0[:, None])[:, 0]),
                       ("margin", two[:, 0] - two[:, 1]),
                       ("entropy", -torch.special.entr(p).sum(1))):
        got = dlm_spec.confidence_of(logits, x0, name)
        assert got.dtype == p.dtype and got.shape == (N,)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7) and (got <= 1).all()
        assert torch.equal(got, want) or name == "entropy"
