"""A decoder's layers run on a GGUF's tensors: tokens in, hidden states out, the cache filled.

walk.py is the way of a token. A single one runs as one table of calls (cpu_machine.py), and so do a token of each of
several contexts, and a prompt, if there are kernels for all matrices (steps.py). Prompts of any length share a table.

At first the file's own blocks are multiplied. A repacked copy of each matrix is faster, but takes fresh memory, which
costs a virtual machine up to 2 s a GB, and kernels of its own, which take a second to compile when a model is run for
the first time. So copies are made between tokens, once these have taken half a second, and as long as the copies have
taken no more than a tenth of the tokens' time: where memory is cheap all are made within the first 64 tokens or so,
elsewhere nobody waits for them; and a single prompt never pays for a copy. Matrices whose codes are numbered
(codebooks, base 3) are different: multiplying their own blocks takes as long as making the copy, so their copies are
all made before the first token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from bridge.blocks.read import READ
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines import engine
from bridge.runtime.cpu.ops import sampling_ops
from bridge.runtime.cpu.ops.attention import SPAN
from bridge.runtime.cpu.ops.passes import Kernels
from bridge.runtime.decoder.cpu_machine import CpuMachine, unfit
from bridge.runtime.decoder.positions import Positions
from bridge.runtime.decoder.steps import Steps
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.layers.layers import Weights
from bridge.runtime.layers.weights import check_context, read_weights
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.sampling import Sampler, drawn_on_host
from bridge.runtime.tokenizer import common_prefix
from bridge.system.kernels import compiling
from bridge.system.kernels.compile_ahead import compile_all
from bridge.system.kernels.jit import CFunction
from bridge.system.threads import pool

BATCH = 512  # tokens that pass through the layers together
WIDEST = 8  # tokens in a step: columns of the widest kernel
_SHARE = 0.1  # of the time that tokens take, for repacking
_FIRST = 64  # passes before anything is repacked: a short reply would not gain what that takes
_PARTS = 8  # at most one part in so many of the weights is repacked before a batch


class Decoder:
    """The layers of a GGUF with a cache of keys and values.

    followed  float32 [n, hidden]: normalized states of the last tokens that followed; after `step`, until the next one
    tapped    float32 [n, layers * hidden]: states before the layers that `tap` names, of the tokens of the last pass
    given     float32 [n, hidden]: where tokens come with states (`Weights.pairs`), those of the next tokens
    """

    def __init__(
        self, file: GGUFFile, config: DecoderConfig, context: int, kv: str, precision: str,
        weights: Weights | None = None,
    ):  # fmt: skip
        """`weights`: by default all of the file."""
        self._file, self.config, self.precision = file, config, precision
        weights = weights or read_weights(file, config)  # checks what the cache takes memory for
        check_context(file, config, context)
        self.cache = KVCache(config, context, kv)
        self._kv = kv
        self.embedding, self.output = weights.embedding, weights.output
        self.vocab = self.embedding.shape[0]
        self._output_bias = weights.output_bias
        self.output_norm, self.layers = weights.output_norm, weights.layers
        self._positions = Positions(config, self.cache.rows, weights.factors(context, config.rope_original_context))
        self.weights = weights
        self._steps: dict[int, CpuMachine] = {}  # of a token of each of so many contexts
        self._prompt: CpuMachine | None = None  # of prompts, or parts of them
        self._kernels = Kernels(precision == "int8")
        self._matrices = [m for layer in self.layers for m in layer.matrices] + [self.output]
        if weights.pairs is not None:
            self._matrices.insert(0, weights.pairs.joined)
        self._numbered = [m for m in self._matrices if m.type in READ and READ[m.type].numbered]  # not repacked yet
        self._prepared = 0  # number of these matrices that are repacked
        self._nbytes = sum(m.nbytes for m in self._matrices)
        self._computing = 0.0  # seconds that tokens have taken so far
        self._passes = 0  # through the layers so far
        self.preparing = 0.0  # seconds that repacking has taken so far
        self.followed = self.given = np.zeros((0, config.hidden), np.float32)
        self.tapped = np.zeros((0, 0), np.float32)

    def beside(self, config: DecoderConfig, weights: Weights) -> Self:
        """Another decoder, of some of the file's weights."""
        return type(self)(self._file, config, self.cache.context, self._kv, self.precision, weights)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the states before these layers in `tapped`, pass by pass; the number of layers: after the last."""
        if layers != self.config.tapped:
            self.config = replace(self.config, tapped=layers)
            self._steps, self._prompt = {}, None

    def begin(self) -> None:
        """Get ready for tokens: nothing to do."""

    @property
    def matrices(self) -> list[QuantTensor]:
        """All matrices that tokens are multiplied with, the head last."""
        return self._matrices

    def prepare(self) -> None:
        """Repack every matrix for this machine, and release the file's own pages."""
        self._prepare(math.inf, math.inf)

    def _prepare(self, nbytes: float, seconds: float) -> None:
        """Repack matrices of up to `nbytes`, until all repacking has taken `seconds`."""
        while nbytes > 0 and self.preparing < seconds and self._prepared < len(self._matrices):
            start = compiling.clock()
            matrix = self._matrices[self._prepared]
            self._repack(matrix)
            nbytes -= matrix.nbytes
            self._prepared += 1
            self.preparing += compiling.clock() - start

    def _repack(self, matrix: QuantTensor) -> None:
        if not matrix.prepared:
            matrix.prepare(release=True)
        self._kernels.refresh(matrix)  # another decoder of the same file may have prepared it

    def run(self, tokens: Sequence[int], keep: int = 1, cache: KVCache | None = None) -> np.ndarray:
        """Append tokens to the cache; the last `keep` of their normalized hidden states, float32 [keep, hidden].

        The tokens must fit the cache, which `Model` ensures. `cache`: by default the decoder's own.
        """

        def batch(tokens: Sequence[int]) -> np.ndarray:
            return self._through(self._machine_for([cache or self.cache], len(tokens)), tokens)

        return np.concatenate([hidden.copy() for hidden in last_states(batch, tokens, self._together, keep)])

    @property
    def _together(self) -> int:
        """Tokens that pass through the layers together: all of a text where they attend to those that follow."""
        return BATCH if self.config.causal else self.cache.rows

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        return self._finished(self.output.matmul(hidden, precision=self.precision))

    def _finished(self, scores: np.ndarray) -> np.ndarray:
        """Logits float32 [n, vocab] with the output's bias added, or capped."""
        if self._output_bias is not None:
            scores = scores + self._output_bias
        cap = np.float32(self.config.logit_cap)
        return cap * np.tanh(scores / cap) if cap else scores

    def scores(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, vocab] of the last `keep` tokens, from an empty context."""
        return self.logits(self.states(tokens, keep))

    def states(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, hidden]: normalized hidden states of the last `keep` tokens, from an empty context."""
        self.cache.length = 0
        return self.run(tokens, keep)

    def new_cache(self) -> KVCache:
        """Another context, of the same length and kind."""
        return KVCache(self.config, self.cache.context, self._kv)

    @property
    def read(self) -> list[int]:
        """The tokens that the cache holds."""
        return self.cache.tokens[: self.cache.length]

    def kept(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens need not be read again."""
        return self.cache.reach(common_prefix(self.read, tokens))

    def draw(self, tokens: Sequence[int], sampler: Sampler, cached: int = 0) -> Iterator[int]:
        """Draw the tokens that follow, one by one, until the context is full; the cache holds the first `cached`."""
        self.cache.length = cached
        yield from drawn_on_host(self, self.logits(self.run(tokens[cached:]))[0], sampler)

    def next_scores(self, token: int) -> np.ndarray:
        """float32 [vocab] of what follows one more token; the next call may overwrite them."""
        return self.step([self.cache], [token])[0]

    def step(self, caches: Sequence[KVCache], tokens: Sequence[int]) -> np.ndarray:
        """Append a token to each cache: float32 [caches, vocab] of what follows; the next call may overwrite them."""
        machine = self._machine_for(caches, len(tokens))
        self.followed = self._through(machine, tokens)
        return self._finished(machine.scores) if machine.scores.size else self.logits(self.followed)

    def follow(self, tokens: Sequence[int]) -> np.ndarray:
        """Append up to `room` tokens to the decoder's own cache: float32 [n, vocab] of what follows each of them.

        Each is computed as by a step of its own, to the last bit, where `multiplied_one_by_one` finds nothing.
        """
        machine = self._machine_for([self.cache] * len(tokens), len(tokens))
        self.followed = self._through(machine, tokens).copy()
        if machine.scores.size:
            return self._finished(machine.scores.copy())
        # together, some types have other sums
        return np.concatenate([self.logits(row) for row in self.followed[:, None]])

    def room(self, cache: KVCache | None = None) -> int:
        """The most tokens that a step takes into one context; the first span ends a step, because one is not merged."""
        cache = cache or self.cache
        return min(WIDEST, cache.context - cache.length, SPAN - cache.length if cache.length < SPAN else WIDEST)

    def multiplied_one_by_one(self) -> QuantTensor | None:
        """A matrix that has no kernel for several tokens whose sums are those of one, if there is one."""
        return unfit(self.weights)

    def _machine_for(self, caches: Sequence[KVCache], n: int) -> CpuMachine:
        """The machine for n tokens, one of those for steps or that for prompts."""
        machine = self._steps.get(n) if n == len(caches) else self._prompt
        if machine is not None:
            machine.use(caches)
        elif n == len(caches):
            machine = self._steps[n] = CpuMachine(self.config, self.weights, n, caches, self._positions)
        else:
            most = min(self._together, self.cache.rows)
            machine = self._prompt = CpuMachine(self.config, self.weights, most, caches, self._positions)
        return machine

    def _through(self, machine: CpuMachine, tokens: Sequence[int]) -> np.ndarray:
        """Tokens through the layers, into the caches; their normalized hidden states, float32 [n, hidden]."""
        for matrix in self._numbered:
            self._repack(matrix)
        self._numbered = []
        if self._passes >= _FIRST:
            self._prepare(self._nbytes / _PARTS, _SHARE * self._computing)
        start = compiling.clock()
        machine.begin(tokens)
        self._positions.reach(int(machine.starts.max()) + machine.count)
        program = self._compiled(machine)
        self._embed(machine)
        program.begin(machine.count)
        program.run()
        if self.config.tapped:
            self.tapped = np.concatenate([states[: machine.count] for states in machine.tapped], axis=1)
        parts = [[token] for token in tokens] if len(machine.caches) > 1 else [list(tokens)]
        for cache, part in zip(machine.caches, parts, strict=True):
            cache.append(part)
        self._computing += compiling.clock() - start
        self._passes += 1
        return machine.states[: machine.count]

    def _compiled(self, machine: CpuMachine) -> Steps:
        """Its program, made where it is not yet; what that calls is compiled."""
        program, kernels, surrounding = machine.program, self._kernels, []
        if program is not None and program.ready(machine.count):
            return program
        if program is None:
            compile_all(self._functions(machine))
            program = machine.build(kernels)
            surrounding = [*machine.embedding.functions(), *pool.functions()]
        columns = kernels.columns(machine.count, self.config.experts > 0)
        if not columns <= kernels.needed:
            compile_all(self._functions(machine))
            kernels.need(columns)
        if surrounding:
            compile_all([*surrounding, *program.functions()])
        return program

    def _functions(self, machine: CpuMachine) -> list[CFunction]:
        """The C functions of draws and of each type's products; for the steps of one sequence, also when they are
        prepared."""
        integer = self.precision == "int8"
        head = self.output.functions(machine.n if machine.one_token_each else 1, integer)
        functions = [sampling_ops.function(), *head]
        for matrix in {matrix.type: matrix for matrix in self._matrices}.values():
            functions += matrix.functions(machine.count, integer)
            if machine.n == 1 and self._prepared < len(self._matrices):
                functions += engine.prepared_functions(matrix.type, integer)
        return functions

    def _embed(self, machine: CpuMachine) -> None:
        """What the first layer reads, into `machine.x`."""
        machine.look_up_tokens()
        pairs, eps = self.weights.pairs, self.config.norm_eps
        if pairs is not None:
            states, self.given = self.given[: machine.count], self.given[machine.count :]
            x = machine.x[: machine.count]
            both = _normed(x, pairs.embedding_norm, eps), _normed(states, pairs.state_norm, eps)
            pairs.joined.matmul(np.concatenate(both, axis=1), x, self.precision)


def _normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return (x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps)) * weight).astype(np.float32)


def last_states(layers: Callable[[Sequence[int]], Any], tokens: Sequence[int], size: int, keep: int) -> Iterator[Any]:
    """Tokens through `layers`, `size` at a time; batch by batch the states [n, hidden] of the last `keep` tokens.

    What `layers` returns may be overwritten by its next call, which comes before the next states do.
    """
    for start in range(0, len(tokens), size):
        batch = tokens[start : start + size]
        states = layers(batch)
        first = max(0, len(tokens) - keep - start)
        if first < len(batch):
            yield states[first:]
