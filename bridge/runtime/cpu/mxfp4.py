"""MXFP4 repacked: w = 2^(e - 128) * values[q]; what follows is a row's share of a block, see layout.py.

halves   e, one byte
bytes    0..15     q[0..31]: nibbles

Together the 17 bytes of the file's block.
"""

from bridge.blocks import MXFP4 as BLOCK
from bridge.runtime.cpu.superblock import float_block, plain_block

integer, exact = plain_block, float_block

__all__ = ["BLOCK", "exact", "integer"]
