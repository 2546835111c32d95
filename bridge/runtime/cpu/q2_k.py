"""Q2_K repacked: w = d * sc * q - dmin * mn; what follows is a row's share of a block, see layout.py.

halves   d, dmin, f16: 4 bytes
bytes    0..15     16 sc, 16 mn of 4 bits: nibbles
         16..23    q[0..31]: pairs of bits
         24..79    the other seven groups of 32

Together the 84 bytes of the file's block.
"""

from bridge.blocks import Q2_K as BLOCK
from bridge.runtime.cpu.superblock import float_block, k_block

integer, exact = k_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
