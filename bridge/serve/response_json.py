"""What was generated as OpenAI's JSON: whole answers, and the events of streams."""

import base64
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.errors import shortened
from bridge.runtime.replies.chat import Channels
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.tokenizer import Tokenizer


class Answer:
    """The form of one request's answer; `kind`: "text_completion" or "chat.completion".

    channels  whether replies in chats have channels: their reasoning is then `reasoning_content`
    """

    def __init__(self, kind: str, model: str, tokenizer: Tokenizer, channels: bool = False):
        self.kind, self.model, self._tokenizer = kind, model, tokenizer
        self.chat = kind == "chat.completion"
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._channels: defaultdict[int, Channels] | None = defaultdict(Channels) if channels else None  # of each reply

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def choice(
        self, index: int, text: str, tokens: Sequence[ScoredToken] | None, finish: str | None,
        echoed: tuple[str, Sequence[ScoredToken], int] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """One reply; `tokens`: None where no probabilities are asked for.

        echoed  the prompt's text, its tokens after the first, and the first one
        """
        if self.chat:
            message = {"role": "assistant", "content": "", **self._message_fields(index, text, True), "refusal": None}
            return {"index": index, "message": message, "logprobs": self._scored(tokens), "finish_reason": finish}
        if echoed is not None:
            text = echoed[0] + text
        noted = None if tokens is None else self._completion_logprobs(tokens, echoed)
        return {"index": index, "text": text, "logprobs": noted, "finish_reason": finish}

    def begin(self, index: int) -> dict[str, Any]:
        """The first event of a reply in a chat."""
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                            "finish_reason": None})  # fmt: skip

    def part(
        self, index: int, text: str, tokens: Sequence[ScoredToken] | None, finish: str | None, offset: int
    ) -> dict[str, Any]:
        """An event with a part of a reply; `offset`: characters before it."""
        if self.chat:
            delta = self._message_fields(index, text, finish is not None) or ({"content": ""} if finish is None else {})
            scored = self._scored(tokens)
            return self._event({"index": index, "delta": delta, "logprobs": scored, "finish_reason": finish})
        noted = None if tokens is None else self._completion_logprobs(tokens, None, offset)
        return self._event({"index": index, "text": text, "logprobs": noted, "finish_reason": finish})

    def _message_fields(self, index: int, text: str, last: bool) -> dict[str, str]:
        """The texts of a chat's message, or of a part of it, by field; empty ones are left out."""
        reasoning, content = ("", text) if self._channels is None else self._channels[index].add(text, last)
        return {name: value for name, value in (("reasoning_content", reasoning), ("content", content)) if value}

    def end(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event with the numbers of tokens."""
        return {**self._event(), "usage": usage}

    def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk" if self.chat else self.kind), "choices": list(choices)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _scored(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        """Probabilities as chats have them."""
        if tokens is None:
            return None

        def one(token: int, logprob: float) -> dict[str, Any]:
            piece = self._tokenizer.piece(token, special=True)
            return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

        content = [
            {**one(t.token, t.logprob), "top_logprobs": [one(token, logprob) for token, logprob in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(
        self, tokens: Sequence[ScoredToken], echoed: tuple[str, Sequence[ScoredToken], int] | None, offset: int = 0
    ) -> dict[str, Any]:
        """Probabilities as completions have them."""

        def text_of(token: int) -> str:
            return self._tokenizer.piece(token, special=True).decode("utf-8", "replace")

        texts, logprobs, tops, offsets = list[str](), list[float | None](), list[Any](), list[int]()
        if echoed is not None:
            _, prompt, first = echoed
            texts, logprobs, tops, offsets = [text_of(first)], [None], [None], [0]
            offset = len(self._tokenizer.piece(first).decode("utf-8", "replace"))
            tokens = [*prompt, *tokens]
        for token in tokens:
            texts.append(text_of(token.token))
            logprobs.append(token.logprob)
            tops.append({text_of(t): logprob for t, logprob in token.top})
            offsets.append(offset)
            offset += len(token.text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Numbers of tokens: of the prompts, of the replies, and of the prompts' those that were there already."""
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def vectors(embeddings: Sequence[np.ndarray], model: str, tokens: int, in_base64: bool) -> dict[str, Any]:
    """The answer of /v1/embeddings."""
    data = [
        {"object": "embedding", "index": i,
         "embedding": base64.b64encode(v.astype("<f4").tobytes()).decode() if in_base64 else v.tolist()}
        for i, v in enumerate(embeddings)
    ]  # fmt: skip
    return {
        "object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }  # fmt: skip


def to_json(data: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 does not have, as JSON's escape."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def problem(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    field = None if field is None else shortened(field)
    return {"error": {"message": shortened(message), "type": kind, "param": field, "code": code}}
