"""The next token from logits: greedily, or drawn at random from the likely ones.

In llama.cpp's order: the top_k most likely; of these the fewest whose probabilities sum to top_p; of these
the ones at least min_p times as likely as the first; then the temperature, then the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge.errors import BridgeError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 leave everything in; seed None: another every time."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise BridgeError(f"seed {self.seed}: 0 or more are possible; without one it is another every time")
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise BridgeError(
                f"sampling with temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}, min_p "
                f"{self.min_p}: temperature and top_k are at least 0, top_p is in (0, 1], min_p in [0, 1]"
            )


class Sampler:
    """Draws tokens one after another."""

    def __init__(self, how: Sampling):
        self.how = how
        self._random = np.random.default_rng(how.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """A token for logits float32 [vocab]. Raises BridgeError where they are NaN, or none is finite."""
        best = int(logits.argmax())  # NaN, where there is one, counts as the largest
        if not np.isfinite(top := logits[best]):
            raise BridgeError(f"the model computes {top} for the next token: the file is damaged; convert it again")
        if self.how.temperature == 0:
            return best
        tokens, scores = self._candidates(logits.astype(np.float64))
        weights = np.cumsum(np.exp((scores - scores[0]) / self.how.temperature))
        drawn = self._random.random() * weights[-1]
        return int(tokens[min(np.searchsorted(weights, drawn, "right"), len(tokens) - 1)])

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count]: the numbers in [0, 1) that as many draws would use, for a device that draws by itself."""
        return self._random.random(count)

    def _candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that remain, most likely first, and their logits."""
        k = self.how.top_k
        if 0 < k < logits.size:
            tokens = np.argpartition(logits, -k)[-k:]
            tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
        else:
            tokens = np.argsort(-logits, kind="stable")
        scores = logits[tokens]
        weights = np.exp(scores - scores[0])
        kept = len(tokens)
        if self.how.top_p < 1:
            kept = int(np.searchsorted(np.cumsum(weights), self.how.top_p * weights.sum())) + 1
        if self.how.min_p > 0:
            kept = min(kept, int((weights >= self.how.min_p).sum()))
        return tokens[:kept], scores[:kept]
