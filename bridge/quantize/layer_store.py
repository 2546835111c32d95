"""Quantized layers on disk, a file each: what a killed run has finished is not made again.

A file holds a layer's GGUF blocks, or the codes, scales and zero points of its groups; beside them what was measured.
The folder says in `job.json` what run its layers are of.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.method import Quantized
from bridge.system.files import read_json, write_text
from bridge.system.row_threads import tiles

_JOB = "job.json"


@dataclass(frozen=True)
class KeptLayer:
    """A quantized layer in its file.

    name       the module's, in the checkpoint
    type       the GGUF type of its blocks; "groups" for a checkpoint's codes
    error      tr(E H E^T) over tr(W H W^T), H of the calibration text
    damping    that H took; infinity: rounded to nearest
    tokens     that H has seen
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
        """The codes as a checkpoint holds them; of groups only."""
        with safe_open(self.file, "np") as file:
            meta = file.metadata()
            group = file.get_tensor("group_of_column") if "group_of_column" in file.keys() else None  # noqa: SIM118
            codes, scales, zeros = (file.get_tensor(key) for key in ("codes", "scales", "zeros"))
        return GroupedTensor(
            self.name, int(meta["bits"]), codes, scales, zeros, int(meta["group_size"]), group, bias
        )  # fmt: skip

    def values(self) -> np.ndarray:
        """The dequantized weights float32 [rows, columns], columns as they stand in the checkpoint."""
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
    """Where what is known of a module is kept."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}{suffix}"


def keep(file: Path, name: str, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a file of safetensors, whole or not at all. Raises BridgeError where the disk is full."""
    part = file.with_suffix(f".{os.getpid()}")
    try:
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, part, metadata)
        os.replace(part, file)
    except (OSError, SafetensorError) as problem:
        part.unlink(missing_ok=True)
        raise BridgeError(
            f"{file.parent}: keeping {name} failed ({problem}); make room and run again: finished layers are kept there"
        ) from None


class KeptLayers:
    """The folder of a run's finished layers; made where it does not exist.

    job    what the layers depend on, as JSON knows it
    force  begin anew where the folder is of another run

    Raises BridgeError where it is of another run, or holds anything else.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], force: bool = False) -> None:
        self.folder = folder
        self.layers: dict[str, KeptLayer] = {}
        job = json.loads(json.dumps(job))
        if folder.exists():
            if not (folder / _JOB).is_file():
                raise BridgeError(f"{folder}: is no folder of quantized layers; move it away or give another output")
            if read_json(folder / _JOB) == job:
                self._load()
                return
            if not force:
                raise BridgeError(
                    f"{folder}: holds the layers of a run with other options or inputs; --force begins anew"
                )
            shutil.rmtree(folder)
        try:
            folder.mkdir()
        except OSError as problem:
            raise BridgeError(f"{folder}: cannot be made ({problem.strerror}); give another output") from None
        write_text(folder / _JOB, json.dumps(job, indent=1) + "\n")

    def _load(self) -> None:
        """What is there and whole; what is not is made again."""
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(file, "np") as stored:
                    layer = KeptLayer(file, **json.loads(stored.metadata()["layer"]))
            except (SafetensorError, TypeError, KeyError, ValueError):
                file.unlink()
                continue
            self.layers[layer.name] = layer

    def values(self, name: str) -> torch.Tensor | None:
        """A finished layer's weights float32 [rows, columns]; None where it is to be made."""
        layer = self.layers.get(name)
        return None if layer is None else torch.from_numpy(layer.values())

    def save(self, done: Quantized, weight: np.ndarray, importance: np.ndarray, tokens: int) -> KeptLayer:
        """Keep a layer.

        weight      float32 [rows, columns], what was quantized
        importance  float32 [columns], the mean square of each input

        Raises BridgeError where the disk is full.
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
        layer = KeptLayer(file, done.name, type_, done.error, done.damping, tokens)
        record = {key: value for key, value in asdict(layer).items() if key != "file"}
        keep(file, done.name, tensors, {"layer": json.dumps(record), **extra})
        self.layers[layer.name] = layer
        return layer

    def remove(self) -> None:
        """Remove the folder: what was made of it is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
