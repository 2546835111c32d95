"""The server over real sockets: OpenAI's client, many at once, clients that are killed, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from bridge.runtime.model import Model
from bridge.serve.server import bound
from tests.conftest import PATIENCE, posix
from tests.serve.conftest import Server

Start = Callable[..., Server]
SAY: list[Any] = [{"role": "user", "content": "Speak."}]
SPOKEN = "user: Speak.\nassistant: "


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"gguf_bridge_{name} "))


def idle(server: Server) -> bool:
    """Whether all sequences end within the tests' patience."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if metric(server, "sequences_open") == metric(server, "sequences_running") == 0:
            return True
        time.sleep(0.02)
    return False


def test_openais_client_gets_what_the_model_says(running: Server, reference: Model) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=PATIENCE)
    (model,) = client.models.list().data
    own = "".join(reference.generate(SPOKEN, 12, temperature=0))
    asked: dict[str, Any] = {"model": model.id, "messages": SAY, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == own
    assert len(whole.choices[0].logprobs.content) == 12
    streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == own
    assert chunks[-1].usage.completion_tokens == 12
    text = client.completions.create(model=model.id, prompt="KING", max_tokens=5, temperature=0, logprobs=1)
    assert text.choices[0].text == "".join(reference.generate("KING", 5, temperature=0))
    vectors = client.embeddings.create(model=model.id, input=["one", "two"])
    assert abs(sum(a * b for a, b in zip(vectors.data[1].embedding, reference.embed("two")[0], strict=True)) - 1) < 1e-4
    with pytest.raises(openai.BadRequestError, match=r"temperature -1\.0: must be at least 0") as refused:
        client.chat.completions.create(**{**asked, "temperature": -1.0})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="this server has 'small'"):
        client.models.retrieve("gpt")
    assert client.chat.completions.create(**{**asked, "model": "gpt"}).choices[0].message.content == own
    assert client.chat.completions.create(**asked, extra_body={"top_k": 1}).choices[0].message.content == own


def test_32_clients_at_once_get_their_own_replies(running: Server, reference: Model) -> None:
    """Streamed and whole, of different prompts: no error, none starved, nothing left behind."""
    prompts = [f"{name} {i}:" for i, name in enumerate(["KING", "GREMIO", "ROMEO", "The city"] * 8)]
    own = reference.generate_batch(prompts, 15, temperature=0)
    ends: list[float] = []

    def ask(index: int) -> str:
        body = {"prompt": prompts[index], "max_tokens": 15, "temperature": 0, "stream": index % 2 == 0}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = list(answer.iter_lines())
        ends.append(time.monotonic())
        assert answer.status_code == 200, lines
        if not body["stream"]:
            return json.loads(lines[0])["choices"][0]["text"]
        assert lines[-2:] == ["data: [DONE]", ""]
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines if line[:7] == "data: {")

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(ask, range(32)))
    assert found == own
    assert idle(running)


def test_clients_that_are_killed_give_their_places_back(running: Server) -> None:
    """In a stream, while waiting for a whole reply, and with half a request sent."""
    cancelled = metric(running, "cancelled_total")
    body = {"messages": SAY, "max_tokens": 450, "stream": True, "logit_bias": {"0": -100}, "temperature": 0}
    code = (
        "import httpx, sys\n"
        f"with httpx.stream('POST', {running.url!r} + '/v1/chat/completions', json={body!r}, timeout=600) as answer:\n"
        "    for line in answer.iter_lines():\n"
        "        print(line, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    whole = json.dumps({**body, "stream": False}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(whole)}\r\n\r\n"  # noqa: E501
    for sent in (whole, whole[:20]):
        with socket.create_connection((running.host, running.port)) as made:
            made.sendall(head.encode() + sent)
            time.sleep(0.05)
    assert idle(running)
    assert metric(running, "cancelled_total") >= cancelled
    assert httpx.post(
        f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=PATIENCE
    ).is_success


@posix
@pytest.mark.parametrize(
    ("sign", "grace", "ends"),
    [
        (signal.SIGTERM, "300", "finish"),
        pytest.param(signal.SIGINT, "0", "an error that says so", marks=pytest.mark.exhaustive),
    ],
)
def test_a_reply_under_way_finishes_or_says_why_not(sign: int, grace: str, ends: str, start: Start) -> None:
    """The server is one for other machines, which warns that it has no key."""
    server = start("--grace", grace, "--context", "1000", "--host", "0.0.0.0")
    assert "whoever reaches this machine can use the model; --api-key asks for a key" in server.said
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": "other.example"}).is_success
    body = {"prompt": "KING", "max_tokens": 900, "logit_bias": {"0": -100}, "stream": True, "temperature": 0}
    whole: list[httpx.Response] = []
    other = threading.Thread(
        target=lambda: whole.append(
            httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, timeout=PATIENCE)
        )
    )
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        other.start()
        while metric(server, "sequences_open") < 2:
            pass
        server.process.send_signal(sign)
        rest = [line for line in lines if line]
    other.join()
    code, said = server.ended()
    assert code == 0
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
    assert first.startswith("data: {")
    if ends == "finish":
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert whole[0].json()["usage"]["completion_tokens"] == 900
    else:
        message = "the server was stopped before the reply was complete"
        assert json.loads(rest[-1][6:])["error"]["message"] == message
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["message"] == message


