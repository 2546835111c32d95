"""Kernels that read the file's blocks as they are: any CPU, no preparation, no second copy of the weights.

A block is unpacked with `bridge.blocks`' own function into codes, scales and mins, then multiplied in
int32 (LLVM vectorizes the plain loops) or in float32. This is what `BRIDGE_CPU=portable` runs: some 0.5 to 2 GB/s
of weights, on one thread.
"""

from functools import cache
from typing import Any

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.base import d_of_nibbles
from bridge.blocks.read import READ
from bridge.runtime.cpu.forms.activations import record_of
from bridge.system.kernels.jit import CFunction, c_function, from_plain, inlined, inner, maker, specialize
from bridge.system.kernels.memory import array_at, array_on_stack

# set per type by `specialize`
unpack: Any = None
unpack_rows: Any = None
size = subs = sub = runs = run = nbytes = zero = lift = odd = no_scale = record = d_at = dmin_at = sums_at = x_at = 0
mins = is_k = tabled = scaled = False
unit: Any = None
d_bits: Any = None
of_nibbles: Any = None
d_nibbles: tuple[int, ...] = ()
values = np.zeros(0, np.int8)  # values of the codes of table types
scales = np.zeros(0, np.float32)  # and of their scale bytes


@inlined
def bits_at(block, offset):
    """The two bytes from `offset` on as int32."""
    return np.int32(block[offset]) | np.int32(block[offset + 1]) << np.int32(8)


def _d_bits(block):
    return bits_at(block, d_at)


def _d_of_nibbles(block):
    return np.int32(of_nibbles(block, d_nibbles))


@inlined
def half(bits):
    """The bits of a half -> float32; infinities and NaN included."""
    bits = np.int32(bits)
    exponent = (bits >> 10) & 31
    mantissa = bits & 1023
    if exponent == 31:
        magnitude = np.float32(np.inf) if mantissa == 0 else np.float32(np.nan)
    elif exponent == 0:
        magnitude = np.float32(mantissa * 2.0**-24)
    else:
        magnitude = np.int32(((exponent + 112) << 23) | (mantissa << 13)).view(np.float32)
    return -magnitude if bits & 0x8000 else magnitude


