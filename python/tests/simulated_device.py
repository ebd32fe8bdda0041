"""A simulated accelerator: tensors that are computed on the CPU, but are not CPU tensors to PyTorch.

An operation on tensors of both devices raises, as on CUDA. So does ``numpy()``. Code that passes on it creates its tensors on the right device.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: A device type without an implementation in PyTorch.
DEVICE = torch.device("maia:0")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class DeviceTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype, "device": DEVICE}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **about)

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.inner.tolist()

    def __repr__(self):
        return f"DeviceTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [isinstance(x, DeviceTensor) for x in tensors]
    if any(here) and function not in _COPIES and any(x.ndim for x, own in zip(tensors, here, strict=True) if not own):
        raise RuntimeError(f"{function}: tensors on the CPU and on {DEVICE}")
    target = kwargs.get("device")
    wraps = any(here) if target is None else torch.device(target).type == DEVICE.type
    args, plain = tree_map(lambda x: x.inner if isinstance(x, DeviceTensor) else x, (args, kwargs))
    found = function(*args, **{**plain, **({"device": "cpu"} if target is not None else {})})
    # Operations in place return one of their arguments.
    own = {id(x.inner): x for x in tensors if isinstance(x, DeviceTensor)}
    return tree_map(lambda x: own.get(id(x), DeviceTensor(x)) if wraps and isinstance(x, torch.Tensor) else x, found)


class SimulatedDevice(TorchDispatchMode):
    """Makes ``device=DEVICE`` and ``x.to(DEVICE)`` work within a ``with`` block."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def moved(module):
    """Move a module's parameters and buffers to the device."""
    for one in module.modules():
        for name, x in one._parameters.items():
            if x is not None:
                one._parameters[name] = torch.nn.Parameter(DeviceTensor(x.detach()), requires_grad=False)
        for name, x in one._buffers.items():
            if x is not None:
                one._buffers[name] = DeviceTensor(x)
    return module
