"""How far a GGUF's predictions are from a float model's, token by token: in float32, and in llama.cpp.

In float32, transformers runs the file's weights, all of them, dequantized; llama.cpp rounds activations to 8 bits. The
float model runs again for each file: kept, its logits would take 16 GB for five dozen windows of 262,144 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bridge.conversion.gguf_checkpoint import open_source
from scripts.peers import reference
from scripts.peers.llama_cpp import LlamaCpp
from scripts.peers.predictions import token_kls

from .divergence import Divergence


@dataclass(frozen=True)
class TokenKl:
    """The divergence of each token of a text, and whether the most probable next token is the float model's.

    kl    float64 [windows, length], nats
    same  bool [windows, length]
    """

    kl: np.ndarray
    same: np.ndarray

    @property
    def windows(self) -> Divergence:
        """The means of windows."""
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
    """A float model's folder, run beside GGUFs of the same model."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self.folder, self._threads = folder, threads
        self._floats = reference.hf_model(folder, reference.float_weights(folder))

    @torch.no_grad()
    def mean_squares(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Weight name -> float32 [in]: the mean square of the inputs of each of the decoder's linears.

        tokens  int64 [sequences, length]
        """
        sums: dict[str, torch.Tensor] = {}
        hooks = []
        for name, module in self._floats.named_modules():
            if f"{name}.weight" in reference.linears([f"{name}.weight"]):

                def add(_module: torch.nn.Module, inputs: tuple[torch.Tensor], key: str = f"{name}.weight") -> None:
                    sums[key] = sums.get(key, 0) + inputs[0].double().square().sum((0, 1))

                hooks.append(module.register_forward_pre_hook(add))
        for sequence in torch.from_numpy(tokens):
            self._floats.base_model(sequence[None])
        for hook in hooks:
            hook.remove()
        return {key: (total / tokens.size).float().numpy() for key, total in sums.items()}

    @torch.no_grad()
    def divergences(self, file: Path, windows: np.ndarray, llama_cpp: bool = False) -> TokenKl:
        """Of a GGUF on windows of a text, int64 [windows, length]; with `llama_cpp` there instead of in float32."""
        if llama_cpp:
            with LlamaCpp(file, n_ctx=windows.shape[1], n_threads=self._threads) as model:
                return self._compare(windows, lambda window: model.logits(window.tolist()))
        with open_source(file, config=self.folder, by_family=True) as opened:
            other = reference.hf_model(self.folder, reference.checkpoint_weights(opened))
        return self._compare(windows, lambda window: other(torch.from_numpy(window[None])).logits[0].numpy())

    def _compare(self, windows: np.ndarray, logits: Callable[[np.ndarray], np.ndarray]) -> TokenKl:
        kls, same = [], []
        for window in windows:
            expected = self._floats(torch.from_numpy(window[None])).logits[0].numpy()
            found = logits(window)
            kls.append(token_kls(expected, found))
            same.append(expected.argmax(-1) == found.argmax(-1))
        return TokenKl(np.stack(kls), np.stack(same))
