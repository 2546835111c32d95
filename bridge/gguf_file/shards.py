"""The files of a GGUF that was split."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.errors import BridgeError


def shards(path: Path) -> list[Path]:
    """The files of a GGUF of which `path` is the only one or any shard, in order; BridgeError where one is missing."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match:
        return [path]
    count = int(match[2])
    files = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise BridgeError(f"{missing[0]}: this shard is missing; all {count} must be in one folder")
    return files
