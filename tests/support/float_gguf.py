"""A model spec with its float weights written as a GGUF: names and metadata alone under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.models import ModelSpec, describe_model


def spec_of(folder: Path, names: Any, **options: Any) -> ModelSpec:
    """`describe_model` of a folder's config.json."""
    return describe_model(json.loads((folder / "config.json").read_text()), folder, names, **options)


def write_gguf(spec: ModelSpec, weights: Mapping[str, np.ndarray], path: Path, dtype: Any = np.float32) -> Path:
    """Matrices in `dtype`, everything else in float32."""
    writer = gguf.GGUFWriter(str(path), spec.arch)
    spec.add_metadata(writer)
    writer.add_quantization_version(2)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in spec.tensors:
        values = tensor.data if tensor.source is None else weights[tensor.source]
        assert values is not None
        values = values[tuple(slice(n) for n in tensor.shape)]
        assert values.shape == tensor.shape, tensor.name
        if tensor.row_order is not None:
            values = values[tensor.row_order]
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype if tensor.quantizable else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
