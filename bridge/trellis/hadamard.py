"""Orthogonal transforms of trellis-coded layers: U = (had_K kron H) / sqrt(size), H of Sylvester's order.

K is the first of a list of orders that leaves a power of two. Their matrices come from three constructions:

    Paley I      K = q + 1, q = 11, 19, 59, 107, 139
    Paley II     K = 2 (q + 1), q = 13, 17
    Williamson   K = 4 b from four symmetric circulant blocks of size b = 13, 29, 31, 39, 43

A transform may be block-diagonal: of blocks of a smaller size, with K as for the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from bridge.errors import BridgeError

ORDERS = (172, 156, 140, 124, 116, 108, 60, 52, 36, 28, 20, 12)
# the first (b + 1) / 2 entries of the first rows of A, B, C, D: bits from the highest on, 1 for -1
_WILLIAMSON = {
    52: (0x2C, 0x38, 0x16, 0x3D), 116: (0x1B44, 0x04B8, 0x2E68, 0x0E6B), 124: (0x62DE, 0x62DE, 0x7C56, 0x03A9),
    156: (0x1AFB3, 0x0ECF5, 0x1975B, 0x72BE2), 172: (0x1CC289, 0x081EB2, 0x05350B, 0x0E16CF),
}  # fmt: skip


def _character(q: int) -> np.ndarray:
    """[q, q]: the quadratic character of i - j mod q, for a prime q."""
    chi = np.full(q, -1)
    chi[np.arange(1, q) ** 2 % q] = 1
    chi[0] = 0
    i = np.arange(q)
    return chi[(i[:, None] - i) % q]


def _paley_one(order: int) -> np.ndarray:
    matrix = np.ones((order, order), int)
    matrix[0, 1:] = -1
    matrix[1:, 1:] = _character(order - 1) + np.eye(order - 1, dtype=int)
    return matrix


def _paley_two(order: int) -> np.ndarray:
    size = order // 2
    core = np.ones((size, size), int)
    core[0, 0] = 0
    core[1:, 1:] = _character(size - 1)
    eye = np.eye(size, dtype=int)
    return np.kron([[1, 1], [1, -1]], core) + np.kron([[1, -1], [-1, -1]], eye)


def _williamson(order: int) -> np.ndarray:
    size = order // 4
    half = (size + 1) // 2
    i = np.arange(size)
    blocks = []
    for word in _WILLIAMSON[order]:
        first = 1 - 2 * (word >> np.arange(half - 1, -1, -1) & 1)
        row = first[np.minimum(i, size - i)]
        blocks.append(row[(i - i[:, None]) % size])
    a, b, c, d = blocks
    return np.block([[a, b, c, d], [-b, a, -d, c], [-c, d, a, -b], [-d, -c, b, a]])


@cache
def had(order: int) -> np.ndarray:
    """float32 [order, order] of +1 and -1: the Hadamard matrix of one of ORDERS, or of 1."""
    if order == 1:
        return np.ones((1, 1), np.float32)
    build = _williamson if order in _WILLIAMSON else _paley_two if order in (28, 36) else _paley_one
    matrix = build(order).astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def order_for(size: int, name: str) -> int:
    """K for a dimension. Raises BridgeError where none leaves a power of two."""
    for order in (*ORDERS, 1):
        rest, over = divmod(size, order)
        if not over and rest & (rest - 1) == 0 and rest:
            return order
    raise BridgeError(
        f"{name}: no Hadamard matrix is known for {size}: must be 1, {', '.join(map(str, ORDERS))} times a "
        "power of two; the checkpoint is damaged, or made with another transform"
    )


@dataclass(frozen=True)
class Rotation:
    """A block-diagonal orthogonal transform: `size` / `block` blocks of (had_order kron H) / sqrt(block)."""

    size: int
    block: int
    order: int = 1

    @classmethod
    def of(cls, size: int, name: str, blocks: int = 1) -> Rotation:
        """QTIP's transform for a dimension, in `blocks` blocks. Raises BridgeError where there is none."""
        order = order_for(size, name)
        if blocks < 1 or size % blocks or size // blocks % order:
            raise BridgeError(
                f"{name}: a dimension of {size} with factor {order} cannot be split by tp_rank {blocks}; "
                "the checkpoint is damaged"
            )
        return cls(size, size // blocks, order)

    def matrix(self) -> np.ndarray:
        """float64 [block, block]: one block, written out, for reading and for tests."""
        power: np.ndarray = np.ones((1, 1))
        while len(power) < self.block // self.order:
            power = np.kron([[1, 1], [1, -1]], power)
        return np.kron(had(self.order).astype(np.float64), power) / np.sqrt(self.block)

    def rotate(self, x: np.ndarray, transposed: bool = False) -> np.ndarray:
        """Each row v of float32 [n, size] becomes U v, or U^T v; x may be overwritten."""
        from bridge.trellis.butterflies import walsh_hadamard

        power = self.block // self.order
        x = np.ascontiguousarray(x, np.float32)
        walsh_hadamard(x.reshape(-1), power, np.float32(1 / np.sqrt(self.block)))
        if self.order == 1:
            return x
        factor = had(self.order).T if transposed else had(self.order)
        return np.matmul(factor, x.reshape(-1, self.order, power)).reshape(x.shape)

    def rotate_columns(self, x: np.ndarray) -> np.ndarray:
        """U x: each column of float32 [size, n]; x is overwritten."""
        from bridge.trellis.butterflies import walsh_hadamard_columns

        power = self.block // self.order
        walsh_hadamard_columns(x, power, np.float32(1 / np.sqrt(self.block)))
        if self.order == 1:
            return x
        wide = x.reshape(-1, self.order, power * x.shape[1])
        for start in range(0, wide.shape[2], _WIDTH):
            part = wide[:, :, start : start + _WIDTH]
            part[:] = np.matmul(had(self.order), part)
        return x


_WIDTH = 1 << 14  # columns taken at a time, which bounds the memory
