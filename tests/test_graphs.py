# SPDX-License-Identifier: MIT
"""CUDA graphs: with a device the real ones, without one their stand-in (graphs.py)."""
import gc
import weakref

import pytest
import torch
from devices import FakeCuda
from graphs import capture
from helpers import M, random_ids, tiny_llama, tiny_qwen2

import dlm_spec
from dlm_spec import CudaGraphs, Denoiser, KVCache, load_denoiser

DECODES = [
    ("llada", dict(steps=9)), ("llada", dict(steps=9, cfg_scale=.5)),
    *(("fast_dllm", dict(threshold=.3, cache=cache)) for cache in (None, "prefix", "dual")),
    ("dkv", dict(threshold=.3, refresh=4)), ("wino", dict(threshold=.2)), ("saber", {}),
    *(("dual_diffusion", dict(threshold=.3, view=view, draft_steps=2))
      for view in ("leave_one_out", "cover", "visible")),
    *(("cover", dict(threshold=.2, cache=cache, tau_remask=.9, closing=2))
      for cache in (None, "prefix", "dual"))]


def graphed(denoiser):
    """The denoiser, and its CudaGraphs."""
    layers = denoiser.model.base_model
    layers.forward = CudaGraphs(layers.forward)
    return denoiser, layers.forward


def lively(make, shift=False):
    """A small model whose tokens differ."""
    model = make(2, seed=1)
    model.lm_head.weight.data.mul_(25)
    return Denoiser(model, M, shift=shift)


@pytest.fixture
def captured(monkeypatch):
    """A list that grows by one with each capture."""
    found = []

    def watch(forward, device, pool=None):
        found.append(pool)
        return capture(forward, device, pool)
    monkeypatch.setattr(dlm_spec, "capture", watch)
    return found


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("name, knobs", DECODES, ids=str)
def test_a_replayed_decode_is_the_decode(name, knobs, make, shift, captured):
    """Same tokens, forwards, confidences, revisions, to the last bit; rows that end early and
    prompts of several lengths included. A third decode of a size captures nothing more."""
    plain, (fast, graphs) = lively(make, shift), graphed(lively(make, shift))
    for P, G in ((9, 24), (6, 24), (6, 24), (6, 24)):
        rows = [*random_ids(1, P), *random_ids(1, P - 3), *random_ids(1, P - 1)]
        before = len(captured)
        want, got = (dlm_spec.SAMPLERS[name](d, rows, gen_length=G, block_length=12, **knobs)
                     for d in (plain, fast))
        for field in ("sequences", "nfe", "positions", "commit_step", "commit_confidence"):
            assert torch.equal(getattr(want, field), getattr(got, field)), field
        assert want.revisions == got.revisions and want.calls == got.calls
    assert len(captured) == before > 0 and len(graphs.canvases) <= 4


def test_two_caches_that_take_turns_keep_their_keys_and_values(captured):
    """They share one set of buffers, which changes hands with copies."""
    plain, (fast, _) = lively(tiny_llama), graphed(lively(tiny_llama))
    xs = [random_ids(2, 12, seed=seed) for seed in (0, 1)]
    ask = torch.zeros(2, 12, dtype=torch.bool)
    ask[:, 4:7] = True
    with torch.no_grad():
        found = []
        for d in (plain, fast):
            kvs, logits = (KVCache(), KVCache()), []
            for kv, x in zip(kvs, xs):
                d(x, ask, kv=kv)
            for step in range(8):
                i = step % 2 if step < 4 else step // 2 % 2
                logits.append(d(xs[i].masked_fill(ask & (torch.arange(12) == 4 + step % 3), M), ask,
                                kv=kvs[i], window=ask))
            found.append(logits)
            keys = [kvs[0].k[0].clone(), kvs[1].k[0].clone()]
            assert not torch.equal(*keys)
    assert captured and all(map(torch.equal, *found))


def test_buffers_and_graphs_of_the_last_few_sizes_are_kept(captured):
    fast, graphs = graphed(lively(tiny_llama))
    for P in (3, 4, 5, 6, 3, 7):
        dlm_spec.sample_fast_dllm(fast, random_ids(1, P), gen_length=8, block_length=8,
                                  cache="dual", threshold=.99)
    assert [L for *_, L in graphs.canvases] == [13, 14, 11, 15]


def decode(d, seed=0, **more):
    """A decode that depends on everything: rows of several lengths, attention maps, a cache."""
    rows = [*random_ids(1, 9, seed=seed), *random_ids(1, 6, seed=seed + 1)]
    return dlm_spec.sample_cover(d, rows, gen_length=24, block_length=12, threshold=.3,
                                 tau_remask=.9, max_seeds=2, seed_share=1.0, **more).sequences


def test_a_decode_inside_another_s_callback(captured):
    """It replays the same graphs, which must not change what the outer one still reads: the
    attention maps that its next seeds are chosen by."""
    for seed in range(0, 16, 2):
        plain, (fast, _) = lively(tiny_llama), graphed(lively(tiny_llama))
        for d in (plain, fast):
            d.model.lm_head.weight.data.div_(8)         # milder: many tokens are checked
        want, got = (decode(d, seed, callback=lambda _, d=d: decode(d, 50)) for d in (plain, fast))
        assert torch.equal(want, got)
    assert captured


