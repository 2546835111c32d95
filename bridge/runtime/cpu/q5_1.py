"""Q5_1 repacked: w = d * q + dmin; what follows is a row's share of a block, see layout.py.

halves   d, dmin, f16: 4 bytes
bytes    0..19     q[0..31]: low nibbles, then high bits

Together the 24 bytes of the file's block.
"""

from bridge.blocks import Q5_1 as BLOCK
from bridge.runtime.cpu.superblock import float_block, plain_block

integer, exact = plain_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
