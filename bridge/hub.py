"""A checkpoint by name: a local folder, or a Hub id that huggingface_hub downloads (with resume) or has cached."""

from __future__ import annotations

import re
from pathlib import Path

from bridge.errors import BridgeError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "README.md"]


def resolve(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint; `org/name` is downloaded where no such folder exists.

    Raises BridgeError for a missing folder, an unknown or gated repository, or no network.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise BridgeError(f"{checkpoint}: is a file; give the folder that holds config.json and the weights")
    name = str(checkpoint)
    if isinstance(checkpoint, Path) or not _HUB_ID.fullmatch(name):
        raise BridgeError(f"{checkpoint}: no such folder, and not a Hub id (org/name)")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        files = HfApi().list_repo_files(name)
        weights = "*.safetensors" if any(f.endswith(".safetensors") for f in files) else "*.bin"
        return Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, weights]))
    except GatedRepoError:
        reason = f"is gated; accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "no such folder here and no such model on the Hub (or it is private: `hf auth login`)"
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, EntryNotFoundError, OSError) as problem:
        cached = _cached(name)
        if cached:
            return cached
        reason = f"no such folder here, and the Hub cannot be reached ({_first_line(problem)}); download it elsewhere"
    except Exception as problem:  # the HTTP client's own errors, whichever client it is
        if not type(problem).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        cached = _cached(name)
        if cached:
            return cached
        reason = f"no such folder here, and the Hub cannot be reached ({_first_line(problem)}); download it elsewhere"
    raise BridgeError(f"{name}: {reason}")


def _cached(name: str) -> Path | None:
    """A snapshot that an earlier run downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:
        return None


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
