"""The block of threads that ends last goes on with what all of them have stored, so that no second launch has to.

    every block     a barrier; then one thread adds 1 to a counter, which releases what the block has stored
    the last one    that thread finds the others' count, and acquires what they have stored; another barrier

One thread's release covers the stores of its whole block, since the barrier is between (PTX ISA, Memory Consistency
Model: causality order). So 31 of 32 lanes and all other warps issue no fence, and only the last block clears its L1.
"""

from typing import Any

import numpy as np
from bridge.cuda.toolchain.intrinsics import add_release, device_function, fence, thread_x, thread_y
from numba import cuda

int32: Any = np.int32


def _last_block(counters, index, count):
    """Whether this is the last of `count` blocks to arrive at counters[index], 0 before and after; for all threads."""
    flag = cuda.shared.array(1, np.int32)
    cuda.syncthreads()
    if thread_x() == 0 and thread_y() == 0:
        last = add_release(counters, index, int32(1)) == int32(count - 1)
        if last:
            fence()
            counters[index] = int32(0)
        flag[0] = int32(last)
    cuda.syncthreads()
    return flag[0] != 0


last_block = device_function(_last_block)
