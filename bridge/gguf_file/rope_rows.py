"""The order of the rows of q and k, which differs between GGUF's llama and Hugging Face."""

import numpy as np


def interleaved_rows(heads: int, head_dim: int) -> np.ndarray:
    """int64 [heads * head_dim]: the Hugging Face row for each GGUF row of q or k; its `np.argsort` is the inverse.

    GGUF row 2j + s of a head is its row s * head_dim/2 + j.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)
