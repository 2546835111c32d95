"""Finds the checkpoint's tensors that an adapter's changes of experts are of.

An adapter has experts as the model that it was trained on had them: one stack [experts, gate and up, hidden] in
transformers 5, or three linear layers each. The checkpoint may have them the other way, and other names. The rows that
both ways have in common are those of the GGUF's tensor, for which the family's table has all names.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from bridge.checkpoint.adapter import Adapter, LowRank, Names, StackChanges, expert_changes, layer_change
from bridge.errors import BridgeError
from bridge.models.outline import OutlineTensor, Stack

Pair = tuple[np.ndarray, np.ndarray]


def place_experts(adapter: Adapter, tensors: Iterable[OutlineTensor]) -> Adapter:
    """The adapter with changes of experts at the modules and stacks of a checkpoint that has these tensors.

    Raises BridgeError for experts of another number or of other shapes, and for parameters that are no experts'.
    """
    experts = [tensor for tensor in tensors if tensor.stacks]
    stacks: dict[str, dict[str, tuple[Stack, int]]] = defaultdict(dict)  # module -> its parameters
    for tensor in experts:
        for stack in tensor.stacks if len(tensor.shape) == 3 else ():
            if "*" not in stack.name:
                module, _, parameter = stack.name.rpartition(".")
                stacks[module][parameter] = stack, len(tensor.parts)
    changes, of_stacks = dict(adapter.changes), dict[str, list[LowRank]]()
    with_stacks = Names(stacks)
    for module, pairs in adapter.parameters.items():
        if (known := with_stacks.find(module)) is not None:
            of_parameters = _of_parameters(adapter, module, pairs, stacks[known])
            of_stacks |= {f"{known}.{name}": change for name, change in of_parameters.items()}
        else:
            changes[module] = _of_weight(adapter, module, pairs)
    changed = Names(changes)
    saved_names = Names(adapter.saved)
    placed: dict[tuple[str, int | None], list[LowRank]] = defaultdict(list)
    transposed, used, sources = set[str](), set[str](), dict[str, str]()
    for tensor in experts:
        stored = _stored(tensor)
        for stack in tensor.stacks:
            for number, part in enumerate(tensor.parts):
                name = stack.name.replace("*", str(number))
                if len(tensor.shape) == 2 and (found := saved_names.find(f"{name}.weight")) is not None:
                    sources[found] = part.source
                if (layer := changed.find(name)) is not None:
                    change = changes[layer]
                    used.add(layer)
                elif name in of_stacks:
                    change = of_stacks[name][number]
                else:
                    continue
                if part.change == "transposed":
                    transposed.add(part.source)
                key = (part.module, None) if part.matrix is None else (part.source, part.matrix)
                placed[key].append(_moved(adapter, name, change, stack, stored))
    changes = {module: change for module, change in changes.items() if module not in used}
    saved = {sources.get(name, name): values for name, values in adapter.saved.items()}
    matrices: dict[str, dict[int, LowRank]] = defaultdict(dict)
    for (name, matrix), parts in placed.items():
        change = _joined(parts)
        if not (change.a.any() and change.b.any()) and change.magnitude is None:
            continue  # an expert that was not trained keeps its codes
        if matrix is None:
            changes[name] = change
        else:
            matrices[name][matrix] = change
    of_tensors = {name: StackChanges(each, name in transposed) for name, each in matrices.items()}
    return replace(adapter, changes=changes, saved=saved, parameters={}, stacks=of_tensors)


def _of_weight(adapter: Adapter, module: str, pairs: list[Pair]) -> LowRank:
    """The change of a layer, or of a parameter that is a matrix."""
    weight = f"{module}.weight"
    (a, b), parameter = pairs[0], weight if adapter.config.targets(weight) else None
    if len(pairs) > 1 or (a.shape[0] != adapter.config.rank(parameter or module) and adapter.config.targets(weight)):
        raise BridgeError(
            f"{adapter.path}: {module} has parameters of target_parameters that are neither matrices nor experts that "
            "are known; merge the adapter into its base model with PEFT, and convert the result"
        )
    return layer_change(module, {"lora_A": a, "lora_B": b}, adapter.config, parameter)


def _of_parameters(
    adapter: Adapter, module: str, pairs: list[Pair], known: dict[str, tuple[Stack, int]]
) -> dict[str, list[LowRank]]:
    """Parameter of a module -> the change of each expert, by the shapes of what PEFT wraps the module with."""
    targeted = {name: each for name, each in known.items() if adapter.config.targets(f"{module}.{name}")} or known
    ways = {}
    for crossed in (False, True):
        fitting = [next((name for name in targeted if _fits(pair, targeted[name][0], crossed)), None) for pair in pairs]
        if None not in fitting and len({*fitting}) == len(pairs):
            ways[crossed] = [name for name in fitting if name is not None]
    if not ways:
        shapes = ", ".join(f"lora_A {list(a.shape)} and lora_B {list(b.shape)}" for a, b in pairs)
        expected = ", ".join(
            f"{name} of {count} experts {list(stack.matrix)}" for name, (stack, count) in targeted.items()
        )
        raise BridgeError(
            f"{adapter.path}: {module} has {shapes}, which do not fit the base checkpoint's {expected}; give the base "
            "model that the adapter was trained on"
        )
    crossed = len(ways) == 1 and True in ways
    if len(ways) == 2:  # one square matrix alone: PEFT takes transposed stacks for others, but those that say so
        crossed = any(stack.transposed for stack, _ in known.values()) and not any(
            stack.rows is not None and stack.rows[1] - stack.rows[0] > 1 for stack, _ in known.values()
        )
    changes = {}
    for (a, b), name in zip(pairs, ways[crossed], strict=True):
        parameter, (_, count) = f"{module}.{name}", targeted[name]
        rank = adapter.config.rank(parameter)
        if len(a) != rank * count:
            raise BridgeError(
                f"{adapter.path}: {parameter} has lora_A {list(a.shape)}, must have {rank * count} rows, rank {rank} "
                f"for each of {count} experts of the base; give the base model that the adapter was trained on"
            )
        changes[name] = expert_changes(parameter, a, b, count, crossed, adapter.config)
    return changes


def _fits(pair: Pair, stack: Stack, crossed: bool) -> bool:
    """Whether two matrices have the sides of a stack's."""
    a, b = pair
    out, columns = stack.matrix[::-1] if crossed else stack.matrix
    return (b.shape[0], a.shape[1]) == (out, columns)


