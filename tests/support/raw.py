"""safetensors files as bytes: to damage them, or to deal them out to shards, without knowing their dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Raw = dict[str, tuple[dict[str, Any], bytes]]  # name -> (dtype and shape, data)


def read_raw(file: Path) -> Raw:
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, stop = entry.pop("data_offsets")
        tensors[name] = (entry, data[start + first : start + stop])
    return tensors


def write_raw(file: Path, tensors: Raw) -> None:
    header, offset = {}, 0
    for name, (entry, data) in tensors.items():
        header[name] = {**entry, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values()))


def edit_raw(file: Path, change: Callable[[Raw], Any]) -> None:
    """Read, change in place, write."""
    tensors = read_raw(file)
    change(tensors)
    write_raw(file, tensors)


def shard(folder: Path, count: int = 2) -> list[Path]:
    """Deal the tensors of model.safetensors out to `count` files and an index; returns the files."""
    tensors = read_raw(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files, weight_map = [], {}
    for i in range(count):
        files.append(folder / f"model-{i + 1:05}-of-{count:05}.safetensors")
        part = {name: tensors[name] for name in list(tensors)[i::count]}
        write_raw(files[-1], part)
        weight_map |= dict.fromkeys(part, files[-1].name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files
