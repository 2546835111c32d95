"""What editors and type checkers see of the public names: their real types, and each mistake in a call."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import bridge
from bridge.checkpoint.write.writer import CheckpointWriter, WriterKeywords
from bridge.cli.files import quantize as command
from bridge.conversion.planning.options import ConvertKeywords, ConvertOptions, FileKeywords, PlanKeywords, PlanOptions
from bridge.runtime.sampling import Sampling, SamplingKeywords
from tests.conftest import PATIENCE, ROOT

LAZY = ["bridge", "bridge.nn", "bridge.quantize"]


def imports_for_checkers(package: str) -> dict[str, str]:
    """The names that a package imports for type checkers, and where from."""
    tree = ast.parse(Path(str(importlib.import_module(package).__file__)).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    froms = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    assert len(froms) == len(block.body)
    return {alias.asname or alias.name: str(n.module) for n in froms for alias in n.names}


@pytest.mark.parametrize("name", LAZY)
def test_names_that_are_imported_late_are_those_that_type_checkers_and_dir_see(name: str) -> None:
    package: Any = importlib.import_module(name)
    late = {n: where if "." in where else f"{name}.{where}" for n, where in package._LAZY.items()}
    late |= dict.fromkeys(getattr(package, "_LAZY_MODULES", ()), name)
    assert imports_for_checkers(name) == late
    assert {n for n in package.__all__ if not n.startswith("__")} == late.keys()
    assert dir(package) == sorted(package.__all__)
    named = set(re.findall(r"^    (?:bridge\.)?(\w+)\(", package.__doc__, re.MULTILINE))
    assert named <= late.keys()


def test_every_function_is_in_the_first_lines_that_help_shows() -> None:
    functions = {name for name in bridge._LAZY if inspect.isfunction(getattr(bridge, name))}
    assert functions <= set(re.findall(r"^    bridge\.(\w+)\(", str(bridge.__doc__), re.MULTILINE))


@pytest.mark.parametrize("package", ["bridge.runtime", "bridge.trellis"])
def test_a_package_that_imports_its_names_at_once_lists_them(package: str) -> None:
    module: Any = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, bridge; print(*sorted(name for name in sys.modules if name.startswith('bridge')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bridge"]


@pytest.mark.parametrize(
    ("keywords", "options"),
    [(SamplingKeywords, Sampling), (PlanKeywords, PlanOptions), (ConvertKeywords, ConvertOptions)],
)
def test_keywords_of_functions_are_the_fields_of_their_options(keywords: type, options: type) -> None:
    fields = {field.name for field in dataclasses.fields(options)}
    hints = {name: hint for name, hint in get_type_hints(options).items() if name in fields}
    assert get_type_hints(keywords) == hints


def test_keywords_of_the_walk_through_a_model_are_its_fields() -> None:
    pytest.importorskip("torch")
    from bridge.quantize.run.walk import Walk, WalkKeywords

    tokens, quantizer, *others = get_type_hints(Walk)
    assert (tokens, quantizer) == ("tokens", "quantizer")
    assert get_type_hints(WalkKeywords) == {name: get_type_hints(Walk)[name] for name in others}


def test_keywords_of_a_checkpoint_are_its_writers() -> None:
    parameters = inspect.signature(CheckpointWriter).parameters.values()
    hints = get_type_hints(CheckpointWriter.__init__)
    assert get_type_hints(WriterKeywords) == {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_quantize_gguf_takes_the_options_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    asked = {action.dest for action in commands.choices["quantize"]._actions}
    taken = {*inspect.signature(bridge.quantize_gguf).parameters, *get_type_hints(FileKeywords)}
    fields = {field.name for field in dataclasses.fields(ConvertOptions)}
    assert taken & fields - {"calibrate", "budget"} == asked & fields


# --- type checkers ---

# comments say what a type checker finds: the type of an expression, or that there is a mistake
PROGRAM = """
import bridge
from bridge.quantize import gptq
from bridge.runtime.replies.batch import Generation

model = bridge.Model.load("model.gguf", context=512)
reveal_type(model)  # Model
reveal_type(model.generate("hi", temperature=0, schema={"type": "object"}))  # Iterator[str]
reveal_type(model.generate_tokens([1, 2], 8, seed=1))  # Iterator[int]
reveal_type(model.generate_batch(["hi"], top_k=1))  # list[str]
reveal_type(model.chat([{"role": "user", "content": "hi"}], stop="end"))  # Iterator[str]
reveal_type(next(model.generate_scored("hi")).logprob)  # float
reveal_type(bridge.convert("folder", "model.gguf", type="Q4_K", tensor_types={"ffn": "Q6_K"}))  # Report
reveal_type(bridge.convert("folder", calibrate=bridge.Calibration("text.txt", offload="there")))  # Report
reveal_type(bridge.quantize_gguf("folder", "q4.gguf", "Q4_K", calibrate="text.txt", force=True))  # Report
reveal_type(bridge.verify("model.gguf", "folder").table())  # str
reveal_type(bridge.open_gguf("model.gguf")["output.weight"])  # QuantTensor
reveal_type(bridge.open_checkpoint("folder"))  # Checkpoint
reveal_type(bridge.Budget(size=1 << 30))  # Budget
with model.batch() as batch:
    reveal_type(batch.add("hi", logprobs=1, top_p=0.5))  # Generation
