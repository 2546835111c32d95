"""The Hessians of a stage's layers, gathered in one pass of each batch through the block and its float twin."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from bridge.quantize.model.block_inputs import matrix_shape
from bridge.quantize.model.replay import Replay
from bridge.quantize.model.stages import Stage, mixture_of, stage_inputs
from bridge.quantize.quantizer import TokenWeights
from bridge.quantize.solve.hessian import Hessian
from bridge.quantize.solve.target import takes_products


def gather(
    stage: Stage,
    layers: Mapping[str, nn.Module],
    replays: Sequence[Replay],
    originals: Mapping[str, nn.Module],
    floats: Sequence[Replay],
    first: int = 0,
    weights: TokenWeights = lambda names: None,
) -> dict[str, Hessian]:
    """The Hessian of each group of a stage.

    first    how many tokens of the text come before these passes'
    weights  how much the text's tokens count in the Hessian of the layers of these names
    """
    hessians = {}
    for key, group in stage.groups.items():
        module = layers[group[0]]
        hessians[key] = Hessian(group[0], matrix_shape(module)[1], next(module.parameters()).device, first)
    mixture = mixture_of(replays[0].block, stage, layers)
    products = _with_products(stage, originals, floats)
    of_tokens = {key: weights(group) for key, group in stage.groups.items()}
    for i, replay in enumerate(replays):
        seen, residuals = stage_inputs(stage, layers, replay, residuals=bool(products))
        twins: dict[str, torch.Tensor] = {}
        # experts that are separate modules in the model itself may see other tokens in the float model: no cross term
        if floats and (mixture or not stage.experts):
            routed = mixture.routing if mixture else None
            twins, float_residuals = stage_inputs(stage, originals, floats[i], routed, bool(products))
        count = replay.batch.tokens
        for key, x in seen.items():
            x_float, outputs, token_weights = twins.pop(key, None), None, of_tokens[key]
            if token_weights is not None:
                token_weights = token_weights[first : first + count]
                if mixture is not None:
                    token_weights = token_weights[mixture.tokens_of(int(key)).cpu()]
                token_weights = token_weights if len(token_weights) == len(x) else None
            if key in products and x_float is not None:
                outputs = {
                    n: _float_output(originals[n], inside, floats[i], x_float) for n, inside in products[key].items()
                }
                for n in residuals.keys() & float_residuals.keys():
                    lost = float_residuals[n] - residuals[n]
                    outputs[n] = outputs[n].float() + lost.reshape(outputs[n].shape)
                x_float = None
            hessians[key].add(x, x_float, replay.batch.held, outputs, token_weights)
        first += count
    return hessians


def _with_products(
    stage: Stage, originals: Mapping[str, nn.Module], floats: Sequence[Replay]
) -> dict[str, dict[str, str]]:
    """The groups whose float outputs are gathered in place of the cross term, with their layers' names in the block."""
    if not floats or stage.experts:
        return {}
    names = {module: name for name, module in floats[0].block.named_modules()}
    products = {}
    for key, group in stage.groups.items():
        modules = [originals[n] for n in group]
        (*_, columns), rows = matrix_shape(modules[0]), [matrix_shape(m)[0] for m in modules]
        at_hand = all(floats[0].returns(names[m]) for m in modules)
        if takes_products(rows, columns, at_hand) and all(type(m).forward is nn.Linear.forward for m in modules):
            products[key] = {n: names[originals[n]] for n in group}
    return products


def _float_output(layer: nn.Module, name: str, replay: Replay, x: torch.Tensor) -> torch.Tensor:
    """The output of a block's layer, without its bias, for inputs x that the replay has just passed."""
    output = replay.output(name)
    if output is None:
        output = layer(x.to(layer.weight.dtype))
    bias = getattr(layer, "bias", None)
    return output if bias is None else output - bias


def gather_together(stage: Stage, layers: Mapping[str, nn.Module], replays: Sequence[Replay]) -> Hessian:
    """One Hessian of the inputs of all groups of a stage."""
    first = layers[next(iter(stage.groups.values()))[0]]
    hessian = Hessian("all experts", matrix_shape(first)[1], next(first.parameters()).device)
    for replay in replays:
        for x in stage_inputs(stage, layers, replay)[0].values():
            hessian.add(x)
    return hessian
