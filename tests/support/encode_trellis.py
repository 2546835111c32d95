"""Trellis-coded checkpoints for tests: packing code for QTIP and EXL3, independent of the readers.

Codebooks are written with Python's integers, one state after another.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bridge.trellis.hadamard import had
from tests.support.encode import LINEAR, load_floats, save_sharded
from tests.support.viterbi import viterbi

SCALE_OVERRIDE = 0.9  # the weights' rms over the codebook's, before the search


def value_of(mode: str, x: int, tlut: np.ndarray | None = None, width: int = 0, multiplier: int = 0) -> list[float]:
    """The values of one state."""
    if mode == "lut":
        return [float(v) for v in tlut[x]]
    if mode in ("quantlut", "quantlut_sym"):
        y = x * (x + 1)
        right = (15 if mode == "quantlut_sym" else 16) - width
        found = [float(v) for v in tlut[(y >> right) % 2**width]]
        if mode == "quantlut_sym" and y >> 15 & 1:
            found[0] = -found[0]
        return found
    if mode == "1mad":
        z = (x * 34038481 + 76625530) % 2**32
    elif mode == "2mad":
        z = (x * 264435761 + 1013904223) % 2**32
        z = ((z * 1664525 >> 32) + z) % 2**32
    elif mode == "3inst":
        z = (x * 89226354 + 64248484) % 2**32
    else:
        z = x * multiplier % 2**32
    if mode in ("3inst", "mcg"):
        z = z & 0x8FFF8FFF ^ 0x3B603B60
        low, high = np.array([z & 0xFFFF, z >> 16], np.uint16).view(np.float16)
        return [float(low + high)]
    total = sum(z.to_bytes(4, "little"))
    if mode == "mul1":
        factor, addend = (float(np.array(bits, np.uint16).view(np.float16)) for bits in (0x1EEE, 0xC931))
        return [float(np.float16((1024 + total) * factor + addend))]  # exact in float64 before it is rounded
    return [float(np.float32(total - 510) / np.float32(147.800537109375))]


@dataclass(frozen=True, eq=False)
class Coding:
    """A codebook, and the trellis on it. `multiplier` of mcg and mul1; `width` = Q of the table."""

    mode: str
    K: int = 2
    V: int = 1
    L: int = 16
    width: int = 0
    tlut: np.ndarray | None = None
    multiplier: int = 0

    @property
    def step(self) -> int:
        return self.K * self.V

    def table(self) -> np.ndarray:
        """float32 [2^L, V]."""
        key = None if self.tlut is None else self.tlut.tobytes()
        return _table(self.mode, self.L, key, self.V, self.width, self.multiplier)


@cache
def _table(mode: str, bits: int, tlut: bytes | None, values: int, width: int, multiplier: int) -> np.ndarray:
    table = None if tlut is None else np.frombuffer(tlut, np.float32).reshape(-1, values)
    return np.array([value_of(mode, x, table, width, multiplier) for x in range(2**bits)], np.float32)


def gaussian_table(width: int, values: int, seed: int = 0) -> np.ndarray:
    """float32 [2^width, values] that halves hold exactly: Gaussian quantiles in some order."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2**width, values))
    return x.astype(np.float16).astype(np.float32)


# paths


def random_states(tiles: int, n: int, coding: Coding, seed: int = 0) -> np.ndarray:
    """Tail-biting paths of random bits."""
    bits = np.random.default_rng(seed).integers(0, 2, (tiles, n * coding.step))
    ring = np.concatenate([bits, bits[:, : coding.L]], 1)
    powers = 1 << np.arange(coding.L - 1, -1, -1)
    return np.stack([ring[:, i * coding.step : i * coding.step + coding.L] @ powers for i in range(n)], 1)


