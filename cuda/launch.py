"""Kernels, compiled when they are first needed and launched without waiting.

Compiling takes a second, allocates and talks to the driver, none of which may happen while a stream is being
captured into a CUDA graph: `warm` does it beforehand. In the simulator a kernel runs as it stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bridge.cuda import device as devices
from bridge.cuda.intrinsics import SIMULATED
from numba import cuda
from numba.cuda.core import config

from bridge.errors import BridgeError

MAX_REGISTERS = 64  # so that 32 warps find room on a multiprocessor

_quiet = threading.Lock()  # held while Numba is kept from warning


class Kernel:
    """A kernel of one signature and at most so many registers, for the compute capability `oldest` and newer."""

    def __init__(
        self,
        function: Callable[..., None],
        signature: str,
        registers: int = MAX_REGISTERS,
        oldest: tuple[int, int] = (7, 5),
    ):
        self.function = function
        self.signature = signature
        self.registers = registers
        self.oldest = oldest
        self.name = function.__name__
        self._compiled: Any = None
        self._loaded: set[int] = set()

    def warm(self, stream: Any = 0) -> Any:
        """Compile for the current device, or take it from the cache, and load it.

        Raises BridgeError while a graph is captured on the stream, and where compiler or driver refuse.
        """
        if SIMULATED:
            self._compiled = self._compiled or cuda.jit(self.function)
            return self._compiled
        number = cuda.get_current_device().id
        if number not in self._loaded:
            if devices.capturing(stream):
                raise BridgeError(
                    f"{self.name} is not compiled yet and the stream is being captured; run the product once before"
                )
            try:
                if self._compiled is None:
                    # without link-time optimization: then what ptxas says of the PTX is what runs
                    options = {"max_registers": self.registers, "lto": False, "cache": True}
                    self._compiled = cuda.jit(self.signature, **options)(self.function)
                for overload in self._compiled.overloads.values():
                    overload.bind()
            except Exception as problem:
                words = " ".join(str(problem).split())[:400]
                raise BridgeError(
                    f"{self.name} cannot be compiled and loaded: {type(problem).__name__}: {words}; the CUDA packages "
                    "must be of one version, no newer than the driver's: pip install numba-cuda[cu13], or [cu12]"
                ) from problem
            self._loaded.add(number)
        return self._compiled

    def launch(self, grid: Any, block: Any, stream: Any, *arguments: Any) -> None:
        """Queue it on a stream."""
        compiled = self.warm(stream)
        with _quiet:  # a decoder's small kernels are meant to be small; others' are warned of as ever
            kept, config.CUDA_LOW_OCCUPANCY_WARNINGS = config.CUDA_LOW_OCCUPANCY_WARNINGS, 0
            try:
                configured = compiled[grid, block, stream]
            finally:
                config.CUDA_LOW_OCCUPANCY_WARNINGS = kept
        configured(*arguments)
