"""What a Hugging Face checkpoint becomes in GGUF: names, shapes, row orders and metadata.

Nothing here holds weights, but for small tensors that are made from the config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from bridge.models.vocabulary import Tokenizer


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """One tensor of the GGUF.

    name         in the GGUF, "blk.0.attn_q.weight"
    source       in the checkpoint, "model.layers.0.self_attn.q_proj.weight"; None for `data`
    shape        in Hugging Face's order, (out, in) or (n,), from the config: stored matrices may
                 be padded with zeros beyond it
    kind         the GGUF name without layer and suffix: "attn_q", "ffn_down", "token_embd"
    layer        0-based; None outside the blocks
    quantizable  a matrix of a linear layer or an embedding; norms and biases stay floats
    row_order    int64 [out] or None: row i of the GGUF is row row_order[i] of the checkpoint
    data         float32, for a tensor that no checkpoint stores; with `type` the bytes of that GGUF type
    parts        tensors whose rows, one after another, are this one's, which has no source then: the
                 experts of a 3-D tensor, or q, k and v of a fused matrix
    matrix       which matrix of a 3-D source this is
    stored       the source's shape where row_order picks from more rows than it returns
    """

    name: str
    source: str | None
    shape: tuple[int, ...]
    kind: str
    layer: int | None
    quantizable: bool
    row_order: np.ndarray | None = None
    data: np.ndarray | None = None
    type: str | None = None
    parts: tuple[TensorSpec, ...] = ()
    matrix: int | None = None
    stored: tuple[int, ...] | None = None

    @property
    def leaves(self) -> tuple[TensorSpec, ...]:
        """The tensors that this one is read from, one after another: its parts, or itself."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Fold:
    """A linear layer whose columns are the rows of others, element by element: module names.

    Permuting the columns of `consumer` and the rows of every producer alike changes nothing.
    """

    consumer: str
    producers: tuple[str, ...]


@dataclass(eq=False)
class ModelSpec:
    """A model as GGUF wants it; see `describe_model`.

    tensors    in the order in which they are to be written
    folds      where act-order can be undone by permuting rows elsewhere
    unused     tensors of the checkpoint that GGUF does not need
    zero_only  tensors that llama.cpp's graph has no place for: the caller must see that they are
               all zeros (old GPTQ tools write such biases) or refuse the model
    optional   biases that may be left out where they are all zeros: old GPTQ tools write them for every layer
    notes      what the reader of the report should know
    experts    in a layer, 0 for a dense model
    """

    arch: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    tensors: list[TensorSpec]
    folds: list[Fold]
    unused: list[str]
    zero_only: list[str]
    notes: list[str]
    tokenizer: Tokenizer
    generation: dict[str, Any]  # generation_config.json
    experts: int = 0
    optional: frozenset[str] = frozenset()
    hparams: list[Callable[[gguf.GGUFWriter], None]] = field(repr=False, default_factory=list)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, jinja."""
        return self.tokenizer.chat_template

    @property
    def stop(self) -> list[str]:
        """The texts of the tokens that end a reply, the EOS token first."""
        return [self.tokenizer.tokens[i] for i in self.tokenizer.stop_ids]

    @property
    def n_parameters(self) -> int:
        """Of the checkpoint's tensors that are written."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.tensors if tensor.data is None)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Write every key but general.file_type and general.quantization_version."""
        for add in self.hparams:
            add(writer)
        self.tokenizer.add_metadata(writer)
