"""What a model makes of whole texts: vectors, and scores of documents for a query."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.replies.pooling import Pooler, Ranker, dense_layers
from bridge.runtime.tokenizer import Tokenizer


class Vectors(ABC):
    """The part of `Model` that makes them."""

    path: Path
    config: DecoderConfig
    tokenizer: Tokenizer

    @property
    @abstractmethod
    def file(self) -> GGUFFile:
        """The open file."""

    @abstractmethod
    def checked_ids(self, tokens: Sequence[int], max_tokens: int = 0) -> list[int]:
        """The token ids of a prompt, if the model takes them."""

    @abstractmethod
    def taken(self) -> AbstractContextManager[Any]:
        """Lock the decoder."""

    def embed(
        self, texts: str | Sequence[str | Sequence[int]], pooling: str | None = None, normalize: bool = True
    ) -> np.ndarray:
        """Make a vector of each text, from the last hidden states of its tokens.

        texts      a text, or several, each a text or token ids
        pooling    "mean" of all tokens, "cls" (the first one) or "last"; None: as the file says, else the mean
        normalize  give vectors length 1, so that products of them are cosines

        Returns float32 [texts, hidden]. Raises BridgeError where a text does not fit the context.
        """
        if not isinstance(texts, Iterable):
            raise BridgeError(f"texts is a {type(texts).__name__}; must be a text or a list of texts")
        prompts = [texts] if isinstance(texts, str) else list(texts)
        ids = [self.checked_ids(self.tokenizer.encode(text) if isinstance(text, str) else text) for text in prompts]
        vectors = []
        for tokens in ids:
            pooler = self.pooler(pooling)
            self._read_whole(tokens, pooler)
            vectors.append(pooler.vector(normalize))
        return np.array(vectors, np.float32).reshape(len(vectors), self.embedding_size)

    def _read_whole(self, tokens: Sequence[int], pooler: Pooler) -> None:
        with self.taken() as decoder:
            pooler(0, decoder.states(tokens, len(tokens)))

    @cached_property
    def _dense(self) -> list[QuantTensor]:
        return dense_layers(self.file, self.config.hidden)

    @property
    def embedding_size(self) -> int:
        """Numbers of a vector that `embed` makes."""
        return self._dense[-1].shape[0] if self._dense else self.config.hidden

    def pooler(self, pooling: str | None) -> Pooler:
        """What makes a vector of a text's states; `pooling` as in `embed`."""
        if pooling is None and self.config.pooling == "rank":
            raise BridgeError(
                f"{self.path}: is a reranker, which scores documents for a query (rerank); its vectors need "
                f"{parameter('pooling', 'mean')}, cls or last"
            )
        return Pooler(pooling or self.config.pooling or "mean", self._dense)

    @cached_property
    def ranker(self) -> Ranker:
        """What scores documents; BridgeError where the file has no head for it."""
        return Ranker(self.file, self.config, self.tokenizer)

    def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """Score `documents`, a list of texts, by how well each answers the text `query`. The file must be a reranker.

        Returns float32 [documents]; larger is better. Raises BridgeError where the file has no such head, or a query
        and a document do not fit the context.
        """
        if isinstance(documents, str) or not isinstance(documents, Iterable):
            raise BridgeError(f"documents is a {type(documents).__name__}; must be a list of texts")
        texts, scores = list(documents), []
        for text in (query, *texts):
            if not isinstance(text, str):
                raise BridgeError(f"query and documents must be texts; one is a {type(text).__name__}")
        for ids in [self.checked_ids(self.ranker.tokens(query, text)) for text in texts]:
            pooler = Pooler(self.ranker.pooling)
            self._read_whole(ids, pooler)
            scores.append(self.ranker.score(pooler.vector(normalize=False)))
        return np.array(scores, np.float32)

    def check_continues(self, option: str | None = None) -> None:
        """Raise BridgeError for an encoder; `option`: what was given that is of continuations alone."""
        if not self.config.causal:
            makes = "it makes vectors (embed) or, with a head for it, scores documents (rerank)"
            raise BridgeError(
                f"{self.path}: {self.config.arch} is an encoder, which cannot continue a text; "
                f"{makes if option is None else f'leave out {parameter(option)}'}"
            )
