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
from bridge.errors import BridgeError, shortened
from bridge.progress import Bar
from bridge.repacking.command import add_parser as add_repack
from bridge.runtime.commands import add_parsers

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
  gguf-bridge verify out.gguf Qwen2.5-7B-GPTQ
  gguf-bridge repack old-gptq new --checkpoint-format gptq_v2
  gguf-bridge run out.gguf -p "Once upon a time"
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
    add_parsers(commands)
    _add_bench(commands)
    return parser


def _command(commands: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from (traceback)")
    return parser


def _add_config(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--config",
        metavar="DIR",
        type=Path,
        help="folder with config.json and tokenizer, for a bare .pt or .safetensors that came without them: that of "
        "the model it was made from",
    )


def _add_convert(commands: Any) -> None:
    p = _command(commands, "convert", "write a checkpoint as a GGUF file, keeping its integer codes", _convert)
    p.add_argument("checkpoint", nargs="?", help=f"{_CHECKPOINT}; that of --plan if not given")
    p.add_argument("out", nargs="?", help="the GGUF to write (default: the checkpoint's name, in the current folder)")
    _add_config(p)
    _add_choices(p)
    p.add_argument(
        "--plan",
        metavar="PLAN.json",
        type=Path,
        help="do what this file of `gguf-bridge plan` says, with the types in it",
    )
    p.add_argument(
        "--shard",
        metavar="I/N",
        type=_shard,
        help="with --plan: write shard I of its N alone, as a run of the whole would",
    )
    _add_calibration(p, "quantize what cannot keep its codes (act-order, FP8, floats) with this text; see quantize")
    _add_output(p)


def _add_output(p: argparse.ArgumentParser) -> None:
    output = p.add_argument_group("output")
    output.add_argument("--force", action="store_true", help="replace files that exist")
    output.add_argument("--modelfile", action="store_true", help="write an Ollama Modelfile beside the GGUF")
    output.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")
    output.add_argument("--threads", type=_positive, metavar="N", help="worker threads (default: one per CPU)")


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
    _add_config(p)
    _add_calibration(p, "the text: plain, .jsonl, or token ids (.pt, .npy, .safetensors)")
    _add_types(p, "Q4_K", "of the layers: a block type or a llama.cpp preset (default: %(default)s)")
    _add_file(p)
    groups = p.add_argument_group("a checkpoint instead of a GGUF")
    groups.add_argument("--format", choices=("gptq", "gptq_v2", "awq"), help="gptq is v1, awq AutoAWQ's gemm layout")
    groups.add_argument("--bits", type=int, default=4, metavar="N", help="of a code (default: %(default)s)")
    groups.add_argument(
        "--group-size", type=int, default=128, metavar="N", help="columns in a group, -1: all (default: %(default)s)"
    )
    groups.add_argument("--asymmetric", action="store_true", help="a zero point for each group (awq: always)")
    _add_output(p)


def _add_calibration(p: argparse.ArgumentParser, text: str) -> None:
    """The options of `bridge.calibration.Calibration`."""
    group = p.add_argument_group("calibration")
    group.add_argument("--calibrate", metavar="FILE", type=Path, help=text)
    group.add_argument("--samples", type=_positive, metavar="N", help="sequences at most (default: 128)")
    group.add_argument("--sequence-length", type=_positive, metavar="N", help="tokens in each (default: 2048)")
    group.add_argument("--seed", type=int, metavar="N", help="choose sequences at random (default: the first ones)")
    group.add_argument(
        "--method",
        metavar="NAME",
        help="gptaq (default): GPTQ that makes good what the layers before have lost; gptq; awq; rtn: round to nearest",
    )
    group.add_argument("--act-order", metavar="ORDER", help="of columns: none, free, static or fixed (default: fixed)")
    group.add_argument("--damping", type=float, metavar="X", help="of H, times its mean diagonal (default: 0.01)")
    group.add_argument(
        "--alpha", type=float, metavar="X", help="the most of the loss that gptaq makes good (default: 1)"
    )
    group.add_argument("--sweeps", type=_count, metavar="N", help="of refinement after GPTQ (default: 4)")
    group.add_argument("--feed", metavar="WHAT", help="the next layer's inputs: of quantized (default) or float layers")
    group.add_argument("--device", metavar="NAME", help="cpu (default) or cuda")
    group.add_argument("--offload", metavar="DIR", type=Path, help="keep activations in this folder, not in memory")
    group.add_argument(
        "--imatrix-out", metavar="FILE", type=Path, help="write llama.cpp's imatrix of the same tokens too"
    )


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
    _add_config(p)
    _add_choices(p)
    p.add_argument("--force", action="store_true", help="replace PLAN.json if it exists")
    p.add_argument("--threads", type=_positive, metavar="N", help="worker threads (default: one per CPU)")


def _add_choices(p: argparse.ArgumentParser) -> None:
    """The options that decide what a plan says."""
    types = _add_types(
        p,
        "auto",
        "auto (default): the smallest K-quant (Q8_0 for 8 bits) that keeps the codes and adds under 1%% of the "
        "checkpoint's own quantization noise, or where no type does, the smallest that adds under 15%%, Q8_0 at worst; "
        f"a block type ({', '.join(TYPES)}); or a llama.cpp preset (Q4_K_M, Q3_K_L, ...): its "
        "mixture for tensors that arrive as floats, and an upper bound for those that arrive as codes",
    )
    types.add_argument(
        "--exact", action="store_true", help="the smallest bit-exact type of each tensor, auto's where there is none"
    )
    types.add_argument(
        "--detect-lattice",
        action="store_true",
        help="look for floats that lie on a hidden grid (models that somebody dequantized, or trained for it), and "
        "carry the codes that they stand for; `inspect` says where there are any",
    )
    types.add_argument(
        "--for",
        dest="target",
        metavar="llama.cpp@BUILD",
        help="what must load the file. Since build 10015 (July 2026) llama.cpp has Q2_0, 2.25 bits a weight, which "
        "holds symmetric 2-bit codes bit for bit: auto takes it for such builds alone, --exact unless an earlier one "
        "is named",
    )
    types.add_argument(
        "--actorder-type",
        metavar="TYPE",
        help="of act-order tensors, whose codes GGUF cannot hold (default: the smallest that adds under 15%% of "
        "the noise)",
    )
    types.add_argument(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="llama.cpp's importance matrix (GGUF), for tensors that are requantized",
    )
    _add_file(p)


def _add_types(p: argparse.ArgumentParser, default: str, help: str) -> Any:
    types = p.add_argument_group("types")
    types.add_argument("--type", default=default, metavar="TYPE", help=help)
    types.add_argument(
        "--output-type", metavar="TYPE", help="of the output head: a block type, F16, BF16 or F32 (default: by --type)"
    )
    types.add_argument("--token-embd-type", metavar="TYPE", help="of the token embeddings, likewise")
    types.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        type=_pair,
        help="of tensors whose GGUF name matches, e.g. 'ffn_down=Q6_K'; may be repeated, the last match wins",
    )
    return types


