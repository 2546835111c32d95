"""compressed-tensors: whatever llm-compressor has written over the years comes back as what was stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from tests.support.encode import Quantized, quantize, write_folder
from tests.support.encode_compressed import MXFP6, config, int_tensors, mxfp6_tensors, packed_tensors, scheme
from tests.support.refusal import refusal

NAME = "model.layers.0.mlp.up_proj"
OTHER = "model.layers.0.mlp.down_proj"
BITS = [2, 3, 4, 5, 6, 7, 8]


def weights(out: int = 72, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, (out, columns)).astype(np.float32)


def read(folder, tensors, quantization, name=NAME):
    with open_checkpoint(write_folder(folder, tensors, quantization)) as checkpoint:
        assert checkpoint.format.startswith("compressed-tensors ")
        assert not set(checkpoint.tensors) & set(tensors)
        tensor = checkpoint.read_module(name)
        assert checkpoint.modules[name].shape == tensor.shape
        assert (checkpoint.group_order(name) is None) == tensor.sequential
    for part in (tensor.codes, tensor.scales, tensor.zeros):
        assert part.flags.c_contiguous
    return tensor


def assert_same(tensor, q: Quantized) -> None:
    assert np.array_equal(tensor.codes, q.codes)
    assert np.array_equal(tensor.scales, q.scales)
    assert np.array_equal(tensor.zeros, q.zeros)
    assert np.array_equal(tensor.dequantize(), q.dequantize())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("by_words", [False, True])
@pytest.mark.parametrize("zeros", [None, "packed", "int8"])
def test_packed_codes_come_back_in_every_layout(tmp_path, bits, by_words, zeros):
    sym = zeros is None
    q = quantize(weights(), bits, 64, sym)
    if not sym:
        q.zeros[:5, 0], q.zeros[5:9, 0] = 0, 2**bits - 1
    tensor = read(
        tmp_path, packed_tensors(NAME, q, bits, zeros, by_words), config(scheme(bits, group_size=64, symmetric=sym))
    )
    assert_same(tensor, q)
    assert (tensor.bits, tensor.group_size, tensor.notes) == (bits, 64, ())


@pytest.mark.parametrize(("out", "columns"), [(72, 256), (13, 250), (5, 200)])
@pytest.mark.parametrize("bits", BITS)
def test_rows_and_zero_points_that_do_not_fill_their_words(tmp_path, bits, out, columns):
    q = quantize(weights(out, columns), bits, -1, sym=False)
    for by_words in (False, True):
        tensors = packed_tensors(NAME, q, bits, "packed", by_words)
        tensor = read(tmp_path / str(by_words), tensors, config(scheme(bits, "channel", None, symmetric=False)))
        assert_same(tensor, q)
        assert tensor.group_size == columns


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("strategy", "size"), [("channel", None), ("group", 32)])
def test_signed_bytes_come_back_as_codes(tmp_path, bits, sym, strategy, size):
    q = quantize(weights(), bits, size or -1, sym)
    said = config(scheme(bits, strategy, size, symmetric=sym), form="int-quantized" if bits == 8 else "naive-quantized")
    assert_same(read(tmp_path, int_tensors(NAME, q, bits, not sym), said), q)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("packed", [True, False])
def test_one_scale_for_the_whole_tensor(tmp_path, shape, packed):
    q = quantize(weights(), 8, -1, sym=True)
    q.scales[:] = 0.001
    tensors = packed_tensors(NAME, q, 8, None) if packed else int_tensors(NAME, q, 8)
    tensors[f"{NAME}.weight_scale"] = q.scales[0, 0].reshape(shape)
    assert_same(read(tmp_path, tensors, config(scheme(8, "tensor", None))), q)


def test_one_scale_for_a_block_of_rows_and_columns(tmp_path):
    q = quantize(weights(72, 256), 8, 64, sym=True)
    q.scales[:] = q.scales[np.arange(72) // 32 * 32]
    tensors = int_tensors(NAME, q, 8)
    tensors[f"{NAME}.weight_scale"] = q.scales[::32]
    said = config(scheme(8, "block", None, block_structure=[32, 64]), form="naive-quantized")
    assert_same(read(tmp_path, tensors, said), q)


@pytest.mark.parametrize("zeros", [None, "packed"])
def test_act_order_keeps_the_group_of_every_column(tmp_path, zeros):
    q = quantize(weights(), 4, 64, zeros is None, desc_act=True)
    said = config(scheme(4, group_size=64, symmetric=zeros is None, actorder="group"))
    tensor = read(tmp_path, packed_tensors(NAME, q, 4, zeros, g_idx=True), said)
    assert np.array_equal(tensor.group_of_column, q.group)
    assert np.array_equal(tensor.dequantize(), q.dequantize())


@pytest.mark.parametrize("filled", [True, False])
def test_a_g_idx_that_is_in_order_or_was_never_filled_is_no_act_order(tmp_path, filled):
    q = quantize(weights(), 4, 64, sym=True)
    tensors = packed_tensors(NAME, q, 4, None, g_idx=True)
    if not filled:
        tensors[f"{NAME}.weight_g_idx"][:] = -1
    tensor = read(tmp_path, tensors, config(scheme(4, group_size=64, actorder="dynamic")))
    assert tensor.sequential
    assert_same(tensor, q)


def test_groups_that_are_of_uneven_size_under_act_order(tmp_path):
    q = quantize(weights(72, 240), 4, 48, sym=True)
    group = np.repeat(np.arange(5), [100, 50, 40, 30, 20])[np.random.default_rng(1).permutation(240)]
    uneven = Quantized(q.codes, q.scales, q.zeros, group)
    tensor = read(tmp_path, packed_tensors(NAME, uneven, 4, None, g_idx=True), config(scheme(4, actorder="group")))
    assert np.array_equal(tensor.dequantize(), uneven.dequantize())


@pytest.mark.parametrize(
    ("targets", "bits"),
    [
        ((("Linear",), ("re:.*up_proj",)), (4, 8)),  # an expression before a class
        ((("re:.*up_proj",), (NAME,)), (4, 8)),  # a name before an expression
        ((("re:.*mlp.*",), ("re:.*gate.*", "re:.*.up_proj")), (4, 8)),  # the first in alphabetical order
        ((("Linear",), ("Embedding",)), (8, 4)),
        ((("re:up_proj",), ("Linear",)), (4, 8)),  # an expression matches from the start
    ],
)
def test_of_several_groups_the_closest_target_counts(tmp_path, targets, bits):
    schemes = [scheme(b, group_size=64, targets=t) for b, t in zip(bits, targets, strict=True)]
    q = quantize(weights(), 8, 64, sym=True)
    tensor = read(tmp_path, packed_tensors(NAME, q, 8, None), config(*schemes))
    assert tensor.bits == 8
    assert_same(tensor, q)


def test_quantized_embeddings_have_their_own_class(tmp_path):
    q = quantize(weights(), 8, -1, sym=True)
    name = "model.embed_tokens"
    both = (scheme(4, group_size=64), scheme(8, "channel", None, ("Embedding",)))
    assert_same(read(tmp_path, packed_tensors(name, q, 8, None), config(*both), name), q)


def test_the_config_under_the_name_that_it_had_at_first(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    write_folder(tmp_path, packed_tensors(NAME, q, 4, "int8"), None)
    said = config(scheme(4, group_size=64, symmetric=False))
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": said}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint.read_module(NAME), q)


def test_each_group_may_have_a_format_of_its_own(tmp_path):
    a, b = quantize(weights(), 4, 64, sym=False), quantize(weights(), 8, -1, sym=True)
    both = (
        scheme(4, group_size=64, symmetric=False, format="pack-quantized"),
        scheme(8, "channel", None, ("re:.*down_proj",), format="int-quantized"),
    )
    tensors = packed_tensors(NAME, a, 4) | int_tensors(OTHER, b, 8)
    folder = write_folder(tmp_path, tensors, config(*both, form="mixed-precision"))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "compressed-tensors pack-quantized and int-quantized"
        assert_same(checkpoint.read_module(NAME), a)
        assert_same(checkpoint.read_module(OTHER), b)
        assert checkpoint.quant.describe() == (
            "compressed-tensors pack-quantized and int-quantized, (4 bits, groups of 64, asymmetric for Linear), "
            "(8 bits, one group a row, symmetric for re:.*down_proj)"
        )


def test_layers_that_stayed_floats_and_biases_are_floats(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    tensors = packed_tensors(NAME, q, 4, None)
    plain = {
        f"{NAME}.bias": np.arange(72, dtype=np.float32),
        "lm_head.weight": weights(),
        "model.norm.weight": np.ones(256, np.float32),
    }
    with open_checkpoint(write_folder(tmp_path, tensors | plain, config(scheme(group_size=64)))) as checkpoint:
        assert set(checkpoint.tensors) == set(plain)
        assert np.array_equal(checkpoint.read_module(NAME).bias, np.arange(72))


def test_a_linear_that_the_config_does_not_list_as_ignored_is_claimed_to_be_quantized(tmp_path):
    tensors = packed_tensors(NAME, quantize(weights(), 4, 64, sym=True), 4, None) | {"lm_head.weight": weights()}
    for ignore in (["lm_head"], ["re:lm_.*"], []):
        said = config(scheme(group_size=64), ignore=ignore)
        with open_checkpoint(write_folder(tmp_path, tensors, said)) as checkpoint:
            assert checkpoint.reader is not None
            assert checkpoint.reader.claimed("lm_head") == (not ignore)
            assert not checkpoint.reader.claimed("model.embed_tokens")


def test_scales_of_activations_and_of_the_cache_are_left_out_and_said_once(tmp_path):
    q = quantize(weights(), 8, -1, sym=True)
    tensors = int_tensors(NAME, q, 8)
    parts = ("mlp.up_proj.input_scale", "mlp.up_proj.input_zero_point")
    for part in (*parts, "self_attn.k_scale", "self_attn.v_scale", "self_attn.kv_scale"):
        tensors[f"model.layers.0.{part}"] = np.ones(1, np.float32)
    said = config(scheme(8, "channel", None, input_activations={"num_bits": 8}), form="int-quantized")
    with open_checkpoint(write_folder(tmp_path, tensors, said)) as checkpoint:
        assert not checkpoint.tensors
        assert len(checkpoint.notes) == 2
        assert "the config quantizes activations too" in checkpoint.notes[0]
        assert "input_scale, input_zero_point, k_scale, kv_scale, v_scale left out" in checkpoint.notes[1]


def test_a_label_that_the_tensors_contradict_is_overruled_and_noted(tmp_path):
    q = quantize(weights(), 4, 64, sym=False)
    said = config(scheme(4, group_size=128), ignore=["re:.*up_proj"])
    tensor = read(tmp_path, packed_tensors(NAME, q, 4), said)
    assert_same(tensor, q)
    notes = "\n".join(tensor.notes)
    assert "ignore says it is not quantized" in notes
    assert "groups of 64 but the config says 128" in notes
    assert "has zero points but the config says symmetric" in notes


def test_rotations_that_are_folded_into_the_weights_are_nothing_to_undo(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    folded = {
        "config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}
    }
    assert_same(read(tmp_path, packed_tensors(NAME, q, 4, None), config(scheme(4), transform_config=folded)), q)


def test_numbers_may_be_written_as_texts_or_floats(tmp_path):
    q = quantize(weights(), 4, 64, sym=True)
    folder = write_folder(tmp_path, packed_tensors(NAME, q, 4, None), config(scheme("4", "group", 64.0)))
    with open_checkpoint(folder) as checkpoint:
        assert np.array_equal(checkpoint.read_module(NAME).dequantize(), q.dequantize())


def test_a_config_that_quantizes_the_cache_alone_leaves_floats(tmp_path):
    tensors = {f"{NAME}.weight": weights(), "model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    said = config(form="dense", kv_cache_scheme={"num_bits": 8, "type": "float"})
    with open_checkpoint(write_folder(tmp_path, tensors, said)) as checkpoint:
        assert list(checkpoint.tensors) == [f"{NAME}.weight"]
        assert not checkpoint.modules


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [True, False])
def test_the_compressed_tensors_package_packs_as_the_encoder_here(bits, sym):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    import torch

    q = quantize(weights(), bits, 64, sym)
    mine = packed_tensors(NAME, q, bits)
    half = 2 ** (bits - 1)
    codes = torch.from_numpy((q.codes.astype(np.int16) - half).astype(np.int8))
    zeros = torch.from_numpy((q.zeros - half).astype(np.int8))
    assert np.array_equal(helpers.pack_to_int32(codes, bits).numpy(), mine[f"{NAME}.weight_packed"])
    assert np.array_equal(helpers.pack_to_int32(zeros, bits, 0).numpy(), mine[f"{NAME}.weight_zero_point"])


# damaged input


def good(zeros: str | None = "packed", g_idx: bool = False) -> dict[str, np.ndarray]:
    return packed_tensors(NAME, quantize(weights(), 4, 64, zeros is None), 4, zeros, g_idx=g_idx)


ASYM = config(scheme(4, group_size=64, symmetric=False))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_shape", np.array([72, 264]), "weight_shape [72, 264] does not fit weight_packed [72, 32] of 4 bits"),
        ("weight_shape", np.array([71, 256]), "weight_shape [71, 256] does not fit"),
        ("weight_shape", np.array([72, -256]), "does not fit"),
        ("weight_shape", np.array([72, 256, 1]), "does not fit"),
        ("weight_shape", None, "no weight_shape"),
        ("weight_packed", None, "no weight_packed"),
        ("weight_packed", np.zeros((72, 128), np.uint8), "the shapes contradict each other"),
        ("weight_packed", np.zeros((2, 72, 32), np.int32), "the shapes contradict each other"),
        ("weight_scale", None, "no weight_scale"),
        ("weight_scale", np.full((72, 4), np.nan, np.float32), "288 of 288 values"),
        ("weight_scale", np.full((72, 4), np.inf, np.float16), "are NaN or infinite"),
        ("weight_scale", np.ones((71, 4), np.float32), "the shapes contradict each other"),
        ("weight_scale", np.ones((72, 257), np.float32), "the shapes contradict each other"),
        ("weight_scale", np.ones((72, 4), np.int32), "the shapes contradict each other"),
        ("weight_zero_point", None, "no weight_zero_point, but the config says asymmetric"),
        ("weight_zero_point", np.zeros((10, 4), np.int32), "the shapes contradict each other"),
        ("weight_zero_point", np.zeros((9, 3), np.int32), "the shapes contradict each other"),
        ("weight_zero_point", np.zeros((72, 3), np.int8), "the shapes contradict each other"),
        ("weight_zero_point", np.zeros((72, 4), np.float32), "the shapes contradict each other"),
        ("weight", np.zeros((72, 256), np.int8), "the shapes contradict each other"),
        ("bias", np.zeros(71, np.float32), "the shapes contradict each other"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refusal(tmp_path, part, value, said):
    tensors = good() | {f"{NAME}.bias": np.zeros(72, np.float32)}
    tensors.pop(f"{NAME}.{part}", None)
    if value is not None:
        tensors[f"{NAME}.{part}"] = value
    message = refusal(write_folder(tmp_path, tensors, ASYM))
    assert said in message
    assert NAME in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g.fill(4), "names a group beyond the 4"),
        (lambda g: g.__setitem__(0, -1), "names a group beyond the 4"),
        (lambda g: g.resize(255, refcheck=False), "the shapes contradict each other"),
    ],
)
def test_a_g_idx_out_of_range_or_too_short(tmp_path, change, said):
    tensors = good(None, g_idx=True)
    change(tensors[f"{NAME}.weight_g_idx"])
    assert said in refusal(write_folder(tmp_path, tensors, config(scheme(4, group_size=64, actorder="group"))))


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (config(scheme(4, "token")), "unknown strategy 'token'"),
        (config(scheme(4, "group", None)), "group_size None"),
        (config(scheme(4, "group", "many")), "group_size 'many'"),
        (config(scheme(4, "block", None)), "block_structure None is not [rows, columns]"),
        (config(scheme(1)), "num_bits 1 of type 'int' is not supported"),
        (config(scheme(16)), "num_bits 16"),
        (config(scheme(True)), "num_bits True"),
        (config(scheme(5, type="float")), "num_bits 5 of type 'float'"),
        (config(scheme(8, type="complex")), "type 'complex'"),
        (config(scheme(), form="nvfp6-pack-quantized"), "format 'nvfp6-pack-quantized' is not supported"),
        (config(scheme(), form="mxfp5-pack-quantized"), "quantize to pack-quantized (W4A16)"),
        (config(scheme(format="mxfp5-pack-quantized"), form="mixed-precision"), "'mxfp5-pack-quantized'"),
        (config(scheme(), form="marlin-24"), "'marlin-24'"),
        (config(scheme(), form="sparse-24-bitmask"), "'sparse-24-bitmask'"),
        (config(scheme(), sparsity_config={"format": "sparse-bitmask"}), "sparsity format 'sparse-bitmask'"),
        (config(scheme(targets=("re:(",))), "invalid pattern 're:('"),
        (config(scheme(), ignore=["re:["]), "invalid pattern 're:['"),
        (config(scheme()) | {"config_groups": ["W4A16"]}, "config_groups is not a table of tables"),
        (config(scheme()) | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups is not a table of tables"),
        (config(scheme() | {"weights": 4}), "weights of group_0 is not a table"),
        (config(scheme(targets=("re:a",)), scheme(targets=("re:b",))), "no target in"),
    ],
)
def test_configs_that_cannot_be_read_are_refusal(tmp_path, quantization, said):
    assert said in refusal(write_folder(tmp_path, good(None), quantization))


@pytest.mark.parametrize("apply", [[{"location": "weight_input"}, {"location": "input"}], [{}], None])
def test_rotations_at_run_time_are_refusal(tmp_path, apply):
    rotated = {"config_groups": {"u": {"type": "hadamard", "apply": apply}}}
    message = refusal(write_folder(tmp_path, good(None), config(scheme(), transform_config=rotated)))
    assert "transform_config u rotates activations" in message
    assert "folded into the weights" in message


def test_bytes_beyond_the_bits_that_the_config_says(tmp_path):
    q = quantize(weights(), 8, -1, sym=True)
    folder = write_folder(tmp_path, int_tensors(NAME, q, 8), config(scheme(4, "channel", None), form="naive-quantized"))
    assert "codes beyond -8..7" in refusal(folder)


def test_weights_that_were_never_compressed(tmp_path):
    tensors = {f"{NAME}.weight": weights(), f"{NAME}.weight_scale": np.ones((72, 4), np.float32)}
    message = refusal(write_folder(tmp_path, tensors, config(scheme(4, group_size=64))))
    assert "save_compressed=True" in message


def test_a_config_of_packed_weights_beside_plain_ones(tmp_path):
    message = refusal(write_folder(tmp_path, {f"{NAME}.weight": weights()}, config(scheme())))
    assert "says compressed-tensors, but no tensor of the checkpoint ends in .weight_scale" in message


def test_packed_weights_without_a_config_ask_for_it(tmp_path):
    q = quantize(weights(), 4, 128, sym=True)
    with pytest.raises(BridgeError, match=r"weight_packed is quantized, but .* has no quantization_config"):
        open_checkpoint(write_folder(tmp_path, packed_tensors(NAME, q, 4), None))


def mxfp6_module() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A module [24, 96] of random 6-bit floats, with all 64 of them, and its weights."""
    random = np.random.default_rng(3)
    codes = np.concatenate([np.arange(64), random.integers(0, 64, 24 * 96 - 64)]).reshape(24, 96)
    return mxfp6_tensors(NAME, codes, random.integers(117, 122, (24, 3), np.uint8))


