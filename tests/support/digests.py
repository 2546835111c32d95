"""Digests of what the program writes, to compare before and after a change that must not change any byte.

    python -m tests.support.digests before.txt [--only read families convert export quantize] [--match TEXT]
    python -m tests.support.digests after.txt && diff before.txt after.txt

Converts the fixtures and the checkpoints in BRIDGE_SHARED to every type, exports GGUFs in every format, quantizes tiny
models by every method, and converts small models of all families there and back. One line per output: its SHA-256, or
the error instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.blocks import ROUNDED, TYPES
from bridge.errors import BridgeError

ROOT = Path(__file__).parent.parent.parent
SHARED = Path(os.environ.get("BRIDGE_SHARED", ROOT.parent / "shared"))
FIXTURES = sorted(path.parent for path in (ROOT / "tests" / "data").rglob("config.json"))
CHECKPOINTS = [
    path.parent for folder in ("checkpoints", "more") for path in sorted(SHARED.glob(f"{folder}/*/config.json"))
]
MODELS = [path.parent for path in sorted(SHARED.glob("models/*/config.json"))]
FORMATS = ("floats", "gptq", "gptq_v2", "gptq_p", "awq", "compressed-tensors", "mlx", "hqq", "modelopt")
Job = Callable[[Path], Path]


def digest(path: Path) -> str:
    """Of a file, or of a folder's files and their names."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{file.relative_to(path)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def reading(checkpoint: Path) -> Job:
    """The modules' types, sizes and values, one after another in a file."""

    def job(folder: Path) -> Path:
        lines = []
        with bridge.open_checkpoint(checkpoint, needs_config=False) as opened:
            for name, module in opened.modules.items():
                tensor = opened.read_module(name)
                values = hashlib.sha256(np.ascontiguousarray(tensor.dequantize()).tobytes()).hexdigest()
                lines.append(
                    f"{name} {type(tensor).__name__} {module.bits} {module.group_size} {module.shape} {values}"
                )
            lines += [opened.settings(), *opened.notes]
        (folder / "modules.txt").write_text("\n".join(lines))
        return folder / "modules.txt"

    return job


def converting(checkpoint: Path, **options: Any) -> Job:
    def job(folder: Path) -> Path:
        bridge.convert(checkpoint, folder / "model.gguf", **options)
        return folder / "model.gguf"

    return job


def exporting(checkpoint: Path, type: str, format: str, bits: int | None, config: Path | None) -> Job:
    def job(folder: Path) -> Path:
        bridge.convert(checkpoint, folder / "model.gguf", type=type)
        bridge.export(folder / "model.gguf", folder / "out", format, bits=bits, config=config)
        return folder / "out"

    return job


def there_and_back(golden: Path) -> Job:
    """A small model of a family as a GGUF of floats, and that as a checkpoint again: both in one folder."""

    def job(folder: Path) -> Path:
        from tests.models.test_converter import write_checkpoint

        checkpoint = write_checkpoint(json.loads(golden.read_text()), folder / "checkpoint")
        (folder / "out").mkdir()
        bridge.convert(checkpoint, folder / "out" / "model.gguf", type="F16", mmproj_type="none")
        try:
            bridge.export(folder / "out" / "model.gguf", folder / "out" / "back")
        except BridgeError as e:
            (folder / "out" / "error.txt").write_text(re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "", str(e)))
        return folder / "out"

    return job


def quantizing(model: Path, arguments: list[str], name: str = "out.gguf") -> Job:
    def job(folder: Path) -> Path:
        from bridge.cli import main

        threads = [] if "--format" in arguments else ["--threads", "2"]
        command = ["quantize", str(model), str(folder / name), *threads, *arguments]
        if code := main(command):
            raise BridgeError(f"exit code {code}")
        return folder / name

    return job


def reads() -> Iterator[tuple[str, Job]]:
    for checkpoint in (*FIXTURES, *CHECKPOINTS):
        yield f"read {checkpoint.parent.name}/{checkpoint.name}", reading(checkpoint)


