"""Passes of a few tokens through a whole model, one block in memory at a time: forward to logits, and backward.

A forward pass keeps each block's inputs, [tokens, hidden]. From these a later pass can start at any block, and
gradients are propagated back block by block, running each again. With the inputs on disk, memory holds one block, the
inputs and gradients of one, and where the logits are needed the embeddings and the head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.errors import BridgeError
from bridge.quantize.model import block_inputs
from bridge.quantize.model.activations import ActivationStore, StoredActivation
from bridge.quantize.model.block_inputs import BlockInputs, after_blocks, first_inputs, first_of, is_layer, vectors
from bridge.quantize.model.embeddings import embeddings_matrix
from bridge.quantize.model.experts import SeparateExperts, expert_of, expert_pattern
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.model.stored_inputs import StoredInputs
from bridge.quantize.model.streamed_model import loaded
from bridge.quantize.solve.hessian import Hessian, held_back
from bridge.quantize.solve.two_sided import ROWS, OutputHessian, some_outputs

# (a layer's name in the checkpoint, its module) -> other weights, float32 [out, columns]; None: its own
OtherWeights = Callable[[str, nn.Module], torch.Tensor | None]
# (`expert_pattern` of a layer's name, |g| of each token float32 [tokens])
KeepNorms = Callable[[str, torch.Tensor], None]


ALL = slice(None)
LOGITS = 1 << 26  # at a time: several copies of them, 256 MB each, are alive in the backward pass


def sequences_at_once(model: FloatModel, length: int) -> int:
    """How many sequences of a length pass through a model together."""
    return max(1, min(4096, max(1, LOGITS // model.vocabulary)) // length)


def drawn(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token of each row, int64 [rows, 1], drawn by these weights, float32 [rows, vocabulary], not all 0.

    By one random number a row: torch.multinomial takes one for each word, which is most of a pass through a head.
    """
    up_to = weights.cumsum(-1)
    points = torch.rand(len(weights), 1, generator=generator).to(up_to) * up_to[:, -1:]
    return torch.searchsorted(up_to, points, right=True).clamp_(max=weights.shape[1] - 1)


def output_hessians(
    model: FloatModel,
    tokens: torch.Tensor,
    store: ActivationStore,
    first: int = 0,
    resume: StoredInputs | None = None,
    held: torch.Tensor | None = None,
    norms: KeepNorms | None = None,
    products: bool = True,
) -> Iterator[tuple[str, OutputHessian]]:
    """A of each layer that tokens reach, last first, as `two_sided.round_two_sided` takes it; then `embeddings_matrix`.

    tokens    int64 [sequences, length], all or a part of them
    store     for activations
    first     the number of the first batch, of `sequences_at_once` each, among those of all parts
    resume    where the gradients are kept at the inputs of the block that was finished last. Layers from this block on
              were in an earlier run's answer
    held      bool [tokens]: which are held back, see `OutputHessian`; None: spans of them
    norms     is given those of the layers' gradients, see `Passes.output_products`
    products  False: without A, which has no blocks then, and without the embeddings
    """
    with torch.no_grad():
        passes = Passes(model, tokens, sequences_at_once(model, tokens.shape[1]), store, first, held)
        embeddings, head = model.embedding_and_head()
        as_head = (passes.head_hessian(), passes.head_gradients()) if products and embeddings == head else None
    for name, outputs in passes.output_products(ROWS if products else 0, resume=resume, norms=norms):
        if name == embeddings:
            yield name, OutputHessian(embeddings_matrix(outputs.blocks[0] * outputs.scale, as_head)[None])
        elif not products or outputs.blocks.diagonal(dim1=1, dim2=2).any():
            yield name, outputs


