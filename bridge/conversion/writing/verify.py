"""Measures a GGUF on disk against the checkpoint it was made from, with the `gguf` package's dequantization.

Nothing of the conversion's own arithmetic is used but the mapping of names, rows and columns: what is
reported is what the file holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import resolve_gguf
from bridge.checkpoint.grouped import CodedTensor
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.paths import files_of, with_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.mmproj import mmproj_path, tower_outline
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.writing.report import AS_IS, FLOAT, Outcome, Report, TensorReport, carried_outcome, lost_codes
from bridge.encode.block_bytes import unpack_codes
from bridge.encode.carrying.carry import Fidelity, carry, obstacle, stored_codes
from bridge.encode.limits import FLOAT_LIMIT, REQUANTIZED_LIMIT
from bridge.encode.type_choice import has_exact_fp16_scales
from bridge.errors import BridgeError
from bridge.gguf_file.reader import StoredModel, StoredTensor, expect_model, read_gguf
from bridge.models.outline import OutlineTensor
from bridge.runtime.cpu.engines import dequantize
from bridge.system.cpu.row_threads import chunks
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.report import check_report
from bridge.system.storage.files import read_text
from bridge.system.storage.outputs import ProtectedPaths
from bridge.system.text import percent

_WINDOW = 256  # tokens of a text that are read together


@checked
def verify(
    gguf_path: str | Path,
    checkpoint: str | Path,
    *,
    config: str | Path | None = None,
    template: str | Path | None = None,
    mtp_text: str | Path | None = None,
    mmproj: str | Path | None = None,
    target_model: str | Path | None = None,
    progress: Progress | None = None,
    save_as: Path | None = None,
) -> Report:
    """Compare every tensor of a GGUF (its first shard, if split) with the checkpoint's; `config` as for `convert`.

    template  the one that the GGUF was made with, if it was
    mtp_text  a text file on which the layer that predicts a token further (MTP) is tried; a note says how it did
    mmproj    the file of the vision tower, which is compared too; None: the one that `convert` wrote beside the GGUF,
              if it is there
    target_model  as for `convert`
    progress  called with the bytes of the checkpoint that are compared, of how many, and the tensor
    save_as   where the caller will save the Report; checked before anything is compared

    Returns a Report with the same figures as `convert`'s, measured from the file; `failures` judges it.
    Raises BridgeError where the two do not hold the same tensors, or where `mtp_text` cannot be tried.
    """
    started = time.perf_counter()
    gguf_path = resolve_gguf(gguf_path)
    tried = [] if mtp_text is None else [_tried_prediction(gguf_path, Path(mtp_text))]
    file = read_gguf(gguf_path)
    expect_model(file.metadata, file.files[0])
    with open_source(checkpoint, config, needs_config=template is None) as ckpt:
        if save_as is not None:
            protected = ProtectedPaths().with_files([*file.files, *files_of(template)])
            check_report(save_as, with_checkpoint(protected, ckpt))
        no_mtp = not file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")
        # any pre-tokenizer will do: only tensors are compared
        tensors = outline_of(ckpt, "default", template, no_mtp, target_model).tensors
        reader = PartReader(ckpt)
        scales = {f"{t.name.removesuffix('.weight')}.{key}" for t in tensors for key in ("scale", "input_scale")}
        _same_names(str(gguf_path), str(checkpoint), {t.name for t in tensors}, set(file.tensors) - scales)
        pairs = [(tensor, file) for tensor in tensors]
        files = list(file.files)
        if (tower := _tower(ckpt, gguf_path, mmproj)) is not None:
            pairs += [(tensor, tower[1]) for tensor in tower[0]]
            files += tower[1].files
        reports = []
        done, total = 0, sum(reader.nbytes(tensor) for tensor, _ in pairs)
        if progress:
            progress(0, total, "")
        for tensor, model in pairs:
            stored = model.tensors[tensor.name]
            reports.append(_compare(reader, tensor, _Stored(stored, model.scales_of(stored))))
            done += reader.nbytes(tensor)
            if progress:
                progress(done, total, tensor.name)
    notes = [*tried, *(note for t in reports for note in t.notes)]
    seconds = time.perf_counter() - started
    return Report(files, seconds, str(checkpoint), ckpt.format, reports, ckpt.nbytes, notes=notes, home=ckpt.home)


def failures(report: Report, max_share: float | None = None, max_nmse: float = FLOAT_LIMIT) -> list[str]:
    """A line for each tensor that lacks codes which its type holds, or is further from the checkpoint than allowed.

    max_share  of the checkpoint's own quantization noise, for tensors that came as codes; None: REQUANTIZED_LIMIT,
               or for those that became Q8_0, the last resort for 8-bit codes, max_nmse as well
    max_nmse   squared error over squared weights, for tensors that came as floats
    """
    lines = []
    for t in report.tensors:
        f = t.fidelity
        if f is None:
            continue
        allowed = REQUANTIZED_LIMIT if max_share is None else max_share
        last_resort = max_share is None and t.type in WRITTEN and WRITTEN[t.type].last_resort and f.nmse <= max_nmse
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


def _tried_prediction(gguf_path: str | Path, text: Path) -> str:
    """How many tokens the layer that predicts a token further would have guessed, in a sentence."""
    from bridge.runtime.decoder.prediction import agreement
    from bridge.runtime.model import Model
    from bridge.runtime.replies.perplexity import cut_windows

    content = read_text(text)
    with Model.load(gguf_path) as model:
        head = model.prediction_head()
        windows = cut_windows(model, content, min(_WINDOW, model.context), None)
        with model.taken() as decoder:
            counts = [agreement(decoder, head, tokens) for tokens in windows]
    right, of = map(sum, zip(*counts, strict=True))
    return (
        f"{text}: the layer that predicts a token further (MTP) guesses {right} of {of} tokens ({percent(right / of)}) "
        "as the model chooses them"
    )


def _tower(ckpt: Checkpoint, model: Path, mmproj: str | Path | None) -> tuple[list[OutlineTensor], StoredModel] | None:
    """The tensors of the vision tower and the file that holds them; None where there is no such file."""
    path = Path(mmproj) if mmproj is not None else mmproj_path(model)
    if mmproj is None and not path.exists():
        return None
    outline = tower_outline(ckpt, "F16")  # names and shapes are those of all types
    if outline is None:
        if mmproj is None:
            return None
        raise BridgeError(f"{path}: is a vision tower's, and {ckpt.path} has none that is known")
    file = read_gguf(path)
    _same_names(str(path), str(ckpt.path), {tensor.name for tensor in outline.tensors}, set(file.tensors))
    return outline.tensors, file


def _same_names(path: str, checkpoint: str, expected: set[str], stored: set[str]) -> None:
    if expected - stored:
        name = min(expected - stored)
        raise BridgeError(f"{path}: {name} is missing ({len(expected - stored)} in all); not made from {checkpoint}")
    if stored - expected:
        name = min(stored - expected)
        raise BridgeError(f"{path}: {name} is not in {checkpoint} ({len(stored - expected)} in all)")


class _Stored:
    """A tensor of the file by rows, those of experts one after another, and what multiplies it.

    rows     uint8 [rows, bytes]; of a vector of floats, [values, bytes of one]
    factors  float32 [1], or [rows, 1] where experts differ
    """

    def __init__(self, tensor: StoredTensor, scales: np.ndarray | None) -> None:
        self.type, self.shape, self.raw = tensor.type, tensor.shape, tensor.raw
        self.vector = len(tensor.shape) == 1
        rows = math.prod(tensor.shape if self.vector and tensor.type in dequantize.UNQUANTIZED else tensor.shape[:-1])
        self.rows = tensor.raw.reshape(rows, -1)
        values = np.ones(1, np.float32) if scales is None else scales
        self.factors = np.repeat(values, rows // len(values))[:, None] if len(values) > 1 else values

    def values(self, start: int, stop: int | None) -> np.ndarray:
        """float32 rows, or values of a vector, by the gguf package."""
        raw = self.rows[start:stop]
        try:
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[self.type])
        except NotImplementedError:  # a type newer than the package
            values = dequantize.rows(self.type, raw)
        values = values * (self.factors[start:stop] if self.factors.ndim > 1 else self.factors)
        return values.reshape(-1) if self.vector else values


def _compare(reader: PartReader, tensor: OutlineTensor, stored: _Stored) -> TensorReport:
    """One tensor of the file against the checkpoint's."""
    if stored.shape != tensor.shape:
        raise BridgeError(
            f"{tensor.name}: shape {list(stored.shape)} in the GGUF, {list(tensor.shape)} in the checkpoint"
        )
    if any(reader.coded(part) for part in tensor.parts):
        outcome = _compare_codes(reader, tensor, stored)
    elif tensor.origin == "template":
        assert tensor.data is not None
        if stored.type != tensor.fixed_type or not np.array_equal(stored.raw, tensor.data):
            raise BridgeError(f"{tensor.name}: is not the template's, from which it should have been taken")
        outcome = Outcome(AS_IS)
    else:
        outcome = _compare_floats(reader, tensor, stored)
    return TensorReport.of(tensor, stored.type, stored.raw.nbytes, outcome)


