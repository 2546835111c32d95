"""The GGUF on its way to disk: streamed tensor by tensor, and never half-written under its final name.

One file: `gguf.GGUFWriter` writes header, metadata and tensor table with the types still unknown, then the
data as it comes, then the head once more: names and shapes, and so all lengths, are known from the start.

Shards (`--split-max-size`): what fits in a shard depends on types that are only known at the end, so the
data is spooled to a nameless file in the same folder and written by GGUFWriter's own splitting.

Everything happens under temporary names in the target's folder; `finish` syncs and renames. What has been
written goes to disk meanwhile, on a thread of its own, so that little is left to wait for.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from gguf.gguf_writer import WriterState

from bridge.errors import BridgeError

_SYNC_BYTES = 64 << 20  # written between two requests to bring them to disk
_HEAD_TYPE = np.dtype(np.float32)  # stands in the tensor table until a tensor's type is known


def check_target(path: Path, force: bool) -> None:
    """BridgeError unless a file of that name can be made (or, with `force`, replaced)."""
    if path.is_dir():
        raise BridgeError(f"{path}: is a folder; give the name of the file to write")
    if not path.parent.is_dir():
        raise BridgeError(f"{path.parent}: no such folder; make it or give another output")
    if path.exists() and not force:
        raise BridgeError(f"{path}: exists; --force replaces it")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all; BridgeError where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        raise BridgeError(
            f"{path}: cannot be written ({problem.strerror}); make room or give another name"
        ) from problem
    finally:
        temporary.unlink(missing_ok=True)


class GGUFOutput:
    """A GGUF being written. Use as a context manager: leaving it without `finish` removes every trace.

    path          the final name (of the first shard: llama.cpp's names are derived from it)
    arch          GGUF architecture
    add_metadata  called with the GGUFWriter to add all keys but the two below
    tensors       (name, shape in row-major order) of all tensors, in the order they will come
    force         whether files of that name may be replaced
    split_max_size  bytes of tensor data in a shard, or None for one file
    """

    def __init__(
        self,
        path: Path,
        arch: str,
        add_metadata: Callable[[gguf.GGUFWriter], None],
        tensors: Sequence[tuple[str, tuple[int, ...]]],
        force: bool = False,
        split_max_size: int | None = None,
    ) -> None:
        self.path = path
        self._arch = arch
        self._add_metadata = add_metadata
        self._shapes = dict(tensors)
        self._force = force
        self._split = split_max_size
        self._written: list[tuple[str, gguf.GGMLQuantizationType, int]] = []
        self._open: list[BinaryIO | gguf.GGUFWriter] = []
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        check_target(path, force)
        if split_max_size:
            shards = path.parent.glob(f"{glob.escape(path.stem)}-[0-9]*-of-[0-9]*.gguf")
            self._refuse_existing(sorted(shards))
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        except OSError as problem:
            raise BridgeError(f"{path.parent}: cannot write there: {problem.strerror}") from None
        self._temporary = self._folder / path.name
        try:
            if split_max_size:
                self._spool = open(self._folder / "spool", "w+b")  # noqa: SIM115 - closed in _discard
                self._open.append(self._spool)
            else:
                self._writer = self._new_writer(self._temporary, file_type=0)
                for name, shape in tensors:
                    self._writer.add_tensor_info(name, shape, _HEAD_TYPE, 0, gguf.GGMLQuantizationType.F32)
                self._infos = dict(self._writer.tensors[0])
                self._guard(self._write_head, "metadata")
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> GGUFOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def _discard(self) -> None:
        """Close and remove what is temporary. Closing writes what is buffered, which a full disk refuses again."""
        self._background.shutdown()
        for file in self._open:
            with suppress(OSError):
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, name: str, qtype: gguf.GGMLQuantizationType, data: np.ndarray) -> None:
        """Append the next tensor: its bytes in any dtype, in the order announced."""
        if self._split:
            self._guard(lambda: data.tofile(self._spool), name)
        else:
            info = self._infos[name]
            info.dtype = qtype
            info.nbytes = data.nbytes
            self._guard(lambda: self._write_tensor(data), name)
        self._written.append((name, qtype, data.nbytes))

    def _write_tensor(self, data: np.ndarray) -> None:
        assert self._writer.fout is not None
        self._writer.write_tensor_data(data)
        self._unsynced += data.nbytes
        if self._unsynced >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            if self._syncing is not None:
                self._syncing.result()  # raises what the system said of the last one
            self._syncing = self._background.submit(_sync_data, self._writer.fout[0].fileno())
            self._unsynced = 0

    def finish(self, file_type: int) -> list[Path]:
        """Write the final head, sync, and rename into place. Returns the files."""
        if len(self._written) != len(self._shapes):
            raise BridgeError(f"{self.path}: {len(self._written)} of {len(self._shapes)} tensors written")
        if self._split:
            self._guard(lambda: self._write_shards(file_type), "shards")
        else:
            if self._syncing is not None:
                self._guard(self._syncing.result, "tensors")
            self._writer.tensors[0] = self._infos
            self._writer.kv_data[0][gguf.Keys.General.FILE_TYPE].value = file_type
            self._guard(self._rewrite_head, "metadata")
        names = sorted(p for p in self._folder.iterdir() if p.name != "spool")
        targets = [self.path.parent / p.name for p in names]
        self._refuse_existing(targets)
        for source in names:
            with open(source, "rb") as file:
                self._guard(lambda file=file: os.fsync(file.fileno()), source.name)  # type: ignore[misc]
        for source, target in zip(names, targets, strict=True):
            os.replace(source, target)
        sync_folder(self.path.parent)
        return targets

    def _new_writer(self, path: Path, file_type: int) -> gguf.GGUFWriter:
        writer = gguf.GGUFWriter(path, self._arch, split_max_size=self._split or 0)
        self._open.append(writer)
        self._add_metadata(writer)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(file_type)
        return writer

    def _write_head(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()

    def _rewrite_head(self) -> None:
        assert self._writer.fout is not None
        file = self._writer.fout[0]
        file.seek(0)
        self._writer.state = WriterState.EMPTY
        self._write_head()
        self._writer.close()

    def _write_shards(self, file_type: int) -> None:
        writer = self._new_writer(self._temporary, file_type)
        for name, qtype, nbytes in self._written:
            writer.add_tensor_info(name, self._shapes[name], _HEAD_TYPE, nbytes, qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        self._spool.seek(0)
        for _, _, nbytes in self._written:
            writer.write_tensor_data(np.fromfile(self._spool, np.uint8, nbytes))
        writer.close()

    def _refuse_existing(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.exists() and not self._force:
                raise BridgeError(f"{path}: exists; --force replaces it")

    def _guard(self, action: Callable[[], object], what: str) -> None:
        """Run something that writes; a full disk becomes one clear line."""
        try:
            action()
        except OSError as problem:
            free = shutil.disk_usage(self.path.parent).free
            reason = problem.strerror or "the disk took only a part of it"  # numpy's tofile does not say why
            raise BridgeError(
                f"{self.path}: writing {what} failed ({reason}; {free / 1e9:.2f} GB free there); make room or give "
                "another output. Nothing half-written was left behind"
            ) from problem


def _sync_data(file: int) -> None:
    """Bring a file's contents to disk; releases the GIL meanwhile."""
    getattr(os, "fdatasync", os.fsync)(file)


def sync_folder(folder: Path) -> None:
    """Make renames last through a crash, where the system lets folders be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
