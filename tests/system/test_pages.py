from __future__ import annotations

import sys

import numpy as np
import pytest

from bridge.system.cpu.memory import resident, zeros_filled_later


@pytest.mark.skipif(sys.platform != "linux", reason="no other system gives huge pages that are asked for")
def test_a_byte_that_is_written_takes_one_small_page():
    before = resident()
    memory = zeros_filled_later((64, 1 << 20), np.uint8)
    memory[:, 0] = 1
    assert resident() - before < 4 << 20
    assert int(memory.sum()) == 64


@pytest.mark.parametrize("shape", [(3, 5), (3, 1 << 20), (2, 0)])
def test_arrays_are_zeros_of_the_shape_and_type(shape):
    memory = zeros_filled_later(shape, np.uint16)
    assert memory.shape == shape
    assert memory.dtype == np.uint16
    assert memory.flags.writeable
    assert not memory.any()


def test_more_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError):
        zeros_filled_later((1 << 46,), np.uint8)
