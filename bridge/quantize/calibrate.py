"""Calibration: a text goes through a model layer by layer, and each layer is quantized on the inputs it will see.

A decoder layer (any block of modules) is taken in stages: modules that get the same input tensor (q, k and v; gate
and up) are one stage. Each stage's Hessians are gathered with all stages before it quantized already; then the
block's outputs, now of quantized weights, are the next block's inputs. With feed="float" they are the float model's.

Memory: one block's weights twice where float inputs are wanted too, its Hessians, and the activations between
blocks, float32 [tokens, hidden], once or twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.hessian import Hessian
from bridge.quantize.layers import is_layer, matrix, set_matrix, vectors


@dataclass
class Feed:
    """What one call of a block gets: the first positional argument goes from block to block, the rest stays."""

    x: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    named: bool = False  # there is no positional argument

    def into(self, block: nn.Module) -> Any:
        """Call the block."""
        if self.named:
            return block(**self.kwargs)
        return block(self.x, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Calibrated:
    """One layer, ready to be quantized."""

    name: str
    weight: torch.Tensor  # float32 [out, columns], the float model's
    hessian: Hessian


# gets a layer; returns its quantized weights as floats [out, columns], and whatever the caller wants to keep of them
Quantizer = Callable[[Calibrated], tuple[torch.Tensor, Any]]


class _StopForward(Exception):
    """What is wanted of a forward pass has been seen."""


@torch.no_grad()
def quantize_model(
    model: nn.Module,
    tokens: torch.Tensor,
    quantizer: Quantizer,
    *,
    feed: str = "quantized",
    cross: bool = False,
    batch: int = 16,
    wanted: Callable[[str], bool] = lambda name: True,
    weights: Callable[[str, int], torch.Tensor | None] = lambda name, batch: None,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside a `transformers` decoder's blocks in place; yields (name, what the quantizer kept).

    tokens   int [sequences, length]
    feed     whose outputs the next block gets: "quantized" or "float"
    cross    gather GPTAQ's cross term too, which runs the float blocks beside the quantized ones
    batch    sequences in a forward pass
    wanted   whether a layer of this name is to be quantized
    weights  of the tokens of a batch for a layer's Hessian, float [tokens] or None (see `Hessian.add`)
    """
    if feed not in ("quantized", "float"):
        raise BridgeError(f"inputs of the next layer from {feed!r}; 'quantized' and 'float' are possible")
    model.eval()
    prefix, blocks = decoder_blocks(model)
    feeds = _first_feeds(model, blocks[0], tokens.split(batch))
    float_feeds = [copy.copy(f) for f in feeds] if cross else None
    for i, block in enumerate(blocks):
        name = f"{prefix}.{i}."
        original = copy.deepcopy(block) if cross or feed == "float" else None
        yield from quantize_block(
            block, feeds, quantizer, name, original if cross else None, float_feeds, wanted, weights
        )
        for f in feeds:
            f.x = _tensor(f.into(original if feed == "float" and original is not None else block))
        for f in float_feeds or ():
            assert original is not None
            f.x = _tensor(f.into(original))


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    feeds: Sequence[Feed],
    quantizer: Quantizer,
    prefix: str = "",
    original: nn.Module | None = None,
    float_feeds: Sequence[Feed] | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
    weights: Callable[[str, int], torch.Tensor | None] = lambda name, batch: None,
) -> Iterator[tuple[str, Any]]:
    """Quantize the layers inside a module, stage by stage in the order of their calls; yields as `quantize_model`.

    original, float_feeds   a copy of the module as it was and the float model's inputs, for GPTAQ's cross term
    """
    layers = {prefix + n: m for n, m in block.named_modules() if is_layer(m) and wanted(prefix + n)}
    originals = dict(original.named_modules(prefix=prefix.rstrip("."))) if original is not None else None
    stages, once = _stages(block, layers, feeds)
    for stage in stages:
        first = stage[0]
        hessian = Hessian(first, matrix(layers[first]).shape[1], next(layers[first].parameters()).device)
        for i, f in enumerate(feeds):
            floats = None
            if originals is not None and float_feeds is not None:
                floats = _inputs(original, originals[first], float_feeds[i], once)
            hessian.add(_inputs(block, layers[first], f, once), floats, weights(first, i))
        for n in stage:
            values, kept = quantizer(Calibrated(n, matrix(layers[n]), hessian))
            set_matrix(layers[n], values)
            yield n, kept


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of a `transformers` model's decoder blocks. Raises BridgeError where there is none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise BridgeError(f"{type(model).__name__}: no list of {count} decoder layers found; use bridge.quantize.gptq")


def _first_feeds(model: nn.Module, first: nn.Module, batches: Iterable[torch.Tensor]) -> list[Feed]:
    """What the first block is called with, batch by batch."""
    feeds: list[Feed] = []

    def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {k: v for k, v in kwargs.items() if "past_key_value" not in k}
        x = args[0] if args else kwargs.pop("hidden_states")
        feeds.append(Feed(x, args[1:], kwargs | {"use_cache": False} if "use_cache" in kwargs else kwargs))
        raise _StopForward

    handle = first.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        device = next(model.parameters()).device
        for tokens in batches:
            try:
                model(tokens.to(device), use_cache=False)
            except _StopForward:
                continue
    finally:
        handle.remove()
    return feeds


def _stages(block: nn.Module, layers: dict[str, nn.Module], feeds: Sequence[Feed]) -> tuple[list[list[str]], bool]:
    """Names of layers in the order of their first calls, together where they get the same tensor; whether each is
    called but once."""
    calls: dict[str, torch.Tensor] = {}
    again: list[str] = []

    def note(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if calls.setdefault(name, args[0]) is not args[0]:
                again.append(name)

        return hook

    handles = [m.register_forward_pre_hook(note(n)) for n, m in layers.items()]
    try:
        feeds[0].into(block)
    finally:
        for handle in handles:
            handle.remove()
    stages: list[list[str]] = []
    last: torch.Tensor | None = None
    for name, x in calls.items():
        if x is last:
            stages[-1].append(name)
        else:
            stages.append([name])
        last = x
    return stages, not again


def _inputs(block: Any, layer: nn.Module, feed: Feed, once: bool) -> torch.Tensor:
    """The inputs of a layer [tokens, columns] in one call of the block, which is cut short if it is called once."""
    seen: list[torch.Tensor] = []

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(vectors(module, args[0]).float())
        if once:
            raise _StopForward

    handle = layer.register_forward_pre_hook(hook)
    try:
        feed.into(block)
    except _StopForward:
        pass
    finally:
        handle.remove()
    return torch.cat(seen)


def _tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
