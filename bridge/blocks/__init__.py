"""GGUF's block types: formula, bit layout and size. One module a type; nothing else of ours is imported.

Read `base.py` first, then `k_quants/q4_k.py`. What packs, reads or multiplies blocks is derived from these
records.

BLOCKS  types for the codes of any checkpoint, in order of bits per weight, K-quants first among equals
FP4     types of 4-bit floats: for checkpoints of these, or on request
NEWER   types that llama.cpp loads since July 2026
TYPES   all of these: types of whole codes, which CUDA multiplies too
ROUNDED types that floats are rounded to, and no codes carried but ternary ones; weights in a block. `read.py` has their
        records, WRITTEN (all that are written) and READ (all that are read)
"""

from bridge.blocks.base import BlockType
from bridge.blocks.integers.q2_0 import Q2_0
from bridge.blocks.integers.q4_0 import Q4_0
from bridge.blocks.integers.q4_1 import Q4_1
from bridge.blocks.integers.q5_0 import Q5_0
from bridge.blocks.integers.q5_1 import Q5_1
from bridge.blocks.integers.q8_0 import Q8_0
from bridge.blocks.k_quants.q2_k import Q2_K
from bridge.blocks.k_quants.q3_k import Q3_K
from bridge.blocks.k_quants.q4_k import Q4_K
from bridge.blocks.k_quants.q5_k import Q5_K
from bridge.blocks.k_quants.q6_k import Q6_K
from bridge.blocks.small.mxfp4 import MXFP4
from bridge.blocks.small.nvfp4 import NVFP4

BLOCKS: dict[str, BlockType] = {
    block.name: block for block in (Q2_K, Q3_K, Q4_K, Q4_0, Q4_1, Q5_K, Q5_0, Q5_1, Q6_K, Q8_0)
}
FP4: dict[str, BlockType] = {block.name: block for block in (MXFP4, NVFP4)}
NEWER: dict[str, BlockType] = {block.name: block for block in (Q2_0,)}
TYPES: dict[str, BlockType] = BLOCKS | FP4 | NEWER
ROUNDED: dict[str, int] = {
    "IQ1_S": 256, "IQ1_M": 256, "TQ1_0": 256, "TQ2_0": 256, "IQ2_XXS": 256, "IQ2_XS": 256, "IQ2_S": 256,
    "IQ3_XXS": 256, "IQ3_S": 256, "IQ4_XS": 256, "IQ4_NL": 32,
}  # fmt: skip

__all__ = [
    "BLOCKS", "FP4", "MXFP4", "NEWER", "NVFP4", "Q2_0", "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1",
    "Q5_K", "Q6_K", "Q8_0", "ROUNDED", "TYPES", "BlockType",
]  # fmt: skip
