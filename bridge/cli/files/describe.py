"""The description of a checkpoint or a GGUF that `gguf-bridge inspect` prints, and the table of a plan.

A checkpoint's label is compared with its tensors, and the plan that `convert` would execute is summarised.
"""

import math
from collections import Counter
from pathlib import Path

import gguf

from bridge.checkpoint import Checkpoint, GroupedTensor, lattice_notes
from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.files.hub import kind_of, open_by_name
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.fp8 import FLOAT8
from bridge.checkpoint.formats.module_reader import counted
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.options import PlanOptions
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.conversion.writing.gguf_writer import shards_of
from bridge.errors import BridgeError, parameter, shortened
from bridge.gguf_file.header import rotation_keys
from bridge.gguf_file.reader import StoredModel, read_gguf
from bridge.models.outline import number
from bridge.system.progress import Progress
from bridge.system.storage.files import refuse_pointer
from bridge.system.text import align, note_lines, size_text


def describe(
    path: str | Path,
    config: str | Path | None = None,
    template: str | Path | None = None,
    progress: Progress | None = None,
) -> str:
    """A few lines about a checkpoint folder, a Hub id, a .pt or a GGUF file; `config`, `template` as for `convert`.

    progress  called with the tensors of floats that were searched for codes, of how many, and the last one's name

    Raises BridgeError.
    """
    kind = kind_of(path, config)
    if kind == "part":
        refuse_pointer(Path(path))
        raise BridgeError(f"{path}: is one file of a checkpoint; give the folder that it is in")
    if kind == "gguf":
        for name, value in (("config", config), ("template", template)):
            if value is not None:
                raise BridgeError(f"{path}: is a GGUF; {parameter(name)} is for checkpoints")
        return "\n".join(map(shortened, _describe_gguf(Path(path))))
    with open_by_name(path, config, needs_config=template is None) as ckpt:
        return "\n".join(map(shortened, _describe_checkpoint(ckpt, template, progress)))


def _describe_checkpoint(ckpt: Checkpoint, template: str | Path | None, progress: Progress | None) -> list[str]:
    scattered = sum(ckpt.group_order(name) is not None for name in ckpt.modules)
    lines = [
        f"{ckpt.path}: {size_text(ckpt.nbytes)} in {len(ckpt.files)} file{'s' * (len(ckpt.files) != 1)}",
        f"the label says  {ckpt.quant.describe()}",
        f"the data says   {_data_says(ckpt, scattered)}",
    ]
    from bridge.conversion.planning.planner import make_plan  # loads Numba

    try:
        plan = make_plan(ckpt, PlanOptions(template=template), Importance({}))
        table, notes = _table(ckpt, plan)
    except BridgeError as problem:
        return [*lines, *note_lines(ckpt.notes), f"convert would stop: {problem}"]
    contrary = note_lines([*_claims(ckpt, plan, scattered), *notes], "they differ     ")
    lines += contrary
    if ckpt.modules and ckpt.quant.labelled and not contrary:
        lines.append("they agree      in all that was looked at")
    whose = f", as {template} has them" if template is not None else ""
    lines.append(f"architecture    {plan.arch}, {number(plan.metadata, 'block_count')} layers{whose}")
    grids = {} if ckpt.modules else ckpt.find_lattices(progress)
    hidden = lattice_notes(grids, "--detect-lattice carries their codes")
    lines += [*note_lines(plan.notes), *(f"note: {note}" for note in hidden)]
    return [*lines, "", *table]


def _data_says(ckpt: Checkpoint, scattered: int) -> str:
    floats = f"{len(ckpt.tensors)} float tensor{'s' * (len(ckpt.tensors) != 1)}"
    if small := [ckpt.stored_as(name) for name, info in ckpt.tensors.items() if info.dtype in FLOAT8]:
        floats += f", {len(small)} of 8-bit floats ({counted(small)})"
    if not ckpt.modules:
        return f"no quantized module, {floats}"
    return ", ".join([
        f"{len(ckpt.modules)} quantized module{'s' * (len(ckpt.modules) != 1)}",
        ckpt.settings(),
        f"act-order in {scattered}" if scattered else "no act-order",
        floats,
    ])  # fmt: skip


def _claims(ckpt: Checkpoint, plan: Plan, scattered: int) -> list[str]:
    """Where the label is wrong about bits, act-order, or what is quantized; readers note the rest."""
    if not ckpt.quant.labelled or ckpt.reader is None:
        return []
    wrong = ckpt.reader.disagreements()
    if ckpt.quant.desc_act and not scattered:
        wrong.append("the label says act-order, but all groups are consecutive")
    if scattered and not ckpt.quant.desc_act:
        wrong.append(f"the label says no act-order, but {scattered} modules have it")
    for part in (part for tensor in plan.tensors if tensor.quantizable for part in tensor.parts):
        floats = part.source in ckpt.tensors and part.source not in ckpt.reader.floats
        if floats and ckpt.reader.claimed(part.module):
            stored = ckpt.stored_as(part.source)
            wrong.append(f"{part.module}: labelled as quantized, but stored as {stored}")
    return wrong


