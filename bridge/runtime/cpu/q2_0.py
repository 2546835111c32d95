"""Q2_0 repacked: w = d * (q - 1); what follows is a row's share of a block, see layout.py.

halves   d, f16: 2 bytes
bytes    0..7      q[0..31]: pairs of bits
         8..15     q[32..63]

Together the 18 bytes of the file's block.
"""

from bridge.blocks import Q2_0 as BLOCK
from bridge.runtime.cpu.superblock import float_block, plain_block

integer, exact = plain_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
