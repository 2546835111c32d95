"""Finds the command in this folder and runs it; errors become one line."""

import argparse
import gc
import io
import itertools
import os
import re
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any, NoReturn

from bridge.cli.commands import COMMANDS
from bridge.cli.options import as_flag
from bridge.cli.use.terminal import Printable, Terminated
from bridge.errors import BridgeError, BridgeWarning, shortened, spelled
from bridge.system.cpu.row_threads import sleep_when_idle
from bridge.system.text import meant, tell

_DESCRIPTION = """\
GPTQ, AWQ, compressed-tensors, MLX, HQQ and other quantized checkpoints become
GGUF files for llama.cpp without quantizing twice: the integer codes are carried
over wherever GGUF can hold them.
"""
_EXAMPLES = """\
examples:
  gguf-bridge run model.gguf                           chat
  gguf-bridge run org/model-GGUF:Q4_K_M "Who are you?" download it, answer once
  gguf-bridge convert org/model-gptq model.gguf        keep the integer codes
  gguf-bridge quantize org/model model.gguf --size 4G  round a float model
  gguf-bridge inspect model.gguf                       show what is in it
  gguf-bridge serve model.gguf                         serve OpenAI's clients

gguf-bridge COMMAND --help lists a command's options; gguf-bridge --version.
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
    """A command's argparse parser: errors are one line, like all others, and the help has the usual options only.

    Words may stand before, between and after options.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, add_help=False)
        self._parsing = False
        self.add_argument("-h", "--help", action=_Help, help="show this help")
        self.add_argument("--help-all", action=_Help, help="list all options")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Answer a mistyped option first: what argparse misses may be a consequence."""
        if self._parsing:  # argparse's own second call, of words and options apart
            return super().parse_known_args(args, namespace)
        self._refuse_mistyped(args or ())
        self._parsing = True
        try:
            namespace, extra = self.parse_known_intermixed_args(args, namespace)
        except _HelpAsked as asked:
            print(self.format_help(asked.everything), end="")
            self.exit()
        finally:
            self._parsing = False
        if extra:
            option = extra[0].startswith("-")
            self.error(f"{'unknown option' if option else 'one argument too many:'} {extra[0].partition('=')[0]}")
        return namespace, extra

    def _refuse_mistyped(self, words: Sequence[str]) -> None:
        known = list(self._option_string_actions)
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                break
            if not re.fullmatch(r"--[\w-]+", name) or any(option.startswith(name) for option in known):
                continue
            if near := meant(name, known):
                raise BridgeError(f"unknown option {name}{near}")

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        near = wrong and meant(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        raise BridgeError(message + (near or f"; see {self.prog} --help"))

    def format_help(self, everything: bool = False) -> str:
        """The command's help, with the usual options or with all."""
        usual, rest = self._action_groups[:2], [group for group in self._action_groups[2:] if group._group_actions]
        formatter = self._get_formatter()
        needed = [action for action in self._actions if action.required or not action.option_strings]
        formatter.add_usage(None, needed, [], prefix="usage: ")
        usage = formatter.format_help().replace(self.prog, f"{self.prog} [options]", 1)
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in [*usual, *rest] if everything else usual:
            formatter.start_section(group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        if rest and not everything:
            count = sum(len(group._group_actions) for group in rest)
            formatter.add_text(f"{count} further option{'s' * (count != 1)}: {self.prog} --help-all")
        return f"{usage}\n{formatter.format_help()}"


class _HelpAsked(Exception):
    """--help or --help-all was found: the parser's answer, once it is not in the middle of parsing."""

    def __init__(self, everything: bool) -> None:
        super().__init__()
        self.everything = everything


class _Help(argparse.Action):
    """--help and --help-all."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        raise _HelpAsked(option_string == "--help-all")


class _Program(_Parser):
    """The program's parser, which finds the command; `commands`: their parsers by name."""

    commands: Mapping[str, argparse.ArgumentParser]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args or ())
        before = list(itertools.takewhile(lambda word: word.startswith("-"), words))
        self._refuse_mistyped(before)
        if words[len(before) :] and (name := words[len(before)]) not in COMMANDS:
            raise BridgeError(f"no command {name!r}" + (meant(name, COMMANDS) or "; see gguf-bridge --help"))
        try:
            return argparse.ArgumentParser.parse_known_args(self, args, namespace)
        except _HelpAsked:
            print(self.format_help(), end="")
            self.exit()

    def format_help(self, everything: bool = False) -> str:
        """What the program is for, and its commands."""
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {help}" for name, (_, help) in COMMANDS.items()]
        return "\n".join([f"usage: {self.prog} COMMAND ...", "", _DESCRIPTION, "commands:", *lines, "", _EXAMPLES])


def import_command(argv: Sequence[str]) -> str | None:
    """The module of the command that is asked for, imported; None for none."""
    name = next((word for word in argv if word in COMMANDS), None)
    return None if name is None else import_module(f"bridge.cli.{COMMANDS[name][0]}").__name__


def _parser(argv: Sequence[str] | None = None) -> _Program:
    """The program's parser; with the options of the command in `argv` alone, where it is given."""
    from bridge import __version__

    parser = _Program(prog="gguf-bridge")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    asked = None if argv is None else import_command(argv)
    for name, (module, help) in COMMANDS.items():
        if argv is None or f"bridge.cli.{module}" == asked:
            if name not in commands.choices:  # a module adds all of its own
                import_module(f"bridge.cli.{module}").add_parser(commands)
        else:
            commands.add_parser(name, help=help)
    parser.commands = commands.choices
    return parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands by name."""
    return {name: parser for name, parser in _parser().commands.items() if name in COMMANDS}
