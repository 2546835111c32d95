"""AWQ as a method of `calibrate`: each block's weights are scaled where its inputs are large, then clipped and rounded.

    awq = Awq(Method(groups(4, 128, False), "none", damping=inf, sweeps=0), stored=torch.float16)
    for name, quantized in quantize_model(model, tokens, awq.layer, prepare=awq.prepare): ...
    awq.floats      norms and biases that have changed, and belong in the checkpoint beside the codes

What feeds a stage of layers is found by trial, not by name: of the norms and linears that ran before it, the one whose
outputs can be divided by powers of two, the layers' columns multiplied, and the block's output stays what it was. So
a norm whose output something else reads too (a router), or values that several heads share, are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from bridge.quantize.awq_search import clipped, fold, smoothing
from bridge.quantize.block_inputs import Feed
from bridge.quantize.gptq_solver import dequantize, error, round_to_nearest
from bridge.quantize.hessian import Hessian
from bridge.quantize.layer_store import file_of, keep
from bridge.quantize.method import Method, Quantized
from bridge.quantize.stages import find_stages, inputs
from bridge.quantize.walk import Calibrated

_CLOSE = 1e-3  # of the largest output


@dataclass(frozen=True)
class Fold:
    """Scales that went from a module into the layers that it feeds; gain: the output error over that of alpha 0."""

    before: str
    layers: tuple[str, ...]
    alpha: float
    gain: float


@dataclass
class Awq:
    """AWQ's two searches, around a method that rounds.

    method  rounds the scaled and clipped weights on its group grid: RTN as in the paper, or GPTQ
    clip    search for clips too
    stored  the dtype that floats will have in the checkpoint
    folder  where the scales of each block are kept, so that a second run searches none again; None: nowhere

    floats  what has changed of them, float32 by full name, as `stored` rounds it
    folds   what went where
    """

    method: Method
    clip: bool = True
    stored: torch.dtype = torch.float16
    folder: Path | None = None
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)

    def prepare(
        self,
        block: nn.Module,
        layers: Mapping[str, nn.Module],
        feeds: Sequence[Feed],
        name_of: Callable[[str], str] = lambda name: name,
    ) -> None:
        """Search and fold the scales of a block in place.

        layers   by name, those that will be quantized
        name_of  the name in the checkpoint of a module of the block
        """
        file = None if self.folder is None else file_of(self.folder, next(iter(layers), ""), ".scales")
        kept = _kept(file) if file is not None else None
        if kept is not None:
            for own, known, s in kept:
                self._fold(block.get_submodule(own), own, known, s, layers, name_of)
            return
        done: list[tuple[str, Fold, torch.Tensor]] = []
        ran = _order(block, feeds[0])
        for stage in find_stages(block, layers, feeds):
            if stage.fellows:  # all experts read one norm, and so does their router
                continue
            for key, names in stage.groups.items():
                linears = [module for name in names if isinstance(module := layers[name], nn.Linear)]
                found = _feeding(block, ran, linears, feeds[0]) if len(linears) == len(names) else None
                if found is None:
                    continue
                hessian = Hessian(names[0], linears[0].in_features, linears[0].weight.device)
                size = torch.zeros(len(hessian.matrix), dtype=torch.float64)
                for feed in feeds:
                    for x in inputs(block, stage, layers, feed).get(key, torch.empty(0)).split(1 << 16):
                        hessian.add(x)
                        size += x.abs().double().sum(0).cpu()
                weights = [linear.weight.data.float() for linear in linears]
                s, alpha, errors = smoothing(
                    weights, (size / hessian.tokens).to(weights[0]), hessian.matrix, self._rounding
                )
                own = next(name for name, module in block.named_modules() if module is found)
                gain = min(errors) / errors[0] if errors[0] else 1.0
                done.append((own, Fold(name_of(own), tuple(names), alpha, gain), s))
                self._fold(found, *done[-1], layers, name_of)
        if file is not None:
            folds = json.dumps([(own, asdict(found)) for own, found, _ in done])
            scales = {str(i): s.cpu().numpy() for i, (_, _, s) in enumerate(done)}
            keep(file, "the scales of a block", scales, {"folds": folds})

    def _fold(
        self,
        before: nn.Module,
        own: str,
        known: Fold,
        s: torch.Tensor,
        layers: Mapping[str, nn.Module],
        name_of: Callable[[str], str],
    ) -> None:
        """Fold scales in place, and note what has changed; own: the name in the block of what is before the layers."""
        self.folds.append(known)
        if known.alpha:
            linears = [layers[name] for name in known.layers]
            weight: torch.Tensor = linears[0].weight  # type: ignore[assignment]
            fold(before, linears, s.to(weight))
            self._note(before, name_of(own), before in layers.values())

    def layer(self, layer: Calibrated, columns: np.ndarray | None = None) -> tuple[torch.Tensor, Quantized]:
        """Clip and quantize one layer, as `Method.layer`."""
        weight, hessian = layer.weight, layer.hessian.matrix
        if self.clip and layer.hessian.tokens:
            size = self.method.grid(*weight.shape).run
            layer = replace(layer, weight=clipped(weight, hessian, size, self._rounding))
        values, done = self.method.layer(layer, columns)
        whole = error(weight, torch.zeros_like(weight), hessian)
        return values, replace(done, error=error(weight, values, hessian) / whole if whole else 0.0)

    def _rounding(self, weight: torch.Tensor) -> torch.Tensor:
        """To nearest, on the method's grid."""
        grid = self.method.grid(*weight.shape)
        codes = round_to_nearest(weight, grid, np.ones(weight.shape[1], np.float32))
        return torch.from_numpy(dequantize(codes, grid)).to(weight)

    def _note(self, module: nn.Module, name: str, quantized: bool) -> None:
        """Round the floats of a module that has changed as they will be stored, and keep them for the checkpoint."""
        for part in ("bias",) if quantized else ("weight", "bias"):
            values = getattr(module, part, None)
            if values is not None:
                values.data.copy_(values.data.to(self.stored))
                self.floats[f"{name}.{part}"] = values.data.float().cpu().numpy().copy()


