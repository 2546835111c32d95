"""A decoder's weights on a device, each uploaded when a token first comes to it."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
from bridge.cuda.attention import latent_attention
from bridge.cuda.product.matmul import Multiplier
from bridge.cuda.product.products import Gated, Stack, device_bytes
from bridge.cuda.recurrent.layer import DeviceRecurrent
from bridge.cuda.routed_experts import DeviceExperts
from bridge.cuda.toolchain.device import Device, upload

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.machine import Linear
from bridge.runtime.layers.layers import Experts, Recurrent, Weights
from bridge.runtime.quant_tensor import QuantTensor


def matrices_of(weights: Weights) -> list[QuantTensor]:
    """All matrices, each once."""
    matrices = {id(t): t for layer in weights.layers for t in layer.matrices}
    return [*(matrices | {id(t): t for t in (weights.embedding, weights.output, *weights.floating)}).values()]


def matrix_bytes(
    weights: Weights, config: DecoderConfig, precision: str, uploaded: Sequence[QuantTensor] = ()
) -> int:  # fmt: skip
    """Bytes that the matrices take on the device, beside those that are there already."""
    there = {*map(id, uploaded)}
    others = sum(layer.experts.router.nbytes for layer in weights.layers if layer.experts is not None)
    others += 0 if config.latent is None else config.layers * latent_attention.matrix_bytes(config, precision)
    return others + sum(device_bytes(t, precision) for t in matrices_of(weights) if id(t) not in there)


class DeviceWeights:
    """What was uploaded, by the tensors and arrays that it was made of. Pages of the file are released after that."""

    def __init__(
        self, model: Weights, config: DecoderConfig, device: Device, precision: str, other: Self | None = None
    ):  # fmt: skip
        """`other`: of the same file, of which nothing is uploaded again."""
        self.model, self.config, self.device, self.precision = model, config, device, precision
        self.multiplier = Multiplier(device, precision)
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {} if other is None else other._known

    def vector(self, array: np.ndarray | None) -> Any:
        """f32 of the array's shape; None of None."""
        return None if array is None else self._once("vector", [array], lambda: upload(array, self.device))

    def stack(self, linears: Sequence[Linear]) -> Stack:
        """Matrices that read the same, with their biases."""
        matrices = [matrix for matrix, _ in linears if matrix is not None]
        return self._once("stack", matrices, lambda: Stack(matrices, self.multiplier, self._joined(linears)))

    def table(self, tensor: QuantTensor) -> Any:
        """A matrix whose rows are looked up: the head's, where the two are one."""
        bias = self.model.output_bias if tensor is self.model.output else None
        return self.stack([(tensor, bias)]).parts[0][1]

    def gated(self, gate: Linear, up: Linear, activation: str) -> Gated:
        """The first matrices of a network."""
        matrices = [matrix for matrix, _ in (gate, up) if matrix is not None]
        linears = [gate, up] if up[0] is not None else [gate]
        return self._once(
            "gated", matrices,
            lambda: Gated(gate[0], up[0], self.multiplier, self._joined(linears), activation),
        )  # fmt: skip

    def experts(self, experts: Experts) -> DeviceExperts:
        """A layer's experts, with their router."""

        def upload_all() -> DeviceExperts:
            uploaded = DeviceExperts(experts, self.config, self.multiplier)
            for matrix in chain(*experts.networks, experts.shared or ()):
                if matrix is not None:
                    matrix.release_raw()
            return uploaded

        return self._once("experts", [experts], upload_all)

    def multiply_lengths(self) -> None:
        """Products of experts with all numbers of tokens that take other kernels, so that these can be noted."""
        for layer in self.model.layers:
            if layer.experts is not None:
                self.experts(layer.experts).multiply_lengths()

    def recurrent(self, layer: Recurrent) -> DeviceRecurrent:
        """A layer with a state."""

        def upload_all() -> DeviceRecurrent:
            recurrent, eps = self.config.recurrent, self.config.norm_eps
            assert recurrent is not None
            second = [self.stack([(matrix, None)]).multiply for matrix in layer.second]
            return DeviceRecurrent(layer, recurrent, eps, self.device, second)

        return self._once("recurrent", [layer], upload_all)

    def _once(self, kind: str, parts: Sequence[Any], make: Callable[[], Any]) -> Any:
        key = kind, *map(id, parts)
        if key not in self._known:
            self._known[key] = parts, make()  # the parts stay, so that no others get their ids
            for part in parts:
                if hasattr(part, "release_raw"):
                    part.release_raw()
        return self._known[key][1]

    def _joined(self, linears: Sequence[Linear]) -> Any:
        """One vector of all biases, zeros for those that are missing; None if all are."""
        if all(bias is None for _, bias in linears):
            return None
        biases = [np.zeros(m.shape[0], np.float32) if bias is None else bias for m, bias in linears if m is not None]
        return upload(np.concatenate(biases), self.device)
