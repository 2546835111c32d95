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
from bridge.conversion.plan import How, Plan, PlannedTensor
from bridge.conversion.plan_file import VERSION
from bridge.conversion.recipe import FLOAT_TYPES, MMPROJ_TYPES
from bridge.errors import BridgeError
from bridge.models.model_config import positive
from bridge.models.outline import CHANGES, OutlineTensor, Part
from bridge.system.files import read_json

_EXECUTED = [how for how in get_args(How) if how != "calibrated"]  # which --calibrate makes of others
_ORIGINS = ("checkpoint", "config", "template")  # "scale" is made when the plan is executed
_NAME_BYTES = 63  # llama.cpp's GGML_MAX_NAME without the 0 at the end
_DIMENSIONS = 4
_LARGEST = 1 << 40  # of a dimension, an index, an order's number
_PACKED = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q",
    "FLOAT32": "f", "FLOAT64": "d",
}  # fmt: skip
_INFERRED = {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING"}  # by GGUFWriter, of an array's first item


class _Wrong(Exception):
    """What is wrong with an entry."""


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
        head = _head(record)
        orders = [_order(order) for order in _list(_field(record, "orders"), "orders")]
        entries = _list(_field(record, "tensors"), "tensors", least=1)
        stored = _template_tensors(head["template"]) if head["template"] else {}
        tensors: dict[str, PlannedTensor] = {}
        for number, entry in enumerate(entries):
            where = f"tensor {number}"
            name = _name(_object(entry, "the entry"))
            where = f"tensor {name}"
            if name in tensors:
                raise _Wrong("is there twice")
            tensors[name] = _tensor(name, entry, orders, stored)
        metadata = {}
        where = "the metadata"
        for key, value in _object(_field(record, "metadata"), "metadata").items():
            where = f"the key {key!r}"
            metadata[_key(key)] = _value(value)
        where = "the metadata"
        if metadata.get(Keys.General.ARCHITECTURE, GGUFValue("", GGUFValueType.BOOL)).type != GGUFValueType.STRING:
            raise _Wrong(f"must have {Keys.General.ARCHITECTURE} as STRING")
    except _Wrong as wrong:
        raise BridgeError(f"{path}: {where}: {wrong}; mend it, or make the plan again with {again}") from None
    checkpoint = head.pop("checkpoint")
    return Plan(metadata, list(tensors.values()), **head), checkpoint


def _template_tensors(template: str) -> dict[str, OutlineTensor]:
    from bridge.models.template import template_tensors

    return template_tensors(template)


def _head(record: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint, and the fields of a Plan besides metadata and tensors."""
    split = record.get("split_max_size")
    return {
        "checkpoint": _path(_field(record, "checkpoint"), "checkpoint"),
        "template": _path(record.get("template"), "template", optional=True),
        "imatrix": _path(record.get("imatrix"), "imatrix", optional=True),
        "split_max_size": None if split is None else _whole(split, "split_max_size", least=1),
        "detect_lattice": _flag(record, "detect_lattice"),
        "mmproj_type": _mmproj_type(record.get("mmproj_type")),
        "stop": [_text(text, "stop's item") for text in _list(record.get("stop", []), "stop")],
        "notes": [_text(text, "notes' item") for text in _list(record.get("notes", []), "notes")],
        "curve": [_point(point) for point in _list(record.get("curve", []), "curve")],
    }


def _mmproj_type(entry: Any) -> str | None:
    if entry is not None and entry not in MMPROJ_TYPES:
        raise _unknown("mmproj_type", entry, MMPROJ_TYPES)
    return entry  # type: ignore[no-any-return]


def _point(entry: Any) -> tuple[int, float]:
    size, *loss = _list(entry, "curve's item", least=1)
    if len(loss) != 1:
        raise _must_be("curve's item", entry, "bytes and a divergence")
    return _whole(size, "curve's bytes"), float(_number(loss[0], "curve's divergence"))


def _tensor(
    name: str, entry: dict[str, Any], orders: list[np.ndarray], stored: dict[str, OutlineTensor]
) -> PlannedTensor:
    shape, type_ = _shape(_field(entry, "shape"), "shape"), _text(_field(entry, "type"), "type")
    reason, origin = _text(entry.get("reason", ""), "reason"), entry.get("origin", "checkpoint")
    if origin not in _ORIGINS:
        raise _unknown("origin", origin, _ORIGINS)
    if origin == "template":
        found = stored.get(name)
        if found is None:
            raise _Wrong("its origin is the template, which has no such tensor")
        if (found.fixed_type, found.shape) != (type_, shape):
            raise _Wrong(f"the template has it as {found.fixed_type} {list(found.shape)}")
        return PlannedTensor(
            name, shape, data=found.data, origin="template", type=type_, reason=reason, quantizable=False
        )
    if type_ not in WRITTEN and type_ not in FLOAT_TYPES:
        raise _unknown("type", type_, (*WRITTEN, *FLOAT_TYPES))
    if type_ in WRITTEN and len(shape) < 2:
        raise _Wrong(f"a vector cannot be {type_}; choose one of {', '.join(FLOAT_TYPES)}")
    if type_ in WRITTEN and shape[-1] % WRITTEN[type_].size:
        raise _Wrong(f"rows of {shape[-1]} do not hold whole {type_} blocks of {WRITTEN[type_].size}")
    limit = entry.get("limit")
    tensor = PlannedTensor(
        name, shape, origin=origin, type=type_, reason=reason, quantizable=not _flag(entry, "fixed"),
        limit=None if limit is None else float(_number(limit, "limit")),
    )  # fmt: skip
    if "values" in entry:
        if type_ != "F32" or "parts" in entry:
            raise _Wrong("values are F32, and take the place of parts")
        return replace(tensor, data=_values(entry["values"], shape))
    parts = tuple(_part(part, orders) for part in _list(_field(entry, "parts"), "parts", least=1))
    _check_shapes(tensor, parts)
    return replace(tensor, parts=parts, how=_how(entry, type_, len(parts)))


def _check_shapes(tensor: PlannedTensor, parts: tuple[Part, ...]) -> None:
    """One after another, the parts must make up the tensor."""
    shapes = [part.shape for part in parts]
    rows = all(len(shape) <= 2 and shape[-1] == tensor.shape[-1] for shape in shapes)
    if tensor.type in WRITTEN and not rows:
        raise _Wrong(f"its parts are not rows of {tensor.shape[-1]}")
    if len({shape[1:] for shape in shapes}) > 1 or sum(map(math.prod, shapes)) != math.prod(tensor.shape):
        some = ", ".join(str(list(shape)) for shape in shapes[:4])
        raise _Wrong(f"its parts do not make up {list(tensor.shape)}: {some}{', ...' if len(shapes) > 4 else ''}")


def _how(entry: dict[str, Any], type: str, parts: int) -> tuple[How, ...]:
    """What happens to each part; () where the type is another than the one that was planned."""
    if entry.get("planned_type") != type:
        return ()
    how = _field(entry, "how")
    found: Any = [how] * parts if isinstance(how, str) else how
    if not isinstance(found, list) or len(found) != parts or not all(one in _EXECUTED for one in found):
        raise _Wrong(f"how is {reprlib.repr(how)}, not one of {', '.join(_EXECUTED)} for each part")
    return tuple(found)


def _part(entry: Any, orders: list[np.ndarray]) -> Part:
    entry = _object(entry, "a part")
    source = _text(_field(entry, "source"), "source")
    shape = _shape(_field(entry, "shape"), f"shape of {source}")
    stored = _shape(entry["stored"], f"stored of {source}") if entry.get("stored") is not None else None
    if stored is not None and len(stored) != len(shape):
        raise _Wrong(f"{source}: shape has {len(shape)} dimensions, stored {len(stored)}")
    picked = {}
    for name, axis in (("rows", 0), ("columns", -1)):
        size, beyond = shape[axis], (stored or shape)[axis]
        number = entry.get(name)
        if number is not None:
            if _whole(number, f"{name} of {source}") >= len(orders):
                raise _Wrong(f"{name} of {source} is {number}, but there are {len(orders)} orders")
            picked[name] = order = orders[number]
            if order.shape != (size,) or order.max() >= beyond:
                raise _Wrong(f"{name} of {source} are not {size} numbers below {beyond}")
        elif size != beyond:
            raise _Wrong(f"{name} of {source} must say which {size} of {beyond} are taken")
    if "columns" in picked and len(shape) < 2:
        raise _Wrong(f"{source}: a vector has no columns")
    change, matrix = entry.get("change"), entry.get("matrix")
    if change is not None and change not in CHANGES:
        raise _unknown("change", change, CHANGES)
    if change in ("transposed", "conv1d") and len(shape) != 2:
        raise _Wrong(f"{source}: only a matrix can be {change}")
    matrix = None if matrix is None else _whole(matrix, f"matrix of {source}")
    folded = _flag(entry, "folded")
    if folded and sorted(picked.get("columns", [])) != list(range(shape[-1])):
        raise _Wrong(f"{source}: is folded, but its columns are no permutation")
    factor = _factor(entry.get("factor"), (stored or shape)[0], source)
    return Part(source, shape, picked.get("rows"), picked.get("columns"), matrix, stored, change, factor, folded)


def _factor(values: Any, rows: int, source: str) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != rows or not all(map(positive, values)):
        raise _Wrong(f"factor of {source} is {reprlib.repr(values)}, not {rows} positive numbers")
    return np.array(values, np.float32)


def _key(key: str) -> str:
    if not key or not key.isprintable():
        raise _Wrong("must be printable")
    if key == Keys.General.ALIGNMENT or key.startswith("split."):
        raise _Wrong("is the file's own, and written with it; leave it out")
    return key


def _value(entry: Any) -> GGUFValue:
    """A value of the metadata, of the type that it says."""
    kind, *rest = _list(entry, "the entry", least=1)
    names = [*_PACKED, "BOOL", "STRING"]
    if kind not in (*names, "ARRAY"):
        raise _unknown("type", kind, (*names, "ARRAY"))
    if not 1 <= len(rest) <= (2 if kind == "ARRAY" else 1):
        raise _must_be("the entry", entry, "a type and a value; of an ARRAY, the type of its items may follow")
    if kind != "ARRAY":
        _check_value(kind, rest[0])
        return GGUFValue(rest[0], GGUFValueType[kind])
    items = _list(rest[0], "the array", least=1)
    sub = rest[1] if len(rest) == 2 else _INFERRED.get(type(items[0]))
    if sub not in names:
        raise _unknown("type of items", sub, names)
    for item in items:
        _check_value(sub, item)
    return GGUFValue(items, GGUFValueType.ARRAY, GGUFValueType[sub])


def _check_value(kind: str, value: Any) -> None:
    if kind == "STRING":
        _text(value, "the value")
    elif kind == "BOOL":
        if not isinstance(value, bool):
            raise _must_be("the value", value, "BOOL")
    else:
        try:
            struct.pack(_PACKED[kind], _number(value, "the value"))
        except (struct.error, OverflowError):
            raise _must_be("the value", value, kind) from None


def _order(entry: Any) -> np.ndarray:
    return np.array([_whole(n, "an order's number") for n in _list(entry, "an order", least=1)], np.int64)


def _values(entry: Any, shape: tuple[int, ...]) -> np.ndarray:
    values = [_number(value, "values' item") for value in _list(entry, "values")]
    if len(values) != math.prod(shape):
        raise _Wrong(f"has {len(values)} values for the shape {list(shape)}")
    with np.errstate(over="ignore"):  # becomes infinite
        return np.array(values, np.float32).reshape(shape)


def _name(entry: dict[str, Any]) -> str:
    name = _text(_field(entry, "name"), "name")
    if not name.isprintable() or not 0 < len(name.encode()) <= _NAME_BYTES:
        raise _must_be("name", name, f"printable, of 1 to {_NAME_BYTES} bytes")
    return name


def _field(entry: dict[str, Any], key: str) -> Any:
    if key not in entry:
        raise _Wrong(f"{key!r} is missing")
    return entry[key]


def _flag(entry: dict[str, Any], key: str) -> bool:
    flag = entry.get(key, False)
    if not isinstance(flag, bool):
        raise _must_be(key, flag, "true or false")
    return flag


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _must_be(name, value, "an object")
    return value


def _list(value: Any, name: str, least: int = 0) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise _must_be(name, value, "a list" + " that is not empty" * bool(least))
    return value


def _text(value: Any, name: str) -> str:
    """A text that UTF-8 holds: JSON also writes halves of characters."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise _must_be(name, value, "a text")


def _path(value: Any, name: str, optional: bool = False) -> Any:
    """The name of a file or folder, which the system may spell in bytes that are no UTF-8."""
    if optional and value is None:
        return None
    try:
        if isinstance(value, str) and value and b"\0" not in os.fsencode(value):
            return value
    except UnicodeEncodeError:
        pass
    raise _must_be(name, value, "a path")


def _number(value: Any, name: str) -> int | float:
    if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 1023):  # more overflows a float
        return value
    raise _must_be(name, value, "a number")


def _whole(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _LARGEST:
        raise _must_be(name, value, f"a whole number from {least} on")
    return value


def _shape(value: Any, name: str) -> tuple[int, ...]:
    shape = tuple(_whole(n, f"{name}'s item", least=1) for n in _list(value, name, least=1))
    if len(shape) > _DIMENSIONS:
        raise _must_be(name, value, f"of at most {_DIMENSIONS} dimensions")
    return shape


def _must_be(name: str, value: Any, what: str) -> _Wrong:
    return _Wrong(f"{name} is {reprlib.repr(value)}, must be {what}")


def _unknown(name: str, value: Any, known: Any) -> _Wrong:
    return _Wrong(f"unknown {name} {reprlib.repr(value)}: choose one of {', '.join(known)}")
