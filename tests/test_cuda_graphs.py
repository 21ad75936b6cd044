# SPDX-License-Identifier: MIT
"""CUDA graphs: with a device the real ones, without one their stand-in (graphs.py)."""
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from command_line import named_knobs
from devices import FakeCuda
from graphs import capture
from helpers import M, Table, random_ids, tiny_llama, tiny_qwen2

import dlm_spec
from dlm_spec import Denoiser, DualView, KVCache, load_denoiser, windowed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
import cuda_graphs
from cuda_graphs import CudaGraphs, capture_layers

DECODES = [
    ("llada", dict(steps=9)), ("llada", dict(steps=9, cfg_scale=.5)),
    *(("fast_dllm", dict(threshold=.3, cache=cache)) for cache in (None, "prefix", "dual")),
    ("dkv", dict(threshold=.3, refresh=4)), ("wino", dict(threshold=.2)), ("saber", {}),
    *(("dual_diffusion", dict(threshold=.3, view=view, draft_steps=2))
      for view in ("leave_one_out", "cover", "visible")),
    *(("cover", dict(threshold=.2, cache=cache, tau_remask=.9))
      for cache in (None, "prefix", "dual"))]


def small_denoiser(make, shift=False):
    """A Denoiser of a small random model that predicts many different tokens."""
    model = make(2, seed=1)
    model.lm_head.weight.data.mul_(25)
    return Denoiser(model, M, shift=shift)


def with_graphs(denoiser):
    """The denoiser, as capture_layers leaves it on a CUDA device, and its CudaGraphs."""
    layers = denoiser.model.base_model
    layers.forward = CudaGraphs(layers.forward)
    return denoiser, layers.forward


@pytest.fixture
def captured(monkeypatch):
    """A list that grows by one with each capture, of the stand-in."""
    found = []

    def watch(forward, device, pool=None):
        found.append(pool)
        return capture(forward, device, pool)
    monkeypatch.setattr(cuda_graphs, "capture", watch)
    return found


def decode(name, denoiser, rows, **knobs):
    """A decode of rows of different lengths, in two blocks of 12."""
    sampler = dlm_spec.SAMPLERS[name]
    return sampler(denoiser, rows, **named_knobs(
        sampler, dict(gen_length=24, block_length=12) | knobs))


def cover(denoiser, seed=0, **knobs):
    """The tokens of a COVER decode, which depend on attention maps as well."""
    rows = [*random_ids(1, 9, seed=seed), *random_ids(1, 6, seed=seed + 1)]
    return decode("cover", denoiser, rows, threshold=.3, tau_remask=.9, max_seeds=2,
                  **knobs).sequences


@pytest.mark.parametrize("make, shift", [(tiny_llama, False), (tiny_qwen2, True)])
@pytest.mark.parametrize("name, knobs", DECODES, ids=str)
def test_a_replayed_decode_equals_the_plain_one(name, knobs, make, shift, captured):
    """The same tokens, forwards, confidences and revisions to the last bit, with prompts of
    several lengths and rows that end early. A third decode of a size captures nothing more."""
    plain = small_denoiser(make, shift)
    fast, graphs = with_graphs(small_denoiser(make, shift))
    for P in (9, 6, 6, 6):
        rows = [*random_ids(1, P), *random_ids(1, P - 3), *random_ids(1, P - 1)]
        before = len(captured)
        want, got = (decode(name, d, rows, **knobs) for d in (plain, fast))
        for field in ("sequences", "nfe", "positions", "commit_step", "commit_confidence"):
            assert torch.equal(getattr(want, field), getattr(got, field)), field
        assert want.revisions == got.revisions and want.calls == got.calls
    assert len(captured) == before > 0 and len(graphs.canvases) <= 4


def test_two_caches_that_take_turns_keep_their_keys_and_values(captured):
    """They share one set of buffers, which changes hands with copies."""
    plain, (fast, _) = small_denoiser(tiny_llama), with_graphs(small_denoiser(tiny_llama))
    canvases = [random_ids(2, 12, seed=seed) for seed in (0, 1)]
    ask, column = torch.zeros(2, 12, dtype=torch.bool), torch.arange(12)
    ask[:, 4:7] = True
    with torch.no_grad():
        found = []
        for d in (plain, fast):
            caches, logits = [KVCache(x) for x in canvases], []
            for kv, x in zip(caches, canvases):
                windowed(d, x, ask, kv=kv)
            for step in range(8):
                i = step % 2 if step < 4 else step // 2 % 2
                x = canvases[i].masked_fill(ask & (column == 4 + step % 3), M)
                logits.append(windowed(d, x, ask, kv=caches[i], window=ask)[0])
            found.append(logits)
            assert not torch.equal(caches[0].k[0], caches[1].k[0])
    assert captured and all(map(torch.equal, *found))


def test_buffers_and_graphs_of_the_last_few_sizes_are_kept(captured):
    fast, graphs = with_graphs(small_denoiser(tiny_llama))
    for P in (3, 4, 5, 6, 3, 7):
        dlm_spec.sample_fast_dllm(fast, random_ids(1, P), gen_length=8, block_length=8,
                                  cache="dual", threshold=.99)
    assert [L for *_, L in graphs.canvases] == [13, 14, 11, 15]


def test_a_decode_inside_the_callback_of_another_changes_nothing(captured):
    """It replays the same graphs, which must not change what the outer one still reads: the
    attention maps that its next seeds are chosen by."""
    for seed in range(0, 16, 2):
        plain, (fast, _) = small_denoiser(tiny_llama), with_graphs(small_denoiser(tiny_llama))
        for d in (plain, fast):
            d.model.lm_head.weight.data.div_(8)         # less sure: many tokens are checked
        want, got = (cover(d, seed, callback=lambda _, d=d: cover(d, 50))
                     for d in (plain, fast))
        assert torch.equal(want, got)
    assert captured


