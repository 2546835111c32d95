"""AWQ (Lin et al. 2023): weights that see large inputs are scaled up before rounding, their inputs scaled down.

    awq = Awq(Method(groups(4, 128, False), "none", damping=inf, sweeps=0), stored=torch.float16)
    for name, quantized in quantize_model(model, tokens, awq.layer, prepare=awq.prepare): ...
    awq.floats      norms and biases that have changed, to be written with the codes

For a norm (or linear) and the linears that read its output:  W x = (W diag(s)) (diag(s)^-1 x), with

    s = mean|x|^alpha / sqrt(max * min)     the best of 20 alphas in 0..1, by the output error

then each group's range is clipped where that reduces the output error.

The module that feeds a group of layers is found by trial, not by name: among the norms and linears that ran before
it, the one whose outputs can be divided by powers of two, and the layers' columns multiplied, without a change of the
block's output. So a norm whose output also goes elsewhere (a router), or values that several heads share, are left
alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.quantize.layer_store import file_of, read_tensors, write_tensors
from bridge.quantize.method import Method, Quantized
from bridge.quantize.model.block_inputs import BlockInputs, first_of
from bridge.quantize.model.replay import Replay
from bridge.quantize.model.stages import find_stages, stage_inputs
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import dequantize, error_share, round_to_nearest
from bridge.quantize.solve.hessian import Hessian

Rounding = Callable[[torch.Tensor], torch.Tensor]  # float [rows, columns] -> rounded

ALPHAS = 20
_LEAST = 1e-4  # of mean|x|
_CLIPS, _MOST_CLIPPED = 20, 0.5  # ranges tried: 1 - k / 20, down to a half
_CLOSE = 1e-3  # of the largest output


def smoothing(
    weights: Sequence[torch.Tensor], size: torch.Tensor, hessian: torch.Tensor, rounding: Rounding
) -> tuple[torch.Tensor, float, list[float]]:
    """The scales s float32 [columns] of linears float [rows, columns] with the same inputs x.

    size     float [columns], mean|x|
    hessian  [columns, columns], a multiple of sum x x^T

    Returns s, its alpha, and the output errors tr(E H E^T) of all alphas, summed over the linears. Alpha 0 is s = 1:
    plain rounding.
    """
    size = size.float().clamp(min=_LEAST)
    best, best_alpha, best_error = torch.ones_like(size), 0.0, float("inf")
    errors = []
    for step in range(ALPHAS):
        alpha = step / ALPHAS
        s = size**alpha
        s = s / (s.max() * s.min()).sqrt()
        lost = 0.0
        for weight in weights:
            difference = weight - rounding(weight * s) / s
            lost += float(((difference @ hessian).double() * difference).sum())
        errors.append(lost)
        if lost < best_error:
            best, best_alpha, best_error = s, alpha, lost
    return best, best_alpha, errors


def clipped(weight: torch.Tensor, hessian: torch.Tensor, group_size: int, rounding: Rounding) -> torch.Tensor:
    """The weights, each group's range clipped to the share with the least output error of that group alone.

    weight    float [rows, columns], already scaled by s; hessian: of the inputs, already divided by s
    rounding  rounds one group's columns [rows, group_size]
    """
    done = weight.clone()
    for start in range(0, weight.shape[1], group_size):
        span = slice(start, start + group_size)
        group, group_hessian = weight[:, span], hessian[span, span]
        most = group.abs().amax(1, keepdim=True)
        best = torch.full((len(group),), float("inf"), device=weight.device)
        for k in range(int(_CLIPS * _MOST_CLIPPED)):
            limit = most * (1 - k / _CLIPS)
            narrow = group.clamp(-limit, limit)
            difference = group - rounding(narrow)
            lost = ((difference @ group_hessian) * difference).sum(1)
            better = lost < best
            best = torch.where(better, lost, best)
            done[:, span][better] = narrow[better]
    return done


def fold_scales(before: torch.nn.Module, linears: Sequence[torch.nn.Module], s: torch.Tensor) -> None:
    """Scale in place: the linears' columns by s, and the module that feeds them (a norm or linear) by 1 / s."""
    weight: torch.Tensor = before.weight.data  # type: ignore[assignment]
    weight.div_(s if weight.ndim == 1 else s[:, None])
    bias = getattr(before, "bias", None)
    if bias is not None:
        bias.data.div_(s)
    for linear in linears:
        columns: torch.Tensor = linear.weight.data  # type: ignore[assignment]
        columns.mul_(s)


@dataclass(frozen=True)
class ScaleFold:
    """Scales moved from a module into the layers that it feeds; `gain`: the output error over that of alpha 0."""

    before: str
    layers: tuple[str, ...]
    alpha: float
    gain: float


