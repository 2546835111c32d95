"""Names of a GGUF's tensors: those of a block, which is a layer, begin with "blk." and its number."""

import re

_BLOCK = re.compile(r"blk\.(\d+)\.")


def block_of(name: str) -> int | None:
    """The number of a tensor's block, 3 of "blk.3.attn_q.weight"; None outside the blocks."""
    block = _BLOCK.match(name)
    return int(block[1]) if block else None


def without_block(name: str) -> str:
    """The name without its block, "attn_q.weight" of "blk.3.attn_q.weight"."""
    return _BLOCK.sub("", name, count=1)
