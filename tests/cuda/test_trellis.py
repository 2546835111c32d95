"""Products with trellis codes on CUDA, as far as a machine without a GPU can tell."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.trellis import BitshiftCodebook, streams
from bridge.trellis.vector import Code
from tests.support import ptx

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.product import fused
from bridge.cuda.toolchain import launch

pytestmark = pytest.mark.proof
compiler = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))
TABLE = np.ones((512, 2), np.float32)


@compiler
@pytest.mark.parametrize(
    ("mode", "tokens"),
    [
        ("mul1", 1),
        ("quantlut_sym", 8),
        *(
            pytest.param(mode, tokens, marks=pytest.mark.exhaustive)
            for mode in ("1mad", "3inst", "mul1", "quantlut_sym")
            for tokens in (1, 8)
            if (mode, tokens) not in (("mul1", 1), ("quantlut_sym", 8))
        ),
    ],
)
def test_no_kernel_spills_or_needs_more_than_64_registers(mode, tokens):
    pair = mode == "quantlut_sym"
    book = BitshiftCodebook(16, 2, 1 + pair, 9 * pair, mode, TABLE if pair else None)
    positions = {"mul1": streams.exl3(), "quantlut_sym": streams.swizzled()}.get(mode, streams.row_major(16, 16))
    lanes = fused.Lanes.of(positions)
    kernel = fused.kernel(Code.of(book, 2 + 2 * pair, "cuda"), lanes.sums, lanes.columns, 32, tokens, 4)
    for capability in ((7, 5), (9, 0)):
        made = ptx.compiled(kernel, capability)
        assert (made.stack, made.spills) == (0, 0)
        assert made.registers <= launch.MAX_REGISTERS
