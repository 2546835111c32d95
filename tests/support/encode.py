"""Checkpoints for tests, written in plain numpy: packing code independent of the readers.

`write_gptq` and `write_awq` quantize a model folder's linears by rounding to nearest and write a whole
checkpoint folder; they return what they stored, so that a test can compare. The packing functions
work on arrays.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
LINEAR = re.compile(
    r".*\.((q|k|v|o|in|out|gate|up|down|qkv|gate_up|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|w([123]|q_a|q_b|kv|o_a|o_b)|c_attn|c_fc|c_proj"
    r"|query_key_value|dense(_h_to_4h|_4h_to_h)?)$"
)


@dataclass
class Quantized:
    """What was stored: codes [out, in], scales fp16 and zeros [out, G], group [in] of each column."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray

    def dequantize(self) -> np.ndarray:
        scales = self.scales.astype(np.float32)[:, self.group]
        return scales * (self.codes.astype(np.float32) - self.zeros[:, self.group])


def load_floats(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a folder's model.safetensors: floats as float32 (F16, BF16 and F32), integers as they are."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        first, stop = entry["data_offsets"]
        raw = data[start + first : start + stop]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("I64", "BOOL"):
            values = np.frombuffer(raw, {"I64": np.int64, "BOOL": np.bool_}[entry["dtype"]])
        else:
            values = np.frombuffer(raw, {"F16": np.float16, "F32": np.float32}[entry["dtype"]]).astype(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def halves(values: np.ndarray) -> np.ndarray:
    """Floats as float16, integers as they are."""
    return values if values.dtype.kind in "ib" else values.astype(np.float16)


def quantize(weight: np.ndarray, bits: int, group_size: int, sym: bool, desc_act: bool = False) -> Quantized:
    """Round a float matrix [out, in] to the nearest codes; with desc_act, groups go by column norm."""
    out, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    group = np.arange(columns) // size
    if desc_act:
        order = np.argsort(-np.square(weight).sum(0), kind="stable")
        group[order] = np.arange(columns) // size
    top = 2**bits - 1
    scales = np.zeros((out, groups), np.float16)
    zeros = np.zeros((out, groups), np.int64)
    for g in range(groups):
        part = weight[:, group == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[:, g] = np.maximum((high - low) / top, 1e-4)
        zeros[:, g] = 2 ** (bits - 1) if sym else np.clip(np.rint(-low / scales[:, g]), 0, top)
    codes = np.rint(weight / scales.astype(np.float32)[:, group]) + zeros[:, group]
    return Quantized(np.clip(codes, 0, top).astype(np.uint8), scales, zeros, group)


# packing


def pack_stream(codes: np.ndarray, bits: int, dtype: str = "int32") -> np.ndarray:
    """[rows, n] -> words of `dtype` [rows, n*bits/width], least significant bit first, padded with zeros."""
    width = np.dtype(dtype).itemsize * 8
    lanes = codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    stream = lanes.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % width)))
    return np.packbits(stream, axis=1, bitorder="little").view(dtype)


