"""Measures a GGUF or a checkpoint on disk against the one that it was made from, or any other of the same model.

Blocks of a GGUF are dequantized by the `gguf` package, and nothing of the conversion's own arithmetic is used but the
mapping of names, rows and columns: what is reported is what the file holds.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from bridge.blocks.read import READ, WRITTEN
from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.hub import kind_of, resolve_model
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint, open_source
from bridge.conversion.paths import files_of, with_checkpoint
from bridge.conversion.planning.mmproj import mmproj_path, tower_outline
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.writing.compare import compare
from bridge.conversion.writing.counterparts import (
    Counterparts,
    in_both,
    measured_gguf,
    of_checkpoints,
    with_gguf,
    with_gguf_as_reference,
)
from bridge.conversion.writing.report import Report, TensorReport
from bridge.encode.limits import FLOAT_LIMIT, REQUANTIZED_LIMIT
from bridge.errors import BridgeError, refused
from bridge.gguf_file.reader import StoredModel, expect_model, read_gguf
from bridge.models.outline import OutlineTensor
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.report import check_report
from bridge.system.storage.files import read_text
from bridge.system.storage.outputs import ProtectedPaths
from bridge.system.text import percent


@checked
def verify(
    model: str | Path,
    reference: str | Path,
    *,
    config: str | Path | None = None,
    template: str | Path | None = None,
    mtp_text: str | Path | None = None,
    mmproj: str | Path | None = None,
    target_model: str | Path | None = None,
    allow_missing: bool = False,
    text: str | Path | None = None,
    window: int = 256,
    n_windows: int | None = None,
    progress: Progress | None = None,
    text_progress: Progress | None = None,
    save_as: Path | None = None,
) -> Report:
    """Compare every tensor of a GGUF or a checkpoint with that of another one, the reference.

    model       what is measured: a GGUF (its first shard, if split), a checkpoint of any format, or a Hub id
    reference   what the other was made from, or any checkpoint or GGUF of the same model
    config      as for `convert`, for a checkpoint without config.json and tokenizer
    template    the one that the GGUF was made with, if it was
    mtp_text    a text file on which the layer of a GGUF that predicts a token further (MTP) is tried; a note says how
                it did
    mmproj      the file of the vision tower, which is compared too; None: the one that `convert` wrote beside the GGUF,
                if it is there
    target_model  as for `convert`
    allow_missing  whether tensors that only one of the two has become a note
    text        a text file that both predict: the report has the divergence; see docs/commands.md
    window, n_windows  as for `perplexity`
    progress    called with the bytes of both that are compared, of how many, and the tensor
    text_progress  called with the number of windows done, of how many, and the perplexity so far as a text
    save_as     where the caller will save the Report; checked before anything is compared

    Returns a Report with the same figures as `convert`'s, measured from the file; `failures` judges it.
    Raises BridgeError where the two do not hold the same tensors, or where a text cannot be tried.
    """
    started = time.perf_counter()
    content = None if text is None else read_text(Path(text))
    with ExitStack() as stack:
        measured = _opened(model, config, template is None, stack)
        is_gguf = isinstance(measured, StoredModel)
        for name, value in (("mtp_text", mtp_text), ("mmproj", mmproj)):
            if value is not None and not is_gguf:
                raise refused(name, value, f"is for a GGUF, and {model} is a checkpoint; leave it out")
        notes = []
        if mtp_text is not None:
            from bridge.conversion.writing.predictions import tried_prediction

            notes.append(tried_prediction(measured.files[0], Path(mtp_text)))
        of_reference = config if is_gguf or kind_of(reference, config) != "gguf" else None
        original = stack.enter_context(open_source(reference, of_reference, needs_config=template is None))
        if save_as is not None:
            protected = with_checkpoint(ProtectedPaths().with_files([*measured.files, *files_of(template)]), original)
            if not isinstance(measured, StoredModel):
                protected = with_checkpoint(protected, measured)
            check_report(save_as, protected)
        pairs = [
            in_both(each, str(reference), allow_missing)
            for each in _counterparts(measured, original, template, target_model, mmproj)
        ]
        notes += [note for each in pairs for note in each.notes]
        predictions = None
        if content is not None:
            from bridge.conversion.writing.predictions import divergence

            predictor = measured.files[0] if isinstance(measured, StoredModel) else measured
            predictions = divergence(
                predictor, original, content, window, n_windows, template, target_model, text_progress
            )  # fmt: skip
        reports = _compared(original, str(reference), pairs, progress)
    notes += [note for t in reports for note in t.notes]
    files = [file for each in pairs for file in each.measured.files]
    seconds = time.perf_counter() - started
    return Report(
        files, seconds, str(reference), original.format, reports, original.nbytes, pairs[0].measured.format,
        predictions, done="read", notes=notes, home=original.home,
    )  # fmt: skip


def failures(
    report: Report, max_share: float | None = None, max_nmse: float = FLOAT_LIMIT, exact: bool = False
) -> list[str]:
    """A line for each tensor that lacks codes which its type holds, or is further from the reference than allowed.

    max_share  of the checkpoint's own quantization noise, for tensors that came as codes; None: REQUANTIZED_LIMIT,
               or max_nmse as well for those that became Q8_0, the last resort for 8-bit codes, and for those of a
               checkpoint that is compared with the blocks of a GGUF
    max_nmse   squared error over squared weights, for tensors that came as floats
    exact      whether every weight must be the reference's instead, bit for bit once both are floats
    """
    if exact:
        return [line for t in report.tensors if (line := _inexact(t)) is not None]
    lines = []
    for t in report.tensors:
        f = t.fidelity
        if f is None:
            continue
        allowed = REQUANTIZED_LIMIT if max_share is None else max_share
        may_be_near = t.stored in READ or (t.type in WRITTEN and WRITTEN[t.type].last_resort)
        last_resort = max_share is None and may_be_near and f.nmse <= max_nmse
        if t.codes_missing:
            though = f"{t.type} holds them bit for bit" if t.type in WRITTEN else "all others are"
            lines.append(
                f"{t.name}: {percent(t.codes_missing / f.weights)} of its codes are not the checkpoint's, though "
                f"{though}; the file is damaged or made from another checkpoint"
            )
        elif t.has_codes and not f.share <= allowed and not last_resort:
            lines.append(f"{t.name}: adds {percent(f.share)} of the checkpoint's noise; allowed {percent(allowed)}")
        elif not t.has_codes and not f.nmse <= max_nmse:
            lines.append(f"{t.name}: NMSE {f.nmse:.2g} against the checkpoint's floats; allowed {max_nmse:.2g}")
    return lines


def _inexact(t: TensorReport) -> str | None:
    """How a tensor differs; None where it does not."""
    if t.largest_difference == 0:
        return None
    nmse = "" if t.fidelity is None else f", NMSE {t.fidelity.nmse:.2g}"
    return f"{t.name}: is not equal: weights differ by up to {t.largest_difference:.3g}{nmse}"


def _opened(
    model: str | Path, config: str | Path | None, needs_config: bool, stack: ExitStack
) -> StoredModel | Checkpoint:
    """The model that is measured."""
    path = resolve_model(model, config)
    if kind_of(path, config) != "gguf":
        return stack.enter_context(open_checkpoint(path, config, needs_config=needs_config))
    file = read_gguf(path)
    expect_model(file.metadata, file.files[0])
    return file


def _counterparts(
    measured: StoredModel | Checkpoint,
    reference: Checkpoint,
    template: str | Path | None,
    target: str | Path | None,
    mmproj: str | Path | None,
) -> list[Counterparts]:
    """What is compared of the model, and of a GGUF's vision tower."""
    if isinstance(measured, StoredModel):
        tower = _tower(reference, measured.files[0], mmproj)
        return [with_gguf(measured, reference, template, target), *([tower] if tower is not None else [])]
    if isinstance(reference, GgufCheckpoint):
        return [with_gguf_as_reference(measured, reference, target)]
    return [of_checkpoints(measured, reference, template, target)]


