"""`gguf-bridge cache`."""

import argparse
import time
from typing import Any

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import command
from bridge.errors import BridgeError
from bridge.system.storage.cache import cache_folder, entries, remove
from bridge.system.text import align, size_text

_ALL = ""
_KERNELS = ("kernels", "numba")  # kinds of entries that are one line in the list


def add_parser(commands: Any) -> None:
    p = command(commands, "cache", run)
    p.add_argument(
        "--clear", nargs="?", const=_ALL, metavar="NAME",
        help="remove the GGUFs that no process is using; with a name from the list, with or without the digest at its "
        "end, only that entry",
    )  # fmt: skip
    p.add_argument(
        "--kernels", action="store_true",
        help="with --clear: remove compiled kernels too, which the next start of a command compiles again",
    )  # fmt: skip
    add_json(p)


def run(a: argparse.Namespace) -> int:
    cached = entries()
    if a.kernels and a.clear is None:
        raise BridgeError("--kernels needs --clear")
    if a.clear is None and a.json:
        listed = [{"kind": e.kind, "name": e.path.name, "bytes": e.nbytes, "last_used": e.used} for e in cached]
        print_json({"folder": cache_folder(), "bytes": sum(e.nbytes for e in cached), "entries": listed})
        return 0
    if a.clear is None:
        rows = [_row(e.kind, e.path.name, e.nbytes, e.used) for e in cached if e.kind not in _KERNELS]
        if kernels := [e for e in cached if e.kind in _KERNELS]:
            name = f"{len(kernels)} of this program's functions"
            rows.append(_row("kernels", name, sum(e.nbytes for e in kernels), max(e.used for e in kernels)))
        if rows:
            lines = align([("kind", "name", "size", "last used"), *rows], (True, True, False, True))
            print("\n".join(lines))
        print(f"{size_text(sum(e.nbytes for e in cached))} in {cache_folder()}")
        return 0
    if a.clear == _ALL:
        chosen = [e for e in cached if a.kernels or e.kind not in _KERNELS]
    else:
        named = [e for e in cached if a.clear in (e.path.name, e.path.name.rpartition("-")[0])]
        chosen = named + [e for e in cached if named and a.kernels and e.kind in _KERNELS and e not in named]
    if a.clear and not chosen:
        raise BridgeError(f"{a.clear}: no such entry in {cache_folder()}; `gguf-bridge cache` lists the entries")
    kept = [entry for entry in chosen if not remove(entry)]
    freed = sum(entry.nbytes for entry in chosen if entry not in kept)
    if a.json:
        print_json({"folder": cache_folder(), "removed_bytes": freed, "in_use": [entry.path.name for entry in kept]})
        return 0
    for entry in kept:
        print(f"not removed: {entry.path.name}, a process is using it")
    print(f"removed {size_text(freed)} from {cache_folder()}")
    return 0


def _row(kind: str, name: str, nbytes: int, used: float) -> tuple[str, ...]:
    return kind, name, size_text(nbytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
