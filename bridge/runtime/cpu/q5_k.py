"""Q5_K repacked: w = d * sc * q - dmin * mn; what follows is a row's share of a block, see layout.py.

halves   d, dmin, f16: 4 bytes
bytes    0..11     8 sc, 8 mn of 6 bits: low nibbles, then high pairs of bits
         12..31    q[0..31]: low nibbles, then high bits
         32..171   the other seven groups of 32

Together the 176 bytes of the file's block.
"""

from bridge.blocks import Q5_K as BLOCK
from bridge.runtime.cpu.superblock import float_block, k_block

integer, exact = k_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
