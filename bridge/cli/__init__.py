"""The command line, one module a command: arguments to calls, results to text.

`commands` lists them; files/ has those that read and write files, use/ those that run a model. `options` makes flags of
the dataclasses that Python takes too; each command has `add_parser` and `run`. `program` finds the command and runs it.
Errors are one line and exit code 2.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from bridge.system.progress import say
from bridge.system.status_line import LINE


def main(argv: Sequence[str] | None = None, spread: Any = None) -> int:
    """Run the program; returns the exit code: 0, 1 (verify found a tensor beyond its threshold), 2 (error), or 128 and
    the number of the signal that stopped it, 130 for Ctrl-C. `spread`: that of `Calibration`."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # an import that an exception ends may print a traceback, or go on
        signal.signal(signal.SIGINT, _leave)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")  # numpy's threads spin for 0.1 s of a start otherwise
    gc.set_threshold(100_000, 20, 20)  # a vocabulary's strings are no circles
    words = sys.argv[1:] if argv is None else argv
    with LINE.running():
        try:
            say(f"{words[0]}: starting" if words else "")
            from bridge.cli.program import import_command, run_program

            import_command(words)
        finally:
            signal.signal(signal.SIGINT, interrupt)
        return run_program(words, spread)


def entry_point() -> NoReturn:
    """The program `gguf-bridge`: `main`, and an end that leaves it to the system to free memory.

    Python would look through all objects, and free them one by one: 25 ms. Whatever else is to be done at the end, by
    `atexit` or in other threads, is done before.
    """
    done: list[int] = []

    def leave() -> None:
        if done:
            with suppress(OSError, ValueError):  # closed
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(done[0])

    atexit.register(leave)  # the first to register is called last
    done.append(main())
    sys.exit(done[0])


def _leave(number: int, frame: Any) -> None:
    with suppress(OSError):  # closed
        os.write(2, f"{LINE.erasing()}stopped\n".encode())
    os._exit(128 + number)
