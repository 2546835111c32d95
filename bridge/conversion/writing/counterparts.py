"""Which tensors of two models `verify` compares with each other.

Both have the names and the order of rows that a GGUF has, by the family of their checkpoints: experts in stacks or by
themselves, fused matrices or their parts are the same then. Two checkpoints of an unknown family, and what a GGUF does
not have (towers, layers that predict further tokens where llama.cpp has no place for them), are compared by the
checkpoints' names, without the prefix that a language model has in a model of several parts.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.conversion.planning.checkpoint_outline import outline_of, without_act_order
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.writing.compare import squared_error
from bridge.conversion.writing.tensor_rows import BlockRows, PartRows, TensorRows
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel
from bridge.models.outline import Outline, OutlineTensor, Part
from bridge.models.table import BUFFERS
from bridge.models.towers.tower import TOWER_NAME
from bridge.models.wrapper import text_names
from bridge.system.text import few_of

# heads, and the embeddings that stand for them where they are tied
_HEADS = {"output.weight": "token_embd.weight", "lm_head.weight": "model.embed_tokens.weight"}


class _NamedTensor(OutlineTensor):
    """A tensor by its checkpoint's name."""

    @property
    def kind(self) -> str:
        return re.sub(r"(?<=\.)\d+(?=\.)", "*", self.name.removesuffix(".weight"))


@dataclass
class Measured:
    """The model that is measured.

    name     of its file or folder
    rows_of  what returns the rows of a tensor, by its name
    files    that it is in
    """

    name: str
    format: str
    rows_of: Mapping[str, Callable[[], TensorRows]]
    files: list[Path]


@dataclass
class Counterparts:
    """The reference's tensors that are compared, those of the measured model by the same names, and what to say."""

    tensors: list[OutlineTensor]
    measured: Measured
    notes: list[str] = field(default_factory=list)


def with_gguf(
    file: StoredModel, reference: Checkpoint, template: str | Path | None, target: str | Path | None
) -> Counterparts:
    """A GGUF's tensors and those of a checkpoint or another GGUF."""
    # any pre-tokenizer will do: only tensors are compared
    outline = outline_of(reference, "default", template, _no_mtp(file), target, undo_act_order=False)
    measured = measured_gguf(file)
    tensors = _as_converted(reference, outline, partial(_error_of_reference, PartReader(reference), measured))
    if isinstance(reference, GgufCheckpoint):
        tensors = _scaled(reference, tensors)
    multipliers = _multipliers(tensors)
    rows_of = {name: rows for name, rows in measured.rows_of.items() if name not in multipliers}
    return Counterparts(tensors, replace(measured, rows_of=rows_of))


def with_gguf_as_reference(ckpt: Checkpoint, reference: GgufCheckpoint, target: str | Path | None) -> Counterparts:
    """A checkpoint's tensors and those of a GGUF. Raises BridgeError where the checkpoint's family is unknown."""
    outline = outline_of(ckpt, "default", None, _no_mtp(reference.model), target, undo_act_order=False)
    expected = {t.name: t for t in _scaled(reference, reference.outline.tensors)}
    error = partial(_error_of_measured, PartReader(reference), expected, PartReader(ckpt))
    others = _by_name(ckpt, outline)
    notes = [f"the GGUF has no place for {few_of(sorted(others))}: not compared"] if others else []
    return Counterparts([*expected.values()], _measured(ckpt, _as_converted(ckpt, outline, error)), notes)


