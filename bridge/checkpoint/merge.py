"""Merges a PEFT adapter into an opened checkpoint: what it changes is read as floats, W + scale * B A.

Codes have no room for the change, so a module of codes becomes a tensor of floats, its dequantized weights with the
change. A change that is the same for all columns of a group (QA-LoRA) moves zero points alone: codes stay. Nothing is
kept: rows are computed whenever they are read. Other modules stay as they are.

A head that is tied to the embeddings is not in the checkpoint. PEFT trains an adapter of one of them with the other as
it was, so they are untied: the merged model has both, unless ensure_weight_tying says that they stay one matrix.

Layers of Conv1D (GPT-2) are stored [in, out] as floats, their changes are [out, in]: shapes tell, and for square
matrices those of the other layers, or else fan_in_fan_out.
"""

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import HEAD, Adapter, LowRank, StackChanges, TokenRows
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.labels.schemes import EMBEDDING
from bridge.errors import BridgeError

_CONV1D = tuple(f".{part}.weight" for part in ("c_attn", "c_proj", "c_fc"))


@dataclass(frozen=True, eq=False)
class MergedTensor:
    """A tensor of `base`, or the values that replace it, with a change and with rows that replace its own.

    rows        how many it has, more than the base's where tokens were added
    transposed  it is stored [in, out]
    """

    base: Checkpoint
    name: str
    rows: int
    saved: np.ndarray | None
    change: LowRank | None
    tokens: TokenRows | None
    transposed: bool = False

    def read(self, rows: tuple[int, int] | None) -> np.ndarray:
        """float32 of the tensor, or of its rows start..stop."""
        part = slice(*(rows or (0, self.rows)))
        if self.transposed:  # DoRA's lengths are of whole columns
            return np.ascontiguousarray(self._changed(self._stored(0, self.rows).T, slice(None)).T[part])
        return self._changed(self._stored(part.start, min(part.stop, self.rows)), part)

    def _stored(self, start: int, stop: int) -> np.ndarray:
        values = self.saved[start:stop].copy() if self.saved is not None else self._of_base(start, stop)
        if self.tokens is not None:
            inside = (start <= self.tokens.tokens) & (self.tokens.tokens < stop)
            values[self.tokens.tokens[inside] - start] = self.tokens.values[inside]
        return values

    def _of_base(self, start: int, stop: int) -> np.ndarray:
        """Rows of the base's, and zeros for those beyond them."""
        module = self.name.removesuffix(".weight")
        coded = module in self.base.modules
        height = (self.base.modules[module] if coded else self.base.tensors[self.name]).shape[0]
        first, last = min(start, height), min(stop, height)
        if coded:
            values = self.base.read_module(module, np.arange(first, last)).dequantize()
        else:
            values = self.base.read_float(self.name, (first, last))
        return (
            np.concatenate([values, np.zeros((stop - last, *values.shape[1:]), np.float32)]) if stop > last else values
        )

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
class MergedStack:
    """A 3-D tensor of `base` with changes to some of its matrices."""

    base: Checkpoint
    name: str
    changes: StackChanges

    def read(self, rows: tuple[int, int] | None) -> np.ndarray:
        """float32 of the tensor, or of its matrices start..stop."""
        values = self.base.read_float(self.name, rows)
        for number, matrix in enumerate(values, rows[0] if rows else 0):
            if (change := self.changes.matrices.get(number)) is not None:
                product = change.rows(slice(None))
                matrix += product.T if self.changes.transposed else product
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
    """Let a checkpoint read as its model with an adapter, whose experts have been placed, and note what that costs.

    Raises BridgeError for an adapter of another model, and for a GGUF whose head would have to become a matrix of its
    own, or that has no place for added tokens.
    """
    if ckpt.reader is not None:
        ckpt.reader.folding = False  # the adapter's changes are of the weights as they are stored
    base = copy(ckpt)
    ckpt.merged, ckpt.moved = {}, {}  # not the base's
    stored = {f"{name}.weight": module.shape for name, module in base.modules.items()}
    shapes: dict[str, tuple[int, ...]] = {**stored, **{name: info.shape for name, info in base.tensors.items()}}
    merging = _Merging(adapter.of(set(shapes)), shapes)
    embeddings = _tied_embeddings(base, shapes)
    for name, own in merging.adapter.based.items():
        if own.shape != shapes.get(name if embeddings is None or name in shapes else embeddings):
            merging.saved.setdefault(name, own)  # tokens were added before it was trained
            if name == embeddings:
                merging.saved.setdefault(HEAD, own)
    untied = embeddings is not None and merging.unties(embeddings)
    if embeddings is not None and untied:
        if not ckpt.unties:
            raise merging.refused(embeddings, "is also the head of the base model")
        shapes[HEAD] = shapes[embeddings]
        ckpt.config = {**base.config, "tie_word_embeddings": False}
    transposed = _transposed(base, merging.changes, adapter.transposed)
    more = merging.added_tokens(embeddings, transposed)
    if more and not ckpt.unties:
        raise merging.refused(next(iter(more)), "has tokens that the GGUF does not have")
    sources = {name: name for name in merging.names}  # and of which tensor the base's values are
    if embeddings is not None and untied:
        sources[HEAD] = embeddings
    for name, source in sources.items():
        change, values, tokens = merging.changes.get(name), merging.saved.get(name), merging.tokens.get(name)
        layer = name.removesuffix(".weight")
        if change is not None and values is None and tokens is None and _moves_zeros(base, layer, change):
            ckpt.moved[layer] = MovedZeros(base, layer, change).read
            continue
        shape = (more.get(name, shapes[name][0]), *shapes[name][1:])
        merged = MergedTensor(base, source, shape[0], values, change, tokens, name in transposed)
        ckpt.merged[name] = merged.read
        info = base.tensors.get(source) or base.modules[source.removesuffix(".weight")]
        merging.tensors[name] = TensorInfo(name, "F32", shape, info.nbytes, info.file)
    for name, changes in adapter.stacks.items():
        ckpt.merged[name] = MergedStack(base, name, changes).read
        merging.tensors[name] = replace(base.tensors[name], dtype="F32")
    ckpt.modules = {name: module for name, module in base.modules.items() if f"{name}.weight" not in ckpt.merged}
    ckpt.tensors = {**base.tensors, **merging.tensors}
    ckpt.files = [*base.files, *adapter.files]
    ckpt.notes = [*ckpt.notes, _note(base, ckpt, adapter, untied)]


