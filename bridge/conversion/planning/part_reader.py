"""Reads a tensor's codes or floats from the checkpoint, with rows and columns in the GGUF's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.grouped import CodedTensor
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.conversion.planning.plan import PlannedTensor
from bridge.errors import BridgeError
from bridge.models.config.model_config import sizes_of
from bridge.models.outline import ADDED, COLOURS, FRAMES, ModelTensor, Part, changed_shape
from bridge.system.cpu.row_threads import chunks

_OF_CODES = (None, "transposed", "conv1d")  # what can be done to codes, too
_ELEMENTWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{name: partial(np.add, np.float32(number)) for name, number in ADDED.items()},
    "exp": np.exp,
    "-exp": lambda values: -np.exp(values),
    "softplus": lambda values: np.logaddexp(0, values, dtype=np.float64).astype(np.float32),
    "unit columns": lambda values: values / (np.linalg.norm(values, axis=0) + np.float32(1e-7)),
}
_WINDOW = 16  # consecutive rows of a sample: a cache line of GPTQ's words
_REPEATED = 1.1  # so much larger than its sources a tensor may be: Gemma 3n's tokens of images share a row
_FEW = 1 << 16  # elements that it may have besides: a head of one class becomes two rows
_WINDOWS = 3  # first, middle, last


@dataclass
class PartReader:
    """Reads the parts of planned tensors from a checkpoint."""

    ckpt: Checkpoint

    def check(self, tensors: Sequence[ModelTensor]) -> None:
        """BridgeError where a part is missing, or smaller than planned. A larger one may be padded with zeros."""
        for tensor in tensors:
            for part in tensor.parts:
                self._check_part(part)
            sources = {(part.source, part.matrix): math.prod(self._stored(part)[0]) for part in tensor.parts}
            if tensor.parts and math.prod(tensor.shape) > _REPEATED * sum(sources.values()) + _FEW:
                raise BridgeError(f"{tensor.name}: repeats the rows of {tensor.source}; make the plan again")

    def _check_part(self, part: Part) -> None:
        if part.source not in self.ckpt.tensors and not self._module(part):
            raise BridgeError(f"{self.ckpt.path}: has no {part.source}; the plan is of another checkpoint")
        if part.times is not None:
            self._check_part(Part(part.times, part.shape))
        vector = part.change == "squeezed" and len(part.shape) == 1
        if self._module(part) and (part.matrix is not None or not (vector or part.change in _OF_CODES)):
            how = f"matrix {part.matrix}" if part.change is None else repr(part.change)
            raise BridgeError(f"{part.source}: is quantized, it has no {how}; the plan is of another checkpoint")
        if part.matrix is not None and part.matrix >= self.ckpt.tensors[part.source].shape[0]:
            raise BridgeError(f"{part.source}: has no matrix {part.matrix}; the plan is of another checkpoint")
        shape, _ = self._stored(part)
        expected = part.stored or part.shape
        if len(shape) != len(expected) or any(a < b for a, b in zip(shape, expected, strict=True)):
            raise self._other_shape(part)
        if not self._module(part) and any(a > b for a, b in zip(shape, expected, strict=True)):
            for _ in self.floats(part):  # what is more must be zeros
                pass

    def coded(self, part: Part) -> bool:
        """Whether the part is codes; otherwise it is floats, or made floats by its change."""
        return part.change in (None, "conv1d", "squeezed") and self._module(part)

    def _module(self, part: Part) -> bool:
        """Whether the checkpoint has the part's source as a quantized module."""
        return part.module in self.ckpt.modules and part.source != part.module

    def stored_as(self, part: Part) -> str:
        """The dtype of a part of floats, for messages; "codes" where it is made of them."""
        return "codes" if self._module(part) else self.ckpt.stored_as(part.source)

    def nbytes(self, tensor: ModelTensor) -> int:
        """Bytes of the tensor in the checkpoint."""
        total = 0
        for part in tensor.parts:
            if self._module(part):
                nbytes = self.ckpt.modules[part.module].nbytes
            else:
                info = self.ckpt.tensors[part.source]
                nbytes = info.nbytes if part.matrix is None else info.nbytes // info.shape[0]
            share = math.prod(part.shape) / math.prod(part.stored) if part.stored else 1.0
            total += math.ceil(nbytes * share)
        return total

    def grouped(self, part: Part) -> CodedTensor:
        """A part's codes with rows and columns as the GGUF has them."""
        if part.stored is not None and part.rows is not None and (np.diff(part.rows) > 0).all():
            return self._some(part, part.rows)
        t = self._fitted(self.ckpt.read_module(part.module), part)
        t = t if part.factor is None else t.scaled(part.factor)
        return t if part.rows is None else t.take_rows(part.rows)

    def sample(self, part: Part) -> CodedTensor:
        """Codes of some of a part's rows, in any order: what a type is chosen by."""
        rows = np.arange(part.shape[0]) if part.rows is None else np.sort(part.rows)
        if len(part.shape) < 2 or len(rows) <= 2 * _WINDOW * _WINDOWS:
            return self.grouped(part)
        last = len(rows) - _WINDOW
        picked = np.concatenate([np.arange(start, start + _WINDOW) for start in (0, last // 2, last)])
        return self._some(part, rows[picked])

    def _some(self, part: Part, rows: np.ndarray) -> CodedTensor:
        """Codes of rows of a part's source, in ascending order."""
        t = self._fitted(self.ckpt.read_module(part.module, rows), part, len(rows))
        return t if part.factor is None else t.scaled(part.factor[rows])

    def _fitted(self, t: CodedTensor, part: Part, rows: int | None = None) -> CodedTensor:
        """The codes without zero padding beyond the part's shape, columns in the GGUF's order; `rows`: of a sample."""
        shape = part.stored or part.shape
        out, columns = shape if len(shape) == 2 else (1, *shape)
        out = rows or out
        if t.shape != (out, columns):
            weights = t.dequantize()
            beyond = t.shape[0] - out >= t.padding or t.shape[1] - columns >= t.padding
            if beyond and (weights[out:].any() or weights[:, columns:].any()):
                raise self._other_shape(part)
            t = t.crop(out, columns)
        return t if part.columns is None else t.take_columns(part.columns)

    def copied(self, tensor: PlannedTensor) -> np.ndarray | None:
        """uint8: the bytes of a GGUF's tensor that keeps its type; None for all others."""
        if not isinstance(self.ckpt, GgufCheckpoint) or {*tensor.how} != {"as it came"}:
            return None
        if any(self.stored_as(part) != tensor.type or part.source in self.ckpt.merged for part in tensor.parts):
            return None
        return self.ckpt.copied(tensor.name, tensor.type, tensor.shape)

    def blocks_of(self, tensor: PlannedTensor) -> np.ndarray | None:
        """uint8 [rows, row bytes] of a GGUF's tensor that has its type already; None for all others."""
        if not isinstance(self.ckpt, GgufCheckpoint):
            return None
        return self.ckpt.blocks(tensor.name, tensor.type, tensor.shape)

    def floats(self, part: Part) -> Iterator[np.ndarray]:
        """A float part's rows as the GGUF has them, in chunks of float32."""
        start = 0
        for rows in self._float_rows(part):
            if part.columns is not None and part.change not in ("transposed", "conv1d"):
                rows = rows[:, part.columns]
            if part.factor is not None:
                span = slice(start, start + len(rows))
                factor = part.factor[span if part.rows is None else part.rows[span]]
                rows = rows * factor.reshape(-1, *(1,) * (rows.ndim - 1))
            start += len(rows)
            yield rows

    def _float_rows(self, part: Part) -> Iterator[np.ndarray]:
        """`floats`, columns in the source's order."""
        if part.change in ("transposed", "conv1d"):
            yield self._transposed(part)
            return
        if part.change is not None:
            values = self._cropped(self._read_whole(part), part)
            if part.times is not None:
                values = values * self._cropped(self.ckpt.read_float(part.times), Part(part.times, part.shape))
            if part.change in _ELEMENTWISE:
                values = self._elementwise(values, part)
            yield values if part.rows is None else values[part.rows]
            return
        if part.matrix is not None or len(part.shape) == 1 or part.rows is not None:
            values = self._cropped(self._read_whole(part), part)
            yield values if part.rows is None else values[part.rows]
            return
        count, *inner = self.ckpt.tensors[part.source].shape
        for rows in chunks(count, math.prod(part.shape[1:])):
            stored = self.ckpt.read_float(part.source, (rows.start, rows.stop)).reshape(-1, *inner)
            chunk = self._cropped(stored, part, rows.start)
            if len(chunk):
                yield chunk

    def _read_whole(self, part: Part) -> np.ndarray:
        """float32 of a part before rows are picked."""
        if part.change == "targets":
            return self.targets(part).astype(np.float32)
        rows = None if part.matrix is None else (part.matrix, part.matrix + 1)
        stored = self.ckpt.read_float(part.source, rows)
        if part.change is not None and part.change in FRAMES:
            stored = stored[:, :, FRAMES.index(part.change)]
        if part.change == "patches":
            out, colours, side, _ = self._stored(part)[0]
            return stored.reshape(out, side, side, colours).transpose(0, 3, 1, 2)
        if part.change == "colours first":
            side = math.isqrt(stored.shape[-1] // COLOURS)
            return np.moveaxis(stored.reshape(*stored.shape[:-1], side, side, COLOURS), -1, -3).reshape(stored.shape)
        if part.change == "swapped":
            return stored.swapaxes(0, 1)
        return stored.reshape(self._stored(part)[0])

    def targets(self, part: Part) -> np.ndarray:
        """int64 [n] of a part of whole numbers that are counted each from its own place; they are exact in float32."""
        stored = self.ckpt.read_float(part.source).astype(np.int64).reshape(-1)
        return stored + np.arange(len(stored))

    def _transposed(self, part: Part) -> np.ndarray:
        """float32 of a part whose columns are rows of the source: of codes, no other rows are read."""
        columns = np.arange((part.stored or part.shape)[1]) if part.columns is None else part.columns
        if self._module(part):
            turned = self.ckpt.read_module(part.module, columns).dequantize().T
        else:
            matrix = 0 if part.matrix is None else part.matrix
            rows = (matrix, matrix + 1) if part.matrix is not None else (int(columns.min()), int(columns.max()) + 1)
            stored = self.ckpt.read_float(part.source, rows)
            turned = (stored[0][columns] if part.matrix is not None else stored[columns - rows[0]]).T
        turned = turned if part.rows is None else turned[part.rows]
        return self._cropped(turned, Part(part.source, part.shape))

    def _elementwise(self, x: np.ndarray, part: Part) -> np.ndarray:
        """The change of a part's values; BridgeError where one overflows."""
        assert part.change is not None
        with np.errstate(over="ignore"):
            changed = _ELEMENTWISE[part.change](x)
        if not np.isfinite(changed).all():
            _, file = self._stored(part)
            raise BridgeError(
                f"{file}: {part.source} holds {x.max():.4g}, whose {part.change} is beyond float32; take another copy "
                "of the checkpoint"
            )
        return changed

    def _cropped(self, x: np.ndarray, part: Part, start: int = 0) -> np.ndarray:
        """Finite rows of a float part from `start` on, without zero padding beyond the model's true shape."""
        rows, *columns = part.stored or part.shape
        inner = tuple(slice(size) for size in (max(0, rows - start), *columns))
        cropped = np.ascontiguousarray(x[inner])
        if cropped.shape != x.shape and np.count_nonzero(x) > np.count_nonzero(cropped):
            raise self._other_shape(part)
        if part.change != "scalar" and not np.isfinite(cropped).all():
            _, file = self._stored(part)
            raise not_finite(file, part.source)
        return cropped

    def _stored(self, part: Part) -> tuple[tuple[int, ...], Path]:
        """Shape in the checkpoint, and the file. A vector may be stored as a matrix of one row."""
        shape: tuple[int, ...]
        if self._module(part):
            shape, file = self.ckpt.modules[part.module].shape, self.ckpt.modules[part.module].file
        else:
            plain = self.ckpt.tensors[part.source]
            shape, file = plain.shape if part.matrix is None else plain.shape[1:], plain.file
        if part.change is not None:
            return shape if part.change == "conv1d" and self._module(part) else changed_shape(part.change, shape), file
        return shape[1:] if len(part.shape) == 1 and shape[:1] == (1,) and len(shape) == 2 else shape, file

    def _other_shape(self, part: Part) -> BridgeError:
        shape, file = self._stored(part)
        expected = list(part.stored or part.shape)
        why = self._change(shape, expected) or "config.json, the template or the plan does not describe these weights"
        return BridgeError(f"{file}: {part.source} has shape {list(shape)}, not {expected}; {why}")

    def _change(self, shape: Sequence[int], expected: Sequence[int]) -> str:
        """Which numbers of config.json a part's shape contradicts; "" where none is known."""
        hints = []
        for stored, wanted in zip(shape, expected, strict=False):
            names = sizes_of(self.ckpt.config, wanted) if stored != wanted else []
            if len(names) == 1:
                hints.append(f"config.json says {names[0]}; if the weights are right, it must be {stored}")
            elif names:
                hints.append(f"{wanted} in config.json is {' or '.join(names)}; the weights have {stored}")
        return ". ".join(hints)
