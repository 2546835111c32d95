"""GGUF's block types: formula, bit layout and size. One module a type; nothing else of ours is imported.

Read `base.py` first, then `k_quants/q4_k.py`. What packs, reads or multiplies blocks is derived from these
records; which there are is listed in `tensor_types.py`.

BLOCKS  types for the codes of any checkpoint, in order of bits per weight, K-quants first among equals
FP4     types of 4-bit floats: for checkpoints of these, or on request
NEWER   types that llama.cpp loads since July 2026
TYPES   all of these: types of whole codes, which CUDA multiplies too; MATRIX_SCALED names those whose matrices have a
        scale that is a tensor of its own
ROUNDED types that floats are rounded to, and no codes carried but ternary ones; weights in a block. `read.py` has their
        records, WRITTEN (all that are written) and READ (all that are read)
"""

from importlib import import_module

from bridge.blocks.base import BlockType
from bridge.blocks.tensor_types import TENSOR_TYPES, TensorType


def load_block_type(type: TensorType) -> BlockType:
    """The record of a block type, from its module."""
    block: BlockType = getattr(import_module(f"bridge.blocks.{type.folder}.{type.name.lower()}"), type.name)
    assert (block.size, block.nbytes) == (type.size, type.nbytes), type
    return block


def _records(use: str) -> dict[str, BlockType]:
    return {type.name: load_block_type(type) for type in TENSOR_TYPES if type.use == use}


BLOCKS = _records("BLOCKS")
FP4 = _records("FP4")
NEWER = _records("NEWER")
TYPES = BLOCKS | FP4 | NEWER
MATRIX_SCALED = [name for name, block in TYPES.items() if block.matrix_scale]
ROUNDED = {type.name: type.size for type in TENSOR_TYPES if type.use == "ROUNDED"}

__all__ = ["BLOCKS", "FP4", "MATRIX_SCALED", "NEWER", "ROUNDED", "TYPES", "BlockType"]
