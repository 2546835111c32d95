"""What was generated in the form of OpenAI's Responses API: items of output, whole or as typed events."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import shortened
from bridge.runtime.chat.reading import Call
from bridge.runtime.replies.generation import ScoredToken
from bridge.runtime.tokenizer import Tokenizer
from bridge.serve.response_json import Replied, Usage, to_json, token_logprobs


@dataclass
class _Item:
    """An item of the output that text is still added to.

    part   the type of its one part of content
    event  the begin of its events' names
    """

    fields: dict[str, Any]
    index: int
    part: str
    event: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """Its part of content, so far."""
        if self.part == "reasoning_text":
            return {"type": self.part, "text": self.text}
        return {"type": self.part, "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponsesAnswer:
    """The answer of /v1/responses; `repeated`: the fields of the request that it says again."""

    media_type = "text/event-stream"

    def __init__(self, model: str, tokenizer: Tokenizer, repeated: dict[str, Any]):
        self._model, self._tokenizer, self._repeated = model, tokenizer, repeated
        self._id = _new_id("resp")
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._thought = ""
        self._finish: str | None = None
        self._sent = 0  # events

    def begin(self, replies: int) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def part(self, reply: Replied) -> bytes:
        parts = reply.parts
        self._finish = reply.finish or self._finish
        self._thought += parts.reasoning
        data = b""
        if parts.reasoning:
            data += self._add("reasoning_text", parts.reasoning, ())
        if parts.content:
            data += self._add("output_text", parts.content, reply.tokens or ())
        for call in parts.calls:
            data += self._called(call)
        return data

    def end(self, usage: Usage) -> bytes:
        data = self._last()
        status = self._status()
        return data + self._event(f"response.{status}", response=self._response(status, usage))

    def failed(self, message: str, kind: str) -> bytes:
        error = {"code": kind, "message": shortened(message)}
        return self._event("response.failed", response={**self._response("failed", None), "error": error})

    def complete(self, replies: list[Replied], usage: Usage) -> dict[str, Any]:
        for reply in replies:
            self.part(reply)
        self._last()
        return self._response(self._status(), usage)

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "background": False,
            "error": None, "incomplete_details": cut, "model": self._model, "output": list(self._output),
            "previous_response_id": None, **self._repeated, "usage": None if usage is None else self._usage(usage),
        }  # fmt: skip

    def _usage(self, usage: Usage) -> dict[str, Any]:
        thought = len(self._tokenizer.encode(self._thought, add_special=False)) if self._thought else 0
        return {
            "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.prompt + usage.completion,
        }  # fmt: skip

    def _add(self, part: str, text: str, tokens: Sequence[ScoredToken]) -> bytes:
        """Text of the open item, or of a new one where that is of another kind."""
        data = b""
        if self._open is None or self._open.part != part:
            data += self._close()
            data += self._begin(part)
        item = self._open
        assert item is not None
        logprobs = token_logprobs(tokens, self._tokenizer)
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": logprobs} if part == "output_text" else {}
        return data + self._of_part(f"{item.event}.delta", item, delta=text, **more)

    def _begin(self, part: str) -> bytes:
        if part == "reasoning_text":
            fields = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        else:
            fields = {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}
        item = self._open = _Item(fields, len(self._output), part, f"response.{part}")
        added = {**fields, "status": "in_progress"}
        return self._event("response.output_item.added", output_index=item.index, item=added) + self._of_part(
            "response.content_part.added", item, part=item.content()
        )

    def _close(self, status: str = "completed") -> bytes:
        """End the open item, if there is one."""
        if (item := self._open) is None:
            return b""
        self._open = None
        finished = {**item.fields, "content": [item.content()], "status": status}
        self._output.append(finished)
        more = {"logprobs": item.logprobs} if item.part == "output_text" else {}
        return (
            self._of_part(f"{item.event}.done", item, text=item.text, **more)
            + self._of_part("response.content_part.done", item, part=item.content())
            + self._event("response.output_item.done", output_index=item.index, item=finished)
        )

    def _last(self) -> bytes:
        """Complete the output, which has a message at least."""
        data = b"" if self._open is not None or self._output else self._begin("output_text")
        return data + self._close(self._status())

    def _called(self, call: Call) -> bytes:
        data, index = self._close(), len(self._output)
        item = {"id": _new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        finished = {**item, "arguments": call.arguments, "status": "completed"}
        self._output.append(finished)
        added = {**item, "arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": index}
        return (
            data
            + self._event("response.output_item.added", output_index=index, item=added)
            + self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
            + self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=index, item=finished)
        )

    def _of_part(self, kind: str, item: _Item, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.fields["id"], output_index=item.index, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return f"event: {kind}\ndata: ".encode() + to_json(data) + b"\n\n"


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
