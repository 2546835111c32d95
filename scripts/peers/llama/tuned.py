"""llama.cpp built for many kinds of processor: the shared libraries that node-llama-cpp distributes through npm.

ggml picks the build for this processor when they are loaded, AVX-512 with VNNI among them. So they are the peer for
speed; the xllamacpp wheel of the tests is built for AVX2 on x86.
"""

import ctypes
import platform
import subprocess
import tarfile
from ctypes import c_char_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

VERSION = "3.22.1"
_BASE, _GGML, _LLAMA = "libggml-base.so", "libggml.v*.so", "libllama.v*.so"  # in the order of their needs


class Libraries(NamedTuple):
    """The loaded libraries; `cpu` is ggml's build for this processor."""

    base: ctypes.CDLL
    ggml: ctypes.CDLL
    cpu: ctypes.CDLL
    llama: ctypes.CDLL


def download(folder: Path) -> Path:
    """The folder of the package's shared libraries, downloaded by npm into `folder` if they are not there.

    Raises RuntimeError if npm cannot get them.
    """
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"{platform.system().lower()}-{machine}"
    unpacked = folder / f"node-llama-cpp-{name}-{VERSION}"
    binaries = unpacked / "package" / "bins" / name
    if not binaries.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"@node-llama-cpp/{name}@{VERSION}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
            (packed,) = folder.glob(f"node-llama-cpp-{name}-{VERSION}.tgz")
            partial = folder / f"{unpacked.name}.partial"
            with tarfile.open(packed) as archive:
                archive.extractall(partial, filter="data")
            partial.rename(unpacked)
        except (OSError, subprocess.CalledProcessError, ValueError) as problem:
            complaint = getattr(problem, "stderr", "") or str(problem)
            raise RuntimeError(
                f"{' '.join(command)}: {complaint.strip()[-300:]}; give the folder of libllama in another way"
            ) from None
    return binaries


@cache
def load(folder: Path) -> Libraries:
    """Load the libraries of a folder. Raises RuntimeError if some are missing."""
    matches = {pattern: sorted(folder.glob(pattern)) for pattern in (_BASE, _GGML, _LLAMA)}
    if missing := [pattern for pattern, files in matches.items() if not files]:
        raise RuntimeError(f"{folder}: has no {' and no '.join(missing)}; is it a package of node-llama-cpp?")
    base, ggml, llama = (ctypes.CDLL(str(files[0]), ctypes.RTLD_GLOBAL) for files in matches.values())
    ggml.ggml_backend_load_all_from_path.argtypes = [c_char_p]
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    return Libraries(base, ggml, ctypes.CDLL(str(_chosen(folder))), llama)


def _chosen(folder: Path) -> Path:
    """The build of libggml-cpu that ggml has loaded."""
    mapped = Path("/proc/self/maps").read_text()
    return next(file for file in sorted(folder.glob("libggml-cpu-*.so")) if str(file) in mapped)


def build(folder: Path) -> str:
    """What the build for this processor is called: "zen4"."""
    load(folder)
    return _chosen(folder).stem.removeprefix("libggml-cpu-")
