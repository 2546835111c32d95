"""A template's norms, biases and other vectors in the checkpoint: by name and value, biases by their matrix's rows.

AWQ divides a norm by the factors by which it multiplies the columns of the matrices after it. Such a norm differs from
the template's as those columns do, and must be the checkpoint's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.tensor_names import block_of
from bridge.models.template.match import fit_factors
from bridge.models.template.matrices import Matrices, Run
from bridge.models.template.names import Candidate
from bridge.runtime.quant_tensor import QuantTensor

_FACTOR_ROWS = 1024  # rows of a matrix from which the factors of its columns are fitted
_CORRELATED = 0.9  # 0.99 and more in practice
_FACTORS = 0.75  # remaining share of the squared error once factors are fitted; less proves that there are factors


@dataclass(frozen=True)
class VectorMatch:
    """The parts of a vector: rows of one or several tensors, one after another, an offset added to them, and a change
    as in Part."""

    parts: list[tuple[Candidate, np.ndarray]]
    offset: float = 0.0
    change: str | None = None


class Vectors:
    """The matching of one template's vectors, after its matrices; `find` does it.

    matches  by GGUF name
    """

    def __init__(self, matrices: Matrices) -> None:
        self.matrices, self.ckpt, self.file = matrices, matrices.ckpt, matrices.file
        self.matches: dict[str, VectorMatch] = {}

    def find(self) -> None:
        """Match everything. Raises BridgeError if AWQ's factors cannot be told from a difference of models."""
        for tensor in self.file.values():
            if sum(n > 1 for n in tensor.shape) <= 1:
                self._find_vector(tensor)
        for match in self.matches.values():
            self.matrices.used.update(candidate for candidate, _ in match.parts)

    def _find_vector(self, tensor: QuantTensor) -> None:
        """A norm, a bias, or another vector."""
        values = tensor.dequantize().reshape(-1)
        base, _, suffix = tensor.name.rpartition(".")
        if suffix == "bias" and self._find_bias(tensor, values, self.matrices.runs.get(f"{base}.weight")):
            return
        for candidate in self.matrices.named.get(tensor.name, []):
            if candidate.module is not None or int(np.prod(candidate.shape)) != values.size:
                continue
            stored = self.ckpt.read_float(candidate.source).reshape(-1)
            with np.errstate(over="ignore"):
                change = "-exp" if _equal(values, -np.exp(stored)) else None  # Mamba's A_log
            offset = 0.0
            if change is None and not _equal(values, stored):
                added = self._awq_offset(tensor.name, values, stored)
                if added is None:
                    one_more = _equal(values, stored + 1)  # Gemma's norms
                    self.matrices.reasons[tensor.name] = (
                        f"its values are {'1 more than' if one_more else 'not'} those of {candidate.source}"
                    )
                    if not one_more and tensor.name.endswith("norm.weight"):
                        self._refuse_lost_factors(tensor, candidate)
                    continue
                offset = added
            self.matches[tensor.name] = VectorMatch([(candidate, np.arange(stored.size))], offset, change)
            return

    def _find_bias(self, tensor: QuantTensor, values: np.ndarray, runs: list[Run] | None) -> bool:
        """The biases of the modules in the corresponding matrix, in the order of its rows."""
        sources = {c.source: c for c in self.matrices.all}
        names = [run.owner.source.removesuffix(".weight") + ".bias" for run in runs or ()]
        if not runs or not all(name in sources for name in names) or len(tensor.shape) > 1:
            return False
        stored = [self.ckpt.read_float(name) for name in names]
        if any(run.rows.max() >= len(bias) for run, bias in zip(runs, stored, strict=True)):
            return False
        biases = np.concatenate([bias[run.rows] for run, bias in zip(runs, stored, strict=True)])
        if not _equal(values, biases):
            if len(runs) > 1:
                return False
            weight = self.file[tensor.name.removesuffix("bias") + "weight"]
            r, _ = fit_factors(
                weight.dequantize(), self.matrices.of_checkpoint(runs[0].owner, weight.shape[1]).take(runs[0].rows)
            )
            if np.square(values - biases * r).sum() > 0.01 * np.square(values).sum():
                return False
        self.matches[tensor.name] = VectorMatch(
            [(sources[name], run.rows) for name, run in zip(names, runs, strict=True)]
        )
        return True

    def _awq_offset(self, name: str, values: np.ndarray, stored: np.ndarray) -> float | None:
        """Whether a norm differs from the template's as the columns of a matrix after it do, which AWQ causes.

        The amounts are not compared: AutoAWQ 0.2.9 can scale columns by the square of the norm's factor.
        Returns the offset that the converter adds to norms (Gemma: 1), None if the two do not correlate.
        """
        for t, w in self._matrices_after(name, values.size):
            _, c = fit_factors(t, w)
            for offset in (0.0, 1.0):
                with np.errstate(divide="ignore", invalid="ignore"):
                    factors, columns = np.log(values / (stored + np.float32(offset))), -np.log(c)
                    if np.corrcoef(factors, columns)[0, 1] > _CORRELATED:  # False for NaN, from different signs
                        return offset
        return None

    def _matrices_after(self, norm: str, columns: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of the matrices in a norm's layer that have its width: the template's and the checkpoint's."""
        block = block_of(norm)
        for name, runs in self.matrices.runs.items():
            tensor = self.file[name]
            if block is not None and block_of(name) == block and tensor.shape[-1] == columns and not runs[0].transposed:
                matrix = tensor if len(tensor.shape) == 2 else tensor[0]
                rows = runs[0].rows[: matrix.shape[0]]
                some = np.unique(np.linspace(0, len(rows) - 1, _FACTOR_ROWS).astype(np.int64))
                yield matrix.rows(some), self.matrices.of_checkpoint(runs[0].owner, columns).take(rows[some])

    def _refuse_lost_factors(self, norm: QuantTensor, candidate: Candidate) -> None:
        """Refuse the template's norm before matrices whose columns have factors: the result would be wrong."""
        for t, w in self._matrices_after(norm.name, norm.shape[-1]):
            r, c = fit_factors(t, w)
            explained = np.square(t - w * r[:, None] * c).sum() / max(np.square(t - w).sum(), 1e-30)
            if explained < _FACTORS:
                raise BridgeError(
                    f"{self.file.path}: {norm.name} is not {candidate.source}, and the matrices after it differ by "
                    "factors of their columns; make the template from this checkpoint, or from the model before it"
                )


def _equal(values: np.ndarray, stored: np.ndarray) -> bool:
    """Whether vectors differ only by the rounding of float types."""
    error = float(np.square(values - stored, dtype=np.float64).sum())
    return error <= 1e-5 * float(np.square(values, dtype=np.float64).sum())
