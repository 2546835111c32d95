"""Stored layers: a run goes on with those that are whole and its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from bridge.errors import BridgeError
from bridge.quantize import Method, groups, superblocks
from bridge.quantize.layer_store import LayerStore, read_tensors, write_tensors
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.solve.hessian import Hessian

JOB: dict[str, Any] = {"options": {"damping": 0.01}, "layers": "abc"}
KINDS = {"blocks": superblocks("Q4_K"), "groups": groups(4, 32, False)}


def quantized(name: str, kind: str, seed: int = 0, rows: tuple[int, int, int] | None = None) -> tuple[Any, ...]:
    """The arguments of `LayerStore.save`."""
    torch.manual_seed(seed)
    hessian = Hessian(name, 256)
    hessian.add(torch.randn(300, 256))
    weight = torch.randn(64, 256)
    span = slice(None) if rows is None else slice(*rows[:2])
    _, done = Method(KINDS[kind], sweeps=0).layer(LayerInput(name, weight[span], hessian, rows=rows))
    return done, weight[span].numpy(), hessian.mean_squares(), hessian.tokens, rows


def rewritten(file: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> None:
    with safe_open(file, "np") as stored:
        metadata = dict(stored.metadata())
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, file, metadata)


def first_key(tensors: dict[str, np.ndarray]) -> str:
    return next(key for key in ("blocks", "codes") if key in tensors)


def other_shape(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
    tensors[first_key(tensors)] = tensors[first_key(tensors)][:, :16]


def fewer_rows(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
    for key in tensors.keys() & {"blocks", "codes", "scales", "zeros"}:
        tensors[key] = tensors[key][:32]


def missing_tensor(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
    del tensors[first_key(tensors)]


def other_dtype(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
    tensors[first_key(tensors)] = tensors[first_key(tensors)].astype(np.float32)


def other_value(tensors: dict[str, np.ndarray], _: dict[str, str]) -> None:
    tensors["errors"] = tensors["errors"] + 1


def other_type(_: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    metadata["layer"] = json.dumps(json.loads(metadata["layer"]) | {"type": "Q8_0"})


def no_record(_: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    metadata.clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change", [other_shape, fewer_rows, missing_tensor, other_dtype, other_value, other_type, no_record]
)
def test_a_file_that_has_changed_is_removed_and_noted(tmp_path: Path, kind: str, change: Any) -> None:
    store = LayerStore(tmp_path / "layers", JOB)
    store.save(*quantized("a", kind))
    store.save(*quantized("b", kind, seed=1))
    expected = store.layers["b"].values()
    rewritten(store.layers["a"].files[0], change)
    again = LayerStore(tmp_path / "layers", JOB)
    assert set(again.layers) == {"b"}
    assert len(again.notes) == 1
    assert "of another run: 1; their layers were quantized again" in again.notes[0]
    np.testing.assert_array_equal(again.layers["b"].values(), expected)
    again.save(*quantized("a", kind))
    assert LayerStore(tmp_path / "layers", JOB).notes == []


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 300, None], ids=["empty", "short", "noise", "cut"])
def test_a_file_that_is_none_is_removed(tmp_path: Path, content: bytes | None) -> None:
    store = LayerStore(tmp_path / "layers", JOB)
    store.save(*quantized("a", "blocks"))
    file = store.layers["a"].files[0]
    file.write_bytes(file.read_bytes()[:-7] if content is None else content)
    assert LayerStore(tmp_path / "layers", JOB).layers == {}
    assert not file.exists()


def test_files_of_another_run_or_under_another_name_are_not_taken(tmp_path: Path) -> None:
    store, other = LayerStore(tmp_path / "layers", JOB), LayerStore(tmp_path / "other", JOB | {"layers": "xyz"})
    store.save(*quantized("a", "blocks"))
    store.save(*quantized("b", "blocks", seed=1))
    other.save(*quantized("c", "blocks", seed=2))
    shutil.copyfile(other.layers["c"].files[0], store.folder / other.layers["c"].files[0].name)
    shutil.copyfile(store.layers["a"].files[0], store.layers["b"].files[0])
    again = LayerStore(tmp_path / "layers", JOB)
    assert set(again.layers) == {"a"}
    assert len(list(again.folder.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_were_stored_apart_are_one_layer_once_all_are_there(tmp_path: Path, kind: str) -> None:
    store = LayerStore(tmp_path / "layers", JOB)
    store.save(*quantized("head", kind, rows=(32, 64, 64)))
    assert store.layers == {}
    again = LayerStore(tmp_path / "layers", JOB)
    assert again.missing("head", 64, 32) == [slice(0, 32)]
    again.save(*quantized("head", kind, rows=(0, 32, 64)))
    assert again.missing("head", 64, 32) == []
    for layer in (again.layers["head"], LayerStore(tmp_path / "layers", JOB).layers["head"]):
        parts = [quantized("head", kind, rows=rows)[0] for rows in ((0, 32, 64), (32, 64, 64))]
        np.testing.assert_array_equal(layer.values(), np.concatenate([part.values().numpy() for part in parts]))
        assert layer.errors().shape == (2, 64)
        assert layer.error == pytest.approx(np.mean([part.error for part in parts]))
        if kind == "groups":
            assert layer.tensor().shape == (64, 256)


def test_what_a_stopped_run_left_does_not_stop_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "layers"
    folder.mkdir()  # stopped before the job was written
    (folder / ".job.json.x.unfinished").mkdir()
    LayerStore(folder, JOB).save(*quantized("a", "blocks"))
    (folder / f"{24 * '0'}.99.unfinished").write_bytes(b"half")
    assert set(LayerStore(folder, JOB).layers) == {"a"}
    assert not (folder / f"{24 * '0'}.99.unfinished").exists()
    (folder / "job.json").write_text('{"opt')
    store = LayerStore(folder, JOB, force=True)
    assert store.layers == {}


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_tensors: Any, file: Path, _metadata: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("bridge.quantize.layer_store.save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "a.safetensors", "a", {"x": np.ones(3)}, {})
    assert list(tmp_path.iterdir()) == []


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"x": np.arange(6.0).reshape(2, 3).T, "empty": np.empty((0, 4), np.int16)}
    write_tensors(tmp_path / "a.scales", "a", tensors, {"folds": "[]"})
    found = read_tensors(tmp_path / "a.scales")
    assert found is not None
    assert found[1] == {"folds": "[]"}
    for key, values in tensors.items():
        np.testing.assert_array_equal(found[0][key], values)


def test_a_folder_without_a_finished_layer_serves_any_run(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "layers"
    LayerStore(folder, JOB)
    (folder / f"{'0' * 24}.scales").write_bytes(b"of the other run")
    (folder / f"{'0' * 24}.123.unfinished").write_bytes(b"half a layer")
    other = LayerStore(folder, JOB | {"layers": "xyz"})
    assert [file.name for file in folder.iterdir()] == ["job.json"]
    other.save(*quantized("a", "blocks"))
    with pytest.raises(BridgeError, match="holds layers of a run with other options"):
        LayerStore(folder, JOB)
    (folder / "notes.safetensors").write_bytes(b"somebody's")
    LayerStore(folder, JOB | {"layers": "xyz"}).remove()
    assert [file.name for file in folder.iterdir()] == ["notes.safetensors"]


def test_removing_the_layers_removes_the_folders_that_were_made_for_them(tmp_path: Path) -> None:
    LayerStore(tmp_path / "deep" / "er" / "layers", JOB).remove()
    assert not list(tmp_path.iterdir())
