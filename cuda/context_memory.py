"""What a context has on a device: keys and values, states, and what depends on positions."""

from typing import Any

from bridge.cuda.attention.kv_cache import KVCache
from bridge.cuda.attention.latent_attention import LatentAttention, LatentBuffers
from bridge.cuda.positions import Positions
from bridge.cuda.recurrent.layer import DeviceState
from bridge.cuda.weights import DeviceWeights

from bridge.runtime.layers.layers import Layer


class ContextMemory:
    """The memory of one context, of which the step and prompts read and write the same."""

    def __init__(self, weights: DeviceWeights, cache: KVCache):
        c, device = weights.config, weights.device
        cache.reserve(device)
        self.cache, self._weights = cache, weights
        factors = weights.model.factors(cache.context, c.rope_original_context)
        self.positions = Positions(c, cache.rows, factors, device)
        self._buffers: LatentBuffers | None = None
        if c.latent is not None:
            self._buffers = LatentBuffers(c, cache.context, device)
        self._latent: dict[int, LatentAttention] = {}

    def recurrent(self, layer: int) -> tuple[Any, Any]:
        """The last inputs of a layer's convolution, and its state: see recurrent/layer.py."""
        return self._of(self.cache.state, layer)

    def _of(self, state: DeviceState | None, layer: int) -> tuple[Any, Any]:
        recurrent = self._weights.config.recurrent
        assert recurrent is not None
        assert state is not None
        index = recurrent.index_of(layer)
        return state.tails[index], state.heads[index]

    def keep(self, token: int, layer: int) -> None:
        """Copy a layer's state after the token of that number, of a step of several: see `KVCache.passed`."""
        for now, kept in zip(self.recurrent(layer), self._of(self.cache.passed[token], layer), strict=True):
            kept.copy_(now)

    def latent(self, layer: Layer, index: int) -> LatentAttention:
        """The attention of a layer to latent vectors."""
        if index not in self._latent:
            weights, c = self._weights, self._weights.config
            assert self._buffers is not None
            slot, (_, _, temperatures) = self.cache.slots[c.stored[index]], self.positions.of(index)
            self._latent[index] = LatentAttention(
                layer, c, index, slot.keys, self.cache.kind, weights.device, weights.precision, self.positions.angles,
                temperatures, self._buffers,
            )  # fmt: skip
            for matrix in (layer.latent_k, layer.latent_v):
                if matrix is not None:
                    matrix.release_raw()
        return self._latent[index]
