"""The template's file: opening it, and copying its metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError
from bridge.gguf_file.header import Metadata
from bridge.models.tokenizer.vocabulary import special_text
from bridge.runtime.reader import GGUFFile, open_gguf

# written anew for the new file, or specific to the template's layout
_NOT_COPIED = {
    "general.architecture", "general.file_type", "general.quantization_version", "general.alignment",
}  # fmt: skip
# ids of tokens that end a reply
_ENDS = (gguf.Keys.Tokenizer.EOS_ID, gguf.Keys.Tokenizer.EOT_ID, gguf.Keys.Tokenizer.EOM_ID)


def open_template(path: Path) -> GGUFFile:
    """Open the GGUF, all its shards. BridgeError if it is damaged or not a model."""
    file = open_gguf(path)
    kind = file.metadata.get("general.type", "model")
    if kind != "model" or "token_embd.weight" not in file:
        what = f"of type {kind!r}" if kind != "model" else "without token_embd.weight"
        raise BridgeError(f"{path}: a GGUF {what} is not a template; give the model that llama.cpp's converter made")
    blocks = number(file, "block_count")
    if blocks > len(file):
        raise BridgeError(f"{path}: has {blocks} blocks and {len(file)} tensors; make the template again")
    return file


def number(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A count of the architecture's, the largest if layers differ. BridgeError if it is missing."""
    value: Any = file.metadata.get(f"{file.arch}.{key}")
    if isinstance(value, list) and value and all(isinstance(n, int) for n in value):
        value = max(value)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BridgeError(f"{file.path}: {file.arch}.{key} is {value!r}, must be a number; make the template again")
    return value


def copied_metadata(stored: Metadata) -> dict[str, GGUFValue]:
    """All keys except those of the file's layout. BridgeError if the tokens are not texts."""
    expect_texts(stored.get(gguf.Keys.Tokenizer.LIST, []))
    metadata = {gguf.Keys.General.ARCHITECTURE: GGUFValue(stored[gguf.Keys.General.ARCHITECTURE], GGUFValueType.STRING)}
    for key, value in stored.items():
        kind, items = stored.kind(key)
        if key in _NOT_COPIED or key.startswith("split.") or (items is not None and not value):
            continue  # gguf cannot write an empty array
        metadata[key] = GGUFValue(value, GGUFValueType(kind), None if items is None else GGUFValueType(items))
    return metadata


def expect_texts(tokens: Any) -> None:
    """BridgeError unless a template's tokens are texts."""
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise BridgeError("the template's tokenizer.ggml.tokens is not a list of texts; make the template again")


def stop_texts(metadata: Mapping[str, GGUFValue]) -> list[str]:
    """The texts of the tokens that end a reply, the EOS token first."""
    texts = (special_text(metadata, key) for key in _ENDS)
    return list(dict.fromkeys(text for text in texts if text))