model.generate("hi", tempreature=0)  # mistake
model.generate("hi", temperature="0")  # mistake
model.generate(5)  # mistake
model.chat([{"role": "user", "content": "hi"}], stopp="end")  # mistake
model.generate_batch(["hi"], top_k="1")  # mistake
model.generate_tokens("hi", regexp="a")  # mistake
model.generate_scored("hi", logprob=1)  # mistake
batch.add("hi", sed=1)  # mistake
bridge.Model.load("model.gguf", contxt=1)  # mistake
bridge.convert("folder", tipe="Q4_K")  # mistake
bridge.convert("folder", threads="2")  # mistake
bridge.convert("folder", calibrate="text.txt")  # mistake
bridge.quantize_gguf("folder", calibrat="text.txt")  # mistake
bridge.quantize_gguf("folder", plan="plan.json")  # mistake
bridge.Calibration(sample=1)  # mistake
bridge.convrt("folder")  # mistake
bridge.nn.replace_linear(None, "model.gguf")  # mistake
bridge.nn.replace_linears(None, "model.gguf", precison="f32")  # mistake
bridge.quantize.gptk(None, [])  # mistake
gptq(None, [], bit=4)  # mistake
"""


def expected() -> tuple[dict[int, str], set[int]]:
    """The types that the program's comments name, by their lines, and the lines with mistakes."""
    comments = {n: line.rpartition("  # ")[2] for n, line in enumerate(PROGRAM.splitlines(), 1) if "  # " in line}
    mistakes = {number for number, comment in comments.items() if comment == "mistake"}
    return {number: comment for number, comment in comments.items() if number not in mistakes}, mistakes


def test_mypy_sees_the_types_and_every_mistake_of_a_program(tmp_path: Path) -> None:
    """With this project's settings, whose cache `make lint` fills."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--no-pretty", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    lines = re.findall(r"program\.py:(\d+): (\w+): (.*)", done.stdout)
    assert lines, done.stdout + done.stderr
    types = {int(n): said for n, kind, said in lines if kind == "note" and said.startswith("Revealed type is ")}
    shown = {n: re.sub(r"(\w+\.)+", "", said.partition('"')[2].rstrip('"')) for n, said in types.items()}
    assert (shown, {int(n) for n, kind, _ in lines if kind == "error"}) == expected()


def pyright(folder: Path) -> tuple[dict[str, dict[int, str]], dict[str, dict[int, str]]]:
    """What pyright finds in a folder's programs: types that are revealed and errors, by file and line."""
    pytest.importorskip("pyright")
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    types: dict[str, dict[int, str]] = defaultdict(dict)
    errors: dict[str, dict[int, str]] = defaultdict(dict)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        name, line, said = Path(found["file"]).name, found["range"]["start"]["line"] + 1, found["message"]
        if found["severity"] == "information":
            types[name][line] = re.sub(r'(?s).* is "(.*)"', r"\1", said)
        else:
            errors[name][line] = said
    return types, errors


class Revealed(ast.NodeTransformer):
    """A program with `reveal_type` around each attribute, item and call of what comes from `bridge`."""

    def __init__(self, tree: ast.Module) -> None:
        self.ours = {"bridge"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bridge"):
                self.ours |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and self._is_ours(node.value):
                self.ours |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.withitem) and self._is_ours(node.context_expr):
                self.ours |= {node.optional_vars.id} if isinstance(node.optional_vars, ast.Name) else set()

    def _is_ours(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.ours
        inner = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
        return isinstance(node, ast.Call | ast.Attribute | ast.Subscript) and self._is_ours(inner)

    def visit(self, node: ast.AST) -> Any:
        reads = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if isinstance(node, ast.Call | ast.Attribute | ast.Subscript) and reads and self._is_ours(node):
            return ast.Call(ast.Name("reveal_type", ast.Load()), [node], [])
        return self.generic_visit(node)


def revealed(file: Path) -> str:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return ast.unparse(ast.fix_missing_locations(Revealed(tree).visit(tree)))


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# of which pyright reads three thousand files
WITH_TRANSFORMERS = [file for file in EXAMPLES if "transformers" in file.read_text(encoding="utf-8")]


def test_pyright_sees_the_types_and_every_mistake_of_a_program_and_none_in_examples(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    examples = [file for file in EXAMPLES if file not in WITH_TRANSFORMERS]
    for file in examples:
        (tmp_path / file.name).write_text(revealed(file))
    types, errors = pyright(tmp_path)
    assert (types.pop("program.py"), set(errors.pop("program.py"))) == expected()
    check_examples(examples, types, errors)


@pytest.mark.exhaustive
def test_pyright_sees_types_and_no_mistake_in_examples_with_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for file in WITH_TRANSFORMERS:
        (tmp_path / file.name).write_text(revealed(file))
    check_examples(WITH_TRANSFORMERS, *pyright(tmp_path))


def check_examples(examples: list[Path], types: dict[str, dict[int, str]], errors: dict[str, dict[int, str]]) -> None:
    assert errors == {}
    assert types.keys() == {file.name for file in examples}
    assert [(name, line) for name, seen in types.items() for line in seen if seen[line] in ("Any", "Unknown")] == []
