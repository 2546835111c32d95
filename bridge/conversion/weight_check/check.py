"""Looks for damage in a model's weights: reads all of them, a few at a time, and reports what no quantizer makes.

`rows` judges the rows of matrices, `codes` the codes of modules, `stored` the stored scales and copies, `layers` a
tensor beside those of other layers, `vocabulary` the rows of tokens. Each says what is usual, and is not reported.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.read import READ
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.dtypes import NUMPY
from bridge.checkpoint.files.hub import kind_of, resolve_model
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.module_reader import scales_activations
from bridge.checkpoint.grouped import GroupedTensor
from bridge.conversion.weight_check.codes import (
    LEVELS_OF_TRAINED,
    PAGE,
    code_findings,
    count_codes,
    lost_blocks,
    rows_of_codes,
)
from bridge.conversion.weight_check.finding import KINDS, Finding
from bridge.conversion.weight_check.layers import Magnitude, layer_findings
from bridge.conversion.weight_check.rows import NARROW, RowCounts, row_findings
from bridge.conversion.weight_check.stored import (
    Matrix,
    activation_findings,
    copies,
    matrices,
    scale_findings,
    stored_matrices,
    zero_scales,
)
from bridge.conversion.weight_check.vocabulary import Tokens, tokens_of
from bridge.errors import BridgeError, shortened
from bridge.gguf_file.reader import StoredModel, StoredTensor, read_gguf
from bridge.runtime.cpu.engines import dequantize
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.row_threads import chunks, thread_limit
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.text import note_lines, percent

_IN_FLIGHT = 1 << 28  # bytes of stored tensors that are read at a time; one may be larger
_STACK = re.compile(r"expert|_exps\b")
_NO_MATRIX = re.compile(r"(^|_)(bias|scales?|mask)$|norm")  # in the last part of a name
_INTEGERS = ("I8", "I16", "I32", "I64")


@dataclass(frozen=True)
class WeightCheck:
    """The result of `check_weights`.

    findings  what looks damaged, by kind and in the order of the file; empty if nothing does
    notes     what is unusual and is no damage
    tensors   number of tensors and modules that were read
    weights   number of weights in them
    """

    findings: list[Finding]
    notes: list[str]
    tensors: int
    weights: int

    def as_dict(self) -> dict[str, Any]:
        """All fields, and "passed", for JSON."""
        findings = [finding.as_dict() for finding in self.findings]
        counted = {"weights_read": self.weights, "weight_notes": self.notes}
        return {"passed": not findings, "findings": findings, **counted}

    def lines(self) -> list[str]:
        """The lines that the command prints: what was read, the findings, and the notes."""
        count = len(self.findings)
        verdict = f"{count} finding{'s' * (count != 1)}" if count else "nothing found"
        read = f"weight check    {self.weights / 1e6:.1f} M weights in {self.tensors} tensors and modules: {verdict}"
        return [read, *(shortened(f"FOUND {finding}") for finding in self.findings), *note_lines(self.notes)]


@dataclass
class _Result:
    """What is known of one tensor when it was read."""

    weights: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    magnitude: Magnitude | None = None
    pruned: float | None = None  # the share of zeros
    coded: bool = False


@dataclass(frozen=True)
class _Task:
    """A tensor or module to read: its bytes in the file, and what reads it."""

    name: str
    nbytes: int
    read: Callable[[], _Result]


@checked
def check_weights(
    path: str | Path, *, config: str | Path | None = None, progress: Progress | None = None
) -> WeightCheck:
    """Read all weights of a checkpoint or a GGUF, and list what looks damaged.

    path      a folder in Hugging Face layout, a Hub id, a .pt or a GGUF
    config    the folder with config.json and tokenizer, where `path` has none
    progress  called with the bytes that were read, with all bytes, and with the tensor's name

    The check finds NaN, zeros, rows of one value, experts of zeros, scales that are 0, NaN or beyond half precision,
    missing scales of activations, codes that no quantizer makes, copies of other matrices, and tokens without a row.
    It does not report what sound models have too, such as norms of ones, padding and tied embeddings.

    Returns a `bridge.conversion.weight_check.check.WeightCheck`. Raises BridgeError where the file cannot be opened; a
    tensor that cannot be read is a finding.
    """
    home = resolve_model(path, config)
    if kind_of(home, config) == "gguf":
        model = read_gguf(home, rotated=True)
        return _checked(_gguf_tasks(model), lambda: copies(_gguf_matrices(model)), [], progress)
    with open_checkpoint(home, config, needs_config=False) as ckpt:
        tasks, notes = _checkpoint_tasks(ckpt)
        return _checked(tasks, lambda: activation_findings(ckpt) + copies(stored_matrices(ckpt)), notes, progress)


def _checked(
    tasks: list[_Task], compare: Callable[[], list[Finding]], notes: list[str], progress: Progress | None
) -> WeightCheck:
    total = sum(task.nbytes for task in tasks)
    read = 0
    results: list[_Result] = []
    if progress:
        progress(0, total, "")
    for task, result in _in_order(tasks):
        results.append(result)
        read += task.nbytes
        if progress:
            progress(read, total, task.name)
    findings = [finding for result in results for finding in result.findings]
    coded = sum(result.coded for result in results)
    if sum(finding.kind == "levels" for finding in findings) > coded / 2:  # the model has such weights
        findings = [finding for finding in findings if finding.kind != "levels"]
    findings += layer_findings([result.magnitude for result in results if result.magnitude])
    findings += compare()
    notes = [*notes, *(note for result in results for note in result.notes), *_pruned_note(results)]
    order = list(KINDS)
    findings.sort(key=lambda finding: order.index(finding.kind))
    return WeightCheck(findings, notes, len(tasks), sum(result.weights for result in results))


def _in_order(tasks: list[_Task]) -> Iterator[tuple[_Task, _Result]]:
    """Results of tasks that threads read, a few ahead of the caller."""
    workers = usable_cpus()
    pending: deque[tuple[_Task, Future[_Result]]] = deque()
    with thread_limit(), ThreadPoolExecutor(workers, thread_name_prefix="check") as pool:
        try:
            for task in tasks:
                while pending and (
                    len(pending) > workers or sum(t.nbytes for t, _ in pending) + task.nbytes > _IN_FLIGHT
                ):
                    first, future = pending.popleft()
                    yield first, future.result()
                pending.append((task, pool.submit(_guarded, task)))
            for first, future in pending:
                yield first, future.result()
        finally:
            for _, future in pending:
                future.cancel()


def _guarded(task: _Task) -> _Result:
    """The task's result; a tensor that its reader refuses is a finding."""
    try:
        return task.read()
    except BridgeError as problem:
        return _Result(findings=[Finding(task.name, "unreadable", str(problem), {})])


