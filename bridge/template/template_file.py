"""The template itself: a GGUF that llama.cpp's converter made, for its metadata and for what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType

from bridge.errors import BridgeError
from bridge.models.spec import ModelSpec
from bridge.models.vocabulary import Tokenizer
from bridge.runtime.header import Metadata
from bridge.runtime.reader import GGUFFile, open_gguf

# written anew for the new file, or true of the template's own layout alone
_NOT_COPIED = {
    "general.architecture", "general.file_type", "general.quantization_version", "general.alignment",
}  # fmt: skip
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "separator", "mask")


class TemplateSpec(ModelSpec):
    """A model whose keys are a template's."""

    metadata: Metadata

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Copy every key as it is but those of the file's own layout."""
        for key in self.metadata:
            if key in _NOT_COPIED or key.startswith("split."):
                continue
            value, (kind, items) = self.metadata[key], self.metadata.kind(key)
            if items is not None and not value:
                continue  # an empty array says nothing, and gguf cannot write one
            sub_type = None if items is None else GGUFValueType(items)
            writer.add_key_value(key, value, GGUFValueType(kind), sub_type)


def open_template(path: Path) -> GGUFFile:
    """The GGUF, all its shards. BridgeError where it is none, is damaged, or is not a model."""
    file = open_gguf(path)
    kind = file.metadata.get("general.type", "model")
    if kind != "model" or "token_embd.weight" not in file:
        what = f"of type {kind!r}" if kind != "model" else "without token_embd.weight"
        raise BridgeError(f"{path}: a GGUF {what} is no template; give the model that llama.cpp's converter made")
    blocks = number(file, "block_count")
    if blocks > len(file.tensors):
        raise BridgeError(f"{path}: has {blocks} blocks and {len(file.tensors)} tensors; make the template again")
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


def read_vocabulary(metadata: Mapping[str, Any]) -> Tokenizer:
    """What a Modelfile needs to know of the template's tokenizer. BridgeError where its tokens are no texts."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise BridgeError("the template's tokenizer.ggml.tokens is no list of texts; make the template again")
    ids = {}
    for role in _ROLES:
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            ids[{"unknown": "unk", "padding": "pad", "separator": "sep"}.get(role, role)] = token
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        str(metadata.get("tokenizer.ggml.model", "")),
        str(metadata.get("tokenizer.ggml.pre", "")),
        tokens,
        [],
        ids=ids,
        stop_ids=list(dict.fromkeys(ids[role] for role in ("eos", "eot", "eom") if role in ids)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_templates={"default": template} if isinstance(template, str) else {},
    )
