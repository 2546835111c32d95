"""The stand-ins for CUDA's driver and runtime, compiled: stand_in_driver.c says what works with them.

    environment(folder)         # variables for a child process, in which a machine without a GPU seems to have an H100

The driver is enough for numba-cuda, cuda.core and Triton. NVIDIA's own runtime library checks that the driver is
NVIDIA's, so PyTorch's CUDA build gets the stand-in for that library too, and no cuDNN.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

_SOURCES = Path(__file__).parent
_HEADERS = "nvidia/cu13/include"  # of NVIDIA's packages; crt/ of the runtime's headers is only in Triton's
_TRITON = "triton/backends/nvidia/include"


@cache
def _packages(python: str) -> list[Path]:
    """The folders in which an interpreter has its packages."""
    command = [
        python,
        "-c",
        "import sysconfig; print(*{sysconfig.get_path(k) for k in ('purelib', 'platlib')}, sep='\\n')",
    ]
    return [
        Path(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    ]


def _headers(python: str, folder: str, header: str) -> Path | None:
    """A folder of headers among an interpreter's packages; None where it has not that one."""
    return next((p / folder for p in _packages(python) if (p / folder / header).is_file()), None)


def unavailable(python: str = sys.executable) -> str | None:
    """Why the driver cannot be compiled for an interpreter; None if it can."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return "the stand-in for CUDA's driver is one for 64-bit Linux"
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    return None if _headers(python, _HEADERS, "cuda.h") else f"{python} has no headers of CUDA 13 ({_HEADERS}/cuda.h)"


def library(folder: Path, python: str = sys.executable) -> Path:
    """libcuda.so.1, compiled into a folder, with the headers of an interpreter's packages."""
    return _compiled("stand_in_driver.c", folder / "libcuda.so.1", _headers(python, _HEADERS, "cuda.h"))


def environment(folder: Path, python: str = sys.executable) -> dict[str, str]:
    """Variables with which a process of an interpreter finds the stand-ins, compiled into an existing folder."""
    driver = library(folder, python)
    found = {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}
    cuda, triton = _headers(python, _HEADERS, "cuda_runtime_api.h"), _headers(python, _TRITON, "crt/host_defines.h")
    if cuda is None or triton is None:  # no build of PyTorch with CUDA
        return found
    runtime = _compiled("stand_in_runtime.c", folder / "libstand_in_runtime.so", cuda, triton, more=[str(driver)])
    return found | {"LD_PRELOAD": str(runtime), "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


def _compiled(source: str, out: Path, *headers: Path | None, more: list[str] | None = None) -> Path:
    folders = [f"-I{folder}" for folder in headers]
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *folders, "-o", str(out), str(_SOURCES / source)]
    done = subprocess.run([*command, *(more or [])], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}: {done.stderr.strip()}")
    return out
