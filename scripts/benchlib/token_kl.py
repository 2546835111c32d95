"""How far a GGUF's predictions are from a float model's, token by token: in float32, and in llama.cpp.

In float32, transformers runs the file's weights, all of them, dequantized; llama.cpp rounds activations to 8 bits. The
float model runs again for each file: kept, its logits would take 16 GB for five dozen windows of 262,144 tokens.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from scripts.peers import reference
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import token_kls

from .divergence import Divergence

FLOAT32, LLAMA_CPP = ARITHMETICS = "float32", "llama.cpp"
Logits = Callable[[np.ndarray], np.ndarray]  # of a window int64 [length]: float32 [length, vocab]


@dataclass(frozen=True)
class TokenKl:
    """The divergence of each token of a text, and whether the most probable next token is the float model's.

    kl    float64 [windows, length], nats
    same  bool [windows, length]
    """

    kl: np.ndarray
    same: np.ndarray

    def save(self, path: Path, identity: str) -> None:
        """Write the divergences; `identity` names the file and the text that they are of."""
        np.savez(path, kl=self.kl, same=self.same, identity=np.array(identity))

    @classmethod
    def load(cls, path: Path, identity: str) -> Self | None:
        """The divergences that `save` has written; None where there are none of this identity."""
        if not path.exists():
            return None
        with np.load(path) as arrays:
            return cls(arrays["kl"], arrays["same"]) if str(arrays["identity"]) == identity else None

    @property
    def windows(self) -> Divergence:
        """The mean divergence of each window."""
        return Divergence(self.kl.mean(1))

    def figures(self) -> dict[str, float]:
        """Mean with its standard error over windows, median and 99th percentile of tokens, share of same top tokens."""
        median, last = np.quantile(self.kl, (0.5, 0.99))
        mean = self.windows
        return {
            "kl": mean.mean, "kl_error": mean.error, "median": float(median), "p99": float(last),
            "same_top": float(self.same.mean()),
        }  # fmt: skip


class FloatReference:
    """A float model's folder, run beside GGUFs of the same model.

    floats  the model, in transformers
    """

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder, self.threads = folder, threads
        self.floats = reference.hf_model(folder, reference.float_weights(folder))

    @torch.no_grad()
    def logits(self, window: np.ndarray) -> np.ndarray:
        """float32 [length, vocab] of a window int64 [length]."""
        return _logits(self.floats, window)


class Beside(ExitStack):
    """A GGUF of the float model, for windows of at most `length` tokens; it is read when it is first needed."""

    def __init__(self, model: FloatReference, file: Path, length: int) -> None:
        super().__init__()
        self._model, self._file, self._length = model, file, length
        self._opened: dict[str, Logits] = {}

    @torch.no_grad()
    def compare(self, windows: np.ndarray, arithmetics: Iterable[str]) -> dict[str, TokenKl]:
        """The divergence in each of some ARITHMETICS, on windows int64 [windows, length] of a text."""
        kls: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {arithmetic: [] for arithmetic in arithmetics}
        for window in windows:
            expected = self._model.logits(window)
            for arithmetic, measured in kls.items():
                logits = self._in(arithmetic)(window)
                measured.append((token_kls(expected, logits), expected.argmax(-1) == logits.argmax(-1)))
        return {arithmetic: TokenKl(*map(np.stack, zip(*pairs, strict=True))) for arithmetic, pairs in kls.items()}

    def _in(self, arithmetic: str) -> Logits:
        if arithmetic not in self._opened:
            self._opened[arithmetic] = self._llama_cpp() if arithmetic == LLAMA_CPP else self._float32()
        return self._opened[arithmetic]

    def _llama_cpp(self) -> Logits:
        model = self.enter_context(LlamaCpp(self._file, n_ctx=self._length, n_threads=self._model.threads))
        return lambda window: model.logits(window.tolist())

    def _float32(self) -> Logits:
        folder = self._model.folder
        with open_source(self._file, config=folder, by_family=True) as opened:
            model = reference.hf_model(folder, reference.checkpoint_weights(opened))
        return partial(_logits, model)


def _logits(model: torch.nn.Module, window: np.ndarray) -> np.ndarray:
    logits: np.ndarray = model(torch.from_numpy(window[None])).logits[0].numpy()
    return logits
