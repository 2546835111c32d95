"""`gguf-bridge quantize`."""

import argparse
from typing import Any

from bridge.checkpoint.formats.registry import QUANTIZED, in_words
from bridge.cli import options
from bridge.cli.files import convert
from bridge.cli.files.upload import Uploading, add_upload
from bridge.conversion.planning.options import ConvertOptions
from bridge.errors import BridgeError
from bridge.quantize.text.sources import DEFAULT
from bridge.system.progress import Bar, say

_GROUPS = ("bits", "group_size", "asymmetric", "clamp")  # of a checkpoint


def add_parser(commands: Any) -> None:
    p = options.command(commands, "quantize", run)
    p.add_argument(
        "checkpoint", metavar="MODEL", help="folder with config.json and float weights, a Hub id (org/name), or a GGUF"
    )
    p.add_argument("out", nargs="?", help="GGUF to write, or folder of --format (default: the model's name and type)")
    p.add_argument(
        "--type", default=argparse.SUPPRESS, metavar="TYPE",
        help="a block type or a llama.cpp preset for the layers, or F16, BF16 or F32, which need no text "
        "(default: Q4_K, without --size or --bpw; of a checkpoint with codes, those that hold them)",
    )  # fmt: skip
    options.add_calibration(p)
    options.add_budget(p)
    options.add_options(p, "types", ConvertOptions, [name for name in convert.TYPES if name != "type"])
    options.add_options(p, "model", ConvertOptions, convert.MODEL)
    p.add_argument(
        "--format", choices=QUANTIZED, metavar="NAME",
        help=f"write a checkpoint instead of a GGUF: {in_words(QUANTIZED)}",
    )  # fmt: skip
    groups = options.further(p, "with --format")
    unset = argparse.SUPPRESS  # so that `run` sees what was asked for; the defaults are the function's
    groups.add_argument("--bits", type=int, default=unset, metavar="N", help="bits of a code (default: 4)")
    groups.add_argument(
        "--group-size", type=int, default=unset, metavar="N", help="columns in a group, -1: all (default: 128)"
    )
    groups.add_argument(
        "--asymmetric", action="store_true", default=unset, help="store a zero point for each group (awq: always)"
    )
    groups.add_argument(
        "--clamp", action="store_true", default=unset, help="gptq: change zero points of 0, which v1 cannot hold, to 1"
    )
    options.add_output(p)
    add_upload(p)


def run(a: argparse.Namespace) -> int:
    """Quantize to a GGUF or to a checkpoint."""
    from bridge.conversion.quantize_gguf import needs_text, quantize_gguf

    quantizes = a.format is not None or needs_text(getattr(a, "type", ""))
    if quantizes and not hasattr(a, "text") and getattr(a, "method", None) != "rtn":
        a.text = [DEFAULT]
    groups = {name: getattr(a, name) for name in _GROUPS if hasattr(a, name)}
    if a.format is None:
        if groups:
            raise BridgeError(f"{options.as_flag(next(iter(groups)))} is for a checkpoint: give --format")
        return convert.write(
            a, lambda given, bar: quantize_gguf(a.checkpoint, a.out, progress=bar, save_as=a.report, **given)
        )
    if options.budget(a, None) is not None:
        raise BridgeError("--size and --bpw choose among GGUF types; a checkpoint's groups are all alike, see --bits")
    of_gguf = options.given(a, ConvertOptions).keys() - {"config", "force"}
    if of_gguf:
        raise BridgeError(f"{options.as_flag(min(of_gguf))} is for a GGUF; leave it out with --format {a.format}")
    say(f"reading {a.checkpoint}")
    from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint

    if a.report:
        from bridge.system.report import check_report

        check_report(a.report)
    uploading = Uploading(a, a.checkpoint, a.out)
    with Bar("quantizing", unit=" layers", timed=False) as layers, Bar("writing") as bar:
        settings = options.calibration(a, layers, layers.say)
        assert settings is not None
        done = quantize_checkpoint(
            a.checkpoint, a.out, a.format, config=getattr(a, "config", None),
            symmetric=not groups.pop("asymmetric", False), **groups, calibrate=settings,
            force=getattr(a, "force", False), progress=bar,
        )  # fmt: skip
    print(done.summary())
    if a.report:
        done.save(a.report)
    if done.modules:
        uploading.finish(done)
    return 0
