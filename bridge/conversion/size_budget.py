"""A size budget: the type of each tensor of a plan chosen so that the file fits its bytes and the model loses least.

docs/quantize.md tells how. Estimates are in `quantize.budget.sensitivity`, trial models in `quantize.budget.search`.

Cost: a pass of the text for the Hessians (quantizing takes four to six), for each layer and type that of quantizing 32
rows, a pass of 4096 tokens there and back, one of these through a trial model, and at most 32 of a quarter of them
through half the layers, on average; with swaps, a pass of all 4096 for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.blocks import FP4, NEWER, BlockType
from bridge.blocks.read import CALIBRATED, WRITTEN
from bridge.conversion.planning.matrix_scales import rounded_scale, with_scales
from bridge.conversion.planning.options import Budget
from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.conversion.planning.planner import Planner, newer_notes
from bridge.conversion.planning.recipe import Recipe
from bridge.conversion.writing.gguf_writer import added_bytes, file_bytes, padded
from bridge.encode.type_choice import requantizers
from bridge.errors import BridgeError, parameter
from bridge.quantize.budget.layer_costs import LayerCosts
from bridge.quantize.run.calibration_text import calibration_set, enough_of
from bridge.quantize.settings import Calibration
from bridge.system.storage.files import disk_errors
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.text import size_text

if TYPE_CHECKING:
    import torch

    from bridge.quantize.model.float_model import FloatModel

_GROUPS = 32  # maximum number of groups of tensors that are measured by themselves
_CURVE = 13  # points
_BATCHES = 4  # at least, of which `Divergence.measure_few` takes one


@dataclass(frozen=True)
class _Item:
    """A tensor whose type is chosen.

    types, sizes  that it may have, and its bytes in each
    scale         what multiplies its matrices in NVFP4
    """

    tensor: PlannedTensor
    types: list[str]
    sizes: np.ndarray
    scale: float


def within_budget(plan: Plan, planner: Planner, settings: Calibration, budget: Budget, out: Path) -> Plan:
    """The plan with types that fit the budget, and notes on what that costs.

    out  the file to be written: rounded layers of trial models, several times its size, are stored next to it, or in
         the folder for activations, until the types are found

    Raises BridgeError where no types fit it, or all that there are leave bytes over, before anything is measured.
    """
    from bridge.quantize.model.float_model import FloatModel

    ckpt = planner.ckpt
    model = FloatModel(ckpt, device=settings.device)
    layers = {*model.linears(), *model.embedding_and_head()}
    wanted = [t for t in plan.tensors if _is_free(t, plan, planner.options, budget)]
    items = [_item(t, plan, planner, settings) for t in wanted if all(part.module in layers for part in t.parts)]
    left = [t for t in wanted if any(part.module not in layers for part in t.parts)]
    largest = with_scales(ckpt, planner.retyped(plan, {item.tensor.name: (item.types[-1], "") for item in items}))
    fixed = file_bytes(largest) - sum(int(item.sizes[-1]) for item in items)
    limit = _limit(largest, budget)
    least, most = (fixed + sum(int(f(item.sizes)) for item in items) for f in (np.min, np.max))
    asked = parameter("size", budget.size) if budget.bpw is None else f"{parameter('bpw', budget.bpw)} ({limit} bytes)"
    if limit < least:
        raise BridgeError(f"{asked}: too small; the smallest file that can be made of {ckpt.path} has {least} bytes")
    if limit > most:
        raise BridgeError(f"{asked}: too large; the largest file that can be made of {ckpt.path} has {most} bytes")
    embeddings, head = model.embedding_and_head()
    embedding_and_head = embeddings, embeddings if plan.tied else head
    beside = Path(settings.offload or out.parent) / out.name
    search = _Search(planner, model, embedding_and_head, settings, budget, items, limit - fixed, beside)
    chosen = planner.retyped(plan, search.types())
    size = file_bytes(with_scales(ckpt, chosen))
    assert size <= limit
    chosen.curve = search.curve(fixed, size)
    used = f"{size} of {limit} bytes" if limit - size else f"{size} bytes, all of them"
    chosen.notes = [*plan.notes, *(f"{t.name}: no layer that can be measured; stays {t.type}" for t in left)]
    chosen.notes += [note for note in newer_notes(chosen.tensors, planner.options) if note not in chosen.notes]
    chosen.notes.append(f"size budget: {size_text(size)}, {used}; {search.note()}{_place(chosen.curve, size)}")
    return chosen


def _place(curve: Sequence[tuple[int, float]], size: int) -> str:
    """What the next smaller and larger files of the curve would have."""
    near = [*[point for point in curve if point[0] < size][-1:], *[point for point in curve if point[0] > size][:1]]
    others = [f"{size_text(bytes_)} would have about {loss:.1e}" for bytes_, loss in near]
    return f"; by the estimates, {' and '.join(others)}" if others else ""


def _limit(plan: Plan, budget: Budget) -> int:
    if budget.size is not None:
        return budget.size
    assert budget.bpw is not None
    head = file_bytes(plan) - sum(padded(t.nbytes) for t in plan.tensors)
    return head + int(budget.bpw * sum(math.prod(t.shape) for t in plan.tensors) / 8)


def _is_free(tensor: PlannedTensor, plan: Plan, recipe: Recipe, budget: Budget) -> bool:
    """Whether the tensor's type is to be chosen: a matrix of floats, or of codes that it cannot keep."""
    if tensor.type not in WRITTEN or not tensor.parts or not tensor.quantizable:
        return False
    tied = tensor.kind == "token_embd" and plan.tied
    if recipe.explicit(tensor.name, tensor.kind, tied) is not None:
        return False
    return budget.requantize or "carried" not in tensor.how


