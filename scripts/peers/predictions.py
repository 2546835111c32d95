"""Predictions compared: logits of two models on the same tokens. NumPy alone."""

import numpy as np


def mean_kl(p: np.ndarray, q: np.ndarray) -> float:
    """Mean over positions of KL(p || q) in nats; p and q are logits [..., vocab].

    The softmax is taken in float64: in float32 its rounding alone would show as 1e-7.
    """
    p, q = (logits.reshape(-1, logits.shape[-1]) for logits in (p, q))
    total = 0.0
    for start in range(0, len(p), 256):
        log_p, log_q = (log_softmax(logits[start : start + 256]) for logits in (p, q))
        total += float((np.exp(log_p) * (log_p - log_q)).sum())
    return total / len(p)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities of logits [..., vocab]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
