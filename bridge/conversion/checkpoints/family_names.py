"""The tensors of a quantized checkpoint under the names of its family's checkpoints, where its layers have others.

Readers name a matrix of a stack as a layer of its own (experts.3.gate_proj); the family may have all experts in one
tensor, with rows of gate and up in turn, or transposed. Both are parts of one tensor of a GGUF: the outline of the
checkpoint tells which layers that is read from, and the family's table which tensors it would be exported to.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.part_reader import PartReader
from bridge.errors import BridgeError
from bridge.models import tensors_of_gguf
from bridge.models.outline import Fold, Outline, OutlineTensor, Part
from bridge.models.restored import restored, shape_of
from bridge.models.wrapper import named_like


@dataclass(frozen=True)
class AssembledLayers:
    """A tensor that is put together of layers, float32.

    ckpt    where these are
    pieces  (part of the tensor, part of the checkpoint with its values)
    """

    ckpt: Checkpoint
    pieces: tuple[tuple[Part, Part], ...]

    @property
    def sources(self) -> set[str]:
        """The tensors of the checkpoint that it is put together of."""
        return {source.source for _, source in self.pieces}

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of([part for part, _ in self.pieces])

    def floats(self, rows: slice) -> np.ndarray:
        """A run of rows, or of the matrices of a stack, of which no others are read."""
        first, stop, _ = rows.indices(self.shape[0])
        if any(part.matrix is None for part, _ in self.pieces):
            return restored([(part, self._values(source)) for part, source in self.pieces], self.shape)[rows]
        run = [
            (replace(part, matrix=part.matrix - first), self._values(source))
            for part, source in self.pieces
            if part.matrix is not None and first <= part.matrix < stop
        ]
        return restored(run, (stop - first, *self.shape[1:]))

    def _values(self, part: Part) -> np.ndarray:
        reader = PartReader(self.ckpt)
        if reader.coded(part):
            return reader.grouped(part).dequantize()
        return np.concatenate([*reader.floats(part)])


def assembled_layers(ckpt: Checkpoint, outline: Outline, quantized: bool) -> dict[str, AssembledLayers]:
    """The tensors of the family's checkpoints that this one has as layers of other names, by name.

    outline    of the checkpoint
    quantized  whether the new checkpoint has codes: some families' experts have other names then, and names that are
               those of the files stay, since programs that write such layers read them

    Raises BridgeError where the family's table does not tell the names.
    """
    arch = str(outline.metadata["general.architecture"].value)
    here = {tensor.name: tensor for tensor in outline.tensors if tensor.origin == "checkpoint"}
    shapes = {tensor.name: tensor.shape for tensor in outline.tensors if tensor.origin != "scale"}
    stored = _stored_modules(ckpt) if quantized else set()
    pieces: dict[str, list[tuple[Part, Part]]] = {}
    for there in tensors_of_gguf(ckpt.config, ckpt.home, shapes, arch, quantized=quantized):
        tensor = here.get(there.name)
        if tensor is None or any(part.module in stored for part in tensor.parts):
            continue
        if _is_renamed(ckpt, tensor, there):
            for part, source in zip(there.parts, tensor.parts, strict=True):
                pieces.setdefault(named_like(part.source, source.source), []).append((part, source))
    return {name: AssembledLayers(ckpt, tuple(pairs)) for name, pairs in pieces.items()}


def _is_renamed(ckpt: Checkpoint, here: OutlineTensor, there: OutlineTensor) -> bool:
    """Whether quantized layers have other names in the family's checkpoints, and the same values."""
    names = {part.source for part in here.parts}
    layers = any(name.removesuffix(".weight") in ckpt.modules or ckpt.tensors[name].dtype in FLOAT8 for name in names)
    same = [part.shape for part in here.parts] == [part.shape for part in there.parts]
    plain = all(part.factor is None and part.change in (None, "transposed") for part in (*here.parts, *there.parts))
    return layers and same and plain and names != {part.source for part in there.parts}


def _stored_modules(ckpt: Checkpoint) -> set[str]:
    """What tensors of the files are named after; parts may have two words (weight._scale)."""
    modules = {name.rpartition(".")[0] for name in ckpt.store.tensors}
    return modules | {module.rpartition(".")[0] for module in modules}


class FamilyNames(NamedTuple):
    """What the family of a checkpoint tells of its layers.

    folds      where act-order that the format lacks can be undone
    assembled  tensors that are put together of layers, by name
    notes      where that is not known
    """

    folds: list[Fold]
    assembled: dict[str, AssembledLayers]
    notes: list[str]


def names_of_family(ckpt: Checkpoint, written: WrittenFormat | None) -> FamilyNames:
    """What the family tells that a checkpoint needs to become another of this format, or of floats."""
    stated = ckpt.config
    try:
        outline = outline_of(ckpt, "default")
        assembled = assembled_layers(ckpt, outline, written is not None)
    except BridgeError as error:
        names = (*ckpt.modules, *ckpt.tensors)
        why = f"the names of experts are those that they have here, one by one: {error}"
        return FamilyNames([], {}, [why] if any(".experts." in name for name in names) else [])
    finally:
        ckpt.config = stated  # an outline mends it, for a GGUF
    ordered = written is not None and not written.act_order
    return FamilyNames(outline.folds if ordered else [], assembled, [])
