"""Writes the repacked checkpoint's folder, file by file.

A safetensors file is copied with its header, and only the bytes of the tensors that change are replaced: names,
order, dtypes, metadata and sharding stay. .bin and .pt files become safetensors, tensor by tensor.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.folder import CheckpointFolder, sync
from bridge.checkpoint.files.store import TensorInfo, header_of
from bridge.errors import BridgeError
from bridge.system.storage.files import read_json

Progress = Callable[[int, int, str], None]
_CHUNK = 8 << 20  # bytes copied at a time


class TensorChange(Protocol):
    """A new value of a tensor, of the same shape and dtype."""

    def apply(self, words: np.ndarray) -> np.ndarray: ...


Changes = Mapping[str, TensorChange]  # by the tensor's name


class FolderOutput(CheckpointFolder):
    """The repacked checkpoint's folder."""

    _ckpt: Checkpoint

    def write(self, changes: Changes, configs: Mapping[str, str], progress: Progress | None) -> None:
        """Write all files: weights with `changes`, `configs` by file name, everything else copied."""
        store, total = self._ckpt.store, self._ckpt.nbytes
        self._tick = progress or (lambda *_: None)
        self._tick(0, total, "")
        names = self._weight_names()
        self._known = {str(Path(name)) for file, name in names.items() if file.suffix == ".safetensors"}
        self._done = 0
        for file in store.files:
            tensors = [info for info in store.tensors.values() if info.file == file]
            self.guard(lambda: self._write_weights(file, names[file], tensors, changes), names[file])  # noqa: B023
        self._write_rest(names, configs)

    # weights

    def _weight_names(self) -> dict[Path, str]:
        """Source file -> its name in the new folder."""
        names = {}
        for file in self._ckpt.store.files:
            name = str(file.relative_to(self._ckpt.path)) if self._ckpt.path.is_dir() else file.name
            if file.suffix != ".safetensors":
                named = self._ckpt.quant.raw.get("model_file_base_name") == file.stem
                alone = len(self._ckpt.store.files) == 1 and not named
                stem = "model" if alone else file.stem.replace("pytorch_model", "model")
                name = str(Path(name).with_name(f"{stem}.safetensors"))
            names[file] = name
        return names

    def _write_weights(self, file: Path, name: str, tensors: list[TensorInfo], changes: Changes) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as out:
            if file.suffix == ".safetensors":
                self._copy(file, out, tensors, changes)
            else:
                self._rewrite(out, tensors, changes)
            sync(out)

    def _copy(self, file: Path, out: BinaryIO, tensors: list[TensorInfo], changes: Changes) -> None:
        """Copy a safetensors file, replacing the bytes of tensors that change."""
        changed = sorted((info for info in tensors if info.name in changes), key=lambda info: info.offset)
        with open(file, "rb", buffering=0) as source:
            for info in changed:
                self._copy_until(source, out, info.offset, info.name)
                words = changes[info.name].apply(self._ckpt.store.read(info.name))
                out.write(np.ascontiguousarray(words).data)
                source.seek(info.nbytes, os.SEEK_CUR)
                self._advance(info.nbytes, info.name)
            self._copy_until(source, out, file.stat().st_size, file.name)

    def _copy_until(self, source: BinaryIO, out: BinaryIO, stop: int, name: str) -> None:
        while (left := stop - source.tell()) > 0:
            data = source.read(min(_CHUNK, left))
            if not data:
                raise BridgeError(f"{source.name}: ends at byte {source.tell()} of {stop}; download the file again")
            out.write(data)
            self._advance(len(data), name)

    def _rewrite(self, out: BinaryIO, tensors: list[TensorInfo], changes: Changes) -> None:
        """Write a pickle's tensors as safetensors: the widest dtypes first, so that all are aligned."""
        width = {
            info.name: self._ckpt.store.read(info.name, (0, 0) if info.shape else None).itemsize for info in tensors
        }
        ordered = sorted(tensors, key=lambda info: -width[info.name])
        head, _ = header_of({info.name: (info.dtype, info.shape, info.nbytes) for info in ordered})
        out.write(head)
        for info in ordered:
            values = self._ckpt.store.read(info.name)
            if info.name in changes:
                values = changes[info.name].apply(values)
            out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            self._advance(info.nbytes, info.name)

    def _advance(self, count: int, name: str) -> None:
        self._done = min(self._done + count, self._ckpt.nbytes)  # headers are not counted
        self._tick(self._done, self._ckpt.nbytes, name)

    # everything else

    def _write_rest(self, names: Mapping[Path, str], configs: Mapping[str, str]) -> None:
        """Write configs and indexes, and copy all other files but foreign weights."""
        indexes, renamed = self._indexes(names)
        for name, text in {**configs, **indexes}.items():
            self.write_file(name, text.encode())
        self.copy_rest({*names, *renamed})

    def _indexes(self, names: Mapping[Path, str]) -> tuple[dict[str, str], list[Path]]:
        """The index of renamed shards, made new if there is none, and the file that it replaces."""
        if all(file.name == Path(name).name for file, name in names.items()) or len(names) == 1:
            return {}, []
        root = self._ckpt.path
        renamed = {str(file.relative_to(root)): name for file, name in names.items()}
        for file in sorted(root.glob("*.index.json")):
            content = read_json(file)
            if set(content.get("weight_map") or ()) and set(content["weight_map"].values()) == set(renamed):
                content["weight_map"] = {tensor: renamed[shard] for tensor, shard in content["weight_map"].items()}
                return {"model.safetensors.index.json": json.dumps(content, indent=2) + "\n"}, [file]
        weight_map = {name: names[info.file] for name, info in self._ckpt.store.tensors.items()}
        content = {"metadata": {"total_size": self._ckpt.nbytes}, "weight_map": weight_map}
        return {"model.safetensors.index.json": json.dumps(content, indent=2) + "\n"}, []

    def foreign(self, file: Path) -> bool:
        if not file.name.endswith(".index.json"):
            return super().foreign(file)
        shards = read_json(file).get("weight_map")
        return not isinstance(shards, dict) or not set(shards.values()) <= self._known
