"""GPTQ of any torch module, in memory, with batches of its own inputs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from bridge.errors import BridgeError
from bridge.quantize.method import Method, Quantized, groups, superblocks
from bridge.quantize.model.block_inputs import BlockInputs
from bridge.quantize.run.layer_by_layer import quantize_block
from bridge.system.options import checked


@checked
def gptq(
    module: torch.nn.Module,
    batches: Iterable[Any],
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    act_order: str = "fixed",
    damping: float = 0.01,
    sweeps: int = 0,
    type: str | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Quantized]:
    """Quantize every Linear, Conv1D and Conv2d of a module in place, in the order of their calls.

    batches     the module's arguments: for each call a tensor, a tuple of positional or a mapping of named ones
    bits, group_size, symmetric   of the groups; group_size -1: one group a row; bits 0: ternary
    act_order, damping   see `Method`
    sweeps      of refinement after GPTQ; 0: none
    type        a GGUF type, whose blocks replace the groups
    wanted      whether to quantize the layer of this name

    Every layer is calibrated on inputs from the quantized layers before it. Returns the layers by name.
    """
    inputs = [_block_inputs(batch) for batch in batches]
    if not inputs:
        raise BridgeError("no calibration batches; give at least one")
    grid = superblocks(type) if type else groups(bits, group_size, symmetric)
    method = Method(grid, act_order, damping, sweeps=sweeps)
    training = module.training
    module.eval()
    try:
        return dict(quantize_block(module, inputs, method.layer, wanted=wanted))
    finally:
        module.train(training)


def _block_inputs(batch: Any) -> BlockInputs:
    if isinstance(batch, Mapping):
        return BlockInputs(None, kwargs=dict(batch), named=True)
    return BlockInputs(batch[0], tuple(batch[1:])) if isinstance(batch, tuple | list) else BlockInputs(batch)
