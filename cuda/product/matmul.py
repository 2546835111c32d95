"""Y = X W^T for any number of tokens: by matvec.py up to 8, by mma.py up to 64, in floats by torch beyond; and by
mma_int8.py where that takes less time, as counted.

For torch, quantized weights are dequantized tile by tile: also for types that mma.py does not have, on GPUs
that are too old for it, and where nothing may be rounded. Float32 tokens become halves, scaled (halves.py), so that
neither they nor the result of a torch that rounds it to halves leave the range.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bridge.cuda.forms import dequantize
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix
from bridge.cuda.product import halves, matvec, mma, mma_int8
from bridge.cuda.product.activations import COLUMNS, Records
from bridge.cuda.product.halves import Halves, halved
from bridge.cuda.product.token_records import TokenRecords, recorded
from bridge.cuda.toolchain import device as devices

LENGTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 65, 128, 1024)  # numbers of tokens that take different kernels
_TILE = 1 << 26  # weights dequantized at a time, at most: 128 MB of halves


class Multiplier:
    """Products on a device: with precision "int8" x is rounded to 8 bits or to halves, with "f32" nothing is.

    The records of x belong to the call, so that threads and streams can share it.
    """

    def __init__(self, device: devices.Device, precision: str):
        self.device, self.precision = device, precision

    def sums(self, matrix: DeviceMatrix, x: Any, y: Any) -> Any:
        """As `multiply`, but where x is Halves and torch multiplies, the rows of y are not scaled yet: their scale, f32
        [n], is returned; otherwise None."""
        scaled = not isinstance(x, Halves) or (self.precision == "int8" and mma.takes(matrix, y.shape[0]))
        self.multiply(matrix, x, y, scaled=scaled)
        return None if scaled else x.scale

    def multiply(
        self, matrix: DeviceMatrix | FloatMatrix, x: Any, y: Any, bias: Any = None, accumulate: bool = False,
        scaled: bool = True,
    ) -> None:  # fmt: skip
        """Queue y = or += x W^T + bias for x [n, columns] of a float type, or in the matrix's `form`.

        y float32 [n, rows], whose rows may be apart; bias float32 [rows] or None; not `scaled`: see `sums`.
        """
        n = y.shape[0]
        if not n:
            return
        stream = matrix.memory.stream()
        if isinstance(matrix, DeviceMatrix) and not isinstance(x, Halves | TokenRecords):
            form, exact = self.form([matrix], n), devices.kind(x) == "f32"
            # up to 64 tokens of 16 bits are multiplied as they are, without a launch before
            if form == "int8" and (exact or n > mma.TOKENS):
                x = recorded(x.contiguous(), mma_int8.tiles_of(n), self.device)
            elif form != "floats" and exact:
                x = halved(x.contiguous(), self.device)
        if isinstance(x, TokenRecords):
            assert isinstance(matrix, DeviceMatrix)
            return mma_int8.launch(matrix, x, y, stream, accumulate, bias)
        floats = n > COLUMNS and not (self.precision == "int8" and mma.takes(matrix, n))
        if isinstance(matrix, FloatMatrix) or floats:
            by_torch(matrix, x, y, self._kind(matrix, x), stream, bias, accumulate, scaled)
        elif n > COLUMNS:
            values, scale = x if isinstance(x, Halves) else (x.contiguous(), None)
            if values.data_ptr() % 16:  # a view into another tensor
                values = values.clone()
            mma.launch(matrix, values, y, stream, scale, accumulate, bias)
        else:
            records = self._records(matrix, n).quantize(x.contiguous(), n, stream)
            offset = None if bias is None else devices.view(bias)
            matvec.launch(matrix, records, devices.view(y, apart=True), n, stream, accumulate, offset)

    def form(self, matrices: Sequence[DeviceMatrix], n: int) -> str:
        """What products of n tokens with quantized weights multiply: "floats", "halves" or "int8" (TokenRecords)."""
        if self.precision != "int8" or n <= COLUMNS:
            return "floats"
        return "int8" if all(mma_int8.takes(matrix, n) for matrix in matrices) else "halves"

    def bind(self, matrix: DeviceMatrix, x: Any, y: Any, bias: Any = None) -> Callable[..., None]:
        """A function (stream, x, y, bias if there is one), of a handle and addresses, that queues y = x W^T + bias for
        arrays like these, n at most 8, in the device's context."""
        import torch

        n, stream = x.shape[0], self.device.stream()
        records = self._records(matrix, n)
        nbytes, device = records.buffer.nbytes, x.device
        quantize = records.bind(x, n, stream)
        multiply = matvec.bind(matrix, records, devices.view(y), n, stream, bias)

        def run(stream: int, x: int, y: int, *bias: int) -> None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)  # reused behind these launches
            records = memory.data_ptr()
            quantize(stream, (0, x), (1, records))
            multiply(stream, (1, records), (2, y), *((3, address) for address in bias))

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
        return sums(x.values, weight).mul_(x.scale[:, None])
    if weight.dtype != torch.float16 or (x.dtype == torch.float16 and _keeps_sums(weight)):
        return sums(x.to(weight.dtype), weight)
    return product(weight, halves.by_torch(x))


