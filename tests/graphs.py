# SPDX-License-Identifier: MIT
"""CUDA graphs without a CUDA device: what cuda_graphs.capture does, by recording kernels.

As there, only kernels are kept and no Python: each is run again on the tensors of the capture,
whatever the objects around them hold by then, and its result goes where it went before. A
kernel whose result the host would have to see cannot be captured.
"""
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils
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
    """Stands in for cuda_graphs.capture. The results hold rubbish until the first replay."""
    with (mock.patch.object(import_utils, "is_cuda_stream_capturing", lambda: True),
          Kernels() as kernels):     # transformers asks, and then does not wait for the device
        out = forward()

    def tensors(tree):
        return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]

    def replay():
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, before in kernels.run:
                new = tensors(func(*args, **kwargs))
                for old, result in zip(tensors(before), new, strict=True):
                    if old.data_ptr() != result.data_ptr():     # else a view or in place
                        old.copy_(result)

    with torch._C.DisableTorchFunction():
        for func, _, _, before in kernels.run:
            for t in tensors(before):
                if t.is_floating_point() and not func.is_view and not func._schema.is_mutable:
                    t.fill_(torch.nan)
    return out, replay, pool
