"""Passes through a block that start at what has been quantized last, instead of at the block's beginning.

A module that returns what its last layer does (attention: the output of o; an MLP, or one expert: that of down) is an
`OutputOfModule`. The inputs of such a layer are gathered for its Hessian anyway and kept here. Once the layer is
quantized, the module is not run again: its output is the layer's, of these inputs. So every layer multiplies each token
once, and attention runs once, however many stages a block has. A block without such modules runs from its beginning
each time.

Memory: for each token the inputs of one layer until its module's output is asked for, then that output. Where the
inputs do not fit in memory, and go to no folder, their module runs again.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.quantize.model.activations import StoredActivation
from bridge.quantize.model.block_inputs import BlockInputs, as_returned


@dataclass(frozen=True)
class OutputOfModule:
    """The layer whose output a module returns, both by their names in the block.

    items  the module returns a tuple of so many items, the output first, the others None; None: the output alone
    added  the module called before, also by its name, to whose input the output is added, and nothing else; "": none
    """

    layer: str
    items: int | None
    added: str = ""


@dataclass
class Replay:
    """A block's passes for one batch.

    ends     by module, those inside of others too; empty: every pass starts at the block's beginning
    inputs   by layer, from when they were gathered until its output is asked for
    outputs  by layer
    """

    block: nn.Module
    batch: BlockInputs
    ends: Mapping[str, OutputOfModule] = field(default_factory=dict)
    inputs: dict[str, StoredActivation] = field(default_factory=dict)
    outputs: dict[str, StoredActivation] = field(default_factory=dict)

    def run(self, gathered: Collection[str] = ()) -> Any:
        """Call the block; modules whose outputs follow from what is kept run only for inputs to be `gathered`."""
        with ExitStack() as stack:
            for name, end in self.ends.items():
                if end.layer not in gathered and end.layer in self.inputs.keys() | self.outputs.keys():
                    module = self.block.get_submodule(name)
                    module.forward = partial(self._output, end)  # type: ignore[method-assign]
                    stack.callback(delattr, module, "forward")
            return self.batch.run(self.block)

    def keep(self, layer: str, x: torch.Tensor) -> None:
        """Keep a layer's inputs if a module returns its outputs, and if there is room."""
        if self.returns(layer):
            if layer in self.inputs:
                self.inputs.pop(layer).drop()
            if self.batch.store is None or self.batch.store.has_room(x.nbytes):
                self.inputs[layer] = self.batch.keep(x)

    def output(self, layer: str) -> torch.Tensor | None:
        """A layer's output, of its inputs if these are kept; None: neither is."""
        if layer in self.inputs:
            output: torch.Tensor = self.block.get_submodule(layer)(self.inputs[layer].value())
            self.inputs.pop(layer).drop()
            self.outputs[layer] = self.batch.keep(output)
            return output
        return self.outputs[layer].value() if layer in self.outputs else None

    def returns(self, layer: str) -> bool:
        """Whether a module returns this layer's output."""
        return any(end.layer == layer for end in self.ends.values())

    def clear(self) -> None:
        for activation in (*self.inputs.values(), *self.outputs.values()):
            activation.drop()
        self.inputs.clear()
        self.outputs.clear()

    def _output(self, end: OutputOfModule, *_args: Any, **_kwargs: Any) -> Any:
        return as_returned(self.output(end.layer), end.items)
