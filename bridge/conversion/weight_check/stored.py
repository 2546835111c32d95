"""What the stored scales of a checkpoint hold, before a reader refuses them, and which matrices are copies.

Scales of activations: 0, NaN or infinity makes the inputs so, as of experts that no calibration text reached. One that
only some of the modules of a kind have is missing in the others: programs then compute with whatever their memory held.
Modules are of a kind if their names differ in numbers alone and they have the same other tensors; nothing is missing
where fewer than half of a kind have one.

Copies: matrices with the same bytes. Compared are the largest tensor of a module and floats of two dimensions and more,
each matrix of a stack by itself; not vectors, what is eight bytes repeated, or what models copy on purpose: embeddings,
heads, tables of positions. A merge that repeats layers has such copies too, and they are told.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.dtypes import NUMPY
from bridge.checkpoint.files.store import TensorInfo
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.module_reader import scales_activations
from bridge.conversion.weight_check.finding import Finding, are, first_of, kind_of_name, share
from bridge.conversion.weight_check.rows import is_table

_SMALLEST = 4096  # bytes of a matrix that is compared
_SAMPLE = 256  # bytes in each of three places
_STEP = 1 << 24  # bytes that are read at a time
_COPIED = re.compile(r"head|tied|rope|rotary|freq|mask|(^|\.)output\.weight$")
_ZERO_POINTS = re.compile(r"zero|zp|offset")
_MANY = 1 << 16  # scales of activations; more are none


def scale_findings(ckpt: Checkpoint, name: str, tensors: list[TensorInfo]) -> list[Finding]:
    """Floats of a module that are NaN or infinite, beside codes: scales, zero points, products of both."""
    texts, total = [], 0
    for stored in tensors:
        if not stored.floating or stored.dtype in FLOAT8 or stored.dtype not in NUMPY:
            continue
        finite = np.isfinite(ckpt.store.read_float(stored.name))
        if count := int(np.count_nonzero(~finite)):
            total += count
            texts.append(f"{share(count, finite.size)} values of {stored.name} {are(count)} NaN or infinite")
    return [Finding(name, "scales", "; ".join(texts), {"not_finite": total})] if texts else []


def zero_scales(ckpt: Checkpoint, name: str, scale: TensorInfo) -> list[Finding]:
    """Scales of 8-bit floats that are 0: quantizers give blocks of zeros another."""
    if not scale.floating:
        return []
    zero = ckpt.store.read_float(scale.name) == 0
    if not zero.any():
        return []
    count = int(zero.sum())
    text = f"{share(count, zero.size)} scales {are(count)} 0, and so is what they multiply"
    return [Finding(name, "scales", text, {"zero": count, "of": zero.size})]


def activation_findings(ckpt: Checkpoint) -> list[Finding]:
    """What is wrong with the scales of activations."""
    if ckpt.reader is None:  # what has such a name was learned
        return []
    findings = []
    parts: dict[str, set[str]] = {}  # of each module: those tensors
    for name, stored in ckpt.store.tensors.items():
        module, _, part = name.rpartition(".")
        if not (scales_activations(name) and stored.floating and stored.dtype in NUMPY and stored.size <= _MANY):
            continue
        parts.setdefault(module, set()).add(part)
        values = ckpt.store.read_float(name).reshape(-1)
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any() and not _ZERO_POINTS.search(part):
            count, value = int(bad.sum()), f"{values[first_of(bad)]:g}"
            some = f"{count} of {bad.size} values are not positive, the first is {value}"
            what = f"is {value}" if bad.size == 1 else some
            text = f"{what}: no scale of activations, as of an expert that calibration never reached"
            findings.append(Finding(name, "activations", text, {"count": count, "of": bad.size}))
    return findings + _missing(ckpt, parts)


def _missing(ckpt: Checkpoint, parts: dict[str, set[str]]) -> list[Finding]:
    kinds: dict[tuple[str, frozenset[str]], list[str]] = {}
    for module, described in ckpt.modules.items():
        other = frozenset(p for p, i in described.tensors.items() if not scales_activations(i.name))
        kinds.setdefault((kind_of_name(module), other), []).append(module)
    for name in ckpt.tensors:
        if ckpt.tensors[name].dtype in FLOAT8:
            module = name.removesuffix(".weight")
            kinds.setdefault((kind_of_name(module), frozenset()), []).append(module)
    findings = []
    for members in kinds.values():
        for part in sorted(set().union(*(parts.get(module, ()) for module in members))):
            lacking = [module for module in members if part not in parts.get(module, ())]
            if lacking and 2 * len(lacking) <= len(members):
                lack = "lacks" if len(lacking) == 1 else "lack"
                text = f"{len(lacking)} of {len(members)} modules {lack} {part}, which the others of the kind have"
                numbers = {"count": len(lacking), "of": len(members), "part": part}
                findings.append(Finding(lacking[0], "activations", text, numbers))
    return findings


@dataclass(frozen=True)
class Matrix:
    """The bytes of a matrix.

    name    of its tensor
    index   in a stack; None: the tensor is the matrix
    form    what it must share with a copy: dtype and shape
    stored  uint8: bytes first..stop of the tensor
    """

    name: str
    index: int | None
    form: tuple[object, ...]
    nbytes: int
    stored: Callable[[int, int], np.ndarray]

    def read(self, first: int, stop: int) -> bytes:
        """Bytes first..stop of the matrix."""
        start = (self.index or 0) * self.nbytes
        return self.stored(start + first, start + stop).tobytes()

    @property
    def text(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"


def stored_matrices(ckpt: Checkpoint) -> Iterator[Matrix]:
    """The matrices of a checkpoint that are compared."""
    stored = [max(module.tensors.values(), key=lambda tensor: tensor.nbytes) for module in ckpt.modules.values()]
    names = dict.fromkeys([*(tensor.name for tensor in stored), *ckpt.tensors])
    for name in names:
        tensor = ckpt.store.tensors.get(name)
        if tensor is not None and tensor.dtype in NUMPY:
            yield from matrices(name, tensor.dtype, tensor.shape, tensor.nbytes, partial(ckpt.store.read_bytes, name))


def matrices(
    name: str, type: str, shape: tuple[int, ...], nbytes: int, read: Callable[[int, int], np.ndarray]
) -> Iterator[Matrix]:
    """The matrices of a stored tensor that are compared; `read` gives its bytes."""
    if len(shape) < 2 or is_table(name) or _COPIED.search(name):
        return
    count = shape[0] if len(shape) == 3 else 1
    size = nbytes // max(count, 1)
    if size < _SMALLEST:
        return
    for i in range(count):
        yield Matrix(name, None if count == 1 else i, (type, shape[1:] if count > 1 else shape), size, read)


def copies(all_matrices: Iterator[Matrix]) -> list[Finding]:
    """A finding for each tensor that is a copy of an earlier one, or has matrices that are copies."""
    alike: dict[tuple[object, ...], list[Matrix]] = {}
    for matrix in all_matrices:
        middle, last = matrix.nbytes // 2, matrix.nbytes - _SAMPLE
        sample = b"".join(matrix.read(first, first + _SAMPLE) for first in (0, middle, last))
        if sample != sample[:8] * (len(sample) // 8):
            alike.setdefault((*matrix.form, sample), []).append(matrix)
    pairs: dict[str, list[tuple[Matrix, Matrix]]] = {}
    for candidates in alike.values():
        originals: dict[bytes, Matrix] = {}
        for matrix in candidates if len(candidates) > 1 else ():
            original = originals.setdefault(_digest(matrix), matrix)
            if original is not matrix:
                pairs.setdefault(matrix.name, []).append((matrix, original))
    findings = []
    for name, copied in pairs.items():
        matrix, original = copied[0]
        text = f"has the same bytes as {original.text}"
        if matrix.index is not None:
            text = f"matrix {matrix.index} has the same bytes as {original.text}"
            text += f", and {len(copied) - 1} more are copies" if len(copied) > 1 else ""
        findings.append(Finding(name, "duplicate", text, {"count": len(copied), "original": original.text}))
    return findings


def _digest(matrix: Matrix) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for first in range(0, matrix.nbytes, _STEP):
        digest.update(matrix.read(first, min(first + _STEP, matrix.nbytes)))
    return digest.digest()
