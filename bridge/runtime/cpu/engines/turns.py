"""How many tokens a kernel multiplies at once: which of a matrix's kernels take how many turns.

Tokens take turns of the widest kernel, and those that are left take a pass over the weights of their own. Up to `FEW`
tokens take one, of the narrowest kernel that has enough columns: reading the weights takes as long as multiplying them.
What more of them take is arithmetic, and columns to spare would be lost. Where weights are repacked in every pass, all
tokens take one, whose last turn has columns to spare.
"""

from functools import lru_cache

import numpy as np

from bridge.system.kernels.jit import inner

FEW = 8


@inner
def next_turns(kernels, tokens, one_pass):
    """Which of the kernels multiplies the next of so many tokens, and in how many turns.

    kernels  int64 [kinds, at least 1], the columns first, those of more columns later
    """
    kind = 0
    while kind < len(kernels) - 1 and kernels[kind, 0] < tokens:
        kind += 1
    columns = kernels[kind, 0]
    if columns > FEW and tokens > FEW:
        spare = (columns - tokens % columns) % columns
        if (one_pass and 16 * spare > tokens) or (not one_pass and columns > tokens):
            kind -= 1
            columns = kernels[kind, 0]
    turns = (tokens + columns - 1) // columns
    if not one_pass and tokens > columns:
        turns = tokens // columns
    return kind, turns


@lru_cache(1024)  # products from Python ask for it every time
def split(widths: tuple[int, ...], tokens: int, one_pass: bool) -> tuple[tuple[int, int], ...]:
    """(tokens, columns of the kernel) of each pass over the weights, of kernels of these columns."""
    passes: list[tuple[int, int]] = []
    kernels = np.array(widths)[:, None]
    while tokens:
        kind, turns = next_turns.py_func(kernels, tokens, one_pass)
        passes.append((min(tokens, turns * widths[kind]), widths[kind]))
        tokens -= passes[-1][0]
    return tuple(passes)
