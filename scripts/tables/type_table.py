"""The table of docs/formats.md: the bits that block types spend on codes and on scales.

python -m scripts.tables.type_table
"""

from bridge.blocks.base import BlockType
from bridge.blocks.read import READ

HEAD = "| types | bits a weight | of these, scales |"


def scale_bits(block: BlockType) -> int:
    """Bits of a block's scales, minimums and zero points."""
    halves = (block.d_at >= 0 or bool(block.d_nibbles)) + block.has_min
    small = (block.scale_hi - block.scale_lo).bit_length() + block.min_hi.bit_length()
    return 16 * halves + block.subs * (8 if block.scales else small)


def rows() -> list[str]:
    """A row for the types of as many bits, the largest first."""
    names: dict[tuple[float, float], list[str]] = {}
    for block in READ.values():
        names.setdefault((block.bpw, scale_bits(block) / block.size), []).append(block.name)
    ordered = sorted(names.items(), key=lambda item: (-item[0][0], -item[0][1]))
    return [f"| {', '.join(types)} | {_rounded(bits)} | {_rounded(scales)} |" for (bits, scales), types in ordered]


def _rounded(bits: float) -> str:
    return f"{bits + 1e-9:.2f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    print(HEAD, "|---|---|---|", *rows(), sep="\n")