def _compare_floats(reader: PartReader, tensor: OutlineTensor, stored: _Stored) -> Outcome:
    """A tensor that came as floats."""
    if tensor.data is not None:
        values = stored.values(0, None).reshape(tensor.shape)
        error, signal = _sums(iter([(tensor.data.reshape(tensor.shape), values)]))
    else:
        error, signal = _sums(_float_pairs(reader, tensor, stored))
    if not error and stored.type not in WRITTEN:
        return Outcome(AS_IS)
    return Outcome(FLOAT, Fidelity(math.prod(tensor.shape), error, signal, 0.0, 0))


def _compare_codes(reader: PartReader, tensor: OutlineTensor, stored: _Stored) -> Outcome:
    """A tensor that came as codes, all of it or most parts. Parts that came as floats are not in its fidelity."""
    block = WRITTEN.get(stored.type)
    reasons: list[str] = []
    notes: list[str] = []
    total = Fidelity(0, 0.0, 0.0, 0.0, 0)
    row = all_missing = 0
    for part in tensor.parts:
        if reader.coded(part):
            t = reader.grouped(part)
            notes += t.notes
            error, signal = _sums(_grouped_pairs(t, stored, row))
            codes_kept, missing = _codes_kept(t, stored, row)
            all_missing += missing
            total += Fidelity(math.prod(t.shape), error, signal, t.noise(), codes_kept)
            reason = f"stored as {stored.type}" if block is None else obstacle(t, block)
            reasons.append("" if codes_kept == math.prod(t.shape) or not error else reason or "the file has others")
        row += part.shape[0]
    notes += lost_codes(tensor.name, reasons, total)
    return Outcome(carried_outcome(total), total, notes=notes, codes_missing=all_missing)


