"""Opens a drafter's file for a model."""

from pathlib import Path
from typing import Any, Protocol

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.architectures import ASSISTANT, BLOCK, DRAFTERS, EAGLE
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.drafters.assistant import Assistant
from bridge.runtime.drafters.dflash import DFlash
from bridge.runtime.drafters.draft_file import DraftFile
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.drafters.eagle3 import Eagle3
from bridge.runtime.reader import open_gguf
from bridge.runtime.tokenizer import Tokenizer


class Head(Protocol):
    """A drafter's layers, which several texts may use."""

    def drafter(self) -> Drafter:
        """What guesses for one text at a time."""


_KINDS: dict[str, type[Any]] = {EAGLE: Eagle3, ASSISTANT: Assistant, BLOCK: DFlash}


def open_drafter(path: str | Path, target: Any, tokenizer: Tokenizer) -> Head:
    """The layers of a drafter's file, for the decoder of the model that it guesses for, and its tokenizer.

    Raises BridgeError for a file that is no drafter, or one of another model, and for a model on another device.
    """
    if not isinstance(target, Decoder):
        raise BridgeError(f"{parameter('draft', path)}: guesses on the CPU alone, but the model is on {target.device}")
    file = open_gguf(path)
    if file.arch not in DRAFTERS:
        raise BridgeError(
            f"{path}: is a {file.arch} model, no drafter; a model guesses in `run`, or once it is loaded in `generate`"
        )
    head: Head = _KINDS[DRAFTERS[file.arch].kind](DraftFile(file, target, tokenizer))
    return head
