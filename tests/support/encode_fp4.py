"""Checkpoints of 4-bit floats for tests, written in plain numpy, independent of the readers.

Each `write_...` rounds a model folder's linears to nearest, writes a whole checkpoint folder and returns the weights
that it stored, float32 by module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.encode import LINEAR, pack_stream, quantize, write_model
from tests.support.encode_compressed import config, float8_tensors, packed_tensors, scheme
from tests.support.raw import Raw, edit_raw

Arrays = dict[str, np.ndarray]
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_codes(x: np.ndarray) -> np.ndarray:
    """The nearest E2M1 code of each number: a sign bit over the number of a magnitude."""
    nearest = np.abs(np.abs(x)[..., None] - _MAGNITUDES).argmin(-1)
    return (nearest | (x < 0) * 8).astype(np.uint8)


def meaning(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1, 1) * _MAGNITUDES[codes & 7]


def packed(codes: np.ndarray) -> np.ndarray:
    """Two a byte, the first in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """(codes [out, in], bits of E4M3 [out, in/16], scale of the tensor, weights) of a matrix."""
    x = weight.reshape(len(weight), -1, 16).astype(np.float64)
    whole = np.float32(np.abs(x).max() / (6 * 448))
    scales = torch.from_numpy(np.abs(x).max(-1) / 6 / whole).to(torch.float8_e4m3fn)
    each = scales.float().numpy().astype(np.float64)[..., None] * whole
    codes = to_codes(np.divide(x, each, out=np.zeros_like(x), where=each != 0)).reshape(weight.shape)
    # a product of E2M1 and E4M3 is exact in float32; the tensor's scale rounds it once
    values = meaning(codes).reshape(x.shape) * scales.float().numpy()[..., None]
    return codes, scales.view(torch.uint8).numpy(), whole, (values.astype(np.float32) * whole).reshape(weight.shape)


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [out, in], bits of E8M0 [out, in/32], weights) of a matrix."""
    x = weight.reshape(len(weight), -1, 32).astype(np.float64)
    exponents = np.floor(np.log2(np.maximum(np.abs(x).max(-1), 1e-30))).astype(int) - 2
    codes = to_codes(np.ldexp(x, -exponents[..., None])).reshape(weight.shape)
    values = np.ldexp(meaning(codes).reshape(x.shape), exponents[..., None])
    return codes, (exponents + 127).astype(np.uint8), values.reshape(weight.shape).astype(np.float32)


def label_scales(folder: Path) -> None:
    """Bytes become F8_E4M3, a dtype that numpy lacks: NVFP4's scales, and the weights of names that hold fp8."""

    def relabel(tensors: Raw) -> None:
        for name, (entry, _) in tensors.items():
            if entry["dtype"] == "U8" and name.endswith((".weight_scale", ".fp8")):
                entry["dtype"] = "F8_E4M3"
        for name in [n for n in tensors if n.endswith(".fp8")]:
            tensors[name.removesuffix(".fp8")] = tensors.pop(name)

    edit_raw(folder / "model.safetensors", relabel)


