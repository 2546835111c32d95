"""--json: what a command finds, for programs. Alone on standard output; docs/commands.md lists the keys."""

import argparse
import json
import math
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option of commands that can `print_json`."""
    parser.add_argument("--json", action="store_true", help="print what is found as JSON, for programs")


def print_json(record: Any) -> None:
    """Print a record of dicts, lists, texts and numbers, Python's or numpy's; infinite ones and NaN become null."""
    text = json.dumps(_plain(record), indent=1)
    print(text.replace("\x7f", "\\u007f"))  # the one control character that JSON allows; standard output escapes it


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # numpy's
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)
