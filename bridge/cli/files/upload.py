"""--upload and what belongs to it, of every command that makes a model."""

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.options import as_flag, further
from bridge.errors import BridgeError
from bridge.system.storage.files import expanded
from bridge.system.storage.outputs import ProtectedPaths


def add_upload(p: argparse.ArgumentParser) -> None:
    """The options of `Uploading`."""
    p.add_argument(
        "--upload", metavar="ORG/NAME", help="put the result on the Hugging Face Hub, with a model card; needs a login"
    )
    hub = further(p, "upload")
    hub.add_argument("--private", action="store_true", help="with --upload: make the repository private")
    hub.add_argument(
        "--card-only", metavar="DIR", type=Path,
        help="with --upload: write the model card and the list of files to this folder instead of uploading",
    )  # fmt: skip


class Uploading:
    """What the options ask for, checked before the work begins; `finish` uploads."""

    def __init__(self, a: argparse.Namespace, source: str | Path | None, out: str | Path | None = None) -> None:
        self._hub = None
        if a.upload is None:
            for name in ("private", "card_only"):
                if getattr(a, name):
                    raise BridgeError(f"{as_flag(name)} is for uploads: give --upload org/name")
            return
        if getattr(a, "shard", None) is not None:
            raise BridgeError("--upload is for whole models; upload all shards when they are written: `hf upload`")
        from bridge.checkpoint.files.hub import kind_of
        from bridge.conversion.publish.upload import Upload

        here = source is not None and kind_of(source) == "checkpoint"
        folders = [expanded(source)] if here and source is not None else []
        self._hub = Upload(a.upload, a.private, a.card_only, getattr(a, "force", False))
        self._hub.check(ProtectedPaths(folders=tuple(folders + ([expanded(out)] if out is not None else []))))

    def finish(self, result: Any) -> None:
        """Upload a command's result, and say where it is."""
        if self._hub is not None:
            print(self._hub.send(result))
