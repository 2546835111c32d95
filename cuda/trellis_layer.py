"""A trellis-coded layer on a GPU: what TrellisLayer.to("cuda") gives, with its methods.

Codes are multiplied by fused.py; the transforms are torch's products with small Hadamard matrices, for H of size a * b
is H_a kron H_b. Everything is queued on torch's current stream.
"""

from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.product.fused import FusedOnDevice
from bridge.cuda.toolchain import device as devices

from bridge.errors import BridgeError
from bridge.system.operands import check_input, is_torch
from bridge.trellis.hadamard import Rotation, had
from bridge.trellis.layer import TrellisLayer
from bridge.trellis.streams import TILE
from bridge.trellis.vector import Code


class CudaTrellisLayer:
    """y = W x with W [out, in] in trellis codes on a GPU: `name`, `type`, `shape`, `device`."""

    type = "trellis"

    def __init__(self, layer: TrellisLayer, device: Any = None):
        """Raises BridgeError where there is no GPU, or the codes are not in tiles of 16 x 16."""
        import torch

        if layer.tile != (TILE, TILE):
            raise BridgeError(f"{layer.name}: tiles of {layer.tile[0]} x {layer.tile[1]} multiply on the CPU only")
        self.name, self.shape, self.bias = layer.name, layer.shape, layer.bias
        self._source = layer
        self._device = devices.require(device)
        code = Code.of(layer.book, layer.step, "cuda")
        self._fused = FusedOnDevice(layer.words, code, layer.positions, code.table(layer.book), self._device)
        target = self._device.place
        self._su = torch.from_numpy(layer.su).to(target)
        self._sv = torch.from_numpy(layer.sv * np.float32(code.unit)).to(target)
        self._fused.memory.tensors += self._su, self._sv

    @property
    def device(self) -> str:
        """Where it is, for instance "cuda:0"."""
        return str(self._device)

    def to(self, device: Any) -> Any:
        """The layer on another device; "cpu" gives the TrellisLayer it came from."""
        return self._source if str(device) == "cpu" else moved(self._source, device)

    def __deepcopy__(self, memo: Any) -> "CudaTrellisLayer":
        return self  # nothing changes the codes, so copies share them

    def __reduce__(self) -> Any:
        return moved, (self._source, self.device)

    def rows(self, indices: Any) -> np.ndarray:
        """float32 [n, in] on the CPU: rows of W."""
        return self._source.rows(indices.cpu() if is_torch(indices) else indices)

    def matvec(self, x: Any, precision: str = "f32") -> Any:
        """W x of x [in]; otherwise as `matmul`."""
        check_input(self, x, 1)
        return self.matmul(x[None], precision)[0]

    def matmul(self, x: Any, precision: str = "f32") -> Any:
        """X W^T for X [tokens, in], a torch tensor of floats on the device; returns the same type. Adds no bias.

        x is not rounded, whatever `precision` says, but more than 16 tokens of 16 bits become halves, scaled. Raises
        BridgeError where x does not fit or is elsewhere.
        """
        import torch

        target = self._device.place
        if not is_torch(x) or str(x.device) != target or not x.dtype.is_floating_point:
            raise BridgeError(f"{self.name}: x is {_described(x)}; must be floats on {target}")
        check_input(self, x, 2)
        out, columns = self.shape
        values = torch.zeros((len(x), len(self._su)), device=target)
        values[:, :columns] = x.detach().float() * self._su[:columns]
        rotations = self._source.rotations
        if rotations is not None:
            values = _rotated(values, rotations[0], True, target)
        y = torch.empty((len(x), len(self._sv)), device=target)
        with self._device.active():
            self._fused.run(values.contiguous(), y, halves=x.dtype != torch.float32)
        if rotations is not None:
            y = _rotated(y, rotations[1], False, target)
        return (y * self._sv)[:, :out].to(x.dtype)


def moved(layer: TrellisLayer, device: Any) -> CudaTrellisLayer:
    """The layer on a GPU: the one that is still referenced, or a new one."""
    return _known.get(layer, device)


_known = devices.Moved(CudaTrellisLayer)


def _described(x: Any) -> str:
    return f"{x.dtype} on {x.device}" if is_torch(x) else type(x).__name__


def _rotated(x: Any, rotation: Rotation, transposed: bool, device: str) -> Any:
    """Rows of x times a transform: see Rotation.rotate."""
    power = rotation.block // rotation.order
    a = 1 << (power.bit_length() - 1) // 2
    shaped = x.view(-1, rotation.order, a, power // a)
    shaped = _matrix(a, True, device) @ shaped @ _matrix(power // a, True, device)
    if rotation.order > 1:
        factor = _matrix(rotation.order, False, device)
        flat = shaped.reshape(-1, rotation.order, power)
        shaped = (factor.T if transposed else factor) @ flat
    return shaped.reshape(x.shape) / rotation.block**0.5


@cache
def _matrix(size: int, sylvester: bool, device: str) -> Any:
    """A Hadamard matrix as a tensor on the device."""
    import torch

    matrix = np.ones((1, 1), np.float32) if sylvester else np.array(had(size))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return torch.from_numpy(matrix).to(device)
