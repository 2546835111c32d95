"""The instructions that one more block of columns costs, and what llvm-mca makes of them.

An object file's function is run twice under qemu, with one block more the second time; what the second run has executed
in addition is the loop's body, straightened. llvm-mca then repeats it as if it were a loop of its own. It knows no
caches: all loads hit the first level.
"""

import re
import subprocess
import tempfile
from pathlib import Path

_COMPILER, _OBJDUMP, _NM = (f"aarch64-linux-gnu-{tool}" for tool in ("gcc", "objdump", "nm"))
_LESS, _MORE = 4, 5  # blocks
_BRANCH = re.compile(r"(b|b\.\w+|cbn?z|tbn?z|ret|br)\s")


class TraceError(Exception):
    """A function that cannot be traced: it calls another, or branches differently from block to block."""


def cycles(lines: list[str], cpu: str) -> float:
    """llvm-mca's cycles of one repetition of instructions, of many."""
    times = 200
    command = ["llvm-mca-19", "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", f"-iterations={times}"]
    command += ["-all-stats=false", "-all-views=false", "-summary-view"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise TraceError(done.stderr.strip())
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None
    return int(total[1]) / times


def traced(objects: list[Path], call: str, function: str) -> list[str]:
    """The instructions, as assembly, that one more block costs in `function` of some object files.

    `call` is C: a declaration of the function, and after a | what calls it with `blocks` blocks. It sees zeroed buffers
    a, b, c and d of a megabyte each.
    """
    declaration, _, statement = call.partition("|")
    source = f"""
        #include <stdlib.h>
        static _Alignas(64) char a[1 << 20], b[1 << 20], c[1 << 20], d[1 << 20];
        {declaration};
        int main(int count, char **arguments) {{ long blocks = atoi(arguments[1]); {statement}; return 0; }}
        """
    with tempfile.TemporaryDirectory() as folder:
        program, code = Path(folder) / "program", Path(folder) / "main.c"
        code.write_text(source)
        command = [_COMPILER, "-O1", "-static", "-Wl,--unresolved-symbols=ignore-all", str(code), *map(str, objects)]
        subprocess.run([*command, "-lm", "-o", str(program)], check=True, capture_output=True)
        symbols = subprocess.run([_NM, "-S", str(program)], check=True, capture_output=True, text=True).stdout
        symbol = re.search(rf"^(\w+) (\w+) \w {function}$", symbols, re.M)
        assert symbol is not None, function
        first, size = (int(part, 16) for part in symbol.groups())
        listing = _instructions(program, first, size)
        less, more = (_run(program, blocks, first, size) for blocks in (_LESS, _MORE))
    extra = len(more) - len(less)
    same = next((i for i, (x, y) in enumerate(zip(less, more, strict=False)) if x != y), len(less))
    if extra <= 0 or more[same + extra :] != less[same:]:
        raise TraceError(f"{function}: blocks differ")
    lines = [listing[address] for address in more[same : same + extra]]
    if any(line.startswith(("bl ", "blr ")) for line in lines):
        raise TraceError(f"{function}: calls another function")
    return [_without_address(line) for line in lines]


def _without_address(line: str) -> str:
    """An instruction as llvm-mca reads it: where a branch leads does not matter."""
    if _BRANCH.match(line):
        return "b 4" if line.startswith("b ") else "b.ne 4"
    return "adrp x0, 0" if line.startswith("adrp ") else line


def _instructions(program: Path, first: int, size: int) -> dict[int, str]:
    bounds = [f"--start-address={first}", f"--stop-address={first + size}"]
    text = subprocess.run(
        [_OBJDUMP, "-d", "--no-show-raw-insn", *bounds, str(program)], check=True, capture_output=True, text=True
    ).stdout
    listing = {}
    for address, line in re.findall(r"^\s*([0-9a-f]+):\s+(.*)$", text, re.M):
        line = line.partition("//")[0].partition("<")[0].strip().replace("\t", " ")
        listing[int(address, 16)] = line
    return listing


def _run(program: Path, blocks: int, first: int, size: int) -> list[int]:
    """Addresses of the instructions of the function, in the order in which they were executed."""
    log = program.with_suffix(".log")
    options = ["-cpu", "max", "-singlestep", "-d", "exec,nochain", "-D", str(log), "-dfilter", f"{first:#x}+{size:#x}"]
    subprocess.run(["qemu-aarch64-static", *options, str(program), str(blocks)], check=True, capture_output=True)
    return [int(address, 16) for address in re.findall(r"\[[0-9a-f]+/([0-9a-f]+)/", log.read_text())]
