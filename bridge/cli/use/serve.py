"""`gguf-bridge serve`: a model behind OpenAI's and Ollama's HTTP interfaces, and a page to chat with it."""

import argparse
import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from bridge.cli.options import Once, add_options, command, further, given
from bridge.cli.use.run import add_loading, draft_of, gguf_of, load, take_checkpoints
from bridge.errors import BridgeError, BridgeWarning
from bridge.runtime.replies.pooling import POOLINGS
from bridge.runtime.sampling import NUMBERS, Sampling
from bridge.system.devices import cpu_note
from bridge.system.options import check_integer
from bridge.system.progress import say
from bridge.system.status_line import LINE
from bridge.system.text import tell

_KEY = "GGUF_BRIDGE_API_KEY"
_ALONE = "several sequences at once only run on the CPU"


def add_parser(commands: Any) -> None:
    p = command(commands, "serve", run)
    take_checkpoints(p)
    p.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                   help="address to listen on; 0.0.0.0: all of this machine (default: 127.0.0.1)")  # fmt: skip
    p.add_argument("--port", type=int, default=8080, metavar="N", help="port; 0: one that is free (default: 8080)")
    p.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: the environment variable {_KEY})",
    )  # fmt: skip
    p.add_argument(
        "--sequences", type=int, default=8, metavar="N",
        help="number of replies that are made at the same time, at most 8; each has a context (default: 8)",
    )  # fmt: skip
    add_loading(p)
    more = further(p)
    more.add_argument(
        "--waiting", type=int, default=64, metavar="N",
        help="number of further replies that may wait; more are refused (default: 64)",
    )  # fmt: skip
    more.add_argument("--body", type=int, default=4, metavar="MB", help="largest request, in megabytes (default: 4)")
    more.add_argument(
        "--grace", type=int, default=30, metavar="SECONDS",
        help="time that replies may take to end after a signal to stop (default: 30)",
    )  # fmt: skip
    more.add_argument(
        "--pooling", choices=POOLINGS,
        help="what the vectors of /v1/embeddings are made of: the mean of all tokens, the first (cls) or the last "
        "(default: as the file says, else the mean)",
    )  # fmt: skip
    more.add_argument(
        "--draft", metavar="ngram|mtp|FILE.gguf",
        help="what guesses tokens, while 4 replies or fewer are made at once: ngram (what followed the last tokens "
        "before), mtp (the file's own layer for that), or a drafter made for the model (EAGLE-3, DFlash, Gemma 4's "
        "assistant)",
    )  # fmt: skip
    more.add_argument("--lora", action=Once, type=Path, metavar="ADAPTER.gguf", help="adapter that convert-lora wrote")
    add_options(p, "sampling, where a request does not say", Sampling, [*NUMBERS])


def run(a: argparse.Namespace) -> int:
    check_integer("port", a.port, 0, 65535)
    check_integer("sequences", a.sequences, 1, 8)
    check_integer("waiting", a.waiting, 0, 100_000)
    check_integer("body", a.body, 1, 1024)
    check_integer("grace", a.grace, 0, 86_400)
    with suppress(RuntimeError):  # there is none
        asyncio.get_running_loop()
        raise BridgeError("serve answers until it is stopped, which a notebook's cell cannot; run it in a terminal")
    sampling = given(a, Sampling)
    Sampling(**sampling)
    if a.device == "auto":
        a.device = "cpu"
        tell(cpu_note(_ALONE))
    elif a.device.startswith("cuda"):
        raise BridgeError(f"device {a.device}: {_ALONE}; choose cpu")
    try:
        from bridge.serve.app import Limits
        from bridge.serve.server import bound, serve
    except ImportError as problem:
        raise BridgeError(f"serve needs starlette and uvicorn (no {problem.name}): pip install starlette uvicorn "
                          "llguidance, the extra `serve`") from problem  # fmt: skip
    key = a.api_key or os.environ.get(_KEY) or None
    local = a.host in ("127.0.0.1", "localhost", "::1")
    if not local and key is None:
        import warnings

        warnings.warn(f"--host {a.host}: whoever reaches this machine can use the model; --api-key asks for a key",
                      BridgeWarning, stacklevel=1)  # fmt: skip
    with bound(a.host, a.port) as listening, load(a, gguf_of(a), a.context, a.lora) as model:
        for name in sampling if a.draft is None else ("draft", *sampling):
            model.check_continues(name)
        say("preparing the weights")
        model.prepare()
        limits = Limits(a.sequences, a.waiting, a.body << 20, key, local, a.pooling, sampling, draft_of(a.draft))
        LINE.hide()
        serve(model, listening, limits, a.grace)
    tell("stopped")
    return 0
