"""A repacked tensor and its products: x becomes records, the pool runs a kernel, y is cut to size.

All of it happens in one compiled call, because from Python every step would cost a microsecond or more.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.jit import inner, specialize
from bridge.runtime.cpu import interleaved, pool, targets
from bridge.runtime.cpu.activations import copier, float_record, quantizer, record_of
from bridge.runtime.cpu.engine import Dequantizing
from bridge.runtime.cpu.layout import Layout, repacker
from bridge.runtime.cpu.pool import run

if TYPE_CHECKING:
    from bridge.runtime.quant_tensor import QuantTensor

_ALONE = 1 << 17  # bytes of weights below which waking others costs more than it saves
_HUGE = 1 << 21  # bytes of a huge page
_SLAB = 16 * _HUGE  # small tensors share memory of this size

# set by `specialize`
fill: Any = None


def _product(x, y, columns, record, blocks, lanes, state, threads, function, weights, stride):
    """y[tokens, rows] = x W^T with a kernel of `columns` columns; y may have less rows than the row groups have."""
    tokens, rows = y.shape
    groups = -(-rows // lanes)
    turns = -(-tokens // columns)
    records = np.empty(turns * columns * blocks * record, np.uint8)
    if turns * columns != tokens:
        for i in range(tokens // columns * columns * blocks * record, records.size):
            records[i] = 0
    fill(x, columns, records)
    if groups * lanes == rows and turns * columns == tokens:
        address = y.ctypes.data
        run(state, threads, function, weights, records.ctypes.data, address, blocks, stride, turns, 4 * rows, groups)
        return
    padded = np.empty((turns * columns, groups * lanes), np.float32)
    address = padded.ctypes.data
    width = 4 * groups * lanes
    run(state, threads, function, weights, records.ctypes.data, address, blocks, stride, turns, width, groups)
    for t in range(tokens):  # a slice assignment would take seconds to compile
        for row in range(rows):
            y[t, row] = padded[t, row]


@cache
def _compiled(name: str, integer: bool) -> Any:
    block = BLOCKS[name]
    kind = f"{'int8' if integer else 'f32'}_{block.size}_{block.sub}_{block.zero}_{int(block.has_min)}"
    return specialize(_product, kind, fill=(quantizer if integer else copier)(name, inner))


def on_huge_pages(nbytes: int) -> np.ndarray:
    """Memory that begins on a huge page; numpy asks the system for such pages."""
    memory = np.empty(nbytes + _HUGE, np.uint8)
    start = -memory.ctypes.data % _HUGE
    return memory[start : start + nbytes]


class _Slabs:
    """Memory on cache lines and in huge pages, for small tensors too: these lie side by side in slabs.

    A matrix of 2 MB on pages of 4 KB costs 600 page faults and has its addresses translated 600 times a product.
    A slab lives as long as one of its tensors; what of it nobody has touched takes no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest: np.ndarray | None = None

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], not initialized."""
        if nbytes >= _SLAB // 4:
            return on_huge_pages(nbytes)
        with self._lock:
            if self._rest is None or self._rest.size < nbytes:
                self._rest = on_huge_pages(_SLAB)
            memory, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // 64) * 64 :]
            return memory


_slabs = _Slabs()


class Prepared:
    """The engine of a prepared tensor."""

    def __init__(self, tensor: QuantTensor, target: str):
        block = BLOCKS[tensor.type]
        module = targets.module(target)
        self.tensor = tensor
        self.block = block
        self.target = target
        self.widths: tuple[int, ...] = module.WIDTHS
        self.lanes: int = module.LANES
        self.name = f"{target}/{tensor.type.lower()}, {self.lanes} rows interleaved"
        layout = Layout(block, self.lanes)
        rows, columns = tensor.shape
        self.blocks = columns // block.size
        self.groups = -(-rows // self.lanes)
        self.stride = layout.stride(self.blocks)
        self.memory = _slabs.take(self.groups * self.stride)
        self._repack(layout)
        self.address = self.memory.ctypes.data
        self.float_fallback = Dequantizing(tensor)
        self._plans: dict[tuple[int, bool], tuple[Any, ...]] = {}

    def _repack(self, layout: Layout) -> None:
        raw = self.tensor.raw.reshape(self.tensor.shape[0], -1)
        repack = repacker(self.block.name)
        codes_from = layout.codes_from(self.blocks)
        threads = pool.get_num_threads()
        step = max(-(-self.groups // (4 * threads)), _ALONE // self.stride + 1)
        starts = range(0, self.groups, step)

        def part(first: int) -> int:
            last = min(first + step, self.groups)
            return repack(raw, first, last, self.lanes, self.stride, codes_from, self.memory)

        if len(starts) < 2 or threads < 2:
            bad = [part(first) for first in starts]
        else:
            with ThreadPoolExecutor(threads) as executor:
                bad = list(executor.map(part, starts))
        if max(bad, default=-1) >= 0:
            row = min(b for b in bad if b >= 0)
            raise BridgeError(f"{self.tensor.name}: the scales of row {row} are not finite; the file is damaged")

    @property
    def nbytes(self) -> int:
        """Bytes of the repacked copy."""
        return self.memory.nbytes

    def run(self, x: np.ndarray, y: np.ndarray, integer: bool) -> None:
        tokens = x.shape[0]
        if tokens == 1:
            self._part(x, y, 1, integer)
        elif not integer:
            self.float_fallback.run(x, y, False)
        else:
            widest = self.widths[-1]
            whole = tokens // widest * widest
            if whole:
                self._part(x[:whole], y[:whole], widest, True)
            if whole < tokens:
                width = next(w for w in self.widths if w >= tokens - whole)
                self._part(x[whole:], y[whole:], width, True)

    def _part(self, x: np.ndarray, y: np.ndarray, columns: int, integer: bool) -> None:
        plan = self._plans.get((columns, integer))
        if plan is None:
            record = record_of(self.block).nbytes if integer else float_record(self.block)
            kernel = interleaved.kernel(self.block.name, self.target, columns, integer)
            plan = (_compiled(self.block.name, integer), record, kernel.address)
            self._plans[columns, integer] = plan
        product, record, function = plan
        threads = pool.get_pool() if self.groups * self.stride * x.shape[0] >= _ALONE else None
        if threads is not None and threads.state and threads.lock.acquire(blocking=False):
            try:
                product(
                    x, y, columns, record, self.blocks, self.lanes, threads.state, threads.threads, function,
                    self.address, self.stride,
                )  # fmt: skip
            finally:
                threads.lock.release()
        else:  # a small tensor, one thread, or another caller has the threads
            product(x, y, columns, record, self.blocks, self.lanes, 0, 1, function, self.address, self.stride)
