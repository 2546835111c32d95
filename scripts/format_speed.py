"""The speeds of `bench_formats.py`: processes of llama.cpp and of our runtime that take turns on the same file."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import bridge
from bridge.runtime.bench import random_tensor
from scripts.peers.gguf_file import rewrite

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_model import both_sides, turn


class Speeds:
    """Both runtimes on the files of the table, or on files of another model with the same types."""

    def __init__(self, work: Path, speed_of: Path | None, python: str, threads: int, turns: int) -> None:
        self._work, self._of, self._threads, self._turns = work, speed_of, threads, turns
        self._sides, native = both_sides(python)
        self.peer = "llama-cpp-python" if native else f"the xllamacpp wheel ({_instructions()})"

    def of_types(self, types: dict[str, str]) -> dict[str, dict[str, float]]:
        """Those of the other model in these types: tensor of this model -> type."""
        file = self._like(types)
        try:
            return self.of_file(file)
        finally:
            file.unlink()

    def of_file(self, file: Path) -> dict[str, dict[str, float]]:
        """Medians of each side: tokens a second made and of a prompt, and the peak of memory in bytes."""
        turn("ours", *self._sides["ours"], file, self._threads)  # compiles what is not compiled, fills the page cache
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in self._sides}
        for _ in range(self._turns):
            for side, how in self._sides.items():
                found[side].append(turn(side, *how, file, self._threads))
        keys = ("decode", "prompt", "peak")
        return {side: {k: statistics.median(r[k] or 0 for r in runs) for k in keys} for side, runs in found.items()}

    def _like(self, types: dict[str, str]) -> Path:
        """A file of the other model in these types: layers by their place in the stack."""
        base = self._work / "speed.gguf"
        if not base.exists():
            assert self._of is not None
            bridge.convert(self._of, base)
        count, own = (_layers(list(names)) for names in (types, [t.name for t in gguf.GGUFReader(str(base)).tensors]))

        def type_of(tensor: gguf.ReaderTensor) -> str:
            name = re.sub(r"^blk\.(\d+)", lambda m: f"blk.{int(m[1]) * count // own}", tensor.name)
            return str(types.get(name, tensor.tensor_type.name)) if len(tensor.shape) > 1 else tensor.tensor_type.name

        out = self._work / "like.gguf"
        rewrite(base, out, type_of, _random)
        return out


def _random(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
    """Blocks of a type in the tensor's shape: what is in them is of no matter to speed."""
    columns, rows = (int(n) for n in tensor.shape)
    if type in ("F16", "F32"):
        values = np.random.default_rng(0).standard_normal((512, columns)) * 0.02
        return np.resize(values.astype({"F16": np.float16, "F32": np.float32}[type]), (rows, columns))
    return random_tensor(type, rows, columns).raw


def _layers(names: list[str]) -> int:
    return 1 + max((int(m[1]) for name in names if (m := re.match(r"blk\.(\d+)\.", name))), default=0)


def _instructions() -> str:
    """What the wheel was built for: "AVX2"."""
    import xllamacpp

    found = re.findall(r"(\w+) = 1", xllamacpp.get_system_info())
    return ", ".join(name for name in found if name.startswith(("AVX", "AMX", "NEON", "SVE"))) or "no vectors"
