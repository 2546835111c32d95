"""What a checkpoint becomes for one program: no more than it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import Groups
from bridge.checkpoint.labels.hosts import HOSTS, check_for_host
from bridge.cli import main
from bridge.conversion.checkpoints.checkpoint_plan import with_joined_alike
from bridge.conversion.checkpoints.layer_plan import EXACT, ROUNDED, LayerPlan
from bridge.errors import BridgeError
from tests.support.encode import write_gptq
from tests.support.raw import edit_raw
from tests.support.tiny_models import save_model

Q, K, V, OUT = (f"model.layers.0.self_attn.{part}_proj" for part in "qkvo")


@pytest.fixture(scope="module")
def source(small_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Writes a GPTQ checkpoint of some form once."""
    made: dict[tuple[int, bool, bool], Path] = {}

    def write(bits: int = 4, sym: bool = True, desc_act: bool = False) -> Path:
        key = bits, sym, desc_act
        if key not in made:
            made[key] = tmp_path_factory.mktemp("gptq") / "model"
            write_gptq(made[key], small_model, bits, 64, sym, desc_act, "gptq_v2")
        return made[key]

    return write


def same_weights(old: Path, new: Path) -> bool:
    with bridge.open_checkpoint(old) as first, bridge.open_checkpoint(new) as second:
        return all(
            np.array_equal(first.read_module(name).dequantize(), second.read_module(name).dequantize())
            for name in second.modules
        )


@pytest.mark.parametrize(
    ("host", "format"), [(host, format) for host in HOSTS for format in FORMATS if format not in HOSTS[host].formats]
)
def test_a_format_that_a_program_does_not_read_is_refused_with_those_that_it_reads(host, format, source, tmp_path):
    with pytest.raises(BridgeError, match=rf"host='{host}': it does not read {format}; choose another format: floats"):
        bridge.repack(source(), tmp_path / "out", format, host=host)


