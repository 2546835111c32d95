"""Q3_K repacked: w = d * sc * (q - 4); what follows is a row's share of a block, see layout.py.

halves   d, f16: 2 bytes
bytes    0..11     16 sc of 6 bits, two's complement: low nibbles, then high pairs of bits
         12..23    q[0..31]: low pairs of bits, then high bits
         24..107   the other seven groups of 32

Together the 110 bytes of the file's block.
"""

from bridge.blocks import Q3_K as BLOCK
from bridge.runtime.cpu.superblock import float_block, k_block

integer, exact = k_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
