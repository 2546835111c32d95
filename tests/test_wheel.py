"""The sdist and the wheel: what `python -m build` makes works outside the checkout, with its dependencies alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import bridge
from tests.conftest import CHECKPOINT, ROOT, posix

pytest.importorskip("build")


SCRIPT = "scripts/build_objects.py"  # compiles the object code of a wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it, of a copy of what git would hold: no build/ or
    egg-info of an earlier one gets in. Object code that a wheel was built with before is left there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("bridge", "cuda"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "objects"))
    for name in (SCRIPT, "scripts/demo.py", "tests/test_wheel.py"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    (source / "bridge" / "objects").mkdir()
    (source / "bridge" / "objects" / "linux-avx2.zip").write_bytes(b"of an earlier build")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (made,) = built.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gguf-bridge` in a new environment that has the wheel, and the dependencies of the tests' one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # sys.path's folders, but not the files of paths in them: an editable install of the checkout is none of it
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "--force-reinstall", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "gguf-bridge"


def sources(cuda: str) -> set[str]:
    """The files of the packages, with those of cuda/ in a folder of this name."""
    texts = (ROOT / "bridge/quantize/calibration_text").iterdir()
    names = {str(file.relative_to(ROOT)) for file in [*(ROOT / "bridge").rglob("*.py"), *texts]}
    modules = {f"{cuda}/{file.relative_to(ROOT / 'cuda')}" for file in (ROOT / "cuda").rglob("*.py")}
    return names | modules | {"bridge/py.typed", "bridge/serve/page.html"}


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources("bridge/cuda")
    assert wheel.name.startswith(f"gguf_bridge-{bridge.__version__}-py3")


def test_the_sdist_holds_what_a_wheel_is_built_from_and_nothing_else(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    top = f"gguf_bridge-{bridge.__version__}"
    assert sdist.name == f"{top}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{top}/") for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if not name.startswith("gguf_bridge.egg-info/")}
    expected = {
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "setup.cfg",
        SCRIPT,
    }
    assert names == expected | sources("cuda")


def outside(program: Path, folder: Path, *arguments: object) -> str:
    """What the installed program prints, run where the checkout is not on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@posix  # where programs are in bin
def test_the_installed_program_is_the_wheels(program: Path, tmp_path: Path) -> None:
    assert outside(program, tmp_path, "--version") == f"gguf-bridge {bridge.__version__}\n"
    code = (
        "from importlib.util import find_spec as f; print(*(f(n).origin for n in ('bridge.cli', 'bridge.cuda.tensor')))"
    )
    files = outside(program.with_name("python"), tmp_path, "-c", code).split()
    assert len(files) == 2
    assert all(Path(file).is_relative_to(program.parent.parent) for file in files)


@pytest.mark.exhaustive  # it compiles its kernels anew
@posix
def test_the_installed_program_converts_and_runs(program: Path, tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    outside(program, tmp_path, "convert", "model", "model.gguf", "--report", "report.json")
    bridge.convert(tmp_path / "model", tmp_path / "here.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == (tmp_path / "here.gguf").read_bytes()
    assert len(json.loads((tmp_path / "report.json").read_text())["tensors"]) == 46
    assert outside(program, tmp_path, "run", "model.gguf", "-p", "KING", "-n", 4, "--temp", 0).startswith("KING")
    assert "OK: every tensor" in outside(program, tmp_path, "verify", "model.gguf", "model")
