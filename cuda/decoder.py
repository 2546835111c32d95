"""A decoder's layers on an NVIDIA GPU, with weights, cache and sampling there: twin of runtime/decoder/decoder.py.

The launches of a token (step.py) are captured in a CUDA graph once and replayed for every token; the next token is on
its way while the host reads the last one. Prompts go through the layers as matrices (prompt.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import numpy as np
from bridge.cuda import routed_experts
from bridge.cuda.attention import attention as attn
from bridge.cuda.attention.kv_cache import KVCache
from bridge.cuda.context_memory import ContextMemory
from bridge.cuda.forms.matrix import has_kernel
from bridge.cuda.norm import cap
from bridge.cuda.positions import position_bytes
from bridge.cuda.product.matmul import LENGTHS
from bridge.cuda.prompt import Prompt
from bridge.cuda.step import WIDEST, Step
from bridge.cuda.supported import check_supported
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain.compile_pool import compile_all
from bridge.cuda.toolchain.device import check_torch, upload
from bridge.cuda.toolchain.launch import captured, noted
from bridge.cuda.weights import DeviceWeights, matrices_of, matrix_bytes

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.layers import Weights
from bridge.runtime.layers.weights import check_context, read_weights
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.sampling import Sampler, Sampling, drawn_on_host, not_finite
from bridge.runtime.tokenizer import common_prefix
from bridge.system.progress import Bar

BATCHES = 2048, 1024, 512  # tokens of a prompt that pass through the layers together: as many as memory suffices for
_WORK = 400 << 20  # bytes that prompts, in the smallest batches, and graphs need besides weights and cache
_SCORED = 256  # positions whose logits are on the device at once
_GRAPHS = 4  # ways of sampling whose graphs are kept


class Decoder:
    """The layers of a GGUF with a cache of keys and values, on a device. Takes its memory in `prepare`.

    followed, given   as in runtime/decoder/decoder.py
    """

    graphs = True  # of steps; False: every launch by itself

    def __init__(
        self, file: GGUFFile, config: DecoderConfig, context: int, kv: str, precision: str, device: str,
        weights: Weights | None = None, other: Self | None = None,
    ):  # fmt: skip
        """`weights`: by default all of the file; `other`: a decoder that has uploaded some of them."""
        self._file, self.config, self.precision, self._other = file, config, precision, other
        self.device = devices.require(device)
        check_torch(self.device)
        check_supported(file, config, kv, precision)
        self._model = weights or read_weights(file, config)
        check_context(file, config, context)
        self.cache = KVCache(config, context, kv)
        self._prepared = False
        self._stream: Any = None  # of torch, where all work is queued and all memory allocated
        self.vocab = self._model.embedding.shape[0]
        there = [] if other is None else matrices_of(other._model)
        self.nbytes = matrix_bytes(self._model, config, precision, there) + self.cache.nbytes  # of weights and cache
        self.nbytes += position_bytes(config, self.cache.rows)
        with self._active():
            self.device.check_memory(self.nbytes + _WORK, f"{file.path} with a context of {context}")
            free = self.device.free() - self.nbytes
        *larger, self.batch = BATCHES
        for batch in reversed(larger):
            if work_bytes(config, context, batch, precision) <= free:
                self.batch = batch
        self.dependent = devices.overlaps(self.device)  # launches begin early; read by `build`
        self.preparing = 0.0  # unlike on the CPU, nothing is repacked between tokens
        self._tokens: list[int] = []  # that the cache holds; drawn ones only once the host has seen them
        self.followed = self.given = np.zeros((0, config.hidden), np.float32)
        self._following: dict[int, tuple[Step, Any]] = {}  # steps of so many tokens, and their graphs
        self._captured: dict[int | None, Any] = {}  # graphs, by the number of candidates; None: greedy
        self._samplers: dict[int | None, list[Callable[[], None]]] = {}

    def beside(self, config: DecoderConfig, weights: Weights) -> Self:
        """Another decoder, of some of the file's weights, beside what this one has uploaded."""
        self.prepare()
        context, kv = self.cache.context, self.cache.kind
        return type(self)(self._file, config, context, kv, self.precision, str(self.device), weights, self)

    def begin(self) -> None:
        """Get ready for tokens."""
        self.prepare()

    def prepare(self) -> None:
        """Upload everything and compile, once."""
        if self._prepared:
            return
        import torch

        other = None if self._other is None else self._other.weights
        with self._active():
            self.weights: DeviceWeights = DeviceWeights(self._model, self.config, self.device, self.precision, other)
            self.memory = ContextMemory(self.weights, self.cache)
            self._host = torch.zeros(self.cache.context + 1, dtype=torch.int32)
            if self.graphs:
                self._host = self._host.pin_memory()
        self.build()
        self._prepared = True

    def build(self) -> None:
        """Make the launches of a token, overlapping if `dependent`, and empty the cache."""
        self.cache.length = 0
        with self._active():
            self.step = Step(self.weights, self.memory, self.dependent)
            for of_the_last_step in (self._captured, self._samplers, self._following):
                of_the_last_step.clear()
            self._compile()
            self._ready(None)

    def _compile(self) -> None:
        """Compile what steps and prompts launch, or take it from the cache, all at once."""
        with noted() as kernels:
            ways = [self.step.choose(count) for count in (None, min(Sampling.top_k, self.vocab))]
            self.step.run()
            for launch in chain(*ways):
                launch()
            self.weights.multiply_lengths()
            alone = self.cache.state is not None  # a prompt's last token passes by itself
            for length in LENGTHS:
                count = min(length + alone, self.cache.context)
                if self._model.pairs is not None:
                    self.given = np.zeros((count, self.config.hidden), np.float32)
                self.scores([0] * count, 1)
        self.cache.length = 0
        self._compile_all(kernels)

    def _compile_all(self, kernels: Any) -> None:
        with Bar("compiling for the GPU", unit=" kernels") as bar:
            compile_all(kernels, self.device.capability, bar)

    def _ready(self, count: int | None) -> None:
        """Make steps with this sampling ready to launch; the first one is captured here."""
        if count not in self._samplers:
            if len(self._samplers) == _GRAPHS:
                oldest = next(key for key in self._samplers if key is not None)
                del self._samplers[oldest]
                self._captured.pop(oldest, None)
            self._samplers[count] = self.step.choose(count)
        if self.graphs and count not in self._captured:
            self._captured[count] = self._graph(self.step, lambda: self._launch(count))

    def _graph(self, step: Step, launch: Callable[[], None]) -> Any:
        """What launches the same; nothing changes but rows that are unused."""
        self._set_state(step, [0] * step.n)
        before = None if self.cache.state is None else self.cache.state.save()
        graph = captured(launch, step.state)
        if self.cache.state is not None:
            self.cache.state.restore(before)
        return graph

    def _step_of(self, n: int) -> tuple[Step, Any]:
        """The step of n tokens that leaves logits and states to the host, and its graph."""
        if n not in self._following:
            self.cache.reserve_step(n)
            step = self.step if n == 1 else Step(self.weights, self.memory, self.dependent, n)
            with noted() as kernels:
                step.run(states=True)
            self._compile_all(kernels)
            graph = self._graph(step, lambda: step.run(states=True)) if self.graphs else None
            self._following[n] = step, graph
        return self._following[n]

    def _launch(self, count: int | None) -> None:
        self.step.run()
        for launch in self._samplers[count]:
            launch()

    def _step(self, count: int | None) -> None:
        """state[TOKEN] goes through the layers, and the next token takes its place."""
        if self.graphs:
            self._captured[count].replay()
        else:
            self._launch(count)
        self.cache.advance(1)

    def _set_state(self, step: Step, tokens: Sequence[int], position: int | None = None) -> None:
        """Set the tokens of a step, and the first one's position, by default the next; none was drawn so far."""
        import torch

        words = torch.zeros((step.n, attn.STATE), dtype=torch.int32)
        first = self.cache.length if position is None else position
        words[:, attn.POSITION] = torch.arange(first, first + step.n)
        words[:, attn.TOKEN] = torch.tensor(tokens)
        step.state.copy_(words)

    # called by Model

    def scores(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, vocab] of the last `keep` tokens, from an empty context."""
        self.cache.length = 0
        with self._active():
            states = self._prompt(tokens, keep)
            # parts alike in size, so that all are computed in one way
            parts = states.tensor_split(-(-keep // _SCORED))
            return np.concatenate([self._logits(part).cpu().numpy() for part in parts])

    def states(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, hidden]: normalized hidden states of the last `keep` tokens, from an empty context."""
        self.cache.length = 0
        return self.run(tokens, keep)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        with self._active():
            return self._logits(upload(hidden, self.device)).cpu().numpy()

    def next_scores(self, token: int) -> np.ndarray:
        """float32 [vocab] after one more token."""
        return self.follow([token])[0]

    def run(self, tokens: Sequence[int], keep: int = 1) -> np.ndarray:
        """Append tokens to the cache: float32 [keep, hidden], normalized hidden states of the last `keep`."""
        with self._active():
            return np.concatenate([part.cpu().numpy() for part in self._parts(tokens, keep)])

    def follow(self, tokens: Sequence[int]) -> np.ndarray:
        """Append up to `room` tokens: float32 [n, vocab] of what follows each.

        Each is computed as by a step of its own, to the last bit.
        """
        with self._active():
            self.cache.settle()
            n = len(tokens)
            step, graph = self._step_of(n)
            self._set_state(step, tokens)
            if self._model.pairs is not None:
                step.given.copy_(upload(self._taken(n), self.device))
            self._tokens[self.cache.length :] = tokens
            step.run(states=True) if graph is None else graph.replay()
            self.cache.stepped(n)
            self.followed = step.states.cpu().numpy().copy()
            return step.logits.cpu().numpy().copy()

    def room(self) -> int:
        """The most tokens that `follow` takes."""
        return min(WIDEST, self.cache.context - self.cache.length)

    def multiplied_one_by_one(self) -> QuantTensor | None:
        """A matrix that has no kernel for several tokens whose sums are those of one, if most of the weights have none.

        torch multiplies such matrices with each token by itself.
        """
        matrices = [*(matrix for layer in self._model.layers for matrix in layer.matrices), self._model.output]
        without = [matrix for matrix in matrices if not has_kernel(matrix)]
        nbytes = sum(matrix.nbytes for matrix in matrices)
        return without[0] if 2 * sum(matrix.nbytes for matrix in without) > nbytes else None

    def _taken(self, n: int) -> np.ndarray:
        """The states that the next n tokens come with."""
        states, self.given = self.given[:n], self.given[n:]
        return states

    @property
    def read(self) -> list[int]:
        """The tokens that the cache holds."""
        return self._tokens[: self.cache.length]

    def kept(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens need not be read again."""
        return self.cache.reach(common_prefix(self.read, tokens))

    def draw(self, tokens: Sequence[int], sampler: Sampler, cached: int = 0) -> Iterator[int]:
        """Draw the tokens that follow, one by one, until the context is full; the cache holds the first `cached`.

        A sampler that is not plain draws on the host.
        """
        self.cache.length = cached
        if not sampler.plain:
            return self._drawn_on_host(tokens[cached:], sampler)
        how = sampler.how
        count = None
        if how.temperature > 0:
            count = how.top_k if 0 < how.top_k < self.vocab else self.vocab
        with self._active():
            self._ready(count)
        return self._drawn(tokens[cached:], sampler, count)

    def _drawn_on_host(self, tokens: Sequence[int], sampler: Sampler) -> Iterator[int]:
        with self._active():
            row = self._logits(self._prompt(tokens, 1))[0].cpu().numpy()
        yield from drawn_on_host(self, row, sampler)

    def _drawn(self, tokens: Sequence[int], sampler: Sampler, count: int | None) -> Iterator[int]:
        with self._active():
            self.step.logits.copy_(self._logits(self._prompt(tokens, 1)))
            if count is not None:
                self.step.set_sampling(sampler, self.cache.context - self.cache.length + 1)
            self._set_state(self.step, [0], self.cache.length - 1)
            for launch in self._samplers[count]:
                launch()
            waiting = [self._fetch(0)]
        drawn = 0
        while waiting:
            with self._active():
                if self.cache.length < self.cache.context:  # the next one is computed while this one is read
                    self._step(count)
                    waiting.append(self._fetch(drawn + 1))
                event = waiting.pop(0)
                if event is not None:
                    event.synchronize()
            token = int(self._host[drawn])
            if token < 0:
                raise not_finite("NaN or an infinity")
            self._tokens.append(token)
            yield token
            drawn += 1

    def _fetch(self, number: int) -> Any:
        """Queue the copy of a token to the host; returns the event that marks its end."""
        import torch

        self._host[number : number + 1].copy_(self.step.drawn[number : number + 1], non_blocking=self.graphs)
        if not self.graphs:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # prompts

    def _prompt(self, tokens: Sequence[int], keep: int) -> Any:
        """Append tokens to the cache; normalized hidden states of the last `keep`, f32 [keep, hidden]."""
        import torch

        return torch.cat([*self._parts(tokens, keep)])

    def _parts(self, tokens: Sequence[int], keep: int) -> Iterator[Any]:
        """The same, batch by batch."""
        ends = [*range(self.batch, len(tokens), self.batch), len(tokens)]
        if self.cache.state is not None and ends[-1] > 1:
            ends.insert(-1, ends[-1] - 1)  # where the same prompt can be read again
        start = 0
        for end in dict.fromkeys(ends):
            self.cache.remember()
            wanted = max(0, keep - (len(tokens) - end))
            given = None if self._model.pairs is None else upload(self._taken(end - start), self.device)
            states = Prompt(self.weights, self.memory, tokens[start:end], given).run(min(wanted, end - start))
            self._tokens[self.cache.length :] = tokens[start:end]
            self.cache.advance(end - start)
            start = end
            yield states

    def _logits(self, states: Any) -> Any:
        """f32 [n, vocab] of normalized states on the device."""
        model = self.weights.model
        return cap(self.weights.stack([(model.output, model.output_bias)]).multiply(states), self.config.logit_cap)

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Work on the device in this thread, on the stream that was current the first time.

        So all work is in order, and torch frees memory there after it, a step that nobody reads included. Running out
        of the device's memory becomes a one-line error. Work that does not end leaves an empty context, as some layers
        may have advanced their states.
        """
        import torch

        try:
            with self.device.active(), torch.cuda.device(self.device.index):
                self._stream = self._stream or torch.cuda.current_stream()
                with torch.cuda.stream(self._stream):
                    try:
                        yield
                    except BaseException:
                        self.cache.length = 0
                        raise
        except torch.cuda.OutOfMemoryError as problem:
            work = work_bytes(self.config, self.cache.context, self.batch, self.precision)
            raise self.device.too_little(self.nbytes + work, "the model") from problem


def token_bytes(c: DecoderConfig, context: int, precision: str) -> int:
    """Bytes that a token of a batch takes at most.

    For gate and up f32, as torch's product and as the sum, and for what is made of them; for hidden states, queries,
    keys and values, and what their products read and give; for what is around experts or a state; for the mask.
    """
    sizes = [(c.widths(layer)[0], c.heads_of(layer)) for layer in c.attending]
    widths = [q + 2 * heads.kv * heads.dim for q, heads in sizes]
    counted = 4 * (6 * c.inner + 4 * (c.hidden + max(widths, default=0)))
    if c.experts:
        counted += routed_experts.token_bytes(c)
    if c.recurrent is not None:
        counted += 4 * (2 * sum(c.recurrent.inputs.values()) + 3 * c.recurrent.channels)
    return counted + context * (4 if precision == "f32" else 2)


def work_bytes(c: DecoderConfig, context: int, batch: int, precision: str) -> int:
    """Bytes that prompts in batches of so many tokens, and graphs, need besides weights and cache."""
    return _WORK + (batch - BATCHES[-1]) * token_bytes(c, context, precision)
