"""A trellis-coded linear layer: W = diag(SV) U_out What U_in^T diag(SU), What in a bit stream.

y = W x does not make W: x is transformed, multiplied by the codes in a fused product, and the result is transformed.
W itself is only made on request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.errors import BridgeError
from bridge.system.devices import cuda
from bridge.system.operands import Array, check_indices, check_input, is_torch
from bridge.trellis.codebooks import BitshiftCodebook
from bridge.trellis.hadamard import Rotation
from bridge.trellis.streams import TILE

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

_MANY = 64  # tokens from which decoding strips of the matrix once is less work than decoding it for every four
_STRIP = 1 << 22  # weights decoded at a time then


@dataclass(eq=False)
class TrellisLayer:
    """A linear layer y = W x with W [out, in] in the trellis codes of QTIP or EXL3.

    name       of the module, for messages
    words      uint16 [tile rows, tile columns, n], the bit streams; rows are output features
    step       bits from one state to the next
    book       the codebook
    positions  where the weights of a tile go
    tile       rows and columns of a tile
    su, sv     float32 [padded in], [padded out], factors of the inputs and outputs
    rotations  Hadamard transforms of the input and the output side, or None
    shape      (out, in) without padding
    bias       float32 [out], or None; products do not add it

    Source: Tseng et al. 2024 (QTIP, arXiv:2406.11235).
    """

    name: str
    words: np.ndarray = field(repr=False)
    step: int
    book: BitshiftCodebook
    positions: np.ndarray = field(repr=False)
    tile: tuple[int, int]
    su: np.ndarray = field(repr=False)
    sv: np.ndarray = field(repr=False)
    rotations: tuple[Rotation, Rotation] | None
    shape: tuple[int, int]
    bias: np.ndarray | None = field(default=None, repr=False)

    type = "trellis"

    def __post_init__(self) -> None:
        height, width = self.tile
        padded = self.words.shape[0] * height, self.words.shape[1] * width
        if self.sv.shape != padded[:1] or self.su.shape != padded[1:]:
            raise BridgeError(
                f"{self.name}: SU {list(self.su.shape)} and SV {list(self.sv.shape)} do not fit a matrix of "
                f"{list(padded)}; the checkpoint is damaged"
            )
        for what, values in (("SU", self.su), ("SV", self.sv)):
            if not np.isfinite(values).all():
                raise BridgeError(f"{self.name}: {what} holds NaN or infinite values; the checkpoint is damaged")

    def __deepcopy__(self, memo: Any) -> TrellisLayer:
        return self  # nothing changes the codes, so copies share them

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without what `prepare` made, which is for this machine."""
        return {**self.__dict__, "_fused": self.prepared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        prepared = state.pop("_fused")
        self.__dict__.update(state)
        if prepared:
            self.prepare()

    @property
    def nbytes(self) -> int:
        """Bytes of the trellis codes."""
        return self.words.nbytes

    def cropped(self, out: int, columns: int) -> TrellisLayer:
        """The same layer without padding beyond its true shape. Raises BridgeError where it is smaller than that."""
        if out > len(self.sv) or columns > len(self.su):
            raise BridgeError(
                f"{self.name}: is {list(self.shape)}, smaller than {[out, columns]}; correct config.json's sizes"
            )
        return replace(self, shape=(out, columns))

    def decoded(self, rows: slice = slice(None)) -> np.ndarray:
        """float32: What, or some rows of tiles of it."""
        from bridge.trellis.decode import decode

        return decode(self.words[rows], self.step, self.book, self.positions, self.tile)

    def dequantize(self) -> np.ndarray:
        """float32 [out, in]: W."""
        out, columns = self.shape
        w = self.decoded()
        if self.rotations is not None:
            w = self.rotations[1].rotate_columns(self.rotations[0].rotate(w))
        w = w[:out, :columns]
        w *= self.sv[:out, None]
        w *= self.su[None, :columns]
        return np.ascontiguousarray(w)

    def rows(self, indices: ArrayLike) -> np.ndarray:
        """Rows of W, float32 [n, in], for integer `indices` [n]; computes all of W."""
        chosen = np.atleast_1d(np.asarray(indices))
        check_indices(self, chosen, chosen.dtype.kind in "iu")
        return self.dequantize()[chosen]

    def to(self, device: str | torch.device) -> Any:
        """The layer on a `device`: "cpu" returns it as it is, "cuda" or "cuda:1" a CudaTrellisLayer.

        Raises BridgeError where the device is missing.
        """
        if str(device) == "cpu":
            return self
        return cuda("trellis_layer").moved(self, device)

    # products

    def matvec(self, x: Array, precision: str = "f32") -> Array:
        """y [out] = W x for `x` [in]; `precision`, type and errors are as in `matmul`."""
        check_input(self, x, 1)
        return self.matmul(x[None], precision)[0]

    def matmul(self, x: Array, precision: str = "f32") -> Array:
        """Y = X W^T, without the bias.

        x          [tokens, in], numpy or torch on the CPU, of any float type
        precision  for callers of `QuantTensor.matmul`; x is never rounded here

        Returns [tokens, out] of x's kind and type; sums are float32. Raises BridgeError where x does not fit.
        """
        if is_torch(x):
            import torch

            if x.device.type != "cpu" or not x.dtype.is_floating_point:
                raise BridgeError(f"{self.name}: x is {x.dtype} on {x.device}; must be floats on the CPU")
            return torch.from_numpy(self._product(x.detach().float().numpy())).to(x.dtype)
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            raise BridgeError(f"{self.name}: x is {getattr(x, 'dtype', type(x).__name__)}; must be an array of floats")
        return self._product(x).astype(x.dtype, copy=False)

    def _product(self, x: np.ndarray) -> np.ndarray:
        check_input(self, x, 2)
        out, columns = self.shape
        values = np.zeros((len(x), len(self.su)), np.float32)
        np.multiply(x, self.su[:columns], out=values[:, :columns])
        if self.rotations is not None:
            values = self.rotations[0].rotate(values, transposed=True)
        y = self._times_codes(values)
        if self.rotations is not None:
            y = self.rotations[1].rotate(y)
        return y[:, :out] * self.sv[:out]

    def _times_codes(self, x: np.ndarray) -> np.ndarray:
        """float32 [tokens, padded out]: x What^T."""
        if len(x) < _MANY and self._fused is not None:
            y = self._fused.run(np.ascontiguousarray(x))[:, : len(self.sv)]
            return y * np.float32(self._fused.code.unit) if self._fused.code.unit != 1 else y
        step = max(1, _STRIP // (self.tile[0] * x.shape[1]))
        strips = [x @ self.decoded(slice(i, i + step)).T for i in range(0, len(self.words), step)]
        return np.concatenate(strips, 1)

    @cached_property
    def _fused(self) -> Any:
        """The prepared codes; None if the kernels do not support the tiles."""
        from bridge.system.cpu import targets
        from bridge.trellis.fused import Fused, Units
        from bridge.trellis.vector import Code

        units = Units.of(self.positions) if self.tile == (TILE, TILE) else None
        if units is None:
            return None
        code = Code.of(self.book, self.step, targets.chosen())
        return Fused(self.words, code, units, code.table(self.book))

    @property
    def prepared(self) -> bool:
        """Whether the codes are laid out for the fused product."""
        return "_fused" in self.__dict__

    def unprepare(self) -> None:
        """Give back what `prepare` took, where no product runs here any more."""
        self.__dict__.pop("_fused", None)

    def prepare(self) -> TrellisLayer:
        """Lay the codes out for the fused product now, once (as much memory again as they take); returns self."""
        _ = self._fused
        return self
