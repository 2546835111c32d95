"""A layer of experts on a GPU: one launch multiplies the matrices of all experts that a few tokens chose.

    y[p] = W[chosen[p]] x[p // used]        p: a pair of a token and one of the `used` experts that it chose

The matrices of all experts lie one after the other in device memory, each in the form of layout.py, at equal distances.
So each of them is a DeviceMatrix as well, a part of the same memory, for whatever multiplies many tokens by one expert;
int32 counts loads within an expert, and a stack may be of any size. A block of a launch (matvec_kernel.py) belongs to
one pair, whose expert's number it finds in device memory: the host waits for nothing, and a CUDA graph can hold the
layer. A number that is no expert's, one of another process, gives zeros.

    records of x            one launch
    gate and up, SwiGLU     one launch, their rows in turn, with any activation of gates.py
    records of that         one launch, or none where the product makes them (`recorded`)
    down                    one launch
    weights and sum         torch's, two

Where the types of gate and up differ, these are two launches. A pair reads its expert even if another pair does, too:
as many pairs as there are experts name 63% of them, so up to that number (`takes`) a layer reads at most 1.6 times what
it must, less where the L2 cache still has it. More pairs go expert by expert, for which the host has to know them: some
14 us of its time for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.forms.layout import DeviceLayout
from bridge.cuda.forms.matrix import DeviceMatrix, combined_shape, repack
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.matvec import Recorded, work_of
from bridge.cuda.product.matvec_kernel import kernel
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.device import Device, Memory

from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from bridge.runtime.quant_tensor import QuantTensor

_ALIGNED = 256  # bytes


class ExpertMatrix(DeviceMatrix):
    """One expert's matrix, for any number of tokens."""

    def matmul(self, x: Any, precision: str = "int8") -> Any:
        """X W^T for X [tokens, in] on the device, as `CudaTensor.matmul`."""
        return self.affine(x, None, precision)

    def affine(self, x: Any, bias: Any, precision: str = "int8") -> Any:
        """X W^T + bias, float32 [out] or None."""
        import torch

        y = torch.empty((len(x), self.rows), dtype=torch.float32, device=x.device)
        with self.device.active():
            Multiplier(self.device, precision).multiply(self, x, y, bias)
        return y