def test_floats_of_6_bits_are_read_as_codes_of_8(tmp_path):
    tensors, meant = mxfp6_module()
    tensor = read(tmp_path, tensors, MXFP6)
    assert np.array_equal(tensor.dequantize(), meant)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.settings() == "6 bits, groups of 32"
        rows = np.array([23, 0, 7])
        assert np.array_equal(checkpoint.read_module(NAME, rows).dequantize(), meant[rows])


def test_floats_of_6_bits_are_those_that_compressed_tensors_unpacks(tmp_path):
    helpers = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    torch = pytest.importorskip("torch")
    tensors, meant = mxfp6_module()
    packed = torch.from_numpy(tensors[f"{NAME}.weight_packed"])
    values = helpers.unpack_fp6_from_uint8(packed, 24, 96, torch.float32)
    scales = np.ldexp(1.0, tensors[f"{NAME}.weight_scale"].astype(int) - 127).repeat(32, 1)
    assert np.array_equal(values.numpy() * scales, meant)
    assert np.array_equal(helpers.pack_fp6_to_uint8(values)[1:], packed[1:])  # the first row has a zero with a sign
    assert np.array_equal(read(tmp_path, tensors, MXFP6).dequantize(), meant)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{NAME}.weight_scale"), "has weight_packed but no weight_scale"),
        (lambda t: t[f"{NAME}.weight_scale"].__setitem__((1, 1), 255), "1 of 72 values of"),
        (lambda t: t.update({f"{NAME}.weight_packed": np.zeros((24, 48), np.uint8)}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.weight_scale": np.ones((24, 3), np.float16)}), "contradict each other"),
        (lambda t: t.update({f"{NAME}.bias": np.zeros(23, np.float16)}), "contradict each other"),
    ],
)
def test_damaged_floats_of_6_bits_are_named_in_one_line(tmp_path, change, said):
    tensors, _ = mxfp6_module()
    change(tensors)
    assert said in refusal(write_folder(tmp_path, tensors, MXFP6))
