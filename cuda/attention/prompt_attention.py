"""Attention of many tokens at once: one launch rotates queries and keys and fills the cache, torch does the rest.

    qkv      f32 [n, (heads + 2 kv_heads) * head_dim], as the products leave it, with biases added
    queries  halves or f32 [heads, n, head_dim], normalized where the model does, and rotated

A block serves a token and a key-value head, as those of attention.py do; blockIdx is (kv head, token).

For torch, a key-value head is a sequence of a batch, with the query heads that share it; its keys and values are the
same memory for all of these, and for f16 the cache itself. 32,768 positions of Llama 3 8B are 134 MB a layer. Repeated
for every query head they would be 537 MB more, written and read.
"""

import math
from typing import Any

import numpy as np
from bridge.cuda.attention import attention_shape, attention_vectors
from bridge.cuda.attention.kv_cache import KVForm
from bridge.cuda.toolchain.compiler import recipe
from bridge.cuda.toolchain.device import Device, view
from bridge.cuda.toolchain.intrinsics import ALIGNED, bits_float, shared_4, store_2, to_half
from bridge.cuda.toolchain.launch import Kernel
from bridge.cuda.toolchain.unroll import expand
from numba import cuda

from bridge.runtime.config.decoder_config import DecoderConfig

PREPARE_THREADS = 128

# set by `kernel`: query heads of a block, with those repeated, and their size; threads
HEADS = PADDED = HEAD_DIM = THREADS = 0
EXACT = False
turn: Any = None
keep: Any = None
float32 = np.float32
int32: Any = np.int32


def _prepare(qkv, q_norm, k_norm, cos, sin, keys, values, queries, rows, start, eps):
    thread = int32(cuda.threadIdx.x)
    kv_head = int32(cuda.blockIdx.x)
    token = int32(cuda.blockIdx.y)
    kv_heads = int32(cuda.gridDim.x)
    tokens = int32(cuda.gridDim.y)
    position = int32(start + token)
    row = qkv[token]
    vector = cuda.shared.array((PADDED + 1) * HEAD_DIM, float32, ALIGNED)
    turn(vector, row, q_norm, k_norm, cos, sin, kv_head, kv_heads, position, PADDED + 1, eps)
    keep(vector, row, keys, values, kv_head, kv_heads, rows, position)
    for i in range(thread, HEADS * HEAD_DIM, THREADS):
        head = i // HEAD_DIM
        index = ((kv_head * HEADS + head) * tokens + token) * HEAD_DIM + i % HEAD_DIM
        value = bits_float(shared_4(vector, int32(i)))
        if EXACT:
            queries[index] = value
        else:
            store_2(queries, index, to_half(value))


@recipe
def kernel(head_dim: int, group: int, rotated: int, neighbours: bool, normed: bool, exact: bool, kind: str) -> Kernel:
    """The kernel for heads of a shape, see attention.kernel; `exact`: queries are f32."""
    shape = attention_shape.shape(KVForm(kind, head_dim), group)
    constants = shape.constants
    function = expand(
        _prepare, f"{head_dim}_{group}_{rotated}_{int(neighbours)}{int(normed)}{int(exact)}_{kind}", EXACT=exact,
        THREADS=PREPARE_THREADS, **{name: constants[name] for name in ("HEADS", "PADDED", "HEAD_DIM")},
        **attention_vectors.functions(shape, rotated, neighbours, normed, PREPARE_THREADS),
    )  # fmt: skip
    reals, queries = "float32[::1]", "float32[::1]" if exact else "int16[::1]"
    types = ["float32[:,::1]", *[reals] * 4, *["int32[::1]"] * 2, queries, "int32", "int32", "float32"]
    return Kernel(function, f"void({', '.join(types)})")


def attend(
    c: DecoderConfig, qkv: Any, norms: tuple[Any, Any], angles: tuple[Any, Any], cache: tuple[KVForm, Any, Any],
    start: int, mask: Any, exact: bool, device: Device,
) -> Any:  # fmt: skip
    """Attention of n tokens at positions from `start` on: halves, or f32 with `exact`, [n, heads * head_dim].

    norms    f32 [head_dim] of queries and of keys, or None where they are not normalized
    angles   cos and sin f32 [rows, rotated / 2] of all positions
    cache    a layer's, where keys and values are stored
    mask     of `mask_from`
    """
    import torch

    n, group, (form, keys, values) = qkv.shape[0], c.heads // c.kv_heads, cache
    normed, dtype = norms[0] is not None, _dtype(exact)
    queries = torch.empty((c.kv_heads, group, n, c.head_dim), dtype=dtype, device=qkv.device)
    prepare = kernel(c.head_dim, group, c.rotated, c.graph.neighbours, normed, exact, form.kind)
    cos, sin = (part.reshape(-1) for part in angles)
    arrays = [qkv, *(norm if normed else cos for norm in norms), cos, sin, keys, values, queries.reshape(-1)]
    numbers = np.int32(form.rows(keys, c.kv_heads)), np.int32(start), np.float32(c.norm_eps)
    prepare.launch((c.kv_heads, n), PREPARE_THREADS, device.stream(), *map(view, arrays), *numbers)
    stored = (form.load(part, start + n, c.kv_heads, dtype)[:, None] for part in (keys, values))
    result = torch.nn.functional.scaled_dot_product_attention(
        queries, *(part.expand(-1, group, -1, -1) for part in stored), mask, is_causal=mask is None,
        scale=c.attention_scale,
    )  # fmt: skip
    return result.permute(2, 0, 1, 3).reshape(n, -1)


def mask_from(start: int, n: int, exact: bool, device: Any) -> Any:
    """What is added to the scores of n tokens from `start` on, of the queries' type, [n, start + n]: 0, or minus
    infinity where positions are later. None if torch's own causal mask does.

    Made once for all layers: of a mask of bool torch would make this in each. Rows begin at whole 16 bytes, as torch's
    kernels want them.
    """
    import torch

    if not start:
        return None
    count = start + n
    later = torch.full((n, -(-count // 8) * 8), -math.inf, dtype=_dtype(exact), device=device).triu_(start + 1)
    return later[:, :count]


def _dtype(exact: bool) -> Any:
    """The type of queries, keys and values."""
    import torch

    return torch.float32 if exact else torch.float16
