"""A repacked copy of a tensor, in memory of its own."""

from collections.abc import Callable

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.cpu.engines import interleaved
from bridge.runtime.cpu.engines.portable import RawMatrix
from bridge.runtime.cpu.engines.products import Interleaved
from bridge.runtime.cpu.forms.repack import repacker
from bridge.system.cpu import numa
from bridge.system.cpu.fork_locks import ForkLock
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels.jit import CFunction
from bridge.system.threads import pool
from bridge.system.threads.jobs import owner

_HUGE = 1 << 21  # bytes of a huge page
_SLAB = 64 * _HUGE  # small tensors share memory of this size
_PART = 4 << 20  # bytes that a thread repacks at a time


def on_huge_pages(nbytes: int) -> np.ndarray:
    """Memory that begins on a huge page; numpy asks the system for such pages."""
    memory = np.empty(nbytes + _HUGE, np.uint8)
    start = -memory.ctypes.data % _HUGE
    return memory[start : start + nbytes]


class _Slabs:
    """Memory aligned to cache lines, in huge pages; small tensors share slabs.

    A matrix of 2 MB on pages of 4 KB costs 600 page faults and has its addresses translated 600 times a product.
    A slab lives as long as one of its tensors; its untouched pages take no memory. The last page that is touched is
    seldom full: in slabs of 32 MB, that is 2% of the weights, in those of 128 MB 0.5%. On several NUMA nodes, a huge
    page is of the one that writes to it first: where the parts of two nodes meet, up to 2 MB of each matrix are read
    from afar, and of matrices smaller than that, all may be.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
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


class Prepared(Interleaved):
    """The engine of a prepared tensor.

    done  called with the first byte of `raw` that was repacked and the one after the last, for each part of it
    """

    def __init__(self, matrix: RawMatrix, target: str, done: Callable[[int, int], None] | None = None):
        super().__init__(matrix, target)
        self.name = f"{target}/{matrix.type.lower()}, {self.lanes} rows interleaved"
        self.memory = _slabs.take(self.groups * self.stride)
        self.address = self.memory.ctypes.data
        self._repack(done)

    def _repack(self, done: Callable[[int, int], None] | None) -> None:
        raw, rows = self.matrix.raw, self.matrix.shape[0]
        repack = repacker(self.block.name, self.lanes).ctypes  # lets other threads run
        codes_from = self.layout.codes_from(self.blocks)
        threads = pool.get_num_threads()
        most = max(1, _PART // self.stride)
        step = min(most, max(-(-self.groups // (4 * threads)), pool.MIN_BYTES_TO_SHARE // self.stride + 1))
        starts = range(0, self.groups, step)

        bad = np.full(len(starts), rows, np.int64)
        row_bytes = raw.size // rows
        cpus = pool.thread_cpus()

        def part(i: int) -> None:
            last = min(starts[i] + step, self.groups)
            if (
                cpus is not None
            ):  # memory is of the node where it is first written: that of the thread that will read it
                numa.keep_on(cpus[owner((starts[i] + last) // 2, self.groups, threads)])
            sizes = rows, row_bytes, self.stride, codes_from
            repack(raw.ctypes.data, *sizes, self.address, bad[i:].ctypes.data, starts[i], last)
            if done is not None:
                done(starts[i] * self.lanes * row_bytes, min(last * self.lanes, rows) * row_bytes)

        if threads < 2 or (len(starts) < 2 and cpus is None):
            for i in range(len(starts)):
                part(i)
        else:
            from concurrent.futures import ThreadPoolExecutor

            order = list(range(len(starts)))
            if cpus is not None:  # one of each thread's first, so that no node waits
                each = max(1, len(starts) // threads)
                order.sort(key=lambda i: i % each)
            with thread_limit(), ThreadPoolExecutor(threads) as executor:
                list(executor.map(part, order))
        if (row := bad.min(initial=rows)) < rows:
            raise BridgeError(f"{self.matrix.name}: the scales of row {row} are not finite; the file is damaged")

    @property
    def nbytes(self) -> int:
        """Bytes of the repacked copy."""
        return self.memory.nbytes

    def kernels(self, columns: int, integer: bool) -> list[CFunction]:
        return [interleaved.kernel(self.block.name, self.target, columns, integer, False)]

    def kernel(self, columns: int, integer: bool, near: bool) -> tuple[int, int]:
        return interleaved.kernel(self.block.name, self.target, columns, integer, near).address, self.address