def of_checkpoints(
    ckpt: Checkpoint, reference: Checkpoint, template: str | Path | None, target: str | Path | None
) -> Counterparts:
    """The tensors of two checkpoints. Raises BridgeError where they are of other architectures."""
    try:
        outlines = [outline_of(c, "default", template, False, target, undo_act_order=False) for c in (reference, ckpt)]
    except BridgeError as problem:
        expected, others = (_by_name(c) for c in (reference, ckpt))
        note = f"all tensors are compared by the checkpoints' names, since those of a GGUF are unknown: {problem}"
        return Counterparts([*expected.values()], _measured(ckpt, others.values()), [note])
    arch, other_arch = (str(outline.metadata["general.architecture"].value) for outline in outlines)
    if arch != other_arch:
        raise BridgeError(f"{ckpt.path}: is of {other_arch}, {reference.path} of {arch}; give two of the same model")
    expected, others = (_by_name(c, outline) for c, outline in zip((reference, ckpt), outlines, strict=True))
    more = sorted(expected.keys() | others.keys())
    notes = [f"compared by the checkpoints' names, since a GGUF has no place for them: {few_of(more)}"] if more else []
    tensors, other_tensors = _in_one_order((reference, outlines[0]), (ckpt, outlines[1]))
    return Counterparts([*tensors, *expected.values()], _measured(ckpt, [*other_tensors, *others.values()]), notes)


def _in_one_order(
    reference: tuple[Checkpoint, Outline], measured: tuple[Checkpoint, Outline]
) -> tuple[list[OutlineTensor], list[OutlineTensor]]:
    """The tensors of two checkpoints, of which one may have rows permuted where the other has act-order."""
    reader, others = PartReader(reference[0]), _measured(measured[0], measured[1].tensors)
    tensors = _as_converted(*reference, partial(_error_of_reference, reader, others))
    expected = {t.name: t for t in tensors}
    return tensors, _as_converted(*measured, partial(_error_of_measured, reader, expected, PartReader(measured[0])))


def _error_of_reference(reader: PartReader, measured: Measured, tensor: OutlineTensor) -> float:
    """How far a tensor of the reference, `reader`'s, is from the measured one; infinite where there is none."""
    rows_of = measured.rows_of.get(tensor.name)
    return math.inf if rows_of is None else squared_error(reader, tensor, rows_of())


def _error_of_measured(
    reader: PartReader, expected: Mapping[str, OutlineTensor], measured: PartReader, tensor: OutlineTensor
) -> float:
    """How far a tensor of a measured checkpoint is from the reference's; infinite where there is none."""
    other = expected.get(tensor.name)
    return math.inf if other is None else squared_error(reader, other, PartRows(measured, tensor))


def in_both(counterparts: Counterparts, reference: str, allow_missing: bool) -> Counterparts:
    """Those that both models have; a head that one of them ties to its embeddings is compared with these.

    Raises BridgeError where one has tensors that the other lacks, unless a note is to tell of them.
    """
    measured, notes = counterparts.measured, [*counterparts.notes]
    tensors, rows_of = {t.name: t for t in counterparts.tensors}, {**measured.rows_of}
    for head, embeddings in _HEADS.items():
        both = embeddings in tensors and embeddings in rows_of
        if both and (head in tensors) != (head in rows_of):
            if head in tensors:
                rows_of[head] = rows_of[embeddings]
            else:
                tensors[head] = replace(tensors[embeddings], name=head)
            notes.append(f"{head}: one of the two has it, and is compared with the embeddings of the other")
    lost, extra = tensors.keys() - rows_of.keys(), rows_of.keys() - tensors.keys()
    facts = [f"{few_of(sorted(extra))} {_are(extra)} not in {reference}"] if extra else []
    facts += [f"{few_of(sorted(lost))} of {reference} {_are(lost)} missing"] if lost else []
    if facts and not allow_missing:
        way = f"{parameter('allow_missing', True)} compares what both have"
        raise BridgeError(f"{measured.name}: {'; '.join(facts)}. {way}")
    notes += [f"not compared: {fact}" for fact in facts]
    common = [tensor for name, tensor in tensors.items() if name in rows_of]
    if not common:
        raise BridgeError(f"{measured.name}: has no tensor that {reference} has; give two of the same model")
    return Counterparts(common, replace(measured, rows_of=rows_of), notes)


