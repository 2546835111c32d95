"""An outline with its float weights written as a GGUF: names and metadata alone under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.models import describe_model
from bridge.models.outline import Outline


def outline_of(folder: Path, names: Any, **options: Any) -> Outline:
    """`describe_model` of a folder's config.json."""
    return describe_model(json.loads((folder / "config.json").read_text()), folder, names, **options)


def write_gguf(outline: Outline, weights: Mapping[str, np.ndarray], path: Path, dtype: Any = np.float32) -> Path:
    """Matrices in `dtype`, everything else in float32."""
    writer = write_keys(outline, path)
    writer.add_quantization_version(2)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in outline.tensors:
        values = tensor.data
        if values is None:
            (part,) = tensor.parts
            values = weights[part.source][tuple(slice(n) for n in part.shape)]
            values = values if part.rows is None else values[part.rows]
        assert values.shape == tensor.shape, tensor.name
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32 if tensor.fixed_type else dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_keys(outline: Outline, path: Path) -> gguf.GGUFWriter:
    """A writer that has an outline's metadata."""
    arch = "general.architecture"
    writer = gguf.GGUFWriter(str(path), outline.metadata[arch].value)
    for key, entry in outline.metadata.items():
        if key != arch:
            writer.add_key_value(key, entry.value, entry.type, entry.sub_type)
    return writer
