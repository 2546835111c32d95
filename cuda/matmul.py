"""Y = X W^T for any number of tokens: by matvec.py up to 8, by mma.py up to 64, in floats by torch beyond.

For torch, quantized weights are dequantized tile by tile: also for types that mma.py does not have, on GPUs
that are too old for it, and where nothing may be rounded. Float32 tokens become halves, scaled (halves.py), so that
neither they nor torch's result leave the range.
"""

from collections.abc import Callable
from typing import Any

from bridge.cuda import dequantize, halves, matvec, mma
from bridge.cuda import device as devices
from bridge.cuda.activations import COLUMNS, Records
from bridge.cuda.halves import Halves, halved
from bridge.cuda.matrix import DeviceMatrix, FloatMatrix

_TILE = 1 << 25  # weights dequantized at a time: 64 MB of halves


class Multiplier:
    """Products on a device: with precision "int8" x is rounded to 8 bits or to halves, with "f32" nothing is.

    The records of x belong to the call, so that threads and streams can share it.
    """

    def __init__(self, device: devices.Device, precision: str):
        self.device, self.precision = device, precision

    def multiply(self, matrix: DeviceMatrix | FloatMatrix, x: Any, y: Any) -> None:
        """Queue y = x W^T for x [n, columns] of a float type, or Halves where `halves(n)`, and y float32 [n, rows]."""
        import torch

        n, stream = y.shape[0], self.device.stream()
        if not n:
            return
        if (
            isinstance(matrix, DeviceMatrix)
            and self.halves(n)
            and not isinstance(x, Halves)
            and x.dtype == torch.float32
        ):
            x = halved(x.contiguous(), self.device)
        floats = n > COLUMNS and not (self.precision == "int8" and mma.takes(matrix, n))
        if isinstance(matrix, FloatMatrix) or floats:
            by_torch(matrix, x, y, self._kind(matrix, x), stream)
            return
        out = y if y.is_contiguous() else torch.empty(y.shape, dtype=y.dtype, device=y.device)
        if n > COLUMNS:
            values, scale = x if isinstance(x, Halves) else (x.contiguous(), None)
            if values.data_ptr() % 16:  # a view into another tensor
                values = values.clone()
            mma.launch(matrix, values, out, stream, scale)
        else:
            records = self._records(matrix, n).quantize(x.contiguous(), n, stream)
            matvec.launch(matrix, records, devices.view(out), n, stream)
        if out is not y:
            y.copy_(out)

    def halves(self, n: int) -> bool:
        """Whether products of n tokens with quantized weights multiply Halves."""
        return self.precision == "int8" and n > COLUMNS

    def bind(self, matrix: DeviceMatrix, x: Any, y: Any) -> Callable[[int, int, int], None]:
        """A function (x, y, stream), of two addresses and a handle, that queues y = x W^T for arrays like these, n at
        most 8, in the device's context. Not for the simulator."""
        import torch

        n, stream = x.shape[0], self.device.stream()
        records = self._records(matrix, n)
        nbytes, place = records.buffer.nbytes, x.device
        quantize, multiply = records.bind(x, n, stream), matvec.bind(matrix, records, devices.view(y), n, stream)

        def run(x: int, y: int, stream: int) -> None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=place)  # reused behind these launches
            records = memory.data_ptr()
            quantize(stream, (0, x), (1, records))
            multiply(stream, (1, records), (2, y))

        return run

    def _kind(self, matrix: DeviceMatrix | FloatMatrix, x: Any) -> Any:
        """The type that torch multiplies in: that of the weights if they are floats, that of x if it has 16 bits."""
        import torch

        if isinstance(x, Halves):
            return torch.float16
        if self.precision == "f32":
            return torch.float32
        if isinstance(matrix, FloatMatrix):
            return matrix.weight.dtype
        return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16

    def _records(self, matrix: DeviceMatrix, n: int) -> Records:
        return Records(matrix.columns, n, self.device, self.precision, clear=False)


def product(weight: Any, x: Any) -> Any:
    """x [n, in], or Halves for a float16 weight, times weight^T [in, out] by torch, in the weight's type -> f32."""
    import torch

    if isinstance(x, Halves):
        return (x.values @ weight.T).float() * x.scale[:, None]
    if weight.dtype != torch.float16:
        return (x.to(weight.dtype) @ weight.T).float()
    return product(weight, halves.by_torch("plain", x.float()))


def by_torch(matrix: DeviceMatrix | FloatMatrix, x: Any, y: Any, kind: Any, stream: Any) -> None:
    """Queue y = x W^T for any number of tokens: weights become a torch dtype, tile by tile, and torch multiplies."""
    import torch

    if isinstance(matrix, FloatMatrix) and matrix.weight.dtype == kind:
        y.copy_(product(matrix.weight, x))
        return
    step = max(1, min(matrix.rows, _TILE // matrix.columns))
    weights = torch.empty((step, matrix.columns), dtype=kind, device=y.device)
    for first in range(0, matrix.rows, step):
        count = min(step, matrix.rows - first)
        dequantize.tile(matrix, first, count, weights[:count], stream)
        y[:, first : first + count] = product(weights[:count], x)