def quiet_states(tiles: int, n: int, coding: Coding, seed: int = 0) -> np.ndarray:
    """Tail-biting paths of small values: at each step the bits whose state has the smallest. As coded weights have."""
    bits = np.random.default_rng(seed).integers(0, 2, (tiles, n * coding.step))
    size = np.square(coding.table()).sum(1)
    powers = 1 << np.arange(coding.L - 1, -1, -1)
    choices = np.arange(2**coding.step)
    for end in range(coding.L, n * coding.step + 1, coding.step):
        kept = bits[:, end - coding.L : end - coding.step] @ powers[: coding.L - coding.step]
        best = size[kept[:, None] + choices].argmin(1)
        bits[:, end - coding.step : end] = best[:, None] >> np.arange(coding.step - 1, -1, -1) & 1
    ring = np.concatenate([bits, bits[:, : coding.L]], 1)
    return np.stack([ring[:, i * coding.step : i * coding.step + coding.L] @ powers for i in range(n)], 1)


# layers


def positions(layout: str, td_x: int = 16, td_y: int = 16) -> list[tuple[int, int]]:
    """(row, column), rows being outputs, of each weight of a tile."""
    if layout == "swizzled":
        return [((t >> 1 & 1) * 8 + (t >> 3) // 4, (t >> 2 & 1) * 8 + (t >> 3) % 4 * 2 + (t & 1)) for t in range(256)]
    if layout == "exl3":
        return [((t >> 3 >> 2) + 8 * (t >> 2 & 1), 2 * (t >> 3 & 3) + (t & 1) + 8 * (t >> 1 & 1)) for t in range(256)]
    return [divmod(t, td_y) for t in range(td_x * td_y)]


def tiles_of(w: np.ndarray, places: list[tuple[int, int]], height: int, width: int) -> np.ndarray:
    """[rows, columns, weights]: a matrix as sequences."""
    cut = w.reshape(w.shape[0] // height, height, w.shape[1] // width, width).transpose(0, 2, 1, 3)
    return cut[:, :, [r for r, _ in places], [c for _, c in places]]


def matrix_of(tiles: np.ndarray, places: list[tuple[int, int]], height: int, width: int) -> np.ndarray:
    """The inverse of `tiles_of`."""
    rows, columns = tiles.shape[:2]
    cut = np.empty((rows, columns, height, width))
    cut[:, :, [r for r, _ in places], [c for _, c in places]] = tiles
    return cut.transpose(0, 2, 1, 3).reshape(rows * height, columns * width)


def stream_bits(states: np.ndarray, coding: Coding, ends: bool) -> np.ndarray:
    """uint8 [..., bits]: what a path adds at each step: its first bits, or, where states end there, its last."""
    right = 0 if ends else coding.L - coding.step
    new = states >> right & (2**coding.step - 1)
    bits = new[..., None] >> np.arange(coding.step - 1, -1, -1) & 1
    return bits.reshape(*states.shape[:-1], -1).astype(np.uint8)


def transform(size: int, blocks: int = 1) -> np.ndarray:
    """float64 [size, size]: U of a dimension, written out."""
    orders = [172, 156, 140, 124, 116, 108, 60, 52, 36, 28, 20, 12, 1]
    order = next(k for k in orders if size % k == 0 and math.log2(size // k).is_integer())
    block = size // blocks
    return np.kron(np.eye(blocks), np.kron(had(order).astype(float), sylvester(block // order)) / np.sqrt(block))


def sylvester(size: int) -> np.ndarray:
    """float64 [size, size]: the Hadamard matrix of a power of two."""
    one = np.ones((1, 1))
    while len(one) < size:
        one = np.block([[one, one], [one, -one]])
    return one


def _searched(target: np.ndarray, coding: Coding, search: bool | None, seed: int) -> np.ndarray:
    sequences = target.reshape(-1, target.shape[-1] // coding.V, coding.V)
    if search:
        return viterbi(sequences, coding.table(), coding.step).reshape(*target.shape[:2], -1)
    make = random_states if search is False else quiet_states
    return make(len(sequences), sequences.shape[1], coding, seed).reshape(*target.shape[:2], -1)


def qtip_tensors(
    name: str, weight: np.ndarray, coding: Coding, *, layout: str = "row-major", tile: tuple[int, int] = (16, 16),
    rcp: int | None = None, tp_rank: int = 8, tuned: bool = False, dtype: Any = np.float32, flat: bool = False,
    search: bool | None = True, seed: int = 0,
) -> tuple[dict[str, np.ndarray], np.ndarray]:  # fmt: skip
    """A module's tensors, and the float64 matrix that they encode.

    tuned   SU and SV are not +-1, as after end-to-end tuning
    search  False: the codes are random, so they approximate no given weight; None: likewise, of small values
    """
    rng = np.random.default_rng(seed)
    out, columns = weight.shape
    u_in = transform(columns, tp_rank if rcp == 1 else 1)
    u_out = transform(out, tp_rank if rcp == 2 else 1)
    su = rng.choice([-1.0, 1.0], columns) * (rng.uniform(0.8, 1.2, columns) if tuned else 1)
    sv = rng.choice([-1.0, 1.0], out) * (rng.uniform(0.8, 1.2, out) if tuned else 1)
    book = coding.table()
    rotated = u_out.T @ (weight / sv[:, None] / su) @ u_in
    scale = np.sqrt(np.square(rotated).mean() / np.square(book).mean()) / SCALE_OVERRIDE
    if rcp == 1:
        su = su * scale
    else:
        sv = sv * scale
    su, sv = su.astype(dtype), sv.astype(dtype)
    height, width = tile
    places = positions(layout, height, width)
    target = tiles_of(rotated / scale, places, height, width)
    states = _searched(target, coding, search, seed)
    hat = matrix_of(book[states].reshape(target.shape), places, height, width)
    meant = sv.astype(float)[:, None] * (u_out @ hat @ u_in.T) * su.astype(float)
    bits = stream_bits(states, coding, ends=False)
    if layout == "swizzled":
        stored = np.packbits(bits, axis=-1)
        pairs = stored.reshape(out // 32, 2, columns // 32, 2, 32, -1)[..., ::-1]
        trellis = np.ascontiguousarray(pairs.transpose(0, 2, 4, 3, 1, 5)).reshape(-1).view(np.int16)
    else:
        trellis = np.packbits(bits, axis=-1).reshape(-1).view(">u2").astype(np.uint16).view(np.int16)
    tensors = {
        "trellis": trellis if flat else trellis.reshape(bits.shape[0] * bits.shape[1], -1),
        "SU": su,
        "SV": sv,
    }
    if coding.tlut is not None:
        tensors["tlut"] = coding.tlut.astype(np.float16)
    if rcp is not None:
        tensors |= {"rcp": np.array(rcp, np.int64), "tp_rank": np.array(tp_rank, np.int64)}
    return {f"{name}.{part}": values for part, values in tensors.items()}, meant


def exl3_tensors(
    name: str, weight: np.ndarray, coding: Coding, *, legacy: bool = False, search: bool = True, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Likewise of EXL3; the matrix is padded to multiples of 128 with what comes of zeros."""
    rng = np.random.default_rng(seed)
    out, columns = weight.shape
    padded = np.zeros((-(-out // 128) * 128, -(-columns // 128) * 128))
    padded[:out, :columns] = weight
    u_in, u_out = (np.kron(np.eye(size // 128), sylvester(128)) / np.sqrt(128) for size in padded.T.shape)
    suh, svh = rng.choice([-1.0, 1.0], padded.shape[1]), rng.choice([-1.0, 1.0], padded.shape[0])
    book = coding.table()
    rotated = u_out.T @ (padded * svh[:, None] * suh) @ u_in
    scale = np.sqrt(np.square(rotated).mean() / np.square(book).mean()) / SCALE_OVERRIDE
    if not legacy:
        svh = (svh * scale).astype(np.float16)
        suh = suh.astype(np.float16)
    places = positions("exl3")
    target = tiles_of(rotated / scale, places, 16, 16)
    states = _searched(target, coding, search, seed)
    hat = matrix_of(book[states].reshape(target.shape), places, 16, 16)
    meant = svh.astype(float)[:, None] * (u_out @ hat @ u_in.T) * suh.astype(float)
    bits = stream_bits(states, coding, ends=True).transpose(1, 0, 2)  # tiles along in come first
    words = np.packbits(bits, axis=-1).view(">u4").astype("<u4").view(np.int16)
    tensors = {"trellis": np.ascontiguousarray(words)}
    if legacy:
        tensors |= {part: _sign_fields(signs) for part, signs in (("su", suh), ("sv", svh))}
    else:
        tensors |= {"suh": suh, "svh": svh}
    if coding.mode in ("mcg", "mul1"):
        tensors[coding.mode] = np.array(coding.multiplier, np.uint32).view(np.int32)
    return {f"{name}.{part}": values for part, values in tensors.items()}, meant[:out, :columns]


def _sign_fields(signs: np.ndarray) -> np.ndarray:
    bits = (signs < 0).reshape(-1, 16)
    return (bits << np.arange(16)).sum(1).astype(np.uint16).view(np.int16)


def plain_tensors(
    name: str, shape: tuple[int, int], coding: Coding, td: tuple[int, int] = (16, 16), scale: float = 32.0,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], np.ndarray]:  # fmt: skip
    """The guide's layout with random states, and its matrix [out, in]."""
    rng = np.random.default_rng(seed)
    out, columns = shape
    td_x, td_y = td
    blocks = (columns // td_x) * (out // td_y)
    states = rng.integers(0, 2**coding.L, (blocks, td_x * td_y // coding.V)).astype(np.int32)
    values = coding.table()[states].reshape(columns // td_x, out // td_y, td_x, td_y)
    hat = values.transpose(0, 2, 1, 3).reshape(columns, out).astype(float)
    su, sv = rng.choice([-1.0, 1.0], columns), rng.choice([-1.0, 1.0], out) * rng.uniform(0.001, 0.002, out)
    su, sv = su.astype(np.float32), sv.astype(np.float32)
    tensors = {"trellis": states, "SU": su, "SV": sv}
    if coding.tlut is not None:
        tensors["tlut"] = coding.tlut
    meant = (su.astype(float)[:, None] * hat * sv * scale).T
    return {f"{name}.{part}": values for part, values in tensors.items()}, meant


# whole checkpoints

QTIP = {
    "codebook": "bitshift", "codebook_version": 0, "L": 16, "K": 2, "V": 1, "tlut_bits": 0, "decode_mode": "1mad",
    "td_x": 16, "td_y": 16, "split_for_tp": False, "skip_list": [],
}  # fmt: skip
EXL3 = {"quant_method": "exl3", "version": "0.0.1", "bits": 2.0, "head_bits": 6}


def write_trellis(
    folder: Path,
    model_folder: Path,
    encode: Callable[[str, np.ndarray, int], tuple[dict[str, np.ndarray], np.ndarray] | None],
    said: dict[str, Any],
    modules: str = LINEAR.pattern,
) -> dict[str, np.ndarray]:
    """A checkpoint of a float model's folder; what the coded modules stand for. `said` goes into config.json.

    encode(name, weight, number)  a module's tensors and its matrix; None to leave it as it is
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for number, (name, weight) in enumerate(load_floats(model_folder).items()):
        module = name.removesuffix(".weight")
        coded = encode(module, weight, number) if re.match(modules, module) and weight.ndim == 2 else None
        if coded is None:
            tensors[name] = weight.astype(np.float16)
        else:
            tensors |= coded[0]
            meant[module] = coded[1]
    for source in model_folder.iterdir():
        if source.is_file() and source.suffix != ".safetensors" and source.name != "config.json":
            shutil.copyfile(source, folder / source.name)
    config = json.loads((model_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    save_sharded(folder, tensors)
    return meant
