"""Headless Chromium over the DevTools protocol in a pipe, and a server of the chat page whose replies are scripts."""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bridge.serve import app
from tests.conftest import PATIENCE

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# the browser reads descriptor 3 and writes 4
EXECUTED = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

# of keys: the code of Windows, and the text they write
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " "), "End": (35, ""), "Backspace": (8, "")}
SHIFT = 8


class Browser:
    """A browser of its own; messages end with a NUL."""

    def __init__(self, folder: Path):
        to_browser, own_end = os.pipe()
        own_start, from_browser = os.pipe()
        command = [
            str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={folder}",
        ]  # fmt: skip
        ends = [str(to_browser), str(from_browser)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXECUTED, *ends, *command], pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._in, self._out = os.fdopen(own_end, "wb", 0), os.fdopen(own_start, "rb")
        self._number = 0
        self.errors: dict[str, list[Any]] = {}  # of sessions

    def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._in.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            entry = answer.get("params", {}).get("entry", {})
            # a response's status is no error of the page
            said = entry.get("level") == "error" and entry.get("source") != "network"
            if said or answer.get("method") == "Runtime.exceptionThrown":
                self.errors[answer["sessionId"]].append(answer["params"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> bytes:
        data = bytearray()
        while (byte := self._out.read(1)) != b"\0":
            assert byte, "the browser ended"
            data += byte
        return bytes(data)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()


class Page:
    """A page with a storage of its own, in a window of this width."""

    def __init__(
        self, browser: Browser, url: str, width: int = 1280, scheme: str = "light", before: str = "", context: str = ""
    ):
        self.browser = browser
        self.context = context or browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors = browser.errors[self._session] = []
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Page.addScriptToEvaluateOnNewDocument", source=before)
        self.open(url)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def reload(self) -> None:
        self.value("globalThis.isOld = true")
        self.call("Page.reload")
        self.wait("typeof isOld === 'undefined' && document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> Any:
        return self.browser.call(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """What an expression, or its promise, gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        self.wait_for(lambda: self.value(f"Boolean({expression})"), expression)

    def wait_for(self, condition: Callable[[], Any], name: str = "") -> None:
        end = time.monotonic() + min(PATIENCE, 120)
        while not condition():
            assert time.monotonic() < end, (name, self.errors)
            time.sleep(0.02)

    def window(self, url: str) -> Page:
        """Another window of the same browser, with the same storage; it ends with this page."""
        return Page(self.browser, url, context=self.context)

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, name: str, modifiers: int = 0) -> None:
        code, text = KEYS[name]
        about = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def tab_to(self, expression: str) -> None:
        """Press Tab until an expression of the focused element `it` is true."""
        for _ in range(60):
            self.key("Tab")
            if self.value(f"(it => {expression})(document.activeElement)"):
                return
        raise AssertionError(f"Tab does not reach {expression}")

    def send(self, text: str) -> None:
        """Write and send a message."""
        self.value("document.querySelector('#text').focus()")
        self.type(text)
        self.key("Enter")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)


class Lost:
    """In a script: the connection is closed here."""


class ScriptedServer:
    """Serves the page; each request for a reply takes the next script.

    A script is a status and a message, or a list: a text or a delta is sent, an event is waited for, Lost closes the
    connection, and a dictionary with "error" is sent as it is. At the end come the number of tokens, and the end.
    """

    def __init__(self, name: str = "small <model>", props: dict[str, Any] | None = None):
        self.scripts: queue.Queue[Any] = queue.Queue()
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.props = props
        html = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")
        page = html.replace("MODEL_NAME", name.replace("<", "&lt;").replace(">", "&gt;")).encode()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Security-Policy", app._PAGE_POLICY)
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.path == "/":
                    self.answer(200, "text/html; charset=utf-8", page)
                elif self.path == "/props" and owner.props is not None:
                    self.answer(200, "application/json", json.dumps(owner.props).encode())
                else:
                    self.answer(404, "application/json", b"{}")

            def do_POST(self) -> None:
                owner.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                owner.authorizations.append(self.headers["Authorization"])
                script = owner.scripts.get(timeout=PATIENCE)
                if isinstance(script, tuple):
                    self.answer(script[0], "application/json", json.dumps({"error": {"message": script[1]}}).encode())
                    return
                self.answer(200, "text/event-stream", b"")
                with suppress(OSError):  # the page went
                    self.stream(script)

            def stream(self, script: list[Any]) -> None:
                finish, count = "stop", 0
                self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
                for step in script:
                    if isinstance(step, threading.Event):
                        assert step.wait(PATIENCE)
                    elif step is Lost:
                        return
                    elif isinstance(step, dict) and ("error" in step or "finish_reason" in step):
                        finish = step.get("finish_reason", finish)
                        if "error" in step:
                            self.event(step)
                            return
                    else:
                        delta = {"content": step} if isinstance(step, str) else step
                        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                        count += 1
                self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
                self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, data: dict[str, Any]) -> None:
                self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def replies(self, *script: Any) -> None:
        self.scripts.put(list(script))

    def refuses(self, status: int, message: str) -> None:
        self.scripts.put((status, message))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
