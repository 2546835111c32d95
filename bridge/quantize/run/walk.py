"""What passes through a model when it is calibrated, and which of its layers are quantized for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError, parameter
from bridge.quantize.layer_store import LayerStore
from bridge.quantize.model.stored_inputs import StoredInputs
from bridge.quantize.quantizer import LayerHooks, Prepare, Quantizer

TOKENS_AT_ONCE = 4096  # in a forward pass through a block
_WEIGHTS_AT_ONCE = 1 << 26  # of the output head: quantizing takes eight times their 256 MB


def sequences_together(length: int) -> int:
    """How many sequences of a length pass through a block together."""
    return max(1, TOKENS_AT_ONCE // length)


def rows_at_once(columns: int) -> int:
    """How many rows of a matrix that is quantized by itself are quantized together."""
    return max(1, _WEIGHTS_AT_ONCE // columns)


@dataclass(frozen=True)
class Walk:
    """A calibration; workers of a cluster unpickle it.

    tokens     int [sequences, length]
    quantizer  of a layer
    batch      sequences in a forward pass
    held       how many of the last sequences are held back to choose settings on; 0: spans of all, see `hessian`
    feed       which blocks feed the next one: "quantized" or "float"
    cross      gather GPTAQ's cross term too, which also runs the float blocks
    until      how many blocks are passed; None: all, and then the head
    wanted     whether to quantize the layer of this name
    layers     those that were quantized before, and what is known of the others. Of a `LayerStore`, its folder also
               keeps the inputs of the present block, from which another run goes on
    two_sided  gather A of the layers' outputs, and quantize the embeddings too, first: `layers` has half of their H
    head       quantize the output head too, unless it is tied to the embeddings
    prepare    called before a block's layers are quantized; may change its weights, but not what it computes
    offload    a folder for the activations that do not stay in memory
    memory     bytes of activations in memory; None: all of them, or, with a folder, none
    dtype      of these activations; None: that of the model's arithmetic
    hessians   bytes of experts' Hessians that are gathered in one pass; None: 2 GB

    open, arithmetic, device   what a worker opens, computes in, and computes on
    """

    tokens: torch.Tensor
    quantizer: Quantizer
    batch: int = 16
    held: int = 0
    feed: str = "quantized"
    cross: bool = False
    until: int | None = None
    wanted: Callable[[str], bool] = lambda name: True
    layers: LayerStore | LayerHooks = field(default_factory=LayerHooks)
    two_sided: bool = False
    head: bool = False
    prepare: Prepare | None = None
    offload: str | Path | None = None
    memory: int | None = None
    dtype: torch.dtype | None = None
    hessians: int | None = None
    open: Callable[[], Checkpoint] | None = None
    arithmetic: torch.dtype = torch.float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.feed not in ("quantized", "float"):
            raise BridgeError(f"unknown {parameter('feed')} {self.feed!r}: choose quantized or float")

    def batches(self) -> list[torch.Tensor]:
        """Sequences that pass together; none has both some that are held back and others."""
        spans = self.tokens.split([len(self.tokens) - self.held, self.held])
        return [batch for span in spans if len(span) for batch in span.split(self.batch)]

    @property
    def float_inputs(self) -> bool:
        """Whether the float model's inputs are needed too, and differ from the blocks' own."""
        return self.cross and self.feed == "quantized"

    @property
    def store(self) -> LayerStore:
        """The folder of finished layers, which a cluster's tasks share."""
        assert isinstance(self.layers, LayerStore)
        return self.layers

    @property
    def stored_inputs(self) -> StoredInputs | None:
        """Where the inputs of the present block are kept; None: in this process alone."""
        if not isinstance(self.layers, LayerStore) or self.prepare is not None:  # which every block has to see
            return None
        return StoredInputs(self.layers.folder, self.layers.job)


class WalkKeywords(TypedDict, total=False):
    """The fields of `Walk` but for the first two, as keywords of functions."""

    batch: int
    held: int
    feed: str
    cross: bool
    until: int | None
    wanted: Callable[[str], bool]
    layers: LayerStore | LayerHooks
    two_sided: bool
    head: bool
    prepare: Prepare | None
    offload: str | Path | None
    memory: int | None
    dtype: torch.dtype | None
    hessians: int | None
    open: Callable[[], Checkpoint] | None
    arithmetic: torch.dtype
    device: str
