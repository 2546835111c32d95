"""Perplexity of a text, and how far a model is from a reference, as llama.cpp's perplexity tool measures them.

The text's tokens (BOS before them, where the file asks for it) are cut into windows; each is read from an
empty context, its first token replaced by BOS where the file asks for one. Only the second half of a window
counts: positions n/2 .. n-2 predict tokens n/2+1 .. n-1, so that every prediction has at least n/2 tokens
before it. perplexity = exp(mean of -ln p); its error is that of the mean, times the perplexity.
"""

import math
from dataclasses import dataclass

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.system.options import checked
from bridge.system.progress import Progress


@dataclass(frozen=True)
class Divergences:
    """A model compared with its reference; Δp is the probability of the text's own token, model minus reference."""

    mean: float  # Kullback-Leibler divergence, nats a token
    mean_error: float
    median: float
    p99: float
    maximum: float
    same_top: float  # share of positions where both have the same most likely token
    delta_p: float
    delta_p_rms: float
    reference_perplexity: float


@dataclass(frozen=True)
class Perplexity:
    """`error` is one standard error; `tokens` predictions in `windows` windows of `window` tokens."""

    perplexity: float
    error: float
    tokens: int
    windows: int
    window: int
    divergence: Divergences | None = None


@checked
def perplexity(
    model: Model, text: str, window: int = 256, n_windows: int | None = None, reference: Model | None = None,
    progress: Progress | None = None,
) -> Perplexity:  # fmt: skip
    """Measure a model on a text, on its first `n_windows` windows (default: all that are whole).

    progress  called with the number of windows done, of how many, and the perplexity so far as a text

    Raises BridgeError where the text is too short, the window beyond the context, or the reference cuts text
    into other tokens.
    """
    model.check_continues()
    windows = cut_windows(model, text, window, n_windows)
    if reference is not None and cut_windows(reference, text, window, n_windows) != windows:
        raise BridgeError(f"{reference.path}: its tokens differ from those of {model.path}; use another reference")
    if reference is not None and reference.vocab != model.vocab:
        sizes = f"has {reference.vocab} tokens, {model.path} {model.vocab}"
        raise BridgeError(f"{reference.path}: {sizes}; use another reference")
    losses: list[np.ndarray] = []
    compared: list[tuple[np.ndarray, ...]] = []
    if progress:
        progress(0, len(windows), "")
    for done, tokens in enumerate(windows):
        targets = np.array(tokens[window // 2 + 1 :])
        scores = _log_probabilities(model, tokens)
        actual = scores[np.arange(len(targets)), targets]
        losses.append(-actual)
        if reference is not None:
            base = _log_probabilities(reference, tokens)
            expected = base[np.arange(len(targets)), targets]
            kl = (np.exp(base) * (base - scores)).sum(-1)
            compared.append((kl, scores.argmax(-1) == base.argmax(-1), np.exp(actual) - np.exp(expected), -expected))
        if progress:
            progress(done + 1, len(windows), f"perplexity {math.exp(np.concatenate(losses).mean()):.4f}")
    loss = np.concatenate(losses)
    value = math.exp(loss.mean())
    divergence = _divergence(*map(np.concatenate, zip(*compared, strict=True))) if compared else None
    return Perplexity(value, value * _error(loss), len(loss), len(windows), window, divergence)


def _divergence(kl: np.ndarray, same: np.ndarray, delta: np.ndarray, base_loss: np.ndarray) -> Divergences:
    return Divergences(
        mean=float(kl.mean()), mean_error=_error(kl), median=float(np.median(kl)), p99=float(np.quantile(kl, 0.99)),
        maximum=float(kl.max()), same_top=float(same.mean()), delta_p=float(delta.mean()),
        delta_p_rms=float(np.sqrt(np.square(delta).mean())), reference_perplexity=math.exp(base_loss.mean()),
    )  # fmt: skip


def cut_windows(model: Model, text: str, window: int, count: int | None) -> list[list[int]]:
    """The first `count` windows of a text in tokens, or all whole ones; see `perplexity` for what is refused."""
    if window < 4 or window > model.context:
        raise BridgeError(f"window of {window} tokens: must be between 4 and the context length, {model.context}")
    if count is not None and count < 1:
        raise BridgeError(f"{count} windows: must be at least 1")
    tokenizer = model.tokenizer
    tokens = tokenizer.encode(text)
    if tokenizer.add_eos and tokens:
        tokens.pop()
    available = len(tokens) // window
    if available < (count or 1):
        raise BridgeError(f"the text has {len(tokens)} tokens, {available} windows of {window}; {count or 1} needed")
    first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return [[*first, *tokens[i * window + len(first) : (i + 1) * window]] for i in range(count or available)]


def _log_probabilities(model: Model, tokens: list[int]) -> np.ndarray:
    """float64 [n - 1 - n/2, vocab] of the second half's positions but the last, which has nothing to predict."""
    logits = model.logits(tokens, last=len(tokens) - len(tokens) // 2)[:-1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def _error(values: np.ndarray) -> float:
    """Standard error of a mean."""
    return float(values.std() / math.sqrt(max(1, len(values) - 1)))
