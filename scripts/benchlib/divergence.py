"""A float model on a test text, and the KL divergence of the same model with other weights from it."""

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.converter import plan_checkpoint
from bridge.gguf_file.imatrix import write_imatrix
from bridge.quantize import quantize_model
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.experts import expert_pattern
from bridge.quantize.model.float_model import FloatModel as Streamed
from bridge.quantize.model.forward_passes import output_hessians
from bridge.quantize.quantizer import LayerHooks
from bridge.quantize.solve.hessian import token_weights
from bridge.quantize.text.default_text import openings
from bridge.quantize.text.mixture import CalibrationSet, calibration_sequences
from bridge.quantize.text.own_samples import own_samples
from bridge.quantize.text.sources import sources_of
from scripts.peers import reference
from scripts.peers.gguf_file import Blocks, replace_blocks
from scripts.peers.llama.llama_cpp import window_logits
from scripts.peers.predictions import window_kls


@dataclass(frozen=True)
class Divergence:
    """The KL divergence of each window, in nats a token: float64 [windows], those of one text after another's."""

    windows: np.ndarray
    texts: int = 1

    def by_text(self) -> "list[Divergence]":
        """The divergence of each text's windows."""
        return [Divergence(windows) for windows in self.windows.reshape(self.texts, -1)]

    @property
    def mean(self) -> float:
        return float(self.windows.mean())

    @property
    def error(self) -> float:
        """The standard error of the mean over windows."""
        return _standard_error(self.windows)

    def __str__(self) -> str:
        """The mean and its standard error over windows."""
        return f"{self.mean:.3e} ± {self.error:.1e}"

    def over(self, other: "Divergence") -> str:
        """The ratio of the means of the same windows, and its standard error, as text."""
        ratio, error = self.ratio(other)
        return f"{ratio:.3f} ± {error:.2g}"

    def ratio(self, other: "Divergence") -> tuple[float, float]:
        """The ratio of the means of the same windows, and its standard error: windows are compared in pairs."""
        ratio = self.mean / other.mean
        return ratio, _standard_error(self.windows - ratio * other.windows) / other.mean


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def imatrix_of(path: Path, floats: Path, squares: dict[str, np.ndarray], tokens: np.ndarray, text: str) -> None:
    """Write llama.cpp's importance matrix.

    floats   the float model's folder
    squares  weight name -> float32 [in]: mean squares of the inputs
    tokens   int64 [sequences, length], what they are of
    """
    planned, count = plan_checkpoint(floats, type="Q8_0").tensors, np.array([tokens.size])
    of_tensors = {t.name: (squares[str(t.source)][None], count) for t in planned if str(t.source) in squares}
    write_imatrix(path, of_tensors, tokens.shape[1], [text])


class FloatModel:
    """What is compared with: a model's weights and predictions, and the activations that an imatrix is made of.

    options      model, calibrate, test, samples, length, windows and threads, as the common options give them;
                 calibrate may be a list, as `quantize` takes it, and test one of several texts

    calibration  int64 [samples, length], what every quantizer sees
    held         how many of the last of these are held back, see `bridge.quantize.text.mixture`
    importance   weight name -> float32 [in]: the mean square of the linear's inputs
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        torch.set_num_threads(options.threads)
        self.folder = options.model
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        texts = options.calibrate if isinstance(options.calibrate, list) else [options.calibrate]

        def own(count: int, length: int) -> torch.Tensor | None:
            streamed = Streamed(open_checkpoint(self.folder))
            return own_samples(streamed, openings(tokenizer), [tokenizer.eos_token_id], count, length)

        calibration = calibration_sequences(sources_of(texts), tokenizer, options.samples, options.length, sampler=own)
        self.calibration, self.held = calibration.tokens.numpy(), calibration.held
        self.tests = options.test if isinstance(options.test, list) else [options.test]
        texts_read = [test.read_text(encoding="utf-8") for test in self.tests]
        windows = [reference.windows(tokenizer, text, options.windows, options.length) for text in texts_read]
        self._test = np.concatenate(windows)
        self.weights = reference.float_weights(self.folder)
        model = self.with_weights(self.weights)
        self._expected = reference.logits(model, self._test)
        self.importance = reference.mean_squares(model, self.calibration)
        self.about = (
            f"{self.folder.name}, {self.calibration.size} tokens of "
            f"{' and '.join(Path(text).name for text in texts)}, {options.windows} windows of "
            f"{' and '.join(test.name for test in self.tests)}."
        )

    def with_weights(self, weights: reference.Weights) -> torch.nn.Module:
        """The model with other weights."""
        return reference.hf_model(self.folder, weights)

    def divergence(self, other: torch.nn.Module | reference.Weights) -> "Divergence":
        """The KL divergence of a model or of this one with other weights."""
        model = other if isinstance(other, torch.nn.Module) else self.with_weights(other)
        return Divergence(window_kls(self._expected, reference.logits(model, self._test)), len(self.tests))

    def quantized(
        self, layer: Any, blocks: dict[str, Blocks] | None = None, **options: Any
    ) -> tuple["Divergence", float]:
        """The divergence after `quantize_model` with this method, and the seconds that quantizing took.

        blocks  gets the blocks of each linear
        """
        model = self.with_weights(self.weights)
        begun = time.perf_counter()
        tokens = torch.from_numpy(self.calibration)
        for name, done in quantize_model(model, tokens, layer, held=self.held, **options):
            if blocks is not None:
                blocks[f"{name}.weight"] = Blocks(done.grid.block.name, done.blocks(), getattr(done.grid, "scale", 1.0))
        seconds = time.perf_counter() - begun
        return self.divergence(model), seconds

    def in_llama_cpp(self, blocks: dict[str, Blocks], threads: int) -> "Divergence":
        """The divergence with linears of these blocks in llama.cpp, which rounds activations to 8 bits."""
        with tempfile.TemporaryDirectory() as folder:
            floats, quantized = Path(folder) / "floats.gguf", Path(folder) / "made.gguf"
            bridge.convert(self.folder, floats, type="F32")
            replace_blocks(floats, quantized, blocks)
            logits = window_logits(quantized, self._test, n_threads=threads)
        return Divergence(window_kls(self._expected, logits), len(self.tests))

    def gradients(self) -> LayerHooks:
        """A of each layer and how much the tokens count in its H, as `quantize_model` takes them."""
        model, tokens = Streamed(open_checkpoint(self.folder)), torch.from_numpy(self.calibration)
        held = CalibrationSet(tokens, held=self.held).held_tokens()
        norms: dict[str, torch.Tensor] = {}
        outputs = dict(output_hessians(model, tokens, ActivationStore(None), held=held, norms=norms.__setitem__))
        weights = lambda names: token_weights([norms.get(expert_pattern(name)) for name in names])  # noqa: E731
        return LayerHooks(outputs=outputs.get, weights=weights)
