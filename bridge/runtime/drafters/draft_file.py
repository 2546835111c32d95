"""A drafter's GGUF: its metadata and tensors, checked against the model that it guesses tokens for."""

from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.architectures import DRAFTERS
from bridge.gguf_file.header import Metadata
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.layers.layer_reader import expect, vector
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.tokenizer import Tokenizer, common_prefix

_NO_LAYERS_OF_A_MODEL = "nextn_predict_layers", "attention.shared_kv_layers"  # all its layers predict, and share


class DraftFile:
    """A drafter's file beside the decoder of the model that it guesses for.

    config   of its layers
    target   the model's decoder
    context  tokens that it may have
    """

    def __init__(self, file: GGUFFile, target: Decoder, tokenizer: Tokenizer):
        """Raises BridgeError for a file that is damaged, or of another model."""
        self.file, self.target, self.context = file, target, target.cache.context
        metadata = {key: value for key, value in file.metadata.items() if not key.endswith(_NO_LAYERS_OF_A_MODEL)}
        self.config = read_config(metadata, file.path, DRAFTERS[file.arch].graph)
        self._check_vocabulary(tokenizer)

    @property
    def path(self) -> Path:
        return self.file.path

    def get(self, key: str, default: Any = None) -> Any:
        """A key of its architecture."""
        return self.file.metadata.get(f"{self.file.arch}.{key}", default)

    def target_layers(self) -> tuple[int, ...]:
        """The layers before which it reads the model's states; BridgeError if these are none of the model's."""
        layers, count = self.get("target_layers"), self.target.config.layers
        if not isinstance(layers, list) or not layers or not all(isinstance(i, int) for i in layers):
            raise BridgeError(
                f"{self.path}: {self.file.arch}.target_layers is {layers!r:.80}; convert the drafter again"
            )
        if not all(0 <= layer <= count for layer in layers):
            raise self.of_another(f"it reads states before layers {layers}, the model has {count} layers")
        if self.target.config.streams:
            raise BridgeError(
                f"{self.path}: reads states between layers, of which {self.target.config.arch} has several at once; "
                f"{parameter('draft')} cannot take it for this model"
            )
        return tuple(layers)

    def of_another(self, why: str) -> BridgeError:
        """The refusal of a drafter that is not this model's."""
        return BridgeError(
            f"{parameter('draft', self.path)}: is of another model: {why}; choose one made for this model"
        )

    def _check_vocabulary(self, tokenizer: Tokenizer) -> None:
        stored = self.file.metadata.get("tokenizer.ggml.tokens", ())
        tokens = list(stored) if isinstance(stored, list | tuple) else []
        if tokens == tokenizer.tokens:
            return
        token = common_prefix(tokens, tokenizer.tokens)
        if token < min(len(tokens), len(tokenizer)):
            raise self.of_another(f"token {token} is {tokenizer.tokens[token]!r} there, {tokens[token]!r} in its file")
        raise self.of_another(f"it has {len(tokenizer)} tokens, the drafter's file {len(tokens)}")

    def matrix(self, name: str, rows: int, columns: int) -> QuantTensor:
        """A matrix of the file; BridgeError where it is missing or of another shape."""
        return expect(self.file[f"{name}.weight"], rows, columns)

    def vector(self, name: str, size: int) -> np.ndarray:
        """float32 [size]; BridgeError where it is missing or of another size."""
        return np.asarray(vector(self.file, f"{name}.weight", size, True))

    def embeddings(self) -> QuantTensor:
        """Its own table of embeddings, or the model's; BridgeError if neither fits."""
        embeddings = self.file.tensors.get("token_embd.weight", self.target.embedding)
        if embeddings.shape[1] != self.config.hidden:
            raise self.of_another(
                f"its states have {self.config.hidden} elements, the model's embeddings {embeddings.shape[1]}"
            )
        return embeddings

    def head(self, tied: bool) -> QuantTensor:
        """Its own output matrix for all of the model's tokens, or the model's; BridgeError if neither fits.

        tied  whether its own embeddings come before the model's
        """
        hidden, vocab = self.config.hidden, self.target.vocab
        output = self.file.tensors.get("output.weight", self.file.tensors.get("token_embd.weight") if tied else None)
        if output is not None:
            return expect(output, vocab, hidden)
        if self.target.output.shape[1] != hidden:
            raise self.of_another(
                f"its states have {hidden} elements, the model's head reads {self.target.output.shape[1]}"
            )
        return self.target.output

    def factors(self) -> np.ndarray | None:
        """What frequencies of its rotation are divided by."""
        factors: np.ndarray | None = vector(self.file, "rope_freqs.weight", self.config.rotated // 2)
        return factors

    def prepare(self) -> None:
        """Repack its matrices for this machine."""
        for tensor in self.file.tensors.values():
            if len(tensor.shape) == 2 and tensor.name != "token_embd.weight":
                tensor.prepare()


def is_drafter(metadata: Metadata) -> bool:
    """Whether a GGUF with this metadata guesses tokens for another one."""
    return metadata.get("general.architecture") in DRAFTERS
