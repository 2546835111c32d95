"""Measures a GGUF on disk against the checkpoint it was made from, with the `gguf` package's dequantization.

Nothing of the conversion's own arithmetic is used but the mapping of names, rows and columns: what is
reported is what the file holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from bridge.blocks import NEWER
from bridge.checkpoint.by_name import open_by_name
from bridge.conversion.converter import Progress
from bridge.conversion.part_reader import Source
from bridge.conversion.planner import outline_of
from bridge.conversion.recipe import block_type
from bridge.conversion.report import AS_IS, FLOAT, MAX_NMSE, MAX_SHARE, Report, TensorReport, how_kept, lost_codes
from bridge.errors import BridgeError
from bridge.gguf_file.shards import shards
from bridge.models.outline import FROM_TEMPLATE, PlannedTensor
from bridge.runtime.cpu import dequantize
from bridge.system.files import missing
from bridge.system.text import percent

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import CodedTensor

_CHUNK_WEIGHTS = 1 << 22


def verify(
    gguf_path: str | Path,
    checkpoint: str | Path,
    *,
    config: str | Path | None = None,
    template: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare every tensor of a GGUF (its first shard, if split) with the checkpoint's; `config` as for `convert`.

    template  the one that the GGUF was made with, if it was

    Returns a Report with the same figures as `convert`'s, measured from the file; `failures` judges it.
    Raises BridgeError where the two do not hold the same tensors.
    """
    started = time.perf_counter()
    files = shards(Path(gguf_path))
    stored: dict[str, Any] = {}
    for file in files:
        stored.update((t.name, t) for t in read_gguf(file).tensors)
    with open_by_name(checkpoint, config, needs_config=template is None) as ckpt:
        tensors = outline_of(ckpt, "default", template).tensors  # they alone are compared: any pre-tokenizer will do
        source = Source(ckpt)
        beside = {f"{t.name.removesuffix('.weight')}.{key}" for t in tensors for key in ("scale", "input_scale")}
        factors = {name: stored.pop(name) for name in beside & set(stored)}
        _same_names(str(gguf_path), str(checkpoint), {t.name for t in tensors}, set(stored))
        reports = []
        done, total = 0, sum(source.nbytes(t) for t in tensors)
        for tensor in tensors:
            factor = factors.get(f"{tensor.name.removesuffix('.weight')}.scale")
            reports.append(_compare(source, tensor, _Stored(stored[tensor.name], factor)))
            done += source.nbytes(tensor)
            if progress:
                progress(done, total, tensor.name)
    notes = [note for t in reports for note in t.notes]
    return Report(str(checkpoint), ckpt.format, files, reports, ckpt.nbytes, time.perf_counter() - started, notes)


def failures(report: Report, max_share: float | None = None, max_nmse: float = MAX_NMSE) -> list[str]:
    """A line for each tensor that lacks codes which its type holds, or is further from the checkpoint than allowed.

    max_share  of the checkpoint's own quantization noise, for tensors that came as codes; None: MAX_SHARE, or for
               those that became Q8_0, the last resort for 8-bit codes, max_nmse as well
    max_nmse   squared error over squared weights, for tensors that came as floats
    """
    lines = []
    for t in report.tensors:
        f = t.fidelity
        if f is None:
            continue
        allowed = MAX_SHARE if max_share is None else max_share
        last_resort = max_share is None and t.type == "Q8_0" and f.nmse <= max_nmse
        if t.codes_missing:
            lines.append(
                f"{t.name}: {percent(t.codes_missing / f.weights)} of its codes are not the checkpoint's, though "
                f"{t.type} holds them bit for bit; the file is damaged or made from another checkpoint"
            )
        elif t.has_codes and not f.share <= allowed and not last_resort:
            lines.append(f"{t.name}: adds {percent(f.share)} of the checkpoint's noise; allowed {percent(allowed)}")
        elif not t.has_codes and not f.nmse <= max_nmse:
            lines.append(f"{t.name}: NMSE {f.nmse:.2g} against the checkpoint's floats; allowed {max_nmse:.2g}")
    return lines