def _add_file(p: argparse.ArgumentParser) -> None:
    """What else decides on the GGUF."""
    p.add_argument(
        "--template",
        metavar="MODEL.gguf",
        help="a GGUF that llama.cpp's converter made of the same model, in any type, or a Hub repository that has some "
        "(org/model-GGUF: the smallest file that will do): for architectures that are not known here. Names, metadata "
        "and tokenizer are taken from it, and tensors that are not in the checkpoint",
    )
    p.add_argument(
        "--split-max-size", metavar="SIZE", type=_size, help="write shards of at most this size, e.g. 4G or 500M"
    )
    p.add_argument(
        "--pre", metavar="NAME", help="tokenizer.ggml.pre, where the pre-tokenizer is not recognised (e.g. qwen2)"
    )


def _add_verify(commands: Any) -> None:
    p = _command(commands, "verify", "measure a GGUF on disk against the checkpoint it was made from", _verify)
    p.add_argument("gguf", type=Path, help="the GGUF, or its first shard")
    p.add_argument("checkpoint", help="folder with config.json and weights, a Hub id (org/name), or a .pt file")
    _add_config(p)
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
    _add_config(p)
    p.add_argument("--template", metavar="MODEL.gguf", help="the template that convert would be given")


def _add_bench(commands: Any) -> None:
    p = _command(commands, "bench", "time products with quantized weights beside the memory's own speed", _bench)
    p.add_argument("what", help=f"a GGUF, whose largest tensor of each type is timed, or a type ({', '.join(TYPES)})")
    p.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: all)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if it can be")