def test_a_command_line_that_makes_no_sense_is_refused(path: Any, running: Server, capfd: Any) -> None:
    from bridge.cli import main

    for options, message in (
        (["--port", str(running.port)], "cannot listen there: Address already in use"),
        (["--port", "70000"], "--port 70000: must be between 0 and 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen there"),
        (["--sequences", "9"], "--sequences 9: must be between 1 and 8"),
        (["--temp", "-1"], "--temp -1.0: must be at least 0"),
        (["--device", "cuda"], "device cuda: several sequences at once only run on the CPU; choose cpu"),
        (["--device", "auto", "--port", str(running.port)], "running on the CPU: several sequences at once"),
    ):
        assert main(["serve", str(path), *options]) == 2
        assert message in capfd.readouterr().err


def sent(server: Server, data: bytes) -> socket.socket:
    """A connection on which these bytes were sent."""
    made = socket.create_connection((server.host, server.port), timeout=PATIENCE)
    made.sendall(data)
    return made


def whole_answer(connection: socket.socket) -> bytes:
    """An error, up to the end of its JSON."""
    answer = b""
    while not answer.endswith(b"}}") and (part := connection.recv(1 << 16)):
        answer += part
    return answer


HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ELSEWHERE = HEADERS.replace(b"json", b"text") + b"Origin: http://elsewhere.example\r\n"  # a page's


@posix
def test_clients_that_send_no_request_and_read_no_answer_have_limits(start: Start) -> None:
    """Of at most 6 connections (4 replies, 2 others), the oldest without a request gives way, and all have a second."""
    server = start("--sequences", "2", "--waiting", "2", "--grace", "300", before=(
        "from bridge.serve import server; server._HEADER_SECONDS = 1; server._OTHERS = 2"
    ))  # fmt: skip
    slow = []
    for _ in range(10):
        slow += [sent(server, HEADERS + b"X-a: ") for _ in range(4)]
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).json() == {"status": "ok"}
    refused = sent(server, ELSEWHERE + b"Content-Length: 1000\r\n\r\n{")  # answered at once
    assert whole_answer(refused).startswith(b"HTTP/1.1 415 ")
    begun = time.monotonic()
    for connection in (*slow, refused):
        with suppress(OSError):  # its end may have been seen by now
            while time.monotonic() < begun + PATIENCE:
                connection.sendall(b"a")  # never silent, and never a request
                time.sleep(0.01)
    assert time.monotonic() < begun + PATIENCE
    late = sent(server, HEADERS + b"Content-Length: 1000\r\n\r\n{")
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).is_success  # and that one is being read
    code, said = server.stop()
    assert late.recv(1) == b""
    assert (code, said.splitlines()[1:]) == (0, ["stopped"])
    assert time.monotonic() < begun + PATIENCE


@posix
def test_the_end_waits_for_no_work_that_nobody_wants(start: Start) -> None:
    server = start("--grace", "0", before=(
        "import time; from bridge.serve import app; app.reply_jobs = lambda *_: time.sleep(100_000)"
    ))  # fmt: skip
    connections = [sent(server, HEADERS + b'Content-Length: 14\r\n\r\n{"prompt":"a"}') for _ in range(8)]
    for connection in connections[:4]:
        connection.close()
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).is_success
    code, said = server.stop()
    assert (code, said.splitlines()[1:]) == (0, ["stopped"])


def test_what_is_no_http_is_answered_with_json(running: Server) -> None:
    for data in (b"GET /health\r\n\r\n", HEADERS + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"):
        with sent(running, data) as connection:
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    refused = ELSEWHERE + b"Transfer-Encoding: chunked\r\n\r\n"
    with sent(running, refused) as connection:
        assert whole_answer(connection).startswith(b"HTTP/1.1 415 ")
        connection.sendall(b"ZZ\r\n")
        assert connection.recv(1) == b""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has the option")
def test_the_system_ends_connections_whose_client_takes_nothing() -> None:
    with bound("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
