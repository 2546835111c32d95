"""Attention on latent vectors (MLA, absorbed) on a GPU; bridge/runtime/cpu/ops/latent_attention.py has the formulas.

A row of a layer's cache is [c, r], the normalized latent vector and the turned part of the keys, in a form of
kv_cache.py: there is one key-value head, and there are no values.

    a token   three launches, which find the position in device memory:
                  absorb   queries of each head that can be multiplied with rows; the new row       latent_heads.py
                  attend   softmax over spans of the rows                                           latent_spans.py
                  values   merges the spans and multiplies by each head's matrix of values          latent_heads.py
    a prompt  by torch: keys and values of some heads at a time are made of all rows, K_h^T c and V_h c. For each row
              and head that takes 2 rank (plain + value) operations, and each token saves 2 (2 rank - plain - value):
              170 tokens of DeepSeek V2 pay for it

A step of DeepSeek V2 Lite reads 4 MB of matrices a layer, and 1152 bytes of each row (f16).
"""

from typing import Any

import numpy as np
from bridge.cuda.attention import latent_heads, latent_spans
from bridge.cuda.attention.attention_shape import spans
from bridge.cuda.attention.kv_cache import latent_form, width_of
from bridge.cuda.attention.latent_heads import absorbing, valuing
from bridge.cuda.attention.latent_spans import group_of
from bridge.cuda.norm import rms
from bridge.cuda.toolchain.device import Device, upload, view, zeros

from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.layers import Layer

_EXPANDED = 1 << 28  # bytes of keys and values of some heads, at most, beside those of one


def matrix_bytes(c: DecoderConfig, precision: str) -> int:
    """Bytes that the matrices of a layer's heads take on the device."""
    latent = c.latent
    assert latent is not None
    columns = absorbing(latent, precision != "f32").columns
    return c.heads * latent.rank * (columns + latent.value) * (4 if precision == "f32" else 2)


def unsupported(c: DecoderConfig, kind: str, precision: str) -> str | None:
    """Why there are no kernels for a model's latent attention; None where there are."""
    latent, halves = c.latent, precision != "f32"
    assert latent is not None
    by_head = absorbing(latent, halves), valuing(latent, halves)
    rotated = c.head_dim - latent.rank
    fits = latent_spans.shape(kind, c.heads, latent.rank, rotated, (0, 0)) is not None and rotated <= 512
    if fits and all(shape.supported for shape in by_head):
        return None
    sizes = f"rank {latent.rank}, {rotated} rotated, {latent.plain} plain and {latent.value} value elements"
    return f"latent attention with {sizes}: CUDA has no kernels for it"


