"""What `gguf-bridge inspect` prints of a checkpoint or a GGUF, and `gguf-bridge plan` of a plan, as text and for JSON.

A checkpoint's label is compared with its tensors, and the plan that `convert` would execute is summarised.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from bridge.checkpoint import Checkpoint, GroupedTensor, lattice_notes, open_checkpoint
from bridge.checkpoint.decoded import DecodedTensor
from bridge.checkpoint.files.hub import kind_of, resolve_gguf, resolve_model
from bridge.checkpoint.files.weight_files import config_folder
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
from bridge.gguf_file.reader import read_gguf
from bridge.models.outline import number
from bridge.models.tokenizer.gguf_tokenizer import read_chat_templates
from bridge.system.progress import Progress
from bridge.system.storage.files import read_json, refuse_pointer
from bridge.system.text import align, meant, note_lines, size_text


def lines_of(facts: Mapping[str, Any]) -> list[str]:
    """A few lines of what `facts_of` returned."""
    lines = _gguf_lines(facts) if facts["kind"] == "gguf" else _checkpoint_lines(facts)
    return list(map(shortened, lines))


def facts_of(
    path: str | Path, config: str | Path | None = None, template: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a checkpoint folder, a Hub id, a .pt or a GGUF file holds, by the keys of `inspect --json`.

    config, template  as for `convert`
    progress          called with the tensors of floats that were searched for codes, of how many, and the last's name

    Raises BridgeError.
    """
    if kind_of(path, config) == "part":
        refuse_pointer(Path(path))
        raise BridgeError(f"{path}: is one file of a checkpoint; give the folder that it is in")
    home = resolve_model(path, config)
    if kind_of(home, config) == "gguf":
        for name, value in (("config", config), ("template", template)):
            if value is not None:
                raise BridgeError(f"{path}: is a GGUF; {parameter(name)} is for checkpoints")
        return _gguf_facts(home)
    with open_checkpoint(home, config, needs_config=template is None) as ckpt:
        return _checkpoint_facts(ckpt, template, progress)


def _checkpoint_facts(ckpt: Checkpoint, template: str | Path | None, progress: Progress | None) -> dict[str, Any]:
    scattered = sum(ckpt.group_order(name) is not None for name in ckpt.modules)
    facts: dict[str, Any] = {
        "kind": "checkpoint", "path": str(ckpt.path), "files": len(ckpt.files), "bytes": ckpt.nbytes,
        "label": ckpt.quant.describe(), "data": _data_says(ckpt, scattered), "stops": None, "differences": [],
        "agrees": False, "architecture": None, "layers": None, "template": None if template is None else str(template),
        "notes": list(ckpt.notes), "tensors": [],
    }  # fmt: skip
    from bridge.conversion.planning.planner import make_plan  # loads Numba

    try:
        plan = make_plan(ckpt, PlanOptions(template=template), Importance({}))
        table, notes = _table(ckpt, plan)
    except BridgeError as problem:
        return {**facts, "stops": str(problem)}
    differences = [*_claims(ckpt, plan, scattered), *notes]
    grids = {} if ckpt.modules else ckpt.find_lattices(progress)
    hidden = lattice_notes(grids, "--detect-lattice carries their codes")
    return {
        **facts,
        "differences": differences,
        "agrees": bool(ckpt.modules and ckpt.quant.labelled and not differences),
        "architecture": plan.arch,
        "layers": number(plan.metadata, "block_count"),
        "notes": [*plan.notes, *hidden],
        "tensors": table,
    }


def _checkpoint_lines(facts: Mapping[str, Any]) -> list[str]:
    lines = [
        _size_line(facts),
        f"the label says  {facts['label']}",
        f"the data says   {facts['data']}",
    ]
    if facts["stops"] is not None:
        return [*lines, *note_lines(facts["notes"]), f"convert would stop: {facts['stops']}"]
    lines += note_lines(facts["differences"], "they differ     ")
    if facts["agrees"]:
        lines.append("they agree      in all that was looked at")
    whose = f", as {facts['template']} has them" if facts["template"] is not None else ""
    lines.append(f"architecture    {facts['architecture']}, {facts['layers']} layers{whose}")
    rows: list[tuple[str, ...]] = [("tensors", "", "shape", "arrives as", "zero points", "convert makes it", "")]
    rows += [tuple(map(str, row.values())) for row in facts["tensors"]]
    return [*lines, *note_lines(facts["notes"]), "", *align(rows, left=(True, False, True, True, True, True, True))]


def _size_line(facts: Mapping[str, Any]) -> str:
    return f"{facts['path']}: {size_text(facts['bytes'])} in {facts['files']} file{'s' * (facts['files'] != 1)}"


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


