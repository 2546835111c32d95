"""Measured KL divergence of trial models from the float one, on the tokens of `Passes`.

A trial maps layers to types. Their weights are rounded to nearest, and the errors are scaled: W + sqrt(error_ratio)
(W' - W). With the ratio of the layer's own method (`sensitivity`), ten layers of a small Llama diverged 0.3 to 1.9
times as much as the same layers quantized two-sided, least of all q and k in 1 and 2 bits; the estimates were within
32% (16,384 tokens). So `search` scales the errors to what is estimated.
A trial starts at the first block that differs from the base, the best trial so far.

Rounded layers, the float model's blocks and its probabilities are kept in memory while half of what was free stays
free. Rounded layers beyond that are stored in a temporary folder, as blocks.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bridge.blocks.read import WRITTEN
from bridge.quantize.budget.sensitivity import block_values, nearest, nearest_blocks
from bridge.quantize.model.block_inputs import matrix
from bridge.quantize.model.forward_passes import ALL, Passes
from bridge.system.cpu.memory import free_memory, resident
from bridge.system.cpu.row_threads import tiles
from bridge.system.storage.files import disk_errors

_POSITIONS = 256  # whose probabilities are compared at a time
_FEW = slice(None, None, 4)  # batches


@dataclass(frozen=True)
class Rounded:
    """How a layer's weights are rounded in a trial.

    type         they are rounded to
    error_ratio  the squared error, as a share of that of rounding to nearest
    scale        of NVFP4, what multiplies the whole matrix
    """

    type: str
    error_ratio: float = 1.0
    scale: float = 1.0


Trial = Mapping[str, Rounded]  # by layer; those not named stay floats


@dataclass
class Divergence:
    """Measures trials.

    importance  a layer's name -> the cost of a squared error in each column, float32 [columns]; None: 1
    folder      for rounded layers
    embedding_and_head  their names; the same name twice if they are tied
    memory      bytes that the process may take; None: any number
    """

    passes: Passes
    importance: Callable[[str], np.ndarray | None]
    folder: Path
    embedding_and_head: tuple[str, str]
    memory: int | None = None
    _base: dict[str, Rounded] = field(default_factory=dict)
    _last: tuple[dict[str, Rounded], list[list[torch.Tensor]], float] | None = None
    _cache: dict[tuple[str, Rounded], torch.Tensor] = field(default_factory=dict)
    _expected: dict[int, torch.Tensor] = field(default_factory=dict)  # by batch: log p, [sequences, length, vocabulary]

    def __post_init__(self) -> None:
        self._reserve = (free_memory() or 0) // 2
        self.passes.room = self.has_room
        self._inputs = self.passes.inputs
        self._order = {name: i for i in range(len(self.passes.model.blocks)) for name, _ in self.passes.layers(i)}
        embeddings, head = self.embedding_and_head
        self._order |= {head: len(self.passes.model.blocks), embeddings: -1}

    def has_room(self) -> bool:
        """Whether to keep what can be computed again."""
        free = free_memory()
        return (free is None or free >= self._reserve) and (self.memory is None or resident() < self.memory)

    def measure(self, trial: Trial, as_new_base: bool = False) -> float:
        """Mean over the tokens of KL(float || trial), nats; as_new_base: later trials will differ little from this."""
        if self._last is None or self._last[0] != trial:
            inputs = self._run(trial, ALL)
            self._last = dict(trial), inputs, self._divergence(inputs[-1], trial, ALL)
        if as_new_base:
            self._base, self._inputs = self._last[:2]
        return self._last[2]

    def measure_few(self, trial: Trial) -> float:
        """`measure` on every fourth batch: a quarter of the time, for a loss within some percent."""
        return self._divergence(self._run(trial, _FEW)[-1], trial, _FEW)

    def _run(self, trial: Trial, some: slice) -> list[list[torch.Tensor]]:
        """The inputs of each block and the last one's outputs, of some batches, from where it differs from the base."""
        differing = [i for name, i in self._order.items() if trial.get(name) != self._base.get(name)]
        first = min(differing, default=len(self.passes.model.blocks))
        inputs = [by_batch[some] for by_batch in self._inputs[: max(first, 0) + 1]]
        embeddings = self.embedding_and_head[0]
        if first < 0:
            inputs = [self.passes.inputs[0][some]]
            if embeddings in trial:
                module = self.passes.model.model.get_input_embeddings()
                with self.passes.changed(module, self._values(embeddings, module, trial[embeddings])):
                    inputs = [self.passes.embedded()[some]]
        return inputs + self.passes.outputs(
            max(first, 0), inputs[-1], lambda n, m: self._values(n, m, trial[n]) if n in trial else None, some=some
        )

    def _values(self, name: str, module: nn.Module, rounded: Rounded) -> torch.Tensor:
        """A layer's weights in a trial, float32 [out, columns]."""
        values = self._cache.get((name, rounded))
        if values is None:
            values = self._rounded(name, matrix(module), rounded)
            if self.has_room():
                self._cache[name, rounded] = values
        return values

    def _rounded(self, name: str, weight: torch.Tensor, rounded: Rounded) -> torch.Tensor:
        """Float weights [out, columns], which are overwritten, as the trial rounds them."""
        if rounded.type not in WRITTEN:
            return nearest(weight, rounded.type)
        file = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}-{rounded.type}.npy"
        if file.exists():
            blocks = np.load(file, mmap_mode="r")
        else:
            blocks = nearest_blocks(weight, rounded.type, self.importance(name), rounded.scale)
            if not self.has_room():
                with disk_errors(file, "rounded layers of trial models", "folder"):
                    np.save(file, blocks)
        for r in tiles(len(weight)):
            values = torch.from_numpy(block_values(np.ascontiguousarray(blocks[r]), rounded.type, rounded.scale))
            weight[r].lerp_(values.to(weight), math.sqrt(rounded.error_ratio))
        return weight

    def _divergence(self, outputs: list[torch.Tensor], trial: Trial, some: slice) -> float:
        """The divergence of the last block's outputs of some batches, through the trial's head."""
        module, head = self.passes.model.model.get_output_embeddings(), self.embedding_and_head[1]
        other = self._values(head, module, trial[head]) if head in trial else None
        total, batches = 0.0, range(len(self.passes.batches))[some]
        for batch, x in zip(batches, outputs, strict=True):
            expected = self._log_probabilities(batch)
            with ExitStack() as stack:
                if other is not None:
                    stack.enter_context(self.passes.changed(module, other))
                logits = self.passes.logits(batch, x)
            for log_p, q in zip(expected.split(_POSITIONS), logits.flatten(0, 1).split(_POSITIONS), strict=True):
                total += float((log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1).double().sum())
        return total / sum(self.passes.batches[batch].numel() for batch in batches)

    def _log_probabilities(self, batch: int) -> torch.Tensor:
        """The float model's, float32 [tokens of a batch, vocabulary]."""
        log_p = self._expected.get(batch)
        if log_p is None:
            logits = self.passes.logits(batch, self.passes.inputs[-1][batch]).flatten(0, 1)
            log_p = torch.empty_like(logits)
            for out, x in zip(log_p.split(_POSITIONS), logits.split(_POSITIONS), strict=True):
                out.copy_(x.log_softmax(-1))
            if self.has_room():
                self._expected[batch] = log_p
        return log_p