def _stored(tensor: OutlineTensor) -> Stack:
    """How the checkpoint has a tensor's experts; act-order's permutation of rows, which is in the parts, is not."""
    part = tensor.parts[0]
    if len(tensor.shape) == 2:
        return tensor.stacks[0]
    return next(
        stack
        for stack in tensor.stacks
        if ("*" in stack.name) == (part.matrix is None) and (stack.rows is None) == (part.stored is None)
    )


def _moved(adapter: Adapter, name: str, change: LowRank, stack: Stack, stored: Stack) -> LowRank:
    """The change of one of a stack's matrices as a change of the checkpoint's."""
    if change.shape != stack.matrix:
        raise BridgeError(
            f"{adapter.path}: {name} is a change of shape {list(change.shape)}, the base checkpoint has "
            f"{list(stack.matrix)}; give the base model that the adapter was trained on"
        )
    if stack.rows is stored.rows or (
        stack.rows is not None and stored.rows is not None and np.array_equal(stack.rows, stored.rows)
    ):
        return change
    if change.magnitude is not None:
        raise BridgeError(
            f"{adapter.path}: {name} has rows of changed length (DoRA), and the base checkpoint has gate and up in "
            "other matrices; merge it into its base model with PEFT, and convert the result"
        )
    b = change.b if stack.rows is None else change.b[stack.rows]
    if stored.rows is not None:
        rows = np.zeros((stored.matrix[0], b.shape[1]), np.float32)
        rows[stored.rows] = b
        b = rows
    return replace(change, b=b)


def _joined(changes: list[LowRank]) -> LowRank:
    """The sum of changes to one matrix; a matrix of gate and up has two, or the same one twice."""
    first, *others = changes
    if all(other is first for other in others):
        return first
    if all(other.a is first.a for other in others):
        return replace(first, b=np.sum([change.b for change in changes], axis=0))
    a = [np.repeat(change.a, change.alike, axis=1) for change in changes]
    return LowRank(np.concatenate(a), np.concatenate([np.float32(c.scale) * c.b for c in changes], axis=1), 1.0)
