"""Quantized layers on disk, one file each, so that a killed run can be resumed.

A file holds a layer's GGUF blocks, or the codes, scales and zero points of its groups, and its errors. `job.json`
says which run the layers belong to.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError, parameter
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.method import Quantized
from bridge.system.files import read_json, write_text
from bridge.system.row_threads import tiles

_JOB = "job.json"
_OWN = re.compile(r"job\.json|[0-9a-f]{24}\.(safetensors|scales|\d+)")  # the folder's files, whole and unfinished


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer in its file.

    name       the module's, in the checkpoint
    type       the GGUF type of its blocks; "groups" for a checkpoint's codes
    error      tr(E H E^T) / tr(W H W^T), H of the calibration text
    damping    of H; infinity: rounded to nearest
    tokens     in H
    """

    file: Path
    name: str
    type: str
    error: float
    damping: float
    tokens: int

    def blocks(self) -> np.ndarray:
        """uint8 [rows, row bytes] of `type`, columns in the GGUF's order."""
        return self._read("blocks")

    def errors(self) -> np.ndarray:
        """float64 [2, rows]: sum (w - w')^2 and sum w^2 of each row."""
        return self._read("errors")

    def importance(self) -> np.ndarray:
        """float32 [columns]: the mean square of each input."""
        return self._read("importance")

    def tensor(self, bias: np.ndarray | None = None) -> GroupedTensor:
        """The codes as a checkpoint stores them; groups only."""
        with safe_open(self.file, "np") as file:
            meta = file.metadata()
            group = file.get_tensor("group_of_column") if "group_of_column" in file.keys() else None  # noqa: SIM118
            codes, scales, zeros = (file.get_tensor(key) for key in ("codes", "scales", "zeros"))
        return GroupedTensor(
            self.name, int(meta["bits"]), codes, scales, zeros, int(meta["group_size"]), group, bias
        )  # fmt: skip

    def values(self) -> np.ndarray:
        """The dequantized weights float32 [rows, columns], in the checkpoint's order of columns."""
        if self.type == "groups":
            return self.tensor().dequantize()
        values = gguf.quants.dequantize(self.blocks(), gguf.GGMLQuantizationType[self.type])
        with safe_open(self.file, "np") as file:
            if "layout" in file.keys():  # noqa: SIM118
                return values[:, np.argsort(file.get_tensor("layout"))]
        return values

    def _read(self, key: str) -> Any:
        with safe_open(self.file, "np") as file:
            return file.get_tensor(key)


def file_of(folder: Path, name: str, suffix: str) -> Path:
    """The file for a module's data."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}{suffix}"


def write_tensors(file: Path, name: str, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all. Raises BridgeError, with `name`, if the disk is full."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, part, metadata)
        os.replace(part, file)
    except (OSError, SafetensorError) as problem:
        part.unlink(missing_ok=True)
        raise BridgeError(
            f"{file.parent}: cannot write {name} ({problem}); free disk space and run again: finished layers are kept"
        ) from None


class LayerStore:
    """The folder of a run's finished layers; created if it does not exist.

    job    everything that the layers depend on, as JSON
    force  start over if the folder belongs to another run

    Raises BridgeError if it belongs to another run, or holds anything else.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], force: bool = False) -> None:
        self.folder = folder
        self.layers: dict[str, StoredLayer] = {}
        job = json.loads(json.dumps(job))
        if folder.exists():
            if not (folder / _JOB).is_file():
                raise BridgeError(f"{folder}: is not a folder of quantized layers; move it or choose another output")
            found = read_json(folder / _JOB)
            if found == job:
                self._load()
                return
            if not found.keys() & job.keys():
                raise BridgeError(f"{folder / _JOB}: is not a record of quantized layers; choose another output")
            if not force:
                restart = f"{parameter('force', True)} starts over"
                raise BridgeError(f"{folder}: holds layers of a run with other options, inputs or version; {restart}")
            if stray := next((file for file in sorted(folder.iterdir()) if not _OWN.fullmatch(file.name)), None):
                raise BridgeError(f"{stray}: is not a quantized layer; move it, or choose another output")
            self.remove()
        try:
            folder.mkdir()
        except OSError as problem:
            raise BridgeError(f"{folder}: cannot be created ({problem.strerror}); choose another output") from None
        write_text(folder / _JOB, json.dumps(job, indent=1) + "\n")

    def _load(self) -> None:
        """Load the files that are whole; remove the others."""
        for file in sorted(self.folder.glob(f"{'[0-9a-f]' * 24}.safetensors")):
            try:
                with safe_open(file, "np") as stored:
                    layer = StoredLayer(file, **json.loads(stored.metadata()["layer"]))
            except (SafetensorError, TypeError, KeyError, ValueError):
                file.unlink()
                continue
            self.layers[layer.name] = layer

    def values(self, name: str) -> torch.Tensor | None:
        """A finished layer's weights float32 [rows, columns]; None for other layers."""
        layer = self.layers.get(name)
        return None if layer is None else torch.from_numpy(layer.values())

    def save(self, done: Quantized, weight: np.ndarray, importance: np.ndarray, tokens: int) -> StoredLayer:
        """Save a layer.

        weight      float32 [rows, columns], before quantization
        importance  float32 [columns], the mean square of each input

        Raises BridgeError if the disk is full.
        """
        values = done.values().cpu().numpy()
        errors = np.empty((2, len(weight)))
        for r in tiles(len(weight)):
            errors[:, r] = [np.square(x, dtype=np.float64).sum(1) for x in (weight[r] - values[r], weight[r])]
        tensors: dict[str, Any] = {"errors": errors, "importance": np.ascontiguousarray(importance, np.float32)}
        if isinstance(done.grid, GroupGrid):
            type_, t = "groups", done.tensor()
            tensors |= {"codes": t.codes, "scales": t.scales, "zeros": t.zeros}
            if t.group_of_column is not None:
                tensors["group_of_column"] = t.group_of_column
            extra = {"bits": str(t.bits), "group_size": str(t.group_size)}
        else:
            type_, extra = done.grid.block.name, {}
            tensors["blocks"] = done.blocks()
            if done.layout is not None:
                tensors["layout"] = done.layout
        file = file_of(self.folder, done.name, ".safetensors")
        layer = StoredLayer(file, done.name, type_, done.error, done.damping, tokens)
        record = {key: value for key, value in asdict(layer).items() if key != "file"}
        write_tensors(file, done.name, tensors, {"layer": json.dumps(record), **extra})
        self.layers[layer.name] = layer
        return layer

    def remove(self) -> None:
        """Remove the layers, once they are in the output, and the folder unless it holds anything else."""
        with suppress(OSError):
            for file in self.folder.iterdir():
                if _OWN.fullmatch(file.name):
                    file.unlink()
            self.folder.rmdir()