def _note(base: Checkpoint, ckpt: Checkpoint, adapter: Adapter, untied: bool) -> str:
    """What merging costs."""
    coded = len(base.modules) - len(ckpt.modules)
    note = f"tensors merged with the adapter {adapter.path.name}: {len(ckpt.merged) + len(ckpt.moved)}"
    if ckpt.moved:
        note += f"; of {len(ckpt.moved)} only zero points move, their codes are carried"
    if coded:
        kept, whole = (sum(math.prod(m.shape) for m in each.modules.values()) for each in (ckpt, base))
        note += f"; {coded} of them were codes and are requantized, the report has their errors"
        note += f"; {100 * kept / whole:.1f}% of the codes are kept"
    if untied:
        note += "; the head, which was tied to the embeddings, is a matrix of its own"
    return note


class _Merging:
    """What an adapter holds for the tensors of a checkpoint, whose shapes are given."""

    def __init__(self, adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.adapter, self._shapes = adapter, shapes
        self.changes = {f"{module}.weight": change for module, change in adapter.changes.items()}
        self.tokens = {f"{module}.weight": rows for module, rows in adapter.tokens.items()}
        self.saved = dict(adapter.saved)
        self.tensors: dict[str, TensorInfo] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are changed, but for stacks."""
        return tuple(dict.fromkeys((*self.changes, *self.saved, *self.tokens)))

    def refused(self, name: str, why: str) -> BridgeError:
        return BridgeError(f"{self.adapter.path}: {name} {why}; merge it with PEFT, and convert the result")

    def unties(self, embeddings: str) -> bool:
        """Whether the head becomes a matrix of its own; where it stays tied, its changes are of the embeddings."""
        both = {embeddings, HEAD}
        if both.isdisjoint(self.names):
            return False
        if not both.isdisjoint(self.tokens) and not both.isdisjoint(self.changes):
            raise self.refused(embeddings, "and the head are tied, and changed by LoRA and by rows of tokens at once")
        alike = self._alike(embeddings) and both.isdisjoint(self.changes)
        if not self.adapter.tying and not alike:
            return True
        all_of: tuple[dict[str, Any], ...] = (self.changes, self.saved, self.tokens)
        for values in all_of:
            if HEAD in values:
                of_head = values.pop(HEAD)
                values.setdefault(embeddings, of_head)
        return False

    def _alike(self, embeddings: str) -> bool:
        """Whether saved values and rows of tokens are the same for the embeddings and the head. PEFT has rows of the
        embeddings for the head too."""
        saved = [self.saved[name] for name in (embeddings, HEAD) if name in self.saved]
        rows = [self.tokens[name] for name in (embeddings, HEAD) if name in self.tokens]
        if len(saved) == 1 or (len(rows) == 1 and HEAD in self.tokens):
            return False
        return all(np.array_equal(a, b) for a, b in pairwise(saved)) and all(
            np.array_equal(a.tokens, b.tokens) and np.array_equal(a.values, b.values) for a, b in pairwise(rows)
        )

    def added_tokens(self, embeddings: str | None, transposed: set[str]) -> dict[str, int]:
        """The rows of the tensors that have more than the base's. BridgeError for shapes that are not the base's."""
        more: dict[str, int] = {}
        for name in self.names:
            if name not in self._shapes:
                raise self.refused(name, "is not in the base checkpoint")
            rows, *columns = self._shapes[name]
            grows = name.endswith(HEAD) or EMBEDDING.fullmatch(name.removesuffix(".weight"))
            change, values, tokens = self.changes.get(name), self.saved.get(name), self.tokens.get(name)
            if values is not None and grows and len(values) > rows:
                rows = more[name] = len(values)
            if tokens is not None:
                if change is not None:
                    raise self.refused(name, "is changed by LoRA and by rows of tokens at once")
                rows = max(rows, self._rows_with(name, tokens, rows))
                if rows > self._shapes[name][0]:
                    more[name] = rows
            given = [] if change is None else [change.shape[::-1] if name in transposed else change.shape]
            given += [] if values is None else [values.shape]
            given += [] if tokens is None else [(rows, tokens.values.shape[1])]
            for shape in given:
                if shape != (rows, *columns):
                    raise self.refused(name, f"is of shape {list(shape)}, the base checkpoint has {[rows, *columns]}")
        heads = [name for name in self._shapes if name.endswith(HEAD)]
        tables = [name for name in self._shapes if EMBEDDING.fullmatch(name.removesuffix(".weight"))]
        for name in heads[:1] if more else []:
            table = embeddings or tables[0]
            counts = [more.get(each, self._shapes[each][0]) for each in (table, name)]
            if counts[0] != counts[1]:
                raise self.refused(table, f"has {counts[0]} tokens with the adapter, {name} {counts[1]}")
        return more

    def _rows_with(self, name: str, tokens: TokenRows, rows: int) -> int:
        """The rows of a tensor with those of some tokens; BridgeError where one that is beyond them has no row."""
        last = int(tokens.tokens.max(initial=0))
        if last >= rows and np.count_nonzero(tokens.tokens >= rows) != last + 1 - rows:
            raise self.refused(
                name, f"has a row for token {last}, but not for each token from {rows} on: the base model has {rows}"
            )
        return last + 1


def _tied_embeddings(base: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The embeddings of a model whose head is tied to them; None for others."""
    if any(name.endswith(HEAD) for name in shapes) or not base.config.get("tie_word_embeddings", True):
        return None
    return next((name for name in shapes if EMBEDDING.fullmatch(name.removesuffix(".weight"))), None)


def _transposed(base: Checkpoint, changes: Mapping[str, LowRank], fan_in_fan_out: bool) -> set[str]:
    """The tensors that are stored [in, out]: Conv1D's alone. Where all matrices are square, fan_in_fan_out decides,
    which is one value for all, and which PEFT passes over for layers of other kinds."""
    floats = {name: base.tensors[name].shape for name in changes if name in base.tensors and name.endswith(_CONV1D)}
    straight = {name for name, shape in floats.items() if shape == changes[name].shape}
    other = {name for name, shape in floats.items() if shape == changes[name].shape[::-1]}
    square = straight & other
    return other if other - square or (fan_in_fan_out and not straight - square) else set()