def _pruned_note(results: list[_Result]) -> list[str]:
    shares = [result.pruned for result in results if result.pruned is not None]
    if not shares:
        return []
    between = percent(min(shares)) if len(shares) == 1 else f"{percent(min(shares))} to {percent(max(shares))}"
    are = "matrix is" if len(shares) == 1 else "matrices are"
    return [f"{len(shares)} {are} pruned: {between} of the weights are 0"]


# checkpoints


def _checkpoint_tasks(ckpt: Checkpoint) -> tuple[list[_Task], list[str]]:
    tokens, why = tokens_of(ckpt)
    notes = [] if tokens else [f"rows of tokens are not compared with the tokenizer: {why}"]
    tasks = [_Task(name, module.nbytes, partial(_module, ckpt, name, tokens)) for name, module in ckpt.modules.items()]
    for name, stored in ckpt.tensors.items():
        if stored.dtype not in NUMPY:
            notes.append(f"{name}: {stored.dtype} is not read")
        elif stored.floating and stored.size:
            tasks.append(_Task(name, stored.nbytes, partial(_floats, ckpt, name, tokens)))
    return tasks, notes


def _module(ckpt: Checkpoint, name: str, tokens: Tokens | None) -> _Result:
    """A module of codes."""
    described = ckpt.modules[name]
    stored = max(described.tensors.values(), key=lambda tensor: tensor.nbytes)
    others = [
        tensor for part, tensor in described.tensors.items()
        if tensor is not stored and part != "bias" and not scales_activations(tensor.name)
    ]  # fmt: skip
    damaged = scale_findings(ckpt, name, others)
    if damaged:
        return _Result(math.prod(described.shape), damaged)
    pages = _zero_pages(ckpt.store.read(stored.name)) if stored.dtype in NUMPY else 0
    t = ckpt.read_module(name)
    result = _Result(math.prod(t.shape), coded=True)
    if isinstance(t, GroupedTensor):
        counts = count_codes(t)
        rows = rows_of_codes(t, counts)
        result.findings += code_findings(name, t, counts, pages, stored.nbytes)
        spread = np.abs(t.scales, dtype=np.float64) * (counts.high.astype(np.float64) - counts.low)
        form, size = f"{t.bits} bits, {t.group_size}", float(spread.mean())
    else:
        rows = RowCounts(1, *t.shape)
        for span in chunks(*t.shape):
            rows.add(t.dequantize(span))
        if t.bits < LEVELS_OF_TRAINED:
            rows.zeros = 0  # not pruned
        if isinstance(t, Fp4Tensor):
            result.findings += lost_blocks(name, t)
        form, size = type(t).__name__, rows.rms
    result.magnitude = Magnitude(name, form, size, True)
    if any("code" in finding.numbers for finding in result.findings):
        rows.constant[:] = False  # said of all codes
    _judge(result, name, rows, True, tokens)
    result.pruned = None  # small weights have codes of 0, too
    return result


