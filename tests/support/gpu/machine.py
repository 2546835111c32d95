"""A launch of a kernel: all threads of the grid at once, a basic block at a time.

Of the lanes that can go on, those at the earliest block go first, so that lanes which took different ways meet again.
bar.sync waits for the threads of a block that have not ended, shuffles and votes for all 32 lanes of a warp.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.support.gpu.instructions import build
from tests.support.gpu.memory import Access, GpuError, Memory
from tests.support.gpu.operands import TYPES, Step, raw_type
from tests.support.gpu.parse import WARP_WIDE, Instruction, Kernel, parse
from tests.support.gpu.tensor_cores import Copies

WARP = 32
_LIMIT = 2_000_000  # blocks of instructions, after which a launch counts as endless
_CAPACITY = 1 << 16  # threads at once


class Program:
    """PTX made ready to run."""

    def __init__(self, text: str):
        self.kernel = parse(text)
        self.blocks: list[list[tuple[Instruction, Step]]] = [
            [(i, build(i, self.kernel)) for i in block] for block in self.kernel.blocks
        ]
        self.meets = [_meeting(block) for block in self.kernel.blocks]

    def launch(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], dependent: bool = False
    ) -> Memory:
        """Run with arguments as numba passes them: contiguous arrays and numbers; the memory says what was loaded.

        `dependent`: as if launches before were still running until a thread waits for them (griddepcontrol.wait).
        """
        grid, block = _three(grid), _three(block)
        threads, blocks = int(np.prod(block)), int(np.prod(grid))
        if threads % WARP or threads > 1024 or blocks < 1:
            raise GpuError(f"{blocks} blocks of {threads} threads")
        memory = Memory(self.kernel.shared, blocks)
        parameters = _bound(self.kernel, memory, arguments)
        at_once = max(1, _CAPACITY // threads)
        for first in range(0, blocks, at_once):
            with np.errstate(all="ignore"):
                lanes = Lanes(self, memory, parameters, grid, block, first, min(blocks - first, at_once))
                lanes.early[:] = dependent
                lanes.run()
        return memory


@cache
def program(text: str) -> Program:
    """The program of a PTX text, made once."""
    return Program(text)


def _meeting(block: list[Instruction]) -> int:
    """Lanes that a block of instructions waits for: 0, those of a warp, or -1 for those of a thread block."""
    first = block[0]
    if first.guard is not None and not first.opcode.startswith("bra") and first.opcode.startswith(("bar", *WARP_WIDE)):
        raise NotImplementedError(first.text)
    if first.opcode == "bar.sync":
        return -1
    return WARP if first.opcode.startswith(WARP_WIDE) else 0


def _three(size: Any) -> tuple[int, int, int]:
    size = (size,) if isinstance(size, int | np.integer) else tuple(size)
    return tuple(int(n) for n in (*size, 1, 1)[:3])  # type: ignore[return-value]


def _bound(kernel: Kernel, memory: Memory, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
    """Parameters and their bytes. An array is its address; one of two dimensions also its rows, and their distance."""
    values: list[Any] = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            values.append(memory.add(f"argument {number}", argument))
            if argument.ndim == 2:
                values += [len(argument), argument.strides[0] // argument.itemsize]
        else:
            values.append(argument)
    if len(values) != len(kernel.parameters):
        raise GpuError(f"{kernel.name[:60]}: {len(values)} parameters for {len(kernel.parameters)}")
    bound = {}
    for value, (kind, name) in zip(values, kernel.parameters, strict=True):
        type = TYPES[kind] if kind[0] == "f" else TYPES[f"s{kind[1:]}"]
        bound[name] = np.array([value], type).view(np.uint8)
    return bound


class Lanes:
    """Registers and places of some of a launch's threads: `blocks` of them from `first` on."""

    def __init__(
        self, program: Program, memory: Memory, parameters: dict[str, Any], grid: Any, block: Any, first: int,
        blocks: int,
    ):  # fmt: skip
        self.program, self.memory, self.parameters = program, memory, parameters
        self.per_block = int(np.prod(block))
        self.count = blocks * self.per_block
        self.thread = np.arange(self.count, dtype=np.int32) + np.int32(first * self.per_block)
        self.place = np.zeros(self.count, np.int32)
        self.waiting = np.zeros(self.count, bool)
        self.ended = np.zeros(self.count, bool)
        self.barriers = np.zeros(self.count, np.int32)
        self.meetings = np.zeros(self.count, np.int32)
        self.copies = Copies(self.count)
        self.early = np.zeros(self.count, bool)  # lanes that have yet to wait for the launches before
        self._moved: Any = None
        rng = np.random.default_rng(0)  # whatever was in the registers before
        self.registers: dict[str, np.ndarray] = {}
        for name, kind in program.kernel.registers.items():
            noise = rng.integers(0, 2 if kind == "pred" else 1 << 32, dtype=np.uint32)
            self.registers[name] = np.full(self.count, noise).astype(raw_type(kind))
        inside, outside = self.thread % self.per_block, self.thread // self.per_block
        for index, size, name, size_name in ((inside, block, "%tid", "%ntid"), (outside, grid, "%ctaid", "%nctaid")):
            below = 1
            for axis, n in zip("xyz", size, strict=True):
                self.registers[f"{name}.{axis}"] = (index // below % n).astype(np.uint32)
                self.registers[f"{size_name}.{axis}"] = np.full(self.count, n, np.uint32)
                below *= n

    # what instructions ask for

    def set(self, name: str, value: np.ndarray, mask: Any) -> None:
        """Lanes of the mask get the value."""
        before = self.registers[name]
        value = np.asarray(value)
        value = value.view(before.dtype) if value.ndim else np.full(self.count, value.view(before.dtype))
        self.registers[name] = value if mask is None else np.where(mask, value, before)

    def access(self, mask: Any, instruction: Instruction) -> Access:
        chosen = slice(None) if mask is None else mask
        early = bool(self.early[chosen].any())
        return Access(
            self.thread[chosen], self.barriers[chosen], self.meetings[chosen], self.per_block, instruction.text, early
        )

    def jump(self, target: int, mask: Any) -> None:
        self._moved = (target, mask)

    def leave(self, mask: Any) -> None:
        ending = slice(None) if mask is None else mask
        if self.early[ending].any():
            raise GpuError("a thread ends without griddepcontrol.wait: its launch may end before those before it")
        self.ended[ending] = True
        self.waiting[:] = False  # others may have waited for these

    # who runs when

    def run(self) -> None:
        for _ in range(_LIMIT):
            able = ~self.ended & ~self.waiting
            if not able.any():
                if self.ended.all():
                    return
                stuck = sorted({self.program.kernel.blocks[p][0].text for p in self.place[~self.ended]})
                raise GpuError(f"threads wait for each other for ever: {'; '.join(stuck)}")
            here = int(self.place[able].min())
            there = (self.place == here) & ~self.ended
            if self.program.meets[here]:
                there = self._met(there, here)
                if not there.any():
                    continue
            self._advance(here, None if there.all() else there)
        raise GpuError("no end in sight")

    def _met(self, there: np.ndarray, here: int) -> np.ndarray:
        """Lanes at an instruction that waits for others, whose others are there; the rest wait."""
        size = self.program.meets[here]
        groups = there.reshape(-1, size if size > 0 else self.per_block)
        ended = self.ended.reshape(groups.shape)
        if size > 0 and (groups.any(1) & ended.any(1)).any():
            raise GpuError(f"{self.program.kernel.blocks[here][0].text}: lanes of the warp have ended")
        whole = np.repeat((groups | ended).all(1) & groups.any(1), groups.shape[1]) & there
        self.waiting[there] = True
        self.waiting[whole] = False
        (self.meetings if size > 0 else self.barriers)[whole] += 1
        return whole

    def _advance(self, here: int, mask: Any) -> None:
        self._moved = None
        for _, step in self.program.blocks[here]:
            step(self, mask)
        chosen = slice(None) if mask is None else mask
        self.place[chosen] = here + 1
        if self._moved is not None:
            target, taken = self._moved
            self.place[slice(None) if taken is None else taken] = target
