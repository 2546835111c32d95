"""A size budget: the type of each tensor of a plan chosen so that the file fits its bytes and the model loses least.

What a tensor loses in each type is estimated from a text (`bridge.quantize.sensitivity`), the types are allocated under
the exact limit and judged by the KL divergence that trial models measure (`bridge.quantize.search`). Tensors that keep
their codes, norms, and what the user gave a type keep what the plan says, and count with their bytes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.blocks import BLOCKS
from bridge.calibration import Calibration, calibration_tokens
from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.importance import Importance
from bridge.output import file_bytes, padded
from bridge.plan import AS_IT_IS, FROM_TEMPLATE, Part, Plan, PlannedTensor
from bridge.planning import retyped
from bridge.recipe import Recipe, TensorPlace, block_type
from bridge.report import size_text
from bridge.source import Source

if TYPE_CHECKING:
    import torch

    from bridge.quantize.calibrate import Calibrated
    from bridge.quantize.float_model import FloatModel
    from bridge.quantize.passes import Passes
    from bridge.quantize.sensitivity import Cost

Progress = Callable[[int, int, str], None]
_GROUPS = 32  # of tensors, at most, whose estimates are checked
_CURVE = 13  # points


@dataclass(frozen=True)
class Budget:
    """How large a file may be, and what finding its types may cost.

    size        bytes of the whole file
    bpw         instead: bits for each weight of the tensors' data, the head of the file not counted
    swaps       trial models that are measured to better the allocation, after about 30 to check the estimates
    tokens      that trial models are measured on
    requantize  give tensors that could keep their codes another type too, where that pays
    plan_out    write the plan there, with the curve of KL divergence against size
    progress    called with how many steps are done, of how many, and the last one's name
    """

    size: int | None = None
    bpw: float | None = None
    swaps: int = 24
    tokens: int = 2048
    requantize: bool = False
    plan_out: Path | None = None
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.size is None) == (self.bpw is None):
            raise BridgeError("--size and --bpw ask for different things; give one")
        if self.bpw is not None and not 0 < self.bpw <= 32:
            raise BridgeError(f"--bpw {self.bpw}: bits a weight, such as 4.3")


@dataclass(frozen=True)
class _Item:
    """A tensor whose type is to be chosen: the types, and its bytes in each."""

    tensor: PlannedTensor
    types: list[str]
    sizes: np.ndarray


def within_budget(
    ckpt: Checkpoint,
    plan: Plan,
    recipe: Recipe,
    source: Source,
    importance: Importance,
    settings: Calibration,
    budget: Budget,
) -> Plan:
    """The plan with types that fit the budget, and notes on what that costs.

    Raises BridgeError where no types fit it, or all that there are leave bytes over, before anything is measured.
    """
    from bridge.quantize.float_model import FloatModel

    if plan.split_max_size is not None:
        raise BridgeError(
            "a size budget is for one file: take --plan-out, set split_max_size there, and convert --plan"
        )
    model = FloatModel(ckpt, device=settings.device)
    items = [_item(t, source) for t in plan.tensors if _is_free(t, model, recipe, source, importance, budget)]
    fixed = file_bytes(plan) - sum(padded(item.tensor.nbytes) for item in items)
    limit = _limit(plan, budget)
    least, most = (fixed + sum(int(f(item.sizes)) for item in items) for f in (np.min, np.max))
    asked = f"--size {budget.size}" if budget.size is not None else f"--bpw {budget.bpw:g} ({limit} bytes)"
    if limit < least:
        raise BridgeError(f"{asked}: too small; the smallest file that can be made of {ckpt.path} has {least} bytes")
    if limit > most:
        raise BridgeError(f"{asked}: too large; the largest file that can be made of {ckpt.path} has {most} bytes")
    search = _Search(source, model, settings, budget, items, limit - fixed)
    types, losses, notes = search.run()
    reasons = {n: (type, f"size budget: adds {losses[n]:.1e} nats a token") for n, type in types.items()}
    chosen = retyped(ckpt, plan, recipe, reasons)
    size = file_bytes(chosen)
    assert size <= limit
    chosen.curve = search.curve(fixed)
    left = f"{size} of {limit} bytes" if limit - size else f"{size} bytes, all of them"
    chosen.notes = [*plan.notes, f"size budget: {size_text(size)}, {left}; {notes}"]
    return chosen


def _limit(plan: Plan, budget: Budget) -> int:
    """Bytes that the file may have."""
    if budget.size is not None:
        return budget.size
    assert budget.bpw is not None
    head = file_bytes(plan) - sum(padded(t.nbytes) for t in plan.tensors)
    return head + int(budget.bpw * sum(math.prod(t.shape) for t in plan.tensors) / 8)


def _is_free(
    tensor: PlannedTensor, model: FloatModel, recipe: Recipe, source: Source, importance: Importance, budget: Budget
) -> bool:
    """Whether the tensor's type is to be chosen: a matrix of floats, or of codes that it cannot keep."""
    from bridge.mapping.choose import keeps_codes

    matrices = tensor.parts and len(tensor.shape) > 1 and all(part.matrix is None for part in tensor.parts)
    if not matrices or tensor.reason in (AS_IT_IS, FROM_TEMPLATE) or tensor.shape[-1] % BLOCKS["Q8_0"].size:
        return False
    place = TensorPlace(tensor.name, tensor.kind, tensor.layer, 0, 1, tensor.shape[-1], _tied(model))
    if recipe.explicit(place) is not None:
        return False
    known = {*model.linears(), *model.ends()}
    if any(part.module not in known for part in tensor.parts):
        return False
    block = block_type(str(tensor.type))
    for number, part in enumerate(tensor.parts):
        if source.coded(part) and not budget.requantize:
            kept = block is not None and keeps_codes(source.grouped(part), block, importance.of(tensor, number))
            if kept:
                return False
    return True


