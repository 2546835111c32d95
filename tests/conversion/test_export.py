"""The way back: a GGUF becomes a checkpoint again, with the same codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.blocks import TYPES
from bridge.blocks.read import READ
from bridge.checkpoint.formats.fp4 import Fp4Tensor, unpacked
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.grouped import GroupedTensor
from bridge.checkpoint.write.block_words import ReusedArrays
from bridge.conversion.checkpoints.codes_of_blocks import codes_of, has_nan_scale, is_plain, packed_of
from bridge.conversion.gguf_input.gguf_config import write_config
from bridge.encode.block_bytes import packer, unpack_fields
from bridge.errors import BridgeError
from bridge.gguf_file.reader import StoredModel, read_gguf
from bridge.runtime.bench import random_tensor
from bridge.runtime.cpu.engines.dequantize import rows
from scripts.peers.predictions import mean_kl
from tests.conftest import CHECKPOINT, ROOT, shared
from tests.support.tiny_gguf import write_decoder


def same_codes(first, second) -> None:
    """The modules of two checkpoints have the same codes and zero points, and nearly the same scales."""
    with bridge.open_checkpoint(first) as old, bridge.open_checkpoint(second) as new:
        assert new.modules.keys() == old.modules.keys()
        for name in old.modules:
            a, b = old.reader.read(name), new.reader.read(name)
            assert np.array_equal(a.codes, b.codes), name
            groups = a.groups(), b.groups()
            assert np.array_equal(a.zeros[:, groups[0]], b.zeros[:, groups[1]]), name
            assert np.allclose(a.scales[:, groups[0]], b.scales[:, groups[1]], rtol=0.1), (
                name
            )  # Q2_K has scales of 4 bits


def test_a_checkpoint_comes_back_from_its_gguf_with_the_same_codes(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    done = bridge.export(tmp_path / "m.gguf", tmp_path / "new", "gptq_v2", config=CHECKPOINT)
    assert {t.how for t in done.tensors} <= {"exact", "all codes", "floats"}
    same_codes(CHECKPOINT, tmp_path / "new")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("qwen3-gptq-4bit-g128-asym-v2", "gptq_v2"),
        ("qwen3-gptq-4bit-g32-sym", "gptq_v2"),
        ("qwen3-gptq-2bit-g64-asym-v2", "gptq_v2"),
        ("qwen3-gptq-3bit-g128-sym", "gptq"),
        ("qwen3-gptq-8bit-g128-sym", "gptq"),
        ("qwen3-gptq-4bit-channel-sym", "gptq"),
        ("qwen3-awq-4bit-g128-gemm", "awq"),
        ("qwen3-ct-w4a16-asym", "gptq_v2"),
        ("llama-gptq-4bit-g128-sym", "gptq"),
    ],
)
def test_shared_checkpoints_come_back_with_the_same_codes(name, format, converted, tmp_path) -> None:
    path, _ = converted(name)
    bridge.export(path, tmp_path / "new", format, config=shared(f"checkpoints/{name}"))
    same_codes(shared(f"checkpoints/{name}"), tmp_path / "new")


@pytest.mark.parametrize(
    ("type", "format"),
    [
        *((type, format) for type in ("Q4_0", "Q8_0") for format in ("gptq", "gptq_v2", "compressed-tensors", "mlx")),
        ("Q4_0", "awq"),
        ("Q4_1", "mlx"),
        ("Q5_0", "mlx"),
        ("Q5_0", "gptq_p"),
        ("Q5_1", "mlx"),
        ("Q4_0", "hqq"),
        ("Q8_0", "hqq"),
    ],
)
def test_plain_blocks_go_to_a_checkpoint_and_back_bit_for_bit(type, format, tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "a.gguf", type=type)
    done = bridge.export(tmp_path / "a.gguf", tmp_path / "new", format, config=CHECKPOINT)
    assert {t.how for t in done.tensors if t.bits} == {"exact"}
    bridge.convert(tmp_path / "new", tmp_path / "b.gguf", type=type)
    first, second = (read_gguf(tmp_path / name).tensors for name in ("a.gguf", "b.gguf"))
    layers = [name for name in first if name.startswith("blk.") and first[name].type == type]
    assert layers
    for name in layers:
        assert np.array_equal(first[name].raw, second[name].raw), name


@pytest.mark.parametrize(
    ("type", "format"),
    [
        *((type, format) for type in ("Q4_0", "Q8_0") for format in ("gptq", "gptq_v2", "gptq_p", "mlx")),
        *((type, "compressed-tensors") for type in ("Q4_0", "Q8_0")),
        ("Q4_1", "mlx"),
    ],
)
def test_blocks_that_are_packed_directly_are_packed_as_their_codes_are(type: str, format: str) -> None:
    block, rng = TYPES[type], np.random.default_rng(7)
    raw = rng.integers(0, 256, (288, 2, block.nbytes), dtype=np.uint8)
    for at in (block.d_at, block.dmin_at) if block.has_min else (block.d_at,):
        raw[:, :, at : at + 2] = (rng.standard_normal((288, 2, 1)) + 0.01).astype(np.float16).view(np.uint8)
    raw = raw.reshape(288, -1)
    assert is_plain(type, raw)
    codes = codes_of("layer", type, raw, ((block.levels - 1).bit_length(),), block.has_min)
    packed = packed_of("layer", type, (raw[:128], raw[128:]), (288, 64), 1.0, format.startswith("gptq"), ReusedArrays())
    assert packed.shape == (288, 64)
    expected, found = FORMATS[format].pack(codes), FORMATS[format].pack(packed)
    if format == "compressed-tensors":
        for part in ("weight_zero_point", "weight_g_idx"):  # symmetric layers without act-order have none
            expected.pop(part)
    assert found.keys() == expected.keys()
    for part, values in expected.items():
        assert np.array_equal(found[part], values), part
        assert found[part].dtype == values.dtype, part


@pytest.mark.parametrize(("at", "bits", "type"), [(0, 0x6400, "Q4_0"), (0, 0x7E00, "Q8_0"), (2, 0x7C00, "Q4_1")])
def test_blocks_with_a_great_or_infinite_half_are_not_plain(at: int, bits: int, type: str) -> None:
    raw = np.zeros((2, TYPES[type].nbytes), np.uint8)
    assert is_plain(type, raw)
    raw[1, at : at + 2] = bits & 255, bits >> 8
    assert not is_plain(type, raw)


def test_a_layer_whose_first_rows_alone_are_plain_is_written_as_its_rows_are(tmp_path: Path) -> None:
    """The last scale is a half, but 128 times it is infinite: the layer is not packed as the others are."""
    path = native("Q8_0", tmp_path)
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = tensor.start + tensor.raw.size - TYPES["Q8_0"].nbytes
    codes = np.frombuffer(bytes(data[at + 2 : at + 34]), np.int8)
    data[at : at + 34] = np.float16(600).tobytes() + np.clip(codes, -90, 90).tobytes()  # 128 times it is infinite
    (tmp_path / "odd.gguf").write_bytes(data)
    before, found = sorted(tmp_path.iterdir()), {}
    for name in ("native", "odd"):
        done = bridge.export(tmp_path / f"{name}.gguf", tmp_path / name, "mlx", config=CHECKPOINT)
        found[name] = {t.name: t.how for t in done.tensors}
    assert set(found["native"].values()) == {"exact", "floats"}
    changed = {name for name, how in found["odd"].items() if how != found["native"][name]}
    assert changed == {"model.layers.0.mlp.down_proj.weight"}
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "native", tmp_path / "odd"])


def test_weights_that_no_half_holds_are_refused_where_a_format_has_halves_alone(tmp_path: Path) -> None:
    path = native("Q8_0", tmp_path)
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = tensor.start + tensor.raw.size - TYPES["Q8_0"].nbytes
    data[at : at + 34] = np.float16(1000).tobytes() + bytes([100, 156] * 16)  # 100 and -100 times 1000
    path.write_bytes(data)
    with pytest.raises(BridgeError, match=r"down_proj.weight: has values above 65504, the largest of F16"):
        bridge.export(path, tmp_path / "new", "mlx", config=CHECKPOINT)
    assert not (tmp_path / "new").exists()


def damaged(folder: Path, type: str, bits: int, at: int) -> Path:
    """A GGUF of this type in whose last block of a layer, or last float, two bytes are these bits."""
    path = write_decoder(folder / "damaged.gguf", types={"": type}, hidden=256, inner=256, heads=8)
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    start = tensor.start + tensor.raw.size - (READ[type].nbytes if type in READ else 4) + at
    data[start : start + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    return path


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("type", "bits", "at"), [
    ("Q4_0", 0x7E00, 0), ("Q4_1", 0xFC00, 2), ("IQ4_XS", 0x7C00, 0), ("F32", 0x7F80, 2), ("BF16", 0xFF80, 2),
    ("F16", 0x7C00, 0), ("MXFP4", 0x11FF, 0),
])  # fmt: skip
def test_what_is_not_finite_is_neither_exported_nor_copied(type: str, bits: int, at: int, tmp_path: Path) -> None:
    path = damaged(tmp_path, type, bits, at)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 256, "head_dim": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 32}
    config |= {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.json").write_text(json.dumps(config))
    message = r"damaged.gguf: .*(ffn_down|down_proj).weight holds NaN or infinite values; the file is damaged"
    for format, dtype in (("floats", "BF16"), ("floats", "F32"), ("floats", "F16"), ("gptq_v2", "BF16")):
        if type not in ("MXFP4", "IQ4_XS") and (format == "floats" or type in READ):
            with pytest.raises(BridgeError, match=message):
                bridge.export(path, tmp_path / "new", format, config=tmp_path / "home", dtype=dtype)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(path, tmp_path / "copy.gguf", type=type)


def test_only_mxfp4_has_scales_that_are_nan() -> None:
    for type, has_nan in (("MXFP4", True), ("NVFP4", False)):
        raw = np.zeros((4, TYPES[type].nbytes), np.uint8)
        assert not has_nan_scale(type, raw)
        raw[3, 0] = 0xFF
        assert has_nan_scale(type, raw) == has_nan


def test_a_block_with_an_offset_alone_is_not_plain() -> None:
    raw = np.zeros((1, TYPES["Q4_1"].nbytes), np.uint8)
    raw[0, 3] = 0x3C  # m is 1, d is 0
    assert not is_plain("Q4_1", raw)


@pytest.mark.parametrize("format", ["compressed-tensors", "mlx"])
def test_an_integer_checkpoint_comes_back_in_another_format(format, tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", format, config=CHECKPOINT)
    same_codes(CHECKPOINT, tmp_path / "new")


@pytest.mark.parametrize("type", ["Q4_K", "Q5_K"])
def test_mlx_has_all_codes_of_native_k_quants_with_scale_and_offset_rounded_once(type, tmp_path) -> None:
    path = native(type, tmp_path)
    done = bridge.export(path, tmp_path / "new", "mlx", config=CHECKPOINT)
    layers = [t for t in done.tensors if t.bits]
    assert layers
    assert all((t.how, t.bits, t.type) == ("all codes", int(type[1]), type) and t.nmse < 1e-6 for t in layers)
    blocks = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    raw = np.ascontiguousarray(blocks.raw.reshape(blocks.shape[0], -1))
    q, sc, mn = unpack_fields(TYPES[type], raw)
    halves = raw.reshape(len(raw), -1, TYPES[type].nbytes)[:, :, :4].copy().view("<f2").astype(np.float32)
    with bridge.open_checkpoint(tmp_path / "new") as new:
        name = "model.layers.0.mlp.down_proj"
        assert np.array_equal(new.reader.read(name).codes, q)
        scales, biases = (new.store.read(f"{name}.{part}") for part in ("scales", "biases"))
    step = sc.shape[1] // scales.shape[1]
    d, dmin = (np.repeat(halves[..., i], TYPES[type].subs, 1) for i in (0, 1))
    assert np.array_equal(scales, (d * sc).astype(np.float16)[:, ::step])
    assert np.array_equal(biases, -(dmin * mn).astype(np.float16)[:, ::step])


@pytest.mark.parametrize(("type", "bits"), [("Q4_0", 4), ("Q5_0", 8), ("Q8_0", 8)])
def test_codes_of_types_without_offsets_are_the_weights(type, bits) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type])
    tensor = codes_of("layer", type, raw, (2, 3, 4, 8))
    assert tensor is not None
    assert tensor.bits == bits
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    assert np.allclose(tensor.dequantize(), expected, rtol=1e-3)  # scales are halves


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("llama-ct-mxfp4a16", "compressed-tensors"),
        ("llama-ct-mxfp4a16", "mlx"),
        ("llama-mlx-nvfp4", "mlx"),
        ("llama-mlx-nvfp4", "modelopt"),
        ("llama-mlx-nvfp4", "compressed-tensors"),
    ],
)
def test_4_bit_floats_come_back_bit_for_bit(source, format, tmp_path) -> None:
    home = shared(f"more/{source}")
    bridge.convert(home, tmp_path / "m.gguf", type="exact")
    done = bridge.export(tmp_path / "m.gguf", tmp_path / "new", format, config=home)
    kind = {"NVFP4" if "nvfp4" in source else "MXFP4"}
    assert {t.kind for t in done.tensors if t.bits == 4} == kind
    with bridge.open_checkpoint(home) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        layers = [n for n in old.modules if ".layers." in n]
        assert layers
        for name in layers:
            a, b = old.reader.read(name), new.reader.read(name)
            assert (np.array_equal(a.codes, b.codes), np.array_equal(a.scales, b.scales)) == (True, True), name


def test_the_scale_of_a_whole_nvfp4_matrix_comes_along() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (4, 2 * 36), np.uint8)
    packed = packed_of("layer", "NVFP4", (raw,), (4, 128), 0.125, False, ReusedArrays())
    parts = FORMATS["compressed-tensors"].pack(packed)
    assert parts["weight_global_scale"] == 8
    tensor = Fp4Tensor("layer", "NVFP4", unpacked(parts["weight_packed"]), packed.scales, 16, packed.tensor_scale)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4) * np.float32(0.125)
    assert np.array_equal(tensor.dequantize(), expected)
    assert not FORMATS["mlx"].holds_fp4("NVFP4", 0.125)
    assert FORMATS["mlx"].holds_fp4("NVFP4", 1.0)
    assert FORMATS["modelopt"].holds_fp4("NVFP4", 0.125)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_what_is_packed_for_hqq_is_read_back(bits, tmp_path) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (24, 64), np.uint8)
    scales, zeros = (rng.random((24, 2), np.float32).astype(np.float16).astype(np.float32) for _ in range(2))
    tensor = GroupedTensor("layer", bits, codes, scales, zeros, 32)
    save_file(
        {f"layer.{part}": values for part, values in FORMATS["hqq"].pack(tensor).items()},
        tmp_path / "model.safetensors",
    )
    label = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": bits, "group_size": 32}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": label}))
    with bridge.open_checkpoint(tmp_path) as found:
        back = found.reader.read("layer")
    for field in ("codes", "scales", "zeros"):
        assert np.array_equal(getattr(back, field), getattr(tensor, field)), field


def test_packed_zero_points_are_those_of_the_compressed_tensors_package() -> None:
    pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    import torch

    rng = np.random.default_rng(0)
    for bits in (4, 8):
        codes, zeros = (rng.integers(0, 1 << bits, shape, dtype=np.uint8) for shape in ((16, 64), (16, 2)))
        tensor = GroupedTensor("layer", bits, codes, np.ones((16, 2), np.float32), zeros.astype(np.float32), 32)
        packed = FORMATS["compressed-tensors"].pack(tensor)
        half = 1 << (bits - 1)
        signed, middle = (torch.from_numpy((x.astype(np.int16) - half).astype(np.int8)) for x in (codes, zeros))
        assert np.array_equal(packed["weight_packed"], helpers.pack_to_int32(signed, bits).numpy())
        theirs = helpers.pack_to_int32(middle, bits, packed_dim=0).numpy()
        assert np.array_equal(packed["weight_zero_point"], theirs)


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1"])
def test_offsets_that_are_whole_multiples_of_the_scale_are_zero_points(type: str) -> None:
    block, rng = TYPES[type], np.random.default_rng(3)
    raw = rng.integers(0, 256, (64, 4, block.nbytes), dtype=np.uint8)
    d = rng.uniform(0.01, 0.1, (64, 4, 1)).astype(np.float16)
    zeros = rng.integers(0, block.levels, (64, 4, 1))
    raw[:, :, block.d_at : block.d_at + 2] = d.view(np.uint8)
    raw[:, :, block.dmin_at : block.dmin_at + 2] = (-d.astype(np.float32) * zeros).astype(np.float16).view(np.uint8)
    tensor = codes_of("layer", type, raw.reshape(64, -1), (4, 8))
    assert tensor is not None
    assert (tensor.bits, tensor.group_size) == (4 if type == "Q4_1" else 8, 32)
    assert np.array_equal(tensor.zeros, zeros[:, :, 0])
    assert np.allclose(tensor.dequantize(), rows(type, raw.reshape(64, -1)), atol=2e-3)
    raw[63, 3, block.dmin_at : block.dmin_at + 2] = (-d[63, 3] * np.float16(2.5)).view(np.uint8)
    assert codes_of("layer", type, raw.reshape(64, -1), (4, 8)) is None


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_zero_points_out_of_range_are_brought_in_where_codes_leave_room(type: str) -> None:
    """A group whose weights are all positive or all negative, also of a block with a negative scale."""
    block, rng = TYPES[type], np.random.default_rng(5)
    top, blocks = block.levels - 1, (16, 2)
    beyond = rng.integers(0, 1 if type == "Q2_K" else 3, (*blocks, block.subs)) + 1  # steps out of range
    above = rng.integers(0, 2, (*blocks, 1))  # K-quants have one sign of all offsets in a block
    above[0, 0] = 1 if block.is_k else 0
    zeros = np.where(above, top + beyond, -beyond)
    least, greatest = np.where(above, beyond, 0), np.where(above, top, top - beyond)
    q = rng.integers(least[..., None], greatest[..., None] + 1, (*zeros.shape, block.sub)).astype(np.uint8)
    d = (rng.uniform(0.01, 0.1, blocks) * rng.choice([-1, 1], blocks)).astype(np.float16).astype(np.float32)
    sc = np.full(zeros.shape, 3, np.int8)
    mn = np.abs(zeros).astype(np.uint8)
    dmin = (3 * d * np.sign(zeros[..., 0]) if block.is_k else -d * zeros[..., 0]).astype(np.float32)
    raw = np.empty((16, 2 * block.nbytes), np.uint8)
    packer(type)(q, sc, mn, d, dmin, raw)
    tensor = codes_of("layer", type, raw, (2, 3, 4, 5, 8))
    assert tensor is not None
    assert tensor.bits == top.bit_length()
    assert tensor.zeros.min() >= 0
    assert tensor.zeros.max() <= top
    steps = np.repeat(tensor.scales, tensor.group_size, 1)
    assert (np.abs(tensor.dequantize() - rows(type, raw)) < 0.05 * steps).all()
    q[0, 0, 0, 5] = 0 if above[0, 0] else top  # the one code that leaves none
    packer(type)(q, sc, mn, d, dmin, raw)
    assert codes_of("layer", type, raw, (2, 3, 4, 5, 8)) is None


def test_types_with_groups_that_mlx_lacks_are_rounded(tmp_path) -> None:
    done = bridge.export(native("Q6_K", tmp_path), tmp_path / "new", "mlx", config=CHECKPOINT)
    assert {(t.how, t.bits) for t in done.tensors if t.bits} == {("rounded", 8)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF of an integer checkpoint."""
    path = tmp_path_factory.mktemp("source") / "model.gguf"
    bridge.convert(CHECKPOINT, path)
    return path


