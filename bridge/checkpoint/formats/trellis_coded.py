"""The base class of readers of trellis-coded layers, which can be multiplied as they are or decoded to floats."""

from typing import ClassVar

import numpy as np

from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.checks import finite_scales
from bridge.checkpoint.formats.module_reader import Reader, counted
from bridge.errors import BridgeError
from bridge.trellis import TrellisLayer

CODING = "trellis codes"


class TrellisReader(Reader):
    """Reads layers as floats; `layer` leaves them coded."""

    plain: ClassVar = frozenset({"bias", "SU", "SV", "su", "sv"})
    padding: ClassVar = 1

    def in_words(self) -> str:
        return counted(f"{CODING} of {m.bits} bits" for m in self.modules.values())

    def layer(self, name: str) -> TrellisLayer:
        """A module, still coded. Raises BridgeError if its sizes or values are invalid."""
        raise NotImplementedError

    def read_all_rows(self, name: str) -> DecodedTensor:
        layer = self.layer(name)
        weights, distortion = layer.dequantize(), layer.book.distortion
        return DecodedTensor(
            name, layer.book.K, weights, distortion, CODING, self.padding, layer.bias, self.doubts(layer)
        )

    def doubts(self, layer: TrellisLayer) -> tuple[str, ...]:
        """Notes on whether a layer's codes are what an encoder wrote."""
        return ()

    def label(self, name: str) -> str:
        """A module's file and name, for messages."""
        return f"{self.modules[name].file}: {name}"

    def vector(self, name: str, part: str) -> np.ndarray:
        """A vector of floats of any shape as float32 [n]. Raises BridgeError if one is NaN or infinite."""
        return finite_scales(self.store, f"{name}.{part}").reshape(-1)

    def scalar(self, name: str, part: str) -> int:
        """An integer stored as a tensor of one element. Raises BridgeError for anything else."""
        values = self.part(name, part)
        if values.size != 1 or values.dtype.kind not in "iu":
            raise BridgeError(
                f"{self.label(name)}: {part} is {values.dtype} {list(values.shape)}, not one integer; "
                "the checkpoint is damaged"
            )
        return int(values.reshape(-1)[0])


def length(name: str, tensors: dict[str, TensorInfo], part: str) -> int:
    """The length of a vector of floats. Raises BridgeError if it is not one."""
    info = tensors[part]
    count = int(np.prod(info.shape))
    if not info.floating or not count or max(info.shape, default=1) != count:
        raise BridgeError(
            f"{info.file}: {name}.{part} is {info.dtype} {list(info.shape)}, not a vector of floats; "
            "the checkpoint is damaged"
        )
    return count
