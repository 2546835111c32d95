"""Every format that is read, in every format that is written: the source's weights, or as near as is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.registry import FORMATS, READERS
from bridge.conversion.checkpoints.repack import Repacked
from bridge.conversion.checkpoints.write_layers import ExportedTensor
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.support import repack_table
from tests.support.encode import awq_tensors, gptq_tensors, quantize

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")

DOCS = ROOT / "docs/both-directions.md"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    folders = {name: root / str(number) for number, name in enumerate(repack_table.SOURCES)}
    for name, folder in folders.items():
        repack_table.SOURCES[name](folder)
    return folders


def weights(folder: Path) -> dict[str, np.ndarray]:
    """float32 of all tensors, modules by their weight's name."""
    with open_checkpoint(folder) as ckpt:
        floats = {name: ckpt.read_float(name) for name in ckpt.tensors}
        return floats | {f"{module}.weight": ckpt.read_module(module).dequantize() for module in ckpt.modules}


def assert_as_reported(t: ExportedTensor, before: np.ndarray, after: np.ndarray, dtype: str) -> None:
    signal = float(np.square(before, dtype=np.float64).sum())
    error = float(np.square(after - before, dtype=np.float64).sum()) / (signal or 1)
    if t.how == "exact":
        assert np.array_equal(after, before), t
    elif t.how == "floats":
        assert error <= (0 if dtype == "F32" else 2**-22), t
    else:
        assert error == pytest.approx(t.nmse, rel=1e-3, abs=1e-14), t
        assert t.how != "all codes" or error < 1e-6
        assert t.how != "rounded" or t.bits == 8 or t.share is None or t.share <= REQUANTIZED_LIMIT


@pytest.mark.parametrize("name", repack_table.SOURCES)
def test_weights_are_those_of_the_source_or_as_near_as_reported_and_come_back_where_they_are_exact(
    tmp_path, sources, name
):
    before = weights(sources[name])
    own = format_of(sources[name])
    outcomes = repack_table.outcomes(sources[name], tmp_path)
    for target, done in outcomes.items():
        if done is None:
            assert not (tmp_path / target).exists()
            continue
        after = weights(tmp_path / target)
        assert after.keys() == before.keys()
        for t in done.tensors:
            assert_as_reported(t, before[t.name], after[t.name], "F16" if FORMATS[target].dtype else "F32")
        itself = outcomes.get(own or "")
        if (
            itself
            and repack_table.words(done) == repack_table.words(itself) == "exact"
            and kinds(done) == kinds(itself)
        ):
            bridge.repack(tmp_path / target, tmp_path / f"{target} and back", own, dtype="F32")
            back = weights(tmp_path / f"{target} and back")
            for t in done.tensors:
                assert np.array_equal(back[t.name], before[t.name]), (target, own, t)


@pytest.mark.parametrize("bits", [None, 2])
def test_clamped_zero_points_count_in_the_error_and_are_told(tmp_path, bits):
    """Codes of weights that are all positive, whose zero points are 0, keep their greatest code."""
    q = quantize(np.abs(repack_table.weight()), 4, 64, False)
    assert not q.zeros.any()
    label = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    source = repack_table.save(tmp_path / "awq", awq_tensors(repack_table.NAME, q, 64), label)
    done = bridge.repack(source, tmp_path / "gptq", "gptq", bits=bits, clamp=True)
    assert isinstance(done, Repacked)
    [layer] = [t for t in done.tensors if t.bits]
    assert (layer.how, layer.bits) == (("all codes", 4) if bits is None else ("rounded", bits))
    before, after = (weights(folder)[layer.name].astype(np.float64) for folder in (source, tmp_path / "gptq"))
    assert layer.nmse == pytest.approx(np.square(after - before).sum() / np.square(before).sum(), rel=1e-3)
    assert layer.nmse > 0
    assert (done.raised == (0, 0)) == (bits is not None)  # what is rounded needs no zero point of 0
    told = f"{q.zeros.size} zero points of 0, which GPTQ v1 cannot hold, became 1"
    assert (told in done.summary()) == (bits is None)


def test_weights_whose_offsets_are_beyond_halves_are_not_rounded(tmp_path):
    """MLX's offsets are the products of scales and zero points."""
    q = quantize(repack_table.weight(), 4, 64, False)
    tensors = gptq_tensors(repack_table.NAME, q, 4, "gptq_v2")
    tensors[f"{repack_table.NAME}.scales"] = tensors[f"{repack_table.NAME}.scales"].astype(np.float32) * 1e6
    label = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"}
    source = repack_table.save(tmp_path / "gptq", tensors, label)
    with pytest.raises(BridgeError, match="has no layer that mlx holds"):
        bridge.repack(source, tmp_path / "mlx", "mlx")


def kinds(done: Repacked) -> set[str]:
    """Of all codes: 4-bit floats that have become integers stay such."""
    return {t.kind for t in done.tensors if t.bits}


def format_of(folder: Path) -> str | None:
    """The written format that a folder is of, if there is one."""
    with open_checkpoint(folder) as ckpt:
        assert ckpt.reader is not None
        names = [written.name for written in ckpt.reader.written]
        return ckpt.format if ckpt.format in names else names[0] if len(names) == 1 else None


@pytest.mark.parametrize("name", repack_table.SOURCES)
def test_floats_are_the_dequantized_weights_bit_for_bit(tmp_path, sources, name):
    bridge.repack(sources[name], tmp_path / "floats", "floats", dtype="F32")
    after = weights(tmp_path / "floats")
    assert "quantization_config" not in json.loads((tmp_path / "floats/config.json").read_text())
    for tensor, values in weights(sources[name]).items():
        if ".experts." not in tensor:  # which are stacks, see test_repack_experts
            assert np.array_equal(after[tensor], values), tensor


def test_every_reader_is_a_source(sources):
    read = set()
    for folder in sources.values():
        with open_checkpoint(folder) as ckpt:
            read.add(type(ckpt.reader))
    assert {*READERS.values()} - read == set()


def test_the_table_of_the_docs_is_what_repack_does():
    table = [repack_table.HEAD, "|---" * (1 + len(repack_table.SHOWN)) + "|", *repack_table.rows()]
    assert "\n".join(table) in DOCS.read_text(), "run python -m tests.support.repack_table"
