"""A checkpoint by name: a local folder, or a Hub id that is downloaded first."""

from pathlib import Path

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.hub import resolve


def open_by_name(
    checkpoint: str | Path, config: str | Path | None = None, *, needs_config: bool = True, detect_lattice: bool = False
) -> Checkpoint:
    """`open_checkpoint` of a folder or a Hub id. Raises BridgeError as that and `resolve` do."""
    return open_checkpoint(
        resolve(checkpoint, config), config, needs_config=needs_config, detect_lattice=detect_lattice
    )
