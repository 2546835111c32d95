"""Attention of tokens that follow one another, one by one, in the layers of a model: launches of attention.py's
kernel."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.attention.attention import kernel, recorded
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.attention_shape import shape, spans
from bridge.cuda.attention.kv_cache import KVCache
from bridge.cuda.positions import Positions
from bridge.cuda.product.products import Vector
from bridge.cuda.toolchain.device import Device, view, zeros

from bridge.runtime.config.decoder_config import DecoderConfig


class StepAttention:
    """What the layers' launches share; `state`: of each token, see attention.py."""

    def __init__(
        self, config: DecoderConfig, cache: KVCache, positions: Positions, state: Any, exact: bool, dependent: bool,
        device: Device,
    ):  # fmt: skip
        self._config, self._cache, self._positions, self._device = config, cache, positions, device
        self._states, self._exact, self._dependent = [view(one) for one in state], exact, dependent
        self._scratch: dict[tuple[int, ...], list[Any]] = {}  # by what `_buffers` is given

    def attend(self, layer: int, qkv: Any, out: Vector, norms: Sequence[Any] = (None, None), sinks: Any = None) -> None:
        """Queue a layer's attention: the result, [n, heads * head_dim], with its records if heads are whole blocks.

        qkv     f32 [n, (heads + 2 kv_heads) * head_dim], or [n, heads * head_dim] where the layer makes no keys
        norms   f32 [head_dim] of queries and of keys, or None where heads are not normalized
        sinks   f32 [heads] where the model has some
        """
        c, device = self._config, self._device
        kind, slot = AttentionKind.of(c, layer, norms[0] is not None), self._cache.slots[c.stored[layer]]
        made = kernel(kind, self._exact, slot.form.kind, self._dependent, device.capability)
        context = self._cache.context
        blocks = spans(device.multiprocessors, slot.heads, min(context, c.window) if kind.windowed else context)
        given = [*norms, *self._positions.of(layer), sinks]
        vectors = [device.placeholder() if part is None else view(part) for part in given]
        stored, buffers = (view(slot.keys), view(slot.values)), self._buffers(slot.heads, blocks, kind)
        numbers = np.int32(slot.rows), np.int32(c.window)
        scales = [np.float32(x) for x in (c.norm_eps, c.attention_scale, c.score_cap)]
        grid, threads = (slot.heads, blocks), shape(slot.form, kind.group, device.capability).threads
        for one, state, (floats, records) in zip(qkv, self._states, out.tokens(), strict=True):
            arrays = view(one), *vectors, *stored, state, *buffers, view(floats), records.buffer
            made.launch(grid, threads, device.stream(), *arrays, *numbers, *scales)
        out.recorded = recorded(kind.head_dim)

    def _buffers(self, kv_heads: int, blocks: int, kind: AttentionKind) -> list[Any]:
        """Sums of spans, and counters, which layers use one after the other."""
        import torch

        key = kv_heads, blocks, kind.group, kind.head_dim
        if key not in self._scratch:
            heads = kv_heads * blocks * kind.group
            parts = zeros(self._device, heads * kind.head_dim), zeros(self._device, 2 * heads)
            self._scratch[key] = [view(part) for part in (*parts, zeros(self._device, kv_heads, torch.int32))]
        return self._scratch[key]
