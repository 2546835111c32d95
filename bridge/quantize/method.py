"""How a layer is quantized: target, order of columns, solver, refinement; and a whole module in one call.

for name, layer in quantize_model(model, tokens, Method(superblocks("Q4_K")).layer, cross=True): ...
gptq(module, batches, bits=4, group_size=128)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bridge.blocks import BLOCKS
from bridge.blocks.read import CALIBRATED
from bridge.checkpoint.grouped import GroupedTensor
from bridge.errors import BridgeError, parameter, refused
from bridge.quantize.grids.codebook import CodebookGrid
from bridge.quantize.grids.group import GroupGrid
from bridge.quantize.grids.plain import PlainGrid
from bridge.quantize.grids.superblock import SuperblockGrid
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve import gptq_solver
from bridge.quantize.solve.gptq_solver import Solution, dequantize, error_share, solve
from bridge.quantize.solve.hessian import Factored, damp, damped_diagonal, shrinkage_of, shrunk
from bridge.quantize.solve.refine import metrics_of, move_all, product, refine, spans_of
from bridge.quantize.solve.target import HeldError, target_of
from bridge.quantize.solve.two_sided import OutputHessian, RowSolver, output_shrinkage, round_two_sided
from bridge.system.kernels import compiling
from bridge.system.text import unknown

_ROWS = 512  # sampled for the error: the product for all rows takes as long as a sweep of refinement
_NEAREST_ROWS = 64  # of these, rounded to nearest for comparison
ACT_ORDERS = ("none", "free", "static", "fixed")


@dataclass(frozen=True)
class Quantized:
    """A quantized layer.

    name     of the layer in its module
    grid     the values that codes stand for: scales and zero points of groups, or GGUF blocks
    codes    int16 [rows, columns], columns in the order of `layout`
    layout   int [columns], the columns in the grid's order; None: unchanged
    error    tr(E H E^T) / tr(W H W^T) of a sample of rows: lost power of the layer's outputs
    damping  the fraction that was added to the diagonal of H; infinity: rounded to nearest
    seconds  wall time, without compiling
    nearest  the error of some of these rows, rounded to nearest
    alone    whether each weight was rounded by itself, because that fits held-back tokens better
    """

    name: str
    grid: GroupGrid | SuperblockGrid | PlainGrid | CodebookGrid = field(repr=False)
    codes: np.ndarray = field(repr=False)  # int16 [rows, columns]
    layout: np.ndarray | None = field(repr=False)  # int [columns], the columns in the grid's order; None: unchanged
    error: float  # tr(E H E^T) / tr(W H W^T), of a sample of rows
    damping: float  # infinity: no damping was enough, rounded to nearest
    seconds: float
    nearest: float = 0.0  # the error of the same rows, some of them, rounded to nearest
    alone: bool = False  # each weight was rounded by itself, because that serves the tokens held back better

    def values(self) -> torch.Tensor:
        """The dequantized weights float32 [rows, columns], in the weight matrix's order of columns."""
        values = torch.from_numpy(dequantize(self.codes, self.grid).astype(np.float32, copy=False))
        return values if self.layout is None else values[:, np.argsort(self.layout)]

    def tensor(self, bias: np.ndarray | None = None) -> GroupedTensor:
        """The layer as a checkpoint stores it, with a float32 `bias` [rows].

        Raises BridgeError if the codes are on a GGUF type's blocks.
        """
        if not isinstance(self.grid, GroupGrid):
            raise BridgeError(f"{self.name}: a checkpoint cannot hold {self.grid.block} blocks; quantize to groups")
        return self.grid.tensor(self.name, self.codes, self.layout, bias)

    def blocks(self) -> np.ndarray:
        """The layer as a GGUF stores it, uint8 [rows, row bytes]. Raises BridgeError if the codes are in groups."""
        if isinstance(self.grid, GroupGrid):
            raise BridgeError(f"{self.name}: groups are not GGUF blocks; write a checkpoint and convert it")
        return self.grid.pack(self.codes)


def superblocks(type: str, scale: float = 1.0) -> Callable[[int, int], SuperblockGrid | PlainGrid | CodebookGrid]:
    """Grids of a GGUF type for (rows, columns); `scale` of NVFP4, from a tensor of its own, multiplies the matrix."""
    block = (BLOCKS | CALIBRATED).get(type)
    if block is None:
        raise unknown("type", type, [*(BLOCKS | CALIBRATED)])
    if block.values or block.numbered:
        return lambda rows, columns: CodebookGrid(block, rows, columns, scale)
    if block.is_k:
        return lambda rows, columns: SuperblockGrid(block, rows, columns)
    return lambda rows, columns: PlainGrid(block, rows, columns)