def test_inference_mode_has_graphs_of_its_own_and_autocast_none(captured):
    plain, (fast, graphs) = lively(tiny_llama), graphed(lively(tiny_llama))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode,
                 lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad):
        for _ in range(2):
            with mode():
                want, got = (dlm_spec.sample_fast_dllm(d, random_ids(2, 9), gen_length=16,
                                                       block_length=16, cache="dual", threshold=.3)
                             for d in (plain, fast))
            assert torch.equal(want.sequences, got.sequences)
            assert torch.equal(want.commit_confidence, got.commit_confidence)
            with mode():
                assert torch.equal(decode(plain, cache="dual"), decode(fast, cache="dual"))
    assert captured and {inference for inference, *_ in graphs.canvases} == {False, True}
    before = len(captured)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            decode(fast, 7)
    assert len(captured) == before


def test_layers_that_cannot_be_captured_run_as_they_are(captured):
    plain, (fast, graphs) = lively(tiny_llama), graphed(lively(tiny_llama))
    for d in (plain, fast):
        d.model.model.layers[1].mlp.register_forward_pre_hook(
            lambda _, args: args if float(args[0].max()) < 99 else None)
    with pytest.warns(UserWarning, match="these layers cannot be captured: .*makes the host wait"):
        for _ in range(3):
            assert torch.equal(decode(plain), decode(fast))
    assert graphs.failed and len(captured) == 1


def test_a_cache_may_be_filled_again_in_another_size(captured):
    plain, (fast, _) = lively(tiny_llama), graphed(lively(tiny_llama))
    found = []
    for d in (plain, fast):
        kv = KVCache()
        with torch.no_grad():
            for B, L in ((2, 12), (2, 14), (3, 12), (1, 12), (2, 12), (2, 12), (2, 12)):
                x = random_ids(B, L)
                found.append(d(x, x == x, kv=kv))
                found.append(d(x.masked_fill(x % 3 == 0, M), x == x, kv=kv, window=x == x))
    assert captured and all(map(torch.equal, found[:14], found[14:]))


def test_layers_and_graphs_die_with_the_model(captured):
    fast = graphed(lively(tiny_llama))[0]
    decode(fast)
    decode(fast)
    layers = weakref.ref(fast.model.base_model)
    gc.collect()
    gc.disable()
    try:
        del fast
        assert captured and layers() is None
    finally:
        gc.enable()


def test_a_kind_that_has_not_come_for_long_is_dropped(captured):
    fast, graphs = graphed(lively(tiny_llama))
    for n in range(1, 60):
        for _ in range(2):
            with torch.no_grad():
                fast(random_ids(1, n), torch.ones(1, n, dtype=torch.bool))
    canvas, = graphs.canvases.values()
    assert len(captured) == 59 and len(canvas.graphs) == graphs.kinds < 59


def test_with_gradients_nothing_is_captured(captured):
    fast, _ = graphed(lively(tiny_llama))
    x, ask = random_ids(1, 6), torch.ones(1, 6, dtype=torch.bool)
    for _ in range(3):
        fast(x, ask).logsumexp(-1).sum().backward()
    assert not captured and fast.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_the_stand_in_refuses_what_a_capture_refuses():
    x = torch.arange(4.)
    for f in (lambda: x.max().item(), lambda: x.nonzero(), lambda: x[x > 2]):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            capture(f, x.device)


def test_compile_means_graphs_on_one_cuda_device_and_without_options(monkeypatch):
    asked = []
    with FakeCuda() as cuda:
        for device in ("cuda", "cpu"):
            d = Denoiser(cuda.move(tiny_llama(1)) if device == "cuda" else tiny_llama(1), M)
            layers = d.model.base_model
            monkeypatch.setattr(type(layers), "compile", lambda self, **o: asked.append(o))
            d.compile(mode="default")
            assert asked.pop() == {"dynamic": True, "mode": "default"}
            for _ in range(2):      # a second time changes nothing
                d.compile()
            graphs = getattr(layers.forward, "forward", None)
            assert (graphs is not None and not isinstance(graphs, CudaGraphs)) == (device == "cuda")
            assert asked == [] if device == "cuda" else len(asked) == 2


def test_attention_maps_are_replayed(captured):
    plain, (fast, _) = lively(tiny_llama), graphed(lively(tiny_llama))
    ask = torch.ones(2, 9, dtype=torch.bool)
    found = []
    for d in (plain, fast):
        kv = KVCache((0, 1))
        with torch.no_grad():
            for seed in range(4):
                d(random_ids(2, 9, seed=seed), ask, kv=kv, probe=ask)
                found.append(kv.attention)      # which later forwards leave alone
    assert captured and all(map(torch.equal, found[:4], found[4:]))
    assert not torch.equal(found[2], found[3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_on_a_cuda_device_compile_gives_the_same_tokens():
    plain, fast = (load_denoiser(device="cuda", dtype=torch.float32, compile=c)
                   for c in (False, True))
    assert isinstance(fast.model.base_model.forward, CudaGraphs)
    ids, mask = plain.encode(dlm_spec.EXAMPLES[:2])
    for name, knobs in DECODES * 2:
        want, got = (dlm_spec.SAMPLERS[name](d, ids, attention_mask=mask, gen_length=48,
                                             **{"block_length": 24} | knobs) for d in (plain, fast))
        assert torch.equal(want.sequences, got.sequences) and want.calls == got.calls, name
