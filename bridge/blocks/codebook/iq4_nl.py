"""IQ4_NL: w = d * values[q], q 0..15; 32 weights in 18 bytes, 4.5 bits per weight.

bytes  0..1   d, f16
       2..17  qs[16]   low nibble q[l], high nibble q[l + 16]

The values are denser near 0, where most weights are: from -127 to 113, in steps of 10 to 24.
"""

from gguf.quants import IQ4_NL as _GGUF

from bridge.blocks.base import BlockType, ScaleSearch
from bridge.blocks.integers.q4_0 import pack, unpack

IQ4_NL = BlockType(
    name="IQ4_NL", size=32, sub=32, nbytes=18, levels=16, values=_GGUF.kvalues, d_at=0, pack=pack, unpack=unpack,
    search=ScaleSearch(103.0, 7.5, 6, refits=2, rounds=3), noise=0.06,
)  # fmt: skip
