"""The error message for a damaged or unreadable checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError


def refusal(folder: Path) -> str:
    """The error message from opening the folder and reading all of it."""

    def read_all() -> None:
        with open_checkpoint(folder) as checkpoint:
            for name in checkpoint.modules:
                checkpoint.read_module(name)
            for name in checkpoint.tensors:
                checkpoint.read_float(name)

    with pytest.raises(BridgeError) as caught:
        read_all()
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message or "?" in message  # a way out follows the fact
    return message