def native(type: str, folder: Path) -> Path:
    """A GGUF whose K-quants have zero points anywhere."""
    bridge.convert(CHECKPOINT, folder / "m.gguf")
    bridge.export(folder / "m.gguf", folder / "floats", config=CHECKPOINT, dtype="F32")
    bridge.convert(folder / "floats", folder / "native.gguf", type=type)
    return folder / "native.gguf"


@pytest.mark.parametrize("type", ["Q5_0", "Q6_K"])
def test_planar_gptq_holds_codes_of_5_and_6_bits(type: str, tmp_path: Path) -> None:
    path = native(type, tmp_path)
    done = bridge.export(path, tmp_path / "new", "gptq_p", config=CHECKPOINT)
    layers = [t for t in done.tensors if t.bits]
    assert {(t.how, t.bits) for t in layers} == {("exact", 5) if type == "Q5_0" else ("all codes", 6)}
    with bridge.open_checkpoint(tmp_path / "new") as new, bridge.open_checkpoint(CHECKPOINT) as old:
        assert new.quant.checkpoint_format == "gptq_p"
        assert new.modules.keys() == old.modules.keys()
    if type == "Q5_0":
        bridge.convert(tmp_path / "new", tmp_path / "b.gguf", type=type)
        first, second = (read_gguf(name).tensors for name in (path, tmp_path / "b.gguf"))
        for name in first:
            if name.startswith("blk.") and first[name].type == type:
                assert np.array_equal(first[name].raw, second[name].raw), name


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_floats_are_the_dequantized_weights_under_the_old_names(dtype, tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", config=CHECKPOINT, dtype=dtype)
    with bridge.open_checkpoint(CHECKPOINT) as old, bridge.open_checkpoint(tmp_path / "new") as new:
        assert new.format == "float"
        assert not new.config.get("quantization_config")
        assert {f"{module}.weight" for module in old.modules} <= new.tensors.keys()
        for module in old.modules:
            weights = old.reader.read(module).dequantize()
            assert np.allclose(new.store.read_float(f"{module}.weight"), weights, rtol=0.02, atol=1e-3), module


def test_the_labels_of_the_old_quantization_do_not_come_along(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    home = shutil.copytree(CHECKPOINT, tmp_path / "home")
    (home / "quantization_config.json").write_text(json.dumps({"quant_method": "exl3"}))
    (home / "quanto_qmap.json").write_text(json.dumps({"lm_head": {"weights": "qint4"}}))
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", config=home, dtype="F16")
    with bridge.open_checkpoint(tmp_path / "new") as new:
        assert new.format == "float"


@pytest.mark.parametrize(
    ("type", "format", "bits"),
    [("Q5_K", "gptq_v2", {8}), ("Q2_K", "gptq_v2", {3, 4}), ("Q3_K", "gptq_v2", {3}), ("Q4_1", "awq", set())],
)
def test_other_blocks_are_rounded_to_the_least_bits_that_add_little_noise(type, format, bits, tmp_path) -> None:
    """Q3_K keeps its codes, also in a file of Q2_K, whose most sensitive layers are Q3_K."""
    path = native(type, tmp_path)
    if not bits:
        with pytest.raises(BridgeError, match="awq holds; choose format='floats', or bits=4, which rounds them"):
            bridge.export(path, tmp_path / "new", format, config=CHECKPOINT)
        done = bridge.export(path, tmp_path / "new", format, bits=4, config=CHECKPOINT)
        assert {(t.how, t.bits) for t in done.tensors if t.bits} == {("rounded", 4)}
        assert all(t.share > 0.15 for t in done.tensors if t.bits)
        return
    done = bridge.export(path, tmp_path / "new", format, config=CHECKPOINT)
    layers = [t for t in done.tensors if t.bits]
    assert {t.bits for t in layers} == bits
    rounded = [t for t in layers if t.how == "rounded"]
    assert {t.bits for t in layers if t.how == "all codes"} <= {3}
    assert all(0 < t.nmse < 1e-2 and t.share < 0.15 for t in rounded)
    assert any("rounded" in note for note in done.notes) == bool(rounded)
    with bridge.open_checkpoint(tmp_path / "new") as new:
        for t in layers:
            stored = read_gguf(path).tensors["blk.0.ffn_down.weight"]
            if t.name == "model.layers.0.mlp.down_proj.weight":
                held = new.reader.read(t.name.removesuffix(".weight")).dequantize()
                weights = gguf.quants.dequantize(stored.raw, gguf.GGMLQuantizationType[stored.type])
                weights = weights.reshape(stored.shape)
                assert np.square(held - weights).sum() / np.square(weights).sum() == pytest.approx(t.nmse, rel=1e-3)


def test_bits_that_a_format_lacks_are_refused(tmp_path) -> None:
    with pytest.raises(BridgeError, match=r"bits=3.*awq has 4"):
        bridge.export("model.gguf", tmp_path / "new", "awq", bits=3)


def test_an_unfinished_or_unfitting_export_leaves_nothing(tmp_path) -> None:
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf")
    out, other = tmp_path / "new", tmp_path / "other"
    other.mkdir()
    config = json.loads((CHECKPOINT / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, "unknown architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is qwen3"),
        ({"num_hidden_layers": 1}, "the GGUF has it, a model of"),
        ({"intermediate_size": 32}, r"but \[32, 256\] by"),
    ):
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(BridgeError, match=message):
            bridge.export(tmp_path / "m.gguf", out, config=other)
    with pytest.raises(BridgeError, match="unknown format"):
        bridge.export(tmp_path / "m.gguf", out, "exl2", config=CHECKPOINT)
    with pytest.raises(BridgeError, match="unknown dtype"):
        bridge.export(tmp_path / "m.gguf", out, config=CHECKPOINT, dtype="F8")
    with pytest.raises(BridgeError, match="shard is missing"):
        bridge.export(tmp_path / "m-00001-of-00002.gguf", out, config=CHECKPOINT)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "other"]
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(BridgeError, match="exists"):
        bridge.export(tmp_path / "m.gguf", out, config=CHECKPOINT)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def _raise(problem: BaseException) -> None:
    raise problem


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["^C", "full"])
def test_an_interrupted_export_leaves_what_was_there_and_nothing_else(
    problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "new"
    bridge.convert(CHECKPOINT, path)
    for where in ("conversion.checkpoints.layer_plan.Layer.squared_errors", "checkpoint.write.writer.sync"):
        monkeypatch.setattr(f"bridge.{where}", lambda *_: _raise(problem))
        with pytest.raises((KeyboardInterrupt, OSError, BridgeError)) as caught:
            bridge.export(path, out, "gptq_v2", config=CHECKPOINT)
        monkeypatch.undo()
        assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"], where
    if isinstance(problem, OSError):
        assert "No space left" in str(caught.value)
        assert caught.type is BridgeError


@pytest.mark.exhaustive
def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "new"
    bridge.convert(CHECKPOINT, path)
    code = "import os, sys, bridge; os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
    code += "bridge.export(sys.argv[1], sys.argv[2], 'gptq_v2', config=sys.argv[3])"
    killed = subprocess.run([sys.executable, "-c", code, str(path), str(out), str(CHECKPOINT)], cwd=ROOT)
    assert killed.returncode == -9
    left = {file.name for file in tmp_path.iterdir()} - {"m.gguf"}
    assert len(left) == 1
    assert "new" not in left
    bridge.export(path, out, "gptq_v2", config=CHECKPOINT)
    assert {file.name for file in tmp_path.iterdir()} == {"m.gguf", "new"}


@pytest.mark.parametrize(
    ("type", "format", "how", "bits"),
    [
        ("IQ4_NL", "gptq_v2", "exact", 8),
        ("IQ4_XS", "mlx", "all codes", 8),
        ("IQ3_S", "gptq_p", "all codes", 5),
        ("TQ2_0", "gptq", "exact", 2),
        ("TQ1_0", "awq", "exact", 4),
        ("Q2_0", "gptq_v2", "exact", 3),
    ],
)
def test_codebooks_and_ternary_types_keep_their_values(
    type: str, format: str, how: str, bits: int, tmp_path: Path
) -> None:
    path = native(type, tmp_path)
    done = bridge.export(path, tmp_path / "new", format, config=CHECKPOINT)
    layers = [t for t in done.tensors if t.type == type and t.name.endswith("proj.weight")]
    assert layers
    assert {(t.how, t.bits) for t in layers} == {(how, bits)}
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    assert tensor.type == type
    with bridge.open_checkpoint(tmp_path / "new") as new:
        held = new.reader.read("model.layers.0.mlp.down_proj").dequantize()
    expected = rows(type, tensor.raw.reshape(tensor.shape[0], -1))
    assert np.square(held - expected).sum() <= (0 if how == "exact" else 1e-6) * np.square(expected).sum()


@pytest.mark.parametrize("type", sorted(name for name, block in READ.items() if block.values))
def test_codes_of_tables_are_their_values(type: str) -> None:
    block, scale = READ[type], 0.75
    raw = random_tensor(type, 8, 512).raw.reshape(8, -1)
    if type == "MXFP4":
        raw = raw.copy()
        raw.reshape(-1, block.nbytes)[:, 0] = np.random.default_rng(0).integers(116, 130, raw.size // block.nbytes)
    tensor = codes_of("layer", type, raw, (2, 3, 4, 5, 6, 7, 8), scale=scale)
    assert tensor is not None
    assert tensor.bits == {"Q1_0": 2, "IQ1": 5, "IQ2": 7, "IQ3_X": 7, "IQ3_S": 5, "IQ4": 8}.get(
        next((key for key in ("Q1_0", "IQ1", "IQ2", "IQ3_X", "IQ3_S", "IQ4") if type.startswith(key)), ""), 5
    )
    expected = rows(type, raw) * np.float32(scale)
    assert np.square(tensor.dequantize() - expected).sum() < 1e-6 * np.square(expected).sum()


@pytest.mark.parametrize(("type", "format"), [("F16", "gptq"), ("Q6_K", "gptq_v2"), ("Q8_0", "awq"), ("MXFP4", "mlx")])
def test_layers_have_the_bits_asked_for_at_most(type: str, format: str, tmp_path: Path) -> None:
    if type == "MXFP4":
        path, config, bits = tmp_path / "m.gguf", shared("more/llama-ct-mxfp4a16"), 3
        bridge.convert(config, path, type="exact")
    else:
        path, config, bits = native(type, tmp_path), CHECKPOINT, 4
    done = bridge.export(path, tmp_path / "new", format, bits=bits, config=config)
    layers = [t for t in done.tensors if t.type == type and ".layers." in t.name]
    assert layers
    assert {(t.how, t.bits) for t in layers} == {("rounded", bits)}
    assert all(0 < t.nmse < 0.1 for t in layers)


def test_awq_has_one_group_size_into_which_larger_groups_are_cut(tmp_path: Path) -> None:
    bridge.convert(
        native("F32", tmp_path), tmp_path / "mixed.gguf", tensor_types=[("blk", "Q4_0"), ("ffn_down", "Q3_K")]
    )
    done = bridge.export(tmp_path / "mixed.gguf", tmp_path / "new", "awq", config=CHECKPOINT)
    layers = {t.name: t for t in done.tensors if t.bits}
    assert {(t.type, t.how, t.bits, t.group_size) for t in layers.values()} == {
        ("Q4_0", "exact", 4, 16),
        ("Q3_K", "all codes", 4, 16),
    }
    assert any("groups of 16, since AWQ has one size" in note for note in done.notes)
    gguf_tensors = read_gguf(tmp_path / "mixed.gguf").tensors
    with bridge.open_checkpoint(tmp_path / "new") as new:
        for name, part in (("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")):
            stored = gguf_tensors[f"blk.0.{part}.weight"]
            expected = rows(stored.type, stored.raw.reshape(stored.shape[0], -1))
            held = new.reader.read(f"model.layers.0.{name}").dequantize()
            assert np.square(held - expected).sum() < 1e-6 * np.square(expected).sum()


def test_config_and_tokenizer_come_from_the_metadata(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    bridge.convert(CHECKPOINT, tmp_path / "m.gguf", metadata=[("tokenizer.ggml.eot_token_id", 5)])
    bridge.export(tmp_path / "m.gguf", tmp_path / "new", "gptq_v2")
    same_codes(CHECKPOINT, tmp_path / "new")
    old, new = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (CHECKPOINT, tmp_path / "new"))
    text = "Hello, World! 123  été\n\n日本 <|endoftext|>"
    assert new(text)["input_ids"] == old(text)["input_ids"]
    assert new.chat_template == old.chat_template
    bridge.convert(tmp_path / "new", tmp_path / "again.gguf")
    first, second = (read_gguf(tmp_path / name).metadata for name in ("m.gguf", "again.gguf"))
    assert {key for key in first if key.startswith(("qwen3.", "tokenizer."))} <= set(second)
    ends = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert ends["eos_token_id"] == [first["tokenizer.ggml.eos_token_id"], 5]
    assert second["tokenizer.ggml.eot_token_id"] == 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("key", "value"), [
    *(("attention.key_length", value) for value in (0, -1, "x", [], float("nan"), 2**63)),
    *(("block_count", value) for value in (0, 513, "x", None)),
    *(("nextn_predict_layers", value) for value in (512, -1, "x")),
    *(("attention.head_count", value) for value in ("x", [], 2**31)),
    *((key, 0) for key in ("embedding_length", "context_length", "rope.freq_base")),
    ("rope.dimension_count", []), ("attention.layer_norm_rms_epsilon", float("inf")), ("feed_forward_length", []),
    ("rope.scaling", {"type": "yarn", "factor": 0.0}), ("rope.scaling", {"type": "yarn"}),
    ("expert_count", 2**31),
])  # fmt: skip
def test_numbers_that_no_model_has_are_refused_by_name(key: str, value: Any, source: Path, tmp_path: Path) -> None:
    model = read_gguf(source)
    name = f"{model.metadata['general.architecture']}.{key}"
    changed = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    metadata: Any = {k: v for k, v in {**model.metadata, **changed}.items() if v is not None}
    with pytest.raises(BridgeError, match=r"model\.gguf: .*; config='DIR' takes"):
        write_config(StoredModel(model.files, metadata, model.tensors), tmp_path)


def test_a_base_of_rotation_is_a_number_of_any_size(source: Path, tmp_path: Path) -> None:
    """Falcon-H1's is 1e11."""
    model = read_gguf(source)
    key = f"{model.metadata['general.architecture']}.rope.freq_base"
    metadata: Any = {**model.metadata, key: 1e11}
    write_config(StoredModel(model.files, metadata, model.tensors), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"] == 1e11


def test_metadata_without_a_config_names_the_way_out(tmp_path) -> None:
    pytest.importorskip("transformers")
    scaled, unknown = tmp_path / "scaled.gguf", tmp_path / "unknown.gguf"
    bridge.convert(CHECKPOINT, scaled, metadata=[("qwen3.rope.scaling.type", "yarn")])
    data = scaled.read_bytes()
    at = data.index(b"qwen3", data.index(b"general.architecture"))
    unknown.write_bytes(data[:at] + b"nobod" + data[at + 5 :])
    for path, message in (
        (scaled, "qwen3.rope.scaling.factor is missing from the metadata.*config"),
        (unknown, "architecture 'nobod'; known are.*config"),
    ):
        with pytest.raises(BridgeError, match=message):
            bridge.export(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "own"), [("qwen3-gptq-4bit-g32-sym", True), ("llama-gptq-4bit-g128-sym", True), ("mixtral", False)]
)
def test_exported_floats_have_the_logits_of_the_gguf(name, own, converted, tmp_path) -> None:
    """transformers reads the GGUF itself, through gguf-py; of Mixtral, which it cannot, the original model."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.support.tiny_models import predict, save_model

    tokens = np.random.default_rng(1).integers(0, 300, 48).tolist()
    if own:
        path, _ = converted(name)
        bridge.export(path, tmp_path / "new", dtype="F32")
        import torch
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = transformers.AutoConfig.from_pretrained(tmp_path / "new")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
        left = model.load_state_dict(read["tensors"], strict=False)
        assert set(left.missing_keys) <= {"lm_head.weight"}  # of tied embeddings
        with torch.no_grad():
            expected = model.eval()(torch.tensor([tokens])).logits[0].numpy()
    else:
        source = save_model(tmp_path / "mixtral", "MixtralConfig", num_local_experts=8, num_experts_per_tok=2)
        bridge.convert(source, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
        with pytest.raises(BridgeError, match="config"):
            bridge.export(tmp_path / "m.gguf", tmp_path / "new")
        bridge.export(tmp_path / "m.gguf", tmp_path / "new", config=source, dtype="F32")
        expected = predict(source, tokens)
    assert mean_kl(expected, predict(tmp_path / "new", tokens)) < 1e-5


@pytest.mark.parametrize(
    ("type", "format"),
    [
        *(("Q4_0", format) for format in ("gptq", "gptq_p", "awq", "compressed-tensors", "mlx")),
        *((type, format) for type in ("Q8_0", "Q4_K") for format in ("gptq_v2", "hqq")),
        ("Q2_K", "hqq"),
        ("Q3_K", "hqq"),
        ("Q6_K", "compressed-tensors"),
    ],
)
def test_a_layer_is_written_in_pieces_as_it_is_at_once(type: str, format: str, tmp_path: Path, monkeypatch) -> None:
    """Layers of up to 768 rows, and pieces of 128."""
    path = native(type, tmp_path)
    expected = bridge.export(path, tmp_path / "whole", format, config=CHECKPOINT)
    for limit in ("_WORDS_AT_ONCE", "_TRANSPOSED_AT_ONCE", "_CODES_AT_ONCE"):
        monkeypatch.setattr(f"bridge.conversion.checkpoints.block_layer.{limit}", 1)
    done = bridge.export(path, tmp_path / "pieces", format, config=CHECKPOINT)
    assert any(t.bits for t in done.tensors)
    assert [(t.name, t.how, t.bits, t.group_size) for t in done.tensors] == [
        (t.name, t.how, t.bits, t.group_size) for t in expected.tensors
    ]
    for one, other in zip(expected.tensors, done.tensors, strict=True):
        assert other.nmse == pytest.approx(one.nmse, rel=1e-6)
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "pieces"))
    assert first.read_bytes() == second.read_bytes()
