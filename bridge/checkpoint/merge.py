"""Merges a PEFT adapter into an opened checkpoint: what it changes is read as floats, W + scale * B A.

Codes have no room for the change, so a module of codes becomes a tensor of floats, its dequantized weights with the
change. A change that is the same for all columns of a group (QA-LoRA) moves zero points alone: codes stay. Nothing is
kept: rows are computed whenever they are read. Other modules stay as they are.

A head that is tied to the embeddings is not in the checkpoint. PEFT trains an adapter of one of them with the other as
it was, so they are untied: the merged model has both, unless ensure_weight_tying says that they stay one matrix.

Layers of Conv1D (GPT-2) are stored [in, out] as floats, their changes are [out, in]: shapes tell, and for square
matrices those of the other layers, or else fan_in_fan_out.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import HEAD, Adapter, LowRank
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.schemes import EMBEDDING
from bridge.errors import BridgeError

_CONV1D = tuple(f".{part}.weight" for part in ("c_attn", "c_proj", "c_fc"))


@dataclass(frozen=True, eq=False)
class MergedTensor:
    """A tensor of `base`, or the values that replace it, with a change; `transposed`: it is stored [in, out]."""

    base: Checkpoint
    name: str
    saved: np.ndarray | None
    change: LowRank | None
    transposed: bool = False

    def read(self, rows: tuple[int, int] | None) -> np.ndarray:
        """float32 of the tensor, or of its rows start..stop."""
        part = slice(None) if rows is None else slice(*rows)
        if self.transposed:  # DoRA's lengths are of whole columns
            return np.ascontiguousarray(self._changed(self._stored(None).T, slice(None)).T[part])
        return self._changed(self._stored(rows), part)

    def _stored(self, rows: tuple[int, int] | None) -> np.ndarray:
        module = self.name.removesuffix(".weight")
        if self.saved is not None:
            return self.saved[slice(*(rows or (None,)))].copy()
        if module in self.base.modules:
            return self.base.read_module(module, None if rows is None else np.arange(*rows)).dequantize()
        return self.base.read_float(self.name, rows)

    def _changed(self, values: np.ndarray, part: slice) -> np.ndarray:
        """float32: some rows of the matrix [out, in], with their change."""
        if self.change is None:
            return values
        values = values + self.change.rows(part)
        if self.change.magnitude is not None:
            length = np.linalg.norm(values, axis=1)
            values *= (self.change.magnitude[part] / np.where(length > 0, length, 1))[:, None]
        return values


@dataclass(frozen=True, eq=False)
class MovedZeros:
    """A module of `base` whose zero points a change moves: s (q - z) + c = s (q - (z - c / s))."""

    base: Checkpoint
    name: str
    change: LowRank

    def read(self, rows: np.ndarray | None) -> GroupedTensor:
        """The module, or some of its rows."""
        t = self.base.read_module(self.name, rows)
        assert isinstance(t, GroupedTensor)  # see `_moves_zeros`
        moved = self.change.rows(slice(None) if rows is None else rows, t.group_size)
        if not t.scales[moved != 0].all():
            raise BridgeError(f"{self.name}: has a group whose scale is 0, which no zero point moves; merge with PEFT")
        return replace(t, zeros=t.zeros - np.divide(moved, t.scales, out=np.zeros_like(moved), where=moved != 0))


def _moves_zeros(base: Checkpoint, name: str, change: LowRank) -> bool:
    """Whether a change is the same for all columns of each group of a module's codes."""
    if name not in base.modules or base.group_order(name) is not None:
        return False
    one = base.read_module(name, np.arange(1))
    return isinstance(one, GroupedTensor) and one.sequential and change.alike % one.group_size == 0


