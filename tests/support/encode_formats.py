"""MLX, HQQ, Marlin and auto-round checkpoints for tests, in plain numpy; see `encode` for GPTQ and AWQ.

Each `write_...` rounds a model folder's matrices to nearest, writes a whole checkpoint folder and returns the
weights that it stored, float32 by module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.encode import LINEAR, awq_tensors, gptq_tensors, pack_stream, quantize, write_model

Tensors = dict[str, np.ndarray]


# MLX


def mlx_tensors(name: str, weight: np.ndarray, bits: int, group_size: int) -> tuple[Tensors, np.ndarray]:
    """A module as mlx quantizes it in fp16, and its values: the end of a group that is further from 0 is kept."""
    x = weight.reshape(len(weight), -1, group_size)
    low, high = x.min(-1), x.max(-1)
    below = np.abs(low) > np.abs(high)
    scales = np.where(below, 1, -1) * np.maximum((high - low) / (2**bits - 1), 1e-7)
    edge = np.where(below, low, high)
    whole = np.rint(edge / scales)
    scales = np.divide(edge, whole, out=scales, where=whole != 0).astype(np.float16)
    biases = np.where(whole == 0, 0, edge).astype(np.float16)
    s, b = (np.repeat(a.astype(np.float32), group_size, 1) for a in (scales, biases))
    codes = np.clip(np.rint((weight - b) / np.where(s == 0, 1, s)), 0, 2**bits - 1).astype(np.uint8)
    packed = pack_stream(codes, bits, "uint32")
    return {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}, s * codes + b


def write_mlx(
    folder: Path,
    model_folder: Path,
    bits: int = 4,
    group_size: int = 64,
    own: dict[str, dict[str, int] | bool] | None = None,
) -> Tensors:
    """mlx-lm: every matrix is quantized, embeddings too. `own`: settings of single modules, False for none."""
    stored: Tensors = {}
    own = own or {}

    def quantized(name: str, weight: np.ndarray) -> Tensors | None:
        settings = own.get(name, {})
        if settings is False:
            return None
        assert isinstance(settings, dict)
        tensors, stored[name] = mlx_tensors(
            name, weight, settings.get("bits", bits), settings.get("group_size", group_size)
        )
        return tensors

    config: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine", **own}
    write_model(folder, model_folder, quantized, config, None, 1)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization": config}))
    return stored


def write_mxfp8(folder: Path, model_folder: Path) -> Tensors:
    """mlx-lm's mode mxfp8: every matrix as 8-bit floats, a power of two for each 32."""
    import torch

    stored: Tensors = {}

    def quantized(name: str, weight: np.ndarray) -> Tensors | None:
        x = weight.reshape(len(weight), -1, 32)
        exponents = np.ceil(np.log2(np.maximum(np.abs(x).max(-1), 1e-30) / 448)).astype(np.int32)
        bits = torch.from_numpy(np.ldexp(x, -exponents[..., None])).to(torch.float8_e4m3fn)
        stored[name] = np.ldexp(bits.float().numpy(), exponents[..., None]).reshape(weight.shape)
        words = bits.view(torch.uint8).numpy().reshape(len(weight), -1).view(np.uint32)
        return {f"{name}.weight": words, f"{name}.scales": (exponents + 127).astype(np.uint8)}

    config = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    write_model(folder, model_folder, quantized, config, None, 1)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization": config}))
    return stored


# HQQ

