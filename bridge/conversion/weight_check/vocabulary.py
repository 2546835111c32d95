"""Compares the rows of embeddings and heads with the tokens.

A row without a token is padding to a multiple, at most 1024 rows: more are noted where they are not all 0, as the
tokenizer may be another model's. Rows of zeros are usual for tokens that are not text (control, unused, added), and for
a few that no training text had; 1% of the usual tokens, or 64 in a row, are damage.
"""

import re
from dataclasses import dataclass

import numpy as np

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.labels.schemes import EMBEDDING
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.weight_check.finding import Finding, first_of, longest_run, share
from bridge.conversion.weight_check.rows import FEW, IN_A_ROW, RowCounts
from bridge.errors import BridgeError
from bridge.gguf_file.reader import StoredModel

_PADDING = 1024
_USUAL = (1, 6)  # of GGUF's types of tokens: normal, byte
_UNUSED = 5
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|token_embd|output)(\.weight)?")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a model, by id, with their types as GGUF numbers them."""

    texts: list[str]
    types: np.ndarray

    def judges(self, name: str, rows: int) -> bool:
        """Whether a matrix of this name has a row for each token."""
        is_vocabulary = EMBEDDING.fullmatch(name.removesuffix(".weight")) or _HEAD.fullmatch(name)
        return bool(is_vocabulary) and rows >= len(self.texts)

    def findings(self, name: str, counts: RowCounts) -> tuple[list[Finding], list[str]]:
        """What is wrong with the rows of embeddings or a head, and notes on them."""
        findings, notes = [], []
        beyond = np.append(self.types == _UNUSED, np.ones(counts.rows - len(self.types), bool))
        extra = int(beyond.sum())
        if extra > _PADDING and not counts.zero[beyond].all():
            notes.append(f"{name}: {share(extra, counts.rows)} rows have no token, the first is {first_of(beyond)}")
        usual = np.isin(self.types, _USUAL)
        lost = counts.zero[: len(usual)] & usual
        count, of, token = int(lost.sum()), int(usual.sum()), first_of(lost)
        text = f"{share(count, of)} tokens have a row of zeros, the first is {token} ({self.texts[token]!r})"
        if count >= max(1, FEW * of) or longest_run(lost) >= IN_A_ROW:
            findings.append(Finding(name, "vocabulary", text, {"count": count, "of": of, "first": token}))
        elif count:
            notes.append(f"{name}: {text}")
        return findings, notes


def tokens_of(model: Checkpoint | StoredModel) -> tuple[Tokens | None, str]:
    """The tokens of a model; None, and why, where they are not known."""
    if isinstance(model, StoredModel):
        texts = model.metadata.get("tokenizer.ggml.tokens")
        types = model.metadata.get("tokenizer.ggml.token_type")
    else:
        try:
            metadata = outline_of(model).metadata
        except BridgeError as problem:
            return None, str(problem)
        texts, types = (
            metadata[key].value if key in metadata else None
            for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
        )
    if not isinstance(texts, list) or not texts:
        return None, "it has no tokenizer"
    known = isinstance(types, list) and len(types) == len(texts)
    return Tokens(texts, np.array(types if known else [1] * len(texts))), ""
