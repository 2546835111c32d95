"""What lanes load and store: arrays given to a launch, and each block's shared memory.

Every access must lie inside one array and be aligned to its width, as a GPU demands (it stops with an error
otherwise, or reads what is not ours). Beyond that it is refused

    in a block        that two threads touch a byte, one of them storing another value, with no barrier between:
                      bar.sync, or for threads of one warp any instruction that waits for the whole warp
    in a launch       that threads of two blocks store different values at one place, other than by atomics
                      that a thread reads what another block stores without release and acquire (order.py)
                      that `ld.global.nc`, which may come from a cache that is not invalidated, reads what is stored
    in shared memory  that something is read before anything was stored
    where launches    that a thread loads or stores in global memory before griddepcontrol.wait, or ends without it
    overlap
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.gpu.order import Order

REGION = 40  # bits of an address that say where in an array it is
SECTOR = 32  # bytes that memory gives at a time
_NOBODY = np.iinfo(np.int32).max


class GpuError(Exception):
    """An error that a GPU would, or might, not tolerate."""


@dataclass
class Access:
    """Who loads or stores, int32, one entry a lane; `per_block` threads make a block."""

    thread: np.ndarray  # number in the grid
    barriers: np.ndarray  # that its block has passed
    meetings: np.ndarray  # that its warp has passed
    per_block: int
    text: str
    early: bool = False  # whether one of them has not waited for the launches before

    def check_time(self) -> None:
        """Before an access to global memory."""
        if self.early:
            raise GpuError(f"{self.text}: global memory before griddepcontrol.wait, while launches before run")


class Region:
    """Bytes, with a record of who touched them."""

    def __init__(self, name: str, data: np.ndarray, first: int, order: Order):
        self.name, self.data, self.first, self.order = name, data, first, order
        self.fetched = 0  # bytes of the sectors that warps have asked for, each access by itself
        n = len(data)
        self._kept: list[np.ndarray] = []  # sectors, with the block, that L1 keeps
        self._passing = 0
        self.frozen = np.zeros(n, bool)  # read by ld.global.nc
        self.stored = np.zeros(n, bool)
        self.writer = np.full(n, -1, np.int32)
        self.readers = np.full((2, n), -1, np.int32)  # the least and the greatest since the last barrier
        self.readers[0] = _NOBODY
        self.when = np.full((4, n), -1, np.int32)  # barriers and meetings when it was stored; when it was read

    def places(self, address: np.ndarray, width: int, text: str) -> np.ndarray:
        """int64 [lanes, width]: indices of the bytes."""
        at = address.astype(np.int64) - self.first
        if at.min() < 0 or at.max() + width > len(self.data):
            wrong = at[(at < 0) | (at + width > len(self.data))][0]
            raise GpuError(f"{text}: byte {wrong} of {self.name}, which has {len(self.data)}")
        if (address % np.uint64(width)).any():
            raise GpuError(f"{text}: an address in {self.name} is not a multiple of {width}")
        return at[:, None] + np.arange(width)

    @property
    def fetched_from_l2(self) -> int:
        """As `fetched`, but sectors that L1 keeps count once for a block: where its cache is large enough for them."""
        kept = len(np.unique(np.concatenate(self._kept))) if self._kept else 0
        return self._passing + SECTOR * kept

    def read(self, at: np.ndarray, who: Access, frozen: bool = False, kept: bool = False) -> np.ndarray:
        """uint8 [lanes, width]; `frozen`: past the caches that stores reach; `kept` in L1."""
        sectors = np.unique((who.thread >> 5).astype(np.int64) << REGION | at[:, 0] // SECTOR)
        self.fetched += SECTOR * len(sectors)
        if frozen and kept:
            self._kept.append(np.unique((who.thread // who.per_block).astype(np.int64) << REGION | at[:, 0] // SECTOR))
        else:
            self._passing += SECTOR * len(sectors)
        if frozen:
            self.frozen[at] = True
            if self.stored[at].any():
                raise GpuError(f"{who.text}: reads past the coherent cache what this launch stores in {self.name}")
            return self.data[at]
        writer = self.writer[at]
        self._meet(at, who, writer, writer, self.when[:2, at], "stored")
        if (wrong := self.order.missing(writer, self.when[0, at], who)).any():
            raise GpuError(
                f"{who.text}: no release and acquire between thread {who.thread[wrong.any(1)][0]} and what thread "
                f"{writer[wrong][0]} of another block stored in {self.name}"
            )
        before = at[self.when[2][at] != who.barriers[:, None]]
        self.readers[0][before], self.readers[1][before] = _NOBODY, -1
        thread = np.broadcast_to(who.thread[:, None], at.shape)
        np.minimum.at(self.readers[0], at, thread)
        np.maximum.at(self.readers[1], at, thread)
        self.when[2][at], self.when[3][at] = who.barriers[:, None], who.meetings[:, None]
        return self.data[at]

    def write(self, at: np.ndarray, values: np.ndarray, who: Access) -> None:
        """Store uint8 [lanes, width]."""
        if self.frozen[at].any():
            raise GpuError(f"{who.text}: stores in {self.name} what was read past the coherent cache")
        new = self.data[at] != values
        writer = self.writer[at]
        self._meet(at, who, *self.readers[:, at], self.when[2:, at], "read", new)
        self._meet(at, who, writer, writer, self.when[:2, at], "stored", new)
        apart = (writer >= 0) & (writer // who.per_block != who.thread[:, None] // who.per_block)
        self.data[at] = values
        if (apart & new).any() or (self.data[at] != values).any():
            raise GpuError(f"{who.text}: threads store different values at one place in {self.name}")
        self.stored[at] = True
        self.writer[at] = who.thread[:, None]
        self.when[0][at], self.when[1][at] = who.barriers[:, None], who.meetings[:, None]

    def exchange(self, at: np.ndarray, values: np.ndarray) -> None:
        """What an atomic operation stores: it meets nobody."""
        self.data[at] = values
        self.stored[at] = True
        self.writer[at] = -1

    def _meet(
        self, at: np.ndarray, who: Access, least: Any, most: Any, when: Any, did: str, concerned: Any = True
    ) -> None:
        """Refuse that threads of this block from `least` to `most` did it with nothing between then and now."""
        thread = who.thread[:, None]
        others = (most >= 0) & ((least != thread) | (most != thread)) & concerned
        here = (most // who.per_block == thread // who.per_block) & (when[0] == who.barriers[:, None])
        own = (least >> 5 == thread >> 5) & (most >> 5 == thread >> 5) & (when[1] < who.meetings[:, None])
        if (wrong := others & here & ~own).any():
            lane, byte = np.argwhere(wrong)[0]
            raise GpuError(
                f"{who.text}: no barrier between thread {who.thread[lane]} and what thread "
                f"{most[lane, byte]} {did} at byte {at[lane, byte]} of {self.name}"
            )


class Memory:
    """All arrays of a launch, and the shared memory of `blocks` blocks."""

    def __init__(self, shared: list[tuple[str, int, int]], blocks: int):
        self.regions: list[Region] = []
        self.symbols: dict[str, int] = {}
        size = 256
        for name, nbytes, align in shared:
            size = -(-size // align) * align
            self.symbols[name] = size
            size += nbytes + 256  # so that what runs over meets nothing
        self._size = size
        self._reserved = np.zeros(size, bool)
        for name, nbytes, _ in shared:
            self._reserved[self.symbols[name] : self.symbols[name] + nbytes] = True
        self.order = Order(blocks)
        self.shared = Region("shared memory", np.full(size * blocks, 0xA5, np.uint8), 0, self.order)

    def add(self, name: str, data: np.ndarray) -> int:
        """The address of an array with contiguous rows, which is aligned as the array itself is."""
        first = (len(self.regions) + 1 << REGION) + 4096 + data.ctypes.data % 64
        if data.flags.c_contiguous:
            whole = data.reshape(-1)
        elif data.ndim == 2 and data.strides[1] == data.itemsize:  # with what lies between the rows
            size = (len(data) - 1) * data.strides[0] // data.itemsize + data.shape[1]
            whole = np.lib.stride_tricks.as_strided(data, (size,), (data.itemsize,))
        else:
            raise GpuError(f"{name} is not contiguous")
        self.regions.append(Region(name, whole.view(np.uint8), first, self.order))
        return first

    def load(
        self, space: str, address: np.ndarray, width: int, who: Access, frozen: bool = False, kept: bool = False
    ) -> np.ndarray:
        """uint8 [lanes, width]."""
        if space == "shared":
            at = self._shared(address, width, who)
            if not self.shared.stored[at].all():
                raise GpuError(f"{who.text}: reads shared memory before anything was stored there")
            return self.shared.read(at, who)
        result = np.empty((len(address), width), np.uint8)
        for region, lanes in self._split(address, who):
            at = region.places(address[lanes], width, who.text)
            result[lanes] = region.read(at, _some(who, lanes), frozen, kept)
        return result

    def store(self, space: str, address: np.ndarray, values: np.ndarray, who: Access) -> None:
        """Values uint8 [lanes, width]."""
        if space == "shared":
            self.shared.write(self._shared(address, values.shape[1], who), values, who)
            return
        for region, lanes in self._split(address, who):
            at = region.places(address[lanes], values.shape[1], who.text)
            region.write(at, values[lanes], _some(who, lanes))

    def awaited(self, address: np.ndarray, width: int, who: Access) -> None:
        """A copy to shared memory is under way: the old contents are lost, and reading must wait until it arrives."""
        at = self._shared(address, width, who)
        self.shared.write(at, np.full(at.shape, 0xA5, np.uint8), who)
        self.shared.stored[at] = False

    def atomic(self, space: str, address: np.ndarray, operands: np.ndarray, combine: Any, who: Access) -> np.ndarray:
        """What was there; one lane after the other replaces it by combine(it, operand)."""
        old = np.empty_like(operands)
        for lane in range(len(address)):
            if space == "shared":
                region, at = self.shared, self._shared(address[lane : lane + 1], operands.itemsize, who, lane)
            else:
                ((region, _),) = self._split(address[lane : lane + 1], who)
                at = region.places(address[lane : lane + 1], operands.itemsize, who.text)
            old[lane] = region.data[at].view(operands.dtype)[0, 0]
            new = np.asarray(combine(old[lane], operands[lane]), operands.dtype)
            region.exchange(at, new.reshape(1, 1).view(np.uint8))
        return old

    def _shared(self, address: np.ndarray, width: int, who: Access, lane: int | None = None) -> np.ndarray:
        thread = who.thread if lane is None else who.thread[lane : lane + 1]
        inside = address <= np.uint64(self._size - width)
        if not inside.all() or (address % np.uint64(width)).any():
            raise GpuError(f"{who.text}: {width} bytes at {address.max()} of shared memory")
        at = address.astype(np.int64)[:, None] + np.arange(width)
        if not self._reserved[at].all():
            raise GpuError(f"{who.text}: shared memory beyond an array")
        return at + (thread // who.per_block * self._size)[:, None]

    def reach(self, address: np.ndarray, width: int, who: Access) -> None:
        """A prefetch, which reads nothing."""
        for region, lanes in self._regions(address, who.text):
            region.places(address[lanes], width, who.text)

    def _split(self, address: np.ndarray, who: Access) -> list[tuple[Region, Any]]:
        """The regions that lanes load from or store to."""
        who.check_time()
        return self._regions(address, who.text)

    def _regions(self, address: np.ndarray, text: str) -> list[tuple[Region, Any]]:
        """The regions that lanes' addresses lie in."""
        number = (address >> np.uint64(REGION)).astype(np.int64) - 1
        if (number < 0).any() or (number >= len(self.regions)).any():
            raise GpuError(f"{text}: address {int(address[(number < 0) | (number >= len(self.regions))][0]):#x}")
        if (number == number[0]).all():
            return [(self.regions[number[0]], slice(None))]
        return [(self.regions[k], number == k) for k in np.unique(number)]


def _some(who: Access, lanes: Any) -> Access:
    if isinstance(lanes, slice):
        return who
    return Access(who.thread[lanes], who.barriers[lanes], who.meetings[lanes], who.per_block, who.text, who.early)
