"""Merges a PEFT adapter into an opened checkpoint: what it changes is read as floats, W + scale * B A.

Codes have no room for the change, so a module of codes becomes a tensor of floats, its dequantized weights with the
change. A change that is the same for all columns of a group (QA-LoRA) moves zero points alone: codes stay. Nothing is
kept: rows are computed whenever they are read. Other modules stay as they are.
"""

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import Adapter, LowRank
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError


@dataclass(frozen=True, eq=False)
class MergedTensor:
    """A tensor of `base`, or the values that replace it, with a change of its rows."""

    base: Checkpoint
    name: str
    saved: np.ndarray | None
    change: LowRank | None

    def read(self, rows: tuple[int, int] | None) -> np.ndarray:
        """float32 of the tensor, or of its rows start..stop."""
        part = slice(None) if rows is None else slice(*rows)
        module = self.name.removesuffix(".weight")
        if self.saved is not None:
            values = self.saved[part].copy()
        elif module in self.base.modules:
            values = self.base.read_module(module, None if rows is None else np.arange(*rows)).dequantize()
        else:
            values = self.base.read_float(self.name, rows)
        if self.change is not None:
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

    Raises BridgeError for an adapter of another model, and for what has no one meaning here: added tokens, embeddings
    that are also the head, and layers whose weights are stored transposed.
    """

    def refused(name: str, why: str) -> BridgeError:
        return BridgeError(f"{adapter.path}: {name} {why}; merge it with PEFT, and convert the result")

    if adapter.turned:
        raise refused("fan_in_fan_out", "is set: weights are stored transposed")
    if ckpt.reader is not None:
        ckpt.reader.folding = False  # the adapter's changes are of the weights as they are stored
    base = copy(ckpt)
    ckpt.merged, ckpt.moved = {}, {}  # not the base's
    stored = {f"{name}.weight": module.shape for name, module in base.modules.items()}
    shapes = {**stored, **{name: info.shape for name, info in base.tensors.items()}}
    found = adapter.of(set(shapes))
    changes = {f"{module}.weight": change for module, change in found.changes.items()}
    tied = not any(name.endswith("lm_head.weight") for name in shapes) and base.config.get("tie_word_embeddings", True)
    for name in {**changes, **found.saved}:
        change, saved = changes.get(name), found.saved.get(name)
        if name not in shapes:
            raise refused(name, "is not in the base checkpoint")
        shape = change.shape if change is not None else saved.shape if saved is not None else ()
        if shape != shapes[name] or (saved is not None and saved.shape != shape):
            raise refused(name, f"is of shape {list(shape)}, the base checkpoint has {list(shapes[name])}")
        if tied and name.endswith("embed_tokens.weight"):
            raise refused(name, "is also the head of the base model")
        own = name.removesuffix(".weight")
        if change is not None and saved is None and _moves_zeros(base, own, change):
            ckpt.moved[own] = MovedZeros(base, own, change).read
        else:
            ckpt.merged[name] = MergedTensor(base, name, saved, change).read
    ckpt.modules = {name: module for name, module in base.modules.items() if f"{name}.weight" not in ckpt.merged}
    ckpt.tensors = dict(base.tensors)
    for name in ckpt.merged:
        if name in base.tensors:
            ckpt.tensors[name] = replace(base.tensors[name], dtype="F32")
        else:
            module = base.modules[name.removesuffix(".weight")]
            ckpt.tensors[name] = TensorInfo(name, "F32", module.shape, module.nbytes, module.file)
    ckpt.files = [*base.files, *adapter.files]
    coded = len(base.modules) - len(ckpt.modules)
    note = f"tensors merged with the adapter {adapter.path.name}: {len(ckpt.merged) + len(ckpt.moved)}"
    if ckpt.moved:
        note += f"; of {len(ckpt.moved)} only zero points move, their codes are carried"
    if coded:
        note += f"; {coded} of them were codes and are requantized, the report has their errors"
    ckpt.notes = [*ckpt.notes, note]
