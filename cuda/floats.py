"""Matrices of types without a kernel (F32, F16, BF16, IQ* ...), as torch has them; matmul.py multiplies with them."""

import numpy as np
from bridge.cuda.device import Device, torch_device

from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.operands import check_matrix

KINDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # what holds a type as it is; others become float16
_PART = 1 << 25  # weights uploaded at a time


def kind_of(type: str, precision: str) -> str:
    """What a type is kept as: with precision "f32" all are float32."""
    return "float32" if precision == "f32" else KINDS.get(type, "float16")


class FloatMatrix:
    """`name`, `rows`, `columns`, `device`, and `weight`, a torch tensor [rows, columns] of a float type."""

    def __init__(self, tensor: QuantTensor, device: Device, precision: str = "int8"):
        """Raises BridgeError where the tensor is no matrix, and where memory does not suffice."""
        import torch

        check_matrix(tensor)
        self.name, self.device = tensor.name, device
        self.rows, self.columns = tensor.shape
        dtype = getattr(torch, kind_of(tensor.type, precision))
        device.check_memory(self.rows * self.columns * dtype.itemsize, tensor.name)
        self.weight = torch.empty(tensor.shape, dtype=dtype, device=torch_device(device))
        step = max(1, _PART // self.columns)
        for first in range(0, self.rows, step):
            part = torch.from_numpy(tensor.rows(np.arange(first, min(first + step, self.rows))))
            self.weight[first : first + step] = part.to(self.weight.device)

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return int(self.weight.nbytes)

    @property
    def bpw(self) -> float:
        """Bits per weight."""
        return float(8 * self.weight.itemsize)

    def __repr__(self) -> str:
        return f"FloatMatrix({self.name!r}, {self.weight.dtype}, {[self.rows, self.columns]}, {self.device})"
