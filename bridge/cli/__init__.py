"""The command line: arguments to calls, results to text. Errors are one line and exit code 2."""

from __future__ import annotations

import argparse
import gc
import io
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from bridge.blocks import BLOCKS, TYPES
from bridge.cli.cache import add_parser as add_cache
from bridge.cli.options import (
    add_budget,
    add_calibration,
    add_choices,
    add_config,
    add_file,
    add_output,
    add_types,
    budget,
    calibration,
    choices,
    positive,
    shard,
)
from bridge.cli.plot.command import add_parser as add_plot
from bridge.cli.repack import add_parser as add_repack
from bridge.cli.run import add_parsers
from bridge.errors import BridgeError, shortened
from bridge.system.progress import Bar

_DESCRIPTION = """\
GPTQ, AWQ, compressed-tensors, MLX, HQQ and other quantized checkpoints become
GGUF files for llama.cpp without quantizing twice: the integer codes are carried
over wherever GGUF can hold them.
"""
_CHECKPOINT = "folder with config.json and weights, a Hub id to download (org/name, org/name@branch), or a .pt"
_EXAMPLES = """\
examples:
  gguf-bridge inspect Qwen2.5-7B-GPTQ       what it holds, what becomes of it
  gguf-bridge convert Qwen2.5-7B-GPTQ       writes Qwen2.5-7B-GPTQ.gguf
  gguf-bridge convert org/name out.gguf     downloads from the Hub first
  gguf-bridge quantize Qwen2.5-7B out.gguf --type Q4_K --calibrate text.txt
  gguf-bridge quantize Qwen2.5-7B out.gguf --size 4.2G --calibrate text.txt
  gguf-bridge verify out.gguf Qwen2.5-7B-GPTQ
  gguf-bridge repack old-gptq new --checkpoint-format gptq_v2
  gguf-bridge run out.gguf -p "Once upon a time"
  gguf-bridge run org/name -p "Once upon a time"    converts it first
  gguf-bridge chat out.gguf
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: 0, 1 (verify found a tensor beyond its threshold) or 2 (error)."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    gc.set_threshold(100_000)  # Numba brings a million objects that stay: looking through them often costs 0.1 s
    for name in ("SIGTERM", "SIGHUP"):  # what is half-written goes away as with Ctrl-C
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: no file of ours may get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a model may say what the console's encoding has not
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")  # the libraries' own, such as torch's on odd pickles
            arguments = _parser().parse_args(argv or ["--help"])
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `gguf-bridge inspect ... | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as problem:
        if debug:
            traceback.print_exception(problem)
        print("error:", shortened(re.sub(r"\s*\n\s*", " ", _message(problem))), file=sys.stderr)
        return 2


def _message(problem: BaseException) -> str:
    if isinstance(problem, BridgeError):
        return str(problem)
    if isinstance(problem, KeyboardInterrupt):
        return "interrupted; nothing half-written was left behind"
    if isinstance(problem, OSError):
        return f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem)
    if isinstance(problem, MemoryError):
        return "out of memory; convert needs least with --threads 1, run and perplexity with a small --context"
    return f"unexpected {type(problem).__name__} ({problem}); please report it with what --debug prints"


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one line like all others."""

    def error(self, message: str) -> NoReturn:
        raise BridgeError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    from bridge import __version__

    parser = _Parser(
        prog="gguf-bridge",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_convert(commands)
    _add_quantize(commands)
    _add_plan(commands)
    _add_verify(commands)
    _add_inspect(commands)
    add_repack(commands)
    add_parsers(commands, _converted)
    _add_bench(commands)
    add_plot(commands)
    add_cache(commands)
    return parser


def _command(commands: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from (traceback)")
    return parser


def _add_convert(commands: Any) -> None:
    p = _command(commands, "convert", "write a checkpoint as a GGUF file, keeping its integer codes", _convert)
    p.add_argument("checkpoint", nargs="?", help=f"{_CHECKPOINT}; that of --plan if not given")
    p.add_argument("out", nargs="?", help="the GGUF to write (default: the checkpoint's name, in the current folder)")
    add_config(p)
    add_choices(p)
    p.add_argument(
        "--plan",
        metavar="PLAN.json",
        type=Path,
        help="do what this file of `gguf-bridge plan` says, with the types in it",
    )
    p.add_argument(
        "--shard",
        metavar="I/N",
        type=shard,
        help="with --plan: write shard I of its N alone, as a run of the whole would",
    )
    add_calibration(p, "quantize what cannot keep its codes (act-order, FP8, floats) with this text; see quantize")
    add_budget(p, requantize=True)
    add_output(p)


def _add_quantize(commands: Any) -> None:
    p = _command(
        commands, "quantize", "quantize a float model with the Hessians of a text, as GGUF or checkpoint", _quantize
    )
    # what `convert` has options for, and this has not
    p.set_defaults(plan=None, shard=None, actorder_type=None, imatrix=None, target=None)
    p.set_defaults(exact=False, detect_lattice=False)
    p.add_argument(
        "checkpoint", metavar="MODEL", help="folder with config.json and float weights, or a Hub id (org/name)"
    )
    p.add_argument("out", nargs="?", help="the GGUF to write, or the folder of --format (default: the model's name)")
    add_config(p)
    add_calibration(p, "the text: plain, .jsonl, or token ids (.pt, .npy, .safetensors)")
    add_budget(p)
    add_types(p, None, "of the layers: a block type or a llama.cpp preset (default: Q4_K)")
    add_file(p)
    groups = p.add_argument_group("a checkpoint instead of a GGUF")
    groups.add_argument("--format", choices=("gptq", "gptq_v2", "awq"), help="gptq is v1, awq AutoAWQ's gemm layout")
    groups.add_argument("--bits", type=int, default=4, metavar="N", help="of a code (default: %(default)s)")
    groups.add_argument(
        "--group-size", type=int, default=128, metavar="N", help="columns in a group, -1: all (default: %(default)s)"
    )
    groups.add_argument("--asymmetric", action="store_true", help="a zero point for each group (awq: always)")
    add_output(p)


def _add_plan(commands: Any) -> None:
    p = _command(commands, "plan", "show or write what convert would do, tensor by tensor", _plan)
    p.add_argument("checkpoint", help=_CHECKPOINT)
    p.add_argument(
        "-o",
        "--out",
        metavar="PLAN.json",
        type=Path,
        help="write the plan for `convert --plan`; types in it may be edited",
    )
    add_config(p)
    add_choices(p)
    p.add_argument("--force", action="store_true", help="replace PLAN.json if it exists")
    p.add_argument("--threads", type=positive, metavar="N", help="worker threads (default: one per CPU)")


def _add_verify(commands: Any) -> None:
    p = _command(commands, "verify", "measure a GGUF on disk against the checkpoint it was made from", _verify)
    p.add_argument("gguf", type=Path, help="the GGUF, or its first shard")
    p.add_argument("checkpoint", help="folder with config.json and weights, a Hub id (org/name), or a .pt file")
    add_config(p)
    p.add_argument("--template", metavar="MODEL.gguf", help="the template that it was made with, if any")
    p.add_argument(
        "--max-share",
        type=float,
        metavar="X",
        help="fail (exit code 1) where a tensor that came as codes adds more than this share of the "
        "checkpoint's own quantization noise (default: 0.15; Q8_0 may instead meet --max-nmse). Codes that the "
        "type holds bit for bit must be there in any case",
    )
    p.add_argument(
        "--max-nmse",
        type=float,
        default=1e-4,
        metavar="X",
        help="fail where a tensor that came as floats has a squared error beyond this share of its squared "
        "weights (default: 1e-4, which Q8_0 meets)",
    )
    p.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")


def _add_inspect(commands: Any) -> None:
    p = _command(commands, "inspect", "describe a checkpoint or a GGUF, and what convert would do", _inspect)
    p.add_argument("path", help="checkpoint folder, Hub id (org/name), .pt or GGUF file")
    add_config(p)
    p.add_argument("--template", metavar="MODEL.gguf", help="the template that convert would be given")


def _add_bench(commands: Any) -> None:
    p = _command(commands, "bench", "time products with quantized weights beside the memory's own speed", _bench)
    p.add_argument("what", help=f"a GGUF, whose largest tensor of each type is timed, or a type ({', '.join(TYPES)})")
    p.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if it can be")


def _convert(a: argparse.Namespace) -> int:
    from bridge.conversion.converter import convert
    from bridge.conversion.report import check_report
    from bridge.models.modelfile import ollama_line

    if a.checkpoint is None and a.plan is None:
        raise BridgeError("give the checkpoint to convert, or --plan; see gguf-bridge convert --help")
    if a.plan is not None and a.out is None and str(a.checkpoint).endswith(".gguf"):
        a.checkpoint, a.out = None, a.checkpoint  # `convert --plan plan.json out.gguf`
    if a.report:
        check_report(a.report)
    with (
        Bar("measuring", unit=" steps") as steps,
        Bar("quantizing", unit=" layers") as layers,
        Bar("converting") as bar,
    ):
        report = convert(
            a.checkpoint,
            a.out,
            config=a.config,
            **choices(a),
            calibrate=calibration(a, layers),
            budget=budget(a, steps),
            plan=a.plan,
            shard=a.shard,
            modelfile=a.modelfile,
            force=a.force,
            threads=a.threads,
            progress=bar,
        )
    print(report.table())
    if a.modelfile:
        print(f"Ollama takes it: {ollama_line(report.outputs[0])}")
    if a.report:
        report.save(a.report)
    return 0


def _quantize(a: argparse.Namespace) -> int:
    if a.calibrate is None and a.method != "rtn":
        raise BridgeError("quantize needs a text: --calibrate FILE; without one, `convert` rounds floats to nearest")
    asked = budget(a, None)
    if a.type is None:
        a.type = "auto" if asked else "Q4_K"
    if a.format is None:
        block = BLOCKS.get(a.type.upper())
        if a.output_type is None and block is not None and block.bpw < BLOCKS["Q6_K"].bpw:
            a.output_type = "Q6_K"  # as llama.cpp's presets have it
        return _convert(a)
    if asked:
        raise BridgeError("--size and --bpw choose among GGUF types; a checkpoint's groups are all alike, see --bits")
    from bridge.conversion.to_checkpoint import quantize_checkpoint

    with Bar("quantizing", unit=" layers") as layers, Bar("writing") as bar:
        done = quantize_checkpoint(
            a.checkpoint,
            a.out,
            a.format,
            config=a.config,
            bits=a.bits,
            group_size=a.group_size,
            symmetric=not (a.asymmetric or a.format == "awq"),
            calibrate=calibration(a, layers),
            force=a.force,
            progress=bar,
        )
    print(done.summary())
    return 0


def _plan(a: argparse.Namespace) -> int:
    from bridge.cli.inspect import plan_table
    from bridge.conversion.converter import plan_checkpoint

    with Bar("planning", unit=" tensors") as bar:
        plan = plan_checkpoint(
            a.checkpoint, config=a.config, **choices(a), threads=a.threads, out=a.out, force=a.force, progress=bar
        )
    print("\n".join(plan_table(plan)))
    if a.out:
        print(f"wrote {a.out}")
    return 0


def _verify(a: argparse.Namespace) -> int:
    from bridge.conversion.report import check_report
    from bridge.conversion.verify import failures, verify

    if a.report:
        check_report(a.report)
    with Bar("verifying") as bar:
        report = verify(a.gguf, a.checkpoint, config=a.config, template=a.template, progress=bar)
    print(report.table("read"))
    if a.report:
        report.save(a.report)
    failed = failures(report, a.max_share, a.max_nmse)
    for line in failed:
        print(f"FAILED {line}")
    print(
        f"{len(failed)} of {len(report.tensors)} tensors failed (thresholds: --max-share, --max-nmse)"
        if failed
        else "all within threshold"
    )
    return 1 if failed else 0


def _inspect(a: argparse.Namespace) -> int:
    from bridge.cli.inspect import describe

    print(describe(a.path, a.config, a.template))
    return 0


def _converted(a: argparse.Namespace) -> Path:
    """The GGUF that `run` was given, or made of the checkpoint that it was given."""
    path = Path(a.model)
    if path.suffix == ".gguf" or (path.is_file() and path.suffix != ".pt" and a.config is None):
        return path
    from bridge.conversion.cache import converted
    from bridge.runtime.decoder_config import ARCHITECTURES

    with Bar("converting") as bar:
        return converted(a.model, a.config, ARCHITECTURES, bar)


def _bench(a: argparse.Namespace) -> int:
    from bridge.runtime.bench import bench

    for line in bench(a.what, device=a.device, threads=a.threads):
        print(line, flush=True)
    return 0
