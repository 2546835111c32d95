"""NVFP4 repacked: w = ue4m3(sc) / 2 * values[q]; what follows is a row's share of a block, see layout.py.

halves   sc[0..3], four bytes
bytes    0..15     q[0..31]: nibbles
         16..31    q[32..63]

Together the 36 bytes of the file's block.
"""

from bridge.blocks import NVFP4 as BLOCK
from bridge.runtime.cpu.superblock import float_block, plain_block

integer, exact = plain_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
