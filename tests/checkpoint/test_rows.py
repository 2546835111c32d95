"""Rows read alone are those of the whole module, in every format; MLX's codes of other rows stay on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.store import Store
from tests.conftest import CHECKPOINT, ROOT
from tests.support.encode import write_awq
from tests.support.encode_compressed import write_packed
from tests.support.encode_formats import write_marlin
from tests.support.encode_legacy import config_folder, write_legacy

fetch = Store._fetch
DATA = ROOT / "tests" / "data"
MODULES = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
SOME = np.array([0, 1, 5, 9, 30])


def check(checkpoint: Checkpoint) -> None:
    for name, info in list(checkpoint.modules.items())[:4]:
        rows = SOME[: np.searchsorted(SOME, info.shape[0])]
        found, whole = checkpoint.read_module(name, rows), checkpoint.read_module(name)
        assert found.bias is None
        assert found.codes.shape == (len(rows), info.shape[1])
        expected = whole.take_rows(rows)
        for field in ("codes", "scales", "zeros"):
            assert np.array_equal(getattr(found, field), getattr(expected, field)), (name, field)
        assert np.array_equal(found.groups(), expected.groups())


@pytest.mark.parametrize("folder", [DATA / "mlx", DATA / "mlx-moe", DATA / "hqq", CHECKPOINT], ids=lambda f: f.name)
def test_some_rows_are_those_of_the_module(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        check(checkpoint)


@pytest.mark.parametrize(
    "write", [write_awq, partial(write_packed, bits=3), write_marlin], ids=["awq", "packed", "marlin"]
)
def test_so_they_are_as_other_tools_store_them(write, small_model: Path, tmp_path: Path) -> None:
    write(tmp_path, small_model)
    with open_checkpoint(tmp_path) as checkpoint:
        check(checkpoint)


@pytest.mark.parametrize(("dialect", "group_size"), [("float-zeros", -1), ("float-groups", 128)])
def test_so_they_are_with_float_zero_points(dialect: str, group_size: int, tmp_path: Path) -> None:
    weights = {f"{n}.weight": np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32) for n in MODULES}
    write_legacy(tmp_path / "model.pt", weights, dialect, 4, group_size)
    with open_checkpoint(tmp_path / "model.pt", config_folder(tmp_path / "config", CHECKPOINT)) as checkpoint:
        check(checkpoint)


@pytest.mark.parametrize("folder", ["mlx", "mlx-moe"])
def test_no_codes_but_those_of_the_rows_are_read_from_mlx(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(DATA / folder) as checkpoint:
        read: list[str] = []
        monkeypatch.setattr(Store, "_fetch", lambda self, info, *a: read.append(info.name) or fetch(self, info, *a))
        for name in checkpoint.modules:
            checkpoint.read_module(name, np.array([1, 3]))
    assert any(name.endswith(".scales") for name in read)
    assert not [name for name in read if name.endswith(".weight")]