def _item(tensor: PlannedTensor, plan: Plan, planner: Planner, settings: Calibration) -> _Item:
    """The tensor with the types that its rows fill, the 16-bit floats that it comes as or goes into last.

    Of types with scales and codes to be chosen, those of small blocks are for rows that no superblocks fill: in others,
    K-quants of no more bytes lose less. Q2_0 is among them unless the file is for a llama.cpp without it. 4-bit floats
    are for floats of layers and the head, and NVFP4 counts with the scales of its matrices. Static act-order takes
    columns of codebooks apart.
    """
    reader = planner.reader
    stored = {reader.stored_as(part) for part in tensor.parts}
    columns = tensor.shape[-1]
    usual = requantizers(columns)
    size = max(block.size for block in usual)
    usable: dict[str, BlockType] = {
        name: block
        for name, block in FP4.items()
        if all(not reader.coded(part) and planner.calibrates(tensor, part, name) for part in tensor.parts)
    }
    if size < 256 and planner.options.uses_q2_0 is not False:
        usable = usable | NEWER
    others = [
        block
        for block in CALIBRATED.values()
        if columns % block.size == 0 and (block.name in usable or (block.size == size and block.name not in FP4))
    ]
    if settings.act_order == "static":
        others = [block for block in others if not (block.values or block.numbered)]
    types = [block.name for block in sorted(dict.fromkeys((*usual, *others)), key=lambda block: block.bpw)]
    types.append("BF16" if stored == {"BF16"} else "F16")
    in_nvfp4 = replace(tensor, type="NVFP4", how=tuple("rounded" for _ in tensor.parts))  # where it comes as floats
    scales = with_scales(planner.ckpt, replace(plan, tensors=[in_nvfp4])).tensors[1:] if "NVFP4" in types else []
    sizes = [padded(replace(tensor, type=type).nbytes) for type in types]
    sizes = [size + sum(map(added_bytes, scales)) * (type == "NVFP4") for size, type in zip(sizes, types, strict=True)]
    return _Item(tensor, types, np.array(sizes, np.int64), rounded_scale(plan.metadata, in_nvfp4))


