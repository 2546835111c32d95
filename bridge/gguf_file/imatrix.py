"""llama.cpp's importance matrices: the mean square of each input column's activations.

A GGUF file of `general.type` "imatrix" holds, for each weight tensor `name` (as llama.cpp names it,
"blk.0.ffn_down.weight"), two float32 tensors:

    name.in_sum2   [experts, in]   sums over tokens of the squared activations
    name.counts    [experts, 1]    tokens seen

The importance is their quotient; it is 1 for an expert that saw no token.

Files of before July 2025, imatrix.dat, are a list of entries, all numbers little-endian:

    int32 count, then for each: int32 length, name; int32 calls; int32 n, float32 [n] sums over calls
    int32 chunks; int32 length, name of the text          where the file does not end before

The importance is sums / calls, or the sums themselves where calls is 0. Experts follow one another in an entry, and one
that saw no token has zeros, which count as 1 too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from bridge.system.storage.files import expect_name, put_in_place, refuse_pointer
from bridge.system.storage.folder_locks import temporary_beside

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | Path) -> dict[str, np.ndarray]:
    """GGUF tensor name -> float32 [in], or [experts, in] for a tensor of several experts.

    Raises BridgeError if the file is missing, is not an imatrix, or holds NaN or negative values.
    """
    path = Path(path)
    expect_name(path)
    if path.is_file():
        refuse_pointer(path)
    if _is_legacy(path):
        return _read_legacy(path)
    file = read_gguf(path)
    kind = file.metadata.get("general.type", "model")
    if kind != "imatrix":
        raise BridgeError(
            f"{path}: a GGUF of type {kind!r}, not 'imatrix'; make one with llama-imatrix -o imatrix.gguf"
        )
    stored = {name: t for name, t in file.tensors.items() if name.endswith((_SUMS, _COUNTS))}
    if other := next((t for t in stored.values() if t.type != "F32"), None):
        raise BridgeError(f"{path}: {other.name} is {other.type}, must be F32; make the imatrix again")
    tensors = {name: t.raw.view("<f4").reshape(t.shape) for name, t in stored.items()}
    return {
        name.removesuffix(_SUMS): _importance(path, name.removesuffix(_SUMS), sums, tensors)
        for name, sums in tensors.items()
        if name.endswith(_SUMS)
    }


def write_imatrix(
    path: Path, statistics: Mapping[str, tuple[np.ndarray, np.ndarray]], length: int, datasets: Sequence[str]
) -> None:
    """Write an importance matrix that llama.cpp's tools and `read_imatrix` read.

    statistics  GGUF tensor name -> mean squares float32 [experts, in] and tokens seen int [experts]
    length      tokens in a sequence
    datasets    names of the texts that it was made from

    Raises BridgeError if writing fails.
    """
    from gguf import GGUFWriter

    chunks = max((int(tokens.sum()) // length for _, tokens in statistics.values()), default=0)
    try:
        with temporary_beside(path) as folder:
            writer = GGUFWriter(folder / path.name, "")  # of no architecture
            writer.add_type("imatrix")
            writer.add_array("imatrix.datasets", list(datasets))
            writer.add_uint32("imatrix.chunk_count", chunks)
            writer.add_uint32("imatrix.chunk_size", length)
            for name, (squares, tokens) in statistics.items():
                counts = np.asarray(tokens, np.float32)[:, None]
                writer.add_tensor(name + _SUMS, (squares * counts).astype(np.float32))
                writer.add_tensor(name + _COUNTS, counts)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            put_in_place(folder / path.name, path)
    except OSError as problem:
        raise BridgeError(
            f"{path}: cannot be written ({problem.strerror}); free some space or choose another name"
        ) from None


def for_tensor(imatrix: dict[str, np.ndarray], name: str, columns: int, experts: int = 1) -> np.ndarray | None:
    """The importance of a tensor's input columns: float32 [columns], [experts, columns] for several experts, or None
    if the file lacks the tensor (as with embeddings). Raises BridgeError if its length differs."""
    importance = imatrix.get(name)
    if importance is None:
        return None
    expected = (experts, columns) if experts > 1 else (columns,)
    if experts > 1 and importance.shape == (experts * columns,):  # a file of the old format does not say how many
        importance = importance.reshape(expected)
        importance = np.where(importance.any(axis=1, keepdims=True), importance, np.float32(1))
    if importance.shape != expected:
        have, need = ("x".join(map(str, shape)) for shape in (importance.shape, expected))
        raise BridgeError(f"{name}: the imatrix has {have} columns, the tensor {need}; make it with this model")
    return importance


def _importance(path: Path, name: str, sums: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    counts = tensors.get(name + _COUNTS)
    if counts is None:
        raise BridgeError(f"{path}: {name}{_SUMS} has no matching {name}{_COUNTS}; make the imatrix again")
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


def _is_legacy(path: Path) -> bool:
    """The old format opens with the number of entries and the length of the first one's name, both int32."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:  # the reader reports it
        return False
    entries, length = np.frombuffer(head.ljust(8, b"\0"), "<i4")
    return (path.suffix == ".dat" and head[:4] != b"GGUF") or (0 < entries < 100_000 and 0 < length < 256)


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    """`read_imatrix` of the old format; experts are not told apart. Raises BridgeError if it is damaged."""
    tensors: dict[str, np.ndarray] = {}
    with path.open("rb") as file:
        size = path.stat().st_size

        def numbers(count: int, dtype: str) -> np.ndarray:
            if not 0 <= count <= (size - file.tell()) // 4:
                raise BridgeError(
                    f"{path}: entry {len(tensors) + 1} ends beyond the file's {size} bytes; it is damaged, or not an "
                    "imatrix: make the imatrix again"
                )
            return np.frombuffer(file.read(4 * count), dtype)

        def number() -> int:
            return int(numbers(1, "<i4")[0])

        for _ in range(number()):
            length = number()
            name = file.read(length if 0 < length < 1 << 16 else 0).decode("utf-8", "replace")
            calls = number()
            sums = numbers(number(), "<f4").astype(np.float32)
            if not name or not len(sums) or not (np.isfinite(sums).all() and (sums >= 0).all() and calls >= 0):
                raise BridgeError(
                    f"{path}: entry {len(tensors) + 1}, {name!r:.80}, has no name or no values, or holds NaN, infinity "
                    "or negative ones; make the imatrix again"
                )
            tensors[name] = sums / np.float32(calls or 1)
    if not tensors:
        raise BridgeError(f"{path}: an imatrix of no tensors; make the imatrix again")
    return tensors
