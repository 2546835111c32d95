"""Quantized layers on disk, one file each, so that a killed run can be resumed.

A file holds a layer's GGUF blocks, or the codes, scales and zero points of its groups, and its errors; of the output
head, which is quantized some rows at a time, a file holds these. `job.json` says which run the layers belong to. Each
file has a digest of its tensors and of the run; one that does not match is removed, and its layer is made again.
"""

import copy
import glob
import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError, parameter
from bridge.quantize.grids.codebook import CodebookGrid
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.method import Quantized
from bridge.quantize.model.experts import expert_pattern
from bridge.quantize.solve.hessian import token_weights
from bridge.quantize.solve.two_sided import OutputHessian
from bridge.system.cpu.row_threads import tiles
from bridge.system.storage.files import read_json, write_text

_JOB = "job.json"
_PART = ".unfinished"
_INPUTS = r"(inputs|gradients)-\d{5}-\d{5}(-float)?"  # `stored_inputs`
_FILES = re.compile(  # the files that a run leaves in the folder
    rf"(job|inputs|gradients)\.json|([0-9a-f]{{24}}(-\d{{9}})?|{_INPUTS})\.(safetensors|scales|gradients|norms|\d+\{_PART})"
)
_DIGEST = "digest"
_OTHER_RUN = "holds layers of a run with other options, inputs or version"


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer in its file, or in several, whose rows follow each other.

    name       the module's, in the checkpoint
    type       the GGUF type of its blocks; "groups" for a checkpoint's codes
    error      tr(E H E^T) / tr(W H W^T), H of the calibration text
    damping    of H; infinity: rounded to nearest
    tokens     in H
    nearest    `error` of weights that are rounded to nearest, of some rows
    seconds    that it took
    scale      what multiplies the values of its blocks
    rows       first, end and number of all, where the file has some rows of the layer
    alone      whether each weight was rounded by itself, because that serves the tokens held back better
    """

    files: tuple[Path, ...]
    name: str
    type: str
    error: float
    damping: float
    tokens: int
    nearest: float
    seconds: float
    scale: float = 1.0
    rows: Sequence[int] | None = None
    alone: bool = False

    def blocks(self) -> np.ndarray:
        """uint8 [rows, row bytes] of `type`, columns in the GGUF's order."""
        return np.concatenate(self._read("blocks"))

    def errors(self) -> np.ndarray:
        """float64 [2, rows]: sum (w - w')^2 and sum w^2 of each row."""
        return np.concatenate(self._read("errors"), 1)

    def importance(self) -> np.ndarray:
        """float32 [columns]: the mean square of each input."""
        return self._read("importance")[0]

    def tensor(self, bias: np.ndarray | None = None) -> GroupedTensor:
        """The codes as a checkpoint stores them; groups only."""
        with safe_open(self.files[0], "np") as file:
            meta = file.metadata()
            group = file.get_tensor("group_of_column") if "group_of_column" in file.keys() else None  # noqa: SIM118
        codes, scales, zeros = (np.concatenate(self._read(key)) for key in ("codes", "scales", "zeros"))
        return GroupedTensor(
            self.name, int(meta["bits"]), codes, scales, zeros, int(meta["group_size"]), group, bias
        )  # fmt: skip

    def values(self) -> np.ndarray:
        """The dequantized weights float32 [rows, columns], in the checkpoint's order of columns."""
        if self.type == "groups":
            return self.tensor().dequantize()
        values = gguf.quants.dequantize(self.blocks(), gguf.GGMLQuantizationType[self.type]) * np.float32(self.scale)
        with safe_open(self.files[0], "np") as file:
            if "layout" in file.keys():  # noqa: SIM118
                return values[:, np.argsort(file.get_tensor("layout"))]
        return values

    def _read(self, key: str) -> list[Any]:
        tensors = []
        for path in self.files:
            with safe_open(path, "np") as file:
                tensors.append(file.get_tensor(key))
        return tensors


