# SPDX-License-Identifier: MIT
"""CUDA graphs for the layers of a model: the same kernels on the same numbers, without the
Python and the launches between them, which take longer than the arithmetic of a small forward.

    import cuda_graphs
    denoiser = dlm_spec.load_denoiser(device="cuda")
    cuda_graphs.capture_layers(denoiser)        # from here on every sampler uses it

An option: dlm_spec.py knows nothing of it. `tests/gpu_check.py --compile` compares the two.
"""
import functools
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dlm_spec import DualView, KVCache

# What `attend` reads of its own object, beside keys and values.
READ_BY_ATTEND = {KVCache: ("rows", "columns", "n", "hold"),
                  DualView: ("look", "read", "fresh", "has_seeds", "probed", "S", "attention")}


def capture_layers(denoiser):
    """Let the layers of a denoiser's model be replayed as CUDA graphs; returns the denoiser. A
    second call changes nothing. ValueError unless it is a transformers model whose weights are
    all on one CUDA device."""
    layers = getattr(denoiser.model, "base_model", None)
    if layers is None:
        raise ValueError("the model is a plain callable: it has no layers to capture")
    devices = {str(p.device) for p in denoiser.model.parameters()}
    if len(devices) > 1 or denoiser.device.type != "cuda":
        raise ValueError(f"the weights are on {', '.join(sorted(devices))}, expected one CUDA "
                         "device")
    if not isinstance(layers.forward, CudaGraphs):
        layers.forward = CudaGraphs(layers.forward)
    return denoiser


def capture(forward, device, pool=None):
    """forward() as a CUDA graph: what it returned, a function that computes it anew into the
    same memory, and the memory pool, which other graphs may share."""
    now = torch.cuda.current_stream(device)     # is current again even after a failure
    with torch.cuda.device(device), torch.cuda.stream(now):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=capture_stream(device)):
            out = forward()
    return out, graph.replay, graph.pool()


@functools.cache
def capture_stream(device):
    """One stream per device, since each costs workspaces of its own."""
    return torch.cuda.Stream(device)


class InPlace(dict):
    """layer -> tensor; whatever is put where there is one is copied into its memory."""

    def __setitem__(self, layer, new):
        old = self.setdefault(layer, new)
        if old is not new:
            old.copy_(new)


class CudaGraphs:
    """The `forward` of a model's layers, replayed as CUDA graphs.

    A forward whose kind and sizes come for the second time on a canvas of B rows and L columns
    is captured, and from then on replayed. A graph reads and writes fixed memory: inputs are
    copied there; keys and values live in buffers, one set per canvas, that are lent to the
    KVCache at work (one that had them before and is still in use gets copies); what it returns
    holds until the next forward. Kept for the `canvases` used last, with `kinds` graphs each.
    Weights must stay where they are. What cannot be captured (layers that wait for the device)
    runs as it is, with a warning.
    """

    def __init__(self, forward, canvases=4, kinds=48):
        self.canvases, self.most, self.kinds, self.failed = {}, canvases, kinds, False
        layers = weakref.WeakMethod(forward)    # the layers hold this object and die with it
        self.forward = lambda **inputs: layers()(**inputs)

    def __call__(self, kv=None, **inputs):
        """As forward(kv=, **inputs); and just that with gradients, under autocast (which keeps
        cast weights of its own), or with a kv of another class."""
        ids, cache = inputs.get("input_ids"), kv.kv if isinstance(kv, DualView) else kv
        if (torch.is_grad_enabled() or ids is None or self.failed
                or torch.is_autocast_enabled(ids.device.type)
                or type(kv) not in (KVCache, DualView, type(None))
                or type(cache) not in (KVCache, type(None))):
            return self.forward(kv=kv, **inputs)
        canvas = self.canvas_of(cache)
        objects = [kv, cache] if isinstance(kv, DualView) else [] if kv is None else [kv]
        parts = [inputs] + [{name: getattr(o, name, None) for name in READ_BY_ATTEND[type(o)]}
                            for o in objects]
        kind = tuple((name, *((t.shape, t.dtype) if isinstance(t, Tensor) else (t,)))
                     for part in parts for name, t in part.items())
        if kind not in canvas.graphs:           # the first time
            canvas.graphs[kind] = None
            for oldest in [*canvas.graphs][:-self.kinds]:
                del canvas.graphs[oldest]
            return self.forward(kv=kv, **inputs)
        if canvas.graphs[kind] is None:         # the second time
            try:
                canvas.graphs[kind] = self.record(canvas, kv, cache, parts)
            except RuntimeError as e:
                self.failed = True
                warnings.warn(f"these layers cannot be captured and run as they are: {e}",
                              stacklevel=2)
                return self.forward(kv=kv, **inputs)
        fixed, own, out, replay = canvas.graphs[kind]
        for memory, part in zip(fixed, parts):
            for name, t in part.items():
                if isinstance(t, Tensor):
                    memory[name].copy_(t)
        replay()
        if isinstance(kv, DualView):
            kv.attention = own.attention.clone()        # a sampler reads it after its callback
        return out

    def canvas_of(self, cache):
        """The graphs and the buffers of the canvas that this KVCache is for (None: of forwards
        without one). Its keys and values move into the buffers."""
        size = (torch.is_inference_mode_enabled(),)
        if cache is not None:
            size += tuple(cache.shown.shape)
        canvas = self.canvases[size] = self.canvases.pop(size, None) or SimpleNamespace(
            k=InPlace(), v=InPlace(), owner=None, pool=None, graphs={})
        for oldest in [*self.canvases][:-self.most]:
            del self.canvases[oldest]
        if cache is None or cache.k is canvas.k:
            return canvas
        last = canvas.owner and canvas.owner()
        if last is not None and last.k is canvas.k:
            last.k, last.v = ({layer: t.clone() for layer, t in side.items()}
                              for side in (canvas.k, canvas.v))
        for buffers, side in ((canvas.k, cache.k), (canvas.v, cache.v)):
            for layer, t in side.items():
                buffers[layer] = t.clone()
        cache.k, cache.v, canvas.owner = canvas.k, canvas.v, weakref.ref(cache)
        return canvas

    def record(self, canvas, kv, cache, parts):
        """Capture a forward: the memory that its inputs are copied to, the object that stands
        in for kv, what the forward returns, and a function that replays it."""
        fixed = [{name: t.clone() if isinstance(t, Tensor) else t for name, t in part.items()}
                 for part in parts]
        own = None
        if cache is not None:
            own = KVCache(cache.shown)
            vars(own).update(fixed[-1], k=canvas.k, v=canvas.v)
        if isinstance(kv, DualView):
            view = DualView.__new__(DualView)
            vars(view).update(fixed[1], kv=own, probe=fixed[1]["probed"], layers=kv.layers)
            own = view
        out, replay, canvas.pool = capture(lambda: self.forward(kv=own, **fixed[0]),
                                           fixed[0]["input_ids"].device, canvas.pool)
        return fixed, own, out, replay
