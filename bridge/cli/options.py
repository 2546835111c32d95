"""Commands and their options: flags are made of the fields of the dataclasses that Python takes too.

add_options(parser, "sampling", Sampling)  a flag for each field
Sampling(**given(namespace, Sampling))     with what was asked for; defaults and checks are the dataclass's

A command's `--help` lists the options that are added to its parser itself; those of groups are left to `--help-all`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.commands import COMMANDS
from bridge.errors import BridgeError
from bridge.system.cpu.numa import WAYS as NUMA_WAYS
from bridge.system.options import Flag
from bridge.system.progress import Progress

if TYPE_CHECKING:
    from bridge.conversion.planning.options import Budget
    from bridge.quantize.settings import Calibration

# what is converted
SOURCE = (
    "folder with config.json and weights, a .pt, a GGUF, or a Hub id to download (org/name, org/name@branch, "
    "org/name:Q4_K_M)"
)
CHECKPOINT = "folder with config.json and weights, a Hub id to download (org/name, org/name@branch), or a .pt"


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], description: str | None = None
) -> argparse.ArgumentParser:
    """Add one of `COMMANDS` to argparse's sub-parsers; `run` returns the exit code."""
    help = COMMANDS[name][1]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description or help[0].upper() + help[1:] + ".",
    )  # fmt: skip
    parser.set_defaults(run=run)
    further(parser).add_argument("--debug", action="store_true", help="show where an error comes from (traceback)")
    return parser


def further(parser: Any, title: str = "further options") -> Any:
    """The parser's group of this title, whose options `--help` leaves to `--help-all`."""
    known = (group for group in parser._action_groups if group.title == title)
    return next(known, None) or parser.add_argument_group(title)


def add_numa(parser: argparse.ArgumentParser) -> None:
    """The option of commands that compute with a model on the CPU."""
    further(parser).add_argument(
        "--numa", choices=NUMA_WAYS,
        help="where threads run on a machine with several NUMA nodes: distribute them over all, or isolate them on the "
        "node of the first (default: where the system likes)",
    )  # fmt: skip


class Once(argparse.Action):
    """Store a file's name; BridgeError if the option was given before, since the first file would be ignored."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if (first := getattr(namespace, self.dest, None)) is not None:
            raise BridgeError(f"{option_string} is given twice, {first} and {values}; give one")
        setattr(namespace, self.dest, values)


def add_options(parser: Any, title: str, settings: type, names: Sequence[str] | None = None) -> None:
    """Add a flag to a parser for each field of a dataclass that `option` made, or for those in `names`; to the group
    `title` those that are not `usual`.

    A field whose default is () may be given several times, and so may one that takes several values, which are added; a
    file is given once; numbers are parsed as their default's type.
    """
    for f in fields(settings):
        flag: Flag | None = f.metadata.get("flag")
        if flag is None or (names is not None and f.name not in names):
            continue
        how: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
        if f.default is False:
            how["action"] = "store_true"
        else:
            number = type(f.default) if isinstance(f.default, int | float) else None
            how |= {"metavar": flag.metavar, "type": flag.parse or number or str, "choices": flag.choices}
        if flag.parse is Path:
            how["action"] = Once
        if f.default == ():
            how["action"] = "append"
        if flag.several:
            how |= {"nargs": "+", "action": "extend"}
        shown = f"{f.default:g}" if isinstance(f.default, float) else str(f.default)
        unset = f.default in (None, MISSING, "", ()) or f.default is False
        default = flag.default if flag.default is not None else "" if unset else shown
        help = f"{flag.help} (default: {default})" if default else flag.help
        to = parser if flag.usual else further(parser, title)
        to.add_argument(*_spelled(f), help=help.replace("%", "%%"), **how)


def given(namespace: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The values that the command line gave for fields of a dataclass, by the fields' names."""
    names = [f.name for f in fields(settings) if "flag" in f.metadata and hasattr(namespace, f.name)]
    return {name: getattr(namespace, name) for name in names}


def as_flag(name: str, value: object = None) -> str:
    """How the command line spells an argument of Python: `--shard 3/12` of shard=(3, 12)."""
    from bridge.conversion.planning.options import Budget, ConvertOptions
    from bridge.quantize.settings import Calibration
    from bridge.runtime.sampling import Sampling

    spelled = {f.name: _spelled(f)[0] for s in (Sampling, Calibration, Budget, ConvertOptions) for f in fields(s)}
    spelled |= {"template_options": "--template-option", "host": "--for"}
    flag = spelled.get(name, f"--{name.replace('_', '-')}")
    if isinstance(value, tuple):
        value = ("/" if isinstance(value[0], int) else "=").join(map(str, value))
    return flag if value is None or value is True else f"{flag} {value}"


def _spelled(f: Any) -> list[str]:
    flag = f.metadata.get("flag")
    return str(flag.flag).split() if flag is not None and flag.flag else [f"--{f.name.replace('_', '-')}"]


def add_calibration(p: argparse.ArgumentParser) -> None:
    """The options of `Calibration`; `calibration` reads them."""
    from bridge.quantize.settings import Calibration

    add_options(p, "calibration", Calibration)


def calibration(
    a: argparse.Namespace, progress: Progress | None, say: Callable[[str], None] | None = None
) -> "Calibration | None":
    """What `add_calibration` asked for; None where it asked for nothing. `progress` and `say`: see `Calibration`."""
    from bridge.quantize.settings import Calibration

    values = given(a, Calibration)
    if not values:
        return None
    if "text" not in values and values.get("method") != "rtn":
        asked = as_flag(next(iter(values)))
        raise BridgeError(f"{asked} is for calibration: give the text, --calibrate FILE, or --calibrate default")
    from bridge.system.cpu.memory import tune_malloc

    tune_malloc()
    spread = getattr(a, "spread", None)
    return Calibration(**{"text": None, **values}, progress=progress, say=say, spread=spread)


def add_budget(p: argparse.ArgumentParser, requantize: bool = False) -> None:
    """The options of `Budget`; `budget` reads them."""
    from bridge.conversion.planning.options import Budget

    names = ["size", "bpw", "swaps", "plan_out", "tensor_types_out", *(["requantize"] if requantize else [])]
    add_options(p, "size budget (with --calibrate)", Budget, names)


def budget(a: argparse.Namespace, progress: Progress | None) -> "Budget | None":
    """What `add_budget` asked for; None where it asked for nothing."""
    from bridge.conversion.planning.options import Budget

    values = given(a, Budget)
    if not values:
        return None
    if not values.keys() & {"size", "bpw"}:
        raise BridgeError(f"{as_flag(next(iter(values)))} is for a size budget: give --size or --bpw")
    return Budget(**values, progress=progress)


def add_output(p: argparse.ArgumentParser) -> None:
    """The options of what is written, and by how many threads."""
    from bridge.conversion.planning.options import ConvertOptions

    names = ["mmproj_type", "no_mtp", "target_model", "split_max_size", "modelfile", "force", "threads"]
    add_options(p, "output", ConvertOptions, names)
    add_no_mmproj(p)
    add_report(p)


def add_no_mmproj(p: argparse.ArgumentParser) -> None:
    """--no-mmproj, short for --mmproj-type none."""
    further(p, "output").add_argument(
        "--no-mmproj", action="store_const", const="none", dest="mmproj_type", default=argparse.SUPPRESS,
        help="short for --mmproj-type none",
    )  # fmt: skip


def add_report(p: argparse.ArgumentParser) -> None:
    """--report, of `convert`, `quantize` and `verify`."""
    p.add_argument("--report", metavar="FILE.json", type=Path, help="write the fidelity of each tensor as JSON")
