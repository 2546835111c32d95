"""What is told of each block while a model is quantized: time, errors beside rounding to nearest, and what is left.

    block 3 of 36: 412 s, 239 tokens a second; error 0.41 of rounding to nearest (q_proj 0.38, ..., down_proj 0.44);
    about 3.8 h left

A block is finished when its last layer is; the passes to the next block's inputs count with the next one. The clock
starts with the first layer: what comes before it, as the gradients, comes once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.quantize.layer_store import StoredLayer
from bridge.system.kernels import compiling
from bridge.system.text import duration_text

_RECORDED = ("type", "error", "nearest", "alone", "damping", "tokens")  # of a layer
_NAMED = 12  # layers of a block that are named; of experts, there may be hundreds


class BlockLog:
    """Follows a run; made before its first layer.

    blocks   the names of the layers that are quantized, block by block; the output head is a block of its own
    weights  how many a layer has
    tokens   that pass through the model
    layers   those that are finished, which grow meanwhile
    say      called with a line for each block

    records  by block: its number from 0, seconds, tokens a second, seconds left by estimate, and by layer its type,
             error, error of rounding to nearest, whether its weights were rounded alone, damping, tokens and seconds.
             Times of blocks finished in an earlier run are those of their layers alone
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[str]],
        weights: Mapping[str, int],
        tokens: int,
        layers: Mapping[str, StoredLayer],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._blocks, self._weights, self._tokens, self._layers = blocks, weights, tokens, layers
        self._say = say or (lambda line: None)
        self._begun = self._since = compiling.clock()
        self._before = set(layers)
        self._started = False  # with a layer
        self.records: list[dict[str, Any]] = []
        for number, names in enumerate(blocks):
            if names and self._before.issuperset(names):
                self._record(number, names, sum(layers[name].seconds for name in names))

    def layer(self, layer: StoredLayer) -> None:
        """A layer, or some rows of it, is finished."""
        if not self._started:
            self._started = True
            self._begun = self._since = compiling.clock() - layer.seconds
        number, names = next((i, block) for i, block in enumerate(self._blocks) if layer.name in block)
        if all(name in self._layers for name in names):
            now = compiling.clock()
            self._record(number, names, now - self._since)
            self._since = now
            self._say(self._line(self.records[-1]))

    def _record(self, number: int, names: Sequence[str], seconds: float) -> None:
        layers = {name: self._layers[name] for name in names}
        by_layer = {
            name: {key: getattr(layer, key) for key in _RECORDED} | {"seconds": round(layer.seconds, 3)}
            for name, layer in layers.items()
        }
        speed, left = round(self._tokens / max(seconds, 1e-3), 1), round(self._left(), 1)
        self.records.append({
            "block": number, "seconds": round(seconds, 3), "tokens_a_second": speed, "seconds_left": left,
            "layers": by_layer,
        })  # fmt: skip

    def _left(self) -> float:
        """Seconds, from the weights that are left and the time that those of this run took."""
        done = sum(self._weights[name] for name in self._layers.keys() - self._before if name in self._weights)
        left = sum(self._weights[name] for names in self._blocks for name in names if name not in self._layers)
        return left * (compiling.clock() - self._begun) / done if done else 0.0

    def _line(self, record: Mapping[str, Any]) -> str:
        layers = record["layers"]
        ratios = {name: layer["error"] / layer["nearest"] for name, layer in layers.items() if layer["nearest"]}
        text = f"block {record['block'] + 1} of {len(self._blocks)}: {duration_text(record['seconds'])}, "
        text += f"{record['tokens_a_second']:.0f} tokens a second"
        if ratios:
            text += f"; error {sum(ratios.values()) / len(ratios):.2f} of rounding to nearest"
            if len(ratios) <= _NAMED:
                named = [f"{name.rpartition('.')[2]} {ratio:.2f}" for name, ratio in ratios.items()]
                text += f" ({', '.join(named)})"
            else:
                worst = max(ratios, key=lambda name: ratios[name])
                text += f" ({worst} {ratios[worst]:.2f} at most)"
        left = record["seconds_left"]
        return f"{text}; about {duration_text(left)} left" if left else text