@pytest.mark.parametrize("host", HOSTS)
def test_every_program_reads_floats(host, source, tmp_path):
    done = bridge.repack(source(), tmp_path / "out", "floats", host=host)
    assert {t.how for t in done.tensors} == {"floats"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config.get("rope_theta") == (10000.0 if host == "mlx" else None)  # mlx-lm reads no rope_parameters


@pytest.mark.parametrize(
    ("host", "format"),
    [("transformers", "compressed-tensors"), ("vllm", "gptq"), ("vllm", "gptq_v2"), ("sglang", "gptq")],
)
def test_zero_points_become_the_middle_of_more_bits_where_a_program_reads_no_others(host, format, source, tmp_path):
    done = bridge.repack(source(sym=False), tmp_path / "out", format, host=host)
    assert {(t.how, t.bits) for t in done.tensors if t.bits} == {("exact", 8)}
    assert any(f"instead of 4: {format}, as {host} reads it, has no zero points but the m" in n for n in done.notes)
    assert same_weights(source(sym=False), tmp_path / "out")
    with bridge.open_checkpoint(tmp_path / "out") as ckpt:
        assert all((ckpt.read_module(name).zeros == 128).all() for name in ckpt.modules)


@pytest.mark.parametrize(("host", "format"), [("vllm", "compressed-tensors"), ("vllm", "awq"), ("transformers", "awq")])
def test_zero_points_are_carried_where_a_program_reads_them(host, format, source, tmp_path):
    done = bridge.repack(source(sym=False), tmp_path / "out", format, host=host)
    assert {(t.how, t.bits) for t in done.tensors if t.bits} == {("exact", 4)}


@pytest.mark.parametrize(
    ("host", "format"), [("vllm", "gptq"), ("vllm", "compressed-tensors"), ("transformers", "compressed-tensors")]
)
def test_there_is_no_act_order_for_programs_without_it(host, format, source, tmp_path):
    bridge.repack(source(desc_act=True), tmp_path / "out", format, host=host)
    with bridge.open_checkpoint(tmp_path / "out") as ckpt:
        assert ckpt.modules
        assert all(ckpt.group_order(name) is None for name in ckpt.modules)


@pytest.mark.parametrize(
    ("host", "format", "why"),
    [
        (None, "compressed-tensors", "host='sglang' keeps, the only program that reads it in compressed-tensors"),
        ("vllm", "gptq", "vllm does not read in gptq"),
        (None, "awq", "awq does not hold"),
    ],
)
def test_layers_that_are_rounded_or_floats_for_their_act_order_are_counted(host, format, why, source, tmp_path):
    done = bridge.repack(source(desc_act=True), tmp_path / "out", format, host=host)
    lost = sum(
        t.name.startswith("model.layers") and t.how in ("rounded", "floats") and "norm" not in t.name
        for t in done.tensors
    )
    assert lost
    assert f"{lost} layers have act-order, which {why}" in done.notes


@pytest.mark.parametrize(("host", "format"), [("transformers", "gptq"), ("sglang", "gptq")])
def test_act_order_is_carried_for_programs_that_have_it(host, format, source, tmp_path):
    done = bridge.repack(source(desc_act=True), tmp_path / "out", format, host=host)
    assert {t.how for t in done.tensors if t.bits} == {"exact"}
    with bridge.open_checkpoint(tmp_path / "out") as ckpt:
        assert any(ckpt.group_order(name) is not None for name in ckpt.modules)


def test_gptq_of_3_bits_becomes_4_bits_for_vllm(source, tmp_path):
    done = bridge.repack(source(bits=3), tmp_path / "out", "gptq", host="vllm")
    assert {(t.how, t.bits) for t in done.tensors if t.bits} == {("exact", 4)}
    assert same_weights(source(bits=3), tmp_path / "out")


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_gptq_of_several_forms_is_refused_for_transformers(format, small_model, tmp_path):
    bits = {"model.layers.0.mlp.down_proj": 8}
    write_gptq(
        tmp_path / "mixed", small_model, 4, 64, checkpoint_format="gptq_v2", module_bits=lambda n: bits.get(n, 4)
    )
    reason = f"it reads {format} only if all layers have the same bits and groups; choose another format: compressed-"
    with pytest.raises(BridgeError, match=reason):
        bridge.repack(tmp_path / "mixed", tmp_path / "out", format, host="transformers")
    assert bridge.repack(tmp_path / "mixed", tmp_path / "out", "compressed-tensors", host="transformers").tensors


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_coded_experts_are_refused_for_transformers_where_it_reads_none(format):
    layers = {"model.layers.0.mlp.experts.1.down_proj": Groups(4, 32)}
    reason = f"it reads no experts of {format}; choose another format: floats, compressed-tensors"
    with pytest.raises(BridgeError, match=reason):
        check_for_host(layers, [], format, "transformers")
    for host, others in (("vllm", format), ("sglang", format), ("transformers", "compressed-tensors")):
        check_for_host(layers, [], others, host)


@pytest.mark.parametrize("floats", [[], ["model.layers.1.mlp.experts.0.down_proj"]])
def test_experts_of_several_forms_are_refused_for_transformers(floats):
    layers = {"model.layers.0.mlp.experts.0.down_proj": Groups(4, 32), Q: Groups(8, 32)}
    check_for_host(layers, [K], "compressed-tensors", "transformers")
    if not floats:
        layers["model.layers.1.mlp.experts.0.down_proj"] = Groups(8, 32)
    with pytest.raises(BridgeError, match="compressed-tensors only if all experts have the same bits and groups"):
        check_for_host(layers, floats, "compressed-tensors", "transformers")
    check_for_host(layers, floats, "compressed-tensors", "vllm")


def test_a_layer_of_floats_is_refused_where_that_of_all_blocks_must_be_quantized():
    check_for_host({Q: Groups(4, 32)}, [K, "lm_head", "model.layers.1.mlp.gate"], "gptq", "transformers")
    with pytest.raises(BridgeError, match="only if all layers"):
        check_for_host({Q: Groups(4, 32)}, [Q.replace("layers.0", "layers.1")], "gptq", "transformers")


def test_a_head_is_floats_where_a_program_reads_no_other(tmp_path):
    model = save_model(tmp_path / "model", "LlamaConfig")
    write_gptq(tmp_path / "head", model, 4, 64, checkpoint_format="gptq_v2", lm_head=True)
    for host, coded in (("transformers", False), ("vllm", True)):
        bridge.repack(tmp_path / "head", tmp_path / host, "gptq", host=host)
        with bridge.open_checkpoint(tmp_path / host) as ckpt:
            assert ("lm_head" in ckpt.modules) is coded


def test_layers_that_vllm_joins_have_one_form():
    four, eight = LayerPlan(EXACT, Groups(4, 128, True)), LayerPlan(EXACT, Groups(8, 64))
    alike = LayerPlan(EXACT, Groups(8, 64))
    assert with_joined_alike({Q: four, K: four, V: eight, OUT: four}) == {Q: alike, K: alike, V: alike, OUT: four}
    assert with_joined_alike({Q: four, K: None, V: four}) == {Q: None, K: None, V: None}


def test_groups_that_do_not_divide_each_other_are_not_joined():
    plans = {Q: LayerPlan(EXACT, Groups(4, 96)), K: LayerPlan(EXACT, Groups(4, 64)), V: LayerPlan(EXACT, Groups(4, 64))}
    assert set(with_joined_alike(plans).values()) == {None}


def test_rows_and_groups_are_joined_as_groups():
    plans = {Q: LayerPlan(EXACT, Groups(4, -1)), K: LayerPlan(EXACT, Groups(4, 64)), V: LayerPlan(EXACT, Groups(4, -1))}
    assert {plan.groups.group_size for plan in with_joined_alike(plans).values() if plan} == {64}


def test_joined_layers_have_scales_that_hold_those_of_all():
    plans = {part: LayerPlan(EXACT, Groups(4, 64, scales=dtype)) for part, dtype in ((Q, "F16"), (K, "BF16"))}
    assert set(with_joined_alike(plans).values()) == {LayerPlan(EXACT, Groups(4, 64, scales="F32"))}


def test_joined_layers_have_one_act_order():
    first, second, none = (LayerPlan(EXACT, Groups(4, 64, act_order=order > 0), order=order) for order in (1, 2, 0))
    assert with_joined_alike({Q: first, K: first}) == {Q: first, K: first}
    for other in (second, none, replace(first, groups=Groups(4, 32, act_order=True))):
        assert with_joined_alike({Q: first, K: other}) == {Q: None, K: None}
    rounded = LayerPlan(ROUNDED, Groups(8, 32))
    assert with_joined_alike({Q: first, K: rounded}) == {Q: rounded, K: rounded}


def test_joined_layers_of_8_bit_floats_have_scales_of_the_same_blocks():
    tensor, channel = (LayerPlan(EXACT, Groups(8, -1, True, "FP8", rows=rows), packed=True) for rows in (-1, 1))
    assert with_joined_alike({Q: tensor, K: tensor}) == {Q: tensor, K: tensor}
    assert with_joined_alike({Q: tensor, K: channel}) == {Q: None, K: None}


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_layers_of_other_act_order_are_floats_where_sglang_joins_them(format, small_model, tmp_path):
    write_gptq(tmp_path / "ordered", small_model, 4, 64, desc_act=True, checkpoint_format="gptq_v2")
    key = f"{K}.g_idx"
    with bridge.open_checkpoint(tmp_path / "ordered") as ckpt:
        order = ckpt.store.read(key)
    edit_raw(
        tmp_path / "ordered/model.safetensors",
        lambda tensors: tensors.update({key: (tensors[key][0], np.ascontiguousarray(order[::-1]).tobytes())}),
    )
    done = bridge.repack(tmp_path / "ordered", tmp_path / "out", format, host="sglang")
    how = {t.name.removesuffix(".weight"): t.how for t in done.tensors}
    assert [how[Q], how[K], how[V], how[OUT]] == ["floats", "floats", "floats", "exact"]
    assert same_weights(tmp_path / "ordered", tmp_path / "out")


def test_an_unknown_program_is_refused_with_those_that_are_known(source, tmp_path):
    with pytest.raises(BridgeError, match="unknown host='ollama': choose transformers, vllm, sglang, mlx"):
        bridge.repack(source(), tmp_path / "out", "gptq", host="ollama")


def test_a_program_needs_a_format(source, tmp_path, capsys):
    assert main(["repack", str(source()), str(tmp_path / "out"), "--for", "vllm"]) == 2
    assert "--for vllm: give --format too" in capsys.readouterr().err


def test_the_command_line_has_the_program(source, tmp_path, capsys):
    arguments = [str(source(sym=False)), str(tmp_path / "out"), "--format", "gptq", "--for", "vllm"]
    assert main(["repack", *arguments]) == 0
    assert "8 bits" in capsys.readouterr().out
