"""What a damaged or unreadable checkpoint is refused with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError


def refusal(folder: Path) -> str:
    """The message that opening and reading everything ends in."""

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
