"""What was generated as OpenAI's JSON: whole answers, and the events of streams."""

import base64
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bridge.errors import shortened
from bridge.runtime.chat.parser import Parts
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens: of the prompts, of the replies, and of the prompts' those that were there already.

    first    seconds to the first token of the first reply
    seconds  that all replies took
    """

    prompt: int
    completion: int
    cached: int
    first: float
    seconds: float


@dataclass(frozen=True)
class Replied:
    """A reply, or a part of one.

    tokens  with their probabilities; None where these are not asked for
    finish  "stop", "length" or "tool_calls"; None where more follows
    offset  characters of the text before it
    echoed  the prompt's text, its tokens after the first, and the first one
    """

    index: int
    parts: Parts
    tokens: Sequence[ScoredToken] | None
    finish: str | None
    offset: int = 0
    echoed: tuple[str, Sequence[ScoredToken], int] | None = None


class Answer(Protocol):
    """The form of the answer to one request for replies."""

    media_type: str  # of a stream

    def begin(self, replies: int) -> bytes:
        """What precedes so many replies in a stream."""

    def part(self, reply: Replied) -> bytes:
        """A part of a reply in a stream."""

    def end(self, usage: Usage) -> bytes:
        """The end of a stream."""

    def failed(self, message: str, kind: str) -> bytes:
        """The end of a stream that failed."""

    def complete(self, replies: list[Replied], usage: Usage) -> dict[str, Any]:
        """An answer that is no stream."""


class _OpenAIAnswer(ABC):
    """What completions and chats have in common.

    usage  whether the numbers of tokens are an event of their own
    """

    media_type = "text/event-stream"
    kind: str  # of an answer
    event_kind: str  # of a stream's events
    prefix: str  # of ids

    def __init__(self, model: str, tokenizer: Tokenizer, usage: bool):
        self._model, self._tokenizer, self._usage = model, tokenizer, usage
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def end(self, usage: Usage) -> bytes:
        counts = event({**self._head(self.event_kind), "choices": [], "usage": usage_json(usage)})
        return (counts if self._usage else b"") + DONE

    def failed(self, message: str, kind: str) -> bytes:
        return event(problem(message, kind))

    def complete(self, replies: list[Replied], usage: Usage) -> dict[str, Any]:
        return {**self._head(self.kind), "choices": list(map(self._choice, replies)), "usage": usage_json(usage)}

    @abstractmethod
    def _choice(self, reply: Replied) -> dict[str, Any]:
        """A reply as the answer has it."""

    def _event(self, index: int, reply: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        choice = {"index": index, **reply, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head(self.event_kind), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


class ChatAnswer(_OpenAIAnswer):
    """The answer of /v1/chat/completions."""

    kind, event_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, tokenizer: Tokenizer, usage: bool):
        super().__init__(model, tokenizer, usage)
        self._calls: Counter[int] = Counter()  # that were sent, of each reply

    def begin(self, replies: int) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, delta, None, None) for index in range(replies))

    def part(self, reply: Replied) -> bytes:
        delta = _message(reply.parts) or ({"content": ""} if reply.finish is None else {})
        for call in delta.get("tool_calls", ()):
            call["index"] = self._calls[reply.index]
            self._calls[reply.index] += 1
        return self._event(reply.index, {"delta": delta}, self._scored(reply.tokens), reply.finish)

    def _choice(self, reply: Replied) -> dict[str, Any]:
        content = None if reply.parts.calls else ""
        message = {"role": "assistant", "content": content, **_message(reply.parts), "refusal": None}
        logprobs = self._scored(reply.tokens)
        return {"index": reply.index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish}

    def _scored(self, tokens: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        """Probabilities as chats have them."""
        return None if tokens is None else {"content": token_logprobs(tokens, self._tokenizer), "refusal": None}


def token_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The probabilities of tokens, each with those of the most likely ones in its place."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    return [
        {**one(t.token, t.logprob), "top_logprobs": [one(token, logprob) for token, logprob in t.top]} for t in tokens
    ]


def _message(parts: Parts) -> dict[str, Any]:
    """The fields of a chat's message, or of a part of it; empty ones are left out."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parts.calls
    ]
    fields = {"reasoning_content": parts.reasoning, "content": parts.content, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


class CompletionAnswer(_OpenAIAnswer):
    """The answer of /v1/completions."""

    kind = event_kind = "text_completion"
    prefix = "cmpl"

    def begin(self, replies: int) -> bytes:
        return b""

    def part(self, reply: Replied) -> bytes:
        noted = None if reply.tokens is None else self._completion_logprobs(reply.tokens, None, reply.offset)
        return self._event(reply.index, {"text": reply.parts.content}, noted, reply.finish)

    def _choice(self, reply: Replied) -> dict[str, Any]:
        echoed = reply.echoed
        text = reply.parts.content if echoed is None else echoed[0] + reply.parts.content
        noted = None if reply.tokens is None else self._completion_logprobs(reply.tokens, echoed)
        return {"index": reply.index, "text": text, "logprobs": noted, "finish_reason": reply.finish}

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


def usage_json(usage: Usage) -> dict[str, Any]:
    """Numbers of tokens as completions and chats have them."""
    return {
        "prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion, "prompt_tokens_details": {"cached_tokens": usage.cached},
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