def merge(ckpt: Checkpoint, adapter: Adapter) -> None:
    """Let a checkpoint read as its model with an adapter, and note what that costs.

    Raises BridgeError for an adapter of another model, for added tokens, and for a GGUF whose head would have to become
    a matrix of its own.
    """

    def refused(name: str, why: str) -> BridgeError:
        return BridgeError(f"{adapter.path}: {name} {why}; merge it with PEFT, and convert the result")

    if ckpt.reader is not None:
        ckpt.reader.folding = False  # the adapter's changes are of the weights as they are stored
    base = copy(ckpt)
    ckpt.merged, ckpt.moved = {}, {}  # not the base's
    stored = {f"{name}.weight": module.shape for name, module in base.modules.items()}
    shapes = {**stored, **{name: info.shape for name, info in base.tensors.items()}}
    renamed = adapter.of(set(shapes))
    changes = {f"{module}.weight": change for module, change in renamed.changes.items()}
    saved = dict(renamed.saved)
    embeddings = _tied_embeddings(base, shapes)
    untied = embeddings is not None and _untie(embeddings, changes, saved, adapter.tying)
    names = {name: name for name in (*changes, *saved)}  # and of which tensor the base's values are
    if embeddings is not None and untied:
        if not ckpt.unties:
            raise refused(embeddings, "is also the head of the base model")
        shapes[HEAD] = shapes[embeddings]
        names[HEAD] = embeddings
        ckpt.config = {**base.config, "tie_word_embeddings": False}
    transposed = _transposed(base, changes, adapter.transposed)
    for name, source in names.items():
        change, values = changes.get(name), saved.get(name)
        if name not in shapes:
            raise refused(name, "is not in the base checkpoint")
        change_shapes = [] if change is None else [change.shape[::-1] if name in transposed else change.shape]
        for shape in [*change_shapes, *([] if values is None else [values.shape])]:
            if shape != shapes[name]:
                raise refused(name, f"is of shape {list(shape)}, the base checkpoint has {list(shapes[name])}")
        layer = name.removesuffix(".weight")
        if change is not None and values is None and _moves_zeros(base, layer, change):
            ckpt.moved[layer] = MovedZeros(base, layer, change).read
        else:
            ckpt.merged[name] = MergedTensor(base, source, values, change, name in transposed).read
    ckpt.modules = {name: module for name, module in base.modules.items() if f"{name}.weight" not in ckpt.merged}
    ckpt.tensors = dict(base.tensors)
    for name in ckpt.merged:
        if (source := names[name]) in base.tensors:
            ckpt.tensors[name] = replace(base.tensors[source], name=name, dtype="F32")
        else:
            module = base.modules[source.removesuffix(".weight")]
            ckpt.tensors[name] = TensorInfo(name, "F32", module.shape, module.nbytes, module.file)
    ckpt.files = [*base.files, *adapter.files]
    coded = len(base.modules) - len(ckpt.modules)
    note = f"tensors merged with the adapter {adapter.path.name}: {len(ckpt.merged) + len(ckpt.moved)}"
    if ckpt.moved:
        note += f"; of {len(ckpt.moved)} only zero points move, their codes are carried"
    if coded:
        note += f"; {coded} of them were codes and are requantized, the report has their errors"
    if untied:
        note += "; the head, which was tied to the embeddings, is a matrix of its own"
    ckpt.notes = [*ckpt.notes, note]


def _tied_embeddings(base: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The embeddings of a model whose head is tied to them; None for others."""
    if any(name.endswith(HEAD) for name in shapes) or not base.config.get("tie_word_embeddings", True):
        return None
    return next((name for name in shapes if EMBEDDING.fullmatch(name.removesuffix(".weight"))), None)


def _untie(embeddings: str, changes: dict[str, LowRank], saved: dict[str, np.ndarray], tying: bool) -> bool:
    """Whether the head becomes a matrix of its own; where it stays tied, what is said of it is of the embeddings."""
    if {embeddings, HEAD}.isdisjoint((*changes, *saved)):
        return False
    both = embeddings in saved and HEAD in saved and {embeddings, HEAD}.isdisjoint(changes)
    if not tying and not (both and np.array_equal(saved[embeddings], saved[HEAD])):
        return True
    if (change := changes.pop(HEAD, None)) is not None:
        changes.setdefault(embeddings, change)
    if (values := saved.pop(HEAD, None)) is not None:
        saved.setdefault(embeddings, values)
    return False


def _transposed(base: Checkpoint, changes: Mapping[str, LowRank], fan_in_fan_out: bool) -> set[str]:
    """The tensors that are stored [in, out]: Conv1D's alone. Where all matrices are square, fan_in_fan_out decides,
    which is one value for all, and which PEFT passes over for layers of other kinds."""
    floats = {name: base.tensors[name].shape for name in changes if name in base.tensors and name.endswith(_CONV1D)}
    straight = {name for name, shape in floats.items() if shape == changes[name].shape}
    other = {name for name, shape in floats.items() if shape == changes[name].shape[::-1]}
    square = straight & other
    return other if other - square or (fan_in_fan_out and not straight - square) else set()
