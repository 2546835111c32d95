"""Makes tests/data/tools with the tools themselves, on a CPU: quantized layers, and the values that each tool computes.

    python -m tests.support.make_tools TOOL...      (a function of this module)

Written with bitsandbytes 0.50.2, torchao 0.18, aqlm 1.1.7, hqq 0.2.8.post1, optimum-quanto 0.2.7, vptq 0.0.5,
sinq 0.2.0, fouroversix 1.0.5, auto-round 0.16.1, gptqmodel 7.7.0, nvidia-modelopt 0.47, amd-quark 0.13,
transformers 5.23 and 5.24, and torch 2.13.
Each folder has model.safetensors, config.json with the label that transformers writes, and expected.npz.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent.parent / "data" / "tools"
OUT, IN = 16, 256


def linear(bias: bool = False) -> torch.nn.Linear:
    """A layer whose weights have a few large values."""
    layer = torch.nn.Linear(IN, OUT, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(0, 0.05)
        layer.weight[:, 7] *= 8
    return layer


def save(
    name: str,
    tensors: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    label: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    held = {key: value.detach().contiguous() for key, value in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata or {"format": "pt"})
    np.savez_compressed(folder / "expected.npz", **{k: v.detach().float().numpy() for k, v in expected.items()})
    (folder / "config.json").write_text(json.dumps({"quantization_config": label}) + "\n")


def bitsandbytes() -> None:
    import bitsandbytes as bnb
    from bitsandbytes import functional

    for nested in (False, True):
        tensors, expected = {}, {}
        for kind in ("nf4", "fp4"):
            for block in (64, 128):
                name = f"{kind}.block{block}"
                packed, state = functional.quantize_4bit(
                    linear().weight.data, blocksize=block, quant_type=kind, compress_statistics=nested
                )
                expected[name] = functional.dequantize_4bit(packed, state)
                tensors[f"{name}.weight"] = packed
                tensors |= {f"{name}.weight.{part}": value for part, value in state.as_dict(packed=True).items()}
        label = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        save(f"bnb-{'nested' if nested else '4bit'}", tensors, expected, label | {"bnb_4bit_use_double_quant": nested})
    layer = linear(bias=True)
    rows = bnb.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False)
    rows.load_state_dict(layer.state_dict())
    rows(torch.ones(1, IN))  # quantizes
    state = rows.state_dict()
    tensors = {f"rows.{part}": value for part, value in state.items()}
    expected = {"rows": functional.int8_vectorwise_dequant(state["weight"], state["SCB"])}
    save("bnb-8bit", tensors, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def torchao() -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import ALLOWED_TENSORS_SUBCLASSES
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
        PerTensor,
        quantize_,
    )

    made = {
        "Float8Tensor",
        "IntxUnpackedToInt8Tensor",
        "Int8Tensor",
        "Int4TilePackedTo4dTensor",
        "MXTensor",
        "NVFP4Tensor",
    }
    by_hand = {"Int4Tensor", "Int4PlainInt32Tensor"}  # in tests/checkpoint/test_torchao.py
    assert {*ALLOWED_TENSORS_SUBCLASSES} == made | by_hand, "torchao saves another class"
    configs = {f"intx{b}": IntxWeightOnlyConfig(getattr(torch, f"int{b}"), PerGroup(64)) for b in (2, 3, 4, 6)}
    configs["intx4.rows"] = IntxWeightOnlyConfig(torch.int4, PerAxis(0))
    configs |= {f"int8.{n}": Int8WeightOnlyConfig(granularity=PerTensor()) for n in ("tensor",)}
    configs |= {"int8.rows": Int8WeightOnlyConfig(), "float8.rows": Float8WeightOnlyConfig()}
    held, expected = {}, {}
    for name, config in configs.items():
        model = torch.nn.Sequential(linear(bias=name == "intx4"))
        quantize_(model, config)
        held |= {f"{name}.{part}": value for part, value in model[0].state_dict().items()}
        expected[name] = model[0].weight.dequantize()
    for name, weight in torchao_weights().items():
        held[f"{name}.weight"] = weight
        expected[name] = weight.dequantize(torch.float32) if hasattr(weight, "elem_dtype") else weight.dequantize()
    held["tiles.weight"], expected["tiles"] = torchao_tiles()
    tensors, metadata = flatten_tensor_state_dict(held)
    label = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {}}}}
    save("torchao", tensors, expected, label, metadata)


def torchao_weights() -> dict[str, Any]:
    """MX and NVFP4 tensors, with scales in rows and in tiles."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    found = {}
    for tiles in (False, True):
        end = ".tiles" if tiles else ""
        for kind, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
            found[kind + end] = MXTensor.to_mx(linear().weight.data, dtype, is_swizzled_scales=tiles)
        weight = linear().weight.data
        whole = per_tensor_amax_to_scale(weight.abs().max()) if tiles else None
        found["nvfp4" + end] = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole, is_swizzled_scales=tiles)
    return found


