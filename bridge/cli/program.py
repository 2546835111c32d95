"""Finds the command in this folder and runs it; errors become one line."""

import argparse
import gc
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any, NoReturn

from bridge.cli.commands import COMMANDS
from bridge.cli.options import as_flag
from bridge.cli.use.terminal import Printable, Terminated
from bridge.errors import BridgeError, BridgeWarning, shortened, spelled
from bridge.system.cpu.row_threads import sleep_when_idle
from bridge.system.text import tell

_DESCRIPTION = """\
GPTQ, AWQ, compressed-tensors, MLX, HQQ and other quantized checkpoints become
GGUF files for llama.cpp without quantizing twice: the integer codes are carried
over wherever GGUF can hold them.
"""
_EXAMPLES = """\
examples:
  gguf-bridge inspect Qwen2.5-7B-GPTQ       shows what convert would do
  gguf-bridge convert Qwen2.5-7B-GPTQ       writes Qwen2.5-7B-GPTQ-Q4_K.gguf
  gguf-bridge convert org/name out.gguf     downloads from the Hub first
  gguf-bridge quantize Qwen2.5-7B out.gguf --type Q4_K --calibrate text.txt
  gguf-bridge quantize Qwen2.5-7B out.gguf --size 4.2G --calibrate text.txt
  gguf-bridge verify out.gguf Qwen2.5-7B-GPTQ
  gguf-bridge repack old-gptq new --checkpoint-format gptq_v2
  gguf-bridge export out.gguf folder --format gptq_v2 --config Qwen2.5-7B-GPTQ
  gguf-bridge edit out.gguf --set general.name=Mine -o new.gguf
  gguf-bridge run out.gguf -p "Once upon a time"
  gguf-bridge run org/name -p "Once upon a time"    converts it first
  gguf-bridge chat out.gguf
  gguf-bridge serve out.gguf --port 8080
"""


def run_program(argv: Sequence[str], spread: Any = None) -> int:
    """`bridge.cli.main`, whose imports are done."""
    debug = "--debug" in argv
    sleep_when_idle()
    gc.set_threshold(100_000)  # Numba brings a million objects that stay: looking through them often costs 0.1 s
    for name in ("SIGTERM", "SIGHUP"):  # what is half-written goes away as with Ctrl-C
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _terminate)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: no file of ours may get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # generated text may contain characters the console cannot encode
    try:
        with (
            warnings.catch_warnings(),
            spelled(as_flag),
            redirect_stdout(Printable(sys.stdout)),
        ):
            if not debug:
                warnings.simplefilter("ignore")  # the libraries' own, such as torch's on odd pickles
            warnings.simplefilter("once", BridgeWarning)
            warnings.showwarning = _show_warning
            arguments = _parser(argv).parse_args(argv or ["--help"], argparse.Namespace(spread=spread))
            code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `gguf-bridge inspect ... | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as problem:
        if debug:
            import traceback

            tell("".join(traceback.format_exception(problem)))
        stopped = isinstance(problem, KeyboardInterrupt)
        tell(("" if stopped else "error: ") + shortened(re.sub(r"\s*\n\s*", " ", _message(problem))))
        return 128 + getattr(problem, "signal", signal.SIGINT) if stopped else 2


def _message(problem: BaseException) -> str:
    if isinstance(problem, BridgeError):
        return str(problem)
    if isinstance(problem, KeyboardInterrupt):
        return str(problem) or "stopped"
    if isinstance(problem, OSError):
        return f"{os.fsdecode(problem.filename)}: {problem.strerror}" if problem.filename else str(problem)
    if isinstance(problem, MemoryError):
        return "out of memory; convert needs least with --threads 1, run and perplexity with a small --context"
    return f"unexpected {type(problem).__name__} ({problem}); please report it with what --debug prints"


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    ours = category is BridgeWarning
    tell(f"warning: {message}" if ours else warnings.formatwarning(message, category, filename, lineno))


def _terminate(number: int, *_: object) -> NoReturn:
    raise Terminated(number)


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, like all others."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Answer a mistyped option first: what argparse misses may be a consequence."""
        known = list(self._option_string_actions)
        for word in args or () if self._subparsers is None else ():
            name = word.partition("=")[0]
            if word == "--":
                break
            if not re.fullmatch(r"--[\w-]+", name) or any(option.startswith(name) for option in known):
                continue
            if near := _nearest(name, known):
                raise BridgeError(f"unknown option {name}; did you mean {near}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = _nearest(wrong[1], re.findall(r"[\w.-]+", wrong[2])) if wrong else None
        hint = f"; did you mean {near}?" if near else f"; see {self.prog} --help"
        raise BridgeError(message + hint)


def _nearest(word: str, known: Sequence[str]) -> str | None:
    """The most similar of known words, if one is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, 1)), None)


def import_command(argv: Sequence[str]) -> str | None:
    """The module of the command that is asked for, imported; None for none."""
    name = next((word for word in argv if word in COMMANDS), None)
    return None if name is None else import_module(f"bridge.cli.{COMMANDS[name][0]}").__name__


def _parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The program's parser; with the options of the command in `argv` alone, where it is given."""
    from bridge import __version__

    parser = _Parser(
        prog="gguf-bridge", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    asked = None if argv is None else import_command(argv)
    for name, (module, help) in COMMANDS.items():
        if argv is None or f"bridge.cli.{module}" == asked:
            if name not in commands.choices:  # a module adds all of its own
                import_module(f"bridge.cli.{module}").add_parser(commands)
        else:
            commands.add_parser(name, help=help)
    return parser
