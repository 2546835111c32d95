"""Writes a plan as a JSON file, to be read, edited (a type changed) and executed, on another machine too.

    {"gguf_bridge_plan": 2, "checkpoint": ..., "template": ..., "imatrix": ..., "split_max_size": ...,
     "mmproj_type": "F16",
     "curve": [[bytes, KL divergence], ...],
     "tensors": [{"name", "type", "how", "reason", "limit", "shape", "parts": [{"source", "shape", "rows", ...}]}, ...],
     "metadata": {"llama.block_count": ["UINT32", 32], "tokenizer.ggml.tokens": ["ARRAY", [...], "STRING"], ...},
     "orders": [[0, 64, 1, 65, ...], ...]}

"how" is what happens to the tensor, or to each of its parts; it and "limit" are those of "planned_type". Where "type"
was edited, how the tensor gets there is decided when the plan is executed; and whether a tensor that does not keep its
codes is calibrated, by whether a text is given then. `rows` and `columns` are indices into
`orders`, where each list is stored once. Values that no checkpoint stores are in "values"; a tensor of the template is
read from the template again.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf.gguf_writer import GGUFValue

from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.models.outline import Part
from bridge.system.storage.files import write_text

VERSION = 2


_Orders = dict[bytes, int]  # row and column orders, int64, each with its number


def save_plan(plan: Plan, checkpoint: str, path: Path) -> None:
    """Write a plan, one tensor a line. Raises BridgeError where that fails."""
    orders: _Orders = {}
    tensors = [_tensor_entry(t, orders) for t in plan.tensors]
    head: dict[str, Any] = {"gguf_bridge_plan": VERSION, "checkpoint": checkpoint}
    for name in ("template", "imatrix", "split_max_size", "detect_lattice", "mmproj_type", "stop", "notes", "curve"):
        head[name] = getattr(plan, name)
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append('"tensors": [\n' + ",\n".join(json.dumps(t) for t in tensors) + "\n]")
    keys = [f"{json.dumps(key)}: {json.dumps(_value_entry(v))}" for key, v in plan.metadata.items()]
    lines.append('"metadata": {\n' + ",\n".join(keys) + "\n}")
    lists = [json.dumps(np.frombuffer(order, np.int64).tolist()) for order in orders]
    lines.append('"orders": [\n' + ",\n".join(lists) + "\n]")
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def save_tensor_types(plan: Plan, path: Path) -> None:
    """Write the types of the matrices as `llama-quantize --tensor-type-file` takes them: PATTERN=TYPE in each line.

    Raises BridgeError where that fails.
    """
    lines = [f"^{re.escape(t.name)}$={t.type.lower()}\n" for t in plan.tensors if t.quantizable and len(t.shape) > 1]
    write_text(path, "".join(lines))


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
    entry |= {"stored": part.stored, "change": part.change, "times": part.times, "folded": part.folded or None}
    if part.factor is not None:
        entry["factor"] = part.factor.tolist()
    for name in ("rows", "columns"):
        if (order := getattr(part, name)) is not None:
            entry[name] = orders.setdefault(np.ascontiguousarray(order, np.int64).tobytes(), len(orders))
    return {key: value for key, value in entry.items() if value is not None}


def _value_entry(v: GGUFValue) -> list[Any]:
    plain = json.loads(json.dumps(v.value, default=lambda value: value.item()))
    return [v.type.name, plain, *([v.sub_type.name] if v.sub_type is not None else [])]
