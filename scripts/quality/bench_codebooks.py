"""Measure what a trellis code of 3 bits is worth beside GGUF types: the same layers and Hessians; a markdown table.

    python -m scripts.quality.bench_codebooks MODEL --calibrate a.txt --test b.txt c.txt --blocks 3 15 27 --rows 128

Three things differ between EXL3's weights and a GGUF type's: the codebook, the basis (random signs, scales of rows and
columns, Hadamard transforms of 128 on both sides) and how codes are chosen. So each contender is measured on its own
terms: a Gaussian source, where no H helps; and layers in both bases, with codes chosen

    alone    each weight, block or tile with the least squared error
    GPTQ     with error feedback, column by column, or by 16 columns of the trellis's tiles (LDLQ)
    refined  then moved while tr(E H E^T) falls: `bridge.quantize.solve.refine`; the trellis's tiles searched anew,
             --sweeps times

Errors are tr(E H E^T) over tr(W H W^T), geometric means over the layers. H is that of the float model's inputs, damped
only where codes are chosen; further columns are with H of each text of --test. Bits count what rows and columns store.
Texts may be tokens int [samples, length] in .npy files. With 2^16 states, 100,000 weights are coded in 4 CPU seconds.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bridge.blocks.read import WRITTEN
from bridge.quantize import Method, superblocks
from bridge.quantize.method import round_alone
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.gptq_solver import dequantize, error
from bridge.quantize.solve.hessian import Hessian, damped_diagonal, damped_factor
from bridge.trellis import BitshiftCodebook
from scripts.benchlib import Lines, bench, head, option
from scripts.benchlib.viterbi import viterbi
from scripts.peers import reference

TILE = 16
DAMPING = 0.01
WAYS = ("alone", "GPTQ", "refined")
Ways = Callable[[torch.Tensor, torch.Tensor], Iterator[torch.Tensor]]  # weights, H -> values, codes chosen in WAYS
Contender = tuple[str, float, Ways]  # name, bits a weight


@dataclass(frozen=True)
class Layer:
    """Weights float32 [all rows, columns], H of calibration, and H of texts that nothing is chosen on."""

    whole: torch.Tensor
    hessian: torch.Tensor
    held: list[torch.Tensor]
    rows: int  # of the weights that are coded

    @property
    def weight(self) -> torch.Tensor:
        return self.whole[: self.rows]


@dataclass(frozen=True)
class Basis:
    """The basis of EXL3: W = diag(sv) U (rotated) U diag(su), U of Hadamard matrices of 128 on the diagonal."""

    su: torch.Tensor
    sv: torch.Tensor

    @classmethod
    def of(cls, layer: Layer, scaled: bool) -> "Basis":
        """Random signs; `scaled`: times the root mean squares of rows, then of columns."""
        random = torch.Generator().manual_seed(0)
        sv, su = (torch.randint(0, 2, (n,), generator=random) * 2.0 - 1 for n in layer.whole.shape)
        if scaled:
            rows = layer.whole.square().mean(1).sqrt()
            sv = sv * rows
            su = su * (layer.whole / rows[:, None]).square().mean(0).sqrt()
        return cls(su, sv[: layer.rows])

    def into(self, weight: torch.Tensor) -> torch.Tensor:
        return turned(turned(weight / self.sv[:, None] / self.su).T).T

    def back(self, rotated: torch.Tensor) -> torch.Tensor:
        return self.sv[:, None] * turned(turned(rotated).T).T * self.su

    def metric(self, hessian: torch.Tensor) -> torch.Tensor:
        """H of the rotated weights' columns."""
        return turned(turned(self.su[:, None] * hessian * self.su).T)


def turned(x: torch.Tensor) -> torch.Tensor:
    """x times U, symmetric: of Hadamard matrices of 128, entries -1 where indices share an odd number of bits."""
    i = np.arange(128)
    u = torch.from_numpy(1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32)) / 128**0.5
    return (x.reshape(len(x), -1, 128) @ u).reshape(x.shape)


