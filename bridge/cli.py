"""The command line: arguments to calls, results to text. Errors are one line and exit code 2."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bridge.blocks import BLOCKS
from bridge.errors import BridgeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: 0, 1 (verify found a tensor beyond its threshold) or 2 (error)."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return arguments.run(arguments)
    except BridgeError as problem:
        if arguments.debug:
            raise
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("error: interrupted; no file was changed", file=sys.stderr)
        return 2


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gguf-bridge", description="GPTQ and AWQ checkpoints become GGUF files without quantizing twice."
    )
    from bridge import __version__

    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands)
    _add_verify(commands)
    _add_inspect(commands)
    return parser


def _command(commands: Any, name: str, help: str, run: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_convert(commands: Any) -> None:
    p = _command(commands, "convert", "write a checkpoint as a GGUF file, keeping its integer codes", _convert)
    p.add_argument("checkpoint", help="folder with config.json and weights, or a Hub id (org/name)")
    p.add_argument("out", nargs="?", help="the GGUF to write (default: the checkpoint's name, here)")
    p.add_argument(
        "--type",
        default="auto",
        metavar="TYPE",
        help="auto (default): the smallest K-quant that adds under 1%% of the checkpoint's own noise; "
        f"a block type ({', '.join(BLOCKS)}); or a llama.cpp preset (Q4_K_M, Q3_K_L, ...): its mixture for "
        "tensors that arrive as floats, never more bits than the codes need for the others",
    )
    p.add_argument(
        "--exact", action="store_true", help="the smallest bit-exact type of each tensor, where there is one"
    )
    p.add_argument("--output-type", metavar="TYPE", help="for the output head (Q8_0 if it arrives as floats)")
    p.add_argument("--token-embd-type", metavar="TYPE", help="for the embeddings (likewise)")
    p.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        type=_pair,
        help="for tensors whose GGUF name matches; may be repeated, the last match wins",
    )
    p.add_argument("--actorder-type", metavar="TYPE", help="for act-order tensors, whose codes GGUF cannot hold")
    p.add_argument("--imatrix", metavar="FILE", type=Path, help="llama.cpp's GGUF imatrix, for what is quantized anew")
    p.add_argument("--pre", metavar="NAME", help="tokenizer.ggml.pre, where the pre-tokenizer is not recognised")
    p.add_argument("--split-max-size", metavar="SIZE", type=_size, help="write shards of at most this, e.g. 4G or 500M")
    p.add_argument("--modelfile", action="store_true", help="write an Ollama Modelfile beside the GGUF")
    p.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")
    p.add_argument("--threads", type=int, metavar="N", help="worker threads (default: the CPUs)")
    p.add_argument("--force", action="store_true", help="replace files that exist")


def _add_verify(commands: Any) -> None:
    p = _command(commands, "verify", "measure a GGUF on disk against the checkpoint it was made from", _verify)
    p.add_argument("gguf", type=Path, help="the GGUF, or its first shard")
    p.add_argument("checkpoint", help="folder or Hub id")
    p.add_argument(
        "--max-share",
        type=float,
        default=0.15,
        metavar="X",
        help="fail (exit code 1) where a tensor that came as codes adds more than this share of the "
        "checkpoint's own noise (default 0.15)",
    )
    p.add_argument(
        "--max-nmse",
        type=float,
        default=1e-4,
        metavar="X",
        help="fail where a tensor that came as floats is further off than this (default 1e-4)",
    )
    p.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")


def _add_inspect(commands: Any) -> None:
    p = _command(commands, "inspect", "describe a checkpoint or a GGUF, and what convert would do", _inspect)
    p.add_argument("path", help="folder, Hub id or GGUF file")


def _convert(a: argparse.Namespace) -> int:
    from bridge.convert import convert

    if a.exact and a.type != "auto":
        raise BridgeError("--exact and --type ask for different things; give one")
    with _Bar("converting") as bar:
        report = convert(
            a.checkpoint,
            a.out,
            type="exact" if a.exact else a.type,
            output_type=a.output_type,
            token_embd_type=a.token_embd_type,
            actorder_type=a.actorder_type,
            tensor_types=a.tensor_type,
            imatrix=a.imatrix,
            pre=a.pre,
            split_max_size=a.split_max_size,
            modelfile=a.modelfile,
            force=a.force,
            threads=a.threads,
            progress=bar,
        )
    print(report.table())
    if a.report:
        report.save(a.report)
    return 0


def _verify(a: argparse.Namespace) -> int:
    from bridge.verify import failures, verify

    with _Bar("verifying") as bar:
        report = verify(a.gguf, a.checkpoint, progress=bar)
    print(report.table("read"))
    if a.report:
        report.save(a.report)
    failed = failures(report, a.max_share, a.max_nmse)
    for line in failed:
        print(f"FAILED {line}")
    print(
        f"{len(failed)} of {len(report.tensors)} tensors are beyond their threshold"
        if failed
        else "all within threshold"
    )
    return 1 if failed else 0


def _inspect(a: argparse.Namespace) -> int:
    from bridge.describe import describe

    print(describe(a.path))
    return 0


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, done: int, total: int, name: str) -> None:
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc=self.verb, disable=None, leave=False)
        self.bar.set_postfix_str(name, refresh=False)
        self.bar.update(done - self.bar.n)


def _pair(text: str) -> tuple[str, str]:
    pattern, sign, name = text.rpartition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=TYPE")
    return pattern, name


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 500M")
    return int(float(match[1]) * 1000 ** ("KMGT".index(match[2]) + 1 if match[2] else 0))


if __name__ == "__main__":
    sys.exit(main())
