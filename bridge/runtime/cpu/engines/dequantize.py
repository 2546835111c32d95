"""Blocks to float32 for any GGUF type: compiled for ours, float types by themselves, the rest through gguf."""

import numpy as np

from bridge.blocks.read import READ
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.errors import BridgeError
from bridge.runtime.cpu.engines.floats import SIZES, wide_rows_function
from bridge.runtime.cpu.forms import rowmajor
from bridge.system.kernels.jit import CFunction

UNQUANTIZED = (*FLOAT_TYPES, "F64", "I32", "I64")  # a number for each weight


def rows_function(type: str) -> CFunction | None:
    """The C function that makes a type's rows float32, see rowmajor.py; None: `rows` alone does."""
    if type in SIZES:
        return wide_rows_function(type)
    return rowmajor.rows_function(type) if type in READ else None


def rows(type: str, raw: np.ndarray) -> np.ndarray:
    """raw uint8 [rows, row bytes] of a type -> float32 [rows, in]. Equals gguf.quants.dequantize bit for bit."""
    raw = np.ascontiguousarray(raw)
    if type in READ:
        block = READ[type]
        out = np.empty((raw.shape[0], raw.shape[1] // block.nbytes * block.size), np.float32)
        convert = rowmajor.rows_function(type).ctypes
        convert(raw.ctypes.data, out.ctypes.data, raw.shape[1], out.shape[1], 0, 0, 0, 0, len(raw))
        return out
    if type == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if type in UNQUANTIZED:
        return raw.view(
            {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32, "I64": np.int64}[type]
        ).astype(np.float32)
    import gguf

    kind = gguf.GGMLQuantizationType[type]
    try:
        return np.asarray(gguf.quants.dequantize(raw, kind), np.float32)
    except NotImplementedError:
        from importlib.metadata import version

        raise BridgeError(f"type {type}: neither this program nor gguf {version('gguf')} can dequantize it") from None
