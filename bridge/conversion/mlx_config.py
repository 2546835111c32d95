"""config.json as mlx-lm reads it: many of its models know the names of transformers 4 only, and require them."""

from typing import Any


def mlx_config(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json with both names of rope's rules and of the number of experts."""
    older: dict[str, Any] = {}
    rules = config.get("rope_parameters")
    if isinstance(rules, dict) and "rope_theta" in rules:
        own = {key: value for key, value in rules.items() if key not in ("rope_theta", "partial_rotary_factor")}
        kind = own.get("rope_type", "default")
        older["rope_theta"] = rules["rope_theta"]
        older["rope_scaling"] = None if kind == "default" else {**own, "type": kind}
        if "partial_rotary_factor" in rules:
            older["partial_rotary_factor"] = rules["partial_rotary_factor"]
    if config.get("num_local_experts"):
        older["num_experts"] = config["num_local_experts"]
    return {**older, **config}
