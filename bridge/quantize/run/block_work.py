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

from bridge.quantize.model.block_inputs import BlockInputs, set_matrix
from bridge.quantize.model.replay import OutputOfModule, Replay
from bridge.quantize.model.stages import Stage, find_stages
from bridge.quantize.run.stage_hessians import gather, gather_together
from bridge.quantize.run.walk import Walk
from bridge.quantize.solve.hessian import Hessian

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
        """The Hessians of a stage's groups; `first`: how many tokens of the text come before these batches."""
        passes = self._passes_of(batches, ends)
        floats = [twin for _, twin in passes if twin is not None]
        replays = [replay for replay, _ in passes]
        return gather(stage, self.layers, replays, self.originals, floats, first, self.walk.layers.weights)

    def gather_together(self, stage: Stage, batches: Mapping[int, Batch], ends: Ends) -> Hessian:
        """One Hessian of all experts of a stage."""
        return gather_together(stage, self.layers, [replay for replay, _ in self._passes_of(batches, ends)])

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