def sums(x: Any, weight: Any) -> Any:
    """x weight^T as float32: sums that torch does not round to 16 bits first, where it can."""
    import torch

    if x.dtype != torch.float32 and _keeps_sums(weight):
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return (x @ weight.T).float()


def _keeps_sums(weight: Any) -> bool:
    """Whether torch's product of 16-bit floats can be float32: from version 2.8 on, on a GPU."""
    import torch

    return bool(weight.is_cuda) and "dtype" in torch.ops.aten.mm.overloads()


def by_torch(
    matrix: DeviceMatrix | FloatMatrix, x: Any, y: Any, kind: Any, stream: Any, bias: Any = None,
    accumulate: bool = False, scaled: bool = True,
) -> None:  # fmt: skip
    """Queue y = or += x W^T + bias for any number of tokens: weights become a torch dtype, tile by tile, and torch
    multiplies. Sums of Halves that are not `scaled` are left to the caller."""
    import torch

    if bias is not None:
        y.add_(bias) if accumulate else y.copy_(bias)
        accumulate = True
    if isinstance(matrix, FloatMatrix) and matrix.weight.dtype == kind:
        return _multiply(matrix.weight, x, y, accumulate, scaled)
    step = tile_rows(matrix.rows, matrix.columns)
    weights = torch.empty((step, matrix.columns), dtype=kind, device=y.device)
    for first in range(0, matrix.rows, step):
        count = min(step, matrix.rows - first)
        dequantize.tile(matrix, first, count, weights[:count], stream)
        _multiply(weights[:count], x, y[:, first : first + count], accumulate, scaled)


def tile_rows(rows: int, columns: int) -> int:
    """Rows of a matrix that are dequantized at a time: parts alike in size, of whole 128 as torch's own tiles."""
    most = max(1, _TILE // columns)
    parts = -(-rows // most)
    return min(rows, most, -(-rows // (128 * parts)) * 128)


def _multiply(weight: Any, x: Any, y: Any, accumulate: bool, scaled: bool) -> None:
    """y = or += `product`, whose sums are scaled on their way there."""
    import torch

    values = x.values if isinstance(x, Halves) else x
    plain = not scaled or (not isinstance(x, Halves) and values.dtype == weight.dtype)  # the sums are the product
    if plain and not accumulate and values.dtype != torch.float32 and _keeps_sums(weight):
        torch.mm(values, weight.T, out_dtype=torch.float32, out=y)
    elif not isinstance(x, Halves):
        result = product(weight, x)
        y.add_(result) if accumulate else y.copy_(result)
    elif not scaled:
        y.copy_(sums(x.values, weight))
    elif accumulate:
        y.addcmul_(sums(x.values, weight), x.scale[:, None])
    else:
        torch.mul(sums(x.values, weight), x.scale[:, None], out=y)
