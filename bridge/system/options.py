"""Options that the command line and Python share: a field of a frozen dataclass with the help that belongs to it.

    @dataclass(frozen=True)
    class Sampling:
        top_k: int = option(40, "draw from the N most likely tokens, 0: from all", metavar="N")

The dataclass holds the default and checks it in `__post_init__`; `bridge.cli.options` makes the flag --top-k of it,
with the default at the end of its help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """How the command line asks for a field.

    help     a noun phrase or an imperative that stands without the flag's name
    flag     "--top-k"; None: made of the field's name
    metavar  what stands for the value in the help; None for a switch
    parse    from text to the value, as argparse's `type`
    choices  the values that are possible, if they are few
    default  what the help says of the default instead of the value; "" for nothing
    """

    help: str
    flag: str | None
    metavar: str | None
    parse: Callable[[str], Any] | None
    choices: Sequence[str] | None
    default: str | None


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    says: str | None = None,
) -> Any:
    """A dataclass field with a flag; see `Flag` for the arguments, `says` is its `default`."""
    metadata = {"flag": Flag(help, flag, metavar, parse, choices, says)}
    return field(default=default, metadata=metadata) if default is not MISSING else field(metadata=metadata)
