"""An extension of griffe, which reads docstrings and signatures for the API reference of the site.

lines `name  description`     of a docstring become a list, with the types of a class's attributes
fields made by `option`       are listed with their types, defaults and the help of their flags
`**options: Unpack[...]`      becomes the keywords themselves, with their defaults
names of types for our use    become what they stand for: Progress, Array
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

from bridge.system.options import Flag, size

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
_PARAMETER = re.compile(r"(\w+(?:, \w+)*)  +(\S.*)")
_ALIASES = {"bridge.system.progress.Progress", "bridge.runtime.replies.batch.Reader"}
_ARRAY = "bridge.system.operands.Array"


def with_lists(docstring: str, types: Mapping[str, str] | None = None) -> str:
    """A docstring whose aligned lines `name  description` are a list in Markdown; `types`: by name."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if match := _PARAMETER.fullmatch(line):
            lines += [] if inside else [""]
            names = match[1].split(", ")
            known = [(types or {}).get(name) for name in names]
            shown = ", ".join(f"`{name}`" for name in names)
            shown += f" (`{known[0]}`)" if known[0] is not None and len(set(known)) == 1 else ""
            lines.append(f"- {shown}: {match[2]}")
            inside = True
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            lines += ["", line] if inside and line else [line]
            inside = False
    return "\n".join(lines)


class Reference(griffe.Extension):
    """Rewrites docstrings and signatures once all of the package is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name != "bridge":
            return
        listed = set(re.findall(r"^::: (\S+)$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE))
        for member in _members(pkg):
            if isinstance(member, griffe.Function):
                _plain_signature(member, pkg)
            types = _attribute_types(member) if isinstance(member, griffe.Class) else {}
            if member.docstring is not None:
                member.docstring.value = _with_links(with_lists(member.docstring.value, types), listed)
            if isinstance(member, griffe.Class):
                _list_options(member, types)


def _with_links(docstring: str, listed: set[str]) -> str:
    """A docstring whose full names, `bridge.runtime.model.Model`, are links where the page has them."""

    def link(name: re.Match[str]) -> str:
        return f"[`{name[1].rpartition('.')[2]}`][{name[1]}]" if name[1] in listed else name[0]

    return re.sub(r"`(bridge\.[\w.]+)`", link, docstring)


def _members(parent: griffe.Object) -> Iterator[griffe.Object]:
    """Everything that is defined in the package, the package first."""
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from _members(member)


def _attribute_types(cls: griffe.Class) -> dict[str, str]:
    """The types of a class's attributes, inherited ones too."""
    attributes = {name: m for name, m in cls.all_members.items() if not m.is_alias or m.inherited}
    types = {}
    for name, member in attributes.items():
        attribute = member.final_target if isinstance(member, griffe.Alias) else member
        if isinstance(attribute, griffe.Attribute) and attribute.annotation is not None:
            types[name] = str(_plain(attribute.annotation, attribute))
    return types


def _list_options(cls: griffe.Class, types: dict[str, str]) -> None:
    """Append the fields that have flags to a class's docstring, instead of showing each by itself."""
    if "dataclass" not in cls.labels or cls.docstring is None:
        return
    lines = list[str]()
    for field in _fields(cls.canonical_path):
        if (flag := field.metadata.get("flag")) is not None:
            default = f"`{field.default!r}`" + (f": {_in_python(flag.default, flag)}" if flag.default else "")
            lines.append(f"- `{field.name}` (`{types[field.name]}`; default {default}): {_in_python(flag.help, flag)}")
    if lines:
        text = cls.docstring.value
        follows = re.search(r"\n\n(?:Sources?:|Steps|Raises)", text)
        head, rest = (text[: follows.start()], text[follows.start() :]) if follows else (text, "")
        gap = "\n" if "\n- " in head else "\n\n"
        cls.docstring.value = head + gap + "\n".join(lines) + rest


def _fields(path: str) -> tuple[Field[Any], ...]:
    module, _, name = path.rpartition(".")
    dataclass = getattr(import_module(module), name, None)
    return fields(dataclass) if is_dataclass(dataclass) else ()


def _in_python(text: str, flag: Flag) -> str:
    """The words of a flag's help for the parameter: `calibrate` for --calibrate, bytes for 4G."""
    text = re.sub(r"--([a-z][a-z-]*)", lambda match: f"`{match[1].replace('-', '_')}`", text)
    text = re.sub(r"; may be repeated(,)?", lambda match: ";" if match[1] else "", text)
    return re.sub(r",? such as [\d.]+[KMGT]( or [\d.]+[KMGT])?", " in bytes", text) if flag.parse is size else text


def _plain_signature(function: griffe.Function, package: griffe.Module) -> None:
    """Name the keywords of `**options`, and say what names of types stand for."""
    parameters = list[griffe.Parameter]()
    for parameter in function.parameters:
        keywords = _keywords(parameter, package)
        parameters += [parameter] if keywords is None else keywords
    for parameter in parameters:
        parameter.annotation = _plain(parameter.annotation, function)
    function.parameters = griffe.Parameters(*parameters)
    function.returns = _plain(function.returns, function)


def _keywords(parameter: griffe.Parameter, package: griffe.Module) -> list[griffe.Parameter] | None:
    """The keywords that `**options: Unpack[TypedDict]` takes; None for other parameters."""
    annotation = parameter.annotation
    if parameter.kind is not griffe.ParameterKind.var_keyword or not isinstance(annotation, griffe.ExprSubscript):
        return None
    if annotation.canonical_path != "typing.Unpack" or not isinstance(annotation.slice, griffe.Expr):
        return None
    typed = package[annotation.slice.canonical_path.removeprefix("bridge.")]
    classes = [typed]
    while bases := [package[base.canonical_path.removeprefix("bridge.")] for base in classes[-1].bases
                    if base.canonical_path.startswith("bridge.")]:  # fmt: skip
        classes += bases
    defaults = dict[str, object]()
    for cls in classes:  # each names the dataclass of its fields, which stands in the same module
        for name in re.findall(r"`(\w+)`", cls.docstring.value):
            options = _fields(f"{cls.module.canonical_path}.{name}")
            defaults = {each.name: each.default for each in options if each.default is not MISSING} | defaults
    kind = griffe.ParameterKind.keyword_only
    return [
        griffe.Parameter(name, annotation=member.annotation, kind=kind, default=repr(defaults.get(name)))
        for cls in reversed(classes)
        for name, member in cls.members.items()
        if isinstance(member, griffe.Attribute)
    ]


def _plain(annotation: Any, scope: griffe.Object) -> Any:
    """A type with what our names for types stand for."""
    if isinstance(annotation, griffe.ExprName):
        if annotation.canonical_path in _ALIASES:
            return scope.package[annotation.canonical_path.removeprefix("bridge.")].value
        if annotation.canonical_path == _ARRAY:
            module = scope.package[_ARRAY.removeprefix("bridge.").rpartition(".")[0]]
            numpy, torch = griffe.ExprName("ndarray", parent=module), griffe.ExprName("Tensor", parent=module)
            return griffe.ExprBinOp(left=numpy, operator="|", right=torch)
        return annotation
    if not isinstance(annotation, griffe.Expr):
        return annotation
    changes = dict[str, Any]()
    for field in fields(annotation):  # type: ignore[arg-type]
        value = getattr(annotation, field.name)
        if isinstance(value, griffe.Expr):
            changes[field.name] = _plain(value, scope)
        elif isinstance(value, list | tuple):
            changes[field.name] = [_plain(each, scope) for each in value]
    return replace(annotation, **changes)  # type: ignore[type-var]
