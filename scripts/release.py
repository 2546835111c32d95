"""Steps of a release that must not be done by eye: docs/releasing.md and .github/workflows/release.yml call them.

    python scripts/release.py check v0.3.0              the tag, bridge.__version__, CHANGELOG and CITATION agree
    python scripts/release.py notes 0.3.0               prints the changelog's section
    python scripts/release.py readme ADDRESS v0.3.0     makes README's links absolute, for PyPI
    python scripts/release.py try dist/*.whl            installs a file into a fresh environment, converts, runs

Only `try` needs a network, for the dependencies of what it installs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests" / "data" / "qwen3-gptq-4bit-g128-sym"
_RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


def version() -> str:
    """`bridge.__version__`, without importing the package."""
    text = (ROOT / "bridge" / "__init__.py").read_text(encoding="utf-8")
    (current,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(current)


def releases() -> dict[str, str]:
    """The dates of the changelog's releases, by version, in the file's order."""
    return dict(_RELEASE.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))


def disagreements(tag: str) -> list[str]:
    """What contradicts a tag; nothing if it may be released."""
    current = version()
    date = releases().get(current)
    citation = dict(re.findall(r"^([\w-]+): (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    problems = []
    if tag != f"v{current}":
        problems.append(f"the tag is {tag}, but bridge/__init__.py has version {current}: the tag must be v{current}")
    if date is None:
        problems.append(f"CHANGELOG.md has no heading '## [{current}] - YYYY-MM-DD'")
    elif next(iter(releases())) != current:
        problems.append(f"CHANGELOG.md lists {next(iter(releases()))} above {current}")
    if citation["version"] != current:
        problems.append(f"CITATION.cff has version {citation['version']}, not {current}")
    if date is not None and citation["date-released"] != date:
        problems.append(f"CITATION.cff has date-released {citation['date-released']}, CHANGELOG.md has {date}")
    return problems


def with_addresses(text: str, address: str, tag: str) -> str:
    """Markdown whose links to files of the repository are links to the files of a tag."""
    return _LINK.sub(lambda m: f"{m[1]}{m[2]}({address}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", text)


def notes(of: str) -> str:
    """The changelog's section of a version, without its heading."""
    parts = re.split(r"^## \[([^\]]+)\].*\n", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if of not in sections:
        sys.exit(f"CHANGELOG.md has no section '## [{of}]'")
    return sections[of].strip() + "\n"


def try_file(file: Path, constraints: bool) -> None:
    """Install a wheel or an sdist into a new environment, and use it with an empty home folder outside the checkout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "home"
        home.mkdir()
        venv.create(folder / "venv", with_pip=True, symlinks=sys.platform != "win32")
        programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        unset = ("PYTHONPATH", "XDG_CACHE_HOME", "LOCALAPPDATA", "NUMBA_CACHE_DIR")
        environment = {key: value for key, value in os.environ.items() if key not in unset}
        homes = {"HOME": str(home), "USERPROFILE": str(home)}

        def step(what: str, *command: object, own_home: bool = True) -> str:
            started = time.perf_counter()
            done = subprocess.run(
                [str(programs / str(command[0])), *map(str, command[1:])],
                cwd=folder, env=environment | (homes if own_home else {}),
                capture_output=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{file.name}: {what} failed\n{done.stdout}{done.stderr}")
            print(f"{file.name}: {what}, {time.perf_counter() - started:.1f} s", flush=True)
            return done.stdout

        pins = ["-c", ROOT / "constraints.txt"] if constraints else []
        pip = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, file.resolve()]
        step("installed", *pip, own_home=False)  # pip keeps its cache, and its configuration
        told = step("--version", "gguf-bridge", "--version").strip()
        if told != f"gguf-bridge {version()}":
            sys.exit(f"{file.name}: --version printed {told!r}, not 'gguf-bridge {version()}'")
        step("convert", "gguf-bridge", "convert", CHECKPOINT, "model.gguf")
        step("verify", "gguf-bridge", "verify", "model.gguf", CHECKPOINT)
        run = ["gguf-bridge", "run", "model.gguf", "-p", "KING RICHARD:", "-n", 8, "--temp", 0]
        print(step("run", *run).strip())


def parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="fail unless all files have the tag's version").add_argument("tag")
    noted = commands.add_parser("notes", help="print the changelog's section of a version")
    noted.add_argument("version")
    noted.add_argument("address", nargs="?", help="make links absolute: address of the repository")
    readme = commands.add_parser("readme", help="make the links of README.md absolute")
    readme.add_argument("address")
    readme.add_argument("tag")
    tried = commands.add_parser("try", help="install files into a fresh environment each, convert, and run")
    tried.add_argument("files", nargs="+", type=Path)
    tried.add_argument("--newest", action="store_true", help="without constraints.txt, as users install it")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    match arguments.command:
        case "check":
            problems = disagreements(arguments.tag)
            print("\n".join(problems) or f"{arguments.tag}: all files have this version")
            sys.exit(bool(problems))
        case "notes":
            text = notes(arguments.version)
            address = arguments.address
            print(with_addresses(text, address, f"v{arguments.version}") if address else text, end="")
        case "readme":
            file = ROOT / "README.md"
            text = file.read_text(encoding="utf-8")
            file.write_text(with_addresses(text, arguments.address, arguments.tag), encoding="utf-8")
        case "try":
            for file in arguments.files:
                try_file(file, not arguments.newest)


if __name__ == "__main__":
    main()
