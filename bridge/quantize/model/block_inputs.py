"""The inputs of a model's blocks, of the layers in them, and of the output head.

The activations between blocks, [sequences, length, hidden] a batch, are kept in `activations`. A layer that
can be quantized is seen as a matrix [out, columns] and its inputs as vectors [tokens, columns]:

    torch.nn.Linear       weight unchanged
    transformers' Conv1D  weight [in, out], so transposed
    torch.nn.Conv2d       weight [out, in * kernel], inputs are the patches under the kernel; one group
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from bridge.quantize.model.activations import ActivationStore, StoredActivation
from bridge.quantize.solve.hessian import Hessian


@dataclass
class BlockInputs:
    """The arguments of a block for one batch: the first positional one goes from block to block, the others stay.

    x       the first argument; of a model's blocks it is kept in memory or in a file
    named   there is no positional argument
    items   blocks return a tuple of so many items, the next block's input first; None: that input alone
    calls   the other arguments for each block of a model: a later block may see another mask than the first
    store   where activations are while they are not needed; None: in memory
    tokens  how many it has
    held    whether its tokens are held back; None: spans of them are, see `hessian`
    """

    x: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    items: int | None = None
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    store: ActivationStore | None = None
    held: bool | None = None
    tokens: int = 0

    def run(self, block: nn.Module) -> Any:
        if self.named:
            return block(**self.kwargs)
        return block(self.value(), *self.args, **self.kwargs)

    def value(self) -> Any:
        return self.x.value() if isinstance(self.x, StoredActivation) else self.x

    def select_block(self, block: int) -> None:
        """Take the other arguments of the block with this number."""
        self.args, self.kwargs = self.calls[block]

    def advance(self, output: Any) -> None:
        """Make a block's output the next block's input."""
        if isinstance(self.x, StoredActivation):
            self.x.drop()
        self.x = self.keep(first_of(output))

    def keep(self, x: torch.Tensor) -> StoredActivation:
        """A tensor that is needed later."""
        return StoredActivation(x, self.store)

    def copy(self) -> Self:
        """The same inputs, to go through other blocks."""
        return replace(self, x=self.keep(self.value()))


class StopForward(Exception):
    """Ends a forward pass whose rest is not needed."""


def first_of(output: Any) -> Any:
    """The next block's input, of what a block returns."""
    return output[0] if isinstance(output, tuple) else output


def as_returned(x: torch.Tensor, items: int | None) -> Any:
    """`first_of` undone, see `BlockInputs.items`; the other items are None."""
    return x if items is None else (x, *[None] * (items - 1))


