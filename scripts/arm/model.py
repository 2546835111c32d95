"""Our kernels for Arm beside ggml's, without an Arm machine: instructions a weight, and cycles as llvm-mca models them.

    python -m scripts.arm.model llama_cpp_python-0.3.36/vendor/llama.cpp

The folder is llama.cpp's source. Both are compiled for neoverse-n1, ggml by aarch64-linux-gnu-gcc with its own options;
qemu-aarch64-static runs them and llvm-mca-19 counts. All that is printed is a model: it has no memory and no caches.
"""

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bridge.blocks.read import READ
from scripts.arm import emit
from scripts.arm.trace import cycles, traced
from scripts.benchlib import Lines, bench, head, option

OURS = "void rows(long, long, long, long, long, long)|rows((long)a, (long)b, (long)c, (long)d, 64, blocks);"
REPACKED = "void {0}(int, float *, size_t, const void *, const void *, int, int)|"
REPACKED += "{0}(blocks * {1}, (float *)a, 64, b, c, {2}, {3});"
ROW_BY_ROW = "void {0}(int, float *, size_t, const void *, size_t, const void *, size_t, int)|"
ROW_BY_ROW += "{0}(blocks * {1}, (float *)a, 0, b, 0, c, 0, 1);"
# rows of ggml's repacked kernels with sdot and with smmla
REPACKS = {"Q4_K": ("8x4", "8x8"), "Q6_K": ("8x4", "8x8"), "Q8_0": ("4x4", "4x8"), "Q4_0": ("4x4", "4x8")}
OTHERS = ("Q3_K", "Q2_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
VECTOR_CPUS, MATRIX_CPUS = ("neoverse-n1", "neoverse-v2", "apple-m1"), ("neoverse-v2", "apple-m2")
OPTIONS = ["-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-I.", "-I..", "-I../../include"]


@dataclass(frozen=True)
class Loop:
    """The code of one block of a matrix, and how many products of a weight and a value it takes."""

    code: list[str]
    products: int

    def figures(self, cpus: tuple[str, ...]) -> list[float]:
        """Instructions a product, and cycles of each CPU for 1000."""
        return [len(self.code) / self.products, *(1000 * cycles(self.code, cpu) / self.products for cpu in cpus)]


def built(ggml: Path, folder: Path, cpu: str) -> list[Path]:
    """ggml's kernels for Arm, compiled for a CPU."""
    objects = []
    for source, compiler in (("repack.cpp", "g++"), ("quants.c", "gcc")):
        out = folder / f"{source}.{cpu}.o"
        command = [f"aarch64-linux-gnu-{compiler}", *OPTIONS, f"-mcpu={cpu}", f"arch/arm/{source}"]
        command += ["-c", "-o", str(out)]
        subprocess.run(command, cwd=ggml / "ggml" / "src" / "ggml-cpu", check=True, stderr=subprocess.DEVNULL)
        objects.append(out)
    return objects


def ours(name: str, target: str, width: int, folder: Path) -> Loop:
    """Our kernel of a type."""
    file = folder / "rows.o"
    file.write_bytes(emit.compiled(emit.kernel(name, target, width, True), target))
    return Loop(traced([file], OURS, "rows"), emit.LANES * READ[name].size * width)


def theirs(name: str, width: int, matrix: bool, objects: list[Path]) -> Loop:
    """ggml's kernel of a type for one token or for four: repacked where there is such a one."""
    size, kind = READ[name].size, name.lower().replace("_k", "_K")
    values = "q8_K" if size == 256 else "q8_0"
    if name not in REPACKS:
        function = f"ggml_vec_dot_{kind}_{values}"
        return Loop(traced(objects[1:], ROW_BY_ROW.format(function, size), function), size)
    shape = REPACKS[name][matrix]
    rows = int(shape[0])
    function = f"ggml_gem{'m' if width > 1 else 'v'}_{kind}_{shape}_{values}"
    call = REPACKED.format(function, size, width, rows)
    return Loop(traced(objects[:1], call, function), rows * size * width)


def cells(loop: Loop, peer: Loop, cpus: tuple[str, ...]) -> list[str]:
    """Instructions a product, and cycles of each CPU for 1000: ours, ggml's, and the ratio."""
    pairs = zip(loop.figures(cpus), peer.figures(cpus), strict=True)
    return [f"{a:.{3 - 2 * (a > 1)}f} / {b:.{3 - 2 * (b > 1)}f} = {a / b:.2f}" for a, b in pairs]


def measure(options: argparse.Namespace) -> Lines:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for title, cpu, target, width, names, cpus in (
            ("one token, sdot", "neoverse-n1", "neon", 1, (*REPACKS, *OTHERS), VECTOR_CPUS),
            ("prompts, sdot", "neoverse-n1", "neon", 4, tuple(REPACKS), VECTOR_CPUS),
            ("prompts, smmla", "neoverse-n1+i8mm", "i8mm", 8, (*REPACKS, *OTHERS), MATRIX_CPUS),
        ):
            objects = built(options.ggml.resolve(), folder, cpu)
            yield head(title, "instructions a weight", *(f"{c}: cycles for 1000" for c in cpus))
            for name in names:
                peer = theirs(name, min(width, 4), target == "i8mm", objects)
                yield name, *cells(ours(name, target, width, folder), peer, cpus)


if __name__ == "__main__":
    bench(__doc__, [option("ggml", Path, help="folder of llama.cpp's source")], measure)
