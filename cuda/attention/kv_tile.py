"""A tile of keys or values in shared memory: some rows of one key-value head, as their cache keeps them (kv_cache.py).

    words   int32: the rows, `pitch` times 16 bytes each; for q8_0 then their steps, as they lie in the cache

A block's threads load it together, 16 bytes each at a time, so that a warp reads 512 contiguous bytes
and nothing twice: `fetch` begins the loads, `stage` writes what has arrived to shared memory. Between the
two, a block can work on the previous tile. Then all its threads read what they need, 16 bytes of a row (`quad_of`,
then `floats` of it) or 4 columns (`four`), as floats.
"""

from functools import cache
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_shape import AttentionShape
from bridge.cuda.toolchain.intrinsics import (
    SIGN_BITS,
    bits,
    bits_float,
    device_function,
    fma,
    high_half,
    load_16,
    low_half,
    mad,
    prmt,
    put_16,
    put_16_further,
    shared_4,
    shared_8,
    shared_16,
    shl,
    thread_x,
    xor,
)
from bridge.cuda.toolchain.unroll import expand, gathered, registers, unroll

# set by `functions`: quads (16 bytes) of a row and from one row to the next, of a tile's rows and of its steps;
# loads of a thread, and with that of steps
KIND = ""
QUADS = PITCH = ROW_QUADS = STEP_QUADS = LOADS = HELD = 0
BLOCK = STEP_WORDS = STEPS = 0
FOUR = 0
codes: Any = None
step_of: Any = None
float32 = np.float32
int32: Any = np.int32


def _fetch(cache, row, stop, rows):
    """This thread's quads of a tile that begins at `row`, and the one of its steps.

    The cache has `rows` rows in all. For rows from `stop` on, the last quad before them is loaded.
    """
    quad = registers()
    thread = bits(thread_x(), 0, BLOCK - 1)
    first = mad(row, QUADS, thread)
    last = int32(stop * QUADS - 1)
    for k in unroll(LOADS):
        quad[k] = load_16(cache, min(int32(first + k * BLOCK), last))
    if KIND == "q8_0":
        step = int32(bits(mad(row, STEP_WORDS, 0), 2, 0x3FFFFFFF) + min(thread, int32(STEP_QUADS - 1)))
        last = bits(mad(stop, STEP_WORDS, -1), 2, 0x3FFFFFFF)
        quad[LOADS] = load_16(cache, mad(rows, QUADS, min(step, last)))
    return gathered(quad, HELD)


def _stage(tile, held):
    """Write what `fetch` returned to shared memory."""
    thread = bits(thread_x(), 0, BLOCK - 1)
    index = mad(int32(thread // QUADS), PITCH, int32(thread % QUADS))
    for k in unroll(LOADS):
        i = int32(thread + k * BLOCK)
        if i < ROW_QUADS:
            if BLOCK % QUADS == 0:  # one address serves all
                put_16_further(tile, index, k * (BLOCK // QUADS * PITCH), held[k])
            else:
                put_16(tile, mad(int32(i // QUADS), PITCH, int32(i % QUADS)), held[k])
    if KIND == "q8_0":  # noqa: SIM102  # decided when the kernel is made
        if thread < STEP_QUADS:
            put_16(tile, int32(STEPS // 4 + thread), held[LOADS])


def _step(tile, row, block):
    """The step of a block of 32 of a row."""
    word = shared_4(tile, mad(row, STEP_WORDS, int32(STEPS + (block >> 1))))
    return low_half(bits(word, shl(block & 1, 4), 0xFFFF))


def _codes(word, step):
    """Four codes times their step."""
    word = xor(word, SIGN_BITS)  # each plus 128
    zero = step * float32(-32768 - 128)  # exact
    x = registers()
    for b in unroll(4):  # in the mantissa of 32768, a code needs no conversion
        x[b] = fma(bits_float(prmt(word, 0x47000000, 0x7404 + 16 * b)), step, zero)
    return gathered(x, 4)


def _quad_of(tile, row, quad):
    """16 bytes of a row, and for q8_0 their step."""
    words = shared_16(tile, mad(row, PITCH, quad))
    if KIND == "q8_0":
        return words[0], words[1], words[2], words[3], step_of(tile, row, quad >> 1)
    return words


def _floats(quad):
    """Group FOUR of four numbers in what `quad_of` returned."""
    if KIND == "q8_0":
        return codes(quad[FOUR], quad[4])
    if KIND == "f32":
        return bits_float(quad[0]), bits_float(quad[1]), bits_float(quad[2]), bits_float(quad[3])
    one, other = quad[2 * FOUR], quad[2 * FOUR + 1]
    return low_half(one), high_half(one), low_half(other), high_half(other)


def _four(tile, row, unit):
    """Columns 4 * unit to 4 * unit + 3 of a row."""
    if KIND == "q8_0":
        return codes(shared_4(tile, mad(row, 4 * PITCH, unit)), step_of(tile, row, unit >> 3))
    if KIND == "f32":
        quad = shared_16(tile, mad(row, PITCH, unit))
        return bits_float(quad[0]), bits_float(quad[1]), bits_float(quad[2]), bits_float(quad[3])
    pair = shared_8(tile, mad(row, 2 * PITCH, unit))
    return low_half(pair[0]), high_half(pair[0]), low_half(pair[1]), high_half(pair[1])


@cache
def functions(shape: AttentionShape) -> dict[str, Any]:
    """The functions above for tiles of a shape; `floats` is a tuple, one for each four of a quad."""
    form, threads = shape.form, shape.threads
    loads = -(-shape.rows * shape.quads // threads)
    scope: dict[str, Any] = {
        **shape.constants,
        "ROW_QUADS": shape.rows * shape.quads,
        "STEP_QUADS": shape.rows * form.step_words // 4,
        "LOADS": loads,
        "HELD": loads + (form.kind == "q8_0"),
        "STEPS": shape.steps_at,
    }
    name = f"{form.kind}_{form.head_dim}_{shape.rows}_{threads}"
    scope["step_of"] = device_function(expand(_step, name, **scope))
    scope["codes"] = device_function(expand(_codes, name))
    ops = {f.__name__[1:]: device_function(expand(f, name, **scope)) for f in (_fetch, _stage, _quad_of, _four)}
    ops["step_of"] = scope["step_of"]
    fours = range(form.head_dim // shape.quads // 4)
    return ops | {"floats": tuple(device_function(expand(_floats, f"{name}_{i}", FOUR=i, **scope)) for i in fours)}