def first_inputs(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Iterable[torch.Tensor], store: ActivationStore
) -> list[BlockInputs]:
    """The blocks' inputs, batch by batch. Blocks do not run: each returns the first one's input.

    Only the first one runs, once: whether blocks return tuples depends on the model and on transformers' version.
    """
    run = blocks[0].forward
    items: int | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    first: list[torch.Tensor] = []
    inputs: list[BlockInputs] = []

    def replacement(number: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = args[0] if args else kwargs.pop("hidden_states")
            if not number:
                first.append(x)
                if not inputs:
                    nonlocal items
                    with torch.no_grad():
                        output = run(*args, **kwargs) if args else run(x, **kwargs)
                    items = len(output) if isinstance(output, tuple) else None
            known = inputs[0].calls[number][1] if inputs else calls[-1][1] if calls else {}
            kwargs = {k: _one(v, known.get(k)) for k, v in kwargs.items() if "past_key_value" not in k}
            calls.append((args[1:], kwargs | {"use_cache": False} if "use_cache" in kwargs else kwargs))
            if number + 1 == len(blocks):
                raise StopForward
            return as_returned(first[0], items)

        return forward

    for number, block in enumerate(blocks):
        block.forward = replacement(number)
    try:
        device = next(p.device for p in model.parameters() if p.device.type != "meta")
        for tokens in batches:
            with suppress(StopForward):
                model(tokens.to(device), use_cache=False)
            inputs.append(BlockInputs(None, items=items, calls=calls, store=store, tokens=tokens.numel()))
            inputs[-1].advance(first[0])
            calls, first = [], []
    finally:
        for block in blocks:
            del block.forward
    return inputs


def embedded(model: nn.Module, blocks: Sequence[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """The first block's input [sequences, length, hidden]; no block runs, and none needs its weights."""
    device = next(p.device for p in model.parameters() if p.device.type != "meta")
    return _input_of(blocks[0], lambda: model(tokens.to(device), use_cache=False))


def _input_of(module: nn.Module, forward: Callable[[], Any]) -> torch.Tensor:
    """What a forward pass calls this module with. The module does not run, and the pass ends there."""
    inputs: list[torch.Tensor] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        raise StopForward

    with module.register_forward_pre_hook(note, with_kwargs=True), suppress(StopForward):
        forward()
    return inputs[0]


def set_embeddings(model: Any, values: Iterable[torch.Tensor]) -> bool:
    """Replace the embeddings by float [rows, hidden], some rows after the others; False if there are none."""
    weight, start = model.get_input_embeddings().weight.data, 0
    for rows in values:
        weight[start : start + len(rows)] = rows.to(weight)
        start += len(rows)
    return start > 0


def after_blocks(
    model: Any, blocks: Sequence[nn.Module], tokens: torch.Tensor, x: torch.Tensor, items: int | None
) -> Any:
    """The model's output, given the last block's x [sequences, length, hidden]. No block runs; gradients pass."""
    for block in blocks:
        block.forward = lambda *args, **kwargs: as_returned(x, items)  # type: ignore[method-assign]
    try:
        return model(tokens.to(x.device), use_cache=False)
    finally:
        for block in blocks:
            del block.forward


def _one(value: Any, known: Any) -> Any:
    """`known` if it equals `value`: a mask is kept once, not for every batch."""
    if isinstance(value, tuple) and isinstance(known, tuple) and len(value) == len(known):
        return tuple(map(_one, value, known))
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.dtype == known.dtype:
        return known if torch.equal(value, known) else value
    return value


def is_layer(module: nn.Module) -> bool:
    """Whether `matrix`, `set_matrix` and `vectors` support this kind of module."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix(module: nn.Module) -> torch.Tensor:
    """The weights as float32 [out, columns], a copy."""
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
    weight = weight.T if _is_conv1d(module) else weight.flatten(1)
    return weight.to(torch.float32, copy=True).contiguous()


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """(out, columns) of `matrix`."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
    return (columns, rows) if _is_conv1d(module) else (rows, columns)


def set_matrix(module: nn.Module, values: torch.Tensor) -> None:
    """Replace the weights by float [out, columns]."""
    module.weight.data.copy_(as_weight(module, values))  # type: ignore[union-attr, operator]


def as_weight(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Float [out, columns] in the shape of the module's weights."""
    return (values.T if _is_conv1d(module) else values).reshape(module.weight.shape)  # type: ignore[union-attr, arg-type]


def vectors(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A module's input as vectors [tokens, columns], which its matrix multiplies."""
    if isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str)
        images = x if x.ndim == 4 else x[None]
        patches = nn.functional.unfold(images, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).flatten(0, 1)
    return x.reshape(-1, x.shape[-1])


def head_of(model: Any) -> tuple[str, nn.Module]:
    """The name and the module of the output head."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head), head


def head_hessian(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    batches: Iterable[torch.Tensor],
    items: int | None,
    outputs: Iterable[torch.Tensor],
    float_outputs: Iterable[torch.Tensor] | None = None,
    first: int = 0,
) -> Hessian:
    """The Hessian of the head's inputs. Neither blocks nor the head need their weights.

    batches        tokens int [sequences, length]
    items          of the blocks' `BlockInputs`
    outputs        the last block's, for each batch
    float_outputs  the same of the float model, for the cross term
    first          how many tokens of the text come before these
    """
    name, head = head_of(model)
    hessian: Hessian | None = None
    floats = None if float_outputs is None else iter(float_outputs)

    def inputs(tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _input_of(head, lambda: after_blocks(model, blocks, tokens, x, items))

    for tokens, x in zip(batches, outputs, strict=True):
        head_inputs = inputs(tokens, x)
        if hessian is None:
            hessian = Hessian(name, head_inputs.shape[-1], head_inputs.device, first)
        hessian.add(head_inputs, None if floats is None else inputs(tokens, next(floats)))
    assert hessian is not None
    return hessian