def _zero_pages(stored: np.ndarray) -> int:
    """The pages of zero bytes among stored codes."""
    flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    words = flat[: len(flat) // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
    return int(np.count_nonzero(~words.any(axis=1)))


def _floats(ckpt: Checkpoint, name: str, tokens: Tokens | None) -> _Result:
    """A tensor of floats, 8-bit ones with their scales."""
    stored = ckpt.tensors[name]
    result = _Result(stored.size)
    scaled = ckpt.float_scale(name)
    if scaled is not None:
        result.findings += scale_findings(ckpt, name, [scaled])
        if result.findings:
            return result
        result.findings += zero_scales(ckpt, name, scaled)
    shape = stored.shape or (1,)
    rows = _counts(name, shape)
    for span in chunks(shape[0], math.prod(shape[1:])):
        values = ckpt.read_float(name, (span.start, span.stop) if stored.shape else None)
        rows.add(np.ascontiguousarray(values).reshape(-1, rows.columns))
    is_matrix = _is_matrix(name, shape)
    if not rows.not_finite:
        result.magnitude = Magnitude(name, stored.dtype, rows.rms, is_matrix)
    _judge(result, name, rows, is_matrix, tokens)
    if stored.dtype in FLOAT8:
        result.pruned = None
    return result


def _counts(name: str, shape: tuple[int, ...]) -> RowCounts:
    """Empty counts of a tensor: of experts in a stack, of the matrices; of convolutions, of what a feature reads."""
    if len(shape) == 1:
        return RowCounts(1, 1, shape[0])
    if len(shape) == 3 and _STACK.search(name):
        return RowCounts(*shape)
    return RowCounts(1, shape[0], math.prod(shape[1:]))


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the rows of a tensor are those of a linear layer, a table or a convolution."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    named = name.endswith(".weight") or bool(_STACK.search(name))
    return named and len(shape) > 1 and math.prod(shape[1:]) >= NARROW and not _NO_MATRIX.search(last)


def _judge(result: _Result, name: str, rows: RowCounts, is_matrix: bool, tokens: Tokens | None) -> None:
    """Add what the rows of a tensor tell."""
    has_tokens = tokens is not None and is_matrix and tokens.judges(name, rows.rows)
    if tokens is not None and has_tokens and not rows.zero.all():
        findings, notes = tokens.findings(name, rows)
        result.findings += findings
        result.notes += notes
        rows.zero[:] = False  # judged
    result.findings += row_findings(name, rows, is_matrix, "experts" if _STACK.search(name) else "matrices")
    if is_matrix and rows.pruned and not rows.zero.all():
        result.pruned = rows.zeros / rows.size


# GGUFs


def _gguf_tasks(model: StoredModel) -> list[_Task]:
    tokens, _ = tokens_of(model)
    return [
        _Task(tensor.name, tensor.raw.size, partial(_gguf_tensor, tensor, tokens))
        for tensor in model.tensors.values()
        if tensor.raw.size
    ]


def _gguf_tensor(tensor: StoredTensor, tokens: Tokens | None) -> _Result:
    weights = math.prod(tensor.shape)
    if tensor.type not in (*READ, *FLOAT_TYPES, "F64"):
        return _Result(notes=[] if tensor.type in _INTEGERS else [f"{tensor.name}: {tensor.type} is not read"])
    result = _Result(weights)
    rows = _counts(tensor.name, tensor.shape)
    lines = weights // tensor.shape[-1]
    nbytes = tensor.raw.size // lines
    for span in chunks(lines, tensor.shape[-1]):
        raw = tensor.read(span.start * nbytes, span.stop * nbytes).reshape(-1, nbytes)
        values = dequantize.rows(tensor.type, raw)
        rows.add(values.reshape(-1, rows.columns))
    is_matrix = _is_matrix(tensor.name, tensor.shape)
    if tensor.name.endswith((".scale", ".input_scale")) and rows.zeros:
        text = f"{rows.zeros} of {rows.size} scales are 0, and so is what they multiply"
        result.findings.append(Finding(tensor.name, "scales", text, {"zero": rows.zeros, "of": rows.size}))
    if not rows.not_finite:
        result.magnitude = Magnitude(tensor.name, tensor.type, rows.rms, is_matrix)
    _judge(result, tensor.name, rows, is_matrix, tokens)
    if tensor.type not in (*FLOAT_TYPES, "F64"):
        result.pruned = None
    return result


def _gguf_matrices(model: StoredModel) -> Iterator[Matrix]:
    for tensor in model.tensors.values():
        yield from matrices(tensor.name, tensor.type, tensor.shape, tensor.raw.size, partial(_bytes, tensor.raw))


def _bytes(raw: np.ndarray, first: int, stop: int) -> np.ndarray:
    return raw[first:stop]
