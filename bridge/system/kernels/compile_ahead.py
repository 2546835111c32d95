"""C functions that will be needed are compiled before the first of them is, in several processes."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress

from bridge.system.cpu.cpus import usable_cpus
from bridge.system.kernels import compiling, object_code
from bridge.system.kernels.jit import CFunction

_MOST = 8  # processes, of 0.2 GB each
_EACH = 4  # functions that a process compiles at least: it takes as long as two of them to import Numba


def compile_all(functions: Iterable[CFunction]) -> None:
    """Compile those of the functions that are neither loaded nor kept, and keep them.

    Other processes do it, and end: Numba and what it compiles would take 0.13 GB of this one for good. `compiling`
    counts them. What cannot be compiled so is left to whoever needs it, and so are
    a few functions where this process has Numba already.
    """
    missing = [function for function in dict.fromkeys(functions) if not object_code.known(function)]
    count = min(_MOST, usable_cpus(), len(missing) // _EACH)
    if not missing or (count < 2 and "numba" in sys.modules):
        return
    if sys.executable and not os.environ.get("NUMBA_DISABLE_JIT"):
        _in_processes(missing, max(count, 1))


def _in_processes(missing: list[CFunction], count: int) -> None:
    from bridge.system.cpu.row_threads import thread_limit
    from bridge.system.kernels.worker import Worker, share_out

    missing.sort(key=lambda function: -function.weight)
    try:
        workers = [Worker("bridge.system.kernels.compiler", "answer") for _ in range(count)]
    except OSError:  # no processes may be started here
        return

    def compiled(worker: Worker, function: CFunction) -> None:
        with suppress(EOFError):  # the system has ended it
            code = worker.answer(function)
            if code is not None:
                object_code.keep(function, code)

    with thread_limit(), compiling.kernels_elsewhere(len(missing)) as report:
        share_out(workers, missing, compiled, lambda count, _: report(count))