def _dot(raw, records, tokens, y):
    """raw uint8 [rows, row bytes], integer records of `tokens` tokens -> y float32 [tokens, rows].

    Returns the first row whose d or dmin is not finite, or -1.
    """
    signed = records.view(np.int8)
    ints = records.view(np.int32)
    floats = records.view(np.float32)
    blocks = raw.shape[1] // nbytes
    q = array_on_stack(size, np.uint8)
    sc = array_on_stack(subs, np.int8)
    mn = array_on_stack(subs, np.uint8)
    bad = -1
    for row in range(raw.shape[0]):
        for t in range(tokens):
            y[t, row] = 0
        for b in range(blocks):
            block = raw[row, b * nbytes : (b + 1) * nbytes]
            unpack(block, q, sc, mn)
            d = np.float32(1) if scaled else unit * half(d_bits(block))
            dmin = half(bits_at(block, dmin_at)) if mins else np.float32(0)
            if scaled:
                for j in range(subs):
                    bad = row if np.int32(sc[j]) & no_scale == no_scale and bad < 0 else bad
            if not (abs(d) <= np.float32(65504) and abs(dmin) <= np.float32(65504)) and bad < 0:
                bad = row
            for t in range(tokens):
                offset = (t * blocks + b) * record
                x = signed[offset : offset + size]
                value = np.float32(0)
                for j in range(runs):
                    part = np.int32(0)
                    for i in range(run):
                        code = q[j * run + i]
                        lifted = np.int32(values[code]) + lift if tabled else np.int32(code)
                        part += np.int32(np.int32(lifted) * np.int32(x[j * run + i]))
                    if not mins:
                        part += ints[(offset + sums_at) // 4 + j]
                    if is_k:
                        part = np.int32(part * np.int32(np.int32(sc[j]) * (1 + odd) + odd))
                    share = np.float32(part) * floats[(offset + x_at) // 4 + j * run // 32]
                    if scaled:
                        share *= scales[np.uint8(sc[j * run // sub])]
                    value += share
                value *= d
                if mins and is_k:
                    low = np.int32(0)
                    for j in range(subs):
                        t_j = np.int32(signed[offset + sums_at + j]) * np.int32(128) + np.int32(
                            signed[offset + sums_at + subs + j]
                        )
                        low += np.int32(np.int32(mn[j]) * np.int32(t_j))
                    value -= dmin * floats[(offset + record) // 4 - 1] * np.float32(low)
                elif mins:
                    value += dmin * floats[(offset + sums_at) // 4]
                y[t, row] += value
    return bad


def _dequantize(raw, y):
    """raw uint8 [rows, row bytes] -> y float32 [rows, in], rounded as gguf.quants.dequantize rounds."""
    blocks = raw.shape[1] // nbytes
    q = array_on_stack(size, np.uint8)
    sc = array_on_stack(subs, np.int8)
    mn = array_on_stack(subs, np.uint8)
    for row in range(raw.shape[0]):
        for b in range(blocks):
            block = raw[row, b * nbytes : (b + 1) * nbytes]
            unpack(block, q, sc, mn)
            d = np.float32(1) if scaled else unit * half(d_bits(block))
            dmin = half(bits_at(block, dmin_at)) if mins else np.float32(0)
            out = y[row, b * size : (b + 1) * size]
            for j in range(subs):
                scale = d
                low = dmin
                if is_k:
                    scale = np.float32(d * np.float32(np.int32(sc[j]) * (1 + odd) + odd))
                    low = -np.float32(dmin * np.float32(mn[j]))
                elif scaled:
                    scale = scales[np.uint8(sc[j])]
                for i in range(sub):
                    code = q[j * sub + i]
                    value = np.float32(scale * np.float32(values[code] if tabled else np.int32(code) - zero))
                    out[j * sub + i] = value + low if mins else value


def readers_of(block: BlockType) -> dict[str, Any]:
    """The compiled functions of a block's bytes: its own `unpack`, and `d_bits`, the bits of its d."""
    if block.d_nibbles:
        nibbles = {"d_nibbles": block.d_nibbles, "of_nibbles": from_plain(d_of_nibbles, inlined)}
        d_bits = specialize(_d_of_nibbles, block.name, inlined, **nibbles)
    else:
        d_bits = specialize(_d_bits, block.name, inlined, d_at=block.d_at)
    return {"unpack": from_plain(block.unpack, inlined), "d_bits": d_bits}


def _scope(block: BlockType) -> dict[str, Any]:
    same = ("size", "sub", "subs", "nbytes", "dmin_at", "is_k")
    record = record_of(block)
    return {name: getattr(block, name) for name in same} | {
        **readers_of(block), "unit": np.float32(block.unit), "odd": np.int32(block.odd_scales),
        "run": block.sum_span, "runs": block.size // block.sum_span,
        "zero": np.int32(block.zero), "lift": np.int32(block.lift), "no_scale": np.int32(block.no_scale),
        "record": record.nbytes, "sums_at": record.sums_at, "x_at": record.d_at, "mins": block.has_min,
        "tabled": bool(block.values), "values": np.array(block.values, np.int8),
        "scaled": bool(block.scales), "scales": np.array(block.scales, np.float32),
    }  # fmt: skip


@cache
def dot(name: str) -> Any:
    """The compiled `dot(raw, records, tokens, y)` of a type."""
    return specialize(_dot, name, **_scope(READ[name]))


@cache
def dequantize(name: str) -> Any:
    """`dequantize(raw, y)` of a type, for compiled code."""
    return specialize(_dequantize, name, inner, **_scope(READ[name]))


def _dequantize_rows(raw, y, row_bytes, columns, _0, _1, _2, first, last):
    """Rows first..last-1 of raw uint8 [rows, row_bytes] -> those of y float32 [rows, columns], both addresses."""
    rows = array_at(raw + first * row_bytes, (last - first, row_bytes), np.uint8)
    unpack_rows(rows, array_at(y + 4 * first * columns, (last - first, columns), np.float32))


@maker
def rows_function(name: str) -> CFunction:
    """`_dequantize_rows` of a type."""
    return c_function(_dequantize_rows, name, unpack_rows=dequantize(name))
