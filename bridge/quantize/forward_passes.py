"""Passes of a few tokens through a whole model, one block in memory at a time: forward to logits, and backward.

A forward pass keeps each block's inputs, [tokens, hidden]. From these a later pass can start at any block, and
gradients are propagated back block by block, running each again. With the inputs on disk, memory holds one block, the
inputs and gradients of one, and where the logits are needed the embeddings and the head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.activations import Kept, Resumption, Shelf
from bridge.quantize.block_inputs import (
    BlockInputs,
    after_blocks,
    as_weight,
    embedded,
    first_inputs,
    first_of,
    head_hessian,
    head_of,
    is_layer,
)
from bridge.quantize.embeddings import embeddings_matrix
from bridge.quantize.float_model import FloatModel
from bridge.quantize.hessian import Hessian
from bridge.quantize.two_sided import ROWS

# (a layer's name in the checkpoint, its module) -> other weights, float32 [out, columns]; None: its own
OtherWeights = Callable[[str, nn.Module], torch.Tensor | None]


TOKENS_FELT = 1 << 15
ALL = slice(None)
LOGITS = 1 << 26  # at a time: several copies of them, 256 MB each, are alive in the backward pass


def sequences_at_once(model: FloatModel, length: int) -> int:
    """How many sequences of a length pass through a model together."""
    return max(1, min(4096, max(1, LOGITS // model.vocabulary)) // length)


def tokens_felt(tokens: torch.Tensor) -> torch.Tensor:
    """The sequences whose gradients are taken: of more than 32,768 tokens, some."""
    return tokens[:: -(-tokens.numel() // TOKENS_FELT)]


def output_hessians(
    model: FloatModel, tokens: torch.Tensor, shelf: Shelf, first: int = 0, resume: Resumption | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A of each layer that tokens reach, last first, as `two_sided.round_two_sided` takes it; then `embeddings_matrix`.

    tokens  int64 [sequences, length], those of `tokens_felt` or a part of them
    shelf   for activations
    first   the number of the first batch, of `sequences_at_once` each, among those of all parts
    resume  where the gradients are kept at the inputs of the block that was finished last. Layers from this block on
            were in an earlier run's answer
    """
    with torch.no_grad():
        passes = Passes(model, tokens, sequences_at_once(model, tokens.shape[1]), shelf, first)
        embeddings, head = model.embedding_and_head()
        as_head = (passes.head_hessian(), passes.head_gradients()) if embeddings == head else None
    for name, outputs in passes.output_products(ROWS, resume=resume):
        if name == embeddings:
            yield name, embeddings_matrix(outputs[0], as_head)[None]
        elif outputs.diagonal(dim1=1, dim2=2).any():
            yield name, outputs