def _kept(file: Path) -> list[tuple[str, Fold, torch.Tensor]] | None:
    """What a run before found for a block: what is before, the fold, and s; None where that is not known."""
    try:
        with safe_open(file, "pt") as stored:
            folds = json.loads(stored.metadata()["folds"])
            return [
                (own, Fold(**{**known, "layers": tuple(known["layers"])}), stored.get_tensor(str(i)))
                for i, (own, known) in enumerate(folds)
            ]
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None


def _order(block: nn.Module, feed: Feed) -> list[nn.Module]:
    """The modules with weights of their own that can be scaled, in the order in which they first run."""
    ran: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        if module not in ran:
            ran.append(module)

    able = [m for m in block.modules() if isinstance(m, nn.Linear) or getattr(getattr(m, "weight", 0), "ndim", 0) == 1]
    handles = [module.register_forward_pre_hook(note) for module in able]
    try:
        feed.into(block)
    finally:
        for handle in handles:
            handle.remove()
    return ran


def _feeding(block: nn.Module, ran: Sequence[nn.Module], linears: Sequence[nn.Linear], feed: Feed) -> nn.Module | None:
    """The module whose outputs these linears, and nothing else, read; None where there is none to scale."""
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
            expected = _output(feed, block)
        s = torch.ones((columns,), dtype=weight.dtype, device=weight.device)
        s[::2], s[1::3] = 2.0, 0.5  # powers of two: all that is rounded stays the same
        fold(module, linears, s)
        same = (_output(feed, block) - expected).abs().max() <= _CLOSE * expected.abs().max()
        fold(module, linears, 1 / s)
        if same:
            return module
    return None


def _output(feed: Feed, block: nn.Module) -> torch.Tensor:
    output = feed.into(block)
    return (output[0] if isinstance(output, tuple) else output).float()
