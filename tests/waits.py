# SPDX-License-Identifier: MIT
"""Where the host would wait for a CUDA device, counted without one.

    with waits() as found:
        sample_llada(...)
    found           # Counter {(line of dlm_spec.py, "nonzero"): 128, ...}

Operations whose result the host must see before it can go on: a number or a truth value taken
from a tensor, shapes that depend on values (nonzero, a boolean index), and copies between host
and device, in which the stream is waited for as well. On a CPU tensors that would stay on the
host (what `start_canvas` checks, once per decode) count too. On a CUDA device
`torch.cuda.set_sync_debug_mode("warn")` says the same in the driver's words.
"""
import sys
from collections import Counter
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dlm_spec

VALUES = {"_local_scalar_dense", "equal"}
SHAPES = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim",
          "unique_consecutive", "repeat_interleave"}
READS = {torch.Tensor.tolist: "tolist", torch.Tensor.cpu: "cpu", torch.Tensor.numpy: "numpy"}


def by_mask(index):
    """Whether an index, or a list of them, has a mask in it, which is looked up by nonzero."""
    index = index if isinstance(index, (list, tuple)) else [index]
    return any(getattr(i, "dtype", None) in (torch.bool, torch.uint8) for i in index)


def line():
    """The innermost line of dlm_spec.py that is being run; 0 outside of it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != dlm_spec.__file__:
        frame = frame.f_back
    return 0 if frame is None else frame.f_lineno


class Operations(TorchDispatchMode):
    """Counts the kernels that wait."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in VALUES | SHAPES or (name == "index" and by_mask(args[1])):
            self.found[line(), name] += 1
        elif name == "_to_copy" and kwargs.get("device") is not None:
            here, there = args[0].device.type, torch.device(kwargs["device"]).type
            self.found[line(), f"{here} to {there}"] += here != there
        elif name == "copy_" and args[0].device.type != args[1].device.type:
            self.found[line(), f"{args[1].device.type} to {args[0].device.type}"] += 1
        return func(*args, **kwargs)


class Calls(TorchFunctionMode):
    """Counts what no kernel shows on a CPU: tensors read as Python objects or made of them."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in READS and args[0].device.type == "cpu":
            self.found[line(), READS[func]] += 1
        elif func is torch.tensor and (kwargs or {}).get("device") is not None:
            self.found[line(), "tensor of numbers"] += 1
        elif func is torch.Tensor.__setitem__:      # one Python number at a mask: masked_fill
            self.found[line(), "put at mask"] += by_mask(args[1]) and torch.is_tensor(args[2])
        return func(*args, **(kwargs or {}))


@contextmanager
def waits():
    """A Counter of (line, operation) that fills inside the `with`."""
    found = Counter()
    with Calls(found), Operations(found):
        yield found
    for key in [k for k, n in found.items() if not n]:
        del found[key]
