"""What a conversion costs on real checkpoints, measured from the file on disk. Deterministic figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import bridge
from bridge.conversion.writing.report import CARRIED, CODED
from scripts.peers.fidelity import Reference, measure
from tests.conftest import checkpoint_names, predicting_checkpoints
from tests.support.encode_formats import write_hqq, write_mlx

LLAMA = "llama-gptq-4bit-g128-sym"
ACT_ORDER = "llama-gptq-4bit-g128-asym-actorder"
CHECKPOINTS = checkpoint_names()

# mean KL divergence of the linears alone with --type auto, nats a token, at most
KL_LINEARS = {
    LLAMA: 5e-7,
    ACT_ORDER: 8e-4,
    "qwen3-gptq-4bit-g64-asym-actorder": 2.5e-3,  # a smaller model; the checkpoint is 1.7e-2 from its float model
    "qwen3-gptq-2bit-g64-asym-v2": 1.5e-3,
}
KL_LINEARS_ELSEWHERE = 5e-5

# NMSE of the tensors whose codes are carried, at most. Symmetric groups of 128 are at the optimum, which
# test_carry.py proves by trying every d: no encoding that keeps the codes gets below these four.
NMSE = {
    (LLAMA, "Q4_K"): 4.32e-7,
    ("qwen3-gptq-4bit-g128-sym", "Q4_K"): 4.61e-7,
    ("qwen3-ct-w4a16-sym", "Q4_K"): 4.53e-7,
    ("qwen3-gptq-3bit-g128-sym", "Q3_K"): 3.12e-6,
    # asymmetric: within a few percent of the best that there is, which test_carry.py measures on a few rows
    ("qwen3-ct-w4a16-asym", "Q4_K"): 6e-7,
    ("qwen3-gptq-4bit-g128-asym-v2", "Q4_K"): 6e-7,
    ("qwen3-awq-4bit-g128-gemm", "Q4_K"): 6e-7,
    ("qwen3-awq-4bit-g128-gemv", "Q4_K"): 6e-7,
    ("qwen3-gptq-4bit-g64-asym-actorder", "Q4_K"): 1.2e-5,
    ("qwen3-gptq-4bit-g32-sym", "Q4_K"): 1.5e-5,
    ("qwen3-gptq-2bit-g64-asym-v2", "Q2_K"): 2.1e-4,
    # bit exact
    (LLAMA, "Q4_0"): 0.0,
    ("qwen3-gptq-4bit-g128-sym", "Q4_0"): 0.0,
    ("qwen3-gptq-4bit-g32-sym", "Q4_0"): 0.0,
    ("qwen3-gptq-4bit-channel-sym", "Q4_K"): 0.0,
    ("qwen3-gptq-8bit-g128-sym", "Q8_0"): 0.0,
    ("qwen3-gptq-8bit-g128-sym", "auto"): 0.0,
    ("qwen3-gptq-4bit-g128-sym", "exact"): 0.0,
}


def group(name: str, *others: str) -> object:
    """A case that shares its worker with the others of its checkpoint, and so the checkpoint's predictions."""
    return pytest.param(name, *others, marks=pytest.mark.xdist_group(name))


@pytest.mark.parametrize(("name", "type"), [group(*case) for case in NMSE])
def test_carried_tensors_lose_no_more_than_their_type_must(name: str, type: str, converted, reference_of) -> None:
    path, report = converted(name, type)
    found = measure(path, reference_of(name), predictions=False)
    carried = {t.source for t in report.tensors if t.outcome == CARRIED}
    assert carried
    assert found.nmse_of(carried) <= NMSE[name, type]


@pytest.mark.parametrize("name", [group(name) for name in CHECKPOINTS])
def test_every_tensor_of_sequential_groups_keeps_all_its_codes(name: str, converted, reference_of) -> None:
    _, report = converted(name)
    scrambled = reference_of(name).act_order
    for tensor in report.tensors:
        folded = str(tensor.source).endswith("down_proj.weight")
        if tensor.has_codes and (folded or tensor.source not in scrambled):
            assert tensor.fidelity.kept == tensor.weights, tensor.name


@pytest.mark.parametrize("name", predicting_checkpoints())
def test_predictions_stay_those_of_the_checkpoint(name: str, converted, reference_of) -> None:
    path, report = converted(name)
    found = measure(path, reference_of(name))
    print(f"{name}: {dict(found.types)}, {found.bpw:.2f} bpw, KL {found.kl_linears:.2e}, file {found.kl_file:.2e}")
    assert found.kl_linears <= KL_LINEARS.get(name, KL_LINEARS_ELSEWHERE)
    assert report.bpw(CODED) == pytest.approx(found.bpw)
    if name == LLAMA:
        assert found.kl_file <= 5e-5
    if name == ACT_ORDER:
        assert found.bpw <= 5.3


# Formats with fractional zero points, of which no real checkpoint is shared: how a shared float model is written in
# them, KL of the linears at most. Q8_0 has no min for MLX's 8 bits; test_carry.py has how near it is to its best.
FRACTIONAL: dict[str, tuple[Callable[[Path, Path], object], float]] = {
    "mlx-4bit-g64": (partial(write_mlx, bits=4), KL_LINEARS_ELSEWHERE),
    "mlx-3bit-g64": (partial(write_mlx, bits=3), KL_LINEARS_ELSEWHERE),
    "mlx-8bit-g64": (partial(write_mlx, bits=8), 8e-5),
    "hqq-4bit-g64": (partial(write_hqq, bits=4), KL_LINEARS_ELSEWHERE),
    "hqq-3bit-g64": (partial(write_hqq, bits=3), KL_LINEARS_ELSEWHERE),
}


PLAIN = ("mlx-8bit-g64", "hqq-3bit-g64")  # on 8 windows; the others on 24, see `reference_of`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.exhaustive]) for name in FRACTIONAL]
)
def test_fractional_zero_points_cost_predictions_no_more(name: str, tmp_path: Path, model_folder, wiki_text) -> None:
    write, bound = FRACTIONAL[name]
    write(tmp_path / name, model_folder)
    bridge.convert(tmp_path / name, tmp_path / "model.gguf")
    with bridge.open_checkpoint(tmp_path / name) as checkpoint:
        reference = Reference(tmp_path / name, checkpoint, wiki_text, n=8 if name in PLAIN else 24)
        found = measure(tmp_path / "model.gguf", reference)
    print(f"{name}: {dict(found.types)}, NMSE {found.nmse:.2e}, KL {found.kl_linears:.2e}, file {found.kl_file:.2e}")
    assert found.kl_linears <= bound


def test_the_report_says_what_the_file_on_disk_says(converted, reference_of) -> None:
    path, report = converted(LLAMA)
    found = measure(path, reference_of(LLAMA), predictions=False)
    assert report.total().nmse == pytest.approx(found.nmse, rel=1e-6)
    for tensor in report.tensors:
        if tensor.has_codes:
            assert tensor.fidelity.nmse == pytest.approx(found.nmse_of({tensor.source}), rel=1e-6), tensor.name
