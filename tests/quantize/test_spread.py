"""Calibration as tasks for a cluster: here one that runs them in this process, and forgets what is not in files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from bridge.conversion.converter import convert
from bridge.quantize.run.cluster import LocalCluster, Spread
from bridge.quantize.run.walk import Walk
from bridge.quantize.run.worker import close_workers
from bridge.quantize.settings import Calibration
from bridge.quantize.solve.hessian import Hessian, held_back
from tests.support.tiny_models import save_model

SMALL = {"hidden_size": 64, "intermediate_size": 64}


class Killed(BaseException):
    """No handler of errors sees it."""


def state_of(value: Any) -> Any:
    """What tasks could change of what they get: Hessians, and the job's stored layers."""
    if isinstance(value, dict):
        return {key: state_of(own) for key, own in value.items()}
    if isinstance(value, Hessian):
        products = (m for sums in value.products.values() for m in (sums.total, sums.held))
        matrices = [m.numpy().tobytes() for m in (value._matrix, value._cross, *products) if m is not None]
        return value.tokens, value.shrinkage, value._merged, matrices, state_of(value.held)
    return sorted(value.store.layers) if isinstance(value, Walk) else None


class Elsewhere(LocalCluster):
    """Arguments and results are pickled. Every third task is run twice by a new worker: the first one was lost."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        self.count += 1
        self.names.append(function.__name__)
        sent = cloudpickle.dumps(args)
        for _ in range(1 + (self.count % 3 == 0)):
            got = pickle.loads(sent)
            before = [state_of(value) for value in got]
            found = function(*got)
            assert [state_of(value) for value in got] == before  # Dask may be sending them to other workers
            if self.count % 3 == 0:
                close_workers()
        return pickle.loads(cloudpickle.dumps(found))


def quantized(model: Path, tokens: Path, out: Path, spread: Spread | None, **options: Any) -> bytes:
    calibrate = Calibration(tokens, length=32, sweeps=0, spread=spread, **options)
    convert(model, out, type="Q4_0", tensor_types={"output": "Q4_0"}, calibrate=calibrate)
    assert not out.with_name(f"{out.name}.layers").exists()
    return out.read_bytes()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spread") / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(0, 300, (4, 32)))
    return file


@pytest.fixture(autouse=True)
def one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.quantize.model import forward_passes
    from bridge.quantize.run import gradients, walk

    monkeypatch.setattr(walk, "TOKENS_AT_ONCE", 32)
    for module in (forward_passes, gradients):
        monkeypatch.setattr(module, "sequences_at_once", lambda model, length: 1)


@pytest.mark.parametrize("family", ["LlamaConfig", "MixtralConfig"])
def test_one_part_gives_the_bytes_of_one_machine(tmp_path: Path, tokens: Path, family: str) -> None:
    model = save_model(tmp_path / "model", family, num_hidden_layers=2, **SMALL)
    alone = quantized(model, tokens, tmp_path / "alone.gguf", None)
    cluster = Elsewhere()
    assert quantized(model, tokens, tmp_path / "there.gguf", Spread(cluster)) == alone
    steps = {"_gathered", "embedding_rows", "stages", "gathered", "quantized", "advanced", "head_rows"}
    assert steps <= set(cluster.names)


@pytest.mark.parametrize("feed", ["quantized", "float"])
def test_the_bytes_depend_on_the_parts_and_not_on_which_workers_had_them(
    tmp_path: Path, tokens: Path, feed: str
) -> None:
    model = save_model(tmp_path / "model", "LlamaConfig", num_hidden_layers=2, **SMALL)
    here, there = (
        quantized(model, tokens, tmp_path / f"{i}.gguf", Spread(cluster, 3), feed=feed)
        for i, cluster in enumerate((LocalCluster(), Elsewhere()))
    )
    assert here == there


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, tokens: Path) -> None:
    model = save_model(tmp_path / "model", "LlamaConfig", num_hidden_layers=3, **SMALL)
    whole = quantized(model, tokens, tmp_path / "whole.gguf", Spread(parts=2), method="gptaq")

    def progress(done: int, _all: int, _text: str) -> None:
        if done == 17:
            raise Killed

    with pytest.raises(Killed):
        quantized(model, tokens, tmp_path / "m.gguf", Spread(parts=2), method="gptaq", progress=progress)
    cluster = Elsewhere()
    assert quantized(model, tokens, tmp_path / "m.gguf", Spread(cluster, 2), method="gptaq") == whole
    assert cluster.names.count("advanced") == 2  # of the last block alone


@pytest.mark.parametrize("by_outputs", [False, True])
def test_hessians_of_parts_add_up(by_outputs: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(700, 64)
    twin = x + 0.1 * torch.randn(700, 64)
    outputs = twin @ torch.randn(300, 64).T

    def gathered(span: slice, first: int = 0) -> Hessian:
        hessian = Hessian("h", 64, first=first)
        if by_outputs:
            hessian.add(x[span], outputs={"h": outputs[span]})
        else:
            hessian.add(x[span], twin[span])
        return hessian

    whole, one, other = gathered(slice(None)), gathered(slice(0, 300)), gathered(slice(300, 700), 300)
    one.include(pickle.loads(pickle.dumps(other)))
    assert (one.tokens, one.held.tokens) == (whole.tokens, whole.held.tokens)
    for found, expected in ((one, whole), (one.held, whole.held)):
        torch.testing.assert_close(found.matrix, expected.matrix)
        if not by_outputs:
            torch.testing.assert_close(found.cross, expected.cross)
    if by_outputs:
        held = held_back(0, 700)
        some = outputs[held][:, ::2]  # 150 rows of 300
        torch.testing.assert_close(one.products["h"].total, 2 / 700 * outputs.T @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.products["h"].held, 2 / len(some) * some.T @ x[held], rtol=1e-4, atol=1e-4)
