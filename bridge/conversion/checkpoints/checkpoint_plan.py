"""What becomes of all layers of a model in a checkpoint's format: each by itself, then where they depend on each other.

The matrices of a stack of experts have one plan, and all layers have one group size where the format has no more.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.tensor_names import joined_name
from bridge.conversion.checkpoints.layer_plan import EXACT, ROUNDED, Layer, LayerPlan
from bridge.errors import parameter


class CheckpointPlan:
    """The plan of all layers that may have codes.

    sources  the layers by module, those that stay in floats too
    layers   how layers are written; the others stay in floats
    stacks   of experts, as `CheckpointWriter` takes them
    """

    def __init__(
        self, sources: Iterable[Layer], plans: Mapping[str, LayerPlan | None], written: WrittenFormat,
        bits: int | None, model_type: str, float_stacks: int = 0, *, joins: bool = False,
    ) -> None:  # fmt: skip
        """
        plans         what becomes of each layer by itself, by module
        bits          see `Layer.plan`
        model_type    config.json's
        float_stacks  of experts, whose layers are floats
        joins         layers that vLLM and SGLang join have one plan
        """
        self.written, self.bits = written, bits
        self.sources = {layer.module: layer for layer in sources}
        self.stacks: dict[str, tuple[str, int]] = {}
        self._float_stacks = float_stacks
        if joins:
            plans = with_joined_alike(plans)
        if written.stack_of is None:
            self.layers = {module: plan for module, plan in plans.items() if plan is not None}
        else:
            self.layers, self.stacks = in_stacks(partial(written.stack_of, model_type), plans)
        self._sizes = {plan.groups.group_size for plan in self.layers.values()}
        if written.one_size:
            self.layers = common_size(self.layers, self.sources)

    def notes(self) -> list[str]:
        """What the user should know of the layers."""
        notes, written = [], self.written
        if rest := sum(plan.how == ROUNDED for plan in self.layers.values()):
            offer = "" if written.one_size else f"; {parameter('calibrate')} quantizes such layers with a text"
            within = f" in {self.bits} bits" if self.bits else ""
            notes.append(f"{rest} layers have no codes that {written.name} holds{within}: rounded{offer}")
        if written.one_size and len(self._sizes) > 1:
            size, name = next(iter(self.layers.values())).groups.group_size, written.name.upper()
            every = f"all layers have groups of {size}, since {name} has one size"
            notes.append(f"{every}: scales of larger groups are repeated")
        experts = 0 if self.stacks else sum(".experts." in module for module in self.sources)
        if written.stack_of is not None and experts:
            notes.append(
                f"{experts} matrices of experts are floats: mlx-lm has no stacks of codes that hold all of them"
            )
        if self._float_stacks:
            stacks = f"{self._float_stacks} stacks of experts"
            notes.append(f"{stacks} are floats: checkpoints of this architecture have them as one tensor")
        return notes


def common_size(plans: Mapping[str, LayerPlan], layers: Mapping[str, Layer]) -> dict[str, LayerPlan]:
    """The plans with the largest group size that divides those of all; scales of larger groups are repeated."""
    if len({plan.groups.group_size for plan in plans.values()}) <= 1:
        return dict(plans)
    columns = {module: layers[module].shape[1] for module in plans}
    size = math.gcd(*(plan.groups.width(columns[module]) for module, plan in plans.items()))
    return {module: replace(plan, groups=plan.groups._replace(group_size=size)) for module, plan in plans.items()}


def in_stacks(
    stack_of: Callable[[str], tuple[str, int] | None], plans: Mapping[str, LayerPlan | None]
) -> tuple[dict[str, LayerPlan], dict[str, tuple[str, int]]]:
    """The plans of the layers that are quantized, and the stacks of experts, as `CheckpointWriter` takes them.

    stack_of  module -> the stack that it is in, and which matrix of it; None for others
    plans     module -> its own plan, None if it stays in floats

    Experts stay in floats unless all can be stacked: of floats, the format's programs stack those of all layers.
    """
    experts = {module for module in plans if ".experts." in module}
    stacks = {module: matrix for module in experts if (matrix := stack_of(module)) is not None}
    members: dict[str, list[str]] = {}
    for module, (stack, _) in stacks.items():
        members.setdefault(stack, []).append(module)
    shared = {stack: shared_plan(plans[module] for module in modules) for stack, modules in members.items()}
    if len(stacks) < len(experts) or None in shared.values():
        return {module: plan for module, plan in plans.items() if plan is not None and module not in experts}, {}
    all_plans = {module: shared[stacks[module][0]] if module in experts else plan for module, plan in plans.items()}
    return {module: plan for module, plan in all_plans.items() if plan is not None}, stacks


def with_joined_alike(plans: Mapping[str, LayerPlan | None]) -> dict[str, LayerPlan | None]:
    """The plans, one for all layers that vLLM and SGLang join."""
    members: dict[str, list[str]] = {}
    for module in plans:
        members.setdefault(joined_name(module) or module, []).append(module)
    shared = {whole: shared_plan(plans[module] for module in modules) for whole, modules in members.items()}
    return {module: shared[joined_name(module) or module] for module in plans}


def shared_plan(plans: Iterable[LayerPlan | None]) -> LayerPlan | None:
    """The plan that several layers can have; None if one stays in floats, or if they differ in the kind of their codes,
    in what shares a scale of floats, or in act-order."""
    first, *others = dict.fromkeys(plans)
    if first is None or not others:
        return first
    different = [first, *(plan for plan in others if plan is not None)]
    if len(different) <= len(others) or any(plan.groups.kind != "int" for plan in different):
        return None
    every = [plan.groups for plan in different]
    bits, sizes = max(groups.bits for groups in every), {groups.group_size for groups in every}
    size = min(sizes - {-1}, default=-1)
    if any(groups.group_size not in (-1, size) and groups.group_size % size for groups in every):
        return None
    how = ROUNDED if any(plan.how == ROUNDED for plan in different) else EXACT
    order = 0 if how == ROUNDED else first.order
    if how == EXACT and (len({plan.order for plan in different}) > 1 or (order and len(sizes) > 1)):
        return None
    scales = {groups.scales for groups in every}
    groups = first.groups._replace(
        bits=bits, group_size=size, symmetric=all(groups.symmetric for groups in every),
        act_order=bool(order) and first.groups.act_order, scales=scales.pop() if len(scales) == 1 else "F32",
    )  # fmt: skip
    return LayerPlan(how, groups, offsets=any(plan.offsets for plan in different), order=order)
