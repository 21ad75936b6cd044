# SPDX-License-Identifier: MIT
"""CUDA graphs without a CUDA device: what dlm_spec.capture does, done by recording kernels.

As there, only kernels are kept and no Python: each is run again on the tensors of the capture,
whatever the objects around them hold by then, and its result goes where it went before. A kernel
whose result the host would have to see cannot be captured.
"""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from waits import SHAPES, VALUES, by_mask


class Kernels(TorchDispatchMode):
    """Records what is run."""

    def __init__(self):
        super().__init__()
        self.run = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in VALUES | SHAPES or (name == "index" and by_mask(args[1])):
            raise RuntimeError(f"{name} makes the host wait: it cannot be captured")
        out = func(*args, **(kwargs or {}))
        self.run.append((func, args, kwargs or {}, out))
        return out


def capture(forward, device, pool=None):
    """Stands in for dlm_spec.capture. The results hold rubbish until the first replay."""
    with Kernels() as kernels:
        out = forward()

    def tensors(tree):
        return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]

    def replay():
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, before in kernels.run:
                for old, new in zip(tensors(before), tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():        # else a view, or written in place
                        old.copy_(new)

    with torch._C.DisableTorchFunction():
        for func, _, _, before in kernels.run:
            for t in tensors(before):
                if t.is_floating_point() and not func.is_view and not func._schema.is_mutable:
                    t.fill_(torch.nan)
    return out, replay, pool