_LANES = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}
_PACKING = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def hqq_tensors(
    name: str, weight: np.ndarray, bits: int, group_size: int, quantized: tuple[str, ...] = ()
) -> tuple[Tensors, np.ndarray]:
    """A module as transformers saves it (axis 1, fp16), and its values. `quantized`: which of scale and zero are."""
    x = weight.reshape(-1, group_size)
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    top = 2**bits - 1
    scale = (np.maximum(high - low, 1e-4) / top).astype(np.float16)
    zero = (-low / scale.astype(np.float32)).astype(np.float16)
    codes = np.clip(np.rint(x / scale + zero.astype(np.float32)), 0, top).astype(np.uint8)
    lanes, width = _LANES[bits], 8 if bits in (5, 6) else bits
    word = np.uint32 if bits == 3 else np.uint8
    rows = np.zeros((-(-len(codes) // lanes) * lanes, group_size), word)
    rows[: len(codes)] = codes
    packed = np.zeros((len(rows) // lanes, group_size), word)
    for i, lane in enumerate(np.split(rows, lanes)):
        packed |= lane << word(width * (lanes - 1 - i))
    tensors: Tensors = {"W_q": packed.view(np.int32) if bits == 3 else packed}
    meant = {}
    for what, values in (("scale", scale), ("zero", zero)):
        parts, meant[what] = _hqq_meta(values, what) if what in quantized else ({what: values}, values)
        tensors |= parts
    values = (codes - meant["zero"].astype(np.float32)) * meant["scale"].astype(np.float32)
    tensors |= {"shape": np.array(weight.shape), "packing": np.frombuffer(_PACKING[bits].encode(), np.uint8)}
    numbers = {"nbits": bits, "group_size": group_size, "axis": 1}
    tensors |= {key: np.array(value, np.int32) for key, value in numbers.items()}
    flags = {"view_as_float": 0, "quant_scale": "scale" in quantized, "quant_zero": "zero" in quantized}
    tensors |= {key: np.array(value, np.uint8) for key, value in (flags | {"encoded_state_dict": 1}).items()}
    return {f"{name}.{part}": values for part, values in tensors.items()}, values.reshape(weight.shape)


def _hqq_meta(values: np.ndarray, what: str) -> tuple[Tensors, np.ndarray]:
    """Scales or zero points in 256 steps, one scale and zero point for all of them, and what they amount to."""
    x = values.astype(np.float32)
    step = np.float32((x.max() - x.min()) / 255)
    zero = np.float32(-x.min() / step)
    codes = np.rint(x / step + zero).clip(0, 255).astype(np.uint8)
    meta = {"scale": np.array(step), "zero": np.array(zero), "shape": np.array(x.shape)}
    meta["packing"] = np.frombuffer(b"8bit_u8", np.uint8)
    return {f"{what}_q": codes, **{f"meta_{what}.{part}": value for part, value in meta.items()}}, (codes - zero) * step


def hqq_config(bits: int = 4, group_size: int = 64, axis: int = 1) -> dict[str, Any]:
    params = {"nbits": bits, "channel_wise": True, "group_size": group_size, "axis": axis, "view_as_float": False}
    settings = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": settings, "skip_modules": ["lm_head"]}


def write_hqq(folder: Path, model_folder: Path, bits: int = 4, group_size: int = 64) -> Tensors:
    """As transformers saves it."""
    return _write_hqq(folder, model_folder, bits, group_size)


def write_hqq_pt(folder: Path, model_folder: Path, bits: int = 4, group_size: int = 64) -> Tensors:
    """hqq's own qmodel.pt of tables within tables, zero points quantized, as was hqq's default at first."""
    import torch

    stored = _write_hqq(folder, model_folder, bits, group_size, ("zero",))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    modules: dict[str, dict[str, Any]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module = next((m for m in stored if name.startswith(f"{m}.")), name.rpartition(".")[0])
        path = name.removeprefix(f"{module}.").split(".")
        table = modules.setdefault(module, {})
        if module in stored and path[0] != "W_q":
            for key in ("meta", *path[:-1]):
                table = table.setdefault(key, {})
        if path[-1] == "packing":
            table["packing"] = values.tobytes().decode()
        elif path[-1] == "shape":
            table["shape"] = torch.Size(values.tolist())
        else:
            table[path[-1]] = torch.from_numpy(values)
    torch.save(modules, folder / "qmodel.pt")
    (folder / "model.safetensors").unlink()
    return stored


def _write_hqq(folder: Path, model_folder: Path, bits: int, group_size: int, parts: tuple[str, ...] = ()) -> Tensors:
    stored: Tensors = {}

    def quantized(name: str, weight: np.ndarray) -> Tensors | None:
        if not LINEAR.match(name):
            return None
        tensors, stored[name] = hqq_tensors(name, weight, bits, group_size, parts)
        return tensors

    write_model(folder, model_folder, quantized, hqq_config(bits, group_size), None, 1)
    return stored


# Marlin


def marlin_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [out, in] -> int32 [in/16, out*bits/2], word by word as the kernel's threads load them.

    Of each 16 x 64 piece (input, output features), thread t loads the fragments of four 16 x 16 tiles: of the left
    8 output features column t // 4, and of the right 8 the same, each at four input features.
    """
    out, columns = codes.shape
    tiles = codes.T.reshape(columns // 16, 16, out // 64, 4, 16).astype(np.uint32)  # [K, k, N, tile, n]
    words = []
    for thread in range(32):
        near = thread % 4 * 2
        for tile in range(4):
            part = tiles[:, :, :, tile]
            left, right = (
                [part[:, k, :, thread // 4 + half] for k in (near, near + 1, near + 8, near + 9)] for half in (0, 8)
            )
            if bits == 4:  # even ones of left and right in the low half word, odd ones in the high one
                nibbles = [left[0], left[2], right[0], right[2], left[1], left[3], right[1], right[3]]
                words.append(sum(v << np.uint32(4 * i) for i, v in enumerate(nibbles)))
            else:
                for a in (left, right):
                    words.append(sum(v << np.uint32(8 * i) for i, v in enumerate([a[0], a[2], a[1], a[3]])))
    return np.stack(words, -1).reshape(columns // 16, -1).astype(np.uint32).view(np.int32)


def marlin_scales(scales: np.ndarray) -> np.ndarray:
    """scales [out, G] -> [G, out] in the kernel's order."""
    rows = scales.T
    if len(rows) > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return np.ascontiguousarray(rows.reshape(len(rows), -1, len(order))[:, :, order].reshape(rows.shape))


def write_marlin(folder: Path, model_folder: Path, bits: int = 4, group_size: int = 128, awq: bool = False) -> Tensors:
    """GPTQ's Marlin (B, s) or AWQ's (qweight, scales)."""
    stored: Tensors = {}
    weight_part, scale_part = ("qweight", "scales") if awq else ("B", "s")

    def quantized(name: str, weight: np.ndarray) -> Tensors | None:
        if not LINEAR.match(name):
            return None
        q = quantize(weight, bits, group_size, sym=True)
        stored[name] = q.dequantize()
        return {
            f"{name}.{weight_part}": marlin_words(q.codes, bits),
            f"{name}.{scale_part}": marlin_scales(q.scales),
        }

    config = {"bits": bits, "group_size": group_size}
    if awq:
        config |= {"quant_method": "awq", "version": "marlin", "zero_point": False}
    else:
        config |= {"quant_method": "gptq", "checkpoint_format": "marlin", "is_marlin_format": True, "sym": True}
    write_model(folder, model_folder, quantized, config, None, 1)
    return stored


# auto-round


def write_auto_round(
    folder: Path,
    model_folder: Path,
    packing: str,
    bits: int = 4,
    group_size: int = 128,
    sym: bool = True,
    extra: dict[str, dict[str, Any]] | None = None,
    module_bits: Any = None,
) -> Tensors:
    """A `packing_format` of auto-round that holds codes; `module_bits`: name -> bits, None for a plain layer."""
    stored: Tensors = {}

    def quantized(name: str, weight: np.ndarray) -> Tensors | None:
        own = module_bits(name) if module_bits else bits
        if not LINEAR.match(name) or own is None:
            return None
        q = quantize(weight, own, group_size, sym)
        stored[name] = q.dequantize()
        if "awq" in packing:
            return awq_tensors(name, q, group_size, bits=own)
        zeros = pack_stream((q.zeros.T - ("auto_gptq" in packing)) & (2**own - 1), own)
        return gptq_tensors(name, q, own, "gptq_v2", zeros=zeros, g_idx="gptqmodel" in packing)

    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "data_type": "int",
        "autoround_version": "0.16.1",
        "extra_config": extra or {},
    }
    write_model(folder, model_folder, quantized, config, None, 1)
    return stored
