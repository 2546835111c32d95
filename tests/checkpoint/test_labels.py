"""Labels of written checkpoints, as the programs that load them match names of their own with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import Groups, QuantizedLayers
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.labels.schemes import ignored, matches, read_schemes, scheme_of

FOUR, EIGHT = Groups(4, 32), Groups(8, 32)
BLOCK = "model.layers.0"
# of a checkpoint of several parts, in that of transformers, and in vLLM
PARTS = ("model.layers.0", "model.language_model.layers.0", "language_model.model.layers.0")
TOWER = ("visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv")


def labels(format: str, groups: dict[str, Groups], floats: list[str], *, towers: bool = False) -> dict[str, Any]:
    made = FORMATS[format].labels(QuantizedLayers(groups, floats, asymmetric=False, act_order=False, towers=towers))
    return made["quantization_config"]


def rule(config: dict[str, Any], module: str) -> dict[str, int] | bool | None:
    """What `dynamic` says of a module, as vLLM, SGLang and GPTQModel read it: False if it is not quantized."""
    for pattern, sizes in config.get("dynamic", {}).items():
        if re.match(pattern[2:], module):
            return sizes if pattern.startswith("+:") else False
    return None


def linears(block: str, **others: Groups) -> dict[str, Groups]:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    return {f"{block}.{name}": others.get(name.rpartition(".")[2], FOUR) for name in names}


def test_gptq_has_rules_for_layers_that_vllm_and_sglang_join() -> None:
    experts = {f"{BLOCK}.mlp.experts.{i}.{part}_proj": EIGHT for i in range(2) for part in ("gate", "up", "down")}
    groups = linears(BLOCK, q_proj=EIGHT, k_proj=EIGHT, v_proj=EIGHT) | experts
    groups |= linears("model.layers.1") | linears("model.layers.2")  # 4 bits are the usual
    config = labels("gptq", groups, [f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up")])
    sizes = {"bits": 8, "group_size": 32}
    assert rule(config, f"{BLOCK}.self_attn.q_proj") == rule(config, f"{BLOCK}.self_attn.qkv_proj") == sizes
    assert rule(config, f"{BLOCK}.mlp.experts") == rule(config, f"{BLOCK}.mlp.experts.1.up_proj") == sizes
    assert rule(config, "model.layers.1.mlp.gate_up_proj") is rule(config, "model.layers.1.mlp.up_proj") is False
    assert rule(config, f"{BLOCK}.self_attn.o_proj") is None


def test_layers_that_differ_are_not_joined() -> None:
    config = labels("gptq", linears(BLOCK, q_proj=EIGHT), [])
    assert rule(config, f"{BLOCK}.self_attn.qkv_proj") is None
    config = labels("gptq", linears(BLOCK, q_proj=EIGHT, k_proj=EIGHT), [f"{BLOCK}.self_attn.v_proj"])
    assert rule(config, f"{BLOCK}.self_attn.qkv_proj") is None


@pytest.mark.parametrize("block", PARTS)
def test_gptq_rules_fit_any_programs_names_of_a_model_of_several_parts(block: str) -> None:
    config = labels("gptq_v2", linears(PARTS[0], o_proj=EIGHT), ["model.layers.0.mlp.gate", TOWER[0]], towers=True)
    assert rule(config, f"{block}.self_attn.o_proj") == {"bits": 8, "group_size": 32}
    assert rule(config, f"{block}.mlp.gate") is False
    assert [rule(config, name) for name in TOWER] == [False, False]
    assert rule(config, f"{block}.mlp.gate_proj") is rule(config, f"{block}.self_attn.q_proj") is None


@pytest.mark.parametrize("block", PARTS)
def test_awq_names_fit_any_programs_names_of_a_model_of_several_parts(block: str) -> None:
    shards = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    floats = [*shards, TOWER[0]]
    quantized = {name: groups for name, groups in linears(PARTS[0]).items() if name not in floats}
    config = labels("awq", quantized, floats, towers=True)
    listed = config["modules_to_not_convert"]
    assert rule(config, f"{block}.self_attn.q_proj") is False  # GPTQModel
    assert rule(config, f"{block}.self_attn.o_proj") is None
    for module in (f"{block}.self_attn.q_proj", f"{block}.self_attn.qkv_proj", *TOWER):
        assert any(name in module for name in listed), module  # vLLM, SGLang
        assert any(module.endswith(name) for name in listed), module  # transformers
    for module in (f"{block}.self_attn.o_proj", f"{block}.mlp.down_proj"):
        assert not any(name in module for name in listed), module


@pytest.mark.parametrize("block", PARTS)
def test_schemes_fit_any_programs_names_of_a_model_of_several_parts(block: str) -> None:
    raw = labels("compressed-tensors", linears(PARTS[0], o_proj=EIGHT), [f"{PARTS[0]}.mlp.gate", TOWER[0]], towers=True)
    quant = QuantConfig(method="compressed-tensors", raw=raw, source=Path("config.json"))
    schemes = read_schemes(quant)
    found = scheme_of(f"{block}.self_attn.o_proj", schemes, None), scheme_of(f"{block}.mlp.down_proj", schemes, None)
    assert [scheme and scheme.bits for scheme in found] == [8, 4]
    assert all(matches(name, ignored(quant), None) for name in (f"{block}.mlp.gate", *TOWER))
    assert not matches(f"{block}.mlp.gate_proj", ignored(quant), None)


def test_experts_that_are_alike_have_one_target_which_is_a_pattern() -> None:
    """transformers takes the experts' scheme from the patterns; the many experts of a layer have one."""
    experts = {f"{BLOCK}.mlp.experts.{i}.up_proj": EIGHT for i in range(3)}
    floats = [f"model.layers.1.mlp.experts.{i}.up_proj" for i in range(3)] + [f"{BLOCK}.mlp.experts.2.down_proj"]
    experts |= {f"{BLOCK}.mlp.experts.{i}.down_proj": EIGHT for i in range(2)}
    raw = labels("compressed-tensors", linears(BLOCK) | linears("model.layers.1") | experts, floats)
    targets = next(group["targets"] for group in raw["config_groups"].values() if group["weights"]["num_bits"] == 8)
    blocks = [rf"re:^model\.layers\.{i}\.mlp\.experts" for i in range(2)]
    assert targets == [rf"{blocks[0]}\.\d+\.up_proj$", *(rf"{blocks[0]}\.{i}\.down_proj$" for i in range(2))]
    assert raw["ignore"] == [rf"{blocks[1]}\.\d+\.up_proj$", rf"{blocks[0]}\.2\.down_proj$", "lm_head"]


def test_mlx_has_the_names_that_its_programs_have_for_a_model_of_several_parts() -> None:
    layer = "model.language_model.layers.0.mlp.down_proj"
    said = labels("mlx", {**linears("model.language_model.layers.1"), layer: EIGHT, "lm_head": EIGHT}, [], towers=True)
    named = {layer, "language_model.model.layers.0.mlp.down_proj", "lm_head", "language_model.lm_head"}
    assert said.keys() - {"bits", "group_size", "mode"} == named
