"""llama.cpp's importance matrices: how much the square of each input column's activation was, on average.

A GGUF file of `general.type` "imatrix" holds, for each weight tensor `name` (as llama.cpp names it,
"blk.0.ffn_down.weight"), two float32 tensors:

    name.in_sum2   [experts, in]   sums over tokens of the squared activations
    name.counts    [experts, 1]    tokens seen

The importance is their quotient; an expert that saw no token gets ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.errors import BridgeError
from bridge.system.folder_locks import temporary_beside

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | Path) -> dict[str, np.ndarray]:
    """GGUF tensor name -> float32 [in], or [experts, in] for a tensor of several experts.

    Raises BridgeError where the file is missing, is no imatrix, or holds NaN or negative values.
    """
    from gguf import GGUFReader

    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as problem:
        raise BridgeError(f"{path}: {problem.strerror or problem}; give a llama.cpp imatrix file") from None
    if magic != b"GGUF":
        if path.suffix == ".dat" or _looks_legacy(path):
            raise BridgeError(
                f"{path}: an imatrix in the old binary format; convert it with "
                f"llama-imatrix --in-file {path.name} -o {path.stem}.gguf --output-format gguf"
            )
        raise BridgeError(f"{path}: not a GGUF file; make an importance matrix with llama-imatrix -o imatrix.gguf")
    try:
        reader = GGUFReader(path)
        field = reader.fields.get("general.type")
        kind = field.contents() if field else "model"
        tensors = (
            {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors} if kind == "imatrix" else {}
        )
    except (ValueError, IndexError, KeyError) as problem:
        raise BridgeError(f"{path}: damaged or cut short ({problem}); fetch or make it again") from None
    if kind != "imatrix":
        raise BridgeError(
            f"{path}: a GGUF of type {kind!r}, not 'imatrix'; make one with llama-imatrix -o imatrix.gguf"
        )
    return {
        name.removesuffix(_SUMS): _importance(path, name.removesuffix(_SUMS), sums, tensors)
        for name, sums in tensors.items()
        if name.endswith(_SUMS)
    }


def write_imatrix(
    path: Path, found: Mapping[str, tuple[np.ndarray, np.ndarray]], length: int, datasets: Sequence[str]
) -> None:
    """Write an importance matrix that llama.cpp's tools and `read_imatrix` read.

    found     GGUF tensor name -> mean squares float32 [experts, in] and tokens seen int [experts]
    length    tokens in a sequence
    datasets  what it was made of, for people

    Raises BridgeError where writing fails.
    """
    from gguf import GGUFWriter

    chunks = max((int(tokens.sum()) // length for _, tokens in found.values()), default=0)
    try:
        with temporary_beside(path) as folder:
            writer = GGUFWriter(folder / path.name, "")  # of no architecture
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", list(datasets))
            writer.add_uint32("imatrix.chunk_count", chunks)
            writer.add_uint32("imatrix.chunk_size", length)
            for name, (squares, tokens) in found.items():
                counts = np.asarray(tokens, np.float32)[:, None]
                writer.add_tensor(name + _SUMS, (squares * counts).astype(np.float32))
                writer.add_tensor(name + _COUNTS, counts)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.replace(folder / path.name, path)
    except OSError as problem:
        raise BridgeError(f"{path}: cannot be written ({problem.strerror}); make room or give another name") from None


def for_tensor(imatrix: dict[str, np.ndarray], name: str, columns: int, experts: int = 1) -> np.ndarray | None:
    """The importance of a tensor's input columns: float32 [columns], [experts, columns] for several experts, or None
    where the file does not know the tensor (as with embeddings). Raises BridgeError where its length is another."""
    found = imatrix.get(name)
    if found is None:
        return None
    expected = (experts, columns) if experts > 1 else (columns,)
    if found.shape != expected:
        have, need = ("x".join(map(str, shape)) for shape in (found.shape, expected))
        raise BridgeError(f"{name}: the imatrix has {have} columns, the tensor {need}; it is of another model")
    return found


def _importance(path: Path, name: str, sums: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    counts = tensors.get(name + _COUNTS)
    if counts is None:
        raise BridgeError(f"{path}: {name}{_SUMS} has no {name}{_COUNTS} beside it; make the imatrix again")
    sums = sums.reshape(-1, sums.shape[-1])
    counts = counts.reshape(-1, 1)
    if len(counts) != len(sums):
        raise BridgeError(
            f"{path}: {name} has {len(sums)} rows of sums but {len(counts)} counts; make the imatrix again"
        )
    if not all(np.isfinite(v).all() and (v >= 0).all() for v in (sums, counts)):
        raise BridgeError(f"{path}: {name} holds NaN, infinity or negative values; make the imatrix again")
    importance = np.where(counts > 0, sums / np.where(counts > 0, counts, 1), 1).astype(np.float32)
    return importance[0] if len(importance) == 1 else importance


def _looks_legacy(path: Path) -> bool:
    """The old format opens with the number of entries and the length of the first one's name, both int32."""
    with path.open("rb") as file:
        head = np.frombuffer(file.read(8), "<i4")
    return len(head) == 2 and 0 < head[0] < 100_000 and 0 < head[1] < 256
