"""A program on a pseudo-terminal of its own. Only POSIX has them: tests that use one are marked `needs_terminal`."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import struct
import subprocess
import sys
import time

import pytest

from tests.conftest import PATIENCE, ROOT

needs_terminal = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fcntl", "pty", "termios")), reason="POSIX's terminals"
)


def open_terminal(rows: int = 25, columns: int = 80) -> tuple[int, int]:
    """A pseudo-terminal: the handles of our end and of the program's."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return ours, theirs


class Terminal:
    """The command line on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = open_terminal()
        command = [sys.executable, "-m", "bridge.cli", *map(str, arguments)]
        own = {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=os.environ | own, start_new_session=True,
            preexec_fn=self._own,
        )  # fmt: skip
        os.close(slave)
        self.said = ""

    @staticmethod
    def _own() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it

    def until(self, text: str) -> None:
        """Wait for a text, which is read off."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.master], [], [], 0.1)[0]:
                self.said += os.read(self.master, 4096).decode()
        self.said = self.said.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def half_a_line(self) -> None:
        """Type what is no whole line; once it is shown, the program waits for more and notices signals."""
        self.until("> ")
        self.type("half")
        self.until("half")
        time.sleep(0.3)
