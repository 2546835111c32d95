"""The one kind of error a user may see.

A message states the fact, the file or tensor, and the way out, in one line. The command line
prints it and exits with 2; anything else that is raised is a defect of ours and shows a traceback.
"""

_LONGEST, _END = 1000, 300  # characters of a line


class BridgeError(Exception):
    """Something about the input or the machine that the user can mend."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(line: str) -> str:
    """A line for people: where a name or a text out of somebody's file makes it endless, its middle is left out."""
    cut = " ... "
    return line if len(line) <= _LONGEST else line[: _LONGEST - _END - len(cut)] + cut + line[-_END:]
