"""The stages of a block: layers whose inputs are known once all layers before them are quantized.

Layers that are called with the same tensor one after the other (q, k and v; gate and up) share a stage, and one
Hessian unless the text's tokens count otherwise for each (`Stage.apart`). Experts of a mixture do not depend on each
other: gate and up of all of them are one stage, down the next, with a Hessian for each expert. Layers that no token of
the text reaches come last.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from bridge.quantize.model.block_inputs import BlockInputs, StopForward, first_of, matrix_shape, vectors
from bridge.quantize.model.experts import SeparateExperts, expert_of, expert_pattern
from bridge.quantize.model.replay import OutputOfModule, Replay
from bridge.quantize.quantizer import TokenWeights

HESSIANS = 2 << 30  # bytes that are gathered in one pass, if nothing else is asked for
_ALIKE = 0.8  # of two layers' token weights in common: they share a Hessian. q, k, v have 0.6 to 0.75, gate and up 0.9


@dataclass
class Stage:
    """Names of layers, in groups that share a Hessian.

    experts  the groups are experts of one mixture; otherwise all of them have the same inputs
    once     each layer is called only once in a pass
    """

    groups: dict[str, list[str]] = field(default_factory=dict)
    experts: bool = False
    once: bool = True

    def apart(self, weights: TokenWeights) -> Self:
        """The stage with a Hessian each for layers between which the text's tokens count otherwise."""
        if self.experts:
            return self
        counts = {name: weights([name]) for group in self.groups.values() for name in group}
        cut: list[list[str]] = []
        for name, of_tokens in counts.items():
            alike = next((group for group in cut if _in_common(counts[group[0]], of_tokens) >= _ALIKE), None)
            if alike is None:
                cut.append(alike := [])
            alike.append(name)
        return replace(self, groups={str(number): group for number, group in enumerate(cut)})

    def parts(self, layers: Mapping[str, nn.Module], cross: bool, together: int | None = None) -> Iterator[Self]:
        """The stage, cut into parts whose Hessians take at most so many bytes together; None: `HESSIANS`."""
        together = HESSIANS if together is None else together
        part, size = replace(self, groups={}), 0
        for key, group in self.groups.items():
            matrices = 4 if cross else 1  # H and C, of all tokens and of those held back
            needed = 4 * matrix_shape(layers[group[0]])[1] ** 2 * matrices
            if part.groups and size + needed > together:
                yield part
                part, size = replace(self, groups={}), 0
            part.groups[key] = group
            size += needed
        yield part