class Trellis:
    """A codebook with a scale of the whole matrix, chosen for the weights' squared error."""

    def __init__(self, book: BitshiftCodebook, weight: torch.Tensor) -> None:
        self.table, self.step = book.lut, book.K
        sample = weight[:, : 4 * TILE]
        rms = float(weight.square().mean().sqrt()) / float(np.sqrt(np.square(self.table).mean()))
        tried = {s: float((sample - self.rounded(sample, rms / s)).square().sum()) for s in (0.85, 0.9, 0.95, 1.0)}
        self.scale = rms / min(tried, key=lambda s: tried[s])

    def rounded(self, weight: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Weights float32 [rows, n * 16], tiles of 16 x 16 coded each by itself."""
        scale = scale or self.scale
        shape = len(weight) // TILE, TILE, weight.shape[1] // TILE, TILE
        tiles = weight.reshape(shape).transpose(1, 2)
        states = viterbi((tiles / scale).reshape(-1, TILE * TILE, 1).numpy(), self.table, self.step)
        values = torch.from_numpy(self.table[states]) * scale
        return values.reshape(tiles.shape).transpose(1, 2).reshape(weight.shape)

    def solve(self, weight: torch.Tensor, damped: torch.Tensor) -> torch.Tensor:
        """LDLQ: each column of tiles after the errors of those before have moved it."""
        factorization = damped_factor(damped, 0.0)
        assert factorization is not None
        factor, work, values = factorization[0], weight.clone(), torch.empty_like(weight)
        for at in range(0, weight.shape[1], TILE):
            t = slice(at, at + TILE)
            values[:, t] = self.rounded(work[:, t])
            lost = torch.linalg.solve_triangular(factor[t, t], work[:, t] - values[:, t], upper=True, left=False)
            work[:, t.stop :] -= lost @ factor[t, t.stop :]
        return values

    def refine(self, weight: torch.Tensor, damped: torch.Tensor, values: torch.Tensor, sweeps: int) -> torch.Tensor:
        """Search columns of tiles anew, each for what the errors of all others leave; tiles that gain are kept."""
        values = values.clone()
        for at in [*range(0, weight.shape[1], TILE)] * sweeps:
            t = slice(at, at + TILE)
            own = damped[t, t]
            lost = weight - values
            target = values[:, t] + torch.linalg.solve(own, lost @ damped[:, t], left=False)
            other = self.rounded(target)
            before, after = (
                ((target - v) @ own * (target - v)).reshape(-1, TILE**2).sum(1) for v in (values[:, t], other)
            )
            values[:, t] = torch.where((after < before).repeat_interleave(TILE)[:, None], other, values[:, t])
        return values


def trellis_ways(book: BitshiftCodebook, sweeps: int) -> Ways:
    def ways(weight: torch.Tensor, hessian: torch.Tensor) -> Iterator[torch.Tensor]:
        trellis = Trellis(book, weight)
        yield trellis.rounded(weight)
        damped = hessian.clone()
        damped.diagonal().copy_(damped_diagonal(hessian, DAMPING))
        solved = trellis.solve(weight, damped)
        yield solved
        yield trellis.refine(weight, damped, solved, sweeps)

    return ways


def type_ways(type: str, sweeps: int) -> Ways:
    def ways(weight: torch.Tensor, hessian: torch.Tensor) -> Iterator[torch.Tensor]:
        grid = superblocks(type)(*weight.shape)
        codes = round_alone(weight, grid, np.ones(weight.shape[1], np.float32))
        yield torch.from_numpy(dequantize(codes, grid))
        layer = LayerInput("layer", weight, Hessian("layer", weight.shape[1]))
        layer.hessian.matrix, layer.hessian.tokens = hessian, 1
        for n in (0, sweeps):
            yield Method(superblocks(type), damping=DAMPING, sweeps=n).layer(layer)[0]

    return ways


def gaussian(rows: int, contenders: Sequence[Contender]) -> Lines:
    """The table of a Gaussian source."""
    weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0))
    yield head("code", "bits", "squared error", "over 4^-bits", "bits lost")
    for name, bits, ways in contenders:
        values = next(ways(weight, torch.eye(1024)))
        lost = float((weight - values).square().sum() / weight.square().sum())
        yield name, f"{bits:.2f}", f"{lost:.5f}", f"{lost * 4**bits:.3f}", f"{bits + np.log2(lost) / 2:.3f}"


def layers_of(options: argparse.Namespace) -> list[Layer]:
    """The down projections of some blocks of the float model, and H of their inputs."""
    weights = reference.float_weights(options.model)
    model = reference.hf_model(options.model, weights)
    linears = {
        name: m
        for name, m in model.named_modules()
        if name.endswith(tuple(f"layers.{b}.mlp.down_proj" for b in options.blocks))
    }
    by_text = []
    for source in (options.calibrate, *options.test):
        hessians = {name: Hessian(name, m.in_features) for name, m in linears.items()}
        hooks = [
            m.register_forward_pre_hook(lambda _, inputs, h=hessians[name]: h.add(inputs[0]))
            for name, m in linears.items()
        ]
        with torch.no_grad():
            for sequence in tokens_of(source, options):
                model.base_model(torch.from_numpy(sequence[None]))
        for hook in hooks:
            hook.remove()
        by_text.append([h.matrix for h in hessians.values()])
    return [
        Layer(m.weight.detach(), hessian, held, options.rows)
        for m, hessian, *held in zip(linears.values(), *by_text, strict=True)
    ]


def tokens_of(source: Path, options: argparse.Namespace) -> np.ndarray:
    """int64 [samples, length]."""
    if source.suffix == ".npy":
        return np.load(source)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    return reference.windows(tokenizer, source.read_text(encoding="utf-8"), options.samples, options.length)


def measure(options: argparse.Namespace) -> Lines:
    if options.model and not (options.calibrate and options.test):
        raise argparse.ArgumentTypeError("a model needs --calibrate and --test: texts whose tokens give H")
    if options.rows % 128:
        raise argparse.ArgumentTypeError(
            f"--rows {options.rows}: must be a multiple of 128, the size of the Hadamard transforms"
        )
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    books = [BitshiftCodebook(options.state_bits, options.bits, decode_mode=mode) for mode in options.modes]
    types = [(type, WRITTEN[type].bpw, type_ways(type, options.sweeps)) for type in options.types]
    trellises = [(f"trellis, {book.decode_mode}", book.K, trellis_ways(book, options.sweeps)) for book in books]
    yield from gaussian(options.rows, [*types, *trellises])
    if options.model is None:
        return
    layers = layers_of(options)
    rows, columns = layers[0].whole.shape
    yield f"\n{options.rows} of {rows} rows of {columns} columns, down projections of blocks {options.blocks}"
    by_text = [f"{way}, {file.stem}" for file in options.test for way in WAYS]
    yield head("code", "bits", "basis", *WAYS, *by_text, "CPU s")
    for contenders, bases in ((types, ("weights", "rotated")), (trellises, ("rotated", "rotated, scaled"))):
        for contender in contenders:
            for basis in bases:
                yield row(contender, basis, layers)


def row(contender: Contender, basis: str, layers: list[Layer]) -> Sequence[str]:
    """Errors of a contender in a basis."""
    name, bits, ways = contender
    begun, errors = time.process_time(), []
    for layer in layers:
        if basis == "weights":
            values = list(ways(layer.weight, layer.hessian))
        else:
            turn = Basis.of(layer, scaled="scaled" in basis)
            values = [turn.back(v) for v in ways(turn.into(layer.weight), turn.metric(layer.hessian))]
        errors.append([share(layer.weight, v, h) for h in (layer.hessian, *layer.held) for v in values])
    means = np.exp(np.log(errors).mean(0))
    each = sum(1 / n for n in layers[0].whole.shape)  # what a bit for each row and column adds
    bits += {"weights": 0, "rotated": 1, "rotated, scaled": 16}[basis] * each
    return name, f"{bits:.2f}", basis, *(f"{e:.2e}" for e in means), f"{time.process_time() - begun:.1f}"


def share(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor) -> float:
    return error(weight, values, hessian) / error(weight, torch.zeros_like(weight), hessian)


OPTIONS = (
    "--calibrate",
    option("--test", nargs="+"),
    *("--samples", "--length"),
    option("--threads", 1),
    option("model", help="a float model's folder; without: no layers", nargs="?"),
    option("--blocks", [0], "N"),
    option("--rows", 128, "N", "of each layer, n * 128"),
    option("--types", ["IQ3_XXS", "IQ3_S", "Q3_K"], "TYPE"),
    option("--modes", ["mcg"], "MODE", "trellis codebooks"),
    option("--bits", 3, "K", "of the trellis"),
    option("--state-bits", 16, "L"),
    option("--sweeps", 2, "N", "of refinement"),
)

if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure)