def _table(ckpt: Checkpoint, plan: Plan) -> tuple[list[str], list[str]]:
    """A row per kind of tensor, with what its first and its last are; and the readers' notes on those."""
    reader = PartReader(ckpt)
    kinds: dict[str, list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        if len(tensor.shape) > 1:
            kinds.setdefault(tensor.kind, []).append(tensor)
    rows: list[tuple[str, ...]] = [("tensors", "", "shape", "arrives as", "zero points", "convert makes it", "")]
    notes: list[str] = []
    for kind, members in kinds.items():
        ends = [_arrival(reader, tensor, notes) for tensor in dict.fromkeys((members[0], members[-1]))]
        cells = [list(cell) for cell in zip(*ends, strict=True)]
        coded = [t for t in members if any(reader.coded(part) for part in t.parts) and t.quantizable]
        cells += [[t.type for t in members], [t.reason for t in coded]]
        rows.append((kind, str(len(members)), *(" / ".join(dict.fromkeys(cell)) for cell in cells)))
    return align(rows, left=(True, False, True, True, True, True, True)), notes


def _arrival(reader: PartReader, tensor: PlannedTensor, notes: list[str]) -> tuple[str, str, str]:
    """Shape, form and zero points of a tensor in the checkpoint."""
    shape = "x".join(map(str, tensor.shape))
    if not tensor.parts:
        return shape, "taken from the template" if tensor.origin == "template" else tensor.reason, ""
    part = next((part for part in tensor.parts if reader.coded(part)), tensor.parts[0])  # of experts, the first
    if not reader.coded(part):
        return shape, reader.stored_as(part), ""
    t = reader.sample(part)
    notes += t.notes
    if isinstance(t, DecodedTensor):
        return shape, f"{t.bits} bits, {t.coding}", ""
    groups = f"groups of {t.group_size}" if t.sequential else "act-order"
    if part.columns is not None:
        groups = f"act-order that folds into {groups}"
    if isinstance(t, Fp4Tensor):
        return shape, f"{t.kind}, {groups}", ""
    assert isinstance(t, GroupedTensor)
    low, high = t.zeros.min(), t.zeros.max()
    zeros = f"{low:g}" + ("" if low == high else f"..{high:g}")
    if t.ternary:
        return shape, "-1, 0, 1", ""
    return shape, f"{t.bits} bits, {groups}", zeros


def plan_table(plan: Plan) -> list[str]:
    """A plan for people: a row per kind of tensor, type and reason."""
    rows: list[tuple[str, ...]] = [("tensors", "", "shape", "type", "bpw", "why")]
    groups: dict[tuple[str, str, str], list[PlannedTensor]] = {}
    for t in plan.tensors:
        kind = t.kind if len(t.shape) > 1 else "norms, biases and other vectors"
        reason = f"{t.reason}, calibrated" if "calibrated" in t.how else t.reason
        groups.setdefault((kind, t.type, reason), []).append(t)
    for (kind, type_, reason), members in groups.items():
        shapes = dict.fromkeys("x".join(map(str, t.shape)) for t in members)
        size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
        shape = " / ".join(shapes) if len(shapes) < 3 else "various"
        rows.append((kind, str(len(members)), shape, type_, f"{8 * nbytes / size:.2f}", reason))
    lines = align(rows, left=(True, False, True, True, False, True))
    weights = sum(math.prod(t.shape) for t in plan.tensors)
    nbytes = sum(t.nbytes for t in plan.tensors)
    lines += ["", f"{plan.arch}: {weights / 1e6:.1f} M weights, {size_text(nbytes)}, {8 * nbytes / weights:.2f} bpw"]
    if (count := len(shards_of(plan))) > 1:
        lines.append(f"{count} shards; one alone: gguf-bridge convert --plan PLAN.json out.gguf --shard 1/{count}")
    return [*lines, *note_lines(plan.notes)]


def _describe_gguf(path: Path) -> list[str]:
    file = read_gguf(path, rotated=True)
    value = file.metadata.get
    size = sum(f.stat().st_size for f in file.files)
    counts, weights, nbytes = Counter[str](), Counter[str](), Counter[str]()  # by type
    for tensor in file.tensors.values():
        counts[tensor.type] += 1
        weights[tensor.type] += math.prod(tensor.shape)
        nbytes[tensor.type] += tensor.raw.size
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights (M)", "bytes (MB)", "bpw")]
    for name, n in nbytes.most_common():
        bpw = 8 * n / weights[name]
        rows.append((name, str(counts[name]), f"{weights[name] / 1e6:.2f}", f"{n / 1e6:.2f}", f"{bpw:.2f}"))
    count, total = counts.total(), weights.total()
    rotated = rotation_keys(file.metadata)
    return [
        f"{path}: {size_text(size)} in {len(file.files)} file{'s' * (len(file.files) != 1)}",
        f"name            {value('general.name')}",
        *_model_lines(file),
        f"weights         {total / 1e6:.1f} M in {count} tensors, {8 * nbytes.total() / max(total, 1):.2f} bpw",
        "",
        *align(rows, left=(True, False, False, False, False)),
        *(f"note: {key} declares weights in a rotated basis; no other command reads this file" for key in rotated[:1]),
    ]


def _model_lines(file: StoredModel) -> list[str]:
    """Architecture and tokenizer of a model; of a GGUF of another kind, what it is."""
    value, arch = file.metadata.get, file.metadata.get("general.architecture")
    if (kind := value("general.type", "model")) != "model":
        return [f"kind            {kind}, not a model" + (f"; of architecture {arch}" if arch else "")]
    tokens = value("tokenizer.ggml.tokens")
    return [
        f"architecture    {arch}, {value(f'{arch}.block_count')} layers, context {value(f'{arch}.context_length')}",
        f"tokenizer       {value('tokenizer.ggml.model')}, pre {value('tokenizer.ggml.pre')}, "
        f"{len(tokens) if isinstance(tokens, list) else 0} tokens",
    ]