def read_gguf(path: Path) -> gguf.GGUFReader:
    """Open a GGUF; BridgeError where it is not one or is damaged."""
    if path.is_dir():
        raise BridgeError(f"{path}: is a folder; give the GGUF first, then the checkpoint")
    if not path.is_file():
        raise missing(path)
    try:
        return gguf.GGUFReader(path)
    except PermissionError:
        raise BridgeError(f"{path}: may not be read; mend its permissions") from None
    except (ValueError, IndexError, KeyError, OverflowError, OSError, UnicodeDecodeError) as problem:
        raise BridgeError(f"{path}: not a readable GGUF file ({problem}); convert or download it again") from problem


def _same_names(path: str, checkpoint: str, expected: set[str], stored: set[str]) -> None:
    if expected - stored:
        name = min(expected - stored)
        raise BridgeError(f"{path}: {name} is missing ({len(expected - stored)} in all); not made from {checkpoint}")
    if stored - expected:
        name = min(stored - expected)
        raise BridgeError(f"{path}: {name} is not in {checkpoint} ({len(stored - expected)} in all)")


class _Stored:
    """A tensor of the file, with the scale of all of it, or of each expert, that may stand beside it."""

    def __init__(self, tensor: Any, factor: Any) -> None:
        self.shape, self.tensor_type, self.n_bytes, self.data = (
            tensor.shape, tensor.tensor_type, tensor.n_bytes, tensor.data,
        )  # fmt: skip
        rows = math.prod(map(int, tensor.shape[1:]))
        values = np.ones(1, np.float32) if factor is None else factor.data.reshape(-1)
        self.factors = np.repeat(values, rows // len(values))[:, None] if len(values) > 1 else values


def _compare(source: Source, tensor: PlannedTensor, stored: _Stored) -> TensorReport:
    """One tensor of the file against the checkpoint's."""
    from bridge.encode.carry import Fidelity

    shape = tuple(int(n) for n in reversed(stored.shape))
    if shape != tensor.shape:
        raise BridgeError(f"{tensor.name}: shape {list(shape)} in the GGUF, {list(tensor.shape)} in the checkpoint")
    name = stored.tensor_type.name
    nbytes = int(stored.n_bytes)
    report = TensorReport(tensor.name, tensor.source, tensor.kind, name, tensor.shape, nbytes, AS_IS)
    if any(source.coded(part) for part in tensor.parts):
        return _compare_codes(source, tensor, stored, report)
    if tensor.reason == FROM_TEMPLATE:
        assert tensor.data is not None
        if name != tensor.type or not np.array_equal(stored.data.reshape(-1).view(np.uint8), tensor.data):
            raise BridgeError(f"{tensor.name}: is not the template's, from which it should have been taken")
        return report
    if tensor.data is not None:
        pairs: Iterator[tuple[np.ndarray, np.ndarray]] = iter([(tensor.data.reshape(shape), _values(stored, 0, None))])
    else:
        pairs = _float_pairs(source, tensor, stored)
    error, signal = _sums(pairs)
    if error or block_type(name):
        report.how = FLOAT
        report.fidelity = Fidelity(int(np.prod(shape)), error, signal, 0.0, 0)
    return report


def _compare_codes(source: Source, tensor: PlannedTensor, stored: _Stored, report: TensorReport) -> TensorReport:
    """A tensor that came as codes, all of it or most parts. Parts that came as floats are not in its fidelity."""
    from bridge.encode.carry import Fidelity, obstacle

    block = block_type(report.type)
    whys: list[str] = []
    at = 0
    for part in tensor.parts:
        if source.coded(part):
            t = source.grouped(part)
            report.notes += t.notes
            error, signal = _sums(_grouped_pairs(t, stored, at))
            kept, missing = _codes_kept(t, stored, at)
            report.codes_missing += missing
            found = Fidelity(math.prod(t.shape), error, signal, t.noise(), kept)
            report.fidelity = found if report.fidelity is None else report.fidelity + found
            why = f"stored as {report.type}" if block is None else obstacle(t, block)
            whys.append("" if found.kept == found.weights or not error else why or "the file has others")
        at += part.shape[0]
    assert report.fidelity is not None
    report.how = how_kept(report.fidelity)
    report.notes += lost_codes(tensor.name, whys, report.fidelity)
    return report


def _rows(stored: _Stored) -> np.ndarray:
    """The stored bytes or floats of a GGUF tensor by row; those of experts one after another."""
    return stored.data.reshape(-1, stored.data.shape[-1]) if stored.data.ndim > 2 else stored.data


def _values(stored: _Stored, start: int, stop: int | None) -> np.ndarray:
    """float32 rows of a GGUF tensor, by the gguf package."""
    data = _rows(stored)[start:stop]
    if stored.tensor_type.name in ("F32", "F16"):
        return data.astype(np.float32)
    if stored.tensor_type.name in NEWER:
        return dequantize.rows(stored.tensor_type.name, data)
    factors = stored.factors[start:stop] if stored.factors.ndim > 1 else stored.factors
    return np.asarray(gguf.quants.dequantize(data, stored.tensor_type) * factors, np.float32)


def _grouped_pairs(t: CodedTensor, stored: _Stored, at: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of the checkpoint's and the file's weights, whose first row is `at`."""
    if stored.data.ndim == 1:  # a matrix of one row that the GGUF has as a vector
        yield t.dequantize(), _values(stored, 0, None).reshape(t.shape)
        return
    step = max(1, _CHUNK_WEIGHTS // t.shape[1])
    for start in range(0, t.shape[0], step):
        stop = min(start + step, t.shape[0])
        yield t.dequantize(slice(start, stop)), _values(stored, at + start, at + stop)


def _float_pairs(source: Source, tensor: PlannedTensor, stored: _Stored) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    start = 0
    for part in tensor.parts:
        for x in source.floats(part):
            yield x, _values(stored, start, start + len(x))
            start += len(x)


def _sums(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Squared error and squared signal over (reference, stored) pairs."""
    error = signal = 0.0
    for reference, value in pairs:
        error += float(np.square(value.astype(np.float64) - reference).sum())
        signal += float(np.square(reference, dtype=np.float64).sum())
    return error, signal


def _codes_kept(t: CodedTensor, stored: _Stored, at: int) -> tuple[int, int]:
    """How many integer codes in the file are the checkpoint's, shifted or mirrored as the type has them; and how many
    are not, though a plain type holds them bit for bit: Q8_0 by the block, the others all or none."""
    from bridge.encode.block_bytes import unpack_codes
    from bridge.encode.carry import carry, obstacle, stored_codes
    from bridge.encode.type_choice import has_exact_fp16_scales

    block = block_type(stored.tensor_type.name)
    if block is None or obstacle(t, block):
        return 0, 0
    if block.scales:  # scales and all, by the block
        raw = _rows(stored)[at : at + t.shape[0]]
        same = (raw == carry(t, block).data).reshape(-1, block.nbytes).all(1)
        return int(same.sum()) * block.size, int((~same).sum()) * block.size
    exact = not block.is_k and not block.has_min and has_exact_fp16_scales(t)
    kept = missing = 0
    step = max(1, _CHUNK_WEIGHTS // t.shape[1])
    for start in range(0, t.shape[0], step):
        stop = min(start + step, t.shape[0])
        raw = _rows(stored)[at + start : at + stop]
        codes = stored_codes(t, block, raw, slice(start, stop)).reshape(-1, block.sub)
        same = unpack_codes(block, raw).reshape(codes.shape) == codes
        kept += int(same.sum())
        if exact:
            fits = (codes.min(-1) >= 0) & (codes.max(-1) < block.levels)
            exact = bool(fits.all()) or block.name == "Q8_0"
            missing += int((~same[fits]).sum())
    return kept, missing if exact else 0
