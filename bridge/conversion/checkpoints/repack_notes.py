"""What the user should know of a checkpoint in another format, beside the table of its layers."""

from collections import Counter

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.formats.module_reader import scales_activations
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.labels.hosts import programs_with_act_order
from bridge.checkpoint.tensor_names import expert_of
from bridge.conversion.checkpoints.checkpoint_plan import CheckpointPlan
from bridge.conversion.checkpoints.layer_plan import EXACT, ROUNDED
from bridge.errors import parameter


def notes_on_layers(ckpt: Checkpoint, plan: CheckpointPlan, host: str | None) -> list[str]:
    """Notes on layers whose bits have changed, that are floats, or that have lost their act-order.

    host  the program that is to load the checkpoint
    """
    return [*_more_bits(ckpt, plan, host), *_floats(plan), *_lost_act_order(ckpt, plan, host)]


def _more_bits(ckpt: Checkpoint, plan: CheckpointPlan, host: str | None) -> list[str]:
    """Notes on layers whose zero points need more bits than they had, though the format has these."""
    written = plan.written
    layers = {module: layer for module, layer in plan.layers.items() if module in ckpt.modules and layer.how == EXACT}
    changes = Counter((ckpt.modules[module].bits, layer.groups.bits) for module, layer in layers.items())
    format = f"{written.name}, as {host} reads it," if host else written.name
    why = "no zero points but the middle of the codes" if written.zeros == "middle" else "no room for all zero points"
    clamps = "" if written.holds_zero else f"; {parameter('clamp', True)} makes those of 0 into 1"
    return [
        f"{count} layers take {after} bits instead of {before}: {format} has {why}{clamps}"
        for (before, after), count in sorted(changes.items())
        if before < after and before in written.bits
    ]


def _floats(plan: CheckpointPlan) -> list[str]:
    """A note on layers whose codes the format lacks, but for experts where `CheckpointPlan.notes` has one on these."""
    written = plan.written
    layers = [module for module in plan.sources if written.stack_of is None or expert_of(module) is None]
    count, widest = len({*layers} - plan.layers.keys()), written.bits[-1:]
    rounds = f"; {parameter('bits', widest[0])} rounds them" if widest and plan.bits is None else ""
    return [f"{count} layers are floats, since {written.name} does not hold their codes{rounds}"] if count else []


def _lost_act_order(ckpt: Checkpoint, plan: CheckpointPlan, host: str | None) -> list[str]:
    """A note on layers that are rounded, or floats, because the new checkpoint has no act-order."""
    if plan.written.act_order:
        return []
    carried = {module for module, layer in plan.layers.items() if layer.how != ROUNDED}
    lost = sum(ckpt.group_order(module) is not None for module in plan.sources.keys() & ckpt.modules.keys() - carried)
    name = plan.written.name
    if not FORMATS[name].act_order:
        why = f"{name} does not hold"
    elif host is not None:
        why = f"{host} does not read in {name}"
    else:
        [program] = programs_with_act_order(FORMATS[name])
        why = f"{parameter('host', program)} keeps, the only program that reads it in {name}"
    return [f"{lost} layers have act-order, which {why}"] if lost else []


def notes_on_left_out_scales(ckpt: Checkpoint, plan: CheckpointPlan | None) -> list[str]:
    """A note on the scales of activations and of the key-value cache that the new checkpoint lacks."""
    stored = (
        {f"{module}.input_scale" for module, layer in plan.layers.items() if layer.groups.static} if plan else set()
    )
    owned = ckpt.reader.owned() if ckpt.reader else set()
    lost = Counter(
        name.rpartition(".")[2]
        for name in ckpt.store.tensors
        if scales_activations(name) and name not in owned | stored
    )
    parts = ", ".join(f"{count} {part}" for part, count in sorted(lost.items()))
    return [f"scales of activations and of the key-value cache are left out: {parts}"] if parts else []
