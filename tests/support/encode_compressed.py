"""compressed-tensors and FP8 checkpoints for tests, written in plain numpy, independent of the readers.

`quantize` of `encode` makes the codes; here they are laid out as llm-compressor has laid them out over the years.
8-bit floats are rounded by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.encode import LINEAR, Quantized, pack_stream, quantize, write_model
from tests.support.raw import Raw, edit_raw

Arrays = dict[str, np.ndarray]


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> int32 [rows, n / (32 // bits)]: no code crosses a word (before May 2026)."""
    lanes = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % lanes))).astype(np.uint32).reshape(len(codes), -1, lanes)
    return (padded << np.arange(lanes, dtype=np.uint32) * np.uint32(bits)).sum(-1, dtype=np.uint32).view(np.int32)


def packed_tensors(
    name: str, q: Quantized, bits: int, zeros: str | None = "packed", by_words: bool = False, g_idx: bool = False
) -> Arrays:
    """A pack-quantized module's tensors; zeros: None (symmetric), "packed" along the rows, or "int8" as of old."""
    pack = pack_words if by_words else pack_stream
    tensors = {
        f"{name}.weight_packed": pack(q.codes, bits),
        f"{name}.weight_scale": q.scales,
        f"{name}.weight_shape": np.array(q.codes.shape, np.int64),
    }
    if zeros == "packed":
        tensors[f"{name}.weight_zero_point"] = np.ascontiguousarray(pack(q.zeros.T, bits).T)
    elif zeros == "int8":
        tensors[f"{name}.weight_zero_point"] = (q.zeros - 2 ** (bits - 1)).astype(np.int8)
    if g_idx:
        tensors[f"{name}.weight_g_idx"] = q.group.astype(np.int32)
    return tensors


def int_tensors(name: str, q: Quantized, bits: int, zeros: bool = False) -> Arrays:
    """An int-quantized (naive-quantized) module's tensors: signed bytes."""
    half = 2 ** (bits - 1)
    tensors = {
        f"{name}.weight": (q.codes.astype(np.int16) - half).astype(np.int8),
        f"{name}.weight_scale": q.scales,
    }
    if zeros:
        tensors[f"{name}.weight_zero_point"] = (q.zeros - half).astype(np.int8)
    return tensors


def float8_tensors(
    name: str, weight: np.ndarray, block: tuple[int, int], scale: str = "weight_scale"
) -> tuple[Arrays, np.ndarray]:
    """The bytes of F8_E4M3 with a scale a block (`save_float8` gives them their dtype), and the values they mean."""
    out, columns = weight.shape
    rows, width = min(block[0], out), min(block[1], columns)
    padded = np.pad(weight, ((0, -out % rows), (0, -columns % width)))
    blocks = padded.reshape(len(padded) // rows, rows, -1, width)
    scales = (np.abs(blocks).max((1, 3)) / 448).astype(np.float32)
    each = scales.repeat(rows, 0).repeat(width, 1)[:out, :columns]
    stored = torch.from_numpy(weight / each).to(torch.float8_e4m3fn)
    tensors = {f"{name}.weight": stored.view(torch.uint8).numpy(), f"{name}.{scale}": scales}
    return tensors, stored.float().numpy() * each


def save_float8(folder: Path) -> None:
    """Bytes in the folder's model.safetensors become F8_E4M3, a dtype that numpy lacks."""

    def relabel(tensors: Raw) -> None:
        for entry, _ in tensors.values():
            entry["dtype"] = entry["dtype"].replace("U8", "F8_E4M3")

    edit_raw(folder / "model.safetensors", relabel)


# configs


def scheme(
    bits: int = 4,
    strategy: str = "group",
    group_size: int | None = 128,
    targets: tuple[str, ...] = ("Linear",),
    **more: Any,
) -> dict[str, Any]:
    """One of config_groups; `more` goes to its weights, but `format` and `input_activations`."""
    group: dict[str, Any] = {k: more.pop(k) for k in ("format", "input_activations") if k in more}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size}
    return {"targets": list(targets), "weights": weights | more, **group}