class ExpertMatrices:
    """A matrix of each of `count` experts, in `buffer`, uint8 [count, distance]; matrices[i] is an ExpertMatrix."""

    def __init__(self, experts: Sequence[Sequence[QuantTensor]], device: Device):
        """Upload them. An expert's tensors are one matrix, their rows in turn; all experts must be alike (`alike`).

        Raises BridgeError as `DeviceMatrix.upload` does.
        """
        tensors = experts[0]
        self.type, self.device, self.count = tensors[0].type, device, len(experts)
        self.gated = len(tensors) > 1
        self.rows, self.columns = combined_shape(tensors, interleave=True)
        distance = -(-DeviceLayout(WRITTEN[self.type]).nbytes(self.rows, self.columns) // _ALIGNED) * _ALIGNED
        host = np.zeros((self.count, distance), np.uint8)
        for number, tensors in enumerate(experts):
            repack(tensors, host[number], interleave=True)
        self.buffer = device.upload(host, f"{experts[0][0].name} and those of all experts")
        self.memory = Memory(device, self.buffer)
        self._matrices = [
            ExpertMatrix([t.name for t in tensors], self.type, self.rows, self.columns, self.buffer[number], device)
            for number, tensors in enumerate(experts)
        ]

    def __getitem__(self, expert: int) -> ExpertMatrix:
        return self._matrices[expert]

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return int(self.buffer.nbytes)

    def takes(self, pairs: int) -> bool:
        """Whether so many pairs of a token and an expert are multiplied at once; see above."""
        return 1 <= pairs <= self.count

    def records(self, x: Any, precision: str, dependent: bool = False) -> Records:
        """x [n, columns] of a float type on the device, as `multiply` takes it; one launch."""
        with self.device.active():
            records = Records(self.columns, len(x), self.device, precision, clear=False)
            return records.quantize(x.contiguous(), len(x), self.memory.stream(), dependent)

    def multiply(
        self, records: Records, chosen: Any, bias: Any = None, activation: str | None = None, dependent: bool = False,
        recorded: Recorded | None = None, shape: MatvecShape | None = None,
    ) -> Any:  # fmt: skip
        """The products of n columns with the experts that each chose: float32 [pairs, rows]; one launch.

        chosen      int64 [pairs], contiguous on the device: those of the first column, then those of the next
        bias        float32 [count, rows], contiguous on the device
        activation  of gates.py: [pairs, rows / 2] from rows of gate and up in turn, [pairs, rows] from those of one
                    tensor
        dependent   it may begin while the launch before it ends (launch.py)
        recorded    where records of the products go, see matvec.py: int32 [pairs * rows / 32] counters
        shape       by default that for so many pairs
        """
        import torch

        rows = self.rows // 2 if activation and self.gated else self.rows
        y = torch.empty((len(chosen), rows), dtype=torch.float32, device=chosen.device)
        offset = None if bias is None else devices.view(bias.view(-1))
        arrays = devices.view(y), devices.view(chosen)
        with self.device.active():
            launch(self, records, *arrays, self.memory.stream(), offset, activation, shape, dependent, recorded)
        return y


def alike(tensors: Sequence[QuantTensor]) -> bool:
    """Whether a kernel can find one of these matrices by its number."""
    return tensors[0].type in WRITTEN and len({(tensor.type, tensor.shape) for tensor in tensors}) == 1


def grouped(chosen: Any, count: int) -> tuple[Any, list[tuple[int, int, int]]]:
    """Pairs by expert, for chosen int64 [pairs] on a device: the order int64 [pairs], and (expert, first, stop) of its
    parts. The host waits."""
    import torch

    stops = torch.bincount(chosen, minlength=count).cumsum(0).cpu().tolist()
    bounds = zip(range(count), [0, *stops], stops, strict=False)  # a number beyond is another process's
    return chosen.argsort(stable=True), [bound for bound in bounds if bound[1] < bound[2]]


def launch(
    matrices: ExpertMatrices, records: Records, y: Any, chosen: Any, stream: Any, bias: Any = None,
    activation: str | None = None, shape: MatvecShape | None = None, dependent: bool = False,
    recorded: Recorded | None = None,
) -> None:  # fmt: skip
    """Queue y = W x + bias as `multiply` says; y float32 [pairs, rows], bias float32 [count * rows] on the device.

    Raises BridgeError where the records do not fit.
    """
    first, pairs, columns = matrices[0], y.shape[0], records.max_n
    if records.columns != matrices.columns or pairs % columns:
        raise BridgeError(
            f"{first.name}: {pairs} products of {columns} columns of {records.columns} values; must be a multiple of "
            f"{columns}, of {matrices.columns}"
        )
    shape, blocks = work_of(first, 1, records.exact, shape, pairs, alone=recorded is None)
    epilogue = "bias_" * (bias is not None)
    if activation is not None:
        epilogue += activation + "_ungated" * (not matrices.gated) + "_"
    product = kernel(
        matrices.type, 1, shape, records.exact, epilogue + "recorded_" * (recorded is not None) + "chosen", dependent
    )
    placeholder = matrices.device.placeholder()
    more: tuple[Any, ...] = ()
    if recorded is not None:
        more = placeholder, np.float32(0), recorded.counters, placeholder, placeholder, recorded.records.buffer
    product.launch(
        (blocks, pairs // columns, columns), (32, shape.warps), stream, matrices.buffer, first.room // 16,
        records.buffer, y, placeholder if bias is None else bias, matrices.rows, first.units, *more, chosen,
        pairs // columns,
    )  # fmt: skip