def _table(ckpt: Checkpoint, plan: Plan) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per kind of tensor, with what its first and its last are; and the readers' notes on those."""
    reader = PartReader(ckpt)
    kinds: dict[str, list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        if len(tensor.shape) > 1:
            kinds.setdefault(tensor.kind, []).append(tensor)
    names = ("shape", "arrives_as", "zero_points", "becomes", "why")
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for kind, members in kinds.items():
        ends = [_arrival(reader, tensor, notes) for tensor in dict.fromkeys((members[0], members[-1]))]
        cells = [list(cell) for cell in zip(*ends, strict=True)]
        coded = [t for t in members if any(reader.coded(part) for part in t.parts) and t.quantizable]
        cells += [[t.type for t in members], [t.reason for t in coded]]
        texts = (" / ".join(dict.fromkeys(cell)) for cell in cells)
        rows.append({"kind": kind, "count": len(members), **dict(zip(names, texts, strict=True))})
    return rows, notes


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


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan for `plan --json`."""
    return {
        "architecture": plan.arch,
        "weights": sum(math.prod(t.shape) for t in plan.tensors),
        "bytes": sum(t.nbytes for t in plan.tensors),
        "shards": len(shards_of(plan)),
        "notes": plan.notes,
        "tensors": [
            {
                "name": t.name, "kind": t.kind, "shape": list(t.shape), "type": t.type, "bytes": t.nbytes, "how": t.how,
                "why": t.reason,
            }
            for t in plan.tensors
        ],
    }  # fmt: skip


def _gguf_facts(path: Path) -> dict[str, Any]:
    file = read_gguf(path, rotated=True)
    value, arch = file.metadata.get, file.metadata.get("general.architecture")
    counts, weights, nbytes = Counter[str](), Counter[str](), Counter[str]()  # by type
    for tensor in file.tensors.values():
        counts[tensor.type] += 1
        weights[tensor.type] += math.prod(tensor.shape)
        nbytes[tensor.type] += tensor.raw.size
    tokens = value("tokenizer.ggml.tokens")
    return {
        "kind": "gguf",
        "path": str(path),
        "files": len(file.files),
        "bytes": sum(f.stat().st_size for f in file.files),
        "type": value("general.type", "model"),
        "name": value("general.name"),
        "license": value("general.license"),
        "architecture": arch,
        "layers": value(f"{arch}.block_count"),
        "context": value(f"{arch}.context_length"),
        "tokenizer": value("tokenizer.ggml.model"),
        "pre": value("tokenizer.ggml.pre"),
        "tokens": len(tokens) if isinstance(tokens, list) else 0,
        "chat_template": "tokenizer.chat_template" in file.metadata,
        "weights": weights.total(),
        "tensors": counts.total(),
        "tensor_bytes": nbytes.total(),
        "types": [
            {"type": type, "tensors": counts[type], "weights": weights[type], "bytes": n}
            for type, n in nbytes.most_common()
        ],
        "notes": [
            f"{key} declares weights in a rotated basis; no other command reads this file"
            for key in rotation_keys(file.metadata)[:1]
        ],
    }  # fmt: skip


def _gguf_lines(facts: Mapping[str, Any]) -> list[str]:
    arch, count = facts["architecture"], facts["tensors"]
    lines = [_size_line(facts), f"name            {facts['name']}"]
    if facts["license"] is not None:
        lines.append(f"license         {facts['license']}")
    if facts["type"] == "model":
        template = "" if facts["chat_template"] else "; no chat template"
        lines += [
            f"architecture    {arch}, {facts['layers']} layers, context {facts['context']}",
            f"tokenizer       {facts['tokenizer']}, pre {facts['pre']}, {facts['tokens']} tokens{template}",
        ]
    else:
        lines.append(f"kind            {facts['type']}, not a model" + (f"; of architecture {arch}" if arch else ""))
    bpw = 8 * facts["tensor_bytes"] / max(facts["weights"], 1)
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights (M)", "bytes (MB)", "bpw")]
    for t in facts["types"]:
        each = 8 * t["bytes"] / t["weights"]
        millions = (f"{t['weights'] / 1e6:.2f}", f"{t['bytes'] / 1e6:.2f}")
        rows.append((t["type"], str(t["tensors"]), *millions, f"{each:.2f}"))
    return [
        *lines,
        f"weights         {facts['weights'] / 1e6:.1f} M in {count} tensors, {bpw:.2f} bpw",
        "",
        *align(rows, left=(True, False, False, False, False)),
        *(f"note: {note}" for note in facts["notes"]),
    ]


def gguf_metadata(path: str | Path, key: str = "") -> dict[str, Any]:
    """The keys of a GGUF's metadata, or one of them. BridgeError where there is none of that name."""
    metadata = read_gguf(resolve_gguf(path), rotated=True).metadata
    if key and key not in metadata:
        raise BridgeError(f"{path}: has no key {key}{meant(key, metadata) or '; --metadata alone lists all'}")
    return {name: metadata[name] for name in ([key] if key else metadata)}


def metadata_lines(metadata: Mapping[str, Any]) -> list[str]:
    """A line for each key; of long texts and arrays, as much as fits the terminal."""
    width = max(map(len, metadata), default=0)
    room = max(shutil.get_terminal_size().columns - width - 2, 32)
    return [f"{key:{width}}  {_beginning(value, room)}" for key, value in metadata.items()]


def _beginning(value: Any, room: int) -> str:
    text = json.dumps(value[:100] if isinstance(value, list) else value, ensure_ascii=False)
    if len(text) <= room and not (isinstance(value, list) and len(value) > 100):
        return text
    size = f"... {len(value)} items" if isinstance(value, list) else "..."
    return text[: room - len(size)] + size


def chat_template(path: str | Path, config: str | Path | None = None) -> str:
    """The chat template of a GGUF or a checkpoint, in Jinja. BridgeError where it has none."""
    home = resolve_model(path, config)
    if kind_of(home, config) == "gguf":
        text = read_gguf(home, rotated=True).metadata.get("tokenizer.chat_template")
    else:
        folder = config_folder(home, config)
        text = read_chat_templates(folder, read_json(folder / "tokenizer_config.json", optional=True)).get("default")
    if not isinstance(text, str):
        raise BridgeError(f"{path}: has no chat template")
    return text
