"""What was generated in the form of Ollama's interface: one object, or one a line."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bridge.errors import shortened
from bridge.runtime.chat.parser import Parts
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.tokenizer import Tokenizer
from bridge.serve.response_json import Replied, Usage, to_json, token_logprobs

_NANOSECONDS = 1_000_000_000


class OllamaAnswer:
    """The answer of /api/generate, or with `chat` of /api/chat: `model` is the model's name."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, tokenizer: Tokenizer, chat: bool):
        self._model, self._tokenizer, self._chat = model, tokenizer, chat
        self._finish = "load"  # of a request without a prompt
        self._calls = 0

    def begin(self, replies: int) -> bytes:
        return b""

    def part(self, reply: Replied) -> bytes:
        self._ends(reply)
        if not reply.parts and not reply.tokens:
            return b""
        return _line({**self._head(), **self._replied(reply.parts, reply.tokens), "done": False})

    def end(self, usage: Usage) -> bytes:
        return _line(self._done(Parts(), None, usage))

    def failed(self, message: str, kind: str) -> bytes:
        return _line(problem(message))

    def complete(self, replies: list[Replied], usage: Usage) -> dict[str, Any]:
        for reply in replies:
            self._ends(reply)
            return self._done(reply.parts, reply.tokens, usage)
        return self._done(Parts(), None, usage)

    def _ends(self, reply: Replied) -> None:
        """Note how a reply ends: calls are no reason of their own here."""
        if reply.finish is not None:
            self._finish = "stop" if reply.finish == "tool_calls" else reply.finish

    def _done(self, parts: Parts, tokens: Sequence[ScoredToken] | None, usage: Usage) -> dict[str, Any]:
        total, first = int(usage.seconds * _NANOSECONDS), int(usage.first * _NANOSECONDS)
        return {
            **self._head(), **self._replied(parts, tokens), "done": True, "done_reason": self._finish,
            "total_duration": total, "load_duration": 0, "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first, "eval_count": usage.completion, "eval_duration": total - first,
        }  # fmt: skip

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}

    def _replied(self, parts: Parts, tokens: Sequence[ScoredToken] | None) -> dict[str, Any]:
        """A reply, or a part of one."""
        thinking = {"thinking": parts.reasoning} if parts.reasoning else {}
        logprobs = {} if tokens is None else {"logprobs": token_logprobs(tokens, self._tokenizer)}
        if not self._chat:
            return {"response": parts.content, **thinking, **logprobs}
        calls = [
            {"id": call.id, "function": {"index": self._calls + number, "name": call.name,
                                         "arguments": json.loads(call.arguments)}}
            for number, call in enumerate(parts.calls)
        ]  # fmt: skip
        self._calls += len(calls)
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": parts.content, **thinking, **called}, **logprobs}


def problem(message: str, *_: Any) -> dict[str, Any]:
    """An error as Ollama's clients read it."""
    return {"error": shortened(message)}


def _line(data: dict[str, Any]) -> bytes:
    return to_json(data) + b"\n"
