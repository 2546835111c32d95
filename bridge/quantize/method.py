"""How a layer is quantized: target, order of columns, solver and refinement put together; and any module in one call.

for name, layer in quantize_model(model, tokens, Method(superblocks("Q4_K")).layer, cross=True): ...
gptq(module, batches, bits=4, group_size=128)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bridge.blocks import BLOCKS
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError
from bridge.quantize.block_inputs import Feed
from bridge.quantize.gptq_solver import dequantize, error, falling, solve
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.hessian import damp, target_of
from bridge.quantize.refine import refine
from bridge.quantize.walk import Calibrated, quantize_block

_ROWS = 512  # that tell the error; all of them would take a product as long as a sweep of refinement
ACT_ORDERS = ("none", "free", "static", "fixed")


@dataclass(frozen=True)
class Quantized:
    """A layer's codes on its grid, columns in the grid's layout."""

    name: str
    grid: GroupGrid | SuperblockGrid
    codes: np.ndarray  # int16 [rows, columns]
    layout: np.ndarray | None  # int [columns], the columns in the grid's order; None: as they stand
    error: float  # tr(E H E^T) over tr(W H W^T), of some of the rows where there are many
    damping: float  # infinity: no damping was enough, rounded to nearest
    seconds: float

    def values(self) -> torch.Tensor:
        """The dequantized weights float32 [rows, columns], columns as they stand."""
        values = torch.from_numpy(dequantize(self.codes, self.grid).astype(np.float32, copy=False))
        return values if self.layout is None else values[:, np.argsort(self.layout)]

    def tensor(self, bias: np.ndarray | None = None) -> GroupedTensor:
        """The layer as a checkpoint holds it; group grids only."""
        if not isinstance(self.grid, GroupGrid):
            raise BridgeError(f"{self.name}: {self.grid.block} blocks are no groups; a checkpoint cannot hold them")
        return self.grid.tensor(self.name, self.codes, self.layout, bias)

    def blocks(self) -> np.ndarray:
        """The layer as a GGUF holds it, uint8 [rows, row bytes]; superblock grids only."""
        if not isinstance(self.grid, SuperblockGrid):
            raise BridgeError(f"{self.name}: groups are no GGUF blocks; write a checkpoint and convert it")
        return self.grid.pack(self.codes)


def superblocks(type: str) -> Callable[[int, int], SuperblockGrid]:
    """Grids of a GGUF type for (rows, columns)."""
    if type not in BLOCKS:
        raise BridgeError(f"type {type!r}; one of {', '.join(BLOCKS)} can be quantized to")
    return lambda rows, columns: SuperblockGrid(BLOCKS[type], rows, columns)


def groups(bits: int, group_size: int, symmetric: bool, shrink: bool = False) -> Callable[[int, int], GroupGrid]:
    """Grids of GPTQ's and AWQ's groups for (rows, columns)."""
    return lambda rows, columns: GroupGrid(rows, columns, bits, group_size, symmetric, shrink)


@dataclass(frozen=True)
class Method:
    """A quantizer for `calibrate`.

    grid       makes the grid of a layer of (rows, columns)
    act_order  "none"; "free": columns by falling diag H, groups cut from that (desc_act); "static": groups fitted
               first, columns likewise; "fixed": groups by falling sum of diag H, columns inside them likewise
    damping    of H, times the mean of its diagonal; infinity: RTN
    alpha      how much of the mismatch of inputs is made good at most, where the cross term was gathered (GPTAQ):
               less, or nothing, for a layer where that serves tokens better that were held back (`alpha_of`)
    sweeps     of refinement; 0: plain GPTQ. Ternary groups are not refined
    """

    grid: Callable[[int, int], Any]
    act_order: str = "fixed"
    damping: float = 0.01
    alpha: float = 1.0
    sweeps: int = 2

    def __post_init__(self) -> None:
        if self.act_order not in ACT_ORDERS:
            raise BridgeError(f"act-order {self.act_order!r}; one of {', '.join(ACT_ORDERS)} is possible")

    def layer(self, layer: Calibrated, columns: np.ndarray | None = None) -> tuple[torch.Tensor, Quantized]:
        """Quantize one layer: its dequantized weights, and what is kept of it.

        columns  int [columns], the order in which the grid lies over them, if not as they stand; "free" has its own
        """
        begun = time.perf_counter()
        weight, hessian = layer.weight, layer.hessian.matrix
        if not torch.isfinite(weight).all():
            raise BridgeError(f"{layer.name}: its weights hold NaN or infinity; the checkpoint is damaged")
        if not layer.hessian.tokens:
            hessian = torch.eye(len(hessian), device=hessian.device)
        target = weight
        if self.alpha:
            target = target_of(weight, layer.hessian, self.damping, self.alpha, layer.last)
        grid = self.grid(*weight.shape)
        layout = _falls(hessian) if self.act_order == "free" else columns
        if layout is not None:
            target, hessian = target[:, layout], hessian[layout[:, None], layout]
        order = None
        if self.act_order == "static":
            order = _falls(hessian)
        elif self.act_order == "fixed":
            order = falling(hessian, grid.run)
        fit = "first" if self.act_order == "static" else "reached"
        solution = solve(target, hessian, grid, order=order, fit=fit, damping=self.damping)
        if self.sweeps and solution.damping < float("inf") and not grid.ternary:
            diagonal = hessian.diagonal().clone()
            damp(hessian, solution.damping)
            refine(target, hessian, grid, solution.codes, self.sweeps)
            hessian.diagonal().copy_(diagonal)
        some = slice(None, None, max(1, len(target) // _ROWS))
        own = target[some]
        lost = error(own, dequantize(np.ascontiguousarray(solution.codes[some]), grid, some), hessian)
        whole = error(own, torch.zeros(()).expand(own.shape), hessian)
        seconds = time.perf_counter() - begun
        done = Quantized(
            layer.name, grid, solution.codes, layout, lost / whole if whole else 0.0, solution.damping, seconds
        )
        return done.values().to(weight.device), done


def _falls(hessian: torch.Tensor) -> np.ndarray:
    return np.argsort(-hessian.diagonal().cpu().numpy(), kind="stable")


def gptq(
    module: torch.nn.Module,
    batches: Iterable[Any],
    *,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    act_order: str = "fixed",
    damping: float = 0.01,
    sweeps: int = 0,
    type: str | None = None,
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, Quantized]:
    """Quantize every Linear, Conv1D and Conv2d of a module in place, in the order of their calls, inputs by hooks.

    batches     what the module is called with: a tensor, a tuple of positional or a mapping of named arguments each
    bits, group_size, symmetric   of the groups; group_size -1: one group a row; bits 0: ternary
    damping     of H, times the mean of its diagonal; infinity: RTN
    sweeps      of refinement after GPTQ; 0: none
    type        a GGUF type: its blocks instead of groups
    wanted      whether a layer of this name is to be quantized

    Every layer sees the inputs that the quantized layers before it deliver. Returns the layers by name.
    """
    feeds = [_feed(batch) for batch in batches]
    if not feeds:
        raise BridgeError("no calibration batches; give at least one")
    grid = superblocks(type) if type else groups(bits, group_size, symmetric)
    method = Method(grid, act_order, damping, sweeps=sweeps)
    training = module.training
    module.eval()
    try:
        return dict(quantize_block(module, feeds, method.layer, wanted=wanted))
    finally:
        module.train(training)


def _feed(batch: Any) -> Feed:
    if isinstance(batch, Mapping):
        return Feed(None, kwargs=dict(batch), named=True)
    return Feed(batch[0], tuple(batch[1:])) if isinstance(batch, tuple | list) else Feed(batch)
