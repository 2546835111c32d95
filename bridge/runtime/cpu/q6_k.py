"""Q6_K repacked: w = d * sc * (q - 32); what follows is a row's share of a block, see layout.py.

halves   d, f16: 2 bytes
bytes    0..15     16 sc of 8 bits, two's complement: bytes
         16..39    q[0..31]: low nibbles, then high pairs of bits
         40..207   the other seven groups of 32

Together the 210 bytes of the file's block.
"""

from bridge.blocks import Q6_K as BLOCK
from bridge.runtime.cpu.superblock import float_block, k_block

integer, exact = k_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
