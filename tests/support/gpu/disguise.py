"""Tensors of torch that say they are on a GPU, and lie on the CPU: what torch's own part of a module does with devices.

    with disguised_gpu(): ...       # "cuda" works for torch and for bridge.cuda, whose kernels are compiled PTX

As on a GPU, a tensor of the one place and one of the other meet in no operation but a copy, and numpy sees only those
of the CPU. A launch takes the memory out of the disguise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.gpu import device
from tests.support.gpu.device import Launches, pretended_gpu

_DEVICE = torch.device("cuda:0")
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}  # the indices may lie on the CPU


class OnCuda(torch.Tensor):
    """One that says so; `held` is where it lies."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCuda:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device="cpu",
        )  # fmt: skip

    def __init__(self, held: torch.Tensor):
        self.held = held

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # torch itself takes it for one on the CPU
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        wanted = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})[0]
        return super().to(*args, **kwargs) if wanted is None or wanted.type != "cpu" else self.cpu().to(*args, **kwargs)

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.detach().held.clone()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.held.numpy(force=True)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnCuda({self.held!r})"


OnCuda.__module__ = "torch"  # as bridge knows tensors of torch


class _Disguise(TorchDispatchMode):
    """Sees what makes tensors out of none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if function.namespace == "gguf_bridge":  # an operator of ours, which sees tensors as they are on a GPU
        from bridge.nn import torch_ops

        with _Disguise():
            return getattr(torch_ops, function._opname)._init_fn(*args, **kwargs)
    if function._can_decompose():  # made of others, which have a device by its name
        with _Disguise():
            return function.decompose(*args, **kwargs)
    tensors = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, OnCuda)]
    here = [t for t in tensors if not isinstance(t, OnCuda) and t.device.type == "cpu" and t.dim()]
    if function in _INDEXING and isinstance(args[0], OnCuda):
        here = [t for t in here if not any(t is index for index in args[1])]
    if there and here and function not in _COPIES:
        raise RuntimeError(f"{function}: Expected all tensors to be on the same device, cpu and cuda:0")
    wanted = kwargs.get("device")
    to_cuda = bool(there) if wanted is None else torch.device(wanted).type == "cuda"
    if wanted is not None and to_cuda:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.pop("pin_memory", None):
        raise NotImplementedError(function)

    def bare(part: Any) -> Any:
        return part.held if isinstance(part, OnCuda) else part

    bare_args, bare_kwargs = tree_map(bare, (args, kwargs))
    if function in (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out):  # which torch has for GPUs alone
        result = bare_args[0].to(bare_args[2]) @ bare_args[1].to(bare_args[2])
        if "out" in bare_kwargs:
            result = bare_kwargs["out"].copy_(result)
    else:
        result = function(*bare_args, **bare_kwargs)
    own = {id(bare(t)): t for t in tensors}

    def dressed(part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        if id(part) in own:  # what was changed in place
            return own[id(part)]
        return OnCuda(part) if to_cuda else part

    return tree_map(dressed, result)


@contextmanager
def disguised_gpu() -> Iterator[Launches]:
    """One GPU stands behind torch and bridge.cuda."""
    from bridge.cuda.toolchain import device as devices

    memory_of, tensor_of, to_of = device.memory_of, torch.tensor, torch.Tensor.to
    before = torch.__future__.get_overwrite_module_params_on_conversion()

    def bare_memory(x: torch.Tensor) -> Any:
        if not isinstance(x, OnCuda):
            raise RuntimeError("a tensor on the CPU for a kernel on the GPU")
        return memory_of(x.detach().held)

    def made(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:  # which no mode sees
        made_here = tensor_of(data, **options)
        return made_here.to(_DEVICE) if device is not None and torch.device(device).type == "cuda" else made_here

    def to(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # x.to(y) asks y for its device in C++
        if args and isinstance(args[0], OnCuda):
            args = (args[0].device, args[0].dtype, *args[1:])
        return to_of(x, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "to", to))
        launches = stack.enter_context(pretended_gpu())
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init"))
        _device_constructors()  # remembers torch.tensor, which `with torch.device(...)` looks for
        stack.enter_context(mock.patch.object(torch, "tensor", made))
        stack.enter_context(mock.patch.object(devices.Device, "place", property(str)))
        stack.enter_context(mock.patch.object(device, "memory_of", bare_memory))
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter's data cannot change its class
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        stack.enter_context(_Disguise())
        yield launches