def groups(bits: int, group_size: int, symmetric: bool, shrink: bool = False) -> Callable[[int, int], GroupGrid]:
    """Grids of GPTQ's and AWQ's groups for (rows, columns)."""
    return lambda rows, columns: GroupGrid(rows, columns, bits, group_size, symmetric, shrink)


@dataclass(frozen=True)
class Method:
    """A quantizer for `quantize_model`.

    grid       makes the grid of a layer of (rows, columns)
    act_order  the order in which columns are rounded. "none": unchanged; "free": by falling diag H, groups cut from
               that order (desc_act); "static": the same order, groups fitted first; "fixed": groups by falling sum of
               diag H, columns inside them by falling diag H
    damping    added to the diagonal of H, as a fraction of its mean; infinity: RTN
    alpha      upper limit on how much of the mismatch of inputs is compensated if the cross term was gathered (GPTAQ);
               each layer uses as much as held-back tokens confirm (`alpha_of`)
    sweeps     of refinement; 0: plain GPTQ. Ternary groups are not refined
    shrinkage  share of the off-diagonals of H that is taken away; None: `shrinkage_of`
    """

    grid: Callable[[int, int], Any]
    act_order: str = "fixed"
    damping: float = 0.01
    alpha: float = 1.0
    sweeps: int = 2
    shrinkage: float | None = None

    def __post_init__(self) -> None:
        if self.act_order not in ACT_ORDERS:
            known = f"{', '.join(ACT_ORDERS[:-1])} or {ACT_ORDERS[-1]}"
            raise BridgeError(f"unknown {parameter('act_order')} {self.act_order!r}: choose {known}")

    def layer(self, layer: LayerInput, columns: np.ndarray | None = None) -> tuple[torch.Tensor, Quantized]:
        """A layer's dequantized weights, and its codes; `columns`: their order on the grid, ignored by "free"."""
        begun = compiling.clock()
        weight, hessian = layer.weight, layer.hessian.matrix
        if not torch.isfinite(weight).all():
            raise BridgeError(f"{layer.name}: its weights hold NaN or infinity; the checkpoint is damaged")
        if not layer.hessian.tokens:
            hessian = torch.eye(len(hessian), device=hessian.device)
        if self.damping < float("inf"):
            shrinkage = self.shrinkage
            layer.hessian.shrinkage = shrinkage_of(layer.hessian, self.damping) if shrinkage is None else shrinkage
        grid = self.grid(*weight.shape)
        if isinstance(grid, CodebookGrid) and self.act_order == "static":
            raise refused("act_order", "static", f"{grid.block} rounds columns that lie together; choose fixed or none")
        layout = columns_by_diagonal(hessian) if self.act_order == "free" else columns
        if layout is not None:
            hessian = hessian[layout[:, None], layout]
        order = None
        if self.act_order == "static":
            order = columns_by_diagonal(hessian)
        elif self.act_order == "fixed":
            parts = (grid.sub, grid.unit) if grid.vectors else ()
            order = gptq_solver.grouped_act_order(hessian, grid.fit_columns, *parts)
        columns_in_order = layout if order is None else order if layout is None else layout[order]
        factor_order = None if columns_in_order is None else torch.from_numpy(columns_in_order).to(weight.device)
        held, judge = layer.hessian.held, None
        if held is not None and held.tokens and self.damping < float("inf"):
            judge = HeldError(layer, self.alpha > 0)
        target = weight
        if self.alpha:
            target = target_of(layer, self.damping, self.alpha, factor_order)
        if layout is not None:
            target = target[:, layout]
        unshrunk = hessian
        if layer.hessian.shrinkage:
            hessian = shrunk(hessian, layer.hessian.shrinkage)
        dead = hessian.diagonal() == 0  # whatever these columns hold, outputs stay the same
        if dead.any():
            target = target.masked_fill(dead, 0)

        def factor(keep: bool) -> Factored | None:
            if not layer.hessian.tokens:
                return None
            return layer.hessian.factor(self.damping, factor_order, keep)

        fit = "first" if self.act_order == "static" else "reached"
        solution = self._two_sided(target, hessian, layer.outputs, grid, order, fit, factor)
        if solution is None:
            keep = not layer.last
            solution = solve(target, hessian, grid, order=order, fit=fit, damping=self.damping, factored=factor(keep))
            if self.sweeps and solution.damping < float("inf") and not grid.ternary:
                diagonal = hessian.diagonal().clone()
                damp(hessian, solution.damping)
                refine(target, hessian, grid, solution.codes, self.sweeps)
                hessian.diagonal().copy_(diagonal)
        alone = judge is not None and self._better_alone(judge, grid, solution.codes, layer, layout)
        if alone:
            grid, target = self.grid(*weight.shape), weight if layout is None else weight[:, layout]
            codes = round_alone(target, grid, _importance(layer, layout))
            solution = Solution(codes, solution.damping)
        some = slice(None, None, max(1, len(target) // _ROWS))
        sample = target[some]
        values = dequantize(np.ascontiguousarray(solution.codes[some]), grid, some)
        share = nearest = error_share(sample, values, unshrunk)
        seconds = compiling.clock() - begun
        if solution.damping < float("inf"):
            few = sample[:: max(1, len(sample) // _NEAREST_ROWS)]
            alike = np.ones(few.shape[1], np.float32)
            other = self.grid(*few.shape)
            nearest = error_share(few, dequantize(round_alone(few, other, alike), other), unshrunk)
        done = Quantized(layer.name, grid, solution.codes, layout, share, solution.damping, seconds, nearest, alone)
        return done.values().to(weight.device), done

    def _better_alone(
        self, judge: HeldError, grid: Any, codes: np.ndarray, layer: LayerInput, layout: np.ndarray | None
    ) -> bool:
        """Whether the held-back tokens lose less where each weight is rounded by itself, with an importance matrix."""
        back = slice(None) if layout is None else np.argsort(layout)
        solved = dequantize(np.ascontiguousarray(codes[judge.rows]), grid, judge.rows)[:, back]
        weight = judge.weight if layout is None else judge.weight[:, layout]
        other = self.grid(*weight.shape)
        alone = dequantize(round_alone(weight, other, _importance(layer, layout)), other)[:, back]
        return judge.of(torch.from_numpy(alone)) < judge.of(torch.from_numpy(solved))

    def _two_sided(
        self,
        target: torch.Tensor,
        hessian: torch.Tensor,
        outputs: OutputHessian | None,
        grid: Any,
        order: np.ndarray | None,
        fit: str,
        factor: Callable[[bool], Factored | None],
    ) -> Solution | None:
        """Codes rounded with A of the outputs too; None where it does not help, or no damping of H was enough."""
        shrinkage = 1.0 if outputs is None else output_shrinkage(outputs)
        factored = factor(True) if shrinkage < 1 else None
        if outputs is None or factored is None:
            return None
        sweeps = 0 if grid.ternary else self.sweeps
        plain, damped = hessian.diagonal().clone(), damped_diagonal(hessian, factored[1])
        hessian.diagonal().copy_(damped)  # in place: a copy of H takes 3.3 GB for 28,672 columns
        metrics = metrics_of(hessian, grid) if sweeps else []

        def round_rows(weight: torch.Tensor, part_grid: Any) -> np.ndarray:
            options: Any = {"order": order, "fit": fit, "damping": self.damping, "factored": factored, "nearest": False}
            hessian.diagonal().copy_(plain)
            codes = solve(weight.clone(), hessian, part_grid, **options).codes
            hessian.diagonal().copy_(damped)
            if sweeps:
                move_all(product(weight, hessian, part_grid, codes), hessian, part_grid, codes, sweeps, metrics)
            return codes

        def refine_rows(g: torch.Tensor, part_grid: Any, codes: np.ndarray) -> torch.Tensor:
            return move_all(g, hessian, part_grid, codes, min(sweeps, 1), metrics, keep=True)  # a second gains 0.1%

        solver = RowSolver(hessian, round_rows, refine_rows)
        codes = round_two_sided(target, outputs.blocks, grid, solver, shrinkage)
        hessian.diagonal().copy_(plain)
        return Solution(codes, factored[1])


def round_alone(weight: torch.Tensor, grid: Any, importance: np.ndarray) -> np.ndarray:
    """Codes int16 [rows, columns] of weights rounded to nearest on a new grid; `importance`: what errors cost."""
    if not grid.vectors:
        return gptq_solver.round_to_nearest(weight, grid, importance)
    codes = np.empty(weight.shape, np.int16)
    gptq_solver.fit_all(weight, grid, importance)
    roots = torch.from_numpy(importance).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    for run, span in enumerate(spans_of(weight.shape[1], grid)):
        part = weight[:, span].clone()
        codes[:, span] = grid.round_run(run, part, np.arange(part.shape[1]), torch.diag(roots[span]))[0]
    return codes


def _importance(layer: LayerInput, layout: np.ndarray | None) -> np.ndarray:
    squares = layer.hessian.mean_squares()
    return squares if layout is None else squares[layout]


def columns_by_diagonal(hessian: torch.Tensor) -> np.ndarray:
    """Act-order: int [columns], by falling diagonal."""
    return np.argsort(-hessian.diagonal().cpu().numpy(), kind="stable")
