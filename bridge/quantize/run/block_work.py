"""The work on one block with some batches: its stages, their Hessians, its quantized layers, the next block's inputs.

A block (any module) is processed in stages (`stages`). Each stage's Hessians are gathered after all stages before it
have been quantized; the block's outputs, with quantized weights, are then the next block's inputs. With feed="float"
those are the float model's.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bridge.quantize.model.block_inputs import BlockInputs, matrix_shape, set_matrix
from bridge.quantize.model.replay import OutputOfModule, Replay
from bridge.quantize.model.stages import Stage, find_stages, mixture_of, stage_inputs
from bridge.quantize.run.walk import Walk
from bridge.quantize.solve.hessian import Hessian
from bridge.quantize.solve.target import takes_products

Ends = Mapping[str, OutputOfModule]


@dataclass
class Batch:
    """The inputs of a block for sequences that pass together.

    inputs  the block's
    floats  the float model's, where these are others
    block   its number
    """

    inputs: BlockInputs
    floats: BlockInputs | None = None
    block: int = 0

    def both(self) -> list[tuple[BlockInputs, bool]]:
        """The inputs, and those of the float model if there are any, each with whether it is the float model's."""
        return [(self.inputs, False)] + ([(self.floats, True)] if self.floats is not None else [])


def float_twin(block: nn.Module) -> nn.Module:
    """A copy of a block that shares its tensors."""
    return copy.deepcopy(block, {id(t): t for t in (*block.parameters(), *block.buffers())})


class BlockWork:
    """A loaded block.

    block     the module
    layers    those to quantize, by name
    original  its float twin, where that runs too: it shares all tensors but those of replaced layers
    replaced  the layers whose weights are quantized ones
    """

    def __init__(self, walk: Walk, block: nn.Module, layers: Mapping[str, nn.Module], original: nn.Module | None):
        self.walk, self.block, self.layers, self.original = walk, block, layers, original
        twins = {} if original is None else dict(zip(block.modules(), original.modules(), strict=True))
        self.originals = {name: twins[module] for name, module in layers.items() if module in twins}
        self.replaced: set[str] = set()
        self._passes: dict[int, tuple[Replay, Replay | None]] = {}

    def stages(self, batches: Sequence[Batch]) -> tuple[list[Stage], dict[str, OutputOfModule]]:
        """The block's stages, and the modules that return a layer's output."""
        return find_stages(self.block, self.layers, [b.inputs for b in batches], self.walk.layers.weights)

    def gather(self, stage: Stage, batches: Mapping[int, Batch], ends: Ends, first: int) -> dict[str, Hessian]:
        """The Hessian of each group of a stage; `first`: how many tokens of the text come before these batches."""
        hessians = {}
        for key, group in stage.groups.items():
            module = self.layers[group[0]]
            hessians[key] = Hessian(group[0], matrix_shape(module)[1], next(module.parameters()).device, first)
        passes = self._passes_of(batches, ends)
        mixture = mixture_of(self.block, stage, self.layers)
        products = self._with_products(stage, passes[0][1])
        of_tokens = {key: self.walk.layers.weights(group) for key, group in stage.groups.items()}
        for replay, twin in passes:
            seen, residuals = stage_inputs(stage, self.layers, replay, residuals=bool(products))
            twins: dict[str, torch.Tensor] = {}
            # experts that are separate modules in the model may see other tokens in the float model: no cross term
            if twin is not None and (mixture or not stage.experts):
                routed = mixture.routing if mixture else None
                twins, float_residuals = stage_inputs(stage, self.originals, twin, routed, bool(products))
            count = replay.batch.tokens
            for key, x in seen.items():
                x_float, outputs, token_weights = twins.pop(key, None), None, of_tokens[key]
                if token_weights is not None:
                    token_weights = token_weights[first : first + count]
                    if mixture is not None:
                        token_weights = token_weights[mixture.tokens_of(int(key)).cpu()]
                    token_weights = token_weights if len(token_weights) == len(x) else None
                if key in products and twin is not None and x_float is not None:
                    names = products[key]
                    outputs = {n: _float_output(self.originals[n], names[n], twin, x_float) for n in names}
                    for n in residuals.keys() & float_residuals.keys():
                        lost = float_residuals[n] - residuals[n]
                        outputs[n] = outputs[n].float() + lost.reshape(outputs[n].shape)
                    x_float = None
                hessians[key].add(x, x_float, replay.batch.held, outputs, token_weights)
            first += count
        return hessians

    def _with_products(self, stage: Stage, twin: Replay | None) -> dict[str, dict[str, str]]:
        """The groups whose float outputs are gathered in place of the cross term, with their layers' names in the
        block."""
        if twin is None or stage.experts:
            return {}
        names = {module: name for name, module in twin.block.named_modules()}
        products = {}
        for key, group in stage.groups.items():
            modules = [self.originals[n] for n in group]
            (*_, columns), rows = matrix_shape(modules[0]), [matrix_shape(m)[0] for m in modules]
            at_hand = all(twin.returns(names[m]) for m in modules)
            if takes_products(rows, columns, at_hand) and all(type(m).forward is nn.Linear.forward for m in modules):
                products[key] = {n: names[self.originals[n]] for n in group}
        return products

    def gather_together(self, stage: Stage, batches: Mapping[int, Batch], ends: Ends) -> Hessian:
        """One Hessian of the inputs of all experts of a stage."""
        first = self.layers[next(iter(stage.groups.values()))[0]]
        hessian = Hessian("all experts", matrix_shape(first)[1], next(first.parameters()).device)
        for replay, _ in self._passes_of(batches, ends):
            for x in stage_inputs(stage, self.layers, replay)[0].values():
                hessian.add(x)
        return hessian

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Set a layer's quantized weights; that of the float block, which shared them, gets a copy first."""
        if name in self.originals:
            weight: torch.Tensor = self.originals[name].weight  # type: ignore[assignment]
            self.originals[name].weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        set_matrix(self.layers[name], values)
        self.replaced.add(name)

    def advance(self, number: int, batch: Batch, ends: Ends) -> None:
        """Make the block's outputs the batch's inputs."""
        ((feeding, twin),) = self._passes_of({number: batch}, ends)
        if self.walk.feed == "float" and twin is None:
            assert self.original is not None
            twin = Replay(self.original, feeding.batch)
        if batch.floats is None and twin is not None:
            feeding.clear()
            feeding = twin
        for replay in (feeding, twin) if batch.floats is not None and twin is not None else (feeding,):
            output = replay.run()
            replay.clear()
            replay.batch.advance(output)
            del output
        del self._passes[number]
        batch.block += 1

    def clear(self) -> None:
        for replay in (replay for both in self._passes.values() for replay in both if replay is not None):
            replay.clear()
        self._passes = {}

    def _passes_of(self, batches: Mapping[int, Batch], ends: Ends) -> list[tuple[Replay, Replay | None]]:
        """Each batch's passes through the block, and through the float block."""
        for number, batch in batches.items():
            if number not in self._passes:
                twin = None
                if self.walk.cross and self.original is not None:
                    twin = Replay(self.original, batch.floats or batch.inputs, ends)
                self._passes[number] = Replay(self.block, batch.inputs, ends), twin
        return [self._passes[number] for number in batches]


def _float_output(layer: nn.Module, name: str, replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """The output of a block's layer, without its bias, for inputs x that the replay has just passed."""
    output = replay.output(name)
    if output is None:
        output = layer(x.to(layer.weight.dtype))
    bias = getattr(layer, "bias", None)
    return output if bias is None else output - bias
