"""Paths to answers: keys, limits, errors, and clients that go."""

import asyncio
import hmac
import html
import ipaddress
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.runtime.replies.pooling import Pooler
from bridge.serve import llama_server, ollama, request_json, responses_request
from bridge.serve.engine import Engine, Job, Refused, Stream, Update
from bridge.serve.jobs import ReplyJobs, embedding_jobs, reply_jobs
from bridge.serve.metrics import Metrics
from bridge.serve.ollama_answer import OllamaAnswer
from bridge.serve.ollama_answer import problem as ollama_problem
from bridge.serve.request_json import BadRequest, EmbeddingRequest, ReplyRequest
from bridge.serve.rerank import ranked, rerank_jobs
from bridge.serve.response_json import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Replied,
    Usage,
    problem,
    to_json,
    vectors,
)
from bridge.serve.responses_answer import ResponsesAnswer
from bridge.serve.streams import ReplyFailed, StreamResponse, gathered, reply_of, while_connected

_BODY_SECONDS = 30  # within which a client must have sent its request
_BODIES = 16  # of the largest size that are held at a time
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; require-trusted-types-for 'script'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_KINDS = {400: "invalid_request_error", 500: "server_error", 503: "service_unavailable"}  # of errors

_Endpoint = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What the server takes, and how it answers.

    sequences  made at the same time, at most 8
    waiting    further ones that may wait
    body       bytes of a request
    key        that clients must send, or None
    local      whether only names of this machine are taken as its host: no page elsewhere can then ask it by another
    pooling    of /v1/embeddings; None: the file's own, or the mean
    sampling   defaults of requests
    draft      what guesses tokens, see `Model.batch`
    """

    sequences: int = 8
    waiting: int = 64
    body: int = 4 << 20
    key: str | None = None
    local: bool = True
    pooling: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    draft: str | Path | None = None


def make_app(model: Model, limits: Limits, engine: Engine) -> Starlette:
    """The ASGI application; it starts and stops the engine."""
    server = _Server(model, limits, engine)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    free = {"/": server.page, "/health": server.health, "/v1/health": server.health}
    asked = {
        "/metrics": server.metrics,
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model_named,
        "/models": server.models,
        "/props": server.properties,
        "/slots": server.slots,
        "/api/version": server.ollama_version,
        "/api/tags": server.ollama_tags,
        "/api/ps": server.ollama_running,
    }
    posted = {
        "/v1/completions": server.completions(),
        "/v1/chat/completions": server.chats(),
        "/v1/responses": server.responses(),
        "/v1/embeddings": server.embedding(
            request_json.embeddings,
            lambda found, tokens, asked: vectors(found, server.name, tokens, asked.in_base64),
        ),
        **dict.fromkeys(("/v1/rerank", "/v1/reranking", "/rerank", "/reranking"), server.reranking()),
        "/tokenize": server.converting(llama_server.tokenize),
        "/detokenize": server.converting(llama_server.detokenize),
        "/apply-template": server.converting(llama_server.apply_template),
        "/api/chat": server.ollama(chat=True),
        "/api/generate": server.ollama(chat=False),
        "/api/show": server.converting(lambda body, _: server.card.show(body)),
        "/api/embed": server.embedding(ollama.embed, server.card.embedded),
        "/api/embeddings": server.embedding(ollama.embed, lambda found, *_: {"embedding": found[0].tolist()}),
    }
    routes = [
        *(Route(path, server.open_to_all(endpoint)) for path, endpoint in free.items()),
        *(Route(path, server.with_key(endpoint)) for path, endpoint in asked.items()),
        *(Route(path, server.with_key(endpoint), methods=["POST"]) for path, endpoint in posted.items()),
    ]

    async def not_found(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: this server has {', '.join(route.path for route in routes)}"
        return _failed(request, error.status_code, message, "invalid_request_error")

    async def unforeseen(request: Request, error: Exception) -> Response:
        return _failed(request, 500, f"the server failed: {type(error).__name__}", "server_error")

    handlers: dict[Any, Any] = {404: not_found, 405: not_found, Exception: unforeseen}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class _Server:
    def __init__(self, model: Model, limits: Limits, engine: Engine):
        self.model, self.limits, self.engine = model, limits, engine
        self.name = os.fsencode(model.path.stem).decode("utf-8", "replace")
        self.card = ollama.ModelCard(model, self.name)
        self._metrics = Metrics()
        self._held = 0  # bytes of bodies
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._page = page.replace("MODEL_NAME", html.escape(self.name))

    def open_to_all(self, answer: _Endpoint) -> Any:
        """An endpoint that turns what is raised into answers, and counts."""

        async def endpoint(request: Request) -> Response:
            try:
                if self.limits.local and not _is_local(request.headers.get("host", "")):
                    raise BadRequest("the Host is not this machine; start the server with --host to be asked by others",
                                     status=403)  # fmt: skip
                response = await answer(request)
            except BadRequest as error:
                message = self._without_path(str(error))
                response = _failed(request, error.status, message, "invalid_request_error", error.field, error.code)
                if error.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
            except BridgeError as error:
                response = _failed(request, 400, self._without_path(str(error)), "invalid_request_error")
            except Refused as error:
                status, kind = (503, "service_unavailable") if error.stopping else (429, "rate_limit_error")
                response = _failed(request, status, str(error), kind)
                response.headers["Retry-After"] = "5"
            except ReplyFailed as error:
                response = _failed(request, error.status, str(error), _KINDS[error.status])
            except ClientDisconnect:
                response = Response(status_code=499)
            self._metrics.requests[request.scope["route"].path, response.status_code] += 1
            return response

        return endpoint

    def _without_path(self, message: str) -> str:
        """A message that names the model instead of its file: where that is, is no client's business."""
        return message.replace(str(self.model.path), self.name)

    def with_key(self, answer: _Endpoint) -> Any:
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
        if (asked := request.path_params["name"]) != self.name:
            message = f"the model {asked!r} is not served; this server has {self.name!r}"
            raise BadRequest(message, "model", "model_not_found", 404)
        return _Json(self._model_object())

    async def properties(self, request: Request) -> Response:
        limits = self.limits
        return _Json(llama_server.properties(self.model, self.name, limits.sequences, limits.sampling))

    async def slots(self, request: Request) -> Response:
        return _Json(llama_server.slots(self.model, self.engine, self.limits.sequences))

    def converting(self, convert: Callable[[Any, Model], Any]) -> _Endpoint:
        """What answers with what is made of a request's JSON, without the model's weights."""

        async def answer(request: Request) -> Response:
            return _Json(await self._prepared(request, lambda body, _: convert(body, self.model)))

        return answer

    def completions(self) -> _Endpoint:
        answer_of = partial(CompletionAnswer, self.name, self.model.tokenizer)
        return self.replying(request_json.completion, lambda asked: answer_of(asked.usage))

    def chats(self) -> _Endpoint:
        answer_of = partial(ChatAnswer, self.name, self.model.tokenizer)
        return self.replying(request_json.chat, lambda asked: answer_of(asked.usage))

    def responses(self) -> _Endpoint:
        answer_of = partial(ResponsesAnswer, self.name, self.model.tokenizer)
        return self.replying(responses_request.responses, lambda asked: answer_of(asked.repeated))

    def ollama(self, chat: bool) -> _Endpoint:
        answer_of = partial(OllamaAnswer, self.card.name, self.model.tokenizer, chat)
        return self.replying(ollama.chat if chat else ollama.generate, lambda _: answer_of())

    async def ollama_version(self, request: Request) -> Response:
        return _Json({"version": ollama.VERSION})

    async def ollama_tags(self, request: Request) -> Response:
        return _Json({"models": [self.card.listed()]})

    async def ollama_running(self, request: Request) -> Response:
        return _Json({"models": [self.card.running()]})

    def embedding(
        self, read: Callable[[Any, Model, str | None], EmbeddingRequest],
        answer_of: Callable[[list[np.ndarray], int, EmbeddingRequest], Any],
    ) -> _Endpoint:  # fmt: skip
        """What answers with a vector for each text; `answer_of` gets them and the number of their tokens."""

        def make(
            body: Any, awaited: Callable[[], bool]
        ) -> tuple[tuple[EmbeddingRequest, list[Pooler]], list[Job]]:  # fmt: skip
            asked = read(body, self.model, self.limits.pooling)
            jobs, poolers = embedding_jobs(asked, self.model, awaited)
            return (asked, poolers), jobs

        async def answer(request: Request) -> Response:
            (asked, poolers), tokens = await self._read_texts(request, make)
            embedded = [pooler.vector(normalize=True, size=asked.size) for pooler in poolers]
            return _Json(answer_of(embedded, tokens, asked))

        return answer

    def reranking(self) -> _Endpoint:
        """What answers with scores of documents."""

        async def answer(request: Request) -> Response:
            make = lambda body, awaited: rerank_jobs(body, self.model, awaited)  # noqa: E731
            asked, tokens = await self._read_texts(request, make)
            return _Json(ranked(asked, self.model, self.name, tokens))

        return answer

    async def _read_texts(
        self, request: Request, make: Callable[[Any, Callable[[], bool]], tuple[T, list[Job]]]
    ) -> tuple[T, int]:
        """What `make` makes of a request, whose jobs have read their texts, and the number of their tokens."""
        asked, jobs = await self._prepared(request, make)
        size = self.limits.sequences
        for first in range(0, len(jobs), size):
            streams = self.engine.submit(jobs[first : first + size])
            try:
                await while_connected(request, gathered(map(reply_of, streams)))
            finally:
                self.engine.release(streams)
        return asked, sum(len(job.prompt) for job in jobs)

    async def _prepared(self, request: Request, make: Callable[[Any, Callable[[], bool]], T]) -> T:
        """What `make` makes of a request's JSON while the client is there, see `Engine.aside`."""
        data = bytearray()
        try:
            await self._read(request, data)
            self.engine.check_room()
            work = self.engine.aside(lambda awaited: make(request_json.json_of(data), awaited))
            return await while_connected(request, work)
        finally:
            self._held -= len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        """Add the body of a request to `data`, no more than the limit."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and "origin" in request.headers:  # what a page elsewhere could send unasked
            raise BadRequest("the Content-Type must be application/json where a page asks", status=415)
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

    def replying(
        self, read: Callable[[Any, Model, Mapping[str, Any]], ReplyRequest], answer_of: Callable[[ReplyRequest], Answer]
    ) -> _Endpoint:
        """What answers requests for text."""

        async def answer(request: Request) -> Response:
            return await self._reply(request, read, answer_of)

        return answer

    async def _reply(
        self, request: Request, read: Callable[..., ReplyRequest], answer_of: Callable[[ReplyRequest], Answer]
    ) -> Response:
        def make(body: Any, awaited: Callable[[], bool]) -> tuple[ReplyRequest, ReplyJobs]:
            asked = read(body, self.model, self.limits.sampling)
            return asked, reply_jobs(asked, self.model, self.engine.most, awaited)

        asked, jobs = await self._prepared(request, make)
        answer = answer_of(asked)
        streams = self.engine.submit(jobs.jobs)
        if asked.stream:
            events = self._events(answer, asked, jobs, streams)
            return StreamResponse(events, answer.media_type, lambda: self.engine.release(streams))
        try:
            updates = await while_connected(request, gathered(reply_of(s, self._metrics.first_token) for s in streams))
        finally:
            self.engine.release(streams)
        replies = []
        for index, (text, tokens, finish) in enumerate(updates):
            echoed = None
            if asked.echo:
                number, generation = index // asked.n, streams[index].generation
                assert generation is not None
                prompt = asked.prompts[number]
                prompt_text = prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)
                echoed = prompt_text, jobs.scorers[number].tokens if jobs.scorers else (), generation.prompt[0]
            parts = jobs.parsers[index].add(text, last=True)
            noted = None if asked.logprobs is None else tokens
            replies.append(Replied(index, parts, noted, _ended(finish, bool(parts.calls)), echoed=echoed))
        return _Json(answer.complete(replies, _usage(jobs, streams)))

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
        begun, called = [False] * len(streams), [False] * len(streams)
        try:
            yield answer.begin(len(streams))
            while left:
                index, update = await updates.get()
                if not begun[index]:
                    begun[index] = True
                    self._metrics.first_token(streams[index].first - streams[index].begun)
                if update.error is not None:
                    yield answer.failed(update.error, _KINDS[update.status])
                    return
                left -= update.finish is not None
                tokens = None if asked.logprobs is None else update.tokens
                parts = jobs.parsers[index].add(update.text, update.finish is not None)
                called[index] |= bool(parts.calls)
                if parts or tokens or update.finish is not None:
                    finish = _ended(update.finish, called[index])
                    yield answer.part(Replied(index, parts, tokens, finish, offsets[index]))
                offsets[index] += len(update.text)
            yield answer.end(_usage(jobs, streams))
        finally:
            for task in tasks:
                task.cancel()


def _ended(finish: str | None, called: bool) -> str | None:
    """How a reply ended."""
    return "tool_calls" if called and finish == "stop" else finish


def _usage(jobs: ReplyJobs, streams: list[Stream]) -> Usage:
    """Prompts count once, however many replies they have."""
    if not streams:
        return Usage(0, 0, 0, 0, 0)
    generations = [stream.generation for stream in streams if stream.generation is not None]
    replies = sum(generation.drawn for generation in generations)
    each = max(1, len(streams) // max(1, len(jobs.prompts)))
    kept = sum(generation.kept for generation in generations[::each])
    begun, first = min(stream.begun for stream in streams), min(stream.first for stream in streams)
    return Usage(sum(map(len, jobs.prompts)), replies, kept, first - begun, time.monotonic() - begun)


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def _failed(
    request: Request, status: int, message: str, kind: str, field: str | None = None, code: str | None = None
) -> Response:
    """An error in the form of the interface that was asked."""
    form = ollama_problem if request.url.path.startswith("/api/") else problem
    return _Json(form(message, kind, field, code), status)


def _is_local(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine by an address, or as localhost."""
    name = host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host
    with suppress(ValueError):
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    return name.lower() == "localhost"
