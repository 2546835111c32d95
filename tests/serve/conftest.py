"""A small model with a chat template behind the server: in process, and in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

import bridge
from bridge.runtime.model import Model
from bridge.serve.app import Limits, make_app
from bridge.serve.engine import Engine
from tests.conftest import CHECKPOINT, PATIENCE, ROOT
from tests.runtime.test_model import changed

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    bridge.convert(CHECKPOINT, folder / "plain.gguf")
    return changed(folder / "plain.gguf", folder / "small.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def model(path: Path) -> Model:
    return bridge.Model.load(path, context=500).prepare()


@pytest.fixture(scope="session")
def reference(path: Path) -> Model:
    """The same model, for what it says outside of the server."""
    return bridge.Model.load(path, context=500).prepare()


@contextmanager
def client_of(model: Model, **limits: Any) -> Iterator[TestClient]:
    """A client in process of a server with these limits."""
    given = Limits(**limits)
    app = make_app(model, given, Engine(model, given.sequences, given.waiting))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="session")
def client(model: Model) -> Iterator[TestClient]:
    with client_of(model) as client:
        yield client


class Server:
    """`gguf-bridge serve` in a process of its own, which executes `before` first."""

    def __init__(self, path: Path, *options: str, before: str = "pass"):
        code = f"import sys; from bridge.cli import main; {before}; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "serve", str(path), "--port", "0", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        assert self.process.stderr is not None
        self.said = ""
        for line in self.process.stderr:
            self.said += line
            if found := re.search(r"http://(\S+?):(\d+),", line):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            raise AssertionError(self.said)
        self.url = f"http://{self.host}:{self.port}"
        timer.cancel()

    def stop(self, sign: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what it said."""
        self.process.send_signal(sign)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, self.said + said


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., Server]]:
    """start(*options, before="code"): a server, which is killed at the end."""
    servers: list[Server] = []

    def started(*options: str, before: str = "pass") -> Server:
        servers.append(Server(path, *options, before=before))
        return servers[-1]

    yield started
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="session")
def running(path: Path) -> Iterator[Server]:
    """One server for tests that leave it running."""
    server = Server(path, "--context", "500")
    yield server
    code, said = server.stop()
    assert code == (0 if os.name == "posix" else 1)  # Windows ends a process without asking it
    assert "Traceback" not in said
