"""The embeddings' Hessian, which rounds them as H of the inputs rounds other layers.

An error e of a token's embedding moves the first block's input by e, and with g the gradient there, the mean KL
divergence grows by  p e G e^T / 2,  G = mean g g^T, [hidden, hidden], and p how often the token occurs. So G is what
half of H is elsewhere, and one row does not matter to another. Where the embeddings are the output head too, a row
also counts as the head's: by e H e^T / 4, H of the head's inputs, times its mean p (1 - p). Summed over the vocabulary,
both are weighed with one matrix for all rows, because a token is predicted about as often as it occurs.
"""

import torch

from bridge.quantize.solve.hessian import Hessian


def embeddings_matrix(products: torch.Tensor, as_head: tuple[Hessian, torch.Tensor] | None = None) -> torch.Tensor:
    """Half of the embeddings' H, float32 [hidden, hidden].

    products  G
    as_head   where they are the output head too: H of its inputs, and p (1 - p) of each row, [vocabulary]
    """
    if as_head is None:
        return products
    hessian, predicted = as_head
    return products.add(hessian.matrix.to(products), alpha=float(predicted.sum()) / 2)


def embeddings_hessian(name: str, half: torch.Tensor, tokens: int) -> Hessian:
    """H of `embeddings_matrix`, seen with so many tokens."""
    hessian = Hessian(name, len(half), half.device)
    hessian.matrix = 2 * half
    hessian.tokens = tokens
    return hessian
