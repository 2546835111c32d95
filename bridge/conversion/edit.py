"""Edits a GGUF's metadata and names; the tensors' data stays as it is.

    bridge.edit("model.gguf", metadata={"general.name": "New"}, chat_template="template.jinja", out="new.gguf")

Only what precedes the data is made anew; the data is copied. In place means that the new file takes the old one's name
once it is whole: whoever has the old one open keeps it, and a crash leaves one of the two.
"""

import mmap
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.checkpoint.files.folder import sync
from bridge.checkpoint.files.hub import resolve_gguf
from bridge.conversion.planning.metadata import with_given
from bridge.errors import BridgeError, parameter, refused
from bridge.gguf_file.header import Metadata, TensorEntry, check_basis, read_header
from bridge.system.options import checked, is_key
from bridge.system.storage.files import disk_errors, expanded, missing, put_in_place, sync_folder
from bridge.system.storage.folder_locks import temporary_beside
from bridge.system.storage.outputs import NOTHING, ProtectedPaths, check_outputs

_CHAT_TEMPLATE = "tokenizer.chat_template"
_OF_THE_FILE = ("general.architecture", "general.alignment", "split.")
_NAME_BYTES = 63  # that llama.cpp has for a tensor's name
_AT_ONCE = 16 << 20  # bytes that are copied


@dataclass(frozen=True)
class Edited:
    """What `edit` changed.

    path      the file that has the changes
    changes   a line for each change
    in_place  whether the file replaced the old one
    """

    path: Path
    changes: list[str]
    in_place: bool

    def summary(self) -> str:
        """The lines that the command prints."""
        return "\n".join([*self.changes, f"{'changed' if self.in_place else 'wrote'} {self.path}"])


@checked
def edit(
    model: str | Path,
    out: str | Path | None = None,
    *,
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    chat_template: str | Path | None = None,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    remove: Sequence[str] = (),
    force: bool = False,
    in_place: bool = False,
) -> Edited:
    """Change keys and names of a GGUF.

    model          the GGUF; of several shards, the one that has the tensor, or the first for keys
    out            the file to write
    metadata       new values by key. A value keeps the type of its key, or gets the one that llama.cpp reads
    chat_template  a file with the chat template
    rename         new names by old name, of keys or tensors
    remove         keys to remove
    force          replace `out` if it exists
    in_place       replace `model` itself instead of writing `out`; the disk must hold both files meanwhile

    Tensor data is copied as it is.

    Returns a `bridge.conversion.edit.Edited`. Raises BridgeError for a damaged file, a value of another type, a name
    that is not there or taken, and in place for a link or a file with several names (hard links).
    """
    path = resolve_gguf(model)
    if (out is None) != in_place:
        new, replaced = parameter("out"), parameter("in_place", True)
        problem = f"{new} and {replaced} exclude each other" if in_place else "nothing says which file to write"
        raise BridgeError(f"{path}: {problem}; give {new} for a new file, or {replaced} to replace this one")
    target = path if out is None else expanded(out)
    check_outputs([target], force or in_place, NOTHING if in_place else ProtectedPaths((path,)))
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    if chat_template is not None:
        pairs.append((_CHAT_TEMPLATE, _text(expanded(chat_template))))
    names = dict(rename)
    if wrong := next((key for key, _ in pairs if not is_key(key)), None):
        raise BridgeError(f"{parameter('metadata')} {wrong!r}: is no key; one has letters, digits, '_', '.' and '-'")
    if not pairs and not names and not remove:
        raise BridgeError(f"{path}: nothing to change; give {parameter('metadata')}, a chat template or new names")
    try:
        with open(path, "rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
            stored, tensors = read_header(data, path)
            check_basis(stored, path)
            head, changes = _head(path, data[:8], stored, tensors, pairs, names, remove)
            alignment = int(stored.get(gguf.Keys.General.ALIGNMENT, gguf.GGUF_DEFAULT_ALIGNMENT))
            info = os.fstat(source.fileno())
            if in_place and info.st_nlink > 1:
                raise BridgeError(
                    f"{path}: has {info.st_nlink} names (hard links), of which the others would keep the old file; "
                    f"give {parameter('out')} for a new one"
                )
            source.seek(stored.data_start)
            with disk_errors(target, "the file", "output"), temporary_beside(target) as folder:
                with open(folder / target.name, "xb") as output:
                    output.write(head + bytes(-len(head) % alignment))
                    shutil.copyfileobj(source, output, _AT_ONCE)
                    sync(output)
                if in_place:
                    shutil.copymode(path, folder / target.name)
                data.close()  # Windows replaces no file that is mapped
                source.close()
                put_in_place(folder / target.name, target)
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, ValueError) as problem:
        raise BridgeError(f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem})") from problem
    sync_folder(target.parent)
    return Edited(target, changes, in_place)


