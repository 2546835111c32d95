"""The calls of a model with several streams of activations (AltUp), for the tables of a decoder: cpu/ops/stream_ops.py.

The first stream is the state that layers go on with. The others are made of the embeddings in the beginning, follow
the first layer by layer, and in the end all are joined again.
"""

from collections.abc import Sequence

import numpy as np

from bridge.runtime.cpu.ops import decoder_ops, stream_ops
from bridge.runtime.cpu.ops.program import Program, address, bits, buffer
from bridge.runtime.decoder.steps import Steps
from bridge.runtime.layers.layers import LayerStreams, Streams


class StreamBuffers:
    """The streams of n tokens, and a block of arguments for each layer.

    x    float32 [n, hidden], the state
    out  what `correct` makes of it for the layer's input
    """

    def __init__(self, layers: Sequence[LayerStreams], x: np.ndarray, out: np.ndarray, eps: float):
        self._x = x
        self._streams = [buffer(*x.shape) for _ in range(stream_ops.STREAMS)]
        self._projected = buffer(*x.shape)
        self._block = np.zeros((len(layers), stream_ops.WORDS), np.int64)
        for words, layer in zip(self._block, layers, strict=True):
            arrays = {
                stream_ops.X: x, stream_ops.OUT: out, stream_ops.ROUTER: layer.router,
                stream_ops.ROUTER_NORM: layer.router_norm, stream_ops.PREDICT: layer.predict,
                stream_ops.CORRECT: layer.correct, stream_ops.SCALE: layer.scale,
            }  # fmt: skip
            for word, array in arrays.items():
                words[word] = address(array)
            for i, stream in enumerate(self._streams):
                words[stream_ops.STREAM + i] = address(stream)
            words[stream_ops.HIDDEN], words[stream_ops.EPS] = x.shape[1], bits(eps)

    def begin(self, steps: Steps, weights: Streams) -> None:
        """The streams of the embeddings: others are as long."""
        first, *others = self._streams
        self._copy(steps.program, self._x, first)
        for stream, matrix in zip(others, weights.begin, strict=True):
            steps.products(self._x, [(matrix, stream)])
            self._as_long(steps.program, stream)

    def predict(self, program: Program, layer: int) -> None:
        """The streams, and x, before a layer."""
        self._call(program, "predict", address(self._block[layer]))

    def correct(self, program: Program, layer: int) -> None:
        """The streams, and `out`, after a layer, of x."""
        self._call(program, "correct", address(self._block[layer]))

    def add(self, program: Program, delta: np.ndarray) -> None:
        """All streams but the first += delta."""
        for stream in self._streams[1:]:
            self._add(program, stream, delta)

    def end(self, steps: Steps, weights: Streams) -> None:
        """x = the mean of all streams, the others as long as the first."""
        first, *others = self._streams
        self._copy(steps.program, first, self._x)
        for stream, matrix in zip(others, weights.end, strict=True):
            steps.products(stream, [(matrix, self._projected)])
            self._as_long(steps.program, self._projected)
            self._add(steps.program, self._x, self._projected)
        share = bits(1 / stream_ops.STREAMS)
        steps.program.add(decoder_ops.function("scale"), address(self._x), self._x.size, share, items=1)

    def _as_long(self, program: Program, y: np.ndarray) -> None:
        self._call(program, "as_long", address(y), address(self._streams[0]), y.shape[1])

    def _call(self, program: Program, name: str, *arguments: int) -> None:
        n = len(self._x)
        program.add(stream_ops.function(name), *arguments, items=n, shared=n > 1)

    def _copy(self, program: Program, x: np.ndarray, y: np.ndarray) -> None:
        """`norm` without a weight."""
        program.add(decoder_ops.function("norm"), address(x), 0, 0, address(y), x.shape[1], items=len(x))

    def _add(self, program: Program, x: np.ndarray, y: np.ndarray) -> None:
        program.add(decoder_ops.function("add"), address(x), address(y), x.size, items=1)
