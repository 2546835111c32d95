"""The template itself: a GGUF that llama.cpp's converter made, for its metadata and for what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.errors import BridgeError
from bridge.models.vocabulary import special_text
from bridge.runtime.reader import GGUFFile, open_gguf

# written anew for the new file, or true of the template's own layout alone
_NOT_COPIED = {
    "general.architecture", "general.file_type", "general.quantization_version", "general.alignment",
}  # fmt: skip
# texts that end a reply
_ENDS = (gguf.Keys.Tokenizer.EOS_ID, gguf.Keys.Tokenizer.EOT_ID, gguf.Keys.Tokenizer.EOM_ID)


def open_template(path: Path) -> GGUFFile:
    """The GGUF, all its shards. BridgeError where it is none, is damaged, or is not a model."""
    file = open_gguf(path)
    kind = file.metadata.get("general.type", "model")
    if kind != "model" or "token_embd.weight" not in file:
        what = f"of type {kind!r}" if kind != "model" else "without token_embd.weight"
        raise BridgeError(f"{path}: a GGUF {what} is no template; give the model that llama.cpp's converter made")
    blocks = number(file, "block_count")
    if blocks > len(file):
        raise BridgeError(f"{path}: has {blocks} blocks and {len(file)} tensors; make the template again")
    return file


def number(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A count of the architecture's; the largest where layers differ. BridgeError where it is missing."""
    value: Any = file.metadata.get(f"{file.arch}.{key}")
    if isinstance(value, list) and value and all(isinstance(n, int) for n in value):
        value = max(value)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BridgeError(f"{file.path}: {file.arch}.{key} is {value!r}, a number is expected; make the template again")
    return value


def copied_metadata(file: GGUFFile) -> dict[str, GGUFValue]:
    """Every key as it is but those of the file's own layout. BridgeError where the tokens are no texts."""
    expect_texts(file.metadata.get(gguf.Keys.Tokenizer.LIST, []))
    metadata = {gguf.Keys.General.ARCHITECTURE: GGUFValue(file.arch, GGUFValueType.STRING)}
    for key, value in file.metadata.items():
        kind, items = file.metadata.kind(key)
        if key in _NOT_COPIED or key.startswith("split.") or (items is not None and not value):
            continue  # an empty array says nothing, and gguf cannot write one
        metadata[key] = GGUFValue(value, GGUFValueType(kind), None if items is None else GGUFValueType(items))
    return metadata


def expect_texts(tokens: Any) -> None:
    """BridgeError where a template's tokens are none."""
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise BridgeError("the template's tokenizer.ggml.tokens is no list of texts; make the template again")


def stop_texts(metadata: Mapping[str, GGUFValue]) -> list[str]:
    """The texts of the tokens that end a reply, the EOS token first."""
    texts = (special_text(metadata, key) for key in _ENDS)
    return list(dict.fromkeys(text for text in texts if text))
