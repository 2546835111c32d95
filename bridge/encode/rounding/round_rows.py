"""Float weights to the bytes of a GGUF type: embeddings, output heads, and layers whose codes cannot be carried.

Minimizes  sum importance * (w - w')^2  per block, where w' are the weights that the stored block dequantizes to. The
error of ggml's own quantizer was not below this one's, and is 6 to 33% larger on models' weights (of types with lifted
scales, see `round_values`, 1 to 10%). Speed on one Zen 5
core, from float32 to bytes, in millions of weights a second: Q8_0 300, Q4_0 and Q5_0 20, Q6_K 12, Q4_K and Q5_K 10,
Q3_K 7, Q2_K, Q4_1 and Q5_1 6.

The search is in `round_affine` (Q2_K, Q4_K, Q5_K), `round_scaled` (Q3_K, Q6_K) and `round_plain`; for types whose codes
are looked up in `round_values`, with the loops of `round_table` (IQ4), `round_points` (IQ2, IQ3) and `round_shifted`
(IQ1). `round_ternary` goes its own way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bridge.blocks import BlockType
from bridge.encode.block_bytes import packer, row_bytes
from bridge.encode.rounding.round_affine import affine_quantizer
from bridge.encode.rounding.round_plain import plain_quantizer
from bridge.encode.rounding.round_points import points_quantizer
from bridge.encode.rounding.round_scaled import scaled_quantizer
from bridge.encode.rounding.round_shifted import shifted_quantizer
from bridge.encode.rounding.round_table import table_quantizer
from bridge.encode.rounding.round_ternary import ternary_quantizer
from bridge.errors import BridgeError

_CHUNK = 1 << 18  # weights whose fields are held unpacked at a time
_FLOOR = 1e-6  # the least importance, relative to the mean: a column without any still gets its nearest codes


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a tensor as blocks, and what quantizing them lost."""

    data: np.ndarray  # uint8 [rows, row_bytes]
    errors: np.ndarray  # float64 [rows]: sum (w - w')^2
    signal: float  # sum w^2
    weighted_error: float  # sum importance * (w - w')^2

    @property
    def error(self) -> float:
        """sum (w - w')^2, unweighted."""
        return float(self.errors.sum())


def quantize_rows(
    x: np.ndarray, block: BlockType, importance: np.ndarray | None = None, out: np.ndarray | None = None
) -> QuantizedRows:
    """Quantize rows, minimizing their importance-weighted squared error.

    x            float32 [rows, in], `in` a multiple of `block.size`
    importance   float32 [in], not negative: what a squared error of each column costs; None: 1
    out          uint8 [rows, row_bytes], contiguous, for the blocks; None: fresh memory

    Safe to call from several threads at once; the GIL is released. Raises BridgeError where `in` or
    the importance's length does not fit, or where a weight or an importance is not finite.
    """
    rows, columns = x.shape
    if columns % block.size:
        raise BridgeError(
            f"rows of {columns} weights do not fill {block.name} blocks of {block.size}; use another type"
        )
    if block.scales:
        raise BridgeError(f"{block.name} only takes the 4-bit floats of a checkpoint; choose another type")
    weights = _weights(importance, columns)
    x = np.ascontiguousarray(x, np.float32).reshape(rows, columns // block.sub, block.sub)
    scaled = (np.sqrt(weights) if block.lift_share else weights).reshape(-1, block.sub)
    data = np.empty((rows, row_bytes(block, columns)), np.uint8) if out is None else out
    sums = np.zeros((rows, 3))
    if block.ternary:
        ternary_quantizer(block.name)(x, scaled, data.reshape(-1, block.nbytes), sums)
    else:
        _quantize_fields(x, block, scaled, data, sums)
    if not np.isfinite(sums).all():
        row = int(np.argmax(~np.isfinite(sums).all(axis=1)))
        raise BridgeError(
            f"row {row} of the weights holds NaN, infinity or values beyond 1e18; the checkpoint is damaged"
        )
    return QuantizedRows(data, sums[:, 0].copy(), float(sums[:, 1].sum()), float(sums[:, 2].sum()) * _mean(importance))


def _quantize_fields(x: np.ndarray, block: BlockType, weights: np.ndarray, data: np.ndarray, sums: np.ndarray) -> None:
    """Search fields of blocks, a chunk of rows at a time, and pack them into data; x [rows, sub-blocks, sub]."""
    quantize, pack = quantizer_of(block, block.lift_share > 0), packer(block.name)
    rows, subs = x.shape[:2]
    columns = subs * block.sub
    step = min(rows, max(1, _CHUNK // max(columns, 1)))
    blocks = columns // block.size
    q = np.empty((step, subs, block.sub), np.uint8)
    sc = np.ones((step, subs), np.int8)
    mn = np.zeros((step, subs), np.uint8)
    d = np.zeros((step, blocks), np.float32)
    dmin = np.zeros((step, blocks), np.float32)
    for start in range(0, rows, max(step, 1)):
        n = min(step, rows - start)
        quantize(x[start : start + n], weights, q[:n], sc[:n], mn[:n], d[:n], dmin[:n], sums[start : start + n])
        pack(q[:n].reshape(n, columns), sc[:n], mn[:n], d[:n], dmin[:n], data[start : start + n])


def quantizer_of(block: BlockType, lifted: bool = False) -> Callable[..., None]:
    """The compiled search of a type, but for ternary ones, see `round_loops.rows_quantizer`.

    lifted  whether a codebook's scales are, see `round_values`; then its `w` is the root of the importance
    """
    name = block.name
    if block.values:
        if block.shifted:
            return shifted_quantizer(name, lifted)
        return points_quantizer(name, lifted) if block.numbered else table_quantizer(name)
    if block.is_k:
        return affine_quantizer(name) if block.has_min else scaled_quantizer(name)
    return plain_quantizer(name)


def _mean(importance: np.ndarray | None) -> float:
    """The mean importance, by which `_weights` divides; 1 where there is none."""
    mean = 1.0 if importance is None or not importance.size else float(np.mean(importance, dtype=np.float64))
    return mean if mean > 0 else 1.0


def _weights(importance: np.ndarray | None, columns: int) -> np.ndarray:
    """float32 [in]: the importance with mean 1 and without zeros."""
    if importance is None:
        return np.ones(columns, np.float32)
    if importance.shape != (columns,):
        raise BridgeError(
            f"importance of {list(importance.shape)} columns for rows of {columns}; it is another tensor's"
        )
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise BridgeError("the importance of columns holds NaN, infinity or negative values; use another imatrix")
    return np.maximum(importance / _mean(importance), _FLOOR).astype(np.float32)


def actorder_importance(group_of_column: np.ndarray) -> np.ndarray:
    """int [in], the act-order group of each column -> float32 [in], an importance for each column.

    With act-order (desc_act), GPTQ sorts the input columns by the mean square of their activations, largest first, and
    cuts groups from that order. So the group's number ranks its columns, as an importance matrix would. Only ranks are
    known; (1 + g)^-0.5 is a mild power law through them.
    """
    return ((1.0 + group_of_column.astype(np.float64)) ** -0.5).astype(np.float32)
