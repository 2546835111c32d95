"""`gguf-bridge convert`."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli import options
from bridge.cli.files.upload import Uploading, add_upload
from bridge.conversion.planning.options import ConvertOptions
from bridge.errors import BridgeError
from bridge.system.progress import Bar, say

if TYPE_CHECKING:
    from bridge.conversion.writing.report import Report

TYPES = ["type", "output_type", "token_embd_type", "tensor_types"]
MODEL = ["config", "template", "name", "author", "metadata", "pre"]


def add_parser(commands: Any) -> None:
    p = options.command(commands, "convert", run)
    p.add_argument("checkpoint", nargs="?", help=f"{options.SOURCE}; that of --plan if not given")
    p.add_argument(
        "out", nargs="?", help="the GGUF to write (default: the checkpoint's name and the type, in the current folder)"
    )
    add_plan_options(p)
    options.add_options(p, "plan", ConvertOptions, ["plan", "shard", "merge"])
    options.add_calibration(p)
    options.add_budget(p, requantize=True)
    options.add_output(p)
    add_upload(p)


def add_plan_options(p: argparse.ArgumentParser) -> None:
    """The options that a plan depends on; `choices` reads them."""
    names = [*TYPES, "actorder_type", "target", "detect_lattice", "imatrix"]
    options.add_options(p, "types", ConvertOptions, names)
    options.further(p, "types").add_argument("--exact", action="store_true", help="short for --type exact")
    options.add_options(p, "model", ConvertOptions, MODEL)


def choices(a: argparse.Namespace) -> dict[str, Any]:
    """The fields of ConvertOptions that the command line gave."""
    values = options.given(a, ConvertOptions)
    if getattr(a, "exact", False):
        if "type" in values:
            raise BridgeError("--exact and --type ask for different things; give one")
        values["type"] = "exact"
    return values


def run(a: argparse.Namespace) -> int:
    plan = getattr(a, "plan", None)
    say(f"reading {a.checkpoint or plan}")
    from bridge.conversion.converter import convert_as

    if a.checkpoint is None and plan is None:
        raise BridgeError("give the checkpoint to convert, or --plan; see gguf-bridge convert --help")
    if plan is not None and a.out is None and str(a.checkpoint).endswith(".gguf"):
        a.checkpoint, a.out = None, a.checkpoint  # `convert --plan plan.json out.gguf`
    return write(a, lambda given, bar: convert_as(a.checkpoint, a.out, ConvertOptions(**given), bar, a.report))


def write(a: argparse.Namespace, make: Callable[[dict[str, Any], Bar], "Report"]) -> int:
    """Have a GGUF made with the options that the command line gave, and say what came of it."""
    uploading = Uploading(a, a.checkpoint)
    with (
        Bar("measuring", unit=" steps") as steps,
        Bar("quantizing", unit=" layers", timed=False) as layers,
        Bar("converting") as bar,
    ):
        calibrate = options.calibration(a, layers, layers.say)
        report = make({**choices(a), "calibrate": calibrate, "budget": options.budget(a, steps)}, bar)
    print(report.table())
    if a.report:
        report.save(a.report)
    if not report.outputs:
        return 0
    if getattr(a, "shard", None) is None:
        print(_next_steps(report.outputs, hasattr(a, "modelfile")))
    uploading.finish(report)
    return 0


def _next_steps(outputs: list[Path], modelfile: bool) -> str:
    """The commands that use a new GGUF, with its vision tower if there is one."""
    from bridge.conversion.planning.mmproj import mmproj_path
    from bridge.gguf_file.purpose import purpose
    from bridge.gguf_file.reader import read_gguf
    from bridge.models.ollama.modelfile import ollama_line

    gguf = outputs[0]
    file, use = shlex.quote(str(gguf)), purpose(read_gguf(gguf).metadata)
    if use == "guesses":
        return f"next:\n  gguf-bridge run MODEL.gguf --draft {file}"
    if use in ("vectors", "scores"):
        path = "rerank" if use == "scores" else "embeddings"
        lines = [f"gguf-bridge serve {file}   (/v1/{path})", f"llama-embedding -m {file} -p 'A text'"]
    else:
        lines = [f"llama-cli -m {file}"]
    if use == "text":
        lines.insert(0, f'gguf-bridge run {file} -p "Once upon a time"')
    tower = [output for output in outputs if output == mmproj_path(gguf)]
    if tower:
        lines.append(f"llama-mtmd-cli -m {file} --mmproj {shlex.quote(str(tower[0]))} --image IMAGE -p 'What is it?'")
    lines.append(ollama_line(gguf) + ("" if modelfile else "   (--modelfile writes the Modelfile)"))
    return "\n  ".join(["next:", *lines])
