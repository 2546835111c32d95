"""A folder for one run of scripts/gpu_check.py on a machine with an NVIDIA GPU and no network, and that run.

    python scripts/gpu_kit.py prepare --llama-cpp DIR      makes .gpu/ without a GPU, in an hour of CPU time
    python3 scripts/gpu_kit.py run                         there, from a copy of the tracked files and .gpu/

.gpu/ has

    kernels.tar.xz      all kernels of the check as machine code, compiled by a toolkit no newer than the GPU's driver
    wheels/             packages that such a machine may lack
    toolkit/            libNVVM and libdevice, for a machine without nvcc: kernels that are missing are compiled
    llama.cpp/ggml/     the source of llama.cpp's own products, which are timed too
    kit.json            how many kernels there are, and what compiled them

`prepare` needs the test extra's torch and transformers, and a CUDA compiler; the result does not depend on the version
of Python. `run` needs Python, torch with CUDA, numba and numba-cuda. It unpacks the kit into a temporary folder, takes
of it what the machine lacks, and runs gpu_check.py for the seconds that are left. Log, results and kernels that were
compiled there are in the folder $OUT if that is set, otherwise in the current one.
"""

import argparse
import importlib.metadata
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

Say = Callable[..., None]  # prints words, and writes them to the log

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu"
MOST = 64 << 20  # bytes of the tracked files and the kit, so that they can be sent
PRESET: Final = 9  # of xz
SECONDS = 555.0  # of a run
WHEELS = ("gguf", "numba-cuda")  # the second is taken where the machine's is another one
_NUMBA_CUDA = (0, 30)  # the version that pyproject.toml asks for
_PYTHON = "3.12"  # of the machine, for wheels with compiled parts
_GGML = ("include/*.h", "src/*.h", "src/ggml-cuda/*", "src/ggml-cuda/vendors/*")  # what its products include


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    verbs = options.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("prepare", help="make .gpu/, on a machine without a GPU")
    making.add_argument("--capability", default="9.0", help="the GPU's compute capability; default: %(default)s")
    making.add_argument("--cuda", default="13.0", help="the CUDA version that its driver knows; default: %(default)s")
    making.add_argument("--llama-cpp", type=Path, metavar="DIR", help="a checkout of llama.cpp, to be timed too")
    running = verbs.add_parser("run", help="check and measure with .gpu/, on the machine with the GPU")
    running.add_argument("--seconds", type=float, default=SECONDS, help="limit for the run; default: %(default)s")
    running.add_argument("--anyway", action="store_true", help="go on where not even one product works: a rehearsal")
    running.add_argument("--after", type=Path, metavar="FILE", help="gpu_check.jsonl of an earlier run, see there")
    a = options.parse_args(arguments)
    if a.verb == "run":
        return run(a.seconds, a.anyway, a.after)
    return prepare(_version(a.capability), _version(a.cuda), a.llama_cpp)


