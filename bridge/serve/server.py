"""The socket, uvicorn around the application, and how they end.

At SIGTERM or Ctrl-C no further request is taken, and replies that are being made may go on for `grace` seconds; then,
or at the second signal, those that are left end with an error that says so, and a second later all connections.

A client that does not send the headers of a request, or does not take what is sent to it, has a limit of time, and
connections have one of number: the one that has waited longest for a request gives way to a new one.
"""

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridge.errors import BridgeError, parameter, spelled
from bridge.gguf_file.chat_template import keep_renderer
from bridge.runtime.model import Model
from bridge.serve.app import Limits, make_app
from bridge.serve.engine import Engine
from bridge.serve.response_json import problem, to_json
from bridge.system.text import tell

_HEADER_SECONDS = 10  # within which a client must have sent the headers of a request
_UNREAD_SECONDS = 60  # for which a client may take nothing of what is sent to it
_LAST_SECONDS = 1  # between the end of the replies and that of the connections
_BACKLOG = 64  # connections that the system accepts ahead
_OTHERS = 128  # connections besides those of replies: idle ones, /health ...
_OTHER_FILES = 128  # descriptors for anything but connections
_IN_REQUESTS = {"schema": "response_format", "regex": "response_format", "template_options": "chat_template_kwargs"}


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; BridgeError where it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; accepted sockets inherit it
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, OverflowError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise BridgeError(f"{host}, {parameter('port', port)}: cannot listen there: {why}") from problem
    return listening


def serve(model: Model, listening: socket.socket, limits: Limits, grace: float) -> None:
    """Answer requests until a signal comes; `grace` as above."""
    engine = Engine(model, limits.sequences, limits.waiting, limits.draft)
    if model.chat_template is not None:
        keep_renderer()
    config = uvicorn.Config(
        make_app(model, limits, engine), http=_Connection, ws="none", lifespan="on", backlog=_BACKLOG,
        log_level="error", access_log=False, server_header=False,  # no line for what any client may send
        limit_concurrency=_most_connections(engine.most + _OTHERS) + 1, timeout_graceful_shutdown=int(grace) + 5,
        h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip
    server = _Server(config, engine, grace)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    trained = f" of {model.config.context}, see --context" if model.context < model.config.context else ""
    context = f"context {model.context}{trained}"
    tell(f"{model.name}: http://{shown}:{port}, for OpenAI's clients http://{shown}:{port}/v1; {context}; Ctrl-C ends")
    with spelled(_in_requests):
        server.run(sockets=[listening])
    if engine.computing:  # a step or a request that takes long: what it computes is nobody's any more
        tell("stopped")
        os._exit(0)


def _in_requests(name: str, value: object) -> str:
    """A parameter as requests have it."""
    named = _IN_REQUESTS.get(name, name)
    return named if value is None else f"{named} {value!r}"


def _most_connections(wanted: int) -> int:
    """So many, or what the system's limit of descriptors leaves, which is raised if it may be."""
    try:
        import resource
    except ImportError:  # Windows has none
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _BACKLOG + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        wanted = min(wanted, max(8, soft - _BACKLOG - _OTHER_FILES))
    return wanted


class _Connection(H11Protocol):
    """uvicorn's, with the limits that are its client's."""

    _late: asyncio.TimerHandle | None = None  # ends it where the headers do not come
    _waits_since = 0.0

    @property
    def _waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._watch()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            waiting = [c for c in self.connections if isinstance(c, _Connection) and c._waits]
            first = min(waiting, key=lambda connection: connection._waits_since)
            self.connections.discard(first)
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with JSON; after a response to an earlier one, only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json(problem(msg, "invalid_request_error"))
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            response = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """Also end what waits for the rest of a request, which would be refused."""
        super().shutdown()
        if not self._waits and self.cycle.more_body:
            self.transport.close()

    def _watch(self) -> None:
        if not self._waits or self.transport.is_closing():
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float):
        super().__init__(config)
        self._engine, self._grace = engine, grace

    def handle_exit(self, sig: int, frame: Any) -> None:
        """At the first signal replies may go on, at the second they end."""
        again = self.should_exit
        self.should_exit = self._engine.stopping = True
        loop = self._engine.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._end_within, 0.0 if again else self._grace)

    def _end_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._engine.end_all)
        loop.call_later(seconds + _LAST_SECONDS, self._end_connections)

    def _end_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