def measured_gguf(file: StoredModel) -> Measured:
    """All tensors of a GGUF."""
    rows_of = {name: partial(_block_rows, file, name) for name in file.tensors}
    return Measured(str(file.files[0]), "GGUF", rows_of, [*file.files])


def _block_rows(file: StoredModel, name: str) -> BlockRows:
    return BlockRows(file.tensors[name], file.scales_of(file.tensors[name]))


def _measured(ckpt: Checkpoint, tensors: Iterable[OutlineTensor]) -> Measured:
    reader = PartReader(ckpt)
    rows_of = {tensor.name: partial(PartRows, reader, tensor) for tensor in tensors}
    return Measured(str(ckpt.path), ckpt.format, rows_of, [*ckpt.files])


def _no_mtp(file: StoredModel) -> bool:
    """Whether a GGUF lacks the layers that predict further tokens."""
    return not file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers")


def _as_converted(ckpt: Checkpoint, outline: Outline, error: Callable[[OutlineTensor], float]) -> list[OutlineTensor]:
    """A checkpoint's tensors in that order of rows in which they are nearer to a GGUF's.

    `convert` permutes rows to undo act-order, other programs do not. `error`: of a tensor, infinite where it has none.
    """
    ordered = without_act_order(ckpt, outline)
    pairs = zip(outline.tensors, ordered, strict=True)
    old, new = next((pair for pair in pairs if any(part.folded for part in pair[1].parts)), (None, None))
    return ordered if old is None or new is None or error(new) <= error(old) else outline.tensors


def _scaled(ckpt: GgufCheckpoint, tensors: Sequence[OutlineTensor]) -> list[OutlineTensor]:
    """A GGUF's tensors multiplied by those that scale them, without these."""

    def part(p: Part, scales: np.ndarray) -> Part:
        """`scales`: one number, or one a matrix."""
        of_part = scales if p.matrix is None or len(scales) == 1 else scales[p.matrix]
        return replace(p, factor=np.broadcast_to(of_part, p.shape[:1]))

    scaled, multipliers = [], _multipliers(tensors)
    for tensor in tensors:
        if tensor.name not in multipliers:
            scales = ckpt.model.scales_of(ckpt.model.tensors[tensor.name])
            parts = tensor.parts if scales is None else tuple(part(p, scales) for p in tensor.parts)
            scaled.append(replace(tensor, parts=parts))
    return scaled


def _multipliers(tensors: Iterable[OutlineTensor]) -> set[str]:
    """The names of what multiplies tensors of NVFP4 and their inputs."""
    return {f"{tensor.name.removesuffix('.weight')}.{key}" for tensor in tensors for key in ("scale", "input_scale")}


def _by_name(ckpt: Checkpoint, outline: Outline | None = None) -> dict[str, OutlineTensor]:
    """The tensors that an outline has no use for, or all, by their names in a language model or a tower."""
    used: set[str | None] = set()
    if outline is not None:
        used = {source for t in outline.tensors for part in t.parts for source in (part.source, part.times)}
        used |= {*outline.unused, *outline.zero_only, *outline.optional}
    shapes: dict[str, tuple[int, ...]] = {name: info.shape for name, info in ckpt.tensors.items()}
    shapes |= {f"{module}.weight": info.shape for module, info in ckpt.modules.items()}
    stored_names, towers = text_names(shapes)
    stored_names |= {match[1]: name for name in towers if (match := TOWER_NAME.match(name))}
    return {
        name: _named(name, stored, shapes[stored])
        for name, stored in stored_names.items()
        if stored not in used and 0 not in shapes[stored] and not BUFFERS.match(name)
    }


def _named(name: str, stored: str, shape: tuple[int, ...]) -> _NamedTensor:
    if not shape:
        return _NamedTensor(name, (1,), (Part(stored, (1,), change="scalar"),))
    return _NamedTensor(name, shape, (Part(stored, shape),))


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
