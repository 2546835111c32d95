"""Every type's kernels as AArch64 machine code under qemu, against the dequantized matrix; `make test-arm` runs it.

llvmlite emits the code here, gcc links it, and qemu runs it: seconds, where Numba under qemu takes an hour.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.runtime.cpu.forms import activations
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.system.cpu import targets
from scripts.arm import emit
from tests.runtime.test_kernels import close, repacked_into, rounded
from tests.support.random_blocks import random_matrix

LANES, BLOCKS = 4, 3
MAIN = """
#include <stdio.h>
static _Alignas(64) char in[3][1 << 20], y[1 << 10];
void rows(long, long, long, long, long, long);
int main(int count, char **names) {
    for (int i = 0; i < 3; i++) {
        FILE *file = fopen(names[1 + i], "rb");
        if (!file || !fread(in[i], 1, sizeof in[i], file)) return 1;
    }
    rows((long)in[0], (long)in[1], (long)in[2], (long)y, 4 * LANES, BLOCKS);
    return fwrite(y, 1, sizeof y, stdout) != sizeof y;
}
""".replace("LANES", str(LANES)).replace("BLOCKS", str(BLOCKS))

TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}"),
]


@pytest.mark.parametrize(
    ("target", "width", "integer"),
    [("neon", 1, True), ("neon", 4, True), ("neon", 1, False), ("i8mm", 4, True), ("i8mm", 8, True)],
)
@pytest.mark.parametrize("block", READ.values(), ids=str)
def test_a_kernel_is_the_dequantized_product(
    block: BlockType, target: str, width: int, integer: bool, tmp_path: Path
) -> None:
    columns = BLOCKS * block.size
    tensor, weights = random_matrix(block, LANES, columns)
    layout = InterleavedLayout(block, LANES)
    memory = np.zeros(layout.stride(BLOCKS), np.uint8)
    repacked_into(memory, tensor.raw.reshape(LANES, -1), block, layout)
    x = np.random.default_rng(4).standard_normal((width, columns)).astype(np.float32)
    form = activations.PAIRED if targets.isa(target).paired else activations.PLAIN
    records = activations.records(x, block, width, integer, form)
    memory[layout.codes_from(BLOCKS) :].tofile(tmp_path / "codes")
    memory[: layout.codes_from(BLOCKS)].tofile(tmp_path / "halves")
    records.tofile(tmp_path / "x")
    (tmp_path / "main.c").write_text(MAIN)
    (tmp_path / "rows.o").write_bytes(emit.compiled(emit.kernel(block.name, target, width, integer), target))
    program = tmp_path / "program"
    command = ["aarch64-linux-gnu-gcc", "-O1", "-static", "main.c", "rows.o", "-o", str(program)]
    subprocess.run(command, cwd=tmp_path, check=True)
    run = ["qemu-aarch64-static", "-cpu", "max", str(program), "codes", "halves", "x"]
    found = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True).stdout
    y = np.frombuffer(found, np.float32)[: width * LANES].reshape(width, LANES)
    close(y, rounded(x) if integer else x, weights, block, integer)
