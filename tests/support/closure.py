"""The files of ours that a module may execute: what it imports, what those import, and so on.

Imports inside functions count, and those in programs that stand in strings, for child processes. So do modules that are
named in strings: the whole string, as in mock.patch("bridge.cuda.toolchain.device.available"), or the start of an
f-string, as in import_module(f"bridge.cuda.{name}"), which may be any module that begins so. Of a package that imports
its names when they are first used (`_LAZY`), a module depends on those names alone that it uses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.places import ROOT

_FOLDERS = {"bridge.cuda": "cuda"}  # packages that are not where their names say
_TOP = ("bridge", "scripts", "tests")
_LAZY = re.compile("_LAZY(_MODULES)?")


def closure(module: str) -> frozenset[Path]:
    """The files of a module, by its dotted name, and of all that it may import. Raises ValueError if it is not ours."""
    if file_of(module) is None:
        raise ValueError(f"{module} is no module of {', '.join(_TOP)}")
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= imported(name) - found
    return frozenset(file for name in found if (file := file_of(name)) is not None)


@cache
def file_of(module: str) -> Path | None:
    """The source of a module; None if it is none of ours."""
    if module.partition(".")[0] not in _TOP:  # scripts import each other as from their own folder
        own = (ROOT / "scripts" / module.partition(".")[0]).with_suffix(".py")
        return file_of(f"scripts.{module}") if own.is_file() or own.with_suffix("").is_dir() else None
    for package, folder in _FOLDERS.items():
        if module == package or module.startswith(f"{package}."):
            path = ROOT / folder / module[len(package) + 1 :].replace(".", "/")
            break
    else:
        path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _modules() -> frozenset[str]:
    """All modules of ours."""
    folders = {**{name: name for name in _TOP}, **_FOLDERS}
    return frozenset(
        ".".join([package, *file.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__")
        for package, folder in folders.items()
        for file in (ROOT / folder).rglob("*.py")
    )


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of ours that a module may import itself, and the packages they are in."""
    file = file_of(module)
    assert file is not None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = set(_named(ast.parse(file.read_bytes()), package))
    names |= {".".join(name.split(".")[:i]) for name in {module, *names} for i in range(1, name.count(".") + 1)}
    return frozenset(name for name in names if file_of(name) is not None)


def _named(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that code names, of ours or not."""
    nodes = _walk(tree)
    packages = {}  # what a name stands for
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                packages |= {alias.asname: alias.name} if alias.asname else {alias.name.split(".")[0]: None}
        elif isinstance(node, ast.ImportFrom):
            levels = package.split(".")
            base = ".".join([*levels[: len(levels) - node.level + 1], *filter(None, [node.module])])
            source = base if node.level else str(node.module)
            yield source
            for alias in node.names:
                place = _place(source, alias.name)
                yield place
                packages[alias.asname or alias.name] = place
    for node in nodes:
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) is not None:
            first, *rest = chain
            if first in packages:
                yield _reach(packages[first] or first, rest)
        elif isinstance(node, ast.JoinedStr) and isinstance(start := node.values[0], ast.Constant):
            if re.match(rf"({'|'.join(_TOP)})\.", str(start.value)):
                yield from (name for name in _modules() if name.startswith(str(start.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _in_string(node.value, package)


def _walk(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those of lazy names, of the function that imports them, and of what only type checkers read."""
    nodes = [tree]
    for node in nodes:  # which grows
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.Assign) and _is_lazy(child)
            unread = isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
            if not lazy and not unread and not (isinstance(child, ast.FunctionDef) and child.name == "__getattr__"):
                nodes.append(child)
    return nodes


def _chain(node: ast.expr) -> list[str] | None:
    """["a", "b", "c"] of a.b.c."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = _chain(node.value) if isinstance(node, ast.Attribute) else None
    return [*before, node.attr] if before is not None else None


def _reach(module: str, names: list[str]) -> str:
    """The last module on the way from one by attributes."""
    for name in names:
        if file_of(module) is None or (inner := _place(module, name)) == module:
            break
        module = inner
    return module


@cache
def _lazy(package: str) -> dict[str, str]:
    """The modules of a package's lazy names."""
    file = file_of(package)
    if file is None or file.name != "__init__.py":
        return {}
    found: dict[str, str] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and _is_lazy(node):
            found |= ast.literal_eval(node.value)
    return {name: where if where.startswith("bridge.") else f"{package}.{where}" for name, where in found.items()}


def _place(module: str, name: str) -> str:
    """Where a name of a module comes from: a module in it, that of a lazy name, or itself."""
    inner = f"{module}.{name}"
    return inner if file_of(inner) is not None else _lazy(module).get(name, module)


def _in_string(text: str, package: str) -> Iterator[str]:
    """Modules that a string names, or imports, if it is a program."""
    if re.fullmatch(rf"({'|'.join(_TOP)})(\.\w+)+", text):
        first, *rest = text.split(".")
        yield _reach(first, rest)
    elif "import " in text:
        try:
            yield from _named(ast.parse(text), package)
        except SyntaxError:
            return


def _is_lazy(node: ast.Assign) -> bool:
    return isinstance(name := node.targets[0], ast.Name) and _LAZY.fullmatch(name.id) is not None
