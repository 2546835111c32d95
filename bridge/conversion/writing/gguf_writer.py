"""The GGUF on its way to disk: streamed tensor by tensor, and never half-written under its final name.

The plan has every type, so `gguf.GGUFWriter` writes a file's head first, then the data as it comes; of a split model
one shard after another, each a file of its own. Types and offsets have fixed sizes in the head: where a type is chosen
again late, the table of tensors is written once more when the file is finished.

Everything happens in a temporary folder next to the target (`folder_locks`); `finish` syncs and renames. What has been
written goes to disk meanwhile, on a thread of its own, so that little is left to wait for.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import gguf
import numpy as np
from gguf.gguf_writer import SHARD_NAME_FORMAT, TensorInfo, WriterState

from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.errors import BridgeError, refused
from bridge.system.storage.files import disk_errors, put_in_place, sync_folder
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.storage.outputs import NOTHING, ProtectedPaths, check_outputs

_SYNC_BYTES = 64 << 20  # written between two requests to bring them to disk


def shards_of(plan: Plan) -> list[list[PlannedTensor]]:
    """The tensors of each shard: as many as fit in `split_max_size` bytes, by GGUFWriter's own rule. Scales of NVFP4
    follow their tensor and do not count: a plan is divided the same with and without them."""
    splitter = gguf.GGUFWriter(None, plan.arch, split_max_size=plan.split_max_size or 0)
    for tensor in plan.tensors:
        if tensor.origin != "scale":
            _add_info(splitter, tensor)
    number = {name: i for i, shard in enumerate(splitter.tensors) for name in shard}
    shards: list[list[PlannedTensor]] = [[] for _ in splitter.tensors]
    index = 0
    for tensor in plan.tensors:
        index = number.get(tensor.name, index)
        shards[index].append(tensor)
    return shards


def _add_info(writer: gguf.GGUFWriter, tensor: PlannedTensor) -> None:
    # of a plain dtype, so that the shape is taken as that of the weights
    qtype = gguf.GGMLQuantizationType[tensor.type]
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, qtype)


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a file, with what aligns the next."""
    return gguf.GGUFWriter.ggml_pad(nbytes, gguf.GGUF_DEFAULT_ALIGNMENT)


def added_bytes(tensor: PlannedTensor) -> int:
    """The most bytes that one more tensor adds to a file."""
    return padded(24 + len(tensor.name.encode()) + 8 * len(tensor.shape)) + padded(tensor.nbytes)


def file_bytes(plan: Plan) -> int:
    """Size of the one file that a plan makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.gguf"
        writer = gguf.GGUFWriter(path, plan.arch)
        try:
            _add_metadata(writer, plan)
            for tensor in plan.tensors:
                _add_info(writer, tensor)
            _write_head(writer)
        finally:
            writer.close()
        return padded(path.stat().st_size) + sum(padded(t.nbytes) for t in plan.tensors)


def _add_metadata(writer: gguf.GGUFWriter, plan: Plan) -> None:
    for key, v in plan.metadata.items():
        if key != gguf.Keys.General.ARCHITECTURE:  # the writer has added it
            writer.add_key_value(key, v.value, v.type, v.sub_type)


def _write_head(writer: gguf.GGUFWriter) -> int:
    """Write all that precedes the data. Returns the position of the table of tensors in the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    assert writer.fout is not None
    table_at = writer.fout[0].tell()
    writer.write_ti_data_to_file()
    return table_at


