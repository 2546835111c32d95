"""One product from bare tensors: `bitshift_gemm`. To multiply more than once, make a layer."""

from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.system.operands import Array
from bridge.trellis.codebooks import BitshiftCodebook
from bridge.trellis.layer import TrellisLayer
from bridge.trellis.packed import plain_layer, qtip_layer


def bitshift_gemm(
    input: Array, trellis: Any, codebook: BitshiftCodebook, td_x: int, td_y: int, scale: float, SU: Any, SV: Any
) -> Array:
    """input [tokens, in] times a trellis-coded matrix: [tokens, out], of the input's kind and type.

    trellis   int16 [tiles, td_x * td_y * K / 16], packed: QTIP's own layout, tiles of td_x outputs by td_y inputs,
              transforms on both sides, SV times U (What U^T (SU x)); `scale` cancels there and is not used. Or
              int32 [tiles, td_x * td_y / V], states: tiles of td_x inputs by td_y outputs, no transforms, and the
              result times `scale`
    SU, SV    [in], [out], floats

    Raises BridgeError where sizes do not fit or a state is out of range. The codes are laid out anew in every call:
    for more than one product make a TrellisLayer (`open_checkpoint(...).read_trellis(name)`).
    """
    return layer_of(trellis, codebook, td_x, td_y, scale, SU, SV).matmul(input)


def layer_of(
    trellis: Any, codebook: BitshiftCodebook, td_x: int, td_y: int, scale: float, su: Any, sv: Any
) -> TrellisLayer:
    """The layer of `bitshift_gemm`'s arguments. Raises BridgeError as it does."""
    codes = as_array(trellis)
    su, sv = (as_array(values).astype(np.float32).reshape(-1) for values in (su, sv))
    if codes.dtype in (np.int16, np.uint16):
        return qtip_layer("bitshift_gemm", codes, codebook, (td_x, td_y), su, sv)
    if codes.dtype.kind in "iu":
        return plain_layer("bitshift_gemm", codes, codebook, (td_x, td_y), su, sv, scale)
    raise BridgeError(f"bitshift_gemm: trellis is {codes.dtype}; must be int16 streams or int32 states")


def as_array(values: Any) -> np.ndarray:
    """numpy's array of a tensor of torch (bf16 too) or of an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return values.float().numpy() if values.dtype.is_floating_point else values.numpy()
    return np.asarray(values)
