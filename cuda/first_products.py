"""Kernels of tensors' products, compiled before the first of them, all at once: compile_pool.py."""

from collections.abc import Iterable
from typing import Any

from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product.matmul import LENGTHS, Multiplier
from bridge.cuda.tensor import CudaTensor
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.compile_pool import compile_all
from bridge.cuda.toolchain.launch import Kernel, noted

from bridge.system.progress import Bar


def compile_products(
    products: Iterable[tuple[Any, str, bool]], looked_up: Iterable[CudaTensor], dtype: Any,
    experts: Iterable[tuple[Any, str]] = (),
) -> None:  # fmt: skip
    """Compile what `products` of any number of tokens of a torch dtype launch, look-ups of rows, and layers of experts.

    A product is a CudaTensor or a CudaTrellisLayer, the precision of x, and whether a bias is added; experts are those
    of bridge.nn and the precision. Those that have been compiled before, on this machine, take no time.
    """
    kernels: dict[str, dict[Kernel, None]] = {}  # by the device
    seen = set()
    for tensor, precision, biased in products:
        kind = tensor.device, tensor.type, tensor.shape, precision, biased
        if tensor.type == "trellis" or kind not in seen:  # layers of the same shape may have other codebooks
            seen.add(kind)
            kernels.setdefault(tensor.device, {}).update(dict.fromkeys(_of_products(tensor, precision, biased, dtype)))
    for tensor in looked_up:
        with devices.require(tensor.device).active(), noted() as launched:
            tensor.rows([0])
        kernels.setdefault(tensor.device, {}).update(dict.fromkeys(launched))
    for stack, precision in experts:
        kernels.setdefault(stack.device, {}).update(dict.fromkeys(_of_experts(stack, precision, dtype)))
    for name, wanted in kernels.items():
        with Bar("compiling for the GPU", unit=" kernels") as bar:
            compile_all(wanted, devices.require(name).capability, bar)


def _of_products(tensor: Any, precision: str, biased: bool, dtype: Any) -> list[Kernel]:
    import torch

    device = devices.require(tensor.device)
    target, (rows, columns) = device.place, tensor.shape
    with device.active(), noted() as launched:
        for n in LENGTHS:
            x = torch.zeros((n, columns), dtype=dtype, device=target)
            if not isinstance(tensor, CudaTensor):
                tensor.matmul(x)
            elif isinstance(tensor.matrix, DeviceMatrix):  # others are torch's
                y, bias = (torch.zeros(shape, device=target) for shape in ((n, rows), rows))
                Multiplier(device, precision).multiply(tensor.matrix, x, y, bias if biased else None)
    return launched


def _of_experts(stack: Any, precision: str, dtype: Any) -> list[Kernel]:
    import torch

    device = devices.require(stack.device)
    target = device.place
    pairs = [n for n in (1 << i for i in range(16)) if stack.takes(n)]  # none where each expert is a tensor by itself
    with device.active(), noted() as launched:
        for n in LENGTHS if pairs else ():
            x = torch.zeros((n, stack.networks[0][0].columns), dtype=dtype, device=target)
            stack.network(0, x, precision)
        for n in pairs:  # which share the work in different ways
            chosen = torch.zeros((1, n), dtype=torch.int64, device=target)
            stack.mix(x[:1], chosen, chosen.to(dtype), precision)
    return launched
