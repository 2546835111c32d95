"""What the readers of trellis-coded layers share: a layer that can be multiplied as it is, or decoded to floats."""

from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.module_reader import Reader, finite_scales
from bridge.checkpoint.trellis_floats import DecodedTensor
from bridge.errors import BridgeError
from bridge.trellis import TrellisLayer


class TrellisReader(Reader):
    """Reads layers as floats; `layer` leaves them coded."""

    plain: ClassVar = frozenset({"bias", "SU", "SV", "su", "sv"})
    padding: ClassVar = 1

    def layer(self, name: str) -> TrellisLayer:
        """A module as it is. Raises BridgeError where its sizes or its values cannot be."""
        raise NotImplementedError

    def whole(self, name: str) -> DecodedTensor:
        layer = self.layer(name)
        weights, distortion = layer.dequantize(), layer.book.distortion
        return DecodedTensor(name, layer.book.K, weights, distortion, self.padding, layer.bias)

    def label(self, name: str) -> str:
        """Of a module, for messages."""
        return f"{self.modules[name].file}: {name}"

    def vector(self, name: str, part: str) -> np.ndarray:
        """float32 [n] of a vector of floats, of any shape. Raises BridgeError where one is no number."""
        return finite_scales(self.store, f"{name}.{part}").reshape(-1)

    def scalar(self, name: str, part: str) -> int:
        """An integer that is stored as a tensor of one element; BridgeError for anything else."""
        values = self.part(name, part)
        if values.size != 1 or values.dtype.kind not in "iu":
            raise BridgeError(
                f"{self.label(name)}: {part} is {values.dtype} {list(values.shape)}, one integer is wanted; "
                "the checkpoint is damaged"
            )
        return int(values.reshape(-1)[0])


def length(name: str, tensors: dict[str, TensorInfo], part: str) -> int:
    """Of a vector of floats. Raises BridgeError where it is none."""
    info = tensors[part]
    count = int(np.prod(info.shape))
    if not info.floating or not count or max(info.shape, default=1) != count:
        raise BridgeError(
            f"{info.file}: {name}.{part} is {info.dtype} {list(info.shape)}, a vector of floats is wanted; "
            "the checkpoint is damaged"
        )
    return count
