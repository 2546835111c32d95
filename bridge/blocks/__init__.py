"""What a GGUF block type is: formula, bit layout, size. One module a type; nothing of ours is imported.

`BLOCKS` lists the types in order of bits per weight, K-quants first among equals.
"""

from bridge.blocks.base import BlockType
from bridge.blocks.q2_k import Q2_K
from bridge.blocks.q3_k import Q3_K
from bridge.blocks.q4_0 import Q4_0
from bridge.blocks.q4_1 import Q4_1
from bridge.blocks.q4_k import Q4_K
from bridge.blocks.q5_0 import Q5_0
from bridge.blocks.q5_1 import Q5_1
from bridge.blocks.q5_k import Q5_K
from bridge.blocks.q6_k import Q6_K
from bridge.blocks.q8_0 import Q8_0

BLOCKS: dict[str, BlockType] = {
    block.name: block for block in (Q2_K, Q3_K, Q4_K, Q4_0, Q4_1, Q5_K, Q5_0, Q5_1, Q6_K, Q8_0)
}

__all__ = ["BLOCKS", "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "BlockType"]