def torchao_tiles() -> tuple[Any, torch.Tensor]:
    """A weight in tinygemm's tiles, which PyTorch packs on GPUs alone: the steps of its kernel, lane by lane."""
    from torchao.quantization import Int4TilePackedTo4dTensor
    from torchao.quantization.utils import (
        get_groupwise_affine_qparams,
        groupwise_affine_dequantize_tensor_from_qparams,
        groupwise_affine_quantize_tensor_from_qparams,
        pack_tinygemm_scales_and_zeros,
    )

    out, wide = OUT, 1024  # as padded
    weight = torch.zeros(out, wide)
    weight[:, :IN] = linear().weight.data
    scales, zeros = get_groupwise_affine_qparams(weight, 4, 64, torch.float32)
    stored = groupwise_affine_quantize_tensor_from_qparams(weight, scales, zeros, 4, 64).int()
    if stored.shape[1] == wide // 2:  # two codes a byte, the first in the high nibble
        stored = torch.stack([stored >> 4, stored & 15], 2).reshape(out, wide)
    words = torch.zeros(out // 8, wide // 128, 32, 4, dtype=torch.int64)
    for tile in range(out // 8):
        for outer in range(wide // 128):
            for lane in range(32):
                for word in range(4):
                    row, base = 8 * tile + lane // 4, 128 * outer + 32 * word
                    columns = [base + lane % 4 * 2 + 8 * g + h for h in range(2) for g in range(4)]
                    for i, column in enumerate(columns):
                        words[tile, outer, lane, word] |= int(stored[row, column]) << 4 * i
    pairs = pack_tinygemm_scales_and_zeros(scales, zeros, torch.float32)
    packed = torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))
    meant = groupwise_affine_dequantize_tensor_from_qparams(stored, scales, zeros, 4, 64)
    shape = torch.Size((out, IN))
    return Int4TilePackedTo4dTensor(packed, pairs, [1, 64], shape), meant[:, :IN]


def fouroversix() -> None:
    """Its own PyTorch quantizer; the layer's tensors are those of FourOverSixLinear."""
    from fouroversix.quantize import dequantize, quantize
    from fouroversix.quantize.config import QuantizationConfig

    for kind, rule in (("nvfp4", "mse"), ("nvfp4", "static_4"), ("nvfp4", "static_6"), ("mxfp4", "static_6")):
        tensors, expected = {}, {}
        for out, wide in ((OUT, IN), (136, 160)):
            name = f"out{out}"
            weight = torch.randn(out, wide) * 0.05
            config = QuantizationConfig(dtype=kind, scale_rule=rule, backend="pytorch")
            packed = quantize(weight, config)
            values = {
                "values": packed.values, "scale_factors": packed.scale_factors, "amax": packed.amax.float().reshape(1),
                "metadata": torch.tensor([out, wide, *packed.padded_shape, 1, 1], dtype=torch.int32),
            }  # fmt: skip
            tensors |= {f"{name}.quantized_weight_{part}": value for part, value in values.items()}
            expected[name] = dequantize(packed, torch.float32, intermediate_dtype=torch.float32)[:out, :wide]
        label = {"quant_method": "fouroversix", "dtype": kind, "scale_rule": rule}
        save(f"fouroversix-{kind}-{rule}", tensors, expected, label)


def metal() -> None:
    from transformers.integrations.metal_quantization import _affine_dequantize_tensor, _affine_quantize_tensor

    for bits in (2, 4, 8):
        weight, scales, offsets = _affine_quantize_tensor(linear().weight.data, 64, bits)
        scales, offsets = scales.half(), offsets.half()
        tensors = {"layer.weight": weight, "layer.scales": scales, "layer.qbiases": offsets}
        expected = {"layer": _affine_dequantize_tensor(weight, scales, offsets, 64, bits)}
        save(f"metal-{bits}", tensors, expected, {"quant_method": "metal", "bits": bits, "group_size": 64})


def aqlm() -> None:
    """Random codes and vectors: the trainer needs a model and a GPU."""
    from aqlm import QuantizedLinear
    from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

    tensors, expected = {}, {}
    for og, count, bits in ((1, 1, 6), (1, 2, 8), (2, 2, 9), (1, 1, 10)):
        layer = QuantizedLinear(IN, OUT, 8, og, count, bits, bias=bits == 8, dtype=torch.float16)
        for values in (layer.codebooks, layer.scales, *([layer.bias] if bits == 8 else [])):
            values.data.normal_()
        codes = torch.randint(0, 2**bits, layer.codes.shape)
        layer.codes.data = pack_int_data(codes.clone(), bits)
        assert torch.equal(unpack_int_data(layer.codes, bits), codes)
        name = f"og{og}.books{count}.bits{bits}"
        tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
        expected[name] = _dequantize_weight(codes, layer.codebooks.float(), layer.scales.float())
    label = {"quant_method": "aqlm", "nbits_per_codebook": 8, "num_codebooks": 2, "in_group_size": 8}
    save("aqlm", tensors, expected, label | {"out_group_size": 1, "linear_weights_not_to_quantize": ["lm_head.weight"]})


def hqq() -> None:
    """Groups along axis 0; tests/support/make_hqq.py makes those along axis 1."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    tensors, expected = {}, {}
    for bits, size in ((8, 64), (6, 64), (5, 16), (4, 64), (3, 64), (3, 16), (2, 64), (1.58, 64), (1, 8), (4, None)):
        config = BaseQuantizeConfig(nbits=bits, group_size=size, axis=0, view_as_float=bits in (2, 3) and size == 64)
        module = HQQLinear(linear(bias=bits == 8), config, device="cpu")
        name = f"bits{bits}.group{size or 'rows'}".replace(".58", "point58")
        tensors |= {f"{name}.{part}": value for part, value in module.state_dict().items()}
        meta = {**module.meta, "compute_dtype": torch.float32}
        meta |= {part: meta[part].float() for part in ("scale", "zero")}
        expected[name] = Quantizer.dequantize(module.W_q, meta)
    label = {"quant_method": "hqq", "quant_config": BaseQuantizeConfig(nbits=4, group_size=64, axis=0)}
    save("hqq-axis0", tensors, expected, label)


def quanto() -> None:
    from optimum import quanto as q  # compiles its unpacking

    # the model's width, 160, is what q_proj reads and o_proj and down_proj write; fc has a bias, odd one group a row
    shapes = {"q_proj": (160, 24), "o_proj": (64, 160), "down_proj": (192, 160), "odd": (80, 18), "fc": (256, 10)}
    kinds = {"qint2": q.qint2, "qint4": q.qint4, "qint8": q.qint8, "qfloat8": q.qfloat8, "wide": q.qfloat8_e5m2}
    kinds["fnuz"] = q.qfloat8_e4m3fnuz
    tensors, expected, table = {}, {}, {}
    for kind, weights in kinds.items():
        layers = torch.nn.ModuleDict()  # whose names have no dots
        for name, (wide, out) in shapes.items():
            if weights.bits < 8 or name in ("odd", "fc"):
                layers[f"{kind}/{name}"] = torch.nn.Linear(wide, out, bias=name == "fc")
        q.quantize(layers, weights=weights)
        q.freeze(layers)
        tensors |= {name.replace("/", "."): value for name, value in layers.state_dict().items()}
        expected |= {name.replace("/", "."): layer.weight.dequantize() for name, layer in layers.items()}
        table |= {name.replace("/", "."): said for name, said in q.quantization_map(layers).items()}
    save("quanto", tensors, expected, {})
    (DATA / "quanto" / "config.json").write_text(json.dumps({"hidden_size": 160}) + "\n")
    (DATA / "quanto" / "quanto_qmap.json").write_text(json.dumps(table) + "\n")


def without(*names: str, **values: Any) -> None:
    """Stand-ins for packages that a tool imports but does not need here."""
    for name in names:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)


def vptq() -> None:
    """Random indices and vectors: the trainer needs a model and a GPU."""
    without("sentence_transformers", "sentence_transformers.SentenceTransformer", SentenceTransformer=object)
    from vptq.layers.vqlinear import VQuantLinear
    from vptq.ops.quant_gemm import dequant
    from vptq.utils.pack import pack_index

    tensors, expected, entries = {}, {}, {}
    for name, out, books, second, outliers in (
        ("one", 16, 64, -1, 0), ("two", 16, 256, 16, 0), ("wide", 13, 512, 512, 0), ("outliers", 14, 64, 8, 4)
    ):  # fmt: skip
        said = {
            "in_features": IN, "out_features": out, "vector_lens": (3 if outliers else -1, 4),
            "num_centroids": (16 if outliers else -1, books), "num_res_centroids": (-1, second), "group_num": 2,
            "group_size": (IN - outliers) // 2, "outlier_size": outliers, "indices_as_float": False,
            "enable_norm": True, "enable_perm": True, "is_indice_packed": True,
        }  # fmt: skip
        layer = VQuantLinear(**said, enable_proxy_error=False, dtype=torch.float32)
        for values in layer.parameters():
            if values.is_floating_point():
                values.data.normal_()
        shape = (2, layer.num_indices, layer.group_size)
        first, rest = (torch.randint(0, max(1, n), shape).to(torch.uint16) for n in (books, second))
        widths = layer.index_bits, layer.res_index_bits
        layer.indices.data = pack_index(first, widths[0], rest if second > 0 else None, widths[1])
        layer.perm.data = torch.randperm(IN).to(torch.uint16).view(torch.int16)
        if outliers:
            layer.outlier_indices.data = torch.randint(0, 16, layer.outlier_indices.shape).to(torch.int16)
        books_of = {
            "centroids": layer.centroids, "res_centroids": layer.res_centroids,
            "outlier_centroids": layer.outlier_centroids,
        }  # fmt: skip
        sizes = {"centroids": layer.vector_len, "res_centroids": layer.vector_len, "outlier_centroids": 3}
        expected[name] = dequant(
            indices=layer.indices, outlier_indices=layer.outlier_indices, res_indices=layer.res_indices,
            perm=layer.perm, weight_scale=layer.weight_scale, weight_bias=layer.weight_bias, is_indice_packed=True,
            enable_outlier=layer.enable_outlier, enable_residual=layer.enable_residual, enable_perm=True,
            enable_norm=True, num_centroids=books, num_outlier_centroids=16, num_res_centroids=second,
            padding=layer.padding, outlier_padding=layer.outlier_padding, num_codebooks=2,
            group_size=layer.group_size, outlier_size=outliers, vector_len=layer.vector_len, outlier_vector_len=3,
            **{key: b and b.weight.view(len(b.weight), -1, sizes[key]) for key, b in books_of.items()},
        )  # fmt: skip
        tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
        entries[name] = said
    save("vptq", tensors, expected, {"quant_method": "vptq", "config_for_layers": entries})


def sinq() -> None:
    without("datasets", load_dataset=None)
    from sinq.patch_model import BaseSINQHFModel
    from sinq.quantizer import Quantizer
    from sinq.sinqlinear import SINQLinear, sinq_base_quant_config

    weights, expected = {}, {}
    for name, bits, tiling, method in (
        ("four", 4, "1D", "sinq"), ("aux", 4, "1D", "sinq_quantAux"), ("tiles", 4, "2D", "sinq"),
        ("five", 5, "1D", "sinq"), ("six", 6, "1D", "sinq"), ("three", 3, "1D", "hqq_sinq"), ("two", 2, "1D", "sinq"),
        ("eight", 8, "1D", "sinq"), ("nf4", 4, "1D", "sinq_nf4"), ("nf3", 3, "1D", "sinq_nf3"),
        ("one_zero", 4, "1D", "sinq_noz"), ("rounded", 4, "1D", "rtn"),
    ):  # fmt: skip
        layer = torch.nn.Linear(64, 16, bias=name == "four")
        config = sinq_base_quant_config(nbits=bits, group_size=16, tiling_mode=tiling, method=method)
        config["weight_quant_params"]["method"] = method
        module = SINQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
        weights[name] = module.state_dict()
        expected[name] = Quantizer.dequantize(module.W_q, {**module.meta, "compute_dtype": torch.float32})
    label = {"quant_method": "sinq", "nbits": 4, "group_size": 16, "tiling_mode": "1D", "method": "sinq"}
    save("sinq", {}, expected, label)
    (DATA / "sinq" / "model.safetensors").unlink()
    BaseSINQHFModel.save_weights_safetensors(weights, str(DATA / "sinq"))


def auto_round() -> None:
    from auto_round.data_type.mxfp import quant_mx
    from auto_round.data_type.nvfp import nvfp4_v2
    from auto_round.experimental.qmodules.mx import MXFP4QuantLinear, MXFP8QuantLinear, MXINT4QuantLinear
    from auto_round.experimental.qmodules.nvfp4_e5m3 import NVFP4E5M3QuantLinear
    from auto_round.export.export_to_autoround import qlinear_fp, qlinear_int
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round.schemes import preset_name_to_scheme

    label = {"quant_method": "auto-round", "autoround_version": "0.16.1"}
    tensors, expected = {}, {}
    for bits in (5, 6, 7):
        layer, size = torch.nn.Linear(64, 32, bias=bits == 6), 32
        groups = layer.weight.data.reshape(32, -1, size)
        scales = ((groups.amax(2) - groups.amin(2)) / (2**bits - 1)).half().float()
        zeros = (-groups.amin(2) / scales).round()
        packed = WQLinear_GEMM.from_linear(layer, bits, size, scales=scales.T, zeros=zeros.T, device="cpu")
        tensors |= {f"bits{bits}.{part}": value for part, value in packed.state_dict().items()}
        stored = packed.qweight, packed.qzeros, packed.scales.float()
        expected[f"bits{bits}"] = dequantize_gemm(*stored, bits, size).T
    integers = {"bits": 5, "group_size": 32, "sym": False, "data_type": "int"}
    others = {f"bits{bits}": {"bits": bits} for bits in (6, 7)}
    packing = {"packing_format": "auto_round:auto_awq", "extra_config": others}
    save("auto-round-awq", tensors, expected, label | integers | packing)

    for folder, names in (("mxint4", ["MXINT4"]), ("nvfp4-e5m3", ["NVFP4_E5M3"]), ("mxfp8", ["MXFP8", "MXFP4"])):
        tensors, expected = {}, {}
        for name in names:
            scheme, layer = preset_name_to_scheme(name), linear(bias=name == "MXINT4")
            bits, size, kind = scheme.bits, scheme.group_size, scheme.data_type
            if name == "NVFP4_E5M3":
                scales = nvfp4_v2(layer.weight.data, group_size=size)[1]
            else:
                scales = quant_mx(layer.weight.data, bits, size, data_type=f"{kind}{bits}")[1]
            module = (qlinear_int if name == "MXINT4" else qlinear_fp).QuantLinear
            packed = module(bits, size, IN, OUT, bias=layer.bias is not None, data_type=kind, act_bits=16)
            packed.pack(layer, scales.reshape(OUT, -1), device="cpu")
            reader: Any = {
                "MXINT4": MXINT4QuantLinear, "NVFP4_E5M3": NVFP4E5M3QuantLinear, "MXFP8": MXFP8QuantLinear,
                "MXFP4": MXFP4QuantLinear,
            }[name](IN, OUT, scheme, dtype=torch.float32)  # fmt: skip
            held = {part: value for part, value in packed.state_dict().items() if value is not None}
            for part, value in held.items():
                if part != "bias":
                    setattr(reader, part, value)
            tensors |= {f"{name.lower()}.{part}": value for part, value in held.items()}
            expected[name.lower()] = reader.dequant_weight_online()
        first, packing = preset_name_to_scheme(names[0]), {"packing_format": "auto_round:llm_compressor"}
        kind = {"bits": first.bits, "group_size": first.group_size, "sym": True, "data_type": first.data_type}
        save(f"auto-round-{folder}", tensors, expected, label | kind | packing)


def gptqmodel() -> None:
    """8-bit floats, which are divided by their scales."""
    from gptqmodel.nn_modules.qlinear.fp8 import quantize_fp8_weight
    from gptqmodel.quantization.dtype import dequantize_fp8

    tensors, expected = {}, {}
    for method, kind in (("row", "e4m3fn"), ("tensor", "e5m2"), ("block", "e4m3fn")):
        block = (16, 64) if method == "block" else None
        weight = torch.randn(32, 128) * 0.05
        values, scales = quantize_fp8_weight(
            weight, format=f"float8_{kind}", weight_scale_method=method, weight_block_size=block
        )
        tensors |= {f"{method}.weight": values, f"{method}.weight_scale_inv": scales}
        axis = None if method == "block" else 0
        expected[method] = dequantize_fp8(values, scale_inv=scales, axis=axis, target_dtype=torch.float32)
    label = {"quant_method": "fp8", "bits": 8, "format": "float8_e4m3fn", "weight_scale_method": "block"}
    save(
        "gptqmodel-fp8", tensors, expected, label | {"weight_block_size": [16, 64], "weight_scale_semantics": "inverse"}
    )


def quark() -> None:
    """6-bit floats, whose packing is the tool's."""
    from quark.torch.utils.pack import Pack_fp6

    for dtype in ("fp6_e2m3", "fp6_e3m2"):
        weight = linear().weight.data.reshape(OUT, -1, 32)
        exponents = weight.abs().amax(2).log2().floor() - (2 if dtype == "fp6_e2m3" else 4)
        mantissa, low = (3, 0) if dtype == "fp6_e2m3" else (2, -2)
        scaled = weight / exponents.exp2()[..., None]
        step = (scaled.abs().log2().floor().clamp(min=low) - mantissa).exp2()
        rounded = (scaled / step).round() * step
        largest = 7.5 if dtype == "fp6_e2m3" else 28
        packer = Pack_fp6("per_group", dtype, 5 - mantissa, mantissa)
        packed = packer.pack(rounded.clamp(-largest, largest).reshape(OUT, IN), reorder=True)
        tensors = {"layer.weight": packed, "layer.weight_scale": (exponents + 127).to(torch.uint8)}
        values = packer.unpack(packed, reorder=True).reshape(OUT, -1, 32) * exponents.exp2()[..., None]
        entry = {"weight": {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
        label = {"quant_method": "quark", "global_quant_config": entry, "export": {"pack_method": "reorder"}}
        save(f"quark-{dtype}", tensors, {"layer": values.reshape(OUT, IN)}, label)


def modelopt() -> None:
    """Codes in groups of 32, and SVDQuant's, to which a product of two factors is added."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors, expected = {}, {}
    for name, size in (("groups32", 32), ("svd", 16)):
        weight = linear().weight.data
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, right = left[:, :4] * values[:4], right[:4].contiguous()
        codes, scales, whole = NVFP4QTensor.quantize(weight - left @ right if name == "svd" else weight, size)
        expected[name] = codes.dequantize(
            torch.float32, scale=scales, double_scale=whole.float(), block_sizes={-1: size}
        )
        stored = {"weight": codes._quantized_data, "weight_scale": scales, "weight_scale_2": whole}
        if name == "svd":
            stored["pre_quant_scale"] = torch.rand(IN) + 0.5
            product = {"_svdquant_lora_a": right, "_svdquant_lora_b": left}
            stored |= {f"weight_quantizer.{part}": factor for part, factor in product.items()}
            expected[name] = (expected[name] + left @ right) * stored["pre_quant_scale"]
        tensors |= {f"{name}.{part}": value for part, value in stored.items()}
    save("modelopt", tensors, expected, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})


if __name__ == "__main__":
    torch.manual_seed(0)
    for tool in sys.argv[1:]:
        globals()[tool]()
