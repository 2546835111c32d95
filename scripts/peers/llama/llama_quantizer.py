"""llama.cpp's quantizer for an unquantized GGUF, through the library inside the xllamacpp wheel.

The wheel leaves out `llama_model_quantize`, but has the function that it calls for every tensor: ggml_quantize_chunk.
A preset's mixture of types (Q4_K_M, ...) comes from `recipe.py`; a test compares the result with a file
of llama.cpp's own quantizer, byte for byte. As in llama.cpp, the imatrix is used for the tensors that it names; the
others are rounded without.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.conversion.planning.recipe import Recipe, TensorPlace
from bridge.gguf_file.imatrix import read_imatrix
from scripts.peers.gguf_file import rewrite, value
from scripts.peers.llama import ggml

_ROWS = 512  # of a matrix, quantized together


def quantize(source: Path, out: Path, preset: str, imatrix: Path | None = None, threads: int = 1) -> None:
    """Write `source`, a GGUF with matrices in F16, BF16 or F32, as one of llama.cpp's presets."""
    reader = gguf.GGUFReader(str(source))
    recipe = Recipe(preset)
    importance = read_imatrix(imatrix) if imatrix is not None else {}
    places = _places(reader)

    def type_of(tensor: gguf.ReaderTensor) -> str:
        if tensor.name not in places:
            return str(tensor.tensor_type.name)
        return str(recipe.wanted(places[tensor.name], as_codes=False, imatrix=bool(importance)).type)

    def data_of(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, int(tensor.shape[0]))
        columns = importance.get(tensor.name)
        if columns is not None and columns.size != rows.shape[1]:
            raise ValueError(f"{tensor.name}: the imatrix has {columns.size} columns, the tensor {rows.shape[1]}")
        if type in ("F16", "F32"):
            return rows.astype({"F16": np.float16, "F32": np.float32}[type])
        parts = [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)]
        with ThreadPoolExecutor(threads) as pool:
            return np.concatenate(list(pool.map(lambda part: ggml.quantize(part, type, columns), parts)))

    file_type = GGUFValue(int(gguf.LlamaFileType[f"MOSTLY_{preset}"]), GGUFValueType.UINT32)
    rewrite(source, out, type_of, data_of, {"general.file_type": file_type})


def _places(reader: gguf.GGUFReader) -> dict[str, TensorPlace]:
    """The tensors that are quantized, and their places in the model."""

    def number(key: str) -> int:
        field = reader.get_field(f"{arch}.{key}")
        return int(np.max(field.contents())) if field is not None else 0

    arch = value(reader, "general.architecture")
    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    names = {tensor.name for tensor in reader.tensors}
    places = {}
    for tensor in reader.tensors:
        if len(tensor.shape) < 2 or tensor.tensor_type.name == "F32":
            continue
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        kind = re.sub(r"^blk\.\d+\.", "", tensor.name).rpartition(".")[0]
        places[tensor.name] = TensorPlace(
            tensor.name, kind, int(layer[1]) if layer else None, number("block_count"), heads // (kv_heads or heads),
            int(tensor.shape[0]), tied=kind == "token_embd" and "output.weight" not in names,
            experts=number("expert_count"),
        )  # fmt: skip
    return places
