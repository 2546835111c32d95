"""The records of the formats that are written: their parts agree, and nothing else in the program knows their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint.files.dtypes import NUMPY
from bridge.checkpoint.formats.fp4 import GROUPS
from bridge.checkpoint.formats.registry import FORMATS, READERS
from bridge.checkpoint.formats.written import Groups, QuantizedLayers
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.conversion.checkpoints.codes_in_format import fp8_in_format
from tests.conftest import ROOT

CODES = [(name, bits) for name, written in FORMATS.items() for bits in written.bits]
FLOATS = [(name, kind) for name, written in FORMATS.items() for kind in written.fp4]
FLOATS_OF_8 = [(name, form) for name, written in FORMATS.items() for form in written.fp8]
KNOW_NAMES = ("bridge/checkpoint/formats", "bridge/checkpoint/labels", "bridge/checkpoint/repack")


@pytest.mark.parametrize(("name", "bits"), CODES)
def test_a_packed_layer_has_the_shapes_that_are_announced(name: str, bits: int) -> None:
    written, rng = FORMATS[name], np.random.default_rng(bits)
    groups = Groups(bits, 32)
    assert written.obstacle(groups, (64, 96)) is None
    codes, scales = rng.integers(0, 1 << bits, (64, 96), np.uint8), np.ones((64, 3), np.float32)
    parts = written.pack(GroupedTensor("layer", bits, codes, scales, scales, 32))
    assert {part: (NUMPY[dtype], shape) for part, (dtype, shape) in written.shapes(groups, (64, 96)).items()} == {
        part: (values.dtype, values.shape) for part, values in parts.items()
    }


@pytest.mark.parametrize(("name", "kind"), FLOATS)
def test_packed_4_bit_floats_have_the_shapes_that_are_announced(name: str, kind: str) -> None:
    size, written = GROUPS[kind], FORMATS[name]
    scales = np.zeros((64, 96 // size), np.uint8)
    parts = written.pack(PackedTensor("layer", 4, np.zeros((64, 12), np.uint32), scales, size, kind=kind))
    shapes = written.shapes(Groups(4, size, True, kind), (64, 96))
    assert {part: shape for part, (_, shape) in shapes.items()} == {part: parts[part].shape for part in shapes}


@pytest.mark.parametrize(("name", "form"), FLOATS_OF_8)
def test_packed_8_bit_floats_have_the_shapes_that_are_announced(name: str, form: str) -> None:
    written, static = FORMATS[name], form.startswith("static ")
    source = PackedTensor("layer", 8, np.zeros((160, 288), np.uint8), np.ones((1, 1), np.float32), 288, kind="FP8")
    only = replace(written, fp8=(form,))
    tensor = fp8_in_format(replace(source, rows=160, input_scale=2.0 if static else None), only)
    assert tensor is not None
    parts = written.pack(tensor)
    groups = Groups(8, tensor.group_size, True, tensor.kind, rows=tensor.rows, static=static)
    assert written.obstacle(groups, (160, 288)) is None
    assert {part: shape for part, (_, shape) in written.shapes(groups, (160, 288)).items()} == {
        part: values.shape for part, values in parts.items()
    }


@pytest.mark.parametrize("name", FORMATS)
def test_labels_name_a_format_that_is_read(name: str) -> None:
    written = FORMATS[name]
    groups = Groups(written.bits[0], 32) if written.bits else Groups(4, 16, True, (*written.fp4, "")[0])
    if not groups.kind:
        groups = Groups(8, 128, True, "FP8", rows=128)
    labels = written.labels(QuantizedLayers({"layer": groups}, ["gate"], True, False, False))
    method = labels["quantization_config"].get("quant_method", "mlx")
    assert method in READERS


def names_tested(module: Path) -> Iterator[str]:
    """The comparisons of a module with a format's name, those with a calibration's method left out."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            sides = [node.func.value, *node.args]
        elif isinstance(node, ast.Dict):
            sides = [key for key in node.keys if key is not None]
        values = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        methods = {getattr(side, "attr", getattr(side, "id", "")) for side in sides}
        fewest = 2 if isinstance(node, ast.Dict) else 1
        if len(values & FORMATS.keys()) >= fewest and "method" not in methods:
            yield f"{module.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_only_readers_labels_and_repack_test_the_names_of_formats() -> None:
    """Anything else asks the format's record."""
    modules = [
        m for m in sorted((ROOT / "bridge").rglob("*.py")) if not str(m.relative_to(ROOT)).startswith(KNOW_NAMES)
    ]
    assert [found for module in modules for found in names_tested(module)] == []