class GGUFOutput:
    """A GGUF being written. Use as a context manager: leaving it without `finish` removes every trace.

    path       the final name (of the first shard: llama.cpp's names are derived from it)
    plan       its metadata, its tensors with their types, the size of its shards
    force      whether files of that name may be replaced
    shard      (i, n): only the i-th of n shards, counted from 1; None for all
    protected  files that the run reads, and its other outputs
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        force: bool = False,
        shard: tuple[int, int] | None = None,
        protected: ProtectedPaths = NOTHING,
    ) -> None:
        self.path = path
        self._plan = plan
        self._force, self._protected = force, protected
        self._shards = shards_of(plan)
        count = len(self._shards)
        if shard is not None and not (shard[1] == count and 1 <= shard[0] <= count):
            raise refused("shard", shard, f"the plan makes {count} shards, 1/{count} to {count}/{count}")
        self._todo = [shard[0] - 1] if shard else list(range(count))
        self.tensors = [t for i in self._todo for t in self._shards[i]]
        # of the shard that is being written
        self._left: list[PlannedTensor] = []
        self._table: dict[str, TensorInfo] = {}
        self._table_at = 0
        self._retyped = False
        self._writer: gguf.GGUFWriter | None = None
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._check_targets([path])
        self._targets = [path] if count == 1 else [
            path.with_name(SHARD_NAME_FORMAT.format(path.stem, i + 1, count)) for i in self._todo
        ]  # fmt: skip
        if count > 1 and shard is None:
            # a shard of another count in this folder would be mistaken for one of them
            others = path.parent.glob(f"{glob.escape(path.stem)}-[0-9]*-of-[0-9]*.gguf")
            self._check_targets(sorted(others))
        self._check_targets(self._targets)
        self._temporaries = ExitStack()
        try:
            self._folder = self._temporaries.enter_context(temporary_beside(path))
        except OSError as problem:
            raise BridgeError(f"{path.parent}: cannot write there: {problem.strerror}") from None

    def __enter__(self) -> GGUFOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Close and remove what is temporary. Closing writes what is buffered, which a full disk refuses again."""
        self._background.shutdown()
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        self._temporaries.close()

    def write(self, data: np.ndarray, tensor: PlannedTensor | None = None) -> None:
        """Append the next tensor of `tensors`: its bytes in any dtype. A shard's head is written with its first tensor,
        so that the next tensors can be made meanwhile.

        tensor  with the type that was chosen in the end, where it is another than the plan's
        """
        if not self._left:
            with disk_errors(self.path, "metadata", "output"):
                self._next_shard()
        planned = self._left.pop(0)
        tensor = tensor or planned
        assert self._writer is not None
        assert self._writer.fout is not None
        if tensor.type != planned.type:
            self._retyped = True
            info = TensorInfo(tensor.shape, gguf.GGMLQuantizationType[tensor.type], tensor.nbytes)
            self._table[tensor.name] = self._writer.tensors[0][tensor.name] = info
        with disk_errors(self.path, tensor.name, "output"):
            self._writer.write_tensor_data(data)
            self._unsynced += data.nbytes
            if self._unsynced >= _SYNC_BYTES and (self._syncing is None or self._syncing.done()):
                self._wait()  # raises the error of the last one
                self._syncing = self._background.submit(_sync_data, self._writer.fout[0].fileno())
                self._unsynced = 0

    def _next_shard(self) -> None:
        """Close the shard that is whole; write the head of the next, if there is one."""
        self._wait()
        if self._writer is not None:
            if self._retyped:
                self._write_table_again(self._writer)
            self._writer.close()
            self._writer = None
        if not self._todo:
            return
        i = self._todo.pop(0)
        self._left = list(self._shards[i])
        target = self._targets[len(self._targets) - len(self._todo) - 1]
        writer = self._writer = gguf.GGUFWriter(self._folder / target.name, self._plan.arch)
        if i == 0:
            _add_metadata(writer, self._plan)
        if len(self._shards) > 1:
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, i)
            writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, len(self._shards))
            writer.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(self._plan.tensors))
        for tensor in self._left:
            _add_info(writer, tensor)
        self._table, self._retyped = dict(writer.tensors[0]), False
        self._table_at = _write_head(writer)

    def _write_table_again(self, writer: gguf.GGUFWriter) -> None:
        """Rewrite the tensor table with the final types and offsets."""
        assert writer.fout is not None
        writer.fout[0].seek(self._table_at)
        writer.tensors, writer.state = [self._table], WriterState.KV_DATA
        writer.write_ti_data_to_file()

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None

    def finish(self) -> list[Path]:
        """Sync, and rename into place. Returns the files."""
        missing = [*self._left, *(t for i in self._todo for t in self._shards[i])]
        if missing:
            count = f"{len(missing)} of {len(self.tensors)} tensors is missing, {missing[0].name} first"
            raise BridgeError(f"{self.path}: {count}; this is a defect of the program, please report it")
        with disk_errors(self.path, "the last tensors", "output"):
            while self._todo or self._writer is not None:
                self._next_shard()
        self._check_targets(self._targets)
        for target in self._targets:
            with open(self._folder / target.name, "rb") as file, disk_errors(self.path, target.name, "output"):
                os.fsync(file.fileno())
        for target in self._targets:
            put_in_place(self._folder / target.name, target)
        sync_folder(self.path.parent)
        return self._targets

    def _check_targets(self, paths: Sequence[Path]) -> None:
        check_outputs(paths, self._force, self._protected)


def _sync_data(file: int) -> None:
    """Bring a file's contents to disk; releases the GIL meanwhile."""
    getattr(os, "fdatasync", os.fsync)(file)
