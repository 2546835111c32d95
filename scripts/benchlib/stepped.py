"""The source of threads' functions as generators that stop before every access to what threads share.

A test follows them in all orders, a model of many cores lets each step take its time.
"""

import __future__

import ast
from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from bridge.system.threads.words import ARGUMENTS

PRIMITIVES = {
    "add", "array_at", "call", "give_way", "lock", "pause", "read", "release", "swap", "unlock", "wait", "wake",
    "write",
}  # fmt: skip
Step = Generator[tuple[Any, ...], Any, Any]  # yields a primitive's name and arguments, and is sent its result


class _Stepped(ast.NodeTransformer):
    """Calls of primitives become `yield name, arguments`, calls of the module's own such functions `yield from`."""

    def __init__(self, functions: set[str]):
        self.functions = functions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in PRIMITIVES:
            return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        return ast.YieldFrom(node) if name in self.functions else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        return node


def stepped(source: str, replaced: Mapping[str, str], functions: set[str]) -> SimpleNamespace:
    """What stands at the top of a module: numbers, and functions, of which those named become generators.

    replaced  text -> what stands there instead; it is there once
    """
    for old, new in replaced.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    tree = ast.parse(source)
    plain = (ast.Assign, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, plain) and not _is_intrinsic(node)]
    names: dict[str, Any] = {"np": np, "ARGUMENTS": ARGUMENTS}
    for node in tree.body:
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        changed = _Stepped(functions).visit(node) if name in functions else node
        if isinstance(changed, ast.FunctionDef):
            changed.decorator_list = []
        module = ast.fix_missing_locations(ast.Module([changed], []))
        try:
            exec(compile(module, "stepped", "exec", __future__.annotations.compiler_flag, dont_inherit=True), names)
        except NameError:  # something that only the module itself can make
            continue
    return SimpleNamespace(**names)


def _is_intrinsic(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("intrinsic" in ast.unparse(d) for d in node.decorator_list)
