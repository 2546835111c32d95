"""Passes of a few tokens through a whole model, one block in memory at a time: forward to logits, and backward.

A forward pass keeps each block's inputs, [tokens, hidden]. From these a later pass can start at any block, and
gradients are propagated back block by block, running each again. With the inputs on disk, memory holds one block, the
inputs and gradients of one, and where the logits are needed the embeddings and the head.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.block_inputs import (
    BlockInputs,
    Shelf,
    after_blocks,
    as_weight,
    first_inputs,
    first_of,
    head_hessian,
    is_layer,
    save_activations,
)
from bridge.quantize.embeddings import embeddings_matrix
from bridge.quantize.float_model import FloatModel
from bridge.quantize.hessian import Hessian
from bridge.quantize.two_sided import ROWS

# (a layer's name in the checkpoint, its module) -> other weights, float32 [out, columns]; None: its own
OtherWeights = Callable[[str, nn.Module], torch.Tensor | None]


_TOKENS_FELT = 1 << 15
_LOGITS = 1 << 26  # at a time: several copies of them, 256 MB each, are alive in the backward pass


def sequences_at_once(model: FloatModel, length: int) -> int:
    """How many sequences of a length pass through a model together."""
    return max(1, min(4096, max(1, _LOGITS // model.vocabulary)) // length)


def output_hessians(
    model: FloatModel, tokens: torch.Tensor, folder: Path | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A of each layer that tokens reach, last first, as `two_sided.round_two_sided` takes it; then `embeddings_matrix`.

    tokens  int64 [sequences, length]; of more than 32,768 tokens, some sequences are taken
    folder  for activations, until all are found; None: in memory

    Activations are kept in bfloat16 if the checkpoint is in it.
    """
    tokens = tokens[:: -(-tokens.numel() // _TOKENS_FELT)]
    dtype = torch.bfloat16 if model.stored_in_bfloat16 else torch.float32
    activations = None if folder is None else folder / "activations"
    if activations is not None:
        activations.mkdir()
    try:
        with torch.no_grad():
            passes = Passes(model, tokens, sequences_at_once(model, tokens.shape[1]), activations, dtype)
            embeddings, head = model.embedding_and_head()
            as_head = (passes.head_hessian(), passes.head_gradients()) if embeddings == head else None
        for name, outputs in passes.output_products(ROWS):
            if name == embeddings:
                yield name, embeddings_matrix(outputs[0], as_head)[None]
            elif outputs.diagonal(dim1=1, dim2=2).any():
                yield name, outputs
    finally:
        if activations is not None:
            shutil.rmtree(activations, ignore_errors=True)


@dataclass
class Passes:
    """Token sequences int64 [sequences, length] and a model; see the module's docstring.

    folder  for the activations between blocks, which stay in memory without one
    dtype   of these activations
    calls   the blocks' arguments, for each batch
    inputs  [block][batch]: each block's inputs in the float model; after the last block, its outputs
    room    whether memory is left for a block that stays loaded, asked after each pass through one

    The embeddings and the head are loaded afterwards.
    """

    model: FloatModel
    tokens: torch.Tensor
    batch: int
    folder: Path | None = None
    dtype: torch.dtype = torch.float32
    room: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._files = 0
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
        return [f.value() for f in self._first_inputs()]

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
        x: Sequence[torch.Tensor],
        weights: OtherWeights = lambda name, module: None,
        kept: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> list[list[torch.Tensor]]:
        """The outputs of each block from `first` on, whose inputs are x of each batch."""
        found = []
        for i in range(first, len(self.model.blocks)):
            block = self.model.blocks[i]
            self.model.load(i)
            try:
                with ExitStack() as stack:
                    for name, module in self.layers(i):
                        values = weights(name, module)
                        if values is not None:
                            stack.enter_context(self.changed(module, values))
                    x = [kept(self._call(i, block, call, own)) for call, own in zip(self.calls, x, strict=True)]
            finally:
                self._drop(i)
            found.append(list(x))
        return found

    def _drop(self, block: int) -> None:
        """Free a block's weights where memory is short; they may be needed again."""
        if not self.room():
            self.model.drop(block)

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Activations in their dtype, in a file's pages where there is a folder."""
        x = x.to(self.dtype)
        if self.folder is None:
            return x
        self._files += 1
        return on_disk(x, self.folder / f"{self._files}.pt")

    def layers(self, block: int) -> Iterator[tuple[str, nn.Module]]:
        """A block's layers by their names in the checkpoint."""
        for name, module in self.model.blocks[block].named_modules():
            if is_layer(module):
                yield self.model.name(f"{self.model.prefix}.{block}.{name}"), module

    def logits(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """[sequences, length, vocabulary] for the last block's outputs of a batch; gradients pass."""
        items = self.calls[batch].items
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

    def _call(self, number: int, block: nn.Module, call: BlockInputs, x: torch.Tensor) -> torch.Tensor:
        call.select_block(number)
        call.x = x.to(self.model.dtype)
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

    def output_products(self, rows: int, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """A of each layer, last first, then of the embeddings: the mean of g g^T, see `two_sided`.

        g is the gradient of log p(token), token drawn from the model's own prediction, summed over a sequence's
        positions; products are summed over the tokens that reach the layer and divided by all. So with errors e in the
        outputs the mean KL divergence becomes  (g e)^2 / 2  (Fisher information).

        Diagonal blocks of at most so many rows, float32 [blocks, rows, rows]; 0 beyond the last block's rows. Of the
        embeddings, all of it: [1, hidden, hidden]. The embeddings and the head are freed before the first of them.
        """

        def products(gradient: torch.Tensor) -> torch.Tensor:
            size = min(rows, gradient.shape[1])
            parts = nn.functional.pad(gradient, (0, -gradient.shape[1] % size)).unflatten(1, (-1, size))
            return torch.einsum("tbi,tbj->bij", parts, parts)

        gradients = self._last_gradients(seed)
        self.model.drop(None)
        self.model.drop_head()
        yield from self._backward(products, gradients)
        whole = sum(g.flatten(0, -2).T @ g.flatten(0, -2) for g in gradients)
        yield self.model.embedding_and_head()[0], whole[None] / self.tokens.numel()

    def _backward(
        self, of: Callable[[torch.Tensor], torch.Tensor], gradients: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By layer, the mean over the tokens of what is made `of` gradients [tokens, out].

        gradients  by batch, at the last block's outputs; at the end those at the first one's inputs
        """
        total = self.tokens.numel()
        for i in reversed(range(len(self.model.blocks))):
            self.model.load(i)
            sums: dict[str, torch.Tensor] = {}
            hooks = [module.register_forward_hook(_adding(name, sums, of)) for name, module in self.layers(i)]
            try:
                for b, call in enumerate(self.calls):
                    x = self.inputs[i][b].detach().to(self.model.dtype).requires_grad_()
                    with torch.enable_grad():
                        self._call(i, self.model.blocks[i], call, x).backward(gradients[b])
                    assert x.grad is not None
                    gradients[b] = x.grad
            finally:
                for hook in hooks:
                    hook.remove()
                self.model.drop(i)
            for name in list(sums):
                yield name, sums.pop(name).div_(total)

    @torch.no_grad()
    def head_gradients(self) -> torch.Tensor:
        """The mean squared gradients of the output head's outputs, float64 [out]: of p (1 - p), without drawing."""
        sums = []
        for batch, x in enumerate(self.inputs[-1]):
            p = self.logits(batch, x).softmax(-1)
            sums.append((p - p.square()).sum((0, 1), dtype=torch.float64))
        return torch.stack(sums).sum(0) / self.tokens.numel()

    @torch.no_grad()
    def head_hessian(self) -> Hessian:
        """The Hessian of the output head's inputs."""
        return head_hessian(self.model.model, self.model.blocks, self.batches, self.calls[0].items, self.inputs[-1])

    def _last_gradients(self, seed: int) -> list[torch.Tensor]:
        """By batch, the gradients at the last block's outputs."""
        generator = torch.Generator().manual_seed(seed)
        return [self._last_gradient(batch, generator) for batch in range(len(self.batches))]

    def _last_gradient(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        x = self.inputs[-1][batch].detach().to(self.model.dtype).requires_grad_()
        with torch.enable_grad():
            scores = self.logits(batch, x).log_softmax(-1).flatten(0, 1)
            drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator).to(scores.device)
            scores.gather(1, drawn).sum().backward()
        assert x.grad is not None
        return x.grad


def on_disk(x: torch.Tensor, file: Path) -> torch.Tensor:
    """The same values in the pages of a file, which the system reads when they are needed."""
    save_activations(x, file)
    return torch.load(file, mmap=True, map_location=x.device, weights_only=True)


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
