"""Reads a plan's file (`plan_file` draws it). It may have been edited, or come from somebody else: all of it is checked
before anything is made, and `PartReader.check` compares it with the checkpoint.
"""

import math
import os
import reprlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from gguf import GGUFValueType, Keys
from gguf.gguf_writer import GGUFValue

from bridge.blocks.read import WRITTEN
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.conversion.planning.plan import How, Plan, PlannedTensor
from bridge.conversion.planning.plan_file import VERSION
from bridge.conversion.planning.recipe import MMPROJ_TYPES
from bridge.errors import BridgeError
from bridge.models.config.model_config import positive
from bridge.models.outline import CHANGES, OutlineTensor, Part
from bridge.system import fields as kinds
from bridge.system.fields import FieldError, Fields, not_as
from bridge.system.storage.files import read_json

_ORIGINS = ("checkpoint", "config", "template")  # "scale" is made when the plan is executed
_NAME_BYTES = 63  # llama.cpp's GGML_MAX_NAME without the 0 at the end
_DIMENSIONS = 4
_PACKED = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q",
    "FLOAT32": "f", "FLOAT64": "d",
}  # fmt: skip
_INFERRED = {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING"}  # by GGUFWriter, of an array's first item


def load_plan(path: Path) -> tuple[Plan, str]:
    """The plan of a file, and the checkpoint that it names. Tensors whose type was edited have no `how` yet.

    Raises BridgeError where the file is not a plan, or an entry of it cannot be executed; the entry is named.
    """
    record = read_json(path)
    again = f"`gguf-bridge plan CHECKPOINT -o {path}`"
    if record.get("gguf_bridge_plan") != VERSION:
        raise BridgeError(f"{path}: is not a plan of this version; make one with {again}")
    where = "the head"
    try:
        fields = Fields(record, "the plan")
        head = _head(fields)
        orders = fields.take("orders", kinds.list_of(_order))
        entries = fields.take("tensors", kinds.list_of(least=1))
        stored: dict[str, OutlineTensor] = {}
        if head["template"]:
            from bridge.models.template import template_tensors

            stored = template_tensors(head["template"])
        tensors: dict[str, PlannedTensor] = {}
        for i, entry in enumerate(entries):
            where = f"tensor {i}"
            of_tensor = Fields(entry, "the entry")
            name = of_tensor.take("name", _name)
            where = f"tensor {name}"
            if name in tensors:
                raise FieldError("is there twice")
            tensors[name] = _tensor(name, of_tensor, orders, stored)
        metadata = {}
        where = "the metadata"
        for key, value in fields.take("metadata", kinds.object_).items():
            where = f"the key {key!r}"
            metadata[_key(key)] = _value(value)
        where = "the metadata"
        if metadata.get(Keys.General.ARCHITECTURE, GGUFValue("", GGUFValueType.BOOL)).type != GGUFValueType.STRING:
            raise FieldError(f"must have {Keys.General.ARCHITECTURE} as STRING")
    except FieldError as wrong:
        raise BridgeError(f"{path}: {where}: {wrong}; mend it, or make the plan again with {again}") from None
    checkpoint = head.pop("checkpoint")
    return Plan(metadata, list(tensors.values()), **head), checkpoint


def _head(fields: Fields) -> dict[str, Any]:
    """The checkpoint, and the fields of a Plan besides metadata and tensors."""
    return {
        "checkpoint": fields.take("checkpoint", _path),
        "template": fields.take("template", kinds.optional(_path), None),
        "imatrix": fields.take("imatrix", kinds.optional(_path), None),
        "split_max_size": fields.take("split_max_size", kinds.optional(kinds.whole(1)), None),
        "detect_lattice": fields.take("detect_lattice", kinds.flag, False),
        "mmproj_type": fields.take("mmproj_type", kinds.optional(kinds.one_of(MMPROJ_TYPES)), None),
        "stop": fields.take("stop", kinds.list_of(kinds.text), []),
        "notes": fields.take("notes", kinds.list_of(kinds.text), []),
        "curve": fields.take("curve", kinds.list_of(_point), []),
    }


def _point(entry: Any, name: str) -> tuple[int, float]:
    size, *loss = kinds.list_of(least=1)(entry, name)
    if len(loss) != 1:
        raise not_as(name, entry, "bytes and a divergence")
    return kinds.whole()(size, "curve's bytes"), float(kinds.number(loss[0], "curve's divergence"))


def _tensor(name: str, fields: Fields, orders: list[np.ndarray], stored: dict[str, OutlineTensor]) -> PlannedTensor:
    shape, type_ = fields.take("shape", _shape), fields.take("type", kinds.text)
    reason, origin = fields.take("reason", kinds.text, ""), fields.take("origin", kinds.one_of(_ORIGINS), "checkpoint")
    if origin == "template":
        from_template = stored.get(name)
        if from_template is None:
            raise FieldError("its origin is the template, which has no such tensor")
        if (from_template.fixed_type, from_template.shape) != (type_, shape):
            raise FieldError(f"the template has it as {from_template.fixed_type} {list(from_template.shape)}")
        return PlannedTensor(
            name, shape, data=from_template.data, origin="template", type=type_, reason=reason, quantizable=False
        )
    kinds.one_of((*WRITTEN, *FLOAT_TYPES))(type_, "type")
    if type_ in WRITTEN and len(shape) < 2:
        raise FieldError(f"a vector cannot be {type_}; choose one of {', '.join(FLOAT_TYPES)}")
    if type_ in WRITTEN and shape[-1] % WRITTEN[type_].size:
        raise FieldError(f"rows of {shape[-1]} do not hold whole {type_} blocks of {WRITTEN[type_].size}")
    tensor = PlannedTensor(
        name, shape, origin=origin, type=type_, reason=reason, quantizable=not fields.take("fixed", kinds.flag, False),
        limit=fields.take("limit", kinds.optional(_float), None),
    )  # fmt: skip
    if "values" in fields:
        if type_ != "F32" or "parts" in fields:
            raise FieldError("values are F32, and take the place of parts")
        return replace(tensor, data=_values(fields.take("values", kinds.list_of(kinds.number)), shape))
    parts = tuple(_part(part, orders) for part in fields.take("parts", kinds.list_of(least=1)))
    _check_shapes(tensor, parts)
    return replace(tensor, parts=parts, how=_how(fields, type_, len(parts)))


def _check_shapes(tensor: PlannedTensor, parts: tuple[Part, ...]) -> None:
    """One after another, the parts must make up the tensor."""
    shapes = [part.shape for part in parts]
    rows = all(len(shape) <= 2 and shape[-1] == tensor.shape[-1] for shape in shapes)
    if tensor.type in WRITTEN and not rows:
        raise FieldError(f"its parts are not rows of {tensor.shape[-1]}")
    if len({shape[1:] for shape in shapes}) > 1 or sum(map(math.prod, shapes)) != math.prod(tensor.shape):
        some = ", ".join(str(list(shape)) for shape in shapes[:4])
        raise FieldError(f"its parts do not make up {list(tensor.shape)}: {some}{', ...' if len(shapes) > 4 else ''}")


def _how(fields: Fields, type: str, parts: int) -> tuple[How, ...]:
    """What happens to each part; () where the type is another than the one that was planned."""
    if fields.take("planned_type", kinds.anything, None) != type:
        return ()
    how = fields.take("how", kinds.anything)
    hows: Any = [how] * parts if isinstance(how, str) else how
    if not isinstance(hows, list) or len(hows) != parts or not all(one in get_args(How) for one in hows):
        raise FieldError(f"how is {reprlib.repr(how)}, not one of {', '.join(get_args(How))} for each part")
    return tuple(hows)


def _part(entry: Any, orders: list[np.ndarray]) -> Part:
    fields = Fields(entry, "a part")
    source = fields.take("source", kinds.text)
    shape = fields.take("shape", _shape, name=f"shape of {source}")
    stored = fields.take("stored", kinds.optional(_shape), None, f"stored of {source}")
    if stored is not None and len(stored) != len(shape):
        raise FieldError(f"{source}: shape has {len(shape)} dimensions, stored {len(stored)}")
    picked = {}
    for name, axis in (("rows", 0), ("columns", -1)):
        size, beyond = shape[axis], (stored or shape)[axis]
        index = fields.take(name, kinds.optional(kinds.whole()), None, f"{name} of {source}")
        if index is not None:
            if index >= len(orders):
                raise FieldError(f"{name} of {source} is {index}, but there are {len(orders)} orders")
            picked[name] = order = orders[index]
            if order.shape != (size,) or order.max() >= beyond:
                raise FieldError(f"{name} of {source} are not {size} numbers below {beyond}")
        elif size != beyond:
            raise FieldError(f"{name} of {source} must say which {size} of {beyond} are taken")
    if "columns" in picked and len(shape) < 2:
        raise FieldError(f"{source}: a vector has no columns")
    change = fields.take("change", kinds.optional(kinds.one_of(CHANGES)), None)
    if change in ("transposed", "conv1d") and len(shape) != 2:
        raise FieldError(f"{source}: only a matrix can be {change}")
    matrix = fields.take("matrix", kinds.optional(kinds.whole()), None, f"matrix of {source}")
    folded = fields.take("folded", kinds.flag, False)
    if folded and sorted(picked.get("columns", [])) != list(range(shape[-1])):
        raise FieldError(f"{source}: is folded, but its columns are no permutation")
    factor = _factor(fields.take("factor", kinds.anything, None), (stored or shape)[0], source)
    times = fields.take("times", kinds.optional(kinds.text), None, f"times of {source}")
    if times is not None and (change != "squeezed" or len(shape) != 1 or picked):
        raise FieldError(
            f"{source}: times is {reprlib.repr(times)}, but only a squeezed vector is multiplied by another"
        )
    return Part(source, shape, picked.get("rows"), picked.get("columns"), matrix, stored, change, factor, times, folded)


def _factor(values: Any, rows: int, source: str) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != rows or not all(map(positive, values)):
        raise FieldError(f"factor of {source} is {reprlib.repr(values)}, not {rows} positive numbers")
    return np.array(values, np.float32)


def _key(key: str) -> str:
    if not key or not key.isprintable():
        raise FieldError("must be printable")
    if key == Keys.General.ALIGNMENT or key.startswith("split."):
        raise FieldError("is the file's own, and written with it; leave it out")
    return key


def _value(entry: Any) -> GGUFValue:
    """A value of the metadata, of the type that it says."""
    kind, *rest = kinds.list_of(least=1)(entry, "the entry")
    names = [*_PACKED, "BOOL", "STRING"]
    kinds.one_of((*names, "ARRAY"))(kind, "type")
    if not 1 <= len(rest) <= (2 if kind == "ARRAY" else 1):
        raise not_as("the entry", entry, "a type and a value; of an ARRAY, the type of its items may follow")
    if kind != "ARRAY":
        _check_value(kind, rest[0])
        return GGUFValue(rest[0], GGUFValueType[kind])
    items = kinds.list_of(least=1)(rest[0], "the array")
    sub = kinds.one_of(names)(rest[1] if len(rest) == 2 else _INFERRED.get(type(items[0])), "type of items")
    for item in items:
        _check_value(sub, item)
    return GGUFValue(items, GGUFValueType.ARRAY, GGUFValueType[sub])


def _check_value(kind: str, value: Any) -> None:
    if kind == "STRING":
        kinds.text(value, "the value")
    elif kind == "BOOL":
        if not isinstance(value, bool):
            raise not_as("the value", value, "BOOL")
    else:
        try:
            struct.pack(_PACKED[kind], kinds.number(value, "the value"))
        except (struct.error, OverflowError):
            raise not_as("the value", value, kind) from None


def _order(entry: Any, name: str) -> np.ndarray:
    return np.array(
        [kinds.whole()(row, "an order's number") for row in kinds.list_of(least=1)(entry, "an order")], np.int64
    )


def _float(value: Any, name: str) -> float:
    return float(kinds.number(value, name))


def _values(values: list[float], shape: tuple[int, ...]) -> np.ndarray:
    if len(values) != math.prod(shape):
        raise FieldError(f"has {len(values)} values for the shape {list(shape)}")
    with np.errstate(over="ignore"):  # becomes infinite
        return np.array(values, np.float32).reshape(shape)


def _name(value: Any, field: str) -> str:
    name = kinds.text(value, field)
    if not name.isprintable() or not 0 < len(name.encode()) <= _NAME_BYTES:
        raise not_as(field, name, f"printable, of 1 to {_NAME_BYTES} bytes")
    return name


def _path(value: Any, name: str) -> str:
    """The name of a file or folder, which the system may spell in bytes that are no UTF-8."""
    try:
        if isinstance(value, str) and value and b"\0" not in os.fsencode(value):
            return value
    except UnicodeEncodeError:
        pass
    raise not_as(name, value, "a path")


def _shape(value: Any, name: str) -> tuple[int, ...]:
    shape = tuple(kinds.list_of(kinds.whole(1), least=1)(value, name))
    if len(shape) > _DIMENSIONS:
        raise not_as(name, value, f"of at most {_DIMENSIONS} dimensions")
    return shape
