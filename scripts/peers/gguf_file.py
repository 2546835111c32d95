"""A GGUF read as the Hugging Face model it came from, in that model's names and row order; and rewritten with other
types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_writer import GGUFValue

from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.conversion.writing.gguf_writer import GGUFOutput
from bridge.runtime.cpu.engines import dequantize


def gguf_weights(path: str | Path) -> dict[str, np.ndarray]:
    """A GGUF's tensors dequantized, by their Hugging Face names, q and k rows in Hugging Face's order.

    The scale of a whole NVFP4 tensor, which is a tensor of its own, is multiplied in.
    """
    reader = gguf.GGUFReader(str(path))
    arch = value(reader, "general.architecture")
    names = _hugging_face_names(arch, value(reader, f"{arch}.block_count"))
    heads = _permuted_heads(reader, arch)
    weights = {}
    factors = {t.name.removesuffix(".scale"): t.data[0] for t in reader.tensors if t.name.endswith(".scale")}
    for tensor in reader.tensors:
        base, _, kind = tensor.name.rpartition(".")
        if base not in names or kind.endswith("scale"):
            continue  # rope_freqs: not a weight
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError:  # Q2_0
            values = dequantize.rows(tensor.tensor_type.name, tensor.data)
        if base in factors:
            values *= factors[base]
        name = names[base]
        if (count := heads.get(name.rpartition(".")[2])) is not None:
            values = unpermute(values, count)
        weights[f"{name}.{kind}"] = values
    return weights


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama q or k projection in Hugging Face's order: GGUF interleaves a head's two halves."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class Blocks:
    """A matrix in a block type: uint8 [rows, row bytes], rows as Hugging Face has them.

    scale  what multiplies all of it, which NVFP4 may have
    """

    type: str
    data: np.ndarray
    scale: float = 1.0

    def values(self) -> np.ndarray:
        """The dequantized weights, float32 [rows, columns]."""
        return dequantize.rows(self.type, self.data) * np.float32(self.scale)


def replace_blocks(source: Path, out: Path, blocks: Mapping[str, Blocks]) -> None:
    """Rewrite a GGUF with matrices, by their Hugging Face names, in other blocks."""
    reader = gguf.GGUFReader(str(source))
    arch = value(reader, "general.architecture")
    names = _hugging_face_names(arch, value(reader, f"{arch}.block_count"))
    heads = _permuted_heads(reader, arch)
    by_tensor = {f"{base}.weight": blocks[key] for base, name in names.items() if (key := f"{name}.weight") in blocks}

    def data_of(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
        data, name = by_tensor[tensor.name].data, names[tensor.name.removesuffix(".weight")]
        count = heads.get(name.rpartition(".")[2])
        return data if count is None else permute(data, count)

    def type_of(tensor: gguf.ReaderTensor) -> str:
        return by_tensor[tensor.name].type if tensor.name in by_tensor else tensor.tensor_type.name

    scales = {f"{key.removesuffix('weight')}scale": block.scale for key, block in by_tensor.items() if block.scale != 1}
    rewrite(source, out, type_of, data_of, added={key: np.array([s], np.float32) for key, s in scales.items()})


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `unpermute`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    """The value of a key that a file must have."""
    field = reader.get_field(key)
    assert field is not None, f"{key} is missing"
    return field.contents()


def _permuted_heads(reader: gguf.GGUFReader, arch: str) -> dict[str, int]:
    """The projections whose rows llama.cpp permutes, and their number of heads."""
    if arch != "llama":
        return {}
    count = {"q_proj": "head_count", "k_proj": "head_count_kv"}
    return {name: value(reader, f"{arch}.attention.{key}") for name, key in count.items()}


def _hugging_face_names(arch: str, layers: int) -> dict[str, str]:
    """GGUF base name -> the name that a transformers Llama or Qwen gives the same tensor."""
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    mapping = gguf.get_tensor_name_map(kind, layers)
    parts = ["input_layernorm", "post_attention_layernorm"]
    parts += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts]
    return {base: name for name in names if (base := mapping.get_name(name)) is not None}


def rewrite(
    source: Path, out: Path, type_of: Callable[[gguf.ReaderTensor], str],
    data_of: Callable[[gguf.ReaderTensor, str], np.ndarray], metadata: Mapping[str, GGUFValue] | None = None,
    added: Mapping[str, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Rewrite a GGUF with tensors of other types.

    type_of   the new type of a tensor
    data_of   its bytes in that type, where the type changes
    metadata  keys to replace
    added     further tensors, float32
    """
    reader = gguf.GGUFReader(str(source))
    keys = {
        name: GGUFValue(field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = [PlannedTensor(t.name, tuple(map(int, reversed(t.shape))), type=type_of(t)) for t in reader.tensors]
    more = [PlannedTensor(name, values.shape, type="F32") for name, values in (added or {}).items()]
    with GGUFOutput(out, Plan({**keys, **(metadata or {})}, tensors + more), force=True) as output:
        for tensor, planned in zip(reader.tensors, tensors, strict=True):
            same = planned.type == tensor.tensor_type.name
            output.write(tensor.data if same else data_of(tensor, planned.type))
        for values in (added or {}).values():
            output.write(values)
        output.finish()
