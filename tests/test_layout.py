"""The shape of the project: which part may import which, and what must never stand in cuda/."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from bridge.gguf_file.architectures import ARCHITECTURES
from tests.conftest import ROOT

# a package -> the packages of ours that it may import; errors is free to all but blocks
ALLOWED = {
    "errors": set(),
    "blocks": set(),
    "system": {"errors"},
    "gguf_file": {"blocks", "errors", "system"},
    "trellis": {"errors", "system"},
    "checkpoint": {"blocks", "errors", "system", "trellis"},
    "runtime": {"blocks", "errors", "gguf_file", "system"},
    "models": {"blocks", "checkpoint", "errors", "gguf_file", "runtime", "system"},
    "encode": {"blocks", "checkpoint", "errors", "system"},
    "nn": {"checkpoint", "conversion", "errors", "gguf_file", "models", "runtime", "system", "trellis"},
    "transformers": {"nn"},
    "lm_eval": {"nn"},
    "cuda": {"blocks", "errors", "gguf_file", "runtime", "system", "trellis"},
    "quantize": {"blocks", "checkpoint", "encode", "errors", "gguf_file", "runtime", "system"},
    "conversion": {
        "blocks", "checkpoint", "encode", "errors", "gguf_file", "models", "quantize", "runtime", "system",
    },
    "serve": {"errors", "gguf_file", "runtime", "system"},
    "cli": {
        "blocks", "checkpoint", "conversion", "encode", "errors", "gguf_file", "models", "nn", "quantize", "runtime",
        "serve", "system", "trellis",
    },
}  # fmt: skip

# classes and functions on the CPU -> those that do the same on CUDA
TWINS = {
    "bridge/runtime/quant_tensor.py:QuantTensor": "cuda/tensor.py:CudaTensor",
    "bridge/runtime/decoder/decoder.py:Decoder": "cuda/decoder.py:Decoder",
    "bridge/runtime/layers/kv_cache.py:KVCache": "cuda/attention/kv_cache.py:KVCache",
    "bridge/runtime/bench.py:bench": "cuda/bench.py:bench",
    "bridge/trellis/layer.py:TrellisLayer": "cuda/trellis_layer.py:CudaTrellisLayer",
}
# parameters that only one of the two may have, or with another default: the CPU alone has several contexts, CUDA alone
# weights that another decoder has uploaded
ONE_SIDED = {"device", "threads", "cache", "other"}


def imported(module: Path) -> set[str]:
    """The dotted names of ours that a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names |= imported_by(node)
    return {name for name in names if name.startswith("bridge.")}


def imported_by(node: ast.AST) -> set[str]:
    """The dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {f"{node.module}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return {name.value for name in node.args if isinstance(name, ast.Constant)}
    return set()


@cache
def module_names() -> dict[str, Path]:
    """Our modules by dotted name; those of cuda/ as bridge.cuda's."""
    files = [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "cuda").rglob("*.py")]
    names = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        inside = parts if parts[0] == "bridge" else ("bridge", *parts)
        names[".".join(part for part in inside if part != "__init__")] = file
    return names


@cache
def module_arrows() -> dict[str, set[str]]:
    """What each of our modules imports of ours: at its top, in functions and for type checkers alike."""
    names = module_names()
    return {
        name: {found for i in imported(file) if (found := i if i in names else i.rpartition(".")[0]) in names} - {name}
        for name, file in names.items()
    }


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for node in arrows:
        found: set[str] = set()
        ahead = [node]
        while ahead:
            new = arrows[ahead.pop()] - found
            found |= new
            ahead += new
        reached[node] = found
    found_circles = {frozenset(b for b in reached[a] if a in reached[b]) for a in arrows if a in reached[a]}
    return sorted(map(set, found_circles), key=sorted)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_no_modules_import_each_other():
    assert circles(module_arrows()) == []


def test_no_folders_import_each_other():
    """A folder is what stands right in bridge/, or a module that stands there by itself."""
    arrows: dict[str, set[str]] = {}
    for module, others in module_arrows().items():
        folder = ".".join(module.split(".")[:2])
        arrows.setdefault(folder, set()).update({".".join(other.split(".")[:2]) for other in others} - {folder})
    assert circles(arrows) == []


@pytest.mark.parametrize("package", ALLOWED)
def test_each_package_imports_what_it_may(package):
    for module, others in module_arrows().items():
        if module.split(".")[1:2] == [package]:
            packages = {other.split(".")[1] for other in others if other != "bridge"}
            assert packages - {package} <= ALLOWED[package], module


def test_every_package_has_its_imports_listed():
    assert {module.split(".")[1] for module in module_names() if "." in module} == set(ALLOWED)


