"""Words of blocks are the packed codes of the same blocks."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.blocks import TYPES
from bridge.checkpoint.formats.packing import pack_rows
from bridge.checkpoint.write.block_words import TYPES_IN_WORDS, gather_halves, pack_words
from bridge.encode.block_bytes import unpack_codes

ROWS = 37  # two runs of 16, and a part


@pytest.mark.parametrize("name", TYPES_IN_WORDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_words_are_the_packed_codes(name: str, transposed: bool) -> None:
    block = TYPES[name]
    raw = np.random.default_rng(1).integers(0, 256, (ROWS, 5 * block.nbytes), dtype=np.uint8)
    expected = pack_rows(unpack_codes(block, raw), (block.levels - 1).bit_length())
    out = np.empty_like(expected.T).T if transposed else np.empty_like(expected)
    pack_words(block, raw, out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("transposed", [False, True])
def test_halves_are_those_of_the_blocks(name: str, transposed: bool) -> None:
    block = TYPES[name]
    raw = np.random.default_rng(2).integers(0, 256, (ROWS, 5 * block.nbytes), dtype=np.uint8)
    at = block.dmin_at if block.has_min else block.d_at
    bytes_ = raw.reshape(ROWS, 5, block.nbytes)[:, :, at : at + 2]
    expected = bytes_[..., 0] | bytes_[..., 1].astype(np.uint16) << 8
    out = np.empty((5, ROWS), np.float16).T if transposed else np.empty((ROWS, 5), np.float16)
    gather_halves(block, raw, at, out)
    assert np.array_equal(out.view(np.uint16), expected)
