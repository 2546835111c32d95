"""JSON schemas of functions' parameters, as far as forms without JSON need to know them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

Schema = Mapping[str, Any]
_DEEPEST = 16  # references of references


def schema_of(value: Any) -> Schema:
    """A schema, or the one that allows anything where it is none."""
    return value if isinstance(value, Mapping) else {}


def resolved(schema: Schema, root: Schema) -> Schema:
    """A schema without a reference at its top; `root`: where references begin."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key, {}) if isinstance(target, Mapping) else {}
        schema = {**schema_of(target), **{key: value for key, value in schema.items() if key != "$ref"}}
    return {}


def alternatives(schema: Schema, root: Schema) -> list[Schema]:
    """Schemas, each of one type, a constant or anything, one of which what fits a schema fits."""
    return list(_alternatives(schema, root, _DEEPEST))


def _alternatives(schema: Schema, root: Schema, depth: int) -> Iterator[Schema]:
    schema = resolved(schema, root)
    choices = next((schema[key] for key in ("anyOf", "oneOf") if _listed(schema.get(key))), None)
    kinds = schema.get("type")
    if "const" in schema:
        yield {"const": schema["const"]}
    elif _listed(schema.get("enum")):
        yield from ({"const": value} for value in schema["enum"])
    elif choices is not None and depth:
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        for choice in choices:
            yield from _alternatives({**rest, **schema_of(choice)}, root, depth - 1)
    elif _listed(kinds):
        yield from ({**schema, "type": kind} for kind in kinds if isinstance(kind, str))
    elif kinds is None and isinstance(schema.get("properties"), Mapping):
        yield {**schema, "type": "object"}
    else:
        yield schema


def _listed(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value)


def properties_of(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """The key, the schema and whether it is required, of each property."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return []
    needed = {key for key in required if isinstance(key, str)} if _listed(required) else set()
    return [(key, schema_of(inner), key in needed) for key, inner in properties.items()]


def property_of(schema: Schema, key: str, root: Schema) -> Schema:
    """The schema of a property; what allows anything where it is not named."""
    for one in alternatives(schema, root):
        properties = one.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return schema_of(properties[key])
    return {}


def is_free(schema: Schema) -> bool:
    """Whether a schema of an object names no properties and allows any, or what a schema allows is not known."""
    return not isinstance(schema.get("properties"), Mapping) and schema.get("additionalProperties") is not False