def converts() -> Iterator[tuple[str, Job]]:
    for checkpoint in (*FIXTURES, *CHECKPOINTS):
        if not json.loads((checkpoint / "config.json").read_text()).keys() & {"architectures", "model_type"}:
            continue
        for type in ("auto", "exact", "F16", *TYPES, *ROUNDED, "Q4_K_M", "IQ2_M"):
            yield f"convert {checkpoint.parent.name}/{checkpoint.name} {type}", converting(checkpoint, type=type)
    for model in MODELS:
        for type in ("auto", "BF16", *TYPES, *ROUNDED, "Q4_K_M", "Q3_K_L"):
            yield f"convert {model.name} {type}", converting(model, type=type)


def families() -> Iterator[tuple[str, Job]]:
    for golden in sorted((ROOT / "tests" / "data" / "converter").glob("*.json")):
        yield f"family {golden.stem}", there_and_back(golden)


def exports() -> Iterator[tuple[str, Job]]:
    few = ("qwen3-gptq-4bit-g128-sym", "qwen3-gptq-4bit-g64-asym-actorder", "qwen3-gptq-8bit-g128-sym", "mlx-moe")
    for checkpoint in (c for c in (*CHECKPOINTS, *FIXTURES) if c.name in few):
        for format in FORMATS:
            for bits in (None, 4):
                name = f"export {checkpoint.parent.name}/{checkpoint.name} {format} {bits}"
                yield name, exporting(checkpoint, "auto", format, bits, None)
    for type in ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "NVFP4", "F16"):
        for format in FORMATS:
            for config in (None, MODELS[1]):
                name = f"export {MODELS[1].name} {type} {format} config={config is not None}"
                yield name, exporting(MODELS[1], type, format, None, config)


def quantized() -> Iterator[tuple[str, Job]]:
    model = MODELS[1]
    text = ["--calibrate", str(SHARED / "text" / "calib_wiki.txt"), "--samples", "12", "--sequence-length", "64"]
    for method in ("rtn", "imatrix", "gptq", "gptaq", "two-sided"):
        texts = text if method != "rtn" else []
        few = ("Q4_K", "Q2_K", "Q4_K_M")
        for type in few if method != "two-sided" else (*few, "Q8_0", "IQ4_XS", "IQ3_S", "IQ2_XS", "IQ1_M"):
            arguments = ["--type", type, "--method", method, *texts]
            yield f"quantize {model.name} {method} {type}", quantizing(model, arguments)
    for format in ("gptq", "gptq_v2", "awq"):
        for method in ("gptq", "gptaq", "awq", "rtn"):
            for more in ([], ["--asymmetric"], ["--bits", "8"]) if format == "gptq" else ([],):
                arguments = ["--format", format, "--method", method, *more]
                texts = text if method != "rtn" else []
                yield f"quantize {model.name} {' '.join(arguments)}", quantizing(model, [*arguments, *texts], "out")
    for option in (
        "--feed float", "--act-order none", "--act-order static", "--sweeps 0", "--output-type Q6_K",
        "--token-embd-type Q4_K", "--seed 3", "--memory 2G",
    ):  # fmt: skip
        yield f"quantize {model.name} two-sided {option}", quantizing(model, ["--type", "Q4_K", *text, *option.split()])
    yield f"quantize {model.name} --size", quantizing(model, ["--size", "2.2M", *text])
    yield f"quantize {model.name} --size imatrix", quantizing(model, ["--size", "2.2M", "--method", "imatrix", *text])


SECTIONS = {"read": reads, "families": families, "convert": converts, "export": exports, "quantize": quantized}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--match", default="", help="only outputs whose line has this text")
    options = parser.parse_args()
    with options.out.open("w") as out:
        for section in options.only:
            for name, job in SECTIONS[section]():
                if options.match not in name:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        result = digest(job(Path(folder)))
                        shown = ""
                    except BridgeError as e:
                        result = str(e).replace(folder, "").replace(f"{ROOT}/", "").split("\n")[0]
                        shown = f": NO DIGEST, {result}"
                print(f"{name}\t{result}", file=out, flush=True)
                print(f"{name}{shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
