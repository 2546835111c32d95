"""Attention on latent vectors as rows of a table of calls; cpu/ops/latent_attention.py has the formulas.

Between the products that make queries and latent vectors and the one of `attn_output`, each head has two matrices of
its own, for keys and for values: stacks of floats (`layer_reader.py` unpacks those of blocks).
"""

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines.floats import SIZES
from bridge.runtime.cpu.ops import attention as attn
from bridge.runtime.cpu.ops import latent_attention
from bridge.runtime.cpu.ops.program import Program, address, buffer
from bridge.runtime.layers.layers import Layer
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE


class LatentBuffers:
    """What attention on latent vectors has between its products, for n tokens.

    q_a      [n, query rank]
    queries  [n, heads, width]: as wide as a row of the cache
    latents  [n, heads, rank]: of the latent vectors that each head attended to
    """

    def __init__(self, c: DecoderConfig, n: int):
        assert c.latent is not None
        self.sizes = c.latent
        self.q_a = buffer(n, c.latent.query_rank)
        self.width = -(-c.head_dim // attn.LANES) * attn.LANES
        self.queries, self.latents = buffer(n, c.heads * self.width), buffer(n, c.heads * c.latent.rank)

    def fill(self, block: np.ndarray, layer: Layer, q: np.ndarray, m: int) -> None:
        """The words of a layer's block that differ from those of other attention; q [n, heads, plain + rotated]."""
        block[attn.Q], block[attn.OUT] = address(self.queries[m:]), address(self.latents[m:])
        block[attn.PRODUCTS], block[attn.K_NORM] = address(q[m:]), address(layer.k_norm)
        block[attn.HEAD_DIM], block[attn.PLAIN] = self.sizes.rank, self.sizes.plain

    def add_absorbed(self, program: Program, stack: QuantTensor, q: np.ndarray, heads: int) -> None:
        """The first elements of the queries: each head's matrix of keys times the plain part of q."""
        _add_by_head(program, stack, (q, q.shape[1] // heads), (self.queries, self.width))

    def add_values(self, program: Program, stack: QuantTensor, attended: np.ndarray) -> None:
        """Each head's matrix of values times what it attended to."""
        _add_by_head(program, stack, (self.latents, self.sizes.rank), (attended, self.sizes.value))


def _add_by_head(program: Program, stack: QuantTensor, x: tuple[np.ndarray, int], y: tuple[np.ndarray, int]) -> None:
    """y[t, h] = stack[h] x[t, h]; x and y: arrays [n, heads * step], and the step from a head to the next."""
    heads, rows, columns = stack.shape
    sizes = np.array([rows, columns, SIZES[stack.type] * columns, x[0].shape[1], x[1], y[0].shape[1], y[1]], np.int64)
    arguments = address(stack.raw), address(x[0]), address(y[0]), address(sizes), len(x[0])
    shared = stack.nbytes * len(x[0]) >= MIN_BYTES_TO_SHARE
    program.add(latent_attention.heads_function(stack.type), *arguments, items=heads * rows, shared=shared)
    program.keep(stack, sizes)
