"""A plan as a JSON file, to be read, edited (a type changed) and executed, on another machine too.

    {"gguf_bridge_plan": 2, "checkpoint": ..., "template": ..., "imatrix": ..., "split_max_size": ...,
     "curve": [[bytes, KL divergence], ...],
     "tensors": [{"name", "type", "how", "reason", "limit", "shape", "parts": [{"source", "shape", "rows", ...}]}, ...],
     "metadata": {"llama.block_count": ["UINT32", 32], "tokenizer.ggml.tokens": ["ARRAY", [...], "STRING"], ...},
     "orders": [[0, 64, 1, 65, ...], ...]}

"how" is what happens to the tensor, or to each of its parts; it and "limit" are those of "planned_type". Where "type"
was edited, how the tensor gets there is decided when the plan is executed. `rows` and `columns` are indices into
`orders`, where each list is stored once. Values that no checkpoint stores are in "values"; a tensor of the template is
read from the template again.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.blocks import TYPES
from bridge.conversion.plan import How, Plan, PlannedTensor
from bridge.conversion.recipe import FLOAT_TYPES
from bridge.errors import BridgeError
from bridge.models.outline import CHANGES, OutlineTensor, Part
from bridge.system.files import read_json, write_text

_VERSION = 2
_EXECUTED = set(get_args(How)) - {"calibrated"}  # which --calibrate makes of others


class _Orders:
    """Row and column orders by content, each kept once."""

    def __init__(self) -> None:
        self.lists: list[list[int]] = []
        self._known: dict[bytes, int] = {}

    def number(self, order: np.ndarray) -> int:
        order = np.ascontiguousarray(order, np.int64)
        key = order.tobytes()
        if key not in self._known:
            self._known[key] = len(self.lists)
            self.lists.append(order.tolist())
        return self._known[key]


def save_plan(plan: Plan, checkpoint: str, path: Path) -> None:
    """Write a plan, one tensor a line. Raises BridgeError where that fails."""
    orders = _Orders()
    tensors = [_tensor_entry(t, orders) for t in plan.tensors]
    head = {
        "gguf_bridge_plan": _VERSION,
        "checkpoint": checkpoint,
        "template": plan.template,
        "imatrix": plan.imatrix,
        "split_max_size": plan.split_max_size,
        "detect_lattice": plan.detect_lattice,
        "stop": plan.stop,
        "notes": plan.notes,
        "curve": plan.curve,
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append('"tensors": [\n' + ",\n".join(json.dumps(t) for t in tensors) + "\n]")
    keys = [f"{json.dumps(key)}: {json.dumps(_value_entry(v))}" for key, v in plan.metadata.items()]
    lines.append('"metadata": {\n' + ",\n".join(keys) + "\n}")
    lines.append('"orders": [\n' + ",\n".join(json.dumps(order) for order in orders.lists) + "\n]")
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _tensor_entry(t: PlannedTensor, orders: _Orders) -> dict[str, Any]:
    how = t.how[0] if len(set(t.how)) == 1 else list(t.how) or None
    entry: dict[str, Any] = {"name": t.name, "type": t.type, "how": how, "reason": t.reason, "limit": t.limit}
    entry |= {"planned_type": t.type if t.parts else None, "shape": t.shape}
    entry |= {"origin": None if t.origin == "checkpoint" else t.origin, "fixed": None if t.quantizable else True}
    if t.parts:
        entry["parts"] = [_part_entry(part, orders) for part in t.parts]
    elif t.origin != "template":
        entry["values"] = np.asarray(t.data, np.float32).reshape(-1).tolist()
    return {key: value for key, value in entry.items() if value is not None}


def _part_entry(part: Part, orders: _Orders) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": part.source, "shape": part.shape, "matrix": part.matrix}
    entry |= {"stored": part.stored, "change": part.change}
    for name in ("rows", "columns"):
        if (order := getattr(part, name)) is not None:
            entry[name] = orders.number(order)
    return {key: value for key, value in entry.items() if value is not None}


def _value_entry(v: GGUFValue) -> list[Any]:
    plain = json.loads(json.dumps(v.value, default=_plain))
    return [v.type.name, plain, *([v.sub_type.name] if v.sub_type is not None else [])]


def _plain(value: Any) -> Any:
    """What json does not know: numbers of NumPy, and tokens as bytes."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value.item()


