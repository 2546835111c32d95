"""Attention of many tokens at once: one launch rotates queries and keys and fills the cache, torch does the rest.

    qkv      f32 [n, (heads + 2 kv_heads) * head_dim], as the products leave it, with biases added; of layers that store
             nothing [n, heads * head_dim]
    queries  halves or f32 [heads, n, head_dim], normalized where the model does, rotated, times their temperatures

A block serves a token and a key-value head, as those of attention.py do; blockIdx is (kv head, token).

For torch, a key-value head is a sequence of a batch, with the query heads that share it; its keys and values are the
same memory for all of these, and for f16 the cache itself. 32,768 positions of Llama 3 8B are 134 MB a layer. Repeated
for every query head they would be 537 MB more, written and read.

Keys before the first token's window are left out, the others that a token does not attend to masked. torch's attention
knows neither a cap on scores nor sinks: with these, scores are computed as matrices, in pieces.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.attention import attention_shape, attention_vectors
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.kv_cache import KVCache, KVForm
from bridge.cuda.norm import cap
from bridge.cuda.positions import Positions
from bridge.cuda.product.matmul import sums
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, view
from bridge.cuda.toolchain.intrinsics import ALIGNED, bits_float, shared_4, store_2, to_half
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

from bridge.runtime.config.decoder_config import DecoderConfig

PREPARE_THREADS = 128
PIECE = 256 << 20  # bytes of scores, and of what is made of them

# set by `kernel`: query heads of a block, with those repeated, and their size; threads
HEADS = PADDED = HEAD_DIM = THREADS = 0
EXACT = TEMPERED = STORES = False
turn: Any = None
keep: Any = None
float32 = np.float32
int32: Any = np.int32


def _prepare(qkv, q_norm, k_norm, cos, sin, temperatures, keys, values, queries, rows, start, eps):
    thread = int32(cuda.threadIdx.x)
    kv_head = int32(cuda.blockIdx.x)
    token = int32(cuda.blockIdx.y)
    kv_heads = int32(cuda.gridDim.x)
    tokens = int32(cuda.gridDim.y)
    position = int32(start + token)
    row = qkv[token]
    vector = cuda.shared.array((PADDED + 1) * HEAD_DIM, float32, ALIGNED)
    turn(vector, row, q_norm, k_norm, cos, sin, kv_head, kv_heads, position, PADDED + STORES, eps)
    if STORES:
        keep(vector, row, keys, values, kv_head, kv_heads, rows, position)
    for i in range(thread, HEADS * HEAD_DIM, THREADS):
        head = i // HEAD_DIM
        index = ((kv_head * HEADS + head) * tokens + token) * HEAD_DIM + i % HEAD_DIM
        value = bits_float(shared_4(vector, int32(i)))
        if TEMPERED:
            value *= temperatures[position]
        if EXACT:
            queries[index] = value
        else:
            store_2(queries, index, to_half(value))


@recipe
def kernel(kind: AttentionKind, exact: bool, kv: str) -> Kernel:
    """The kernel for attention of a kind, see attention.kernel; `exact`: queries are f32."""
    shape = attention_shape.shape(KVForm(kv, kind.head_dim), kind.group)
    constants = shape.constants
    function = expand(
        _prepare, f"{kind.name}_{kv}" + "_exact" * exact, EXACT=exact, TEMPERED=kind.tempered, STORES=kind.stores,
        THREADS=PREPARE_THREADS, **{name: constants[name] for name in ("HEADS", "PADDED", "HEAD_DIM")},
        **attention_vectors.functions(shape, kind, PREPARE_THREADS),
    )  # fmt: skip
    reals, queries = "float32[::1]", "float32[::1]" if exact else "int16[::1]"
    types = ["float32[:,::1]", *[reals] * 5, *["int32[::1]"] * 2, queries, "int32", "int32", "float32"]
    return Kernel(function, f"void({', '.join(types)})")


class PromptAttention:
    """Attention of n tokens at positions from `start` on, in the layers of a model; masks are made once for all."""

    def __init__(
        self, config: DecoderConfig, cache: KVCache, positions: Positions, exact: bool, device: Device, start: int,
        n: int,
    ):  # fmt: skip
        self._config, self._cache, self._positions, self._exact, self._device = config, cache, positions, exact, device
        self.start, self.stop = start, start + n
        self._masks: dict[bool, Any] = {}  # with and without a window

    def attend(self, layer: int, qkv: Any, norms: Sequence[Any] = (None, None), sinks: Any = None) -> Any:
        """The result in a layer: halves, or f32 with `exact`, [n, heads * head_dim].

        qkv     f32, see above
        norms   f32 [head_dim] of queries and of keys, or None where heads are not normalized
        sinks   f32 [heads] where the model has some
        """
        import torch

        c, n, device = self._config, len(qkv), self._device
        kind, slot = AttentionKind.of(c, layer, norms[0] is not None), self._cache.slots[c.stored[layer]]
        dtype = torch.float32 if self._exact else torch.float16
        queries = torch.empty((slot.heads, kind.group, n, kind.head_dim), dtype=dtype, device=qkv.device)
        given = [*norms, *self._positions.of(layer)]
        arrays = [view(qkv), *(device.placeholder() if part is None else view(part) for part in given)]
        arrays += [view(part) for part in (slot.keys, slot.values, queries.reshape(-1))]
        numbers = np.int32(slot.rows), np.int32(self.start), np.float32(c.norm_eps)
        prepare = kernel(kind, self._exact, slot.form.kind)
        prepare.launch((slot.heads, n), PREPARE_THREADS, device.stream(), *arrays, *numbers)
        first = self._first(kind)
        keys, values = (
            slot.form.load(part, self.stop, slot.heads, dtype, first) for part in (slot.keys, slot.values)
        )  # fmt: skip
        mask = self.mask(kind, qkv.device)
        if kind.capped or kind.sinks:
            result = self._scored(queries, keys, values, mask, sinks)
        else:
            repeated = (part[:, None].expand(-1, kind.group, -1, -1) for part in (keys, values))
            result = torch.nn.functional.scaled_dot_product_attention(
                queries, *repeated, mask, is_causal=mask is None, scale=c.attention_scale
            )
        return result.permute(2, 0, 1, 3).reshape(n, -1)

    def _first(self, kind: AttentionKind) -> int:
        """The first position that the first token attends to."""
        return max(0, self._first_seen(kind, self.start))

    def _first_seen(self, kind: AttentionKind, position: Any) -> Any:
        """The first position that the token at a position attends to; may be negative."""
        if not kind.windowed:
            return 0
        window = self._config.window
        return position // window * window if kind.chunked else position + 1 - window

    def mask(self, kind: AttentionKind, device: Any) -> Any:
        """What is added to the scores, of the queries' type, [n, positions from the first one on]: 0, or minus infinity
        for those that a token does not attend to. None if torch's own causal mask does.

        Of a mask of bool torch would make this in each layer. Rows begin at whole 16 bytes, as torch's kernels want
        them.
        """
        import torch

        first, start, stop = self._first(kind), self.start, self.stop
        last_sees_all = self._first_seen(kind, stop - 1) <= first
        if not start and last_sees_all and not (kind.capped or kind.sinks):
            return None
        if kind.windowed not in self._masks:
            n, count = stop - start, stop - first
            dtype = torch.float32 if self._exact else torch.float16
            mask = torch.full((n, -(-count // 8) * 8), -math.inf, dtype=dtype, device=device).triu_(start - first + 1)
            if not last_sees_all:
                seen = self._first_seen(kind, torch.arange(start, stop, device=device))
                mask.masked_fill_(torch.arange(first, first + mask.shape[1], device=device) < seen[:, None], -math.inf)
            self._masks[kind.windowed] = mask[:, :count]
        return self._masks[kind.windowed]

    def _scored(self, queries: Any, keys: Any, values: Any, mask: Any, sinks: Any) -> Any:
        """softmax(scores) values, of the queries' type and shape, with a cap on scores and sinks [heads] or None."""
        import torch

        kv_heads, group, n, head_dim = queries.shape
        before = keys.shape[1] - n
        result = torch.empty_like(queries)
        tokens = max(1, PIECE // (12 * group * keys.shape[1]))  # scores, their halves, what is between
        for head in range(kv_heads):
            for t in range(0, n, tokens):
                q = queries[head, :, t : t + tokens]
                stop = before + t + q.shape[1]
                scores = sums(q.reshape(-1, head_dim), keys[head, :stop]).reshape(group, -1, stop)
                scores.mul_(self._config.attention_scale)
                cap(scores, self._config.score_cap)
                scores.add_(mask[t : t + tokens, :stop])
                highest = scores.amax(-1, keepdim=True)
                if sinks is not None:
                    sink = sinks[head * group : (head + 1) * group, None, None]
                    highest = torch.maximum(highest, sink)
                weights = scores.sub_(highest).exp_()
                total = weights.sum(-1, keepdim=True)
                if sinks is not None:
                    total += torch.exp(sink - highest)
                y = sums(weights.reshape(-1, stop).to(values.dtype), values[head, :stop].T)
                result[head, :, t : t + tokens] = y.reshape(q.shape) / total
        return result
