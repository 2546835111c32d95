"""A decoder's layers on an NVIDIA GPU: the twin of bridge/runtime/decoder.py, with weights, cache and sampling there.

A token is a list of launches, about 8 a layer, in which nothing depends on the host:

    x  = embedding row of state[TOKEN]
    for each layer:
        norm of x, with records                                                 norm.py
        q, k, v                                                                 products.py
        rotation, cache, attention, records of the result                       attention.py
        x += W_o ...
        norm of x, with records
        silu(W_gate ...) * (W_up ...)
        records of it
        x += W_down ...
    logits = W_output norm(x);  state[TOKEN] = the next token                   sampling.py

The list is captured in a CUDA graph once and replayed for every token, and the next token is on its way while
the host reads the last one. Prompts go through the layers as matrices: torch's products on dequantized tiles, and
torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from bridge.cuda import attention as attn
from bridge.cuda import device as devices
from bridge.cuda import sampling
from bridge.cuda.buffers import check_torch, zeros
from bridge.cuda.dequantize import rows
from bridge.cuda.graph import Graph
from bridge.cuda.kv_cache import KVCache
from bridge.cuda.norm import norm_kernel, norm_threads
from bridge.cuda.products import FloatMatrix, Gated, Launch, Stack, Vector, device_bytes
from bridge.cuda.prompt import attend, rms

from bridge.errors import BridgeError
from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.reader import GGUFFile
from bridge.runtime.sampling import Sampler
from bridge.runtime.weights import Layer, read_weights

BATCH = 1024  # tokens of a prompt that pass through the layers together
_WORK = 400 << 20  # bytes that prompts and graphs need besides weights and cache
_GRAPHS = 4  # ways of sampling whose graphs are kept


class DeviceLayer:
    """A layer's matrices and vectors on the device."""

    def __init__(self, layer: Layer, device: devices.Device, precision: str):
        def vector(array: np.ndarray | None) -> Any:
            return None if array is None else upload(array, device)

        self.attn_norm, self.ffn_norm = vector(layer.attn_norm), vector(layer.ffn_norm)
        self.q_norm, self.k_norm = vector(layer.q_norm), vector(layer.k_norm)
        attention = [layer.q, layer.k, layer.v]
        biases = vector(_joined(attention, [layer.q_bias, layer.k_bias, layer.v_bias]))
        self.qkv = Stack(attention, device, precision, biases)
        self.o = Stack([layer.o], device, precision, vector(layer.o_bias))
        biases = vector(_joined([layer.gate, layer.up], [layer.gate_bias, layer.up_bias]))
        self.gated = Gated(layer.gate, layer.up, device, precision, biases)
        self.down = Stack([layer.down], device, precision, vector(layer.down_bias))