def test_inference_mode_has_graphs_of_its_own_and_autocast_has_none(captured):
    plain, (fast, graphs) = small_denoiser(tiny_llama), with_graphs(small_denoiser(tiny_llama))

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, autocast,
                 torch.no_grad):
        for _ in range(2):
            with mode():
                want, got = (decode("fast_dllm", d, random_ids(2, 9), cache="dual",
                                    threshold=.3) for d in (plain, fast))
                assert torch.equal(want.sequences, got.sequences)
                assert torch.equal(want.commit_confidence, got.commit_confidence)
                assert torch.equal(cover(plain, cache="dual"), cover(fast, cache="dual"))
    assert captured and {inference for inference, *_ in graphs.canvases} == {False, True}
    before = len(captured)
    with autocast():
        for _ in range(3):
            cover(fast, 7)
    assert len(captured) == before


def test_layers_that_cannot_be_captured_run_as_they_are(captured):
    plain, (fast, graphs) = small_denoiser(tiny_llama), with_graphs(small_denoiser(tiny_llama))
    for d in (plain, fast):
        d.model.model.layers[1].mlp.register_forward_pre_hook(
            lambda _, args: args if float(args[0].max()) < 99 else None)
    with pytest.warns(UserWarning, match="these layers cannot be captured"):
        for _ in range(3):
            assert torch.equal(cover(plain), cover(fast))
    assert graphs.failed and len(captured) == 1


def test_layers_and_graphs_die_with_the_model(captured):
    fast, _ = with_graphs(small_denoiser(tiny_llama))
    cover(fast)
    cover(fast)
    layers = weakref.ref(fast.model.base_model)
    del _
    gc.collect()
    gc.disable()
    try:
        del fast
        assert captured and layers() is None
    finally:
        gc.enable()


def test_a_kind_of_forward_that_has_not_come_for_long_is_dropped(captured):
    fast, graphs = with_graphs(small_denoiser(tiny_llama))
    for n in range(1, 60):
        for _ in range(2):
            with torch.no_grad():
                fast(random_ids(1, n), torch.ones(1, n, dtype=torch.bool))
    canvas, = graphs.canvases.values()
    assert len(captured) == 59 and len(canvas.graphs) == graphs.kinds < 59


def test_with_gradients_nothing_is_captured(captured):
    fast, _ = with_graphs(small_denoiser(tiny_llama))
    x, ask = random_ids(1, 6), torch.ones(1, 6, dtype=torch.bool)
    for _ in range(3):
        fast(x, ask).logsumexp(-1).sum().backward()
    assert not captured and fast.model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_a_cache_of_another_class_is_left_alone(captured):
    class OtherCache(KVCache):
        """One that a reader has written."""

    fast, _ = with_graphs(small_denoiser(tiny_llama))
    x = random_ids(2, 9)
    with torch.no_grad():
        for _ in range(3):
            kv = OtherCache(x)
            windowed(fast, x, x == x, kv=kv)
            windowed(fast, x, x == x, kv=DualView(fast, x, None, kv, x != x))
    assert not captured


def test_attention_maps_are_replayed(captured):
    plain, (fast, _) = small_denoiser(tiny_llama), with_graphs(small_denoiser(tiny_llama))
    ask, found = torch.ones(2, 9, dtype=torch.bool), []
    for d in (plain, fast):
        x = random_ids(2, 9)
        kv = KVCache(x)
        with torch.no_grad():
            for seed in range(4):
                x = random_ids(2, 9, seed=seed)
                view = DualView(d, x, None, kv, ask & False, dlm_spec.columns_of(ask))
                windowed(d, x, ask, kv=view)
                found.append(view.attention)        # which later forwards leave alone
    assert captured and all(map(torch.equal, found[:4], found[4:]))
    assert not torch.equal(found[2], found[3])


def test_the_stand_in_refuses_what_a_capture_refuses():
    x = torch.arange(4.)
    for f in (lambda: x.max().item(), lambda: x.nonzero(), lambda: x[x > 2]):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            capture(f, x.device)


def test_layers_are_captured_once_and_on_one_cuda_device_only():
    with FakeCuda() as cuda:
        denoiser = Denoiser(cuda.move(tiny_llama(1)), M)
        for _ in range(2):      # a second time changes nothing
            assert capture_layers(denoiser) is denoiser
        graphs = denoiser.model.base_model.forward
        assert isinstance(graphs, CudaGraphs) and not isinstance(graphs.forward, CudaGraphs)
    with pytest.raises(ValueError, match="CUDA"):
        capture_layers(Denoiser(tiny_llama(1), M))
    with pytest.raises(ValueError, match="callable"):
        capture_layers(Denoiser(Table(torch.zeros(4, 9)), 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_on_a_cuda_device_a_replayed_decode_gives_the_same_tokens():
    plain, fast = (load_denoiser(device="cuda", dtype=torch.float32) for _ in range(2))
    capture_layers(fast)
    ids, mask = plain.encode([dlm_spec.EXAMPLE, dlm_spec.EXAMPLE[:60]])
    for name, knobs in DECODES * 2:
        sampler, knobs = dlm_spec.SAMPLERS[name], dict(gen_length=48, block_length=24) | knobs
        want, got = (sampler(d, ids, attention_mask=mask, **named_knobs(sampler, knobs))
                     for d in (plain, fast))
        assert torch.equal(want.sequences, got.sequences) and want.calls == got.calls, name