@dataclass
class Passes:
    """Token sequences int64 [sequences, length] and a model; see the module's docstring.

    store   for the activations between blocks; None: they stay in memory
    first   the number of the first batch, which decides what tokens are drawn
    held    bool [tokens]: which are held back; None: spans of them
    calls   the blocks' arguments, for each batch
    inputs  [block][batch]: each block's inputs in the float model; after the last block, its outputs
    room    whether memory is left for a block that stays loaded, asked after each pass through one

    The embeddings and the head are loaded afterwards.
    """

    model: FloatModel
    tokens: torch.Tensor
    batch: int
    store: ActivationStore | None = None
    first: int = 0
    held: torch.Tensor | None = None
    room: Callable[[], bool] = lambda: False
    _gradients: list[torch.Tensor] | None = None  # at the last block's outputs, until `output_products` takes them
    _predicted: torch.Tensor | None = None  # sum of p (1 - p) over the tokens, float64 [vocabulary]

    def __post_init__(self) -> None:
        self.batches = self.tokens.split(self.batch)
        with loaded(self.model, None, 0):
            self.calls = first_inputs(self.model.model, self.model.blocks, self.batches, ActivationStore(None))
        self.inputs = [[self.keep(call.value()) for call in self.calls]]
        for call in self.calls:
            call.x = None
        self.inputs += self.outputs(0, self.inputs[0], keep=self.keep)
        self.load_embedding_and_head()

    def load_embedding_and_head(self) -> None:
        """Load everything outside the blocks, which `quantize_model` frees."""
        self.model.load(None)
        self.model.load_head()

    def embedded(self) -> list[torch.Tensor]:
        """The first block's inputs, from the present embeddings."""
        return [block_inputs.embedded(self.model.model, self.model.blocks, batch) for batch in self.batches]

    @torch.no_grad()
    def outputs(
        self,
        first: int,
        x: Sequence[Any],
        weights: OtherWeights = lambda name, module: None,
        keep: Callable[[torch.Tensor], Any] = lambda x: x,
        some: slice = ALL,
    ) -> list[list[Any]]:
        """The outputs of each block from `first` on, whose inputs are x of each batch, or of some batches."""
        calls, outputs = self.calls[some], []
        for i in range(first, len(self.model.blocks)):
            block = self.model.blocks[i]
            self.model.load(i)
            try:
                with ExitStack() as stack:
                    for name, module in self.layers(i):
                        values = weights(name, module)
                        if values is not None:
                            stack.enter_context(self.changed(module, values))
                    x = [keep(self._call(i, block, call, inputs)) for call, inputs in zip(calls, x, strict=True)]
            finally:
                if not self.room():
                    self.model.drop(i)
            outputs.append(list(x))
        return outputs

    def keep(self, x: torch.Tensor) -> Any:
        """Activations in the store, where there is one."""
        return x.cpu() if self.store is None else StoredActivation(x, self.store)

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
        original = module.weight
        module.weight = nn.Parameter(block_inputs.as_weight(module, values).to(self.model.dtype), requires_grad=False)
        try:
            yield
        finally:
            module.weight = original

    def _call(self, number: int, block: nn.Module, call: BlockInputs, x: Any) -> torch.Tensor:
        call.select_block(number)
        call.x = _value(x).to(self.model.device)
        try:
            output = first_of(call.run(block))
        finally:
            call.x = None
        if not torch.isfinite(output).all():
            raise BridgeError(
                f"{self.model.prefix}.{number}: its outputs hold NaN or infinity on the calibration text; "
                "its layers overflow, or the checkpoint is damaged"
            )
        return output

    def output_products(
        self, rows: int, resume: StoredInputs | None = None, norms: KeepNorms | None = None
    ) -> Iterator[tuple[str, OutputHessian]]:
        """A of each layer, last first, then of the embeddings: the mean of g g^T / |g|, times that of |g|.

        g is the gradient of log p(token), token drawn from the model's own prediction, summed over a sequence's
        positions; products are summed over the tokens that reach the layer and divided by all. With errors e in the
        outputs the mean KL divergence becomes  (g e)^2 / 2  (Fisher information). One root of each token's |g|^2 is
        left to H of the inputs, see `token_weights`.

        Diagonal blocks of at most so many rows; 0 beyond the last block's rows. Of the embeddings, all of it. The
        embeddings and the head are freed before the first of them, and each block's inputs after it if they are in a
        store. `resume` as in `output_hessians`.

        rows   0: none of these; no block for each layer, and nothing for the embeddings
        norms  is given |g| of each token, once for the experts of a mixture: of g at the mixture's outputs. A layer
               that is called with other vectors than one for each token has none
        """
        done = resume.block(len(self.batches), False) if resume is not None else 0
        if resume is not None and done:
            gradients = [resume.read(done, batch, False) for batch in range(len(self.batches))]
        else:
            gradients = self._gradients or self._last_gradients()
        self._gradients = None
        self.model.drop(None)
        self.model.drop_head()
        end = done or len(self.model.blocks)
        if self.store is not None:
            while len(self.inputs) > end:
                for activation in self.inputs.pop():
                    activation.drop()
        for i in reversed(range(end)):
            yield from self._backward(i, rows, gradients, norms, forget=self.store is not None)
            if resume is not None and i:
                for batch, gradient in enumerate(gradients):
                    resume.write(i, batch, False, gradient)
                resume.finish(i)
        if rows:
            embeddings = _OutputGradients(gradients[0].shape[-1])  # no tokens of it are held back
            for gradient in gradients:
                embeddings.add(gradient.to(self.model.device).flatten(0, -2))
            yield self.model.embedding_and_head()[0], embeddings.mean(self.tokens.numel())

    def _backward(
        self, number: int, rows: int, gradients: list[torch.Tensor], norms: KeepNorms | None, forget: bool = False
    ) -> Iterator[tuple[str, OutputHessian]]:
        """`output_products` of a block; `gradients` at its outputs, by batch, become those at its inputs."""
        gathered: dict[str, _OutputGradients] = {}
        of_tokens: dict[str, _OutputGradients] = {}  # by pattern
        with ExitStack() as stack:
            stack.enter_context(loaded(self.model, number))
            for name, module in self.layers(number):
                gathered[name] = _OutputGradients(rows, None if expert_of(name) else self.held)
                if not expert_of(name):
                    of_tokens[name] = gathered[name]
                stack.enter_context(module.register_forward_hook(partial(_gather, gathered[name])))
            for module in self.model.blocks[number].modules():
                if isinstance(module, SeparateExperts):
                    every = _OutputGradients(0)
                    inside = set(module.modules())
                    of_tokens |= {expert_pattern(name): every for name, layer in self.layers(number) if layer in inside}
                    stack.enter_context(module.register_forward_hook(partial(_gather, every)))
            for b, call in enumerate(self.calls):
                x = _value(self.inputs[number][b]).detach().to(self.model.device).requires_grad_()
                with torch.enable_grad():
                    self._call(number, self.model.blocks[number], call, x).backward(gradients[b].to(self.model.device))
                assert x.grad is not None
                gradients[b] = x.grad.cpu()
                if forget:
                    self.inputs[number][b].drop()
        for name, sums in of_tokens.items():
            if norms is not None and sums.tokens == self.tokens.numel():
                norms(name, torch.cat(sums.norms).cpu())
        for name in [name for name, sums in gathered.items() if sums.norms]:
            yield name, gathered.pop(name).mean(self.tokens.numel())

    def head_gradients(self) -> torch.Tensor:
        """The mean squared gradients of the output head's outputs, float64 [out]: of p (1 - p), without drawing."""
        if self._predicted is None:
            self._gradients = self._last_gradients()
        assert self._predicted is not None
        return self._predicted / self.tokens.numel()

    @torch.no_grad()
    def head_hessian(self) -> Hessian:
        last = (_value(x).to(self.model.device) for x in self.inputs[-1])
        return block_inputs.head_hessian(self.model.model, self.model.blocks, self.batches, self.calls[0].items, last)

    def _last_gradients(self) -> list[torch.Tensor]:
        """By batch, the gradients at the last block's outputs; sets what `head_gradients` returns."""
        self._predicted = torch.zeros(self.model.vocabulary, dtype=torch.float64, device=self.model.device)
        generators = (torch.Generator().manual_seed(self.first + b) for b in range(len(self.batches)))
        return [self._last_gradient(batch, generator) for batch, generator in enumerate(generators)]

    def _last_gradient(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        x = _value(self.inputs[-1][batch]).detach().to(self.model.device).requires_grad_()
        # some positions at a time: the logits of all would take several times 4 bytes for each and word
        step = max(1, LOGITS // (self.model.vocabulary * len(x)))
        head = block_inputs.head_of(self.model.model)[1]
        for start in range(0, x.shape[1], step):
            hook = partial(_with_positions, slice(start, start + step))
            with torch.enable_grad(), head.register_forward_pre_hook(hook):
                logits = self.logits(batch, x)
            p = logits.detach().softmax(-1).flatten(0, 1)
            self._predicted += p.sum(0) - p.square().sum(0)
            chosen = drawn(p, generator)
            of_logits = p.neg_().scatter_add_(1, chosen, torch.ones_like(chosen, dtype=p.dtype))
            logits.backward(of_logits.view_as(logits))
        assert x.grad is not None
        return x.grad.cpu()


def _value(x: Any) -> torch.Tensor:
    return x.value() if isinstance(x, StoredActivation) else x


class _OutputGradients:
    """What is gathered of the gradients at a layer's outputs.

    rows      of the products' blocks; 0: no products
    held      bool [tokens]: which are held back; None: spans of those that are seen
    norms     |g|, float32 [tokens] of each call
    powers    |x|^2 of the inputs, likewise
    products  sums of g g^T / |g|, float32 [blocks, rows, rows]
    """

    def __init__(self, rows: int, held: torch.Tensor | None = None) -> None:
        self.rows, self.held = rows, held
        self.norms: list[torch.Tensor] = []
        self.powers: list[torch.Tensor] = []
        self.tokens = self.held_tokens = 0
        self.products: torch.Tensor | None = None
        self.held_products: torch.Tensor | None = None

    def add(self, gradients: torch.Tensor) -> None:
        """Add those of some tokens, [tokens, out]."""
        dtype, gradients = gradients.dtype, gradients.float()
        norms = torch.linalg.vector_norm(gradients, dim=1)
        first, self.tokens = self.tokens, self.tokens + len(norms)
        self.norms.append(norms)
        if not self.rows:
            return
        size = min(self.rows, gradients.shape[1])
        halved = gradients / norms.sqrt().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        padded = nn.functional.pad(halved, (0, -gradients.shape[1] % size)).to(dtype)  # no more exact than they came
        parts = padded.unflatten(1, (-1, size)).transpose(0, 1)
        those = held_back(first, len(norms)) if self.held is None else self.held[first : self.tokens]
        if self.products is None or self.held_products is None:
            self.products = gradients.new_zeros(len(parts), size, size)
            some = parts[0, 0, some_outputs(size)]
            self.held_products = gradients.new_zeros(len(some), len(some))
        self.products += parts.mT @ parts
        if len(those) == len(norms):
            held = parts[0][those.to(parts.device)][:, some_outputs(size)]
            self.held_products += held.T @ held
            self.held_tokens += len(held)

    def mean(self, tokens: int) -> OutputHessian:
        """A: the sum of the products over all tokens, of which there are so many, times the mean norm of those seen."""
        if self.products is None or self.held_products is None:
            return OutputHessian(torch.empty(0))
        norms = torch.cat(self.norms).double()
        powers = torch.cat(self.powers).double() if self.powers else torch.ones_like(norms)
        norm, power = float(norms.mean()), float(powers.mean())
        scale = float((norms.square() * powers).mean()) / (norm**2 * power) if norm and power else 1.0
        blocks = self.products.mul_(norm / tokens)
        if not self.held_tokens:
            return OutputHessian(blocks, scale=scale)
        held = self.held_products.mul_(norm * self.tokens / (tokens * self.held_tokens))
        return OutputHessian(blocks, held, self.held_tokens / self.tokens, scale)


def _with_positions(positions: slice, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before the head, which sees only these positions of a sequence."""
    return args[0][:, positions], *args[1:]


def _gather(sums: _OutputGradients, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    """A forward hook that adds the gradients of a module's outputs."""
    if output.requires_grad:
        if is_layer(module):
            sums.powers.append(vectors(module, args[0].detach()).float().square().sum(1))
        output.register_hook(lambda gradient: sums.add(gradient.reshape(-1, gradient.shape[-1])))