def _compared(
    reference: Checkpoint, name: str, pairs: list[Counterparts], progress: Progress | None
) -> list[TensorReport]:
    """A report on each tensor; `name`: of the reference."""
    reader, reports = PartReader(reference), []
    done, total = 0, sum(_nbytes(reader, each, tensor) for each in pairs for tensor in each.tensors)
    if progress:
        progress(0, total, "")
    for each in pairs:
        for tensor in each.tensors:
            rows = each.measured.rows_of[tensor.name]()
            reports.append(compare(reader, tensor, rows, (each.measured.name, name)))
            done += _nbytes(reader, each, tensor)
            if progress:
                progress(done, total, tensor.name)
    return reports


def _nbytes(reader: PartReader, pair: Counterparts, tensor: OutlineTensor) -> int:
    """Bytes of a tensor in both models."""
    return reader.nbytes(tensor) + pair.measured.rows_of[tensor.name]().nbytes


def _tower(ckpt: Checkpoint, model: Path, mmproj: str | Path | None) -> Counterparts | None:
    """The tensors of the vision tower and those of the file that holds them; None where there is no such file."""
    path = Path(mmproj) if mmproj is not None else mmproj_path(model)
    if mmproj is None and not path.exists():
        return None
    outline = tower_outline(ckpt, "F16")  # names and shapes are those of all types
    if outline is None:
        if mmproj is None:
            return None
        raise BridgeError(f"{path}: is a vision tower's, and {ckpt.path} has none that is known")
    return Counterparts(outline.tensors, measured_gguf(read_gguf(path)))
