"""What a model makes of a whole text's states: one vector, or a score of how well a document answers a query."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.experts import ACTIVATIONS
from bridge.runtime.layers.layer_reader import expect, vector
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.tokenizer import Tokenizer

POOLINGS = ("mean", "cls", "last")
_TEMPLATE = "tokenizer.chat_template.rerank"


def dense_layers(file: GGUFFile, hidden: int) -> list[QuantTensor]:
    """The matrices that a pooled vector is multiplied by, one after another; raises BridgeError for other shapes."""
    layers: list[QuantTensor] = []
    for name in ("dense_2.weight", "dense_3.weight"):
        if (layer := file.tensors.get(name)) is not None:
            layers.append(expect(layer, layer.shape[0], layers[-1].shape[0] if layers else hidden))
    return layers


class Pooler:
    """One vector of the states of a text, which come part by part; a `Reader` of `Batch`.

    pooling  "mean" of all tokens' states, that of the first ("cls"), or that of the "last"
    dense    matrices that the vector is multiplied by
    """

    def __init__(self, pooling: str, dense: list[QuantTensor] | None = None):
        if pooling not in POOLINGS:
            raise BridgeError(f"{parameter('pooling', pooling)}: choose {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}")
        self._pooling, self._dense = pooling, dense or []
        self._sum, self._count = np.zeros(0), 0

    def __call__(self, position: int, states: np.ndarray) -> None:
        """States float32 [n, hidden] of the tokens from `position` on."""
        if position and self._pooling == "cls":
            return
        if self._pooling != "mean":
            states = states[:1] if self._pooling == "cls" else states[-1:]
        summed = states.sum(0, dtype=np.float64)
        if position and self._pooling == "mean":
            self._sum, self._count = self._sum + summed, self._count + len(states)
        else:
            self._sum, self._count = summed, len(states)

    def vector(self, normalize: bool, size: int | None = None) -> np.ndarray:
        """float32 [size], of length 1 if `normalize`; the first of all, or all."""
        values = self._sum / self._count
        for layer in self._dense:
            values = layer.matmul(values[None].astype(np.float32), precision="f32")[0]
        values = values[:size]
        norm = float(np.linalg.norm(values)) if normalize else 1.0
        return (values / norm if norm else values).astype(np.float32)


class Ranker:
    """Scores documents for a query by the head of a reranker.

    pooling  what makes the vector that the head reads
    """

    def __init__(self, file: GGUFFile, config: DecoderConfig, tokenizer: Tokenizer):
        """Raises BridgeError where the file has no such head."""
        self._tokenizer, self._graph, self._eps = tokenizer, config.graph, config.norm_eps
        self._dense = _linear(file, "cls", config.hidden)
        self._norm = vector(file, "cls.norm.weight", config.hidden)
        self._out = _linear(file, "cls.output", config.hidden)
        if self._dense is None and self._out is None:
            raise BridgeError(f"{file.path}: is no reranker, it has no head that scores documents; use embed")
        self.pooling = config.head_pooling
        template = _text(file.metadata, _TEMPLATE)
        self._template = template

    def tokens(self, query: str, document: str) -> list[int]:
        """The token ids of a query and a document, as llama-server puts them together."""
        if self._template is None:
            return self._tokenizer.encode_pair(query, document)
        parts = {"{query}": query, "{document}": document}
        first = min(parts, key=self._template.find)
        begin, _, rest = self._template.partition(first)
        second = next(name for name in parts if name != first)
        middle, _, end = rest.partition(second)
        return self._tokenizer.encode(begin + parts[first] + middle + parts[second] + end, add_special=False)

    def score(self, pooled: np.ndarray) -> float:
        """How well a document answers a query, for a pooled vector float32 [hidden]: larger is better."""
        values = pooled
        if self._dense is not None:
            values = _product(self._dense, values)
            values = ACTIVATIONS["erf"](values, np.float32(1)) if self._graph.head_gelu else np.tanh(values)
            if self._norm is not None:
                centred = values - values.mean()
                values = centred / np.sqrt(np.mean(centred * centred) + self._eps) * self._norm
        if self._out is not None:
            values = _product(self._out, values)
        if self._graph.head_softmax:
            shares = np.exp(values - values.max())
            values = shares / shares.sum()
        return float(values[0])


_Linear = tuple[np.ndarray, np.ndarray | None]


def _linear(file: GGUFFile, name: str, hidden: int) -> _Linear | None:
    """A matrix, and a bias or None, as floats; None where the file has none."""
    matrix = file.tensors.get(f"{name}.weight")
    if matrix is None:
        return None
    values = expect(matrix, matrix.shape[0], hidden).dequantize()
    return values, vector(file, f"{name}.bias", len(values))


def _product(linear: _Linear, x: np.ndarray) -> np.ndarray:
    matrix, bias = linear
    return matrix @ x if bias is None else matrix @ x + bias


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None
