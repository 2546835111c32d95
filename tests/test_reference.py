"""The API reference: what it lists has docstrings that name every parameter, and annotations with real types."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest
import yaml

import bridge
from tests.conftest import ROOT

pytest.importorskip("torch")

# what returns or takes objects of packages that may be missing
ANY = {
    "QuantTensor.to return",  # a CudaTensor
    "TrellisLayer.to return",
    "repack cluster",  # a distributed.Client
    "QuantLinear tensor",  # any tensor with a product
}


def entries() -> dict[str, tuple[Any, list[str]]]:
    """The names that the page lists: the object, and the members that are shown of a class."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = {}
    for match in re.finditer(r"^::: (\S+)\n((?:    .*\n)*)", text, re.MULTILINE):
        module, _, name = match[1].rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        options = (yaml.safe_load(match[2]) or {}).get("options", {}) if match[2] else {}
        members = options.get("members", [name for name in vars(thing) if inspect.isclass(thing)])
        shown = [] if members is False else members
        if "members" not in options:
            shown = [each for each in shown if not each.startswith("_") and callable(getattr(thing, each))]
        listed[name] = thing, shown
    return listed


ENTRIES = entries() if (ROOT / "docs" / "reference.md").is_file() else {}


def function_of(cls: type, name: str) -> Any:
    """A method, or what computes a property."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, property):
        return member.fget
    return inspect.unwrap(member.__func__ if isinstance(member, classmethod | staticmethod) else member)


def named(name: str, docstring: str) -> bool:
    """Whether a docstring has a line `name  description`, or the name in backticks."""
    return re.search(rf"^ *(?:\w+, )*{name}(?:, \w+)*  +\S|`{name}`", docstring, re.MULTILINE) is not None


def functions() -> list[Any]:
    shown = [
        pytest.param(inspect.unwrap(thing), None, id=name)
        for name, (thing, _) in ENTRIES.items()
        if not inspect.isclass(thing)
    ]
    return shown + [
        pytest.param(function_of(thing, member), thing, id=f"{name}.{member}")
        for name, (thing, members) in ENTRIES.items()
        for member in members
        if not isinstance(inspect.getattr_static(thing, member, None), str)
    ]


def test_every_name_of_bridge_is_listed():
    assert bridge._LAZY.keys() <= ENTRIES.keys()


@pytest.mark.parametrize(("function", "cls"), functions())
def test_a_function_has_types_and_a_docstring_that_names_its_parameters(function, cls):
    text = f"{function.__doc__} {(cls.__doc__ or '') if cls else ''}"
    assert function.__doc__
    parameters = list(inspect.signature(function).parameters.values())
    if cls is not None and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    assert [p.name for p in parameters if not named(p.name, text)] == []
    assert [p.name for p in parameters if p.annotation is p.empty] == []
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    name = f"{cls.__name__}.{function.__name__}" if cls else function.__name__
    returned = {"return": inspect.signature(function).return_annotation}
    types = {p.name: p.annotation for p in parameters} | returned
    assert [
        f"{name} {each}" for each, hint in types.items() if hint in (Any, "Any") and f"{name} {each}" not in ANY
    ] == []


@pytest.mark.parametrize("name", [name for name, (thing, _) in ENTRIES.items() if inspect.isclass(thing)])
def test_a_class_has_a_docstring_that_names_its_fields(name):
    cls = ENTRIES[name][0]
    documented = "\n".join(each.__doc__ or "" for each in cls.__mro__ if each.__module__.startswith("bridge."))
    assert vars(cls).get("__doc__")
    assert not cls.__doc__.startswith(f"{name}(")  # made by dataclass
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if "flag" not in field.metadata]
    else:
        names = [each for each in inspect.get_annotations(cls) if not each.startswith("_") and name != "QuantLinear"]
        if name in ("QuantTensor", "QuantLinear"):  # made by users
            names += [each for each in inspect.signature(cls).parameters if not each.startswith("_")]
    assert [each for each in names if not named(each, documented)] == []


def test_errors_are_said_of_functions_that_raise_them():
    silent = {"set_num_threads", "gptq"}
    for name, (thing, _) in ENTRIES.items():
        if not inspect.isclass(thing) and name not in silent:
            assert "BridgeError" in thing.__doc__, name