def _version(text: str) -> tuple[int, ...]:
    """(13, 0) of "13.0.2" and "13.0"; what is no number ends it."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


# here


def prepare(capability: tuple[int, ...], cuda: tuple[int, ...], llama_cpp: Path | None) -> int:
    """Make the kit; 1 where a part of it is missing or it is too large, which is printed."""
    sys.path.insert(0, str(ROOT))
    from bridge.cuda.toolchain import compiler
    from cuda.bindings import nvjitlink

    compilers = {"libNVVM and NVRTC": compiler.toolkit(), "nvJitLink": tuple(nvjitlink.version())}
    for name, version in compilers.items():
        if version[:2] > cuda:
            print(f"{name} {_dotted(version)} is newer than the driver's CUDA {_dotted(cuda)}; install CUDA "
                  f"{_dotted(cuda)}'s, or name a newer driver with --cuda", file=sys.stderr)  # fmt: skip
            return 1
    FOLDER.mkdir(exist_ok=True)
    kernels = FOLDER / "kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    if _compile(capability, kernels):
        return 1
    _pack(kernels, FOLDER / "kernels.tar.xz")
    _download(FOLDER / "wheels")
    _toolkit(FOLDER / "toolkit")
    if llama_cpp is not None:
        _sources(llama_cpp, FOLDER / "llama.cpp")
    count = len(list(kernels.glob("*/*")))
    about = {"kernels": count, "capability": _dotted(capability)} | {
        name: _dotted(version) for name, version in compilers.items()
    }
    (FOLDER / "kit.json").write_text(json.dumps(about, indent=1))
    shutil.rmtree(kernels)
    return _judged(about)


def _compile(capability: Sequence[int], folder: Path) -> int:
    """All kernels of the check into a folder; its exit code is 1 where one is missing, and it says which."""
    command = [sys.executable, "-m", "tests.support.gpu.carried", _dotted(capability), str(folder)]
    return subprocess.run(command, cwd=ROOT).returncode


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _pack(kernels: Path, target: Path) -> None:
    """An archive of a folder of kernels, sorted, so that alike ones are beside each other."""
    with tarfile.open(target, "w:xz", preset=PRESET) as archive:
        for path in sorted(kernels.glob("*/*")):
            archive.add(path, str(path.relative_to(kernels)))


def _download(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest",
               str(target), "--python-version", _PYTHON, "--constraint", str(ROOT / "constraints.txt")]  # fmt: skip
    subprocess.run([*command, *WHEELS], check=True)


def _toolkit(target: Path) -> None:
    from cuda.pathfinder import load_nvidia_dynamic_lib
    from numba.cuda.cudadrv.libs import get_libdevice

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    library = Path(str(load_nvidia_dynamic_lib("nvvm").abs_path)).resolve()
    with lzma.open(target / "libnvvm.so.4.xz", "wb", preset=PRESET) as file:
        file.write(library.read_bytes())
    shutil.copy(get_libdevice(), target / "libdevice.10.bc")


def _sources(checkout: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for pattern in _GGML:
        for path in (checkout / "ggml").glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(checkout)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)


def _judged(about: Mapping[str, object]) -> int:
    """What is in the kit, printed; 1 if that is not all or too much."""
    with tarfile.open(FOLDER / "kernels.tar.xz") as archive:
        packed = len(archive.getnames())
    print(f"kernels in the kit: {packed} of {about['kernels']}")
    for part in sorted(FOLDER.iterdir()):
        print(f"  {part.name:<16} {_size(part) / (1 << 20):6.1f} MiB")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    size = _size(FOLDER) + sum((ROOT / os.fsdecode(name)).lstat().st_size for name in tracked if name)
    print(f"with the tracked files {size / (1 << 20):.1f} MiB; at most {MOST >> 20}")
    return 0 if packed == about["kernels"] and size <= MOST else 1


def _size(path: Path) -> int:
    return sum(p.lstat().st_size for p in [path, *path.rglob("*")] if p.is_file())


# there


def run(seconds: float, anyway: bool = False, after: Path | None = None) -> int:
    """Unpack the kit, take what the machine lacks, and run the check; its exit code."""
    begun = time.monotonic()
    out = Path(os.environ.get("OUT") or ".").resolve()
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name, open(out / "gpu_check.log", "w") as log:

        def say(*words: object) -> None:
            print(*words, flush=True)
            print(*words, file=log, flush=True)

        temporary = Path(name)
        environment = dict(os.environ) | _unpacked(temporary, say)
        _describe(say)
        left = seconds - (time.monotonic() - begun)
        command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--json", str(out / "gpu_check.json"),
                   "--seconds", f"{left:.0f}", "--kernels", environment["BRIDGE_KERNELS"]]  # fmt: skip
        command += ["--anyway"] * anyway
        if after is not None:
            command += ["--after", str(after.resolve())]
        if (FOLDER / "llama.cpp").is_dir():
            command += ["--llama-cpp", str(FOLDER / "llama.cpp")]
        check = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT,
            env=environment,
        )  # fmt: skip
        assert check.stdout is not None
        for line in check.stdout:
            say(line.rstrip("\n"))
        compiled = list((temporary / "cache").glob("cubins/*/*"))
        if compiled:
            with tarfile.open(out / "compiled.tar.xz", "w:xz") as archive:
                for path in compiled:
                    archive.add(path, str(path.relative_to(temporary / "cache")))
        say(f"{len(compiled)} kernels were compiled here")
        code = check.wait()
        say(f"exit code {code}, after {time.monotonic() - begun:.0f} s")
        return code


def _unpacked(temporary: Path, say: Say) -> dict[str, str]:
    """The kit in a temporary folder; the environment that uses it."""
    about = json.loads((FOLDER / "kit.json").read_text())
    kernels = temporary / "kernels"
    with tarfile.open(FOLDER / "kernels.tar.xz") as archive:
        archive.extractall(kernels, filter="data")
    say(f"{len(list(kernels.glob('*/*')))} of {about['kernels']} kernels for {about['capability']}")
    site = temporary / "site"
    for wheel in sorted((FOLDER / "wheels").glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        installed = _installed(name)
        if installed is None or (name == "numba_cuda" and _version(installed) != _NUMBA_CUDA):
            say(f"{name} {version} is the kit's; here: {installed or 'none'}")
            with zipfile.ZipFile(wheel) as parts:
                parts.extractall(site)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "BRIDGE_KERNELS": str(kernels),
                   "NUMBA_CACHE_DIR": str(temporary / "cache")}  # fmt: skip
    asked = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    asked += "from bridge.cuda.toolchain import compiler; print(compiler.toolkit())"
    done = subprocess.run(
        [sys.executable, "-c", asked], env=dict(os.environ) | environment, capture_output=True, text=True
    )
    if done.returncode == 0:
        say(f"CUDA toolkit {done.stdout.strip()}")
        return environment
    say(f"the kit's libNVVM is used; here: {''.join(done.stderr.strip().splitlines()[-1:])}")
    nvvm = temporary / "toolkit" / "nvvm"
    (nvvm / "lib64").mkdir(parents=True)
    (nvvm / "lib64" / "libnvvm.so.4").write_bytes(lzma.decompress((FOLDER / "toolkit/libnvvm.so.4.xz").read_bytes()))
    (nvvm / "libdevice").mkdir()
    shutil.copy(FOLDER / "toolkit" / "libdevice.10.bc", nvvm / "libdevice")
    return environment | {"CUDA_HOME": str(nvvm.parent)}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe(say: Say) -> None:
    """The GPU, the tools and the versions of packages."""
    for tool in ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer"):
        say(f"{tool}: {shutil.which(tool) or 'none'}")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            say("GPU:", (done.stdout or done.stderr).strip())
    names = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "cuda-pathfinder", "torch",
             "triton", "gguf", "transformers", "tqdm", "nvidia-nvjitlink", "nvidia-nvvm")  # fmt: skip
    say(f"Python {sys.version.split()[0]};", "; ".join(f"{name} {_installed(name) or 'none'}" for name in names))


if __name__ == "__main__":
    sys.exit(main())
