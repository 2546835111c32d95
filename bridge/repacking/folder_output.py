"""A checkpoint folder on its way to disk: streamed file by file, and never half-written under its final name.

A safetensors file is copied with its header, and only the ranges of the tensors that change are replaced: names,
order, dtypes, metadata and sharding stay. .bin and .pt files become safetensors, tensor by tensor. Everything
happens in a folder of a temporary name beside the target, which is synced and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.store import TensorInfo
from bridge.checkpoint.weight_files import NOT_WEIGHTS, WEIGHTS
from bridge.errors import BridgeError
from bridge.files import expect_regular, read_json
from bridge.held import unfinished
from bridge.output import sync_folder

Progress = Callable[[int, int, str], None]
_CHUNK = 8 << 20  # bytes copied at a time


class Change(Protocol):
    """What becomes of a tensor: same shape, same dtype."""

    def apply(self, words: np.ndarray) -> np.ndarray: ...


class FolderOutput:
    """The new folder. Use as a context manager: leaving it without `finish` removes every trace.

    ckpt   what is repacked
    path   the folder's final name
    force  whether a checkpoint of that name may be replaced

    left_out  files of weights beside the checkpoint's own, which would not fit the new ones
    """

    def __init__(self, ckpt: Checkpoint, path: Path, force: bool) -> None:
        self.path = path
        self.left_out: list[str] = []
        self._ckpt, self._force = ckpt, force
        self._done = 0
        self._check()
        self._temporaries = ExitStack()
        self._guard(self._begin, "the folder")

    def __enter__(self) -> FolderOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporaries.close()

    def _begin(self) -> None:
        self._temporary = self._temporaries.enter_context(unfinished(self.path))
        self._folder = self._temporary / self.path.name
        self._folder.mkdir()

    def _check(self) -> None:
        """Refuse a target that cannot or must not be written."""
        path = self.path
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise BridgeError(f"{path}: is a {'link' if path.is_symlink() else 'file'}; give the folder to write")
        if not path.parent.is_dir():
            raise BridgeError(f"{path.parent}: no such folder; make it or give another output")
        target = path.resolve()
        for source in {self._ckpt.path.resolve(), self._ckpt.home.resolve()}:
            if target == source or source in target.parents or target in source.parents:
                raise BridgeError(f"{path}: is, holds or lies in the source {source}; give another folder to write")
        if path.is_dir() and any(path.iterdir()):
            if not self._force:
                raise BridgeError(f"{path}: exists; --force replaces it")
            if not (path / "config.json").exists():
                raise BridgeError(f"{path}: is no checkpoint's folder, and --force replaces nothing else; give another")

    def write(self, changes: Mapping[str, Change], configs: Mapping[str, str], progress: Progress | None) -> None:
        """All files: weights with `changes` by tensor name, `configs` by file name, everything else copied."""
        store, total = self._ckpt.store, self._ckpt.nbytes
        self._tick = progress or (lambda *_: None)
        self._tick(0, total, "")
        names = self._weight_names()
        for file in store.files:
            tensors = [info for info in store.tensors.values() if info.file == file]
            self._guard(lambda: self._write_weights(file, names[file], tensors, changes), names[file])  # noqa: B023
        self._write_rest(names, configs)

    def finish(self) -> None:
        """Sync and rename into place."""
        for folder, _, _ in os.walk(self._folder):
            sync_folder(Path(folder))
        old = self._temporary.with_suffix(".old")  # beside it: what another run does not remove
        replaced = self.path.exists()
        if replaced:
            self._guard(lambda: os.rename(self.path, old), "the folder")
        try:
            os.rename(self._folder, self.path)
        except BaseException as problem:
            if replaced and not self.path.exists():
                os.rename(old, self.path)
            if isinstance(problem, OSError):
                raise BridgeError(f"{self.path}: cannot be renamed into place ({problem.strerror})") from problem
            raise
        sync_folder(self.path.parent)
        with suppress(OSError):  # there may be none
            os.rename(old, self._temporary / "old")

    # weights

    def _weight_names(self) -> dict[Path, str]:
        """Source file -> its name in the new folder."""
        names = {}
        for file in self._ckpt.store.files:
            name = str(file.relative_to(self._ckpt.path)) if self._ckpt.path.is_dir() else file.name
            if file.suffix != ".safetensors":
                own = self._ckpt.quant.raw.get("model_file_base_name") == file.stem
                alone = len(self._ckpt.store.files) == 1 and not own
                stem = "model" if alone else file.stem.replace("pytorch_model", "model")
                name = str(Path(name).with_name(f"{stem}.safetensors"))
            names[file] = name
        return names

    def _write_weights(self, file: Path, name: str, tensors: list[TensorInfo], changes: Mapping[str, Change]) -> None:
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as out:
            if file.suffix == ".safetensors":
                self._copy(file, out, tensors, changes)
            else:
                self._rewrite(out, tensors, changes)
            _sync(out)

    def _copy(self, file: Path, out: BinaryIO, tensors: list[TensorInfo], changes: Mapping[str, Change]) -> None:
        """A safetensors file with the bytes of some tensors replaced."""
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

    def _rewrite(self, out: BinaryIO, tensors: list[TensorInfo], changes: Mapping[str, Change]) -> None:
        """A pickle's tensors as safetensors: the widest dtypes first, so that all are aligned."""
        width = {
            info.name: self._ckpt.store.read(info.name, (0, 0) if info.shape else None).itemsize for info in tensors
        }
        ordered = sorted(tensors, key=lambda info: -width[info.name])
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in ordered:
            header[info.name] = {
                "dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, offset + info.nbytes]
            }  # fmt: skip
            offset += info.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        out.write(len(text).to_bytes(8, "little") + text)
        for info in ordered:
            values = self._ckpt.store.read(info.name)
            if info.name in changes:
                values = changes[info.name].apply(values)
            out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            self._advance(info.nbytes, info.name)

    def _advance(self, count: int, name: str) -> None:
        self._done = min(self._done + count, self._ckpt.nbytes)  # a header is no tensor
        self._tick(self._done, self._ckpt.nbytes, name)

    # everything else

    def _write_rest(self, names: Mapping[Path, str], configs: Mapping[str, str]) -> None:
        """Configs, indexes, and all that is no weight of another kind."""
        indexes, renamed = self._indexes(names)
        for name, text in {**configs, **indexes}.items():
            self._write(self._folder / name, text.encode())
        taken = {*names, *renamed}
        for root in dict.fromkeys([self._ckpt.home, *([self._ckpt.path] if self._ckpt.path.is_dir() else [])]):
            for folder, below, files in os.walk(root):
                below[:] = sorted(name for name in below if not name.startswith("."))  # .git, .cache: not the model's
                for file in (Path(folder) / name for name in sorted(files)):
                    target = self._folder / file.relative_to(root)
                    if file in taken or target.exists():
                        continue
                    if self._foreign(file, names):
                        self.left_out.append(str(file.relative_to(root)))
                        continue
                    self._guard(lambda: self._copy_file(file, target), file.name)  # noqa: B023

    def _indexes(self, names: Mapping[Path, str]) -> tuple[dict[str, str], list[Path]]:
        """The index of shards that were renamed, new where they had none, and the file it was made from."""
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

    def _foreign(self, file: Path, names: Mapping[Path, str]) -> bool:
        """Weights, or an index of weights, that are not what was read."""
        if file.name.endswith(".index.json"):
            shards = read_json(file).get("weight_map")
            known = {str(Path(name)) for file, name in names.items() if file.suffix == ".safetensors"}
            return not isinstance(shards, dict) or not set(shards.values()) <= known
        return file.suffix in (*WEIGHTS, ".pth") and file.name not in NOT_WEIGHTS

    def _copy_file(self, file: Path, target: Path) -> None:
        expect_regular(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
        with open(target, "rb+") as copy:
            _sync(copy)

    def _write(self, target: Path, data: bytes) -> None:
        def write() -> None:
            with open(target, "xb") as out:
                out.write(data)
                _sync(out)

        self._guard(write, target.name)

    def _guard(self, action: Callable[[], object], what: str) -> None:
        """Run something that writes; a full disk becomes one clear line."""
        try:
            action()
        except OSError as problem:
            free = ""
            with suppress(OSError):
                free = f"; {shutil.disk_usage(self.path.parent).free / 1e9:.2f} GB free there"
            raise BridgeError(
                f"{self.path}: writing {what} failed ({problem.strerror}{free}); make room or give another folder. "
                "Nothing half-written was left behind"
            ) from problem


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
