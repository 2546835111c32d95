"""`gguf-bridge inspect`: what a checkpoint or a GGUF holds, and what `convert` would make of it.

A checkpoint's label is set beside what its tensors say; the prediction of types maps a sample of rows of
the first and the last tensor of each kind, with the mapping that `convert` itself uses.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.convert import Conversion, model_of
from bridge.errors import BridgeError
from bridge.hub import resolve
from bridge.models import ModelSpec, TensorSpec
from bridge.recipe import Recipe
from bridge.report import align, size_text
from bridge.verify import read_gguf, shards

_SAMPLE_ROWS = 64


def describe(path: str | Path) -> str:
    """A few lines about a checkpoint folder, a Hub id or a GGUF file. Raises BridgeError."""
    if Path(path).is_file():
        return _describe_gguf(Path(path))
    with open_checkpoint(resolve(path)) as ckpt:
        return "\n".join(_describe_checkpoint(ckpt))


def _describe_checkpoint(ckpt: Checkpoint) -> list[str]:
    quant = ckpt.quant
    label = [f"{quant.method or 'none'}"]
    for name, value in (
        ("bits", quant.bits),
        ("group size", quant.group_size),
        ("sym", quant.sym),
        ("desc_act", quant.desc_act),
        ("checkpoint_format", quant.checkpoint_format),
        ("version", quant.version),
    ):
        if value not in (None, ""):
            label.append(f"{name} {value}")
    lines = [
        f"{ckpt.path}: {size_text(ckpt.nbytes)} in {len(ckpt.files)} file{'s' * (len(ckpt.files) != 1)}",
        f"the label says  {', '.join(label)}",
        f"the data says   {ckpt.format}, {_data_says(ckpt)}",
    ]
    try:
        spec = model_of(ckpt)
    except BridgeError as problem:
        return [*lines, *ckpt.notes, f"convert would stop: {problem}"]
    table, notes = _prediction(ckpt, spec)
    return [*lines, f"architecture    {spec.arch}, {spec.n_layers} layers", *ckpt.notes, *notes, "", *table]


def _data_says(ckpt: Checkpoint) -> str:
    if not ckpt.modules:
        return "no quantized module"
    bits = Counter(m.bits for m in ckpt.modules.values())
    sizes = Counter(m.group_size for m in ckpt.modules.values())
    scattered = sum(ckpt.group_order(name) is not None for name in ckpt.modules)
    parts = [
        "bits " + ", ".join(f"{b} ({n} modules)" for b, n in sorted(bits.items())),
        "group size " + ", ".join(str(s) for s in sorted(sizes)),
        f"act-order in {scattered} modules" if scattered else "no act-order",
        f"{len(ckpt.tensors)} float tensors",
    ]
    return ", ".join(parts)


def _prediction(ckpt: Checkpoint, spec: ModelSpec) -> tuple[list[str], list[str]]:
    """The table of kinds and types, and the readers' notes on the modules that were looked at."""
    work = Conversion(ckpt, spec, Recipe())
    kinds: dict[str, list[TensorSpec]] = {}
    for tensor in spec.tensors:
        if len(tensor.shape) == 2:
            kinds.setdefault(tensor.kind, []).append(tensor)
    rows: list[tuple[str, ...]] = [("tensors", "", "shape", "arrives as", "zero points", "convert makes it", "")]
    notes: list[str] = []
    for kind, members in kinds.items():
        ends = members if len(members) < 2 else [members[0], members[-1]]
        seen = [_one(work, tensor, notes) for tensor in ends]
        rows.append((kind, str(len(members)), *(" / ".join(dict.fromkeys(cell)) for cell in zip(*seen, strict=True))))
    return align(rows, left=(True, False, True, True, True, True, True)), notes


def _one(work: Conversion, tensor: TensorSpec, notes: list[str]) -> tuple[str, str, str, str, str]:
    shape = "x".join(map(str, tensor.shape))
    module = str(tensor.source).removesuffix(".weight")
    if module not in work.ckpt.modules:
        dtype = work.ckpt.tensors[str(tensor.source)].dtype
        wanted = work.recipe.wanted(work.place(tensor), as_codes=False)
        return shape, dtype, "", str(wanted.type), ""
    from bridge.mapping import choose

    t = work.grouped(tensor, module)
    notes += [note for note in t.notes if note not in notes]
    arrives = f"{t.bits} bits, " + (f"groups of {t.group_size}" if t.sequential else "act-order")
    low, high = t.zeros.min(), t.zeros.max()
    zeros = f"{low:g}" + ("" if low == high else f"..{high:g}")
    step = max(1, t.shape[0] // _SAMPLE_ROWS)
    mapped = choose.map_auto(t.take_rows(np.arange(0, t.shape[0], step)))
    how = "codes carried" if mapped.fidelity.kept else "rounded anew"
    return shape, arrives, zeros, mapped.block.name, how


def _describe_gguf(path: Path) -> str:
    files = shards(path)
    readers = [read_gguf(file) for file in files]
    keys = readers[0].fields

    def value(key: str) -> Any:
        return keys[key].contents() if key in keys else None

    arch = value("general.architecture")
    tensors = [t for reader in readers for t in reader.tensors]
    weights = sum(int(np.prod(t.shape)) for t in tensors)
    nbytes = sum(int(t.n_bytes) for t in tensors)
    lines = [
        f"{path}: {size_text(sum(f.stat().st_size for f in files))} in {len(files)} file{'s' * (len(files) != 1)}",
        f"name            {value('general.name')}",
        f"architecture    {arch}, {value(f'{arch}.block_count')} layers, context {value(f'{arch}.context_length')}",
        f"tokenizer       {value('tokenizer.ggml.model')}, pre {value('tokenizer.ggml.pre')}, "
        f"{len(value('tokenizer.ggml.tokens') or ())} tokens",
        f"weights         {weights / 1e6:.1f} M in {len(tensors)} tensors, {8 * nbytes / max(weights, 1):.2f} bpw",
        "",
    ]
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights (M)", "bytes (MB)", "bpw")]
    types: dict[str, list[Any]] = {}
    for t in tensors:
        types.setdefault(t.tensor_type.name, []).append(t)
    for name, members in sorted(types.items(), key=lambda item: -sum(int(t.n_bytes) for t in item[1])):
        count = sum(int(np.prod(t.shape)) for t in members)
        size = sum(int(t.n_bytes) for t in members)
        rows.append((name, str(len(members)), f"{count / 1e6:.2f}", f"{size / 1e6:.2f}", f"{8 * size / count:.2f}"))
    return "\n".join(lines + align(rows, left=(True, False, False, False, False)))
