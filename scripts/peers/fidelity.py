"""How far a GGUF on disk is from the checkpoint it was made from.

The converter takes no part: the GGUF is dequantized by `gguf`, mapped back to Hugging Face's names and row order by
`gguf_file`, and both models run in `transformers`. Only the checkpoint is read by the project's readers, which have
tests of their own.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from scripts.peers import reference
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.predictions import mean_kl
from scripts.peers.reference import Weights


class Reference:
    """A checkpoint in float, and its predictions on the first windows of a text.

    folder      the checkpoint's
    checkpoint  as `bridge.open_checkpoint` returns it
    text        at least n * length tokens of it

    act_order   weight -> int32 [in], the group of each column, where groups are not sequential
    """

    def __init__(self, folder: Path, checkpoint: Any, text: str, n: int = 24, length: int = 256) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        self.weights = reference.checkpoint_weights(checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokens = reference.windows(self.tokenizer, text, n, length)
        self.linears = [f"{name}.weight" for name in checkpoint.modules]
        groups = {f"{name}.weight": checkpoint.group_order(name) for name in checkpoint.modules}
        self.act_order = {name: group for name, group in groups.items() if group is not None}

    @cached_property
    def logits(self) -> np.ndarray:
        """float32 [n, length, vocab]"""
        return self.predict(self.weights)

    def predict(self, weights: Weights, tokens: np.ndarray | None = None) -> np.ndarray:
        """float32 [n, length, vocab]: logits of the same model with these weights, after each token."""
        return reference.logits(reference.hf_model(self.folder, weights), self.tokens if tokens is None else tokens)

    def kl(self, weights: Weights) -> float:
        """Mean KL divergence, in nats a token, of the same model with other weights."""
        return mean_kl(self.logits, self.predict(weights))

    def linears_of(self, other: Weights) -> dict[str, np.ndarray]:
        """The checkpoint's weights with the quantized linears of `other`."""
        return self.weights | {name: other[name] for name in self.linears}

    def unfold(self, weights: Weights) -> dict[str, np.ndarray]:
        """Undo the folding of an act-order down_proj: restore its columns, and the rows of gate and up."""
        unfolded = dict(weights)
        for name, group in self.act_order.items():
            if not name.endswith("mlp.down_proj.weight"):
                continue
            back = np.argsort(np.argsort(group, kind="stable"), kind="stable")
            unfolded[name] = weights[name][:, back]
            for producer in ("gate_proj", "up_proj"):
                rows = name.replace("down_proj", producer)
                unfolded[rows] = weights[rows][back]
        return unfolded


@dataclass
class Measured:
    """A GGUF against its checkpoint; divergences in nats a token, NaN where they were not requested."""

    types: Counter  # block type -> number of linears
    bpw: float  # bits per weight over the linears
    error: dict[str, float]  # of each linear: sum (w' - w)^2
    power: dict[str, float]  # sum w^2, w the checkpoint's
    kl_linears: float = math.nan  # with the linears of the GGUF
    kl_file: float = math.nan  # with all its tensors

    @property
    def nmse(self) -> float:
        """Squared error over squared weights, of all linears together."""
        return self.nmse_of(self.error)

    def nmse_of(self, names: Iterable[str]) -> float:
        """Squared error over squared weights, of some linears together."""
        chosen = list(names)
        return sum(self.error[name] for name in chosen) / sum(self.power[name] for name in chosen)


def measure(path: Path, against: Reference, predictions: bool = True, weights: Weights | None = None) -> Measured:
    """Measure the GGUF at `path`: its weights and, with `predictions`, its logits.

    weights  its tensors by Hugging Face names, columns unfolded; None: as `gguf_weights` reads them
    """
    blocks = [
        tensor
        for tensor in gguf.GGUFReader(str(path)).tensors
        if tensor.name.startswith("blk.") and tensor.name.endswith(".weight") and len(tensor.shape) == 2
    ]
    weights = against.unfold(gguf_weights(path)) if weights is None else weights
    measured = Measured(
        types=Counter(tensor.tensor_type.name for tensor in blocks),
        bpw=8 * sum(int(t.n_bytes) for t in blocks) / sum(int(t.n_elements) for t in blocks),
        error={name: _square(weights[name] - against.weights[name]) for name in against.linears},
        power={name: _square(against.weights[name]) for name in against.linears},
    )
    if predictions:
        measured.kl_linears = against.kl(against.linears_of(weights))
        measured.kl_file = against.kl(weights)
    return measured


def _square(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())