def _in_common(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The share that two layers' token weights, 1 on average, have in common; 1 where one of them is not known."""
    return 1.0 if one is None or other is None else float(torch.minimum(one, other).mean())


def find_stages(
    block: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Iterable[BlockInputs],
    weights: TokenWeights = lambda names: None,
) -> tuple[list[Stage], dict[str, OutputOfModule]]:
    """The stages of these layers, in the order of their calls, and the block's modules that return a layer's output.

    weights  how much each of the text's tokens counts in H of layers

    Batches are run until each layer was reached; of experts, any of a mixture.
    """
    seen: dict[str, torch.Tensor | None] = {}
    order: list[tuple[str, str | None]] = []  # a layer, and the one before it with the same input
    again: set[str] = set()
    ends: dict[str, OutputOfModule] = {}
    last: list[Any] = [None, None]  # the layer that was called last, and its output
    inside = {module: name for name, module in block.named_modules()}
    calls: list[tuple[str, torch.Tensor]] = []  # modules and their inputs, where these are like the block's
    outputs: dict[str, tuple[int, torch.Tensor]] = {}  # by module of `ends`: how many calls came before, and its output
    shape: list[Any] = [None]

    def called(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].shape == shape[0]:
            calls.append((inside[module], args[0]))

    def note(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if name not in seen:
            before = order[-1][0] if order else None
            order.append((name, before if before and seen[before] is args[0] else None))
            seen[name] = args[0]
        elif seen[name] is not None and seen[name] is not args[0]:
            again.add(name)

    def returned(module: nn.Module, _args: Any, output: Any) -> None:
        if module in layer_modules:
            last[:] = inside[module], output
            return
        items = output if isinstance(output, tuple) else (output,)
        if items and items[0] is last[1] and last[1] is not None and not any(x is not None for x in items[1:]):
            ends[inside[module]] = OutputOfModule(last[0], len(items) if isinstance(output, tuple) else None)
            outputs[inside[module]] = len(calls), items[0]

    layer_modules = set(layers.values())
    patterns = {expert_pattern(name) for name in layers}
    with ExitStack() as stack:
        for name, module in layers.items():
            stack.enter_context(module.register_forward_pre_hook(partial(note, name)))
        for module in inside:
            if module is not block:
                stack.enter_context(module.register_forward_hook(returned))
                stack.enter_context(module.register_forward_pre_hook(called))
        for batch in batches:
            calls.clear()
            outputs.clear()
            shape[0] = getattr(batch.value(), "shape", None)
            calls.append(("", first_of(batch.run(block))))
            for name, (before, output) in outputs.items():
                ends[name] = replace(ends[name], added=_added(calls[:before], calls[before][1], output, ends))
            if {expert_pattern(name) for name in seen} == patterns:
                break
            seen.update(dict.fromkeys(seen))  # another batch has other inputs
    stages = _in_stages([*order, *((name, None) for name in layers if name not in seen)], not again)
    stages = [stage.apart(weights) for stage in stages]
    return stages, {} if again else _of_all_experts(ends, inside.values())


def _added(before: Sequence[tuple[str, torch.Tensor]], sum_: Any, output: torch.Tensor, ends: Iterable[str]) -> str:
    """`OutputOfModule.added`: of the modules called before an output, one to whose last input it adds up."""
    for name, x in reversed(dict(before).items()):
        again = not any(f"{name}.".startswith(f"{end}.") for end in ends)  # those inside are not called in each pass
        if again and x.shape == output.shape and isinstance(sum_, torch.Tensor) and torch.equal(x + output, sum_):
            return name
    return ""


def _of_all_experts(ends: Mapping[str, OutputOfModule], modules: Iterable[str]) -> dict[str, OutputOfModule]:
    """`ends` of a block, completed by those of the experts that no token has reached yet."""
    all_ends = dict(ends)
    by_pattern = {expert[0]: (expert[1], end) for name, end in ends.items() if (expert := expert_of(f"{name}."))}
    for name in modules:
        pattern, number = expert_of(f"{name}.") or ("", "")
        if pattern in by_pattern and name not in all_ends:
            reached, end = by_pattern[pattern]
            all_ends[name] = OutputOfModule(end.layer.replace(f"experts.{reached}.", f"experts.{number}."), end.items)
    return all_ends


def _in_stages(order: Sequence[tuple[str, str | None]], once: bool) -> list[Stage]:
    stages: list[Stage] = []
    of: dict[str, Stage] = {}  # by the layer's name, an expert's number replaced by *
    for name, same in order:
        pattern, number = expert_of(name) or (name, "")
        stage = of.get(pattern) or (of.get(expert_pattern(same)) if same else None)
        if stage is None or stage.experts != bool(number):
            stage = Stage(experts=bool(number), once=once)
            stages.append(stage)
        of[pattern] = stage
        stage.groups.setdefault(number, []).append(name)
    return stages


def stage_inputs(
    stage: Stage, layers: Mapping[str, nn.Module], replay: Replay, routed: Any = None, residuals: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The inputs [tokens, columns] of each group of a stage in one call of the block; no key if no token reaches it.

    With `residuals`, also what the layers' outputs are added to (`OutputOfModule.added`), by the names in `layers`.

    layers  of the replay's block
    routed  the `routing` of another pass, whose tokens the experts get; None: the router chooses, and the inputs are
            kept for the passes after this one
    """
    seen: dict[str, list[torch.Tensor]] = {}
    added: dict[str, torch.Tensor] = {}
    names = {module: name for name, module in replay.block.named_modules()}
    inputs = [[key] for key in stage.groups] if stage.experts else [list(stage.groups)]  # groups that share theirs

    def note(keys: Sequence[str], module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.setdefault(keys[0], []).append(vectors(module, args[0]).float())
        if routed is None:
            for name in (name for key in keys for name in stage.groups[key]):
                replay.keep(names[layers[name]], args[0])
        if stage.once and not stage.experts:
            raise StopForward

    def note_residual(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        added[name] = args[0]

    def stop(*_: Any) -> None:
        raise StopForward

    with ExitStack() as stack:
        if residuals:
            of = {names[layers[name]]: name for group in stage.groups.values() for name in group}
            for end in replay.ends.values():
                if end.layer in of and end.added:
                    module = replay.block.get_submodule(end.added)
                    stack.enter_context(module.register_forward_pre_hook(partial(note_residual, of[end.layer])))
        for keys in inputs:
            stack.enter_context(layers[stage.groups[keys[0]][0]].register_forward_pre_hook(partial(note, keys)))
        mixture = mixture_of(replay.block, stage, layers)
        if mixture is not None:
            mixture.imposed = routed
            stack.callback(setattr, mixture, "imposed", None)
            stack.enter_context(mixture.register_forward_hook(stop))
        with suppress(StopForward):
            replay.run({names[layers[name]] for group in stage.groups.values() for name in group})
    joined = {first: torch.cat(parts) for first, parts in seen.items()}
    return {key: joined[keys[0]] for keys in inputs for key in keys if keys[0] in joined}, added


def mixture_of(block: nn.Module, stage: Stage, layers: Mapping[str, nn.Module]) -> SeparateExperts | None:
    """The mixture whose experts are the groups of a stage, if they are."""
    if not stage.experts:
        return None
    layer = layers[next(iter(stage.groups.values()))[0]]
    mixtures = (m for m in block.modules() if isinstance(m, SeparateExperts))
    return next((m for m in mixtures if any(module is layer for module in m.modules())), None)
