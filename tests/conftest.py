"""Where the tests find real input: checkpoints, models and texts that are not part of the project.

BRIDGE_SHARED names the folder that holds them (`checkpoints/`, `models/`, `text/`); by default it is
`shared` beside the checkout. A test that wants what is not there skips and says so.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import settings

import bridge
from bridge.system.cpu import targets
from tests.support.places import PATIENCE as PATIENCE
from tests.support.places import ROOT

if TYPE_CHECKING:
    from bridge.conversion.writing.report import Report
    from scripts.peers.fidelity import Reference

pytest_plugins = ["tests.support.proofs"]
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads; each worker has a core, and spinning for two costs both
os.environ["BRIDGE_PROGRESS"] = "0"  # standard error does not depend on how long a test takes
gc.set_threshold(10_000, 20, 20)  # a worker has a million objects of tests and compilers that stay: fewer searches

CHECKPOINT = ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym"  # the project's own
settings.register_profile("bridge", deadline=None)  # the first call of a kernel compiles it
settings.load_profile("bridge")

# for kernels on repacked weights; without AVX2 or NEON (or with NUMBA_CPU_NAME alone) kernels read GGUF's own layout
repacked = pytest.mark.skipif(targets.chosen() == targets.PORTABLE, reason="portable kernels read GGUF's own layout")

# these are not so on Windows, and address space is limited by Linux alone
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's signals, pipes, forks and limits")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's limits and names")

SHARED = Path(os.environ.get("BRIDGE_SHARED", ROOT.parent / "shared"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file go to one worker, which compiles their kernels once; CUDA's compile in other ways."""
    for item in items:
        if item.path.parent.name != "cuda" and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names what failed at once: a run that is cut short ends without a summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}: {report.longreprtext[-500:]}", file=sys.stderr)


def shared(relative: str) -> Path:
    """A path under the shared folder; skips the test where it does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in {SHARED}: set BRIDGE_SHARED to the folder that has it")
    return path


def checkpoint_names() -> list[str]:
    """The shared checkpoints there are, for parametrizing; one that skips where there are none."""
    return sorted(p.name for p in (SHARED / "checkpoints").glob("*/")) or ["none-found"]


# both families, act-order, AWQ: what the others predict is compared on request
_PREDICTED = ("llama-gptq-4bit-g128-asym-actorder", "qwen3-awq-4bit-g128-gemm", "none-found")


def predicting_checkpoints() -> list[Any]:
    """The shared checkpoints for tests that run whole models; tests of one share a worker, and so its predictions."""
    spared = {name: [] if name in _PREDICTED else [pytest.mark.exhaustive] for name in checkpoint_names()}
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks]) for name, marks in spared.items()]


@pytest.fixture(scope="session")
def wiki_text() -> str:
    """The text that fidelity is measured on."""
    return shared("text/wiki_test.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Report]]:
    """converted(name, type="auto", **options): a shared checkpoint's GGUF and its report, made once."""

    @cache
    def convert(name: str, type: str = "auto", **options: str) -> tuple[Path, Report]:
        folder = shared(f"checkpoints/{name}")
        path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        return path, bridge.convert(folder, path, type=type, **options)

    return convert


@pytest.fixture(scope="session")
def reference_of(wiki_text: str) -> Callable[[str], Reference]:
    """reference_of(name): a shared checkpoint in float, and its predictions on windows of 256 tokens.

    24 windows, which docs/measurements/conversion.md measures; the first 8 of them, which are a sixth harder, where
    time counts.
    """

    @lru_cache(maxsize=2)  # up to 100 MB of logits each
    def open_reference(name: str) -> Reference:
        from scripts.peers.fidelity import Reference  # takes seconds: torch

        folder = shared(f"checkpoints/{name}")
        with bridge.open_checkpoint(folder) as checkpoint:
            return Reference(folder, checkpoint, wiki_text, n=8 if name in _PREDICTED else 24)

    return open_reference


@pytest.fixture(scope="module")
def few_types() -> Iterator[None]:
    """Of types whose codes and scales a text chooses together, size budgets take one of each kind.

    A shifted codebook, one of 8 weights a point, one with a parity of signs, tables with scales of a superblock and of
    a block, 4-bit floats; the arithmetic of the others differs in numbers alone, and each compiles for half a minute.
    """
    from bridge.blocks.read import CALIBRATED
    from bridge.conversion import size_budget

    few = {"IQ1_S", "IQ2_S", "IQ3_XXS", "IQ4_XS", "IQ4_NL", "NVFP4"}
    others = {name for name, block in CALIBRATED.items() if not (block.values or block.numbered)}
    chosen = {name: block for name, block in CALIBRATED.items() if name in few | others}
    with mock.patch.object(size_budget, "CALIBRATED", chosen):
        yield


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of checkpoints written by the real tools."""
    return shared("checkpoints")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The smaller of the shared float models."""
    return shared("models/tiny-qwen3")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own checkpoint as a float model: a folder with its weights dequantized, in fp16."""
    import json
    import shutil

    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors", "quantize_config.json"))
    config = json.loads((CHECKPOINT / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with bridge.open_checkpoint(CHECKPOINT) as checkpoint:
        weights = {f"{name}.weight": checkpoint.read_module(name).dequantize() for name in checkpoint.modules}
        weights |= {name: checkpoint.read_float(name) for name in checkpoint.tensors}
    save_file({name: w.astype(np.float16) for name, w in weights.items()}, folder / "model.safetensors")
    return folder