def test_no_folder_has_more_than_fifteen_modules():
    """But for those with one module for each family, or for each format of checkpoints."""
    folders = Counter(
        file.parent.relative_to(ROOT).as_posix()
        for top in ("bridge", "cuda", "scripts")
        for file in (ROOT / top).rglob("*.py")
        if file.name != "__init__.py"
    )
    crowded = {folder for folder, modules in folders.items() if modules > 15}
    assert crowded == {"bridge/checkpoint/formats", "bridge/models/families"}


def test_the_root_has_no_loose_modules():
    """But for two that users import by these names."""
    loose = {file.name for file in (ROOT / "bridge").glob("*.py")}
    assert loose == {"__init__.py", "errors.py", "lm_eval.py", "transformers.py"}


def test_scripts_import_no_tests():
    for module in sorted((ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            assert not {name for name in imported_by(node) if name.split(".")[0] == "tests"}, module.name


def test_nothing_before_the_gpu_is_asked_for_imports_what_runs_on_it():
    """At the top of a module, that is: numba-cuda is an extra."""
    for module in sorted((ROOT / "bridge").rglob("*.py")):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not {name for name in imported_by(node) if name.startswith("bridge.cuda")}, module.name


def test_what_runs_a_model_asks_for_no_architecture_by_name():
    """What is true of one stands in gguf_file/architectures.py; names of tokenizers are others, if spelled alike."""
    folders = ("bridge/runtime", "bridge/nn", "cuda")
    of_tokenizers = {"bridge/runtime/tokenizer/__init__.py", "bridge/nn/gguf_quantizer.py"}
    for module in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        named = {value for value in constants if isinstance(value, str) and value.removesuffix(".") in ARCHITECTURES}
        assert not named or module.relative_to(ROOT).as_posix() in of_tokenizers, f"{module}: {named}"


def test_the_kernels_of_the_cpu_know_nothing_of_files_and_tensors():
    for module in sorted((ROOT / "bridge" / "runtime" / "cpu").rglob("*.py")):
        above = {name for name in imported(module) if name.startswith("bridge.runtime.")}
        assert all(name.startswith("bridge.runtime.cpu.") for name in above), f"{module.name}: {above}"


def test_nothing_in_cuda_shadows_nvidias_namespace():
    folder = ROOT / "cuda"
    shadowing = ["__init__.py", "core.py", "core", "pathfinder.py", "pathfinder", "bindings.py", "bindings"]
    assert (folder / "decoder.py").exists()
    assert not [name for name in shadowing if (folder / name).exists()]


def test_nvidias_folder_beside_an_installed_package_is_none_of_ours(tmp_path):
    (tmp_path / "bridge").mkdir()
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    shutil.copyfile(ROOT / "bridge" / "__init__.py", tmp_path / "bridge" / "__init__.py")
    command = [sys.executable, "-c", "import bridge; print(*bridge.__path__)"]
    for root, path in ((tmp_path, [tmp_path / "bridge"]), (ROOT, [ROOT / "bridge", ROOT])):
        environment = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(folder) for folder in path]


def test_every_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    files = [*(ROOT / "bridge").rglob("__init__.py"), *(ROOT / "cuda").rglob("__init__.py")]
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in files} | {"cuda"}
    assert set(settings["packages"]) == {f if f.startswith("bridge") else f"bridge.{f}" for f in folders}
    assert settings["package-dir"]["bridge.cuda"] == "cuda"


def test_every_package_that_a_test_can_do_without_is_installed_for_the_tests():
    """Or that test never runs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = extras["dependencies"] + extras["optional-dependencies"]["test"]
    installed = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in wanted}
    asked = {
        name
        for module in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"importorskip\(\"(\w+)", module.read_text(encoding="utf-8"))
    }
    assert "torch" in asked
    assert asked - set(sys.stdlib_module_names) <= installed


def signatures(place: str) -> dict[str, list[str]]:
    """The parameters, with their defaults, of a function, or of a class's public methods: from the source alone."""
    file, name = place.split(":")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    functions = [n for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef)]
    found = {}
    for f in [node] if isinstance(node, ast.FunctionDef) else functions:
        names = [a.arg for a in f.args.args]
        given = [""] * (len(names) - len(f.args.defaults)) + [f"={ast.unparse(d)}" for d in f.args.defaults]
        kept = [n + d for n, d in zip(names, given, strict=True) if n not in ONE_SIDED]
        if not f.name.startswith("_"):
            found[f.name] = [ast.unparse(d) for d in f.decorator_list] + kept
        elif f.name == "__init__":
            found[f.name] = kept
    return found


@pytest.mark.parametrize("place", TWINS)
def test_a_step_has_the_same_signature_on_the_cpu_and_on_cuda(place):
    own, other = signatures(place), signatures(TWINS[place])
    if other.get("__init__", [])[1:2] == ["tensor"]:
        del other["__init__"]  # made from its twin
    both = own.keys() & other.keys()
    assert both
    assert {name: own[name] for name in both} == {name: other[name] for name in both}