@dataclass
class Passes:
    """Token sequences int64 [sequences, length] and a model; see the module's docstring.

    shelf   for the activations between blocks; None: they stay in memory
    first   the number of the first batch, which decides what tokens are drawn
    calls   the blocks' arguments, for each batch
    inputs  [block][batch]: each block's inputs in the float model; after the last block, its outputs
    room    whether memory is left for a block that stays loaded, asked after each pass through one

    The embeddings and the head are loaded afterwards.
    """

    model: FloatModel
    tokens: torch.Tensor
    batch: int
    shelf: Shelf | None = None
    first: int = 0
    room: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.batches = self.tokens.split(self.batch)
        self.model.load(None)
        self.calls = self._first_inputs()
        self.model.drop(None)
        self.inputs = [[self.kept(call.value()) for call in self.calls]]
        for call in self.calls:
            call.x = None
        self.inputs += self.outputs(0, self.inputs[0], kept=self.kept)
        self.load_embedding_and_head()

    def load_embedding_and_head(self) -> None:
        """Load everything outside the blocks, which `quantize_model` frees."""
        self.model.load(None)
        self.model.load_head()

    def embedded(self) -> list[torch.Tensor]:
        """The first block's inputs, from the present embeddings."""
        return [embedded(self.model.model, self.model.blocks, batch) for batch in self.batches]

    def _first_inputs(self) -> list[BlockInputs]:
        self.model.load(0)
        try:
            return first_inputs(self.model.model, self.model.blocks, self.batches, Shelf(None))
        finally:
            self._drop(0)

    @torch.no_grad()
    def outputs(
        self,
        first: int,
        x: Sequence[Any],
        weights: OtherWeights = lambda name, module: None,
        kept: Callable[[torch.Tensor], Any] = lambda x: x,
        some: slice = ALL,
    ) -> list[list[Any]]:
        """The outputs of each block from `first` on, whose inputs are x of each batch, or of some batches."""
        calls, found = self.calls[some], []
        for i in range(first, len(self.model.blocks)):
            block = self.model.blocks[i]
            self.model.load(i)
            try:
                with ExitStack() as stack:
                    for name, module in self.layers(i):
                        values = weights(name, module)
                        if values is not None:
                            stack.enter_context(self.changed(module, values))
                    x = [kept(self._call(i, block, call, own)) for call, own in zip(calls, x, strict=True)]
            finally:
                self._drop(i)
            found.append(list(x))
        return found

    def _drop(self, block: int) -> None:
        """Free a block's weights where memory is short; they may be needed again."""
        if not self.room():
            self.model.drop(block)

    def kept(self, x: torch.Tensor) -> Any:
        """Activations on the shelf, where there is one."""
        return x.cpu() if self.shelf is None else Kept(x, self.shelf)

    def layers(self, block: int) -> Iterator[tuple[str, nn.Module]]:
        """A block's layers by their names in the checkpoint."""
        for name, module in self.model.blocks[block].named_modules():
            if is_layer(module):
                yield self.model.name(f"{self.model.prefix}.{block}.{name}"), module

    def logits(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """[sequences, length, vocabulary] for the last block's outputs of a batch; gradients pass."""
        items, x = self.calls[batch].items, x.to(self.model.device)
        return after_blocks(self.model.model, self.model.blocks, self.batches[batch], x, items).logits.float()

    @contextmanager
    def changed(self, module: nn.Module, values: torch.Tensor) -> Iterator[None]:
        """Replace a layer's weights, or those of the embeddings or the head, by float32 [out, columns] meanwhile."""
        kept = module.weight
        module.weight = nn.Parameter(as_weight(module, values).to(self.model.dtype), requires_grad=False)
        try:
            yield
        finally:
            module.weight = kept

    def _call(self, number: int, block: nn.Module, call: BlockInputs, x: Any) -> torch.Tensor:
        call.select_block(number)
        call.x = _value(x).to(self.model.device)
        try:
            found = first_of(call.run(block))
        finally:
            call.x = None
        if not torch.isfinite(found).all():
            raise BridgeError(
                f"{self.model.prefix}.{number}: its outputs hold NaN or infinity on the calibration text; "
                "its layers overflow, or the checkpoint is damaged"
            )
        return found

    def output_products(
        self, rows: int, seed: int = 0, resume: Resumption | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A of each layer, last first, then of the embeddings: the mean of g g^T, see `two_sided`.

        g is the gradient of log p(token), token drawn from the model's own prediction, summed over a sequence's
        positions; products are summed over the tokens that reach the layer and divided by all. So with errors e in the
        outputs the mean KL divergence becomes  (g e)^2 / 2  (Fisher information).

        Diagonal blocks of at most so many rows, float32 [blocks, rows, rows]; 0 beyond the last block's rows. Of the
        embeddings, all of it: [1, hidden, hidden]. The embeddings and the head are freed before the first of them, and
        each block's inputs after it if on a shelf. `resume` as in `output_hessians`.
        """

        def products(gradient: torch.Tensor) -> torch.Tensor:
            size = min(rows, gradient.shape[1])
            parts = nn.functional.pad(gradient.float(), (0, -gradient.shape[1] % size)).unflatten(1, (-1, size))
            return torch.einsum("tbi,tbj->bij", parts, parts)

        done = resume.block(len(self.batches), False) if resume is not None else 0
        if resume is not None and done:
            gradients = [resume.read(done, batch, False) for batch in range(len(self.batches))]
        else:
            gradients = self._last_gradients(seed)
        self.model.drop(None)
        self.model.drop_head()
        end = done or len(self.model.blocks)
        if self.shelf is not None:
            while len(self.inputs) > end:
                for kept in self.inputs.pop():
                    kept.drop()
        for i in reversed(range(end)):
            yield from self._backward(i, products, gradients, forget=self.shelf is not None)
            if resume is not None and i:
                for batch, gradient in enumerate(gradients):
                    resume.write(i, batch, False, gradient)
                resume.finish(i)
        hidden = gradients[0].shape[-1]
        total = torch.zeros(hidden, hidden, device=self.model.device)
        for gradient in gradients:
            own = gradient.to(total).flatten(0, -2)
            total.addmm_(own.T, own)
        yield self.model.embedding_and_head()[0], total[None] / self.tokens.numel()

    def _backward(
        self,
        number: int,
        of: Callable[[torch.Tensor], torch.Tensor],
        gradients: list[torch.Tensor],
        forget: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By layer of a block, the mean over the tokens of what is made `of` gradients [tokens, out].

        gradients  by batch, at the block's outputs; afterwards those at its inputs
        forget     free the block's inputs
        """
        self.model.load(number)
        sums: dict[str, torch.Tensor] = {}
        hooks = [module.register_forward_hook(_adding(name, sums, of)) for name, module in self.layers(number)]
        try:
            for b, call in enumerate(self.calls):
                x = _value(self.inputs[number][b]).detach().to(self.model.device).requires_grad_()
                with torch.enable_grad():
                    self._call(number, self.model.blocks[number], call, x).backward(gradients[b].to(self.model.device))
                assert x.grad is not None
                gradients[b] = x.grad.cpu()
                if forget:
                    self.inputs[number][b].drop()
        finally:
            for hook in hooks:
                hook.remove()
            self.model.drop(number)
        for name in list(sums):
            yield name, sums.pop(name).div_(self.tokens.numel())

    @torch.no_grad()
    def head_gradients(self) -> torch.Tensor:
        """The mean squared gradients of the output head's outputs, float64 [out]: of p (1 - p), without drawing."""
        total = torch.zeros(self.model.vocabulary, dtype=torch.float64, device=self.model.device)
        for batch, kept in enumerate(self.inputs[-1]):
            x = _value(kept)
            for positions in self._spans(x):
                with self._positions(positions):
                    p = self.logits(batch, x).softmax(-1)
                total += (p - p.square()).sum((0, 1), dtype=torch.float64)
        return total / self.tokens.numel()

    @torch.no_grad()
    def head_hessian(self) -> Hessian:
        """The Hessian of the output head's inputs."""
        last = (_value(x).to(self.model.device) for x in self.inputs[-1])
        return head_hessian(self.model.model, self.model.blocks, self.batches, self.calls[0].items, last)

    def _last_gradients(self, seed: int) -> list[torch.Tensor]:
        """By batch, the gradients at the last block's outputs."""
        generators = (torch.Generator().manual_seed(seed + self.first + b) for b in range(len(self.batches)))
        return [self._last_gradient(batch, generator) for batch, generator in enumerate(generators)]

    def _last_gradient(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        x = _value(self.inputs[-1][batch]).detach().to(self.model.device).requires_grad_()
        for positions in self._spans(x):
            with torch.enable_grad(), self._positions(positions):
                scores = self.logits(batch, x).log_softmax(-1).flatten(0, 1)
                drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator).to(scores.device)
                scores.gather(1, drawn).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    def _spans(self, x: torch.Tensor) -> Iterator[slice]:
        """Some positions at a time: the logits of all would take several times 4 bytes for each and word."""
        step = max(1, LOGITS // (self.model.vocabulary * len(x)))
        for at in range(0, x.shape[1], step):
            yield slice(at, at + step)

    @contextmanager
    def _positions(self, positions: slice) -> Iterator[None]:
        """Have the head see only these positions of a sequence meanwhile."""
        head = head_of(self.model.model)[1]
        hook = head.register_forward_pre_hook(lambda _module, args: (args[0][:, positions], *args[1:]))
        try:
            yield
        finally:
            hook.remove()


def _value(x: Any) -> torch.Tensor:
    return x.value() if isinstance(x, Kept) else x


def _adding(
    name: str, sums: dict[str, torch.Tensor], of: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., None]:
    """A forward hook that adds what is made `of` the gradients of a layer's outputs to sums[name]."""

    def squares(gradient: torch.Tensor) -> None:
        own = of(gradient.reshape(-1, gradient.shape[-1]))
        sums[name] = sums[name] + own if name in sums else own

    def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(squares)

    return hook
