"""Regular expressions that come out of files: compared with names within a limit of time and of memory.

Python's `re` backtracks without end on some ("(a|a)*$") and holds everything up meanwhile. The `regex` package takes
the same syntax and stops after a time; it unrolls counted repeats, so these are limited before.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from bridge.errors import BridgeError

SECONDS = 1.0  # for one comparison; usual ones take microseconds
_MAX_UNROLLED = 1_000_000  # characters of a pattern whose counted repeats are written out
# an escaped character, a class of characters, a count, or any other character
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{([0-9]+)[0-9,]*\}|.", re.DOTALL)


def pattern_problem(pattern: str) -> str | None:
    """Why a pattern cannot be used as a regular expression; None if it can."""
    compiled = _compiled(pattern)
    return compiled if isinstance(compiled, str) else None


def matched(how: Literal["match", "search", "fullmatch"], pattern: str, name: str, source: Path | str | None) -> bool:
    """Whether a pattern is found in a name as `re` finds it: at its start, anywhere, or as all of it.

    A pattern that has a `pattern_problem` matches nothing. Raises BridgeError, which names the pattern and its `source`
    (a file or an argument), where the comparison takes longer than SECONDS.
    """
    compiled = _compiled(pattern)
    if isinstance(compiled, str):
        return False
    find: Callable[..., Any] = getattr(compiled, how)
    try:
        return find(name, timeout=SECONDS) is not None
    except TimeoutError:
        raise BridgeError(
            f"{source}: comparing the pattern {pattern!r:.80} with {name!r:.80} takes more than {SECONDS:g} s; "
            "simplify the pattern"
        ) from None


@lru_cache(maxsize=1 << 16)
def _compiled(pattern: str) -> Any:
    """regex's Pattern, or why there is none."""
    import regex  # when a pattern is there: most files have none

    unrolled = _unrolled(pattern)
    if unrolled > _MAX_UNROLLED:
        return f"its counted repeats unroll to {unrolled:.1e} characters, the limit is {_MAX_UNROLLED:.0e}"
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as problem:
        return str(problem)


def _unrolled(pattern: str) -> int:
    """Characters of a pattern whose counted repeats are written out, nested ones too."""
    groups, last = [0], 0  # sizes of the groups that are open, and of the latest character or group
    for part in _PARTS.finditer(pattern):
        if part[1] is not None:
            added = last * (max(int(part[1][:9]), 1) - 1)
            groups[-1] += added
            last += added
        elif part[0] == "(":
            groups.append(1)
        elif part[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)