def pack_planar(codes: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> int32 [rows, n*bits/32]: of each 32 codes the low plane's words, then the next plane's."""
    rows, n = codes.shape
    words = []
    for block in range(0, n, 32):
        shift = 0
        for width in PLANES[bits]:
            for i in range(width):
                part = codes[:, block + i * 32 // width : block + (i + 1) * 32 // width].astype(np.uint64) >> shift
                part &= 2**width - 1
                words.append((part << (np.arange(32 // width, dtype=np.uint64) * width)).sum(1, dtype=np.uint64))
            shift += width
    return np.stack(words, 1).astype(np.uint32).view(np.int32).reshape(rows, -1)


def pack_zeros_v1(zeros: np.ndarray, bits: int, dtype: str = "int32", constant_bits: int = 0) -> np.ndarray:
    """GPTQModel's v1: [G, out] true zero points; ones are subtracted from whole words (3 bits: per code)."""
    constant_bits = constant_bits or bits
    if constant_bits == 3:
        return pack_stream((zeros - 1) & 7, 3, dtype)
    words = pack_stream(zeros, bits, dtype).view(f"u{np.dtype(dtype).itemsize}")
    ones = int(("0" * (constant_bits - 1) + "1") * (words.dtype.itemsize * 8 // constant_bits), 2)
    return (words - words.dtype.type(ones)).view(dtype)


def pack_zeros_old_3bit(zeros: np.ndarray) -> np.ndarray:
    """GPTQModel's 3-bit v1 before 7.0.0: constants in the wrong order."""
    words = pack_stream(zeros, 3).view(np.uint32)
    constants = np.array([0x24924924, 0x92492492, 0x49249249], np.uint32)
    return (words - np.tile(constants, words.shape[1] // 3)).view(np.int32)


def pack_zeros_autogptq(zeros: np.ndarray, bits: int) -> np.ndarray:
    """AutoGPTQ's v1 for 2, 4 and 8 bits: z - 1 in 32 bits, ORed into the word without a mask."""
    lanes = 32 // bits
    minus = (zeros - 1).astype(np.uint32).reshape(len(zeros), -1, lanes)
    words = np.zeros(minus.shape[:2], np.uint32)
    for lane in range(lanes):
        words |= minus[:, :, lane] << np.uint32(bits * lane)
    return words.view(np.int32)


def gptq_tensors(
    name: str,
    q: Quantized,
    bits: int,
    checkpoint_format: str = "gptq",
    pack_dtype: str = "int32",
    planar: bool = False,
    zeros: np.ndarray | None = None,
    g_idx: bool = True,
) -> dict[str, np.ndarray]:
    """A GPTQ module's tensors; `zeros` overrides the packed qzeros."""
    if planar:
        weight, packed = pack_planar(q.codes, bits), pack_planar(q.zeros.T, bits)
    else:
        weight = pack_stream(q.codes, bits, pack_dtype)
        v1 = checkpoint_format == "gptq"
        packed = pack_zeros_v1(q.zeros.T, bits, pack_dtype) if v1 else pack_stream(q.zeros.T, bits, pack_dtype)
    tensors = {
        f"{name}.qweight": np.ascontiguousarray(weight.T),
        f"{name}.qzeros": packed if zeros is None else zeros,
        f"{name}.scales": np.ascontiguousarray(q.scales.T),
    }
    if g_idx:
        tensors[f"{name}.g_idx"] = q.group.astype(np.int32)
    return tensors


def awq_tensors(
    name: str, q: Quantized, group_size: int, version: str = "gemm", bits: int = 4
) -> dict[str, np.ndarray]:
    """An AWQ module's tensors in the gemm, gemv or gemv_fast layout, or llm-awq's names for the last."""
    out, columns = q.codes.shape
    if version == "gemm":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        shuffled = (a.reshape(len(a), -1, 8)[:, :, order].reshape(len(a), -1) for a in (q.codes.T, q.zeros.T))
        weight, zeros = (pack_stream(a, bits) for a in shuffled)
        return {f"{name}.qweight": weight, f"{name}.qzeros": zeros, f"{name}.scales": q.scales.T.copy()}
    groups = q.scales.shape[1]
    multiple = 1 if group_size == -1 or group_size >= 128 else 2 if group_size >= 64 else 4
    stored = -(-groups // (8 * multiple)) * multiple * 8
    scales, zeros = (np.pad(a, ((0, 0), (0, stored - groups))) for a in (q.scales, q.zeros))
    if version == "gemv":
        return {
            f"{name}.qweight": pack_stream(q.codes, 4),
            f"{name}.qzeros": pack_stream(zeros, 4),
            f"{name}.scales": scales,
        }
    # llm-awq's packing for its kernel: pairs dealt to four threads, even before odd, four rows interleaved
    codes = q.codes.reshape(out, columns // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    codes = codes.reshape(out, columns // 32, 4, 4, 2).transpose(0, 1, 2, 4, 3)
    codes = codes.reshape(out // 4, 4, columns // 64, 64).transpose(0, 2, 1, 3).reshape(out // 4, columns * 4)
    zero = "scaled_zeros" if version == "llm-awq" else "qzeros"
    return {
        f"{name}.qweight": pack_stream(codes, 4, "int16"),
        f"{name}.{zero}": -(scales.astype(np.float32) * zeros).T.astype(np.float16),
        f"{name}.scales": scales.T.copy(),
    }


# whole checkpoints


def write_model(
    folder: Path,
    model_folder: Path,
    quantized: Callable[[str, np.ndarray], dict[str, np.ndarray] | None],
    config: dict[str, Any],
    file: str | None,
    shards: int,
) -> None:
    """Replace each linear's weight by what `quantized` makes of it; everything else is kept, in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in load_floats(model_folder).items():
        module = name.removesuffix(".weight")
        new = quantized(module, weight) if name.endswith(".weight") and weight.ndim == 2 else None
        tensors |= new if new is not None else {name: halves(weight)}
    for source in model_folder.iterdir():
        if source.is_file() and source.suffix != ".safetensors" and source.name != "config.json":
            shutil.copyfile(source, folder / source.name)
    model_config = json.loads((model_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_config, "quantization_config": config}, indent=1))
    if file:
        (folder / file).write_text(json.dumps(config, indent=1))
    save_sharded(folder, tensors, shards)


def save_sharded(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """model.safetensors, or several of them with their index."""
    tensors = {name: np.asarray(values, order="C") for name, values in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({n: tensors[n] for n in names}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray], quantization: dict[str, Any] | None, shards: int = 1
) -> Path:
    """A folder of just these tensors, with a config.json of just this quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    save_sharded(folder, tensors, shards)
    return folder


def write_gptq(
    folder: Path,
    model_folder: Path,
    bits: int = 4,
    group_size: int = 128,
    sym: bool = True,
    desc_act: bool = False,
    checkpoint_format: str = "gptq",
    pack_dtype: str = "int32",
    planar: bool = False,
    *,
    quantizer: str | None = "gptqmodel:7.6.0",
    label: str | None = None,
    g_idx: bool = True,
    lm_head: bool = False,
    module_bits: Callable[[str], int | None] | None = None,
    shards: int = 1,
) -> dict[str, Quantized]:
    """A GPTQ checkpoint of the model in `model_folder`; what was stored, by module.

    checkpoint_format   what is written: gptq (z - 1), gptq_v2 or gptq_p (z); `label` is what is claimed
    planar              split-plane words, as checkpoint_format gptq_p implies
    module_bits         bits of single modules, None to leave one unquantized; the others have `bits`
    """
    planar = planar or checkpoint_format == "gptq_p"
    if planar:
        checkpoint_format = "gptq_p"
    stored: dict[str, Quantized] = {}
    dynamic: dict[str, Any] = {}
    # GPTQModel before 7.3.2 subtracted the constant of the default bits whatever a module's own
    default_constant = quantizer is not None and tuple(map(int, quantizer.split(":")[1].split("."))) < (7, 3, 2)

    def quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if not LINEAR.match(name) and not (lm_head and name == "lm_head"):
            return None
        own = module_bits(name) if module_bits else bits
        if own is None:
            dynamic[f"-:{re.escape(name)}"] = {}
            return None
        if own != bits:
            dynamic[f"+:{re.escape(name)}"] = {"bits": own}
        q = stored[name] = quantize(weight, own, group_size, sym, desc_act)
        zeros = None
        if checkpoint_format == "gptq" and default_constant:
            zeros = pack_zeros_v1(q.zeros.T, own, pack_dtype, bits)
        return gptq_tensors(name, q, own, checkpoint_format, pack_dtype, planar, zeros, g_idx)

    config: dict[str, Any] = {
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "lm_head": lm_head,
        "quant_method": "gptq",
        "checkpoint_format": label or checkpoint_format,
        "pack_dtype": pack_dtype,
        "dynamic": dynamic,
    }
    if quantizer:
        config["meta"] = {"quantizer": [quantizer]}
    write_model(folder, model_folder, quantized, config, "quantize_config.json", shards)
    return stored


def write_awq(
    folder: Path,
    model_folder: Path,
    version: str = "gemm",
    group_size: int = 128,
    *,
    skip: tuple[str, ...] = (),
    shards: int = 1,
) -> dict[str, Quantized]:
    """An AWQ checkpoint of the model in `model_folder` (no channel scaling); what was stored, by module."""
    stored: dict[str, Quantized] = {}

    def quantized(name: str, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if not LINEAR.match(name) or any(part in name for part in skip):
            return None
        q = stored[name] = quantize(weight, 4, group_size, sym=False)
        return awq_tensors(name, q, group_size, version)

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": list(skip) or None,
    }
    write_model(folder, model_folder, quantized, config, None, shards)
    return stored
