"""AVX-512 without VNNI (Skylake-X and its Xeons): pmaddubsw as in AVX2, on 16 lanes.

For prompts too: a float product (torch, one thread, 64 x 4096 x 1024) takes 1.2 to 2 times as long as the integer one.
"""

from dataclasses import replace
from functools import partial

from bridge.runtime.cpu.machine.intrinsics_avx2 import dots, tile
from bridge.runtime.cpu.machine.intrinsics_avx512 import ISA as AVX512
from bridge.runtime.cpu.machine.intrinsics_avx512 import MULTIPLY, WIDEN

_dots, _tile = (partial(emit, MULTIPLY, WIDEN) for emit in (dots, tile))
ISA = replace(
    AVX512, emit_dots=_dots, emit_tile=_tile, row_bits=8, fuses_scales=True, float_scales=False,
    scales_codes=False,
)  # fmt: skip
