"""Where the tests find real input: checkpoints, models and texts that are not part of the project.

BRIDGE_SHARED names the folder that holds them (`checkpoints/`, `models/`, `text/`); by default it is
`shared` beside the checkout. A test that wants what is not there skips and says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("BRIDGE_SHARED", ROOT.parent / "shared"))


def shared(relative: str) -> Path:
    """A path under the shared folder; skips the test where it does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{relative} is not in {SHARED}: set BRIDGE_SHARED to the folder that has it")
    return path


def checkpoint_names() -> list[str]:
    """The shared checkpoints there are, for parametrizing; one that skips where there are none."""
    return sorted(p.name for p in (SHARED / "checkpoints").glob("*/")) or ["none-found"]


@pytest.fixture(scope="session")
def wiki_text() -> str:
    """The text that fidelity is measured on."""
    return shared("text/wiki_test.txt").read_text(encoding="utf-8")