class LatentBuffers:
    """What a step's launches leave to the next, the same for all layers.

    queries    f32 [heads, width]
    parts, part_sums   of each span, see latent_spans.py
    """

    def __init__(self, c: DecoderConfig, context: int, device: Device):
        assert c.latent is not None
        group, width = group_of(c.heads), width_of(c.latent.rank, c.head_dim - c.latent.rank)
        self.groups = -(-c.heads // group)
        self.spans = spans(device.multiprocessors, self.groups, context)
        self.queries = zeros(device, c.heads * width)
        self.parts = zeros(device, self.groups * self.spans * group * width)
        self.part_sums = zeros(device, self.groups * self.spans * 2 * group)


class LatentAttention:
    """A layer's attention.

    cache_part    int32 [words], the keys of a slot of kv_cache.py, in a form of some kind
    angles        cos and sin f32 [rows, rotated / 2]
    temperatures  f32 [rows] or None; a layer that is not tempered ignores them
    """

    def __init__(
        self, layer: Layer, c: DecoderConfig, index: int, cache_part: Any, kind: str, device: Device, precision: str,
        angles: tuple[Any, Any], temperatures: Any, buffers: LatentBuffers,
    ):  # fmt: skip
        """Raises BridgeError where there are no kernels for the sizes."""
        assert c.latent is not None
        assert layer.latent_k is not None
        assert layer.latent_v is not None
        if (reason := unsupported(c, kind, precision)) is not None:
            raise BridgeError(reason)
        self.config, self.latent, self.device, self.buffers = c, c.latent, device, buffers
        self.part, self.form, self.angles = cache_part, latent_form(c, kind), angles
        self.rotated = c.head_dim - c.latent.rank
        self.exact = precision == "f32"
        self.temperatures = temperatures if c.tempered(index) else None
        dtype = np.float32 if self.exact else np.float16
        self.k_norm = upload(layer.k_norm, device)
        keys = np.pad(layer.latent_k.dequantize(dtype), ((0, 0), (0, 0), (0, -c.latent.plain % 8)))
        self.keys, self.values = upload(keys, device), upload(layer.latent_v.dequantize(dtype), device)

    def step_bytes(self, length: int) -> int:
        """Bytes that a step reads at least, of a context of so many tokens with its own."""
        precision = "f32" if self.exact else "int8"
        return matrix_bytes(self.config, precision) + 4 * self.form.words(length)

    def step(self, q: Any, k: Any, state: Any, dependent: bool = False) -> Any:
        """Attention of the token in position state[POSITION]: f32 [1, heads * value].

        q      f32 [heads * (plain + rotated)], as the products leave it; so is
        k      f32 [rank + rotated]
        state  int32, see attention.py
        """
        import torch

        c, latent, buffers, stream = self.config, self.latent, self.buffers, self.device.stream()
        kind, heads, tempered = self.form.kind, c.heads, self.temperatures is not None
        cos, sin = (view(part.reshape(-1)) for part in self.angles)
        keys, values = (view(matrices.reshape(-1)) for matrices in (self.keys, self.values))
        state, cache = view(state), view(self.part)
        queries, parts, part_sums = (view(t) for t in (buffers.queries, buffers.parts, buffers.part_sums))
        rows = np.int32(self.form.rows(self.part, 1))

        by_head = absorbing(latent, not self.exact)
        absorb = latent_heads.absorb_kernel(kind, heads, latent.plain, self.rotated, by_head, dependent)
        inputs = view(q.reshape(-1)), view(k.reshape(-1)), view(self.k_norm), cos, sin, keys
        absorb.launch(
            (by_head.pieces, heads + 1), latent_heads.BLOCK, stream, *inputs, state, queries, cache, rows,
            np.float32(c.norm_eps),
        )  # fmt: skip

        how = kind, heads, latent.rank, self.rotated
        shape = latent_spans.shape(*how, self.device.capability)
        assert shape is not None
        temperatures = self.temperatures if tempered else self.k_norm
        latent_spans.kernel(*how, tempered, dependent, self.device.capability).launch(
            (buffers.groups, buffers.spans), shape.threads, stream, queries, cache, view(temperatures), state, parts,
            part_sums, rows, np.float32(c.attention_scale),
        )  # fmt: skip

        by_head = valuing(latent, not self.exact)
        merge = latent_heads.values_kernel(heads, shape.group, self.rotated, shape.rows, by_head, dependent)
        attended = torch.empty((1, heads * latent.value), device=q.device)
        merge.launch(
            (by_head.pieces, heads), latent_heads.BLOCK, stream, parts, part_sums, values, state,
            view(attended.reshape(-1)), np.int32(buffers.spans),
        )  # fmt: skip
        return attended

    def prompt(self, q: Any, k: Any, start: int, mask: Any) -> Any:
        """Attention of n tokens in positions from `start` on: halves, or f32 if exact, [n, heads * value].

        q     f32 [n, heads * (plain + rotated)], as the products leave it; so is
        k     f32 [n, rank + rotated]
        mask  of prompt_attention.mask_from
        """
        import torch

        c, latent, (n, _) = self.config, self.latent, q.shape
        dtype = torch.float32 if self.exact else torch.float16
        dim, count = latent.plain + self.rotated, start + n
        cos, sin = (part[start:count] for part in self.angles)
        row = torch.cat([rms(k[:, : latent.rank], self.k_norm, c.norm_eps), _turned(k[:, latent.rank :], cos, sin)], 1)
        filled = torch.nn.functional.pad(row, (0, self.form.head_dim - c.head_dim))
        self.form.store(self.part, start, filled[:, None])
        q = q.reshape(n, c.heads, dim)
        q = torch.cat([q[..., : latent.plain], _turned(q[..., latent.plain :], cos[:, None], sin[:, None])], 2)
        if self.temperatures is not None:
            q *= self.temperatures[start:count, None, None]
        queries = q.transpose(0, 1).to(dtype)

        rows = self.form.load(self.part, count, 1, dtype)[0]
        latents, turned = rows[:, : latent.rank], rows[:, latent.rank : c.head_dim]
        out = torch.empty((n, c.heads, latent.value), dtype=dtype, device=q.device)
        together = max(1, _EXPANDED // (count * (dim + latent.value) * dtype.itemsize))
        for first in range(0, c.heads, together):
            heads = slice(first, first + together)
            keys = torch.empty((len(queries[heads]), count, dim), dtype=dtype, device=q.device)
            keys[..., : latent.plain] = latents @ self.keys[heads, :, : latent.plain]
            keys[..., latent.plain :] = turned
            attended = torch.nn.functional.scaled_dot_product_attention(
                queries[None, heads], keys[None], (latents @ self.values[heads].mT)[None], mask,
                is_causal=mask is None, scale=c.attention_scale,
            )  # fmt: skip
            out[:, heads] = attended[0].transpose(0, 1)
        return out.reshape(n, -1)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    """x f32 [..., rotated], its pairs (2i, 2i + 1) turned by angles [..., rotated / 2]."""
    import torch

    one, other = x[..., ::2], x[..., 1::2]
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)
