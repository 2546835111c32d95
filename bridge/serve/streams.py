"""The engine's streams as responses, for as long as the client is there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bridge.serve.engine import Stream

_Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")


class ReplyFailed(Exception):
    """A reply that was under way failed."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


async def reply_of(stream: Stream, first_token: Callable[[float], None] | None = None) -> tuple[str, list[Any], str]:
    """The text of a reply, its tokens, and how it ended. Raises ReplyFailed where it failed."""
    texts, tokens, finish = list[str](), list[Any](), ""
    async for update in stream:
        if first_token is not None:
            first_token(stream.first - stream.begun)
            first_token = None
        if update.error is not None:
            raise ReplyFailed(update.error, update.status)
        texts.append(update.text)
        tokens += update.tokens
        finish = update.finish or finish
    return "".join(texts), tokens, finish


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def while_connected(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which is cancelled when the client goes; ClientDisconnect then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.ensure_future(coroutine), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        watch.cancel()
        work.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await work


class StreamResponse(Response):
    """A stream, until it ends or the client goes; `release` is called then, whatever happened."""

    def __init__(self, events: AsyncIterator[bytes], media_type: str, release: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._source, self._release = events, release

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect, OSError):
                await while_connected(Request(scope, receive), self._pass_on(send))
        finally:
            self._release()

    async def _pass_on(self, send: _Send) -> None:
        async for data in self._source:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
