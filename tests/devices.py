# SPDX-License-Identifier: MIT
"""A CUDA device that is none: tensors on the CPU that say they are on it and refuse to meet
others.

    with FakeCuda() as cuda:
        denoiser = Denoiser(cuda.move(model), ...)
        sample_llada(denoiser, ...)         # RuntimeError where a tensor was made on the CPU

As on a device, a call may mix in CPU tensors of no dimensions, as numbers, and no others; a
random generator has to live where its numbers do.
"""
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class OnCuda(torch.Tensor):
    """A tensor that says so; nothing else is changed."""


class Generator(torch.Generator):
    """A generator on the CPU that says it is where it was asked to be."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        self.where = named(device)
        return self

    def __init__(self, device="cpu"):
        super().__init__()

    @property
    def device(self):
        """Where it says it is."""
        return self.where


def named(device):
    """torch.device of a device, its name, or another tensor's; None for None."""
    return None if device is None else torch.device(device)


class FakeCuda(TorchFunctionMode):
    """Checks every call of torch, makes what is asked for on the device, and moves."""

    def move(self, model):
        """model, its parameters and buffers there."""
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                store.update({name: self.put(t) for name, t in store.items() if t is not None})
        return model

    @staticmethod
    def put(t, device=CUDA):
        """The same numbers there, or here."""
        t = t.detach() if isinstance(t, torch.nn.Parameter) else t
        return t.as_subclass(OnCuda if device.type == "cuda" else torch.Tensor)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        there = [t for t in given if isinstance(t, OnCuda)]
        here = [t for t in given if not isinstance(t, OnCuda) and t.dim()]
        if func == torch.Tensor.device.__get__:
            return CUDA if there else CPU
        if func == torch.Tensor.is_cuda.__get__:
            return bool(there)
        if name in ("to", "cpu", "cuda", "type_as"):
            return self.moved(func, name, args, kwargs)
        if there and name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor on cuda:0 to numpy")
        if there and here:
            shapes = [[tuple(t.shape) for t in tensors] for tensors in (there, here)]
            raise RuntimeError(f"{name}: tensors of shapes {shapes[0]} are on cuda:0, but "
                               f"{shapes[1]} on the CPU")
        where = named(kwargs.get("device")) or (CUDA if there else CPU)
        if where.type == "cuda":
            kwargs.pop("device", None)
        g = kwargs.get("generator")
        if g is not None and g.device.type != where.type:
            raise RuntimeError(f"{name}: a generator on {g.device} for numbers on {where}")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if where.type == "cuda":
            out = tree_map(lambda t: self.put(t) if isinstance(t, torch.Tensor)
                           and not isinstance(t, OnCuda) else t, out)
        return out

    def moved(self, func, name, args, kwargs):
        """t.to(...) and its kin."""
        t, *rest = args
        if "device" in kwargs:
            rest.insert(0, kwargs.pop("device"))
        devices = [a for a in rest if isinstance(a, (torch.device, str))]
        like = next((a for a in rest if isinstance(a, torch.Tensor)), t)
        where = {"cpu": CPU, "cuda": CUDA}.get(name) or (
            named(devices[0]) if devices else CUDA if isinstance(like, OnCuda) else CPU)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("to", "type_as"):
                t = func(t, *(CPU if a in devices and named(a).type == "cuda" else a
                              for a in rest), **kwargs)
        return self.put(t, where)
