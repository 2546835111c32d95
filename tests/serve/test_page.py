"""The chat page in headless Chromium, over the DevTools protocol in a pipe; skipped where there is no Chromium."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.runtime.model import Model
from tests.conftest import PATIENCE
from tests.serve.conftest import Server

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# the browser reads descriptor 3 and writes 4
EXECUTED = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A page in a browser of its own; messages end with a NUL."""

    def __init__(self, url: str, folder: Path, *options: str):
        to_browser, own_end = os.pipe()
        own_start, from_browser = os.pipe()
        command = [
            str(PROGRAM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=900,700", *options,
        ]  # fmt: skip
        ends = [str(to_browser), str(from_browser)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXECUTED, *ends, *command], pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._in, self._out = os.fdopen(own_end, "wb", 0), os.fdopen(own_start, "rb")
        self._number, self._session = 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[Any] = []
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._in.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._read())
            said = answer.get("params", {}).get("entry", {}).get("level") == "error"
            if said or answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> bytes:
        data = bytearray()
        while (byte := self._out.read(1)) != b"\0":
            assert byte, "the browser ended"
            data += byte
        return bytes(data)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        end = time.monotonic() + min(PATIENCE, 120)
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.errors)
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def key(self, name: str, **more: Any) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, **more)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._in.close()
        self._out.close()


@pytest.fixture
def page(running: Server, tmp_path: Path) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip("no Chromium")
    page = Page(f"{running.url}/", tmp_path)
    yield page
    page.close()


TEXTS = "[...document.querySelectorAll('.message')].map(box => box.textContent)"
READY = "document.querySelector('#send')?.textContent === 'Send' && document.querySelectorAll('.message').length"


def test_a_conversation_in_the_page(page: Page, reference: Model) -> None:
    """Two turns, the second with all before it; what a model or a user writes is text, not markup; then a new chat."""
    page.wait("document.readyState === 'complete'")
    page.value("document.querySelector('details').open = true; $('temperature').value = '0'; $('most').value = '12'")
    page.value("$('text').focus()")
    page.type("Speak <b>now</b>.")
    page.key("Enter", windowsVirtualKeyCode=13)
    page.wait(f"{READY} === 2")
    prompt = "user: Speak <b>now</b>.\nassistant: "
    first = "".join(reference.generate(prompt, 12, temperature=0))
    assert page.value(TEXTS) == ["Speak <b>now</b>.", first]
    assert "12 tokens, " in page.value("document.querySelector('#talk').textContent")
    page.type("And then?")
    page.value("$('send').click()")
    page.wait(f"{READY} === 4")
    second = "".join(reference.generate(f"{prompt}{first}\nuser: And then?\nassistant: ", 12, temperature=0))
    assert page.value(TEXTS)[2:] == ["And then?", second]
    page.value("$('clear').click()")
    assert page.value(TEXTS) == []
    assert page.errors == []


def test_a_reply_is_stopped_and_an_error_is_shown(page: Page) -> None:
    page.wait("document.readyState === 'complete'")
    page.value("$('system').value = 'word '.repeat(800); $('text').value = 'x'; $('send').click()")
    page.wait("document.querySelector('.wrong') !== null")
    assert "the context holds 500" in page.value("document.querySelector('.wrong').textContent")
    assert page.value("messages.length") == 0
    page.value("$('system').value = ''; $('text').value = 'Speak.'; $('send').click(); $('send').click()")
    page.wait("$('send').textContent === 'Send'")
    assert page.value("document.querySelectorAll('.wrong').length") == 1
