"""The verbs of a decoder for the tokens of a prompt, or a part of it: products of matrices, and torch's attention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.attention.attention_kind import AttentionKind
from bridge.cuda.attention.prompt_attention import PromptAttention
from bridge.cuda.context_memory import ContextMemory
from bridge.cuda.forms.dequantize import rows
from bridge.cuda.machine import Activation, CudaMachine, Normalized
from bridge.cuda.product.halves import normed
from bridge.cuda.product.mma_int8 import tiles_of
from bridge.cuda.product.products import Gated, Stack
from bridge.cuda.product.token_records import recorded
from bridge.cuda.toolchain.device import upload, zeros
from bridge.cuda.weights import DeviceWeights

from bridge.runtime.decoder.machine import Value
from bridge.runtime.decoder.walk import embed, walk
from bridge.runtime.layers.layers import Layer
from bridge.runtime.quant_tensor import QuantTensor


class Prompt(CudaMachine):
    """Tokens that follow those of the cache."""

    def __init__(self, weights: DeviceWeights, memory: ContextMemory, tokens: Sequence[int], given: Any = None):
        """`given` f32 [n, hidden]: states that the tokens come with."""
        super().__init__(weights, memory, len(tokens))
        self._given = given
        self._ids = upload(np.array(tokens, np.int32), self.device)
        self._start = memory.cache.length
        self._attention = PromptAttention(
            self.config, memory.cache, memory.positions, self.exact, self.device, self._start, self.n
        )

    def run(self, keep: int) -> Any:
        """Queue what they need; the normalized states of the last `keep`, f32 [keep, hidden]."""
        import torch

        model, c = self.weights.model, self.config
        states = walk(self, model, c, self.joined(embed(self, model, c), self._given))
        if states.values is not None:
            return states.values[self.n - keep :]
        self._take(states)
        self._add_to(states)
        # the last by itself: sums depend on how many rows there are, and logits on the last alone
        parts = states.x[self.n - keep :].tensor_split([keep - 1])
        return torch.cat([self._normalized_by_torch(part, states.weight, states.bias) for part in parts])

    def look_up(self, table: QuantTensor, name: str) -> Any:
        out = zeros(self.device, (self.n, table.shape[1]))
        rows(self.weights.table(table), self._ids, out, self.n, self.device.stream())
        return out

    def add_positions(self, x: Value, table: np.ndarray) -> None:
        self._changing(x).add_(self.weights.vector(table)[self._start : self._start + self.n])

    def _multiply(self, stack: Stack, x: Any, name: str, onto: Any = None) -> Any:
        return stack.multiply(x, onto=onto)

    def _operand(self, x: Value, then: Stack | Gated) -> Any:
        self._take(x)
        if isinstance(x, Activation) and x.values is None and isinstance(then, Stack):
            return x.gated.multiply(x.x, then)
        plain = isinstance(x, Normalized) and x.values is None and x.weight is not None
        if plain and not self.config.graph.layer_norm:
            self._add_to(x)
            eps, form = self.config.norm_eps, then.form(self.n)
            if form == "int8":
                return recorded(x.x, tiles_of(self.n), self.device, "norm", x.weight, eps)
            if form == "halves":
                return normed(x.x, x.weight, eps, self.device)
        return self.values(x)

    def _add_to(self, x: Normalized) -> None:
        """Add what is still to be added."""
        added, x.added = x.added, None
        if self._only_adds(added):
            self._multiply(added.stack, added.x, "", onto=x.x)
        elif added is not None:
            x.x.add_(self.rows(added), alpha=self.config.residual_scale)

    def _normalize(self, x: Normalized) -> Any:
        self._add_to(x)
        return self._normalized_by_torch(x.x, x.weight, x.bias)

    def _activate(self, x: Activation) -> Any:
        return x.gated.multiply(x.x)

    def attend(self, layer: Layer, index: int, q: Value, k: Value | None, v: Value | None) -> Any:
        if layer.latent_k is not None:
            queries = self.rows(q)
            mask = self._attention.mask(AttentionKind.of(self.config, index, False), queries.device)
            return self.memory.latent(layer, index).prompt(queries, self.rows(k), self._start, mask)
        result = self._attention.attend(
            index, self._together(q, k, v), self._head_norms(layer), self.weights.vector(layer.sinks)
        )
        c = self.config
        changes = c.graph.output_gate or c.graph.gate_matrix or c.value_scale != 1 or layer.attn_sub_norm is not None
        return result.float() if changes else result