def _convert(a: argparse.Namespace) -> int:
    from bridge.conversion import convert
    from bridge.report import check_report

    if a.checkpoint is None and a.plan is None:
        raise BridgeError("give the checkpoint to convert, or --plan; see gguf-bridge convert --help")
    if a.plan is not None and a.out is None and str(a.checkpoint).endswith(".gguf"):
        a.checkpoint, a.out = None, a.checkpoint  # `convert --plan plan.json out.gguf`
    if a.report:
        check_report(a.report)
    with Bar("quantizing", unit=" layers") as layers, Bar("converting") as bar:
        report = convert(
            a.checkpoint,
            a.out,
            config=a.config,
            **_choices(a),
            calibrate=_calibration(a, layers),
            plan=a.plan,
            shard=a.shard,
            modelfile=a.modelfile,
            force=a.force,
            threads=a.threads,
            progress=bar,
        )
    print(report.table())
    if a.report:
        report.save(a.report)
    return 0


def _choices(a: argparse.Namespace) -> dict[str, Any]:
    """What `_add_choices` asked for, as `convert` takes it."""
    if a.exact and a.type != "auto":
        raise BridgeError("--exact and --type ask for different things; give one")
    names = (
        "output_type", "token_embd_type", "actorder_type", "target", "detect_lattice", "imatrix", "pre", "template",
        "split_max_size",
    )  # fmt: skip
    given = {name: getattr(a, name) for name in names}
    return {**given, "type": "exact" if a.exact else a.type, "tensor_types": a.tensor_type}


def _calibration(a: argparse.Namespace, progress: Any) -> Any:
    """What `_add_calibration` asked for, as `convert` takes it; None where it asked for nothing."""
    names = "samples", "seed", "method", "act_order", "damping", "alpha", "sweeps", "feed", "device", "offload"
    given = {name: getattr(a, name) for name in (*names, "imatrix_out") if getattr(a, name) is not None}
    if a.sequence_length is not None:
        given["length"] = a.sequence_length
    if a.calibrate is None and a.method != "rtn":
        if given:
            raise BridgeError(
                f"--{next(iter(given)).replace('_', '-')} is for calibration: give the text, --calibrate FILE"
            )
        return None
    from bridge.calibration import Calibration

    return Calibration(a.calibrate, **given, progress=progress)


def _quantize(a: argparse.Namespace) -> int:
    if a.calibrate is None and a.method != "rtn":
        raise BridgeError("quantize needs a text: --calibrate FILE; without one, `convert` rounds floats to nearest")
    if a.format is None:
        block = BLOCKS.get(a.type.upper())
        if a.output_type is None and block is not None and block.bpw < BLOCKS["Q6_K"].bpw:
            a.output_type = "Q6_K"  # as llama.cpp's presets have it
        return _convert(a)
    from bridge.quantizing import quantize_checkpoint

    with Bar("quantizing", unit=" layers") as layers, Bar("writing") as bar:
        done = quantize_checkpoint(
            a.checkpoint,
            a.out,
            a.format,
            config=a.config,
            bits=a.bits,
            group_size=a.group_size,
            symmetric=not (a.asymmetric or a.format == "awq"),
            calibrate=_calibration(a, layers),
            force=a.force,
            progress=bar,
        )
    print(done.summary())
    return 0


def _plan(a: argparse.Namespace) -> int:
    from bridge.conversion import plan_checkpoint
    from bridge.describe import plan_table

    with Bar("planning", unit=" tensors") as bar:
        plan = plan_checkpoint(
            a.checkpoint, config=a.config, **_choices(a), threads=a.threads, out=a.out, force=a.force, progress=bar
        )
    print("\n".join(plan_table(plan)))
    if a.out:
        print(f"wrote {a.out}")
    return 0


def _verify(a: argparse.Namespace) -> int:
    from bridge.report import check_report
    from bridge.verification import failures, verify

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
    from bridge.describe import describe

    print(describe(a.path, a.config, a.template))
    return 0


def _bench(a: argparse.Namespace) -> int:
    from bridge.runtime.bench import bench

    for line in bench(a.what, a.threads, device=a.device):
        print(line, flush=True)
    return 0


def _pair(text: str) -> tuple[str, str]:
    pattern, sign, name = text.rpartition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE")
    return pattern, name


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N such as 3/12")
    return int(match[1]), int(match[2])


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 500M")
    return int(float(match[1]) * 1000 ** ("KMGT".index(match[2]) + 1 if match[2] else 0))


if __name__ == "__main__":
    sys.exit(main())
