"""The folder that goes along to a machine with a GPU, made with few kernels, and its run on this one, without."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.norm import activation_kernel
from bridge.cuda.toolchain import compiler

from scripts import gpu_kit
from tests.conftest import PATIENCE
from tests.support import ptx
from tests.support.gpu import carried

pytestmark = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for a kit of one kernel, with a wheel that needs no network."""

    def download(target: Path) -> None:
        target.mkdir()
        with zipfile.ZipFile(target / "gguf-0.19.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("gguf_of_the_kit.py", "")

    monkeypatch.setattr(gpu_kit, "FOLDER", tmp_path / ".gpu")
    monkeypatch.setattr(gpu_kit, "PRESET", 0)  # the toolkit's library would take minutes

    def compile(capability: Any, folder: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["carried", "9.0", str(folder)])
        return carried.main()

    monkeypatch.setattr(gpu_kit, "_download", download)
    monkeypatch.setattr(gpu_kit, "_compile", compile)
    monkeypatch.setattr(carried, "kernels", lambda *given: ([activation_kernel(False)], []))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BRIDGE_KERNELS", "set by prepare")
    activation_kernel(False).codes.clear()
    yield tmp_path / ".gpu"
    activation_kernel(False).codes.clear()


def test_a_kit_has_all_kernels_and_goes_along_whole(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = tmp_path / "llama.cpp"
    for name in ("src/ggml-common.h", "src/ggml-cuda/mmvq.cu", "src/ggml-cuda/vendors/cuda.h", "src/ggml.c"):
        (checkout / "ggml" / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / "ggml" / name).write_text(name)
    assert gpu_kit.main(["prepare", "--cuda", "99.0", "--llama-cpp", str(checkout)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 of 1 kernels for 9.0, 0.0 MB")
    assert "kernels in the kit: 1 of 1\n" in out
    assert re.search(r"^with the tracked files \d+\.\d MiB; at most 64$", out, re.MULTILINE)
    with tarfile.open(kit / "kernels.tar.xz") as archive:
        assert archive.getnames() == [f"9.0/{compiler.digest(activation_kernel(False))}"]
    assert json.loads((kit / "kit.json").read_text())["kernels"] == 1
    assert sorted(p.name for p in (kit / "llama.cpp").rglob("*.*")) == ["cuda.h", "ggml-common.h", "mmvq.cu"]
    assert lzma.decompress((kit / "toolkit" / "libnvvm.so.4.xz").read_bytes()).startswith(b"\x7fELF")
    assert (kit / "toolkit" / "libdevice.10.bc").stat().st_size > 100_000


def test_a_kit_without_a_kernel_or_too_large_or_of_too_new_a_toolkit_is_refused(
    kit: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_kit.main(["prepare", "--cuda", "11.8"]) == 1
    said = r"libNVVM and NVRTC 1\d\.\d+ is newer than the driver's CUDA 11\.8; install CUDA 11\.8's, or name a newer"
    assert re.match(said, capsys.readouterr().err)
    assert not kit.exists()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_kit, "MOST", 1 << 20)
        assert gpu_kit.main(["prepare", "--cuda", "99.0"]) == 1
    assert "MiB; at most 1\n" in capsys.readouterr().out

    def refuse(*given: Any) -> Any:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    activation_kernel(False).codes.clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kit.parent / "another"))
    monkeypatch.setattr(compiler, "ptx_of", refuse)
    assert gpu_kit.main(["prepare", "--cuda", "99.0"]) == 1
    assert "1 failed, the first: AttributeError: module 'numpy' has no attribute 'row_stack'" in capsys.readouterr().err


def test_a_run_unpacks_the_kit_and_logs_what_the_check_says(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is missing here, which the check says."""
    assert gpu_kit.main(["prepare", "--cuda", "99.0"]) == 0
    monkeypatch.setattr(gpu_kit, "_installed", lambda name: None if name in ("gguf", "torch") else "1.0")
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))  # where a machine with a driver has none that works
    for name in ("libcuda.so", "libcuda.so.1"):
        (tmp_path / name).write_bytes(b"")
    code = gpu_kit.main(["run"])
    log = (out / "gpu_check.log").read_text()
    assert code == 2
    assert "1 of 1 kernels for 9.0\n" in log
    assert "gguf 0.19.0 is the kit's; here: none\n" in log
    assert "numpy 1.0; " in log
    assert "torch none; " in log
    assert "no check: device 'cuda': " in log
    assert "0 kernels were compiled here\n" in log
    assert re.search(r"^exit code 2, after \d+ s$", log, re.MULTILINE)


def test_a_machine_without_a_toolkit_takes_that_of_the_kit(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_kit.main(["prepare", "--cuda", "99.0"]) == 0
    said: list[Any] = []

    def ask(*given: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess(given, 1, "", "Traceback\nDynamicLibNotFoundError: nvvm\n")

    monkeypatch.setattr(gpu_kit.subprocess, "run", ask)
    environment = gpu_kit._unpacked(tmp_path / "there", lambda *words: said.append(words))
    home = Path(environment["CUDA_HOME"])
    assert (home / "nvvm" / "lib64" / "libnvvm.so.4").read_bytes().startswith(b"\x7fELF")
    assert (home / "nvvm" / "libdevice" / "libdevice.10.bc").is_file()
    assert said[-1] == ("the kit's libNVVM is used; here: DynamicLibNotFoundError: nvvm",)
    assert environment["BRIDGE_KERNELS"] == str(tmp_path / "there" / "kernels")


def test_run_begins_with_nothing_but_python(kit: Path) -> None:
    """What it imports before it has unpacked the kit is Python's own."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import runpy; runpy.run_path('scripts/gpu_kit.py')"],
        cwd=gpu_kit.ROOT, capture_output=True, text=True, timeout=PATIENCE, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
