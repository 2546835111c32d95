"""What models compute between products as AArch64 machine code under qemu; `make test-arm` runs it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.runtime.cpu.ops.program import Program
from bridge.runtime.decoder.recurrent import RecurrentBuffers
from tests.runtime.test_arm_code import TOOLS
from tests.runtime.test_families import TOKENS, converted
from tests.runtime.test_recurrent import SHAPES, Cache, plain_layer, random_layer
from tests.support.arm_program import run_on_arm

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_with_a_state_computes_its_formulas(shape: str, tmp_path: Path) -> None:
    c, n = SHAPES[shape], 11
    layer, inputs = random_layer(c, n)
    cache: Any = Cache(c)
    buffers, program = RecurrentBuffers(c, [layer], n, [cache], 1e-5), Program(n)
    buffers.add(SimpleNamespace(program=program), layer, 0)
    for own, values in zip(buffers.rows[0].inputs, inputs, strict=True):
        own[:] = values
    buffers.begin([cache], n)
    run_on_arm(program, tmp_path, buffers, layer, cache)
    np.testing.assert_allclose(buffers.out, plain_layer(c, layer, inputs, 1e-5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kv"), [("deepseek3", "f16"), ("deepseek3", "q8_0"), ("gpt-oss", "f16")])
def test_a_model_has_the_logits_of_this_machine(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products alone are made here: attention on latent vectors and of heads, norms, rotations, experts' routers."""
    path = converted(name, tmp_path)[1]
    here, model = (bridge.Model.load(path, precision="f32", kv=kv, context=64) for _ in range(2))
    logits = here.logits(TOKENS[:20])
    folders = (tmp_path / str(i) for i in itertools.count())

    def run(program: Program, at_once: int = 0) -> None:
        folder = next(folders)
        folder.mkdir()
        run_on_arm(program, folder, model._decoder)

    monkeypatch.setattr(Program, "run", run)
    np.testing.assert_allclose(model.logits(TOKENS[:20]), logits, atol=1e-4 * np.abs(logits).max())
    assert next(folders) != tmp_path / "0"
