"""What tests of the command line share: its tables and errors read, its process started, checkpoints edited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf

from tests.conftest import ROOT

KINDS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
GATE = "model.layers.2.mlp.gate_proj"
OLD = b"what was there before"


def rows(table: str) -> dict[str, list[str]]:
    """The closing table's cells by the kind of tensor: count, type, bpw, codes kept, NMSE, share of noise."""
    cells = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        for kind in ("token_embd", "output", "all that came as codes", "norms, biases and other floats", *KINDS):
            if line.startswith(f"{kind} "):
                cells[kind] = line.removeprefix(kind).split()
    return cells


def types(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def one_line(error: str) -> str:
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
    file.write_text(json.dumps(values))


def bridge_process(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Python that runs `code`, which may call `run()`: the command line with these arguments."""
    start = (
        "import contextlib, signal, sys, time\n"
        "with contextlib.suppress(ImportError): import resource\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it\n"
        "from bridge.cli import main\n"
        "run = lambda: sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
