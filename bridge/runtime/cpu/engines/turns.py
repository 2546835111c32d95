"""How many tokens a kernel multiplies at once: which of a matrix's kernels take how many turns.

Tokens take turns of the widest kernel, and those that are left take a pass over the weights of their own. Up to `FEW`
tokens take one, of the narrowest kernel that has enough columns: reading the weights takes as long as multiplying them.
What more of them take is arithmetic, and columns to spare would be lost. Where weights are repacked in every pass, all
tokens take one, whose last turn has columns to spare.

A kernel that unpacks its weights first is for as many tokens as it has columns, and for `FEW` at least: fewer take
several turns of a narrower one, in one pass.
"""

from functools import lru_cache

import numpy as np

from bridge.system.kernels.jit import inner

FEW = 8


@inner
def next_turns(kernels, tokens, one_pass):
    """Which of the kernels multiplies the next of so many tokens, and in how many turns.

    kernels  int64 [kinds, at least 2], the columns first and whether it unpacks, those of more columns later
    """
    kind = 0
    while kind < len(kernels) - 1 and kernels[kind, 0] < tokens:
        kind += 1
    columns, unpacks = kernels[kind, 0], kernels[kind, 1]
    if unpacks:
        spare = (columns - tokens % columns) % columns
        if tokens < max(FEW, columns) or (one_pass and columns > FEW and 16 * spare > tokens):
            kind -= 1
            columns = kernels[kind, 0]
    turns = (tokens + columns - 1) // columns
    if not one_pass and tokens > columns and not (unpacks and tokens < FEW):
        turns = tokens // columns
    return kind, turns


@lru_cache(1024)  # products from Python ask for it every time
def split(kinds: tuple[tuple[int, bool], ...], tokens: int, one_pass: bool) -> tuple[tuple[int, int], ...]:
    """(tokens, columns of the kernel) of each pass over the weights; kinds: those of `next_turns`."""
    passes: list[tuple[int, int]] = []
    kernels = np.array(kinds, np.int64)
    while tokens:
        kind, turns = next_turns.py_func(kernels, tokens, one_pass)
        columns = int(kernels[kind, 0])
        passes.append((min(tokens, int(turns) * columns), columns))
        tokens -= passes[-1][0]
    return tuple(passes)