class _Search:
    """One search for the types of items under a limit of bytes, and what it found."""

    def __init__(
        self,
        planner: Planner,
        model: FloatModel,
        embedding_and_head: tuple[str, str],
        settings: Calibration,
        budget: Budget,
        items: Sequence[_Item],
        limit: int,
        beside: Path,
    ) -> None:
        import torch

        from bridge.quantize.budget.divergence import Divergence, Rounded, Trial
        from bridge.quantize.budget.search import FLOAT, search
        from bridge.quantize.model.forward_passes import Passes, sequences_at_once

        self.items, self.progress = items, budget.progress
        parts = {part.module: part for item in items for part in item.tensor.parts}
        places = {part.module: (item.tensor, i) for item in items for i, part in enumerate(item.tensor.parts)}
        types = {part.module: item.types for item in items for part in item.tensor.parts}
        scales = {part.module: item.scale for item in items for part in item.tensor.parts}
        self.groups = _groups([item.tensor for item in items])
        self.done, self.steps = 0, len(parts) + len(self.groups) + budget.swaps + 2
        if self.progress:
            self.progress(0, self.steps, "")
        tokens = calibration_set(model, settings, parts).tokens
        self.probe = _probe(tokens, budget.tokens)
        tokens = enough_of(tokens, max(part.shape[-1] for part in parts.values()))  # for H of costs, by a few rows
        layers = LayerCosts(
            lambda module, type: planner.carries(*places[module], type),
            lambda module, type: planner.calibrates(places[module][0], parts[module], type), settings,
            {module: part.columns for module, part in parts.items()}, types, scales, embedding_and_head, self._step,
        )  # fmt: skip
        with torch.no_grad(), ExitStack() as stack:
            with disk_errors(beside, "rounded layers of trial models", "folder"):
                folder = stack.enter_context(temporary_beside(beside))
            at_once = min(sequences_at_once(model, self.probe.shape[1]), -(-len(self.probe) // _BATCHES))
            passes = Passes(model, self.probe, at_once)
            layers.measure(passes, tokens)
            divergence = Divergence(passes, layers.squares.get, folder, embedding_and_head, settings.memory)

            def trial_of(chosen: np.ndarray, scales: np.ndarray) -> Trial:
                trial = {}
                for item, option, by in zip(self.items, chosen.tolist(), scales.tolist(), strict=True):
                    for part in item.tensor.parts:
                        if option != FLOAT:
                            type = item.types[option]
                            ratio = by * layers.costs[part.module][type].error_ratio
                            trial[part.module] = Rounded(type, ratio, item.scale)
                return trial

            def measure(chosen: np.ndarray, scales: np.ndarray, as_new_base: bool) -> float:
                if not as_new_base:
                    self._step("trial models")
                return divergence.measure(trial_of(chosen, scales), as_new_base)

            def measure_alone(chosen: np.ndarray) -> float:
                self._step("trial models")
                return divergence.measure_few(trial_of(chosen, np.ones(len(chosen))))

            self.losses = [
                np.array([sum(layers.costs[p.module][t].loss for p in item.tensor.parts) for t in item.types])
                for item in items
            ]
            sizes = [item.sizes for item in items]
            self.result = search(sizes, self.losses, limit, measure, measure_alone, self.groups, budget.swaps)

    def types(self) -> dict[str, tuple[str, str]]:
        """The type of each tensor, and why."""
        return {
            item.tensor.name: (item.types[t], f"size budget: adds {losses[t]:.1e} nats a token")
            for item, losses, t in zip(self.items, self.losses, self.result.chosen, strict=True)
        }

    def note(self) -> str:
        """What was measured, for people."""
        result = self.result
        text = f"KL divergence about {result.measured[-1]:.1e} nats a token of the calibration's text ("
        if len(result.measured) > 1:
            text += f"{result.measured[0]:.1e} before swaps; "
        text += f"{result.trials} trial models on {self.probe.numel()} tokens"
        if len(self.groups) > 1:
            text += f"; rank correlation of estimated and measured losses {result.agreement():.2f}"
        return f"{text})"

    def _step(self, what: str) -> None:
        self.done = min(self.done + 1, self.steps)
        if self.progress:
            self.progress(self.done, self.steps, what)

    def curve(self, fixed: int, file_size: int) -> list[tuple[int, float]]:
        """Bytes of the file and estimated KL divergence: of this one, and the best from the smallest to the largest.

        fixed      bytes that no type changes
        file_size  of the file that is made: scales of NVFP4 are counted at their most before
        """
        from bridge.quantize.budget.allocation import allocate

        sizes = [item.sizes for item in self.items]
        least, most = (sum(int(f(s)) for s in sizes) for f in (np.min, np.max))
        limits = np.linspace(least, most, _CURVE).astype(np.int64)
        points = {file_size: self._estimate(self.result.chosen)}
        for chosen in (allocate(sizes, self.losses, limit) for limit in limits.tolist()):
            if not np.array_equal(chosen, self.result.chosen):
                size = fixed + sum(int(s[t]) for s, t in zip(sizes, chosen, strict=True))
                points.setdefault(size, self._estimate(chosen))
        return sorted(points.items())

    def _estimate(self, chosen: np.ndarray) -> float:
        return sum(float(x[t]) for x, t in zip(self.losses, chosen, strict=True))


def _probe(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Windows of the text for trial models, int64 [windows, length], evenly spaced, of `count` tokens.

    They are as long as the sequences, unless there would be fewer than `_BATCHES`: errors of q and k are felt more at
    later positions. If all sequences start with the same token, which is BOS, so do the windows.
    """
    length = min(max(1, count // _BATCHES), tokens.shape[1])
    windows = tokens[:, : tokens.shape[1] // length * length].reshape(-1, length)
    chosen = np.linspace(0, len(windows) - 1, min(len(windows), max(1, count // length))).round()
    windows = windows[chosen.astype(np.int64)]
    if len(tokens) > 1 and (tokens[:, 0] == tokens[0, 0]).all():
        windows[:, 0] = tokens[0, 0]
    return windows


def _groups(tensors: Sequence[PlannedTensor]) -> list[list[int]]:
    """Tensors that are measured together: single ones, or those of a kind in a range of layers."""
    if len(tensors) <= _GROUPS:
        return [[i] for i in range(len(tensors))]
    kinds = {t.kind for t in tensors}
    layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=0)
    ranges = max(1, _GROUPS // len(kinds))
    groups: dict[tuple[str, int], list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.kind, (t.layer or 0) * ranges // layers), []).append(i)
    return list(groups.values())