@dataclass
class Awq:
    """AWQ's two searches, followed by a method that rounds.

    method  rounds the scaled and clipped weights on its group grid: RTN as in the paper, or GPTQ
    clip    search for clipped ranges too
    stored  the dtype of floats in the checkpoint
    folder  keeps the scales of each block for a second run; None: they are not kept

    floats  norms and biases that have changed, float32 by full name, rounded to `stored`
    folds   the scales of each group of layers
    """

    method: Method
    clip: bool = True
    stored: torch.dtype = torch.float16
    folder: Path | None = None
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    folds: list[ScaleFold] = field(default_factory=list)

    def prepare(
        self,
        block: nn.Module,
        layers: Mapping[str, nn.Module],
        batches: Sequence[BlockInputs],
        name_of: Callable[[str], str] = lambda name: name,
    ) -> None:
        """Search and fold in place the scales of a block; `name_of`: a module's name in the checkpoint."""
        file = None if self.folder is None else file_of(self.folder, next(iter(layers), ""), ".scales")
        known_folds = None if file is None else _read_scales(file)
        if known_folds is not None:
            for before_name, fold, s in known_folds:
                self._apply(block.get_submodule(before_name), fold, s, layers)
            return
        done: list[tuple[str, ScaleFold, torch.Tensor]] = []
        ran = _call_order(block, batches[0])
        for stage in find_stages(block, layers, batches)[0]:
            if stage.experts:  # all experts read one norm, and so does their router
                continue
            for key, names in stage.groups.items():
                linears = [module for name in names if isinstance(module := layers[name], nn.Linear)]
                before = _feeding_module(block, ran, linears, batches[0]) if len(linears) == len(names) else None
                if before is None:
                    continue
                hessian = Hessian(names[0], linears[0].in_features, linears[0].weight.device)
                size = torch.zeros(len(hessian.matrix), dtype=torch.float64)
                for batch in batches:
                    inputs, _ = stage_inputs(stage, layers, Replay(block, batch))
                    for x in inputs.get(key, torch.empty(0)).split(1 << 16):
                        hessian.add(x)
                        size += x.abs().double().sum(0).cpu()
                weights = [linear.weight.data.float() for linear in linears]
                size = (size / hessian.tokens).to(weights[0])
                s, alpha, errors = smoothing(weights, size, hessian.matrix, self._rounding)
                before_name = next(name for name, module in block.named_modules() if module is before)
                gain = min(errors) / errors[0] if errors[0] else 1.0
                done.append((before_name, ScaleFold(name_of(before_name), tuple(names), alpha, gain), s))
                self._apply(before, *done[-1][1:], layers)
        if file is not None:
            folds = json.dumps([(before_name, asdict(fold)) for before_name, fold, _ in done])
            scales = {str(i): s.cpu().numpy() for i, (_, _, s) in enumerate(done)}
            write_tensors(file, "the scales of a block", scales, {"folds": folds})

    def _apply(self, before: nn.Module, fold: ScaleFold, s: torch.Tensor, layers: Mapping[str, nn.Module]) -> None:
        """Fold scales in place, out of the module that feeds the layers, and record what has changed."""
        self.folds.append(fold)
        if fold.alpha:
            linears = [layers[name] for name in fold.layers]
            weight: torch.Tensor = linears[0].weight  # type: ignore[assignment]
            fold_scales(before, linears, s.to(weight))
            self._record(before, fold.before, before in layers.values())

    def layer(self, layer: LayerInput, columns: np.ndarray | None = None) -> tuple[torch.Tensor, Quantized]:
        """Clip and quantize one layer; arguments and result are those of `Method.layer`."""
        weight, hessian = layer.weight, layer.hessian.matrix
        if self.clip and layer.hessian.tokens:
            size = self.method.grid(*weight.shape).fit_columns
            layer = replace(layer, weight=clipped(weight, hessian, size, self._rounding))
        values, done = self.method.layer(layer, columns)
        return values, replace(done, error=error_share(weight, values, hessian))

    def _rounding(self, weight: torch.Tensor) -> torch.Tensor:
        """To nearest, on the method's grid."""
        grid = self.method.grid(*weight.shape)
        codes = round_to_nearest(weight, grid, np.ones(weight.shape[1], np.float32))
        return torch.from_numpy(dequantize(codes, grid)).to(weight)

    def _record(self, module: nn.Module, name: str, quantized: bool) -> None:
        """Round the floats of a changed module as they will be stored, and keep them for the checkpoint."""
        for part in ("bias",) if quantized else ("weight", "bias"):
            values = getattr(module, part, None)
            if values is not None:
                values.data.copy_(values.data.to(self.stored))
                self.floats[f"{name}.{part}"] = values.data.float().cpu().numpy().copy()


def _read_scales(file: Path) -> list[tuple[str, ScaleFold, torch.Tensor]] | None:
    """The folds that an earlier run found for a block: feeding module, fold and s; None if there are none."""
    stored = read_tensors(file)
    if stored is None:
        return None
    scales, metadata = stored
    return [
        (before_name, ScaleFold(**{**fold, "layers": tuple(fold["layers"])}), torch.from_numpy(scales[str(i)]))
        for i, (before_name, fold) in enumerate(json.loads(metadata["folds"]))
    ]


def _call_order(block: nn.Module, batch: BlockInputs) -> list[nn.Module]:
    """The modules whose weights can be scaled, in the order of their first calls."""
    ran: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        if module not in ran:
            ran.append(module)

    able = [m for m in block.modules() if isinstance(m, nn.Linear) or getattr(getattr(m, "weight", 0), "ndim", 0) == 1]
    with ExitStack() as stack:
        for module in able:
            stack.enter_context(module.register_forward_pre_hook(note))
        batch.run(block)
    return ran


def _feeding_module(
    block: nn.Module, ran: Sequence[nn.Module], linears: Sequence[nn.Linear], batch: BlockInputs
) -> nn.Module | None:
    """The module whose outputs only these linears read; None if there is none that can be scaled."""
    first = linears[0]
    if first not in ran:
        return None
    columns = first.in_features
    expected = None
    for module in reversed(ran[: ran.index(first)]):
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        if len(weight) != columns or module in linears:
            continue
        if expected is None:
            expected = _output(batch, block)
        s = torch.ones((columns,), dtype=weight.dtype, device=weight.device)
        s[::2], s[1::3] = 2.0, 0.5  # powers of two: no rounding changes
        fold_scales(module, linears, s)
        same = (_output(batch, block) - expected).abs().max() <= _CLOSE * expected.abs().max()
        fold_scales(module, linears, 1 / s)
        if same:
            return module
    return None


def _output(batch: BlockInputs, block: nn.Module) -> torch.Tensor:
    return first_of(batch.run(block)).float()
