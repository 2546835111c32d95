"""The experts of a mixture in MLX: stacks of matrices that have one form, for families whose stacks mlx-lm names."""

from collections.abc import Iterable, Mapping

from bridge.checkpoint.formats.mlx_experts import STACKING, stack_of
from bridge.conversion.layer_forms import EXACT, ROUNDED, Form


def in_stacks(model_type: str, forms: Mapping[str, Form | None]) -> tuple[dict[str, Form], dict[str, tuple[str, int]]]:
    """The forms of the layers that are quantized, and the stacks of experts, as `CheckpointWriter` takes them.

    forms  module -> its own form, None if it stays in floats

    Experts stay in floats unless all can be stacked: of floats, mlx-lm stacks those of all layers itself.
    """
    experts = {module for module in forms if ".experts." in module}
    stacks = {module: at for module in experts if (at := stack_of(module)) is not None}
    members: dict[str, list[str]] = {}
    for module, (stack, _) in stacks.items():
        members.setdefault(stack, []).append(module)
    shared = {stack: shared_form(forms[module] for module in modules) for stack, modules in members.items()}
    if model_type not in STACKING or len(stacks) < len(experts) or None in shared.values():
        return {module: form for module, form in forms.items() if form is not None and module not in experts}, {}
    own = {module: shared[stacks[module][0]] if module in experts else form for module, form in forms.items()}
    return {module: form for module, form in own.items() if form is not None}, stacks


def shared_form(forms: Iterable[Form | None]) -> Form | None:
    """The form that all matrices of a stack can have; None if one stays in floats, or their codes differ in kind."""
    first, *others = set(forms)
    if first is None or not others:
        return first
    found = [first, *(form for form in others if form is not None)]
    if len(found) <= len(others) or len({form.groups.kind for form in found}) > 1:
        return None
    bits, size = max(form.groups.bits for form in found), min(form.groups.group_size for form in found)
    how = ROUNDED if any(form.how == ROUNDED for form in found) else EXACT
    groups = first.groups._replace(bits=bits, group_size=size)
    return Form(how, groups, offsets=any(form.offsets for form in found))
