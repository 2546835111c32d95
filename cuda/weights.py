"""A decoder's weights on the device, the twin of bridge/runtime/weights.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.buffers import upload
from bridge.cuda.device import Device
from bridge.cuda.kv_cache import KVCache
from bridge.cuda.matmul import Multiplier
from bridge.cuda.products import Gated, Stack, device_bytes

from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.weights import Layer, Weights


def matrix_bytes(w: Weights, precision: str) -> int:
    """Bytes that the matrices take on the device."""
    matrices = {id(t): t for t in (w.embedding, w.output, *(m for layer in w.layers for m in layer.matrices))}
    return sum(device_bytes(tensor, precision) for tensor in matrices.values())


class DeviceLayer:
    """A layer's matrices and vectors on the device."""

    def __init__(self, layer: Layer, multiplier: Multiplier):
        def vector(array: np.ndarray | None) -> Any:
            return None if array is None else upload(array, multiplier.device)

        self.attn_norm, self.ffn_norm = vector(layer.attn_norm), vector(layer.ffn_norm)
        self.q_norm, self.k_norm = vector(layer.q_norm), vector(layer.k_norm)
        attention = [layer.q, layer.k, layer.v]
        biases = vector(_joined(attention, [layer.q_bias, layer.k_bias, layer.v_bias]))
        self.qkv = Stack(attention, multiplier, biases)
        self.o = Stack([layer.o], multiplier, vector(layer.o_bias))
        biases = vector(_joined([layer.gate, layer.up], [layer.gate_bias, layer.up_bias]))
        self.gated = Gated(layer.gate, layer.up, multiplier, biases)
        self.down = Stack([layer.down], multiplier, vector(layer.down_bias))


class DeviceWeights:
    """All of a model's: layers, embedding, output and its norm, and angles f32 [rows, rotated / 2].

    Pages of the file are let go of as layers are uploaded.
    """

    def __init__(self, w: Weights, c: DecoderConfig, cache: KVCache, device: Device, precision: str):
        multiplier = Multiplier(device, precision)
        self.layers = []
        for layer in w.layers:
            self.layers.append(DeviceLayer(layer, multiplier))
            for matrix in layer.matrices:
                matrix.release_raw()
        self.output_norm = upload(w.output_norm, device)
        self.output = Stack([w.output], multiplier)
        tied = w.output is w.embedding
        self.embedding = (self.output if tied else Stack([w.embedding], multiplier)).parts[0][1]
        self.cos, self.sin = (upload(angles, device) for angles in c.angles(cache.rows, w.rope_factors))


def _joined(matrices: Sequence[Any], biases: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """One vector of all biases, zeros for those that are missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(matrices, biases, strict=True)
    return np.concatenate([np.zeros(m.shape[0], np.float32) if b is None else b for m, b in pairs])