def config(*schemes: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """A quantization_config."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{i}": s for i, s in enumerate(schemes)},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "transform_config": {},
        "sparsity_config": {},
        **more,
    }


# whole checkpoints: each `write_...` returns the weights that it stored, float32 by module


def _write(
    folder: Path,
    model_folder: Path,
    quantization: dict[str, Any],
    module: Callable[[str, np.ndarray], tuple[Arrays, np.ndarray]],
) -> Arrays:
    """The model in `model_folder` with its linears as `module` lays them out: tensors and values of (name, weight)."""
    stored: Arrays = {}

    def quantized(name: str, weight: np.ndarray) -> Arrays | None:
        if not LINEAR.match(name):
            return None
        tensors, stored[name] = module(name, weight)
        return tensors

    write_model(folder, model_folder, quantized, quantization, None, 1)
    return stored


def write_packed(
    folder: Path,
    model_folder: Path,
    bits: int,
    group_size: int = 128,
    sym: bool = True,
    by_words: bool = False,
    act_order: bool = False,
) -> Arrays:
    """A pack-quantized model: groups or, at group_size -1, channels."""

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        q = quantize(weight, bits, group_size, sym, act_order)
        return packed_tensors(name, q, bits, None if sym else "packed", by_words, act_order), q.dequantize()

    said = scheme(bits, "channel" if group_size == -1 else "group", group_size, symmetric=sym)
    said["weights"]["actorder"] = "group" if act_order else None
    return _write(folder, model_folder, config(said), module)


def write_experts(folder: Path, model_folder: Path) -> Arrays:
    """As Kimi K2 has it: the routed experts' weights in 4 bits, symmetric, groups of 32, with scales in BF16."""
    stored: Arrays = {}

    def quantized(name: str, weight: np.ndarray) -> Arrays | None:
        if ".mlp.experts." not in name:
            return None
        q = quantize(weight, 4, 32, True)
        q.scales = (q.scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        stored[name] = q.dequantize()
        return packed_tensors(name, q, 4, None)

    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    write_model(folder, model_folder, quantized, config(scheme(4, "group", 32), ignore=ignored), None, 1)

    def shortened(tensors: Raw) -> None:
        for name, (entry, data) in tensors.items():
            if name.endswith(".weight_scale"):
                entry["dtype"] = "BF16"
                tensors[name] = (entry, (np.frombuffer(data, np.uint32) >> 16).astype(np.uint16).tobytes())

    edit_raw(folder / "model.safetensors", shortened)
    return stored


def _int8(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    q = quantize(weight, 8, -1, True)
    return int_tensors(name, q, 8), q.dequantize()


def write_int8(folder: Path, model_folder: Path) -> Arrays:
    """W8A8: signed bytes, a scale a row."""
    acts = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    said = config(scheme(8, "channel", None, input_activations=acts), form="int-quantized")
    return _write(folder, model_folder, said, _int8)


def write_mixed(folder: Path, model_folder: Path) -> Arrays:
    """4-bit groups, but down_proj as signed bytes: two groups, each with its own format."""

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        if name.endswith("down_proj"):
            return _int8(name, weight)
        q = quantize(weight, 4, 128, False)
        return packed_tensors(name, q, 4), q.dequantize()

    groups = (
        scheme(4, format="pack-quantized", symmetric=False),
        scheme(8, "channel", None, ("re:.*down_proj",), format="int-quantized"),
    )
    return _write(folder, model_folder, config(*groups, form="mixed-precision"), module)


def write_float8(
    folder: Path, model_folder: Path, block: tuple[int, int], method: str = "compressed-tensors"
) -> Arrays:
    """An FP8 model by compressed-tensors or, with method "fp8", as DeepSeek and Qwen have it."""
    plain = method == "fp8"

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        tensors, meant = float8_tensors(name, weight, block, "weight_scale_inv" if plain else "weight_scale")
        if name.endswith(".k_proj"):  # a quantized key-value cache and static activations
            one = np.ones(1, np.float32)
            tensors |= {f"{name.removesuffix('.k_proj')}.k_scale": one, f"{name}.input_scale": one}
        return tensors, meant

    said = config(scheme(8, "block", None, type="float", block_structure=list(block)), form="float-quantized")
    if plain:
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    stored = _write(folder, model_folder, said, module)
    save_float8(folder)
    return stored


MXFP6 = config(scheme(6, "group", 32, type="float"), form="mxfp6-pack-quantized")


def e2m3(codes: np.ndarray) -> np.ndarray:
    """The floats of 6-bit codes: sign, two bits of exponent, three of mantissa."""
    exponent, mantissa = codes >> 3 & 3, (codes & 7) / 8
    sizes = np.where(exponent == 0, mantissa, 2.0 ** (exponent.astype(int) - 1) * (1 + mantissa))
    return np.where(codes & 32, -sizes, sizes)


def mxfp6_tensors(name: str, codes: np.ndarray, exponents: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """mxfp6-pack-quantized: codes 0..63 [out, in] and bytes of F8_E8M0 [out, in / 32]; and the weights."""
    bits = (codes[..., None] >> np.arange(6) & 1).astype(np.uint8).reshape(len(codes), -1)
    tensors = {f"{name}.weight_packed": np.packbits(bits, axis=1, bitorder="little"), f"{name}.weight_scale": exponents}
    return tensors, (e2m3(codes) * np.ldexp(1.0, exponents.astype(int) - 127).repeat(32, 1)).astype(np.float32)


def write_mxfp6(folder: Path, model_folder: Path) -> Arrays:
    """A model of 6-bit floats."""
    floats = e2m3(np.arange(64))
    order = np.argsort(floats, kind="stable")
    middles = (floats[order][1:] + floats[order][:-1]) / 2

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        groups = weight.astype(np.float64).reshape(len(weight), -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(2))).astype(int) - 2
        codes = order[np.searchsorted(middles, groups / np.exp2(exponents)[..., None])].reshape(weight.shape)
        return mxfp6_tensors(name, codes, (exponents + 127).astype(np.uint8))

    return _write(folder, model_folder, MXFP6, module)
