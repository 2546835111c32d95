"""The socket, uvicorn around the application, and how they end.

At SIGTERM or Ctrl-C no further request is taken, and replies that are being made may go on for `grace` seconds; then,
or at the second signal, those that are left end with an error that says so.
"""

import asyncio
import socket
from typing import Any

import uvicorn

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.chat_template import keep_renderer
from bridge.runtime.model import Model
from bridge.serve.app import Limits, make_app
from bridge.serve.engine import Engine
from bridge.system.text import tell


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; BridgeError where it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(128)
        except OSError:
            made.close()
            raise
    except (OSError, OverflowError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise BridgeError(f"{host}, {parameter('port', port)}: cannot listen there: {why}") from problem
    return made


def serve(model: Model, listening: socket.socket, limits: Limits, grace: float) -> None:
    """Answer requests until a signal comes; `grace` as above."""
    engine = Engine(model, limits.sequences, limits.waiting, limits.draft)
    if model.chat_template is not None:
        keep_renderer()
    config = uvicorn.Config(
        make_app(model, limits, engine),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace) + 5,
        h11_max_incomplete_event_size=1 << 16,
        lifespan="on",
    )
    server = _Server(config, engine, grace)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    tell(f"{model.name}: http://{shown}:{port}, for OpenAI's clients http://{shown}:{port}/v1; Ctrl-C ends")
    server.run(sockets=[listening])


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
        asyncio.get_running_loop().call_later(seconds, self._engine.end_all)
