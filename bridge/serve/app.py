"""Paths to answers: keys, limits, errors, and clients that go."""

import asyncio
import hmac
import html
import ipaddress
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.serve import request_json
from bridge.serve.engine import Engine, Refused, Stream, Update
from bridge.serve.metrics import Metrics
from bridge.serve.request_json import BadRequest, ReplyJobs, ReplyRequest
from bridge.serve.response_json import DONE, Answer, event, problem, to_json, usage, vectors

_BODY_SECONDS = 30  # within which a client must have sent its request
_BODIES = 16  # of the largest size that are held at a time
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; require-trusted-types-for 'script'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_KINDS = {400: "invalid_request_error", 500: "server_error", 503: "service_unavailable"}  # of errors

_Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What the server takes, and how it answers.

    sequences  made at the same time, at most 8
    waiting    further ones that may wait
    body       bytes of a request
    key        that clients must send, or None
    local      whether only names of this machine are taken as its host: no page elsewhere can then ask it by another
    pooling    of /v1/embeddings: "mean" or "last"
    sampling   defaults of requests
    draft      what guesses tokens: "ngram" or None
    """

    sequences: int = 8
    waiting: int = 64
    body: int = 4 << 20
    key: str | None = None
    local: bool = True
    pooling: str = "mean"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    draft: str | None = None


def make_app(model: Model, limits: Limits, engine: Engine) -> Starlette:
    """The ASGI application; it starts and stops the engine."""
    server = _Server(model, limits, engine)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    routes = [
        Route("/", server.open_to_all(server.page)),
        Route("/health", server.open_to_all(server.health)),
        Route("/metrics", server.with_key(server.metrics)),
        Route("/v1/models", server.with_key(server.models)),
        Route("/v1/models/{name:path}", server.with_key(server.model_named)),
        Route("/v1/completions", server.with_key(server.completions), methods=["POST"]),
        Route("/v1/chat/completions", server.with_key(server.chats), methods=["POST"]),
        Route("/v1/embeddings", server.with_key(server.embeddings), methods=["POST"]),
    ]

    async def not_found(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: this server has {', '.join(route.path for route in routes)}"
        return _failed(error.status_code, message, "invalid_request_error")

    async def unforeseen(request: Request, error: Exception) -> Response:
        return _failed(500, f"the server failed: {type(error).__name__}", "server_error")

    handlers: dict[Any, Any] = {404: not_found, 405: not_found, Exception: unforeseen}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class _Server:
    def __init__(self, model: Model, limits: Limits, engine: Engine):
        self.model, self.limits, self.engine = model, limits, engine
        self.name = os.fsencode(model.path.stem).decode("utf-8", "replace")
        self._metrics = Metrics()
        self._held = 0  # bytes of bodies
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._page = page.replace("MODEL_NAME", html.escape(self.name))

    def open_to_all(self, answer: Callable[[Request], Awaitable[Response]]) -> Any:
        """An endpoint that turns what is raised into answers, and counts."""

        async def endpoint(request: Request) -> Response:
            try:
                if self.limits.local and not _is_local(request.headers.get("host", "")):
                    raise BadRequest("the Host is not this machine; start the server with --host to be asked by others",
                                     status=403)  # fmt: skip
                response = await answer(request)
            except BadRequest as error:
                response = _failed(error.status, str(error), "invalid_request_error", error.field, error.code)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
            except BridgeError as error:
                response = _failed(400, str(error), "invalid_request_error")
            except Refused as error:
                status, kind = (503, "service_unavailable") if error.stopping else (429, "rate_limit_error")
                response = _failed(status, str(error), kind)
                response.headers["Retry-After"] = "5"
            except _Failed as error:
                response = _failed(error.status, str(error), _KINDS[error.status])
            except ClientDisconnect:
                response = Response(status_code=499)
            self._metrics.requests[request.scope["route"].path, response.status_code] += 1
            return response

        return endpoint

    def with_key(self, answer: Callable[[Request], Awaitable[Response]]) -> Any:
        """An endpoint of `open_to_all` for clients that send the key."""

        async def checked(request: Request) -> Response:
            if self.limits.key is not None:
                scheme, _, key = request.headers.get("authorization", "").partition(" ")
                same = hmac.compare_digest(key.strip().encode("latin-1"), os.fsencode(self.limits.key))
                if scheme.lower() != "bearer" or not same:
                    raise BadRequest("the API key is missing or wrong; send it as Authorization: Bearer KEY",
                                     code="invalid_api_key", status=401)  # fmt: skip
            return await answer(request)

        return self.open_to_all(checked)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        stopping = self.engine.stopping
        return _Json({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(self.engine), media_type="text/plain; version=0.0.4")

    def _model_object(self) -> dict[str, Any]:
        created = int(self.model.path.stat().st_mtime) if self.model.path.exists() else 0
        return {"id": self.name, "object": "model", "created": created, "owned_by": "gguf-bridge",
                "context_length": self.model.context}  # fmt: skip

    async def models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._model_object()]})

    async def model_named(self, request: Request) -> Response:
        """The one model, asked for by its name."""
        request_json.check_model(request_json.RequestFields({"model": request.path_params["name"]}), self.name)
        return _Json(self._model_object())

    async def completions(self, request: Request) -> Response:
        return await self._reply(request, request_json.completion, "text_completion")

    async def chats(self, request: Request) -> Response:
        return await self._reply(request, request_json.chat, "chat.completion")

    async def embeddings(self, request: Request) -> Response:
        """A vector for each text."""
        jobs, poolers, in_base64 = await self._prepared(
            request,
            lambda body, awaited: request_json.embeddings(body, self.model, self.name, self.limits.pooling, awaited),
        )
        size = self.limits.sequences
        for first in range(0, len(jobs), size):
            streams = self.engine.submit(jobs[first : first + size])
            try:
                await _while_connected(request, _gathered(map(_all, streams)))
            finally:
                self.engine.release(streams)
        embedded = [pooler.vector(normalize=True) for pooler in poolers]
        return _Json(vectors(embedded, self.name, sum(len(job.prompt) for job in jobs), in_base64))

    async def _prepared(self, request: Request, make: Callable[[Any, Callable[[], bool]], T]) -> T:
        """What `make` makes of a request's JSON while the client is there, see `Engine.aside`."""
        data = bytearray()
        try:
            await self._read(request, data)
            self.engine.check_room()
            work = self.engine.aside(lambda awaited: make(request_json.json_of(data), awaited))
            return await _while_connected(request, work)
        finally:
            self._held -= len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        """Add the body of a request to `data`, no more than the limit."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a page elsewhere could send without asking is none
            raise BadRequest("the Content-Type must be application/json", status=415)
        too_large = BadRequest(f"the body is larger than {self.limits.body} bytes", status=413)
        if int(request.headers.get("content-length", 0)) > self.limits.body:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    self._held += len(part)
                    if len(data) > self.limits.body:
                        raise too_large
                    if self._held > self.limits.body * _BODIES:
                        raise Refused(f"{self._held} bytes of requests are being read. Try later")
        except TimeoutError:
            raise BadRequest(f"the body did not come within {_BODY_SECONDS} seconds", status=408) from None

    async def _reply(self, request: Request, read: Callable[..., ReplyRequest], kind: str) -> Response:
        def make(body: Any, awaited: Callable[[], bool]) -> tuple[ReplyRequest, ReplyJobs]:
            asked = read(body, self.model, self.name, self.limits.sampling)
            return asked, request_json.reply_jobs(asked, self.model, self.engine.most, awaited)

        asked, jobs = await self._prepared(request, make)
        answer = Answer(kind, self.name, self.model.tokenizer, self.model.has_channels)
        streams = self.engine.submit(jobs.jobs)
        if asked.stream:
            return _Events(self._events(answer, asked, jobs, streams), lambda: self.engine.release(streams))
        try:
            updates = await _while_connected(request, _gathered(_all(s, self._metrics.first_token) for s in streams))
        finally:
            self.engine.release(streams)
        choices = []
        for index, (text, tokens, finish) in enumerate(updates):
            echoed = None
            if asked.echo:
                number, generation = index // asked.n, streams[index].generation
                assert generation is not None
                prompt = asked.prompts[number]
                prompt_text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)
                echoed = prompt_text, jobs.scorers[number].tokens if jobs.scorers else (), generation.prompt[0]
            choices.append(answer.choice(index, text, None if asked.logprobs is None else tokens, finish, echoed))
        return _Json(answer.whole(choices, _usage(jobs, streams)))

    async def _events(
        self, answer: Answer, asked: ReplyRequest, jobs: ReplyJobs, streams: list[Stream]
    ) -> AsyncIterator[bytes]:
        """The events of all replies as they come."""
        updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            async for update in stream:
                updates.put_nowait((index, update))

        tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
        offsets, left = [0] * len(streams), len(streams)
        begun = [False] * len(streams)
        try:
            for index in range(len(streams) if answer.chat else 0):
                yield event(answer.begin(index))
            while left:
                index, update = await updates.get()
                if not begun[index]:
                    begun[index] = True
                    self._metrics.first_token(asyncio.get_running_loop().time() - streams[index].begun)
                if update.error is not None:
                    yield event(problem(update.error, _KINDS[update.status]))
                    return
                left -= update.finish is not None
                tokens = None if asked.logprobs is None else update.tokens
                if update.text or tokens or update.finish is not None:
                    yield event(answer.part(index, update.text, tokens, update.finish, offsets[index]))
                    offsets[index] += len(update.text)
            if asked.usage:
                yield event(answer.end(_usage(jobs, streams)))
            yield DONE
        finally:
            for task in tasks:
                task.cancel()


class _Failed(Exception):
    """A reply that was under way failed."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def _usage(jobs: ReplyJobs, streams: list[Stream]) -> dict[str, Any]:
    """Prompts count once, however many replies they have."""
    generations = [stream.generation for stream in streams if stream.generation is not None]
    replies = sum(generation.drawn for generation in generations)
    each = max(1, len(streams) // max(1, len(jobs.prompts)))
    return usage(sum(map(len, jobs.prompts)), replies, sum(generation.kept for generation in generations[::each]))


async def _all(stream: Stream, first_token: Callable[[float], None] | None = None) -> tuple[str, list[Any], str]:
    """The text of a reply, its tokens, and how it ended. Raises _Failed where it failed."""
    texts, tokens, finish = list[str](), list[Any](), ""
    async for update in stream:
        if first_token is not None:
            first_token(asyncio.get_running_loop().time() - stream.begun)
            first_token = None
        if update.error is not None:
            raise _Failed(update.error, update.status)
        texts.append(update.text)
        tokens += update.tokens
        finish = update.finish or finish
    return "".join(texts), tokens, finish


async def _gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _while_connected(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
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


class _Events(Response):
    """Server-sent events, until they end or the client goes; `release` is called then, whatever happened."""

    def __init__(self, events: AsyncIterator[bytes], release: Callable[[], None]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._source, self._release = events, release

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect, OSError):
                await _while_connected(Request(scope, receive), self._pass_on(send))
        finally:
            self._release()

    async def _pass_on(self, send: _Send) -> None:
        async for data in self._source:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def _failed(status: int, message: str, kind: str, field: str | None = None, code: str | None = None) -> Response:
    return _Json(problem(message, kind, field, code), status)


def _is_local(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine by an address, or as localhost."""
    name = host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host
    with suppress(ValueError):
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    return name.lower() == "localhost"