def load_plan(path: Path) -> tuple[Plan, str]:
    """The plan of a file, and the checkpoint that it names. Tensors whose type was edited have no `how` yet.

    Raises BridgeError where the file is not a plan, or an entry of it cannot be executed; the entry is named.
    """
    record = read_json(path)
    if record.get("gguf_bridge_plan") != _VERSION:
        raise BridgeError(
            f"{path}: is not a plan of this version; make one with `gguf-bridge plan CHECKPOINT -o {path}`"
        )
    where = "the head"
    try:
        orders = [np.array(order, np.int64) for order in record["orders"]]
        template = record.get("template")
        stored = _template_tensors(template) if template else {}
        tensors = []
        for number, entry in enumerate(record["tensors"]):
            where = f"tensor {entry.get('name', number)}"
            tensors.append(_tensor(entry, orders, stored))
        metadata = {}
        for key, (kind, value, *sub) in record["metadata"].items():
            where = f"the key {key}"
            metadata[key] = GGUFValue(value, GGUFValueType[kind], GGUFValueType[sub[0]] if sub else None)
        where = "the head"
        split = record.get("split_max_size")
        if split is not None and (type(split) is not int or split < 1):
            raise ValueError(f"split_max_size is {split!r}")
        if "general.architecture" not in metadata:
            raise ValueError("general.architecture is missing from the metadata")
        stop, notes = [str(s) for s in record.get("stop", [])], [str(n) for n in record.get("notes", [])]
        lattice = bool(record.get("detect_lattice"))
        curve = [(int(size), float(loss)) for size, loss in record.get("curve", [])]
        plan = Plan(metadata, tensors, stop, notes, template, record.get("imatrix"), split, lattice, curve)
        return plan, str(record["checkpoint"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as problem:
        raise BridgeError(f"{path}: {where} cannot be understood ({type(problem).__name__}: {problem})") from None


def _template_tensors(template: str) -> dict[str, OutlineTensor]:
    from bridge.models.template import template_tensors

    return template_tensors(template)


def _tensor(entry: dict[str, Any], orders: list[np.ndarray], stored: dict[str, OutlineTensor]) -> PlannedTensor:
    name, shape, type_ = entry["name"], tuple(entry["shape"]), entry["type"]
    reason, origin = entry.get("reason", ""), entry.get("origin", "checkpoint")
    if origin == "template":
        found = stored[name]
        if (found.fixed_type, found.shape) != (type_, shape):
            raise ValueError(f"the template has it as {found.fixed_type} {list(found.shape)}")
        return PlannedTensor(
            name, shape, data=found.data, origin="template", type=type_, reason=reason, quantizable=False
        )
    if type_ not in TYPES and type_ not in FLOAT_TYPES:
        raise ValueError(f"unknown type {type_!r}: choose one of {', '.join((*TYPES, *FLOAT_TYPES))}")
    if type_ in TYPES and shape[-1] % TYPES[type_].size:
        raise ValueError(f"rows of {shape[-1]} do not hold whole {type_} blocks of {TYPES[type_].size}")
    tensor = PlannedTensor(
        name, shape, origin=origin, type=type_, reason=reason, limit=entry.get("limit"),
        quantizable=not entry.get("fixed"),
    )  # fmt: skip
    if "values" in entry:
        return replace(tensor, data=np.array(entry["values"], np.float32).reshape(shape))
    parts = tuple(_part(part, orders) for part in entry["parts"])
    return replace(tensor, parts=parts, how=_how(entry, len(parts)))


def _how(entry: dict[str, Any], parts: int) -> tuple[How, ...]:
    """What happens to each part; () where the type is another than the one that was planned."""
    if entry.get("planned_type") != entry["type"]:
        return ()
    found: list[Any] = [entry["how"]] * parts if isinstance(entry["how"], str) else list(entry["how"])
    if len(found) != parts or not set(found) <= _EXECUTED:
        raise ValueError(f"how is {entry['how']!r}, not one of {', '.join(sorted(_EXECUTED))} for each part")
    return tuple(found)


def _part(entry: dict[str, Any], orders: list[np.ndarray]) -> Part:
    shape, stored = tuple(entry["shape"]), entry.get("stored")
    found = {name: orders[entry[name]] for name in ("rows", "columns") if name in entry}
    for name, order in found.items():
        size, beyond = shape[0 if name == "rows" else -1], (stored or shape)[0 if name == "rows" else -1]
        if order.shape != (size,) or order.min(initial=0) < 0 or order.max(initial=0) >= beyond:
            raise ValueError(f"{name} of {entry['source']} are not {size} numbers below {beyond}")
    if entry.get("change") not in (None, *CHANGES):
        raise ValueError(f"unknown change {entry['change']!r}: choose one of {', '.join(CHANGES)}")
    return Part(
        entry["source"], shape, found.get("rows"), found.get("columns"), entry.get("matrix"),
        tuple(stored) if stored is not None else None, entry.get("change"),
    )  # fmt: skip