def _head(
    path: Path,
    magic: bytes,
    stored: Metadata,
    tensors: list[TensorEntry],
    pairs: list[tuple[str, Any]],
    names: dict[str, str],
    removed: Sequence[str],
) -> tuple[bytes, list[str]]:
    """Everything before the data, without padding, and what has changed."""
    writer = gguf.GGUFWriter(None, "")
    old = {key: _value(stored, key) for key in stored}
    for key in removed:
        if key not in old or key in dict(pairs):
            why = "is given a value too" if key in old else f"is no key of {path}; `gguf-bridge inspect` lists them"
            raise refused("remove", key, why)
        if key.startswith(_OF_THE_FILE):
            raise refused("remove", key, f"{key} describes the file; it cannot be removed")
    values = {key: value for key, value in with_given(old, pairs).items() if key not in removed}
    changes = [f"{key}: {_short(old.get(key))} -> {_short(values[key])}" for key, _ in pairs]
    changes += [f"{key}: {_short(old[key])} is removed" for key in removed]
    used_names = {*values, *(tensor.name for tensor in tensors)}
    for name, new in names.items():
        if name not in used_names:
            raise BridgeError(f"{path}: has no key or tensor {name}; `gguf-bridge inspect` and `plan` list them")
        if new in used_names or not new.isprintable() or not 0 < len(new.encode()) <= _NAME_BYTES:
            why = "is taken" if new in used_names else f"must be printable, of 1 to {_NAME_BYTES} bytes"
            raise refused("rename", (name, new), f"{new!r} {why}")
        if name in values and name.startswith(_OF_THE_FILE):
            raise refused("rename", (name, new), f"{name} describes the file; it cannot be renamed")
        used_names = used_names - {name} | {new}
        changes.append(f"{name} is now {new}")
    parts = [magic, struct.pack("<QQ", len(tensors), len(values))]

    def add_text(text: str) -> None:
        parts.append(writer._pack_val(text, GGUFValueType.STRING, add_vtype=False))

    for key, value in values.items():
        add_text(names.get(key, key))
        if key in old and value is old[key]:
            parts += [struct.pack("<I", value.type), stored.raw(key)]
        else:
            parts.append(writer._pack_val(value.value, value.type, add_vtype=True, sub_type=value.sub_type))
    for tensor in tensors:
        add_text(names.get(tensor.name, tensor.name))
        dimensions = tensor.shape[::-1]
        parts.append(struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        kind = gguf.GGMLQuantizationType[tensor.type]
        parts.append(struct.pack("<IQ", kind, tensor.start - stored.data_start))
    return b"".join(parts), changes


def _value(stored: Metadata, key: str) -> GGUFValue:
    kind, items = stored.kind(key)
    return GGUFValue(stored[key], GGUFValueType(kind), None if items is None else GGUFValueType(items))


def _short(value: GGUFValue | None) -> str:
    return "none" if value is None else f"{value.value!r:.60}"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise missing(file) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise BridgeError(f"{file}: cannot be read as text ({problem}); give a chat template") from problem
