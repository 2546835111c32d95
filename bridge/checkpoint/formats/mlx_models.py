"""What models of mlx-lm need: the experts of a mixture in stacks, and a config.json with older names.

Experts are stacked as switch_mlp.gate_proj, .up_proj and .down_proj:

    model.layers.0.mlp.experts.3.gate_proj          matrix 3 of model.layers.0.mlp.switch_mlp.gate_proj
    model.layers.0.block_sparse_moe.experts.3.w1    matrix 3 of model.layers.0.block_sparse_moe.switch_mlp.gate_proj

STACKING has the model_types of config.json whose models of mlx-lm 0.32 take such stacks, and change nothing else where
they find them (Qwen3-Next's norms are taken to be less one unless experts are stacked).

Many models know the names of transformers 4 only, and require them.
"""

from typing import Any

from bridge.checkpoint.tensor_names import expert_of

STACKING = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "kimi_k2", "minimax_m2",
    "mixtral", "phimoe", "qwen2_moe", "qwen3_moe",
})  # fmt: skip
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OWN = {"mlp": {name: name for name in _MIXTRAL.values()}, "block_sparse_moe": _MIXTRAL}


def stack_of(model_type: str, module: str) -> tuple[str, int] | None:
    """The stack that a module is in, and which matrix of it; None if it is not an expert's, or none is known."""
    expert = expert_of(module) if model_type in STACKING else None
    mixture = expert.experts.removesuffix(".experts") if expert else ""
    name = _OWN.get(mixture.rpartition(".")[2], {}).get(expert.part) if expert else None
    return None if expert is None or name is None else (f"{mixture}.switch_mlp.{name}", expert.number)


def module_of(stack: str, expert: int) -> str:
    """The module of one expert of a stack."""
    mixture, _, name = stack.partition(".switch_mlp.")
    names = _MIXTRAL if mixture.endswith("block_sparse_moe") else {}
    part = next((old for old, new in names.items() if new == name), name)
    return f"{mixture}.experts.{expert}.{part}"


def mlx_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with both names of rope's rules and of the number of experts, its language model's too; that says
    whether the head is tied."""
    older: dict[str, Any] = {}
    rules = config.get("rope_parameters")
    if isinstance(rules, dict) and "rope_theta" in rules:
        rope_scaling = {
            key: value for key, value in rules.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
        kind = rope_scaling.get("rope_type", "default")
        older["rope_theta"] = rules["rope_theta"]
        older["rope_scaling"] = None if kind == "default" else {**rope_scaling, "type": kind}
        if "partial_rotary_factor" in rules:
            older["partial_rotary_factor"] = rules["partial_rotary_factor"]
    if config.get("num_local_experts"):
        older["num_experts"] = config["num_local_experts"]
    with_older = {**older, **config}
    if isinstance(text := config.get("text_config"), dict):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        with_older["text_config"] = {**tied, **mlx_config(text)}
    return with_older
