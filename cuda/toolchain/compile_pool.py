"""Kernels compiled by several processes at once, which take them by the functions that make them and answer with
machine code."""

import sys
from collections.abc import Iterable

from bridge.cuda.toolchain import compiler
from bridge.cuda.toolchain.compiler import Capability, Source

from bridge.system.cpu.cpus import usable_cpus
from bridge.system.kernels.worker import Worker, share_out
from bridge.system.progress import Progress

_MOST = 8  # processes, of 0.3 GB each


def compile_all(sources: Iterable[Source], capability: Capability, progress: Progress) -> dict[Source, str]:
    """Compile those of the kernels that have not been compiled yet, for a GPU that need not be there.

    Returns why, in a line, for those that failed. Whoever needs one of them compiles it again.
    """
    failed: dict[Source, str] = {}
    missing = [source for source in dict.fromkeys(sources) if compiler.known(source, capability) is None]
    missing.sort(key=lambda source: -len(source.function.__code__.co_code))  # the longest first
    count = min(_MOST, usable_cpus(), len(missing))
    if count < 2 or not sys.executable:
        for done, source in enumerate(missing, 1):
            try:
                compiler.code(source, capability)
            except Exception as problem:
                failed[source] = compiler.failure(problem, f"compiling {source.name}")
            progress(done, len(missing), source.name)
        return failed

    def compile(process: _Process, source: Source) -> None:
        code = process.code(source, capability)
        if isinstance(code, str):
            failed[source] = code
        else:
            source.codes[capability] = code

    processes = [_Process() for _ in range(count)]
    share_out(processes, missing, compile, lambda done, source: progress(done, len(missing), source.name))
    return failed


class _Process(Worker):
    """A process that compiles; if it ends, another one takes its place."""

    def __init__(self) -> None:
        super().__init__(__name__, "compiled")

    def code(self, source: Source, capability: Capability) -> compiler.Code | str:
        """Machine code; where that failed, why, in a line."""
        try:
            return self.answer((source, capability))
        except EOFError:
            return f"the process that compiled {source.name} ended with exit code {self._process.returncode}"


def compiled(job: tuple[Source, Capability]) -> compiler.Code | str:
    """What a `_Process` answers to a job: machine code, or in a line why it failed."""
    source, capability = job
    try:
        return compiler.code(source, capability)
    except Exception as problem:
        return compiler.failure(problem, f"compiling {source.name}")
