"""What `gguf-bridge inspect` prints."""

from pathlib import Path
from typing import Any

from bridge.cli.files.describe import facts_of, lines_of


def describe(path: str | Path, **options: Any) -> str:
    """The lines on a checkpoint or GGUF."""
    return "\n".join(lines_of(facts_of(path, **options)))
