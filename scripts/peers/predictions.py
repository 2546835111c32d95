"""Predictions compared: logits of two models on the same tokens. NumPy alone."""

import numpy as np


def mean_kl(p: np.ndarray, q: np.ndarray) -> float:
    """Mean over positions of KL(p || q) in nats; p and q are logits [..., vocab].

    The softmax is taken in float64: in float32 its rounding alone would show as 1e-7.
    """
    p, q = (logits.reshape(1, -1, logits.shape[-1]) for logits in (p, q))
    return float(window_kls(p, q)[0])


def window_kls(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """float64 [windows]: `mean_kl` of each window; p and q are logits [windows, length, vocab]."""
    return np.array([token_kls(logits, other).mean() for logits, other in zip(p, q, strict=True)])


def token_kls(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """float64 [length]: KL(p || q) at each position; p and q are logits [length, vocab]."""
    kls = np.empty(len(p))
    step = max(1, (1 << 22) // p.shape[-1])  # float64 copies of at most 32 MB
    for start in range(0, len(p), step):
        log_p, log_q = (log_softmax(logits[start : start + step]) for logits in (p, q))
        kls[start : start + step] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return kls


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities of logits [..., vocab]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