class Decoder:
    """The layers of a GGUF with a cache of keys and values, on a device. Takes its memory in `prepare`."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, context: int, kv: str, precision: str, device: str):
        self.config, self.precision = config, precision
        self.device = devices.require(device)
        check_torch(self.device)
        _check_shape(config, file)
        self.cache = KVCache(config, context, kv)
        self._weights: Any = read_weights(file, config)
        self.vocab = self._weights.embedding.shape[0]
        self.nbytes = self._needed()
        with self._active():
            self.device.check_memory(self.nbytes + _WORK, f"{file.path} with a context of {context}")
        self.graphs = devices.captures()  # False: every launch by itself
        self.preparing = 0.0  # seconds of repacking between tokens: none
        self._captured: dict[int | None, Graph] = {}
        self._samplers: dict[int | None, list[Launch]] = {}

    def _needed(self) -> int:
        """Bytes of weights and cache."""
        w = self._weights
        matrices = {id(t): t for t in (w.embedding, w.output, *(m for layer in w.layers for m in layer.matrices))}
        return sum(device_bytes(tensor, self.precision) for tensor in matrices.values()) + self.cache.nbytes

    def begin(self) -> None:
        """Be ready for tokens."""
        self.prepare()

    def prepare(self, progress: Any = None) -> None:
        """Upload everything and compile, once."""
        if self._weights is None:
            return
        with self._active():
            self._upload(progress)
            self._program = self._token()
            self._ready(None)
        self._weights = None

    def _upload(self, progress: Any) -> None:
        import torch

        c, device, w = self.config, self.device, self._weights
        self.cache.reserve(device)
        self._layers = []
        for done, layer in enumerate(w.layers):
            self._layers.append(DeviceLayer(layer, device, self.precision))
            for matrix in layer.matrices:
                matrix.release_raw()
            if progress:
                progress(done + 1, len(w.layers))
        self.output_norm = upload(w.output_norm, device)
        self.output = Stack([w.output], device, self.precision)
        tied = w.output is w.embedding
        self.embedding = (self.output if tied else Stack([w.embedding], device, self.precision)).parts[0][1]
        self.cos, self.sin = (upload(angles, device) for angles in c.angles(self.cache.rows, w.rope_factors))

        self.state = zeros(device, attn.STATE, torch.int32)
        self.made = zeros(device, self.cache.context + 1, torch.int32)
        self.uniform = zeros(device, self.cache.context + 1, torch.float64)
        self.how = zeros(device, 3, torch.float64)
        self.x = zeros(device, c.hidden)
        self.normed = Vector(c.hidden, device, self.precision)
        self.attended = Vector(c.heads * c.head_dim, device, self.precision)
        self.activated = Vector(c.inner, device, self.precision)
        self.logits_row = zeros(device, self.vocab)
        self._host = torch.zeros(self.cache.context + 1, dtype=torch.int32)
        if self.graphs:
            self._host = self._host.pin_memory()

    # one token, as launches

    def _token(self) -> list[Launch]:
        """All launches of a token but the sampling."""
        c = self.config
        program = [self._embed()]
        qkv = zeros(self.device, (c.heads + 2 * c.kv_heads) * c.head_dim)
        attention = self._attention(qkv)
        for i, layer in enumerate(self._layers):
            program.append(self._norm(layer.attn_norm))
            program += layer.qkv.bind(self.normed, qkv)
            program += attention(i, layer)
            program += layer.o.bind(self.attended, self.x, accumulate=True)
            program.append(self._norm(layer.ffn_norm))
            program += layer.gated.bind(self.normed, self.activated)
            program += layer.down.bind(self.activated, self.x, accumulate=True)
        program.append(self._norm(self.output_norm))
        return program + self.output.bind(self.normed, self.logits_row)

    def _embed(self) -> Launch:
        token = self.state[attn.TOKEN : attn.TOKEN + 1]
        matrix = self.embedding
        if isinstance(matrix, FloatMatrix):
            weight = matrix.weight
            return lambda: self.x.copy_(weight.index_select(0, token)[0])
        ids, out = devices.view(token), devices.view(self.x.reshape(1, -1))
        return lambda: rows(matrix, ids, out, 1, self.device.stream())

    def _norm(self, weight: Any) -> Launch:
        kernel = norm_kernel(self.config.hidden, self.precision == "f32")
        arguments = [devices.view(t) for t in (self.x, weight, self.normed.floats)]
        eps, threads = np.float32(self.config.norm_eps), norm_threads(self.config.hidden)
        return lambda: kernel.launch(1, threads, self.device.stream(), *arguments, self.normed.records.buffer, eps)

    def _attention(self, qkv: Any) -> Callable[[int, DeviceLayer], list[Launch]]:
        """What makes a layer's launches: its norms and its part of the cache differ, the rest is shared."""
        import torch

        c, device, view = self.config, self.device, devices.view
        group = c.heads // c.kv_heads
        parts = zeros(device, c.heads * attn.SPLITS * c.head_dim)
        sums = zeros(device, c.kv_heads * attn.SPLITS * 64)
        counters = zeros(device, c.kv_heads, torch.int32)
        shared = [view(t) for t in (self.state, parts, sums, counters, self.attended.floats)]
        angles = [view(self.cos.reshape(-1)), view(self.sin.reshape(-1))]
        vector, records = view(qkv), self.attended.records.buffer
        grid, threads = (c.kv_heads, attn.SPLITS), attn.threads(group)
        numbers = np.int32(self.cache.rows), np.float32(c.norm_eps), np.float32(c.attention_scale)

        def launches(index: int, layer: DeviceLayer) -> list[Launch]:
            normed = layer.q_norm is not None
            exact, kind = self.precision == "f32", self.cache.form.kind
            kernel = attn.kernel(c.head_dim, group, c.rotated, c.neighbours, normed, exact, kind)
            norms = [view(n) if normed else angles[0] for n in (layer.q_norm, layer.k_norm)]
            cache = [view(t[index]) for t in (self.cache.keys, self.cache.values)]
            arguments = [vector, *norms, *angles, *cache, *shared, records, *numbers]

            def run() -> None:
                kernel.launch(grid, threads, device.stream(), *arguments)

            return [run] if attn.recorded(c.head_dim) else [run, self.attended.quantize]

        return launches

    def _sampling(self, count: int | None) -> list[Launch]:
        """What turns logits_row into the next token: greedily, or drawn from the `count` best."""
        import torch

        device, view = self.device, devices.view
        state, made = view(self.state), view(self.made)
        if count is None:
            blocks = sampling.greedy_blocks(self.vocab)
            best = [zeros(device, blocks), zeros(device, blocks, torch.int32), zeros(device, 1, torch.int32)]
            arguments = [view(self.logits_row), np.int32(self.vocab), *(view(t) for t in best), state, made]
            greedy = sampling.greedy_kernel(sampling.GREEDY_THREADS)
            return [lambda: greedy.launch(blocks, sampling.GREEDY_THREADS, device.stream(), *arguments)]
        scores, tokens = chosen = zeros(device, count), zeros(device, count, torch.int64)
        arguments = [view(scores), view(tokens), np.int32(count), view(self.how), view(self.uniform), state, made]
        draw = sampling.draw_kernel(sampling.DRAW_THREADS)

        def sort() -> None:
            if count < self.vocab:
                torch.topk(self.logits_row, count, out=chosen)
            else:
                torch.sort(self.logits_row, descending=True, stable=True, out=chosen)

        return [sort, lambda: draw.launch(1, sampling.DRAW_THREADS, device.stream(), *arguments)]

    def _ready(self, count: int | None) -> None:
        """See to it that steps with this sampling can be launched; the first one is captured here."""
        if count not in self._samplers:
            if len(self._samplers) == _GRAPHS:
                oldest = next(key for key in self._samplers if key is not None)
                del self._samplers[oldest]
                self._captured.pop(oldest, None)
            self._samplers[count] = self._sampling(count)
        if self.graphs and count not in self._captured:
            self._set_state(0, 0)
            self._captured[count] = Graph(lambda: self._launch(count), self.state)

    def _launch(self, count: int | None) -> None:
        for launch in self._program + self._samplers[count]:
            launch()

    def _step(self, count: int | None) -> None:
        """state[TOKEN] goes through the layers, and the next token takes its place."""
        if self.graphs:
            self._captured[count].replay()
        else:
            self._launch(count)
        self.cache.length += 1

    def _set_state(self, position: int, token: int) -> None:
        import torch

        words = torch.zeros(attn.STATE, dtype=torch.int32)
        words[attn.POSITION], words[attn.TOKEN] = position, token
        self.state.copy_(words)

    # what Model calls

    def scores(self, tokens: Sequence[int], keep: int) -> np.ndarray:
        """float32 [keep, vocab] of the last `keep` tokens, from an empty context."""
        with self._active():
            return self.output.multiply(self._prompt(tokens, keep)).cpu().numpy()

    def next_scores(self, token: int) -> np.ndarray:
        """float32 [vocab] after one more token, launch by launch: what a captured step computes, to compare with."""
        with self._active():
            self._set_state(self.cache.length, token)
            for launch in self._program:
                launch()
            self.cache.length += 1
            return self.logits_row.cpu().numpy().copy()

    def draw(self, tokens: Sequence[int], sampler: Sampler) -> Iterator[int]:
        """What follows the tokens, drawn one by one, until the context is full."""
        how = sampler.how
        count = None
        if how.temperature > 0:
            count = how.top_k if 0 < how.top_k < self.vocab else self.vocab
        with self._active():
            self._ready(count)
        return self._drawn(tokens, sampler, count)

    def _drawn(self, tokens: Sequence[int], sampler: Sampler, count: int | None) -> Iterator[int]:
        with self._active():
            self.logits_row.copy_(self.output.multiply(self._prompt(tokens, 1))[0])
            if count is not None:
                self._set_sampling(sampler, self.cache.context - len(tokens) + 1)
            self._set_state(self.cache.length - 1, 0)
            for launch in self._samplers[count]:
                launch()
            waiting = [self._fetch(0)]
        made = 0
        while waiting:
            with self._active():
                if self.cache.length < self.cache.context:  # the next one is computed while this one is read
                    self._step(count)
                    waiting.append(self._fetch(made + 1))
                event = waiting.pop(0)
                if event is not None:
                    event.synchronize()
            yield int(self._host[made])
            made += 1

    def _set_sampling(self, sampler: Sampler, steps: int) -> None:
        """Settings and uniform numbers to the device."""
        import torch

        how = sampler.how
        self.how.copy_(torch.tensor([how.temperature, how.top_p, how.min_p], dtype=torch.float64))
        self.uniform[:steps].copy_(torch.from_numpy(sampler.uniform(steps)))

    def _fetch(self, number: int) -> Any:
        """Queue the copying of a token to the host; the event that says it is there."""
        import torch

        self._host[number : number + 1].copy_(self.made[number : number + 1], non_blocking=self.graphs)
        if not self.graphs:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # prompts

    def _prompt(self, tokens: Sequence[int], keep: int) -> Any:
        """Tokens through the layers, from an empty context; normalized hidden states of the last `keep`."""
        import torch

        self.cache.length = 0
        kept = []
        for at in range(0, len(tokens), BATCH):
            batch = tokens[at : at + BATCH]
            hidden = self._batch(batch)
            first = max(0, len(tokens) - keep - at)
            if first < len(batch):
                kept.append(rms(hidden[first:], self.output_norm, self.config.norm_eps))
        return torch.cat(kept)

    def _batch(self, tokens: Sequence[int]) -> Any:
        """Append tokens to the cache; their hidden states, f32 [n, hidden]."""
        eps, start = self.config.norm_eps, self.cache.length
        x = self._embeddings(tokens)
        cos, sin = (angles[start : start + len(tokens)] for angles in (self.cos, self.sin))
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv.multiply(rms(x, layer.attn_norm, eps))
            cache = self.cache.form, self.cache.keys[i], self.cache.values[i]
            exact = self.precision == "f32"
            attended = attend(self.config, qkv, layer.q_norm, layer.k_norm, cos, sin, cache, start, exact)
            x += layer.o.multiply(attended)
            x += layer.down.multiply(layer.gated.multiply(rms(x, layer.ffn_norm, eps)))
        self.cache.length += len(tokens)
        return x

    def _embeddings(self, tokens: Sequence[int]) -> Any:
        import torch

        ids = upload(np.array(tokens, np.int32), self.device)
        if isinstance(self.embedding, FloatMatrix):
            return self.embedding.weight.index_select(0, ids).float()
        out = zeros(self.device, (len(tokens), self.config.hidden), torch.float32)
        rows(self.embedding, devices.view(ids), devices.view(out), len(tokens), self.device.stream())
        return out

    @contextmanager
    def _active(self) -> Iterator[None]:
        """This thread works on the device; running out of its memory is an error of one line."""
        import torch

        if devices.torch_device(self.device) == "cpu":
            yield
            return
        try:
            with self.device.active(), torch.cuda.device(self.device.index):
                yield
        except torch.cuda.OutOfMemoryError as problem:
            raise self.device.too_little(self.nbytes + _WORK, "the model") from problem


def upload(array: np.ndarray, device: devices.Device) -> Any:
    """A torch tensor of the same values on the device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(devices.torch_device(device))


def _joined(matrices: Sequence[Any], biases: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One vector of all biases, zeros for those that are missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(matrices, biases, strict=True)
    return np.concatenate([np.zeros(m.shape[0], np.float32) if b is None else b for m, b in pairs])


def _check_shape(c: DecoderConfig, file: GGUFFile) -> None:
    """Refuse what the kernels were not made for."""
    if not attn.supported(c.head_dim, c.heads // c.kv_heads) or c.hidden % 32 or c.inner % 32:
        raise BridgeError(
            f"{file.path}: {c.heads} heads of {c.head_dim} over {c.kv_heads}, {c.hidden} hidden and {c.inner} inner "
            "features cannot be run on CUDA here; take the CPU"
        )
    if c.heads * c.head_dim % 32:
        raise BridgeError(f"{file.path}: {c.heads} heads of {c.head_dim} are no whole blocks of 32; take the CPU")
