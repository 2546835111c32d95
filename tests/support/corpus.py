"""Repositories by their headers alone: tests/data/corpus/NAME.json, unfolded to a folder that can be planned.

    like       the public repository that it is shaped like; written from public facts, not copied
    cut        what is smaller than there
    type       what conversion is asked for, auto where nothing is said: act-order takes long to choose types for
    tokenizer  qwen, llama3 or llama2 (see `tokenizers_by_hand`), or null
    json       the small files: config.json, quantize_config.json, tokenizer_config.json, ...
    files      of weights; of several, each has some of the tensors, and there is an index
    tensors    {module: tensors}; "layers.{0..1}.{q,k}_proj" is four modules, and
               "qweight I32 512x4096, g_idx I32 4096 = k/128" two tensors of each of them
    plan       what it becomes, a line for each kind of tensor; or
    refused    the line that it is refused with

What a tensor holds, after "=":

    0x77777777   this word, again and again      7.5      this number, again and again
    4096,11008   these numbers                   x -8     as without "=", times -8
    k/128        k // 128                        k/128 shuffled    likewise of the columns in any order

Without: of floats a run of values near 0.01, of integers a run of random bytes, and zeros from the second MiB on:
the file has a hole there, and takes no space for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoint.files.dtypes import NUMPY
from tests.support import tokenizers_by_hand

_FILLED = 2 << 20  # bytes at the start of a tensor that are no hole
_BYTES = np.random.default_rng(0).integers(0, 256, 4099 * 8, dtype=np.uint8)
_VALUES = np.random.default_rng(1).uniform(0.005, 0.015, 4099).astype(np.float32)
_BRACES = re.compile(r"\{([^{}]*)\}")


def expand(pattern: str) -> Iterator[str]:
    """The names that a pattern with {a,b} and {0..3} stands for."""
    choices = []
    for inner in _BRACES.findall(pattern):
        first, dots, last = inner.partition("..")
        choices.append([str(i) for i in range(int(first), int(last) + 1)] if dots else inner.split(","))
    template = _BRACES.sub("{}", pattern)
    for choice in product(*choices):
        yield template.format(*choice)


def unfold(record: dict[str, Any], folder: Path) -> None:
    """The folder of a repository."""
    folder.mkdir(parents=True)
    for name, content in record["json"].items():
        (folder / name).write_text(json.dumps(content))
    if record.get("tokenizer"):
        (folder / "tokenizer.json").write_text(json.dumps(getattr(tokenizers_by_hand, record["tokenizer"])()))
    tensors = {
        f"{module}.{spec.split()[0]}": spec.split(maxsplit=1)[1]
        for pattern, specs in record["tensors"].items()
        for module in expand(pattern)
        for spec in re.split(r", (?=[a-zA-Z])", specs)
    }
    files = record.get("files", ["model.safetensors"])
    names = list(tensors)
    share = -(-len(names) // len(files))
    for i, file in enumerate(files):
        write_sparse(folder / file, {name: tensors[name] for name in names[i * share : (i + 1) * share]})
    if len(files) > 1:
        index = {name: files[i // share] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_sparse(path: Path, tensors: dict[str, str]) -> None:
    """A safetensors file of tensors such as "I32 512x4096 = 0x77777777"."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values, end = [], 0
    for name, spec in tensors.items():
        kind, _, said = spec.partition(" = ")
        dtype, *sides = kind.split()
        shape = [int(n) for n in sides[0].split("x")] if sides else []
        nbytes = math.prod(shape) * NUMPY[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        values.append((end, content(dtype, min(nbytes, _FILLED), said)))
        end += nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start, data in values:
            file.seek(8 + len(text) + start)
            file.write(data)
        file.truncate(8 + len(text) + end)


def content(dtype: str, nbytes: int, said: str) -> bytes:
    """The first bytes of a tensor."""
    count = nbytes // NUMPY[dtype].itemsize
    floats = dtype in ("F32", "F16", "BF16")
    if not said and not floats:
        return (np.resize(_BYTES, nbytes) & (0x77 if dtype.startswith("F8") else 0xFF)).tobytes()  # no NaN
    if said.startswith("k/"):
        size, _, shuffled = said[2:].partition(" ")
        columns = np.random.default_rng(2).permutation(count) if shuffled else np.arange(count)
        return (columns // int(size)).astype(NUMPY[dtype]).tobytes()
    if said.startswith("0x"):
        return np.full(count, int(said, 16), f"u{NUMPY[dtype].itemsize}").tobytes()
    if not said or said.startswith("x "):
        numbers = np.resize(_VALUES, count) * np.float32(said[2:] or 1)
    else:
        numbers = np.resize(np.array(said.split(","), np.float64), count)
    if dtype == "BF16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return numbers.astype(NUMPY[dtype]).tobytes()