def file_of(folder: Path, name: str, suffix: str) -> Path:
    """The file for a module's data."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}{suffix}"


def write_tensors(file: Path, name: str, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all. Raises BridgeError, with `name`, if the disk is full."""
    part = file.with_suffix(f".{secrets.randbits(63)}{_PART}")  # several machines may write to the folder
    tensors = {key: np.ascontiguousarray(values) for key, values in tensors.items()}
    try:
        save_file(tensors, part, metadata | {_DIGEST: _digest(tensors, metadata)})
        os.replace(part, file)
    except (OSError, SafetensorError) as problem:
        raise BridgeError(
            f"{file.parent}: cannot write {name} ({problem}); free disk space and run again: finished layers are kept"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]] | None:
    """The tensors and metadata of a file by `write_tensors`; None if it has changed since, or is another."""
    try:
        with safe_open(file, "np") as stored:
            metadata = dict(stored.metadata() or {})
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError, ValueError):  # a dtype that NumPy lacks is a TypeError
        return None
    return (tensors, metadata) if metadata.pop(_DIGEST, None) == _digest(tensors, metadata) else None


def _digest(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """The SHA-256 of the tensors' names, dtypes, shapes and data, and of the metadata."""
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for key, values in sorted(tensors.items()):
        digest.update(f"{key} {values.dtype.str} {values.shape}".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class LayerStore:
    """The folder of a run's finished layers; created if it does not exist.

    job    everything that the layers depend on, as JSON
    part   I and N of the N parts of the blocks that runs on several machines quantize, each in a folder of its own
           beside this one; None: all of them, and the layers in these folders count as stored
    force  start over if the folder holds finished layers of another run

    notes  what the user should know of the layers that were stored already
    job    becomes its digest, by which this run's files are known
    blocks  of the model, as `block_log` tells of them, for a report

    Raises BridgeError if it holds layers of another run, or anything else.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], force: bool = False, part: tuple[int, int] | None = None):
        others = [] if part else sorted(folder.parent.glob(f"{glob.escape(folder.name)}-*-of-*"))
        folder = folder.with_name(f"{folder.name}-{part[0]}-of-{part[1]}") if part else folder
        self.folder = folder
        self._others: list[Path] = []
        self.layers: dict[str, StoredLayer] = {}
        self.notes: list[str] = []
        self.blocks: list[dict[str, Any]] = []
        self._missing_parents: list[Path] = []  # that were made with the folder
        self._parts: dict[str, dict[tuple[int, int], StoredLayer]] = {}  # of layers that have several, by their rows
        job = json.loads(json.dumps(job))
        self.job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._open(folder, job, force)
        for other in others:
            if _read_job(other / _JOB) == job:
                self._others.append(other)
                self._load(other)
            else:
                self.notes.append(f"{other}: {_OTHER_RUN}; left out")

    def _open(self, folder: Path, job: Any, force: bool) -> None:
        """Load the folder's layers, or make it."""
        if folder.exists():
            if not (folder / _JOB).is_file() and not _is_empty(folder):
                raise BridgeError(f"{folder}: is not a folder of quantized layers; move it or choose another output")
            if (folder / _JOB).is_file():
                stored_job = _read_job(folder / _JOB)
                if stored_job == job:
                    self._load(folder)
                    return
                if stored_job is not None and not stored_job.keys() & job.keys():
                    raise BridgeError(f"{folder / _JOB}: is not a record of quantized layers; choose another output")
                unfinished = stored_job is not None and not any(map(_is_layer, folder.iterdir()))
                if not force and not unfinished:
                    raise BridgeError(f"{folder}: {_OTHER_RUN}; {parameter('force', True)} starts over")
                if stray := next((file for file in sorted(folder.iterdir()) if not _FILES.fullmatch(file.name)), None):
                    raise BridgeError(f"{stray}: is not a quantized layer; move it, or choose another output")
                self.remove()
        self._missing_parents = [above for above in folder.parents if not above.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise BridgeError(f"{folder}: cannot be created ({problem.strerror}); choose another output") from None
        write_text(folder / _JOB, json.dumps(job, indent=1) + "\n")

    def _load(self, folder: Path) -> None:
        """Load the files of this run that are whole; remove the others."""
        bad = 0
        files = [file for file in sorted(folder.iterdir()) if _FILES.fullmatch(file.name)]
        for file in filter(_is_layer, files):
            layer = self._read(file)
            if layer is None:
                file.unlink()
                bad += 1
                continue
            self.add(layer)
        for file in (file for file in files if file.suffix == _PART):  # of a run that was killed
            file.unlink()
        if bad:
            self.notes.append(
                f"{folder}: files that were damaged or of another run: {bad}; their layers were quantized again"
            )

    def _read(self, file: Path) -> StoredLayer | None:
        """The layer in a file that this run has written and nobody has changed; None otherwise."""
        contents = read_tensors(file)
        record = json.loads(contents[1]["layer"]) if contents and contents[1].get("job") == self.job else None
        if record is None or file != _file(file.parent, record["name"], record["rows"]):
            return None
        return StoredLayer((file,), **record)

    def stored(self, name: str, rows: Sequence[int] | None) -> StoredLayer | None:
        """A layer, or some rows of one, that another process may have saved; None: not yet."""
        return self._read(_file(self.folder, name, rows))

    def add(self, layer: StoredLayer) -> None:
        """Count a layer, or some rows of one, as stored; A of a layer that is complete is removed."""
        self._add(layer)
        if layer.name in self.layers:
            self._outputs_file(layer.name).unlink(missing_ok=True)

    def _add(self, layer: StoredLayer) -> None:
        rows = layer.rows
        if rows is None:
            self.layers[layer.name] = layer
            return
        first, end, count = rows
        parts = self._parts.setdefault(layer.name, {})
        parts[first, end] = layer
        spans = sorted(parts)
        if [0, *(end for _, end in spans)] == [*(first for first, _ in spans), count]:
            self.layers[layer.name] = replace(
                layer, rows=None, files=tuple(parts[span].files[0] for span in spans),
                error=sum(parts[first, end].error * (end - first) for first, end in spans) / count,
                nearest=sum(parts[first, end].nearest * (end - first) for first, end in spans) / count,
                seconds=sum(part.seconds for part in parts.values()),
                damping=max(part.damping for part in parts.values()),
            )  # fmt: skip

    def apart(self) -> Self:
        """The same folder, to save layers in that this object does not count."""
        other = copy.copy(self)
        other.layers, other._parts = {}, {}
        return other

    def missing(self, name: str, rows: int, step: int) -> list[slice]:
        """The rows of a layer that are not stored, at most `step` at a time."""
        if name in self.layers:
            return []
        spans = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [slice(*span) for span in spans if span not in self._parts.get(name, {})]

    def finished(self, name: str) -> StoredLayer | None:
        return self.layers.get(name)

    def values_by_rows(self, name: str) -> Iterator[torch.Tensor]:
        """A finished layer's weights, some rows after the others: those of one file at a time. Nothing for others.

        Rows that another process has saved count too.
        """
        store = self.apart()
        if name in self.layers:
            store.add(self.layers[name])
        else:
            for file in sorted(self.folder.glob(f"{_file(self.folder, name, None).stem}*.safetensors")):
                if (layer := self._read(file)) is not None:
                    store.add(layer)
        if name in store.layers:
            for file in store.layers[name].files:
                yield torch.from_numpy(replace(store.layers[name], files=(file,)).values())

    def save(
        self,
        done: Quantized,
        weight: np.ndarray,
        importance: np.ndarray,
        tokens: int,
        rows: tuple[int, int, int] | None = None,
    ) -> StoredLayer:
        """Save a layer, and return it.

        weight      float32 [rows, columns], before quantization
        importance  float32 [columns], the mean square of each input
        rows        first, end and number of all, where these are not all rows of the layer

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
        file = _file(self.folder, done.name, rows)
        scale = done.grid.scale if isinstance(done.grid, CodebookGrid) else 1.0
        layer = StoredLayer(
            (file,), done.name, type_, done.error, done.damping, tokens, done.nearest, done.seconds, scale, rows,
            done.alone,
        )  # fmt: skip
        record = {key: value for key, value in asdict(layer).items() if key != "files"}
        write_tensors(file, done.name, tensors, {"layer": json.dumps(record), "job": self.job, **extra})
        self.add(layer)
        return layer

    def save_outputs(self, name: str, outputs: OutputHessian | None, part: int | None = None) -> None:
        """Keep A of a layer, or of a part of the sequences, until the layer is finished; None: there is none."""
        values: dict[str, torch.Tensor] = {}
        if outputs is not None:
            values = {"outputs": outputs.blocks, "share": torch.tensor(outputs.share, dtype=torch.float64)}
            values |= {} if outputs.held is None else {"held": outputs.held}
        tensors = {key: value.cpu().numpy() for key, value in values.items()}
        write_tensors(self._outputs_file(name, part), name, tensors, {"job": self.job})

    def save_norms(self, name: str, norms: torch.Tensor, part: int | None = None) -> None:
        """Keep |g| of a layer, float32 [tokens], see `Passes.output_products`; `part` as of `save_outputs`."""
        write_tensors(self._norms_file(name, part), name, {"norms": norms.cpu().numpy()}, {"job": self.job})

    def norms(self, name: str, part: int | None = None) -> torch.Tensor | None:
        """|g| of a layer as `save_norms` has it; None: there is none."""
        tensors = self._tensors(self._norms_file(expert_pattern(name), part))
        return None if tensors is None else torch.from_numpy(tensors["norms"])

    def weights(self, names: Sequence[str]) -> torch.Tensor | None:
        """How much each token counts in H of layers with the same inputs, float32 [tokens]; None: all alike."""
        return token_weights([self.norms(name) for name in names])

    def outputs(self, name: str, part: int | None = None) -> OutputHessian | None:
        """A of a layer as `save_outputs` has it; None: there is none."""
        tensors = self._tensors(self._outputs_file(name, part)) or {}
        if "outputs" not in tensors:
            return None
        values = {key: torch.from_numpy(value) for key, value in tensors.items()}
        return OutputHessian(values["outputs"], values.get("held"), float(values["share"]))

    def has_outputs(self, names: Collection[str]) -> bool:
        """Whether A of each of these layers that are not finished was kept, or that it has none."""
        files = (self._outputs_file(name) for name in names if name not in self.layers)
        return all(self._tensors(file) is not None for file in files)

    def drop_outputs(self, name: str, part: int) -> None:
        """Remove A, and |g|, of a part of the sequences."""
        self._outputs_file(name, part).unlink(missing_ok=True)
        self._norms_file(expert_pattern(name), part).unlink(missing_ok=True)

    def _tensors(self, file: Path) -> dict[str, np.ndarray] | None:
        """The tensors of a file that this run has written; None: there is none."""
        contents = read_tensors(file)
        return contents[0] if contents and contents[1].get("job") == self.job else None

    def _outputs_file(self, name: str, part: int | None = None) -> Path:
        return file_of(self.folder, name, f"{'' if part is None else f'-{part:09}'}.gradients")

    def _norms_file(self, name: str, part: int | None = None) -> Path:
        return self._outputs_file(name, part).with_suffix(".norms")

    def remove(self) -> None:
        """Remove the layers, once they are in the output, and the folder unless it holds anything else."""
        with suppress(OSError):
            for folder in (*self._others, self.folder):
                for file in folder.iterdir():
                    if _FILES.fullmatch(file.name):
                        file.unlink()
            for folder in (*self._others, self.folder, *self._missing_parents):
                folder.rmdir()

    def remove_if_empty(self) -> None:
        """Remove the folder if no layer was finished, nor a block's gradients."""
        if not self.layers and not self._parts and not (self.folder / "gradients.json").exists():
            self.remove()


def _file(folder: Path, name: str, rows: Sequence[int] | None) -> Path:
    return file_of(folder, name, f"{'' if rows is None else f'-{rows[0]:09}'}.safetensors")


def _is_layer(file: Path) -> bool:
    return file.suffix == ".safetensors" and not re.match(_INPUTS, file.name) and bool(_FILES.fullmatch(file.name))


def _is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder but what a run left that was stopped before it wrote its job."""
    return folder.is_dir() and all(file.name.startswith(f".{_JOB}.") for file in folder.iterdir())


def _read_job(file: Path) -> Any:
    """The content of a `job.json`; None where it is damaged."""
    try:
        return read_json(file)
    except BridgeError:
        return None
