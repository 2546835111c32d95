"""Kernels are written with loops over rows, columns and words; here these loops vanish before Numba sees them.

An array that a thread indexes with a loop variable lives in slow local memory, unless every loop around it is
unrolled, and nothing promises that the compiler will. So `expand` rewrites the source of a function:

    for r in unroll(ROWS): ...      the body once for each r, r a constant; several arguments are those of range
    total = registers()             a family of variables: total[r, c] becomes total_0_1
    ROWS, and other constants       their values
    gathered(total, n)              the tuple of total[0] ... total[n - 1]
    TABLE[r], parts[r](x)           an element of a tuple that is a constant: a number, or a function to call
    if MINS: ... else: ...          one branch, where the condition is constant; so is a conditional expression

What is left is plain Python without any of this.
"""

import ast
import inspect
import pickle
import textwrap
import types
from collections.abc import Callable
from functools import cache
from typing import Any

_DISPLAY = 30  # of a longer tuple CPython makes a list first, which Numba refuses


class _Expander(ast.NodeTransformer):
    """Rewrites one function, given the values of names."""

    def __init__(self, constants: dict[str, Any]):
        self.constants = constants
        self.families: set[str] = set()
        self.functions: dict[str, Any] = {}

    def _folded(self, node: ast.expr) -> ast.expr:
        """A constant where all parts are."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Call | ast.Subscript | ast.Attribute):
                return node
        value = eval(compile(ast.Expression(ast.fix_missing_locations(node)), "<constant>", "eval"))
        return ast.copy_location(ast.Constant(value), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.constants.get(node.id)
        if isinstance(node.ctx, ast.Load) and isinstance(value, bool | int | float | str):
            return ast.copy_location(ast.Constant(value), node)
        return node

    def _operation(self, node: ast.expr) -> ast.expr:
        return self._folded(self.generic_visit(node))  # type: ignore[arg-type]

    visit_BinOp = visit_UnaryOp = visit_Compare = visit_BoolOp = _operation

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self.visit(node.body if test.value else node.orelse)
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    def visit_If(self, node: ast.If) -> Any:
        test = self.visit(node.test)
        if isinstance(test, ast.Constant):
            return self._block(node.body if test.value else node.orelse)
        body = self._block(node.body) or [ast.Pass()]
        return ast.copy_location(ast.If(test, body, self._block(node.orelse)), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "gathered":
            family, count = node.args
            assert isinstance(family, ast.Name)
            names: list[ast.expr] = [
                ast.Name(f"{family.id}_{i}", ast.Load()) for i in range(ast.literal_eval(self.visit(count)))
            ]
            parts = [ast.Tuple(names[i : i + _DISPLAY], ast.Load()) for i in range(0, len(names), _DISPLAY)]
            joined: ast.expr = parts[0]
            for part in parts[1:]:
                joined = ast.BinOp(joined, ast.Add(), part)
            return ast.copy_location(joined, node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if not isinstance(node.value, ast.Name):
            return node
        table = self.constants.get(node.value.id)
        if isinstance(table, tuple) and isinstance(node.slice, ast.Constant):
            index: Any = node.slice.value
            chosen = table[index]
            if isinstance(chosen, bool | int | float):
                return ast.copy_location(ast.Constant(chosen), node)
            name = f"{node.value.id}_{index}"
            self.functions[name] = chosen
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        if node.value.id in self.families:
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if not all(isinstance(index, ast.Constant) for index in indices):
                raise SyntaxError(f"{node.value.id}: index {ast.unparse(node.slice)} is not constant")
            name = "_".join([node.value.id, *(str(index.value) for index in indices)])  # type: ignore[attr-defined]
            return ast.copy_location(ast.Name(name, node.ctx), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "registers":
            assert isinstance(node.targets[0], ast.Name)
            self.families.add(node.targets[0].id)
            return None
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> Any:
        loop = node.iter
        if not (isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id == "unroll"):
            return self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        bounds = [ast.literal_eval(self.visit(argument)) for argument in loop.args]
        outer = self.constants.get(node.target.id)
        statements: list[ast.stmt] = []
        body = pickle.dumps(node.body)  # copies several times as fast as copy.deepcopy
        for value in range(*bounds):
            self.constants[node.target.id] = value
            statements += self._block(pickle.loads(body))
        self.constants[node.target.id] = outer
        return statements

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited: list[ast.stmt] = []
        for statement in statements:
            result = self.visit(statement)
            visited += result if isinstance(result, list) else [] if result is None else [result]
        return visited


def expand(function: Callable[..., Any], suffix: str, without: tuple[str, ...] = (), **scope: Any) -> Any:
    """The function with its unrolled loops written out, named `function_suffix`, without some of its parameters.

    `scope` gives names values: numbers become constants, functions are called by that name. The suffix
    tells profilers and errors what it is.
    """
    assert isinstance(function, types.FunctionType)
    definition = _definition(function)
    module = {**function.__globals__, **scope}
    definition.args.args = [argument for argument in definition.args.args if argument.arg not in without]
    parameters = {argument.arg for argument in definition.args.args}
    constants = {name: value for name, value in module.items() if name not in parameters}
    expander = _Expander(constants)
    definition.name = f"{function.__name__}_{suffix}"
    definition.body = expander._block(definition.body)
    tree = ast.fix_missing_locations(ast.Module([definition], []))
    code = compile(tree, inspect.getsourcefile(function) or "", "exec")
    (body,) = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    expanded = types.FunctionType(body, module | expander.functions, definition.name)
    expanded.__module__ = function.__module__
    expanded.__qualname__ = definition.name
    expanded.source = ast.unparse(definition)  # type: ignore[attr-defined]
    return expanded


@cache
def source_of(function: Any) -> str:
    """The source of a function, or of what `expand` made of it, without docstring, annotations and comments.

    It is the same for every version of Python, other than bytecode.
    """
    return function.source if hasattr(function, "source") else ast.unparse(_definition(function))


def _definition(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function as it was written, without decorators, docstring and annotations."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.body = definition.body[ast.get_docstring(definition) is not None :]
    definition.decorator_list = []
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    return definition


def unroll(*bounds: int) -> range:
    """A loop that is written out; see above."""
    raise AssertionError("a kernel that was not expanded")


def registers() -> Any:
    """A family of variables; see above."""
    raise AssertionError("a kernel that was not expanded")


def gathered(family: Any, count: int) -> Any:
    """A tuple of a family's variables; see above."""
    raise AssertionError("a kernel that was not expanded")