def _grouped_pairs(t: CodedTensor, stored: _Stored, first_row: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of rows of the checkpoint's and the file's weights; the part begins at row `first_row` of the file."""
    if stored.vector:  # in the GGUF; a matrix of one row in the checkpoint
        yield t.dequantize(), stored.values(0, None).reshape(t.shape)
        return
    for rows in chunks(*t.shape):
        yield t.dequantize(rows), stored.values(first_row + rows.start, first_row + rows.stop)


def _float_pairs(reader: PartReader, tensor: OutlineTensor, stored: _Stored) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    start = 0
    if all(len(part.shape) == 1 for part in tensor.parts):  # in the GGUF it may be a matrix
        values = stored.values(0, None).reshape(-1)
        for x in (x for part in tensor.parts for x in reader.floats(part)):
            yield x, values[start : start + len(x)]
            start += len(x)
        return
    for part in tensor.parts:
        for x in reader.floats(part):
            rows = x.reshape(-1, x.shape[-1])  # those of filters too
            yield rows, stored.values(start, start + len(rows))
            start += len(rows)


def _sums(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Squared error and squared signal over (reference, stored) pairs."""
    error = signal = 0.0
    for reference, value in pairs:
        error += float(np.square(value.astype(np.float64) - reference).sum())
        signal += float(np.square(reference, dtype=np.float64).sum())
    return error, signal


def _codes_kept(t: CodedTensor, stored: _Stored, first_row: int) -> tuple[int, int]:
    """How many integer codes in the file are the checkpoint's, shifted or mirrored as the type has them; and how many
    are not, though a plain type holds them bit for bit: Q8_0 by the block, the others all or none."""
    block = WRITTEN.get(stored.type)
    if block is None or obstacle(t, block):
        return 0, 0
    if block.scales:  # scales and all, by the block
        raw = stored.rows[first_row : first_row + t.shape[0]]
        same = (raw == carry(t, block).data).reshape(-1, block.nbytes).all(1)
        return int(same.sum()) * block.size, int((~same).sum()) * block.size
    exact = not block.is_k and not block.has_min and has_exact_fp16_scales(t)
    codes_kept = missing = 0
    for rows in chunks(*t.shape):
        raw = stored.rows[first_row + rows.start : first_row + rows.stop]
        codes = stored_codes(t, block, raw, rows).reshape(-1, block.sub)
        same = unpack_codes(block, raw).reshape(codes.shape) == codes
        codes_kept += int(same.sum())
        if exact:
            fits = (codes.min(-1) >= 0) & (codes.max(-1) < block.levels)
            exact = bool(fits.all()) or block.clips
            missing += int((~same[fits]).sum())
    return codes_kept, missing if exact else 0