def modelopt_tensors(name: str, weight: np.ndarray, inputs: bool = True) -> tuple[Arrays, np.ndarray]:
    """NVFP4 as ModelOpt has it: the tensor's scale multiplies."""
    codes, scales, whole, values = nvfp4(weight)
    tensors = {
        f"{name}.weight": packed(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": np.array(whole),
    }
    return tensors | ({f"{name}.input_scale": np.array(np.float32(0.02))} if inputs else {}), values


def compressed_tensors(name: str, weight: np.ndarray, inputs: bool = True) -> tuple[Arrays, np.ndarray]:
    """NVFP4 as compressed-tensors has it: the tensor's scale, a whole number's power of two here, divides."""
    codes, scales, whole, _ = nvfp4(weight)
    whole = np.float32(2.0 ** np.round(np.log2(whole)))  # whose reciprocal is exact
    tensors = {
        f"{name}.weight_packed": packed(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": np.array([1 / whole], np.float32),
    }
    values = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy().repeat(16, 1)
    if inputs:
        tensors[f"{name}.input_global_scale"] = np.array([64], np.float32)
    return tensors, (meaning(codes) * values).astype(np.float32) * whole


def compressed_mxfp4(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    codes, scales, values = mxfp4(weight)
    return {f"{name}.weight_packed": packed(codes), f"{name}.weight_scale": scales}, values


def gpt_oss_tensors(folder: str, gate_up: np.ndarray, down: np.ndarray) -> tuple[Arrays, Arrays]:
    """A layer's experts, gate_up [experts, 2 * out, in] with gate and up row by row in turn; and what they mean."""
    tensors, meant = {}, {}
    for what, stack in (("gate_up_proj", gate_up), ("down_proj", down)):
        codes, scales, meant[what] = mxfp4(stack.reshape(-1, stack.shape[-1]))
        tensors[f"{folder}.{what}_blocks"] = packed(codes).reshape(*stack.shape[:2], -1, 16)
        tensors[f"{folder}.{what}_scales"] = scales.reshape(*stack.shape[:2], -1)
        meant[what] = meant[what].reshape(stack.shape)
    return tensors, meant


# whole checkpoints


def _write(
    folder: Path,
    model_folder: Path,
    said: dict[str, Any],
    module: Callable[[str, np.ndarray], tuple[Arrays, np.ndarray]],
    chosen: Callable[[str], object] = LINEAR.match,
    label: bool = True,
) -> Arrays:
    stored: Arrays = {}

    def quantized(name: str, weight: np.ndarray) -> Arrays | None:
        if not chosen(name):
            return None
        tensors, stored[name] = module(name, weight)
        return tensors

    write_model(folder, model_folder, quantized, said, None, 1)
    if label:
        label_scales(folder)
    return stored


def write_modelopt(folder: Path, model_folder: Path, algorithm: str = "NVFP4", head: bool = False) -> Arrays:
    """ModelOpt's NVFP4, with a quantized key-value cache; `head`: the output head too."""

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        tensors, values = modelopt_tensors(name, weight, inputs=algorithm == "NVFP4")
        if name.endswith(".k_proj"):
            tensors[f"{name}.k_scale"] = np.array(np.float32(1))
        return tensors, values

    said = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16}
    return _write(folder, model_folder, said, module, lambda n: LINEAR.match(n) or (head and n == "lm_head"))


def write_modelopt_mixed(folder: Path, model_folder: Path) -> Arrays:
    """NVFP4, but attention in FP8, as hf_quant_config.json says layer by layer. Returns the NVFP4 ones."""
    stored: Arrays = {}

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        if ".self_attn." in name:
            tensors, values = float8_tensors(name, weight, weight.shape)
            return {f"{name}.weight.fp8": tensors[f"{name}.weight"], f"{name}.weight_scale": np.array(
                tensors[f"{name}.weight_scale"].reshape(())
            )}, values  # fmt: skip
        tensors, stored[name] = modelopt_tensors(name, weight)
        return tensors, stored[name]

    written = _write(folder, model_folder, {}, module)
    layers = {name: {"quant_algo": "NVFP4" if name in stored else "FP8"} for name in written}
    said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    return stored


def fp4_scheme(kind: str, *targets: str, **more: Any) -> dict[str, Any]:
    """One of config_groups."""
    size, strategy = (16, "tensor_group") if kind == "nvfp4" else (32, "group")
    return scheme(4, strategy, size, targets or ("Linear",), type="float", format=f"{kind}-pack-quantized", **more)


def write_compressed(folder: Path, model_folder: Path, kind: str) -> Arrays:
    """nvfp4- or mxfp4-pack-quantized."""
    module = compressed_tensors if kind == "nvfp4" else compressed_mxfp4
    said = config(fp4_scheme(kind), form=f"{kind}-pack-quantized")
    return _write(folder, model_folder, said, module, label=kind == "nvfp4")


def write_compressed_mixed(folder: Path, model_folder: Path) -> tuple[Arrays, Arrays]:
    """Three config groups: attention NVFP4, down_proj FP8, the others 4-bit integers.

    Returns what is in codes, and the others.
    """
    floats: Arrays = {}

    def module(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        if ".self_attn." in name:
            return compressed_tensors(name, weight)
        if name.endswith(".down_proj"):
            tensors, floats[name] = float8_tensors(name, weight, (1, 1 << 20))
            return {f"{name}.weight.fp8": tensors[f"{name}.weight"]} | {
                f"{name}.weight_scale": tensors[f"{name}.weight_scale"]
            }, floats[name]
        q = quantize(weight, 4, 128, True)
        return packed_tensors(name, q, 4, None), q.dequantize()

    said = config(
        fp4_scheme("nvfp4", "re:.*self_attn.*"),
        scheme(8, "channel", None, ("re:.*down_proj",), type="float", format="float-quantized"),
        scheme(4, "group", 128, ("re:.*(gate|up)_proj",), format="pack-quantized"),
        form="mixed-precision",
    )
    stored = _write(folder, model_folder, said, module)
    return {n: v for n, v in stored.items() if n not in floats}, floats


def write_auto_round_fp4(folder: Path, model_folder: Path, kind: str) -> Arrays:
    """auto-round's own packing of nvfp4 or mxfp4."""
    module = compressed_tensors if kind == "nvfp4" else compressed_mxfp4
    said = {
        "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4, "sym": True,
        "group_size": 16 if kind == "nvfp4" else 32, "data_type": "nv_fp" if kind == "nvfp4" else "mx_fp",
        "act_bits": 16, "autoround_version": "0.16.1",
    }  # fmt: skip
    return _write(folder, model_folder, said, module, label=kind == "nvfp4")


def mlx_fp4_tensors(name: str, weight: np.ndarray, mode: str) -> tuple[Arrays, np.ndarray]:
    """A module in mlx's mode mxfp4 or nvfp4, which has no scale of the whole tensor."""
    if mode == "mxfp4":
        codes, scales, values = mxfp4(weight)
    else:
        codes, scales, _, _ = nvfp4(weight)
        each = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy().repeat(16, 1)
        values = (meaning(codes) * each).astype(np.float32)
    return {f"{name}.weight": pack_stream(codes, 4, "uint32"), f"{name}.scales": scales}, values


def write_mlx_fp4(folder: Path, model_folder: Path, mode: str) -> Arrays:
    """mlx-lm: every matrix, embeddings too."""
    said = {"group_size": 32 if mode == "mxfp4" else 16, "bits": 4, "mode": mode}
    stored = _write(folder, model_folder, said, lambda n, w: mlx_fp4_tensors(n, w, mode), lambda n: True, label=False)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization": said}))
    return stored