def _tied(model: FloatModel) -> bool:
    embeddings, head = model.ends()
    return embeddings == head


def _item(tensor: PlannedTensor, source: Source) -> _Item:
    """With the types that the tensor's rows fill, and the 16-bit floats that it comes as or goes into."""
    from bridge.mapping.choose import requantizers

    stored = {source.stored_as(part) for part in tensor.parts}
    types = [block.name for block in requantizers(tensor.shape[-1])]
    types.append("BF16" if stored == {"BF16"} else "F16")
    sizes = [padded(replace(tensor, type=type).nbytes) for type in types]
    return _Item(tensor, types, np.array(sizes, np.int64))


class _Search:
    """One search: what each item loses in each type, and the types."""

    def __init__(
        self,
        source: Source,
        model: FloatModel,
        settings: Calibration,
        budget: Budget,
        items: Sequence[_Item],
        limit: int,
    ) -> None:
        self.source, self.model, self.settings, self.budget = source, model, settings, budget
        self.items, self.limit = items, limit
        self.parts: dict[str, Part] = {part.module: part for item in items for part in item.tensor.parts}
        self.types = {part.module: item.types for item in items for part in item.tensor.parts}
        self.groups = _groups([item.tensor for item in items])
        self.steps = len(self.parts) + len(self.groups) + budget.swaps + 2
        self.done = 0
        self.squares: dict[str, np.ndarray] = {}  # mean squares of inputs, by layer
        self.costs: dict[str, dict[str, Cost]] = {}

    def run(self) -> tuple[dict[str, str], dict[str, float], str]:
        """The type of each tensor, what it is estimated to lose in nats a token, and a note."""
        import torch

        from bridge.quantize.divergence import Divergence, Rounded
        from bridge.quantize.passes import Passes
        from bridge.quantize.search import FLOAT, search

        tokens = calibration_tokens(self.source.ckpt, self.settings)
        probe = tokens[-max(1, self.budget.tokens // tokens.shape[1]) :]
        with torch.no_grad(), tempfile.TemporaryDirectory(dir=self.settings.offload) as folder:
            passes = Passes(self.model, probe, max(1, 4096 // tokens.shape[1]))
            self._measure_layers(passes, tokens)
            divergence = Divergence(passes, self.squares.get, Path(folder))

            def measure(taken: np.ndarray, keep: bool) -> float:
                trial = {}
                for item, option in zip(self.items, taken.tolist(), strict=True):
                    for part in item.tensor.parts:
                        if option != FLOAT:
                            type = item.types[option]
                            trial[part.module] = Rounded(type, self.costs[part.module][type].left)
                if not keep:
                    self._step("trial models")
                return divergence.measure(trial, keep)

            self.found = search(
                [item.sizes for item in self.items], self._losses(), self.limit, measure, self.groups, self.budget.swaps
            )
        found = self.found
        types = {item.tensor.name: item.types[t] for item, t in zip(self.items, found.taken, strict=True)}
        losses = {
            item.tensor.name: float(own[t]) for item, own, t in zip(self.items, found.losses, found.taken, strict=True)
        }
        notes = (
            f"KL divergence about {found.measured[-1]:.1e} nats a token ({found.measured[0]:.1e} before {found.trials} "
            f"trial models on {probe.numel()} tokens"
        )
        if len(self.groups) > 1:
            notes += f"; rank correlation of estimated and measured losses {found.agreement():.2f}"
        return types, losses, f"{notes})"

    def _step(self, what: str) -> None:
        self.done = min(self.done + 1, self.steps)
        if self.budget.progress:
            self.budget.progress(self.done, self.steps, what)

    def _losses(self) -> list[np.ndarray]:
        """By item and type: the sum over its parts."""
        return [
            np.array([sum(self.costs[p.module][t].loss for p in item.tensor.parts) for t in item.types])
            for item in self.items
        ]

    def _measure_layers(self, passes: Passes, tokens: torch.Tensor) -> None:
        """Fill `costs`."""
        from bridge.quantize import quantize_model
        from bridge.quantize.sensitivity import embedding_costs, layer_costs

        gradients = dict(passes.mean_square_gradients())
        embeddings, head = self.model.ends()
        gradients[head] = passes.head_gradients()
        if embeddings in self.types:
            weight = self.model.model.get_input_embeddings().weight
            types = self.types[embeddings]
            self.costs[embeddings] = embedding_costs(weight, passes.tokens, gradients["embeddings"], types)
            if head == embeddings:
                weight = self.model.model.get_output_embeddings().weight
                found = layer_costs(weight, passes.head_hessian(), gradients[head], dict.fromkeys(types))
                self.costs[head] = {t: cost + found[t] for t, cost in self.costs[head].items()}
            self._step(embeddings)

        def measure(layer: Calibrated) -> tuple[Any, None]:
            self.costs[layer.name] = self._layer_costs(layer, gradients.get(layer.name))
            self.squares[layer.name] = layer.hessian.mean_squares()
            self._step(layer.name)
            return layer.weight, None

        walk = quantize_model(
            self.model, tokens, measure, batch=max(1, 4096 // tokens.shape[1]),
            wanted=(self.types.keys() - {embeddings}).__contains__, offload=self.settings.offload, head=True,
        )  # fmt: skip
        for _ in walk:
            pass
        passes.load_ends()

    def _layer_costs(self, layer: Calibrated, gradients: torch.Tensor | None) -> dict[str, Cost]:
        from bridge.quantize import superblocks
        from bridge.quantize.calibrate import Calibrated
        from bridge.quantize.sensitivity import Cost, layer_costs

        types = self.types[layer.name]
        if gradients is None or not layer.hessian.tokens:  # an expert that no token reached
            return dict.fromkeys(types, Cost(0.0))
        columns = self.parts[layer.name].columns

        def rounded(rows: torch.Tensor, type: str) -> torch.Tensor:
            method = self.settings.quantizer(superblocks(type))
            return method.layer(Calibrated(layer.name, rows, layer.hessian), columns)[0]

        def calibrated(type: str) -> bool:
            return type in BLOCKS and not (layer.name == self.model.ends()[1] and type == "Q8_0")

        methods = {type: rounded if calibrated(type) else None for type in types}
        costs = layer_costs(layer.weight, layer.hessian, gradients, methods, layer.hessian.mean_squares())
        return costs | {type: Cost(0.0, 0.0) for type in types if self._keeps_codes(layer.name, type)}

    def _keeps_codes(self, module: str, type: str) -> bool:
        """Whether a layer loses nothing in a type."""
        from bridge.mapping.choose import keeps_codes

        part = self.parts[module]
        return type in BLOCKS and self.source.coded(part) and keeps_codes(self.source.grouped(part), BLOCKS[type])

    def curve(self, fixed: int) -> list[tuple[int, float]]:
        """Bytes of the file and estimated KL divergence: of this one, and the best from the smallest to the largest."""
        from bridge.quantize.allocation import allocate

        sizes = [item.sizes for item in self.items]
        least, most = (sum(int(f(s)) for s in sizes) for f in (np.min, np.max))
        limits = np.linspace(least, most, _CURVE).astype(np.int64)
        points = []
        for taken in (self.found.taken, *(allocate(sizes, self.found.losses, limit) for limit in limits.tolist())):
            size = sum(int(s[t]) for s, t in zip(sizes, taken, strict=True))
            loss = sum(float(x[t]) for x, t in zip(self.found.losses, taken, strict=True))
            points.append((fixed + size, loss))
        return sorted(set(points))


def _groups(tensors: Sequence[PlannedTensor]) -> list[list[int]]:
    """Tensors whose estimates are corrected together: each by itself, or those of a kind in a range of layers."""
    if len(tensors) <= _GROUPS:
        return [[i] for i in range(len(tensors))]
    kinds = {t.kind for t in tensors}
    layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=0)
    ranges = max(1, _GROUPS // len(kinds))
    groups: dict[tuple[str, int], list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault((t.kind, (t.layer or 0) * ranges // layers), []).append(i)
    return list(groups.values())
