"""How keys and values are kept on the device, and what attention's kernel does with them.

A layer's keys are one array of int32 words, [kv_heads, rows, head_dim] numbers and then their scales, if any; so are
its values. Bytes a number:

    f16     2
    f32     4
    q8_0    1.0625    int8 with a step for 32 of them, a half: largest magnitude / 127. The steps of a row lie together,
                      padded to whole words

A thread reads a row of keys 16 bytes at a time, and of values two neighbours at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.intrinsics import (
    bits,
    bits_float,
    float_bits,
    high_half,
    load_16,
    low_half,
    prmt,
    store_2,
    store_4,
    to_half,
    xor,
)
from bridge.cuda.superblock import SIGN_BITS, device_function
from bridge.cuda.unroll import expand, registers, unroll

from bridge.errors import BridgeError

BLOCK = 32  # numbers that share a step
_BYTES = {"f16": 2, "q8_0": 1, "f32": 4}

# set by `functions`: words of a row's steps; loads of 16 bytes in a row, and how many begin before the first is used
KIND = ""
HEAD_DIM = STEP_WORDS = QUADS = AHEAD = 0
number: Any = None
float32 = np.float32


@dataclass(frozen=True)
class Form:
    """Sizes of what is kept."""

    kind: str
    head_dim: int

    def __post_init__(self) -> None:
        if self.kind not in _BYTES:
            raise BridgeError(f"kv {self.kind!r}: {', '.join(_BYTES)} are known")
        if self.head_dim * _BYTES[self.kind] % 16:
            raise BridgeError(f"kv {self.kind!r}: on CUDA a head of {self.head_dim} is no whole 16 bytes; take kv f16")

    @property
    def row_words(self) -> int:
        """Words of a row's numbers."""
        return self.head_dim * _BYTES[self.kind] // 4

    @property
    def step_words(self) -> int:
        """Words of a row's steps."""
        return -(-self.head_dim // (2 * BLOCK)) if self.kind == "q8_0" else 0

    def words(self, rows: int) -> int:
        """Words of as many rows."""
        return rows * (self.row_words + self.step_words)

    def store(self, part: Any, start: int, x: Any) -> None:
        """Put x f32 [n, kv_heads, head_dim] into a layer's rows from `start` on; part int32 [words], of torch."""
        numbers, steps = self._split(part, x.shape[1])
        x = x.transpose(0, 1)
        rows = slice(start, start + x.shape[1])
        if steps is None:
            numbers[:, rows] = x
            return
        import torch

        heads, n, _ = x.shape
        blocks = torch.zeros((heads, n, self.step_words * 2 * BLOCK), dtype=torch.float32, device=x.device)
        blocks[:, :, : self.head_dim] = x
        blocks = blocks.reshape(heads, n, -1, BLOCK)
        step = blocks.abs().amax(3) / 127
        inverse = torch.where(step > 0, 1 / step, 0)
        codes = (blocks * inverse[..., None]).round().to(torch.int8)
        numbers[:, rows] = codes.reshape(heads, n, -1)[:, :, : self.head_dim]
        steps[:, rows] = step.half()

    def load(self, part: Any, count: int, heads: int, dtype: Any) -> Any:
        """The first `count` rows of each head of a layer, [heads, count, head_dim]."""
        numbers, steps = self._split(part, heads)
        found = numbers[:, :count].to(dtype)
        if steps is None:
            return found
        return found * steps[:, :count].repeat_interleave(BLOCK, dim=2)[:, :, : self.head_dim].to(dtype)

    def _split(self, part: Any, heads: int) -> tuple[Any, Any]:
        """Numbers [heads, rows, head_dim] and steps [heads, rows, 2 * step_words] or None, as views."""
        import torch

        rows = part.numel() // (heads * (self.row_words + self.step_words))
        kind = {"f16": torch.float16, "f32": torch.float32, "q8_0": torch.int8}[self.kind]
        end = heads * rows * self.row_words
        numbers = part[:end].view(kind).reshape(heads, rows, self.head_dim)
        if not self.step_words:
            return numbers, None
        return numbers, part[end:].view(torch.float16).reshape(heads, rows, 2 * self.step_words)


def _number(codes, selector):
    """A byte of four codes plus 128, without a conversion: amid the mantissa of 32768 it reads 32768 more."""
    return bits_float(prmt(codes, 0x47000000, selector)) - float32(32768 + 128)


def _dot(keys, steps, row, vector, query):
    """A key times the query in vector[query:]; `steps` is where these begin, in words."""
    dot0 = float32(0)
    dot1 = float32(0)
    quad = registers()
    for i in range(0, QUADS, AHEAD):
        for k in unroll(AHEAD):  # these loads are on their way before the first is used
            quad[k] = load_16(keys, row * QUADS + i + k)
        for k in unroll(AHEAD):
            if KIND == "q8_0":
                e = query + 16 * (i + k)
                part0 = float32(0)
                part1 = float32(0)
                for w in unroll(4):
                    codes = xor(quad[k][w], SIGN_BITS)
                    for b in unroll(0, 4, 2):
                        part0 += number(codes, 0x7404 + 16 * b) * vector[e + 4 * w + b]
                        part1 += number(codes, 0x7414 + 16 * b) * vector[e + 4 * w + b + 1]
                step = low_half(bits(keys[steps + row * STEP_WORDS + (i + k >> 2)], (i + k >> 1 & 1) * 16, 0xFFFF))
                dot0 += step * part0
                dot1 += step * part1
            elif KIND == "f32":
                e = query + 4 * (i + k)
                for w in unroll(0, 4, 2):
                    dot0 += bits_float(quad[k][w]) * vector[e + w]
                    dot1 += bits_float(quad[k][w + 1]) * vector[e + w + 1]
            else:
                e = query + 8 * (i + k)
                for w in unroll(4):
                    dot0 += low_half(quad[k][w]) * vector[e + 2 * w]
                    dot1 += high_half(quad[k][w]) * vector[e + 2 * w + 1]
    return dot0 + dot1


def _pair(values, steps, row, pair):
    """Numbers 2 * pair and 2 * pair + 1 of a row."""
    at = row * (HEAD_DIM // 2) + pair
    if KIND == "q8_0":
        codes = xor(values[at >> 1], SIGN_BITS)
        byte = 0x7404 + (at & 1) * 32
        step = low_half(bits(values[steps + row * STEP_WORDS + (pair >> 5)], (pair >> 4 & 1) * 16, 0xFFFF))
        return step * number(codes, byte), step * number(codes, byte + 16)
    if KIND == "f32":
        return bits_float(values[2 * at]), bits_float(values[2 * at + 1])
    word = values[at]
    return low_half(word), high_half(word)


def _keep(cache, row, e, value):
    """Store number e of a row, where it is kept as it is."""
    if KIND == "f32":
        store_4(cache, row * HEAD_DIM + e, float_bits(value))
    else:
        store_2(cache, row * HEAD_DIM + e, to_half(value))


class Functions(NamedTuple):
    """What the kernel calls."""

    dot: Any
    pair: Any
    keep: Any


@cache
def functions(form: Form) -> Functions:
    """The functions above for a form."""
    quads = form.row_words // 4
    given = {
        "KIND": form.kind,
        "HEAD_DIM": form.head_dim,
        "STEP_WORDS": form.step_words,
        "QUADS": quads,
        "AHEAD": math.gcd(quads, 2 if form.kind == "q8_0" else 4),  # with more of q8_0 registers do not suffice
        "number": device_function(_number),
    }
    name = f"{form.kind}_{form.head_dim}"
    return Functions(*(device_function(expand(function, name, **given)) for function in (_dot, _pair, _keep)))
