"""What a prompt's tokens go through between the matrix products, in torch: many at once, each step a few launches."""

from typing import Any

from bridge.cuda.kv_forms import KVForm

from bridge.runtime.decoder_config import DecoderConfig


def rms(x: Any, weight: Any, eps: float) -> Any:
    """x f32 [..., n] / sqrt(mean(x^2) + eps) * weight."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt_() * weight


def rotate(x: Any, cos: Any, sin: Any, rotated: int, neighbours: bool) -> Any:
    """Rotary pairs of x f32 [n, heads, head_dim], in place; cos and sin f32 [n, rotated / 2]."""
    half = rotated // 2
    first = slice(0, rotated, 2) if neighbours else slice(0, half)
    second = slice(1, rotated, 2) if neighbours else slice(half, rotated)
    a, b = x[..., first].clone(), x[..., second].clone()
    c, s = cos[:, None], sin[:, None]
    x[..., first] = a * c - b * s
    x[..., second] = a * s + b * c
    return x


def attend(
    c: DecoderConfig, qkv: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any, cache: tuple[KVForm, Any, Any],
    start: int, exact: bool,
) -> Any:  # fmt: skip
    """Attention of n tokens at positions from `start` on: f32 [n, heads * head_dim].

    qkv f32 [n, (heads + 2 kv_heads) * head_dim]; the cache's keys and values of the layer, where theirs are stored.
    The products are of halves, or with `exact` of floats.
    """
    import torch

    n = qkv.shape[0]
    q, k, v = (part.reshape(n, -1, c.head_dim) for part in _split(c, qkv))
    if q_norm is not None:
        q, k = rms(q, q_norm, c.norm_eps), rms(k, k_norm, c.norm_eps)
    q, k = (rotate(part, cos, sin, c.rotated, c.graph.neighbours) for part in (q, k))
    form, *parts = cache
    dtype = torch.float32 if exact else torch.float16
    for part, given in zip(parts, (k, v), strict=True):
        form.store(part, start, given)
    stored = [_shared(form.load(part, start + n, c.kv_heads, dtype), c.heads // c.kv_heads) for part in parts]
    mask = None
    if start:
        mask = torch.ones((n, start + n), dtype=torch.bool, device=qkv.device).tril(start)
    query, (keys, values) = q.transpose(0, 1)[None].to(dtype), stored
    result = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=c.attention_scale
    )
    return result[0].transpose(0, 1).reshape(n, -1).float()


def _split(c: DecoderConfig, qkv: Any) -> Any:
    return qkv.split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=1)


def _shared(part: Any, group: int) -> Any:
    """[kv_heads, n, head_dim] -> [1, heads, n, head_dim]: each once for every query head that shares it."""
    return part.repeat_interleave(group, dim=0)[None]
