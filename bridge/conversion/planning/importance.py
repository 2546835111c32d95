"""The importance of a model's columns, for tensors that are quantized from floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.models.outline import ModelTensor


@dataclass
class Importance:
    """The importance matrix: what a squared error in each column costs, by GGUF tensor; and the file it is from."""

    by_name: dict[str, np.ndarray]
    path: str | None = None
    ckpt: Checkpoint | None = None  # whose columns may be read with other scales than those of the model that was run

    @classmethod
    def read(cls, path: str | Path | None, ckpt: Checkpoint | None = None) -> Importance:
        """The importance matrix of llama.cpp's GGUF; an empty one without a path."""
        if path is None:
            return cls({})
        from bridge.gguf_file.imatrix import read_imatrix

        return cls(read_imatrix(Path(path)), str(path), ckpt)

    def check(self, tensors: Sequence[ModelTensor]) -> None:
        """BridgeError where it names no tensor of the model."""
        if self.by_name and not any(t.name in self.by_name for t in tensors):
            raise BridgeError("the imatrix names no tensor of this model; it was made for another one")

    def of(self, tensor: ModelTensor, part: int = 0) -> np.ndarray | None:
        """float32 [in] of one of a tensor's parts, in the GGUF's order; None where it is not known."""
        if not self.by_name:
            return None
        from bridge.gguf_file.imatrix import for_tensor

        experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
        importance = for_tensor(self.by_name, tensor.name, tensor.shape[-1], experts)
        if importance is None:
            return None
        if experts > 1:  # a part is of one expert, or of several
            parts = len(tensor.parts)
            first, stop = part * experts // parts, (part + 1) * experts // parts
            importance = importance[first : max(first + 1, stop)].mean(0)
        _, factors = self.ckpt.refit(tensor.parts[part].module) if self.ckpt else (None, None)
        if factors is not None:  # weights are larger by these, inputs smaller
            importance = importance / np.square(factors)
        folded = tensor.parts[part].columns if tensor.parts[part].folded else None
        return importance if folded is None else importance[folded]


def importance_of_tensors(
    tensors: Sequence[ModelTensor], layers: Mapping[str, tuple[np.ndarray, int]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What `write_imatrix` takes, of the tensors but the embeddings whose parts are all among the layers.

    layers  by module: the mean square of each input, float32 [columns] in the checkpoint's order, and the tokens seen
    """
    matrices: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for tensor in tensors:
        names = [part.layer or "" for part in tensor.parts]
        if tensor.kind == "token_embd" or not names or any(name not in layers for name in names):
            continue
        # parts of a fused matrix share their inputs
        rows = tensor.parts if len(tensor.shape) == 3 else tensor.parts[:1]
        squares = []
        for part in rows:
            mean_squares = layers[part.layer or ""][0]
            squares.append(mean_squares if part.columns is None or part.folded else mean_squares[part.columns])
        matrices[tensor.name] = np.stack(squares), np.array([layers[part.layer or ""][1] for part in rows])
    return matrices
