"""Laguna: a mixture of experts whose layers differ in their number of heads, with gates on what heads attend to.

Three of four layers may have a window, with another rotation. A gate is one number for each head, or for each element
of a head. A bias is added to the router's sigmoid to choose experts, but not to weight them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.mixtures import LAYER_KINDS, router_bias
from bridge.models.families.windows import local_base, rules_of_both, window_layers
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    decoder,
    gated_mlp,
    networks,
    pre_norm_attention,
)

_PERIOD = 4  # of layers, of which llama.cpp takes the first for one with full attention if no key says so


def _usual(layers: int) -> list[bool]:
    return [layer % _PERIOD != 0 for layer in range(layers)]


def _heads(config: Config, args: Arguments) -> list[int]:
    heads = config.get("num_attention_heads_per_layer") or [args.heads] * args.layers
    counts = isinstance(heads, list) and all(type(count) is int and count > 0 for count in heads)
    if not counts or len(heads) != args.layers or any(count % args.kv_heads for count in heads):
        raise BridgeError(
            f"{config.path}: num_attention_heads_per_layer is {heads!r:.80}; must be a multiple of {args.kv_heads} "
            f"key-value heads for each of {args.layers} layers"
        )
    return [config.within_sides("num_attention_heads_per_layer times head_dim", h * args.head_dim) and h for h in heads]


def _per_element(config: Config) -> list[str] | str:
    """How gates are said to be: for all layers, or of each."""
    kinds = config.get("gating_types") or config.get("gating", True)
    return "per_head" if kinds is True else kinds


def _layer_sizes(config: Config, args: Arguments) -> Mapping[str, Sequence[int]]:
    heads, kinds = _heads(config, args), _per_element(config)
    kinds = kinds if isinstance(kinds, list) else [kinds] * args.layers
    names = [str(kind).replace("-", "_") for kind in kinds]
    if len(names) != args.layers or {*names} - {"per_head", "per_element"}:
        raise BridgeError(
            f"{config.path}: gating is {_per_element(config)!r:.80}; must be per-head or per-element, in every layer"
        )
    q = [count * args.head_dim for count in heads]
    return {"q": q, "gate": [a if name == "per_head" else b for name, a, b in zip(names, heads, q, strict=True)]}


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    def rotated(kind: str) -> int:
        rules = rope_rules(config).get(kind) or {}
        count = int(args.head_dim * float(rules.get("partial_rotary_factor", 1.0)))
        if count % 2:
            raise BridgeError(f"{config.path}: {count} elements of a head are rotated; llama.cpp rotates pairs")
        return count

    windows = list(window_layers(config, args.layers, 1)) if config.get("sliding_window") else [False] * args.layers
    others, local = rotated("full_attention"), rotated("sliding_attention")
    keys: dict[str, Any] = {
        "attention.head_count": _heads(config, args), "leading_dense_block_count": args.leading,
        "rope.dimension_count": others,
    }  # fmt: skip
    if rope_rules(config).get("sliding_attention"):
        keys |= {"rope.freq_base_swa": local_base(config), "rope.dimension_count_swa": local}
    if windows[0] and not all(windows) and local != others:
        raise BridgeError(
            f"{config.path}: layer 0 has a window, of whose heads {local} elements are rotated, of others {others}; "
            "llama.cpp then rotates as many in all layers"
        )
    if any(windows):
        keys["attention.sliding_window"] = config.integer("sliding_window")
        keys["attention.sliding_window_pattern"] = None if windows == _usual(args.layers) else windows
    return keys


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers, head_dim = stored.values["num_hidden_layers"], stored.values["head_dim"]
    heads, window = stored.get("attention.head_count"), stored.get("attention.sliding_window", 0)
    pattern = stored.get("attention.sliding_window_pattern", _usual(layers)) if window else [False] * layers
    rules = rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0))
    share = stored.get("rope.dimension_count_swa", head_dim) / head_dim
    rules["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = share
    heads = heads if isinstance(heads, list) else [heads] * layers
    return {
        "num_attention_heads_per_layer": heads, "num_attention_heads": heads[0],
        "sliding_window": window, **rules,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in pattern],
    }  # fmt: skip


LAGUNA = Family(
    titles=("Laguna",), arch="laguna", named_as="exaone-moe", architectures=("LagunaForCausalLM",),
    model_type="laguna",
    keys={
        "head_dim": 128, "num_experts": None, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "first_k_dense_replace": 1, "yarn_betas": False,
    },
    expects=(
        SILU, NO_BIASES, Expected("moe_router_logit_softcapping", (0.0,)),
        Expected("moe_apply_router_weight_on_input", (False,)),
    ),
    layer_sizes=_layer_sizes,
    metadata=(
        Computed(_metadata, _config), Constant("expert_weights_norm", True), Constant("expert_gating_func", 2),
        Key("expert_weights_scale", "moe_routed_scaling_factor", 1.0), LAYER_KINDS,
    ),
    lacks=("first_k_dense_replace",),
    table=decoder(
        *pre_norm_attention(
            Row("self_attn.g_proj", "gate hidden", name="attn_gate.weight"),
            Row("self_attn.q_norm", "head"),
            Row("self_attn.k_norm", "head"),
        ),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            router_bias("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            *(
                replace(row, also=(row.source.replace("shared_expert", "shared_experts"),))
                for row in gated_mlp("mlp.shared_expert", "shared")
            ),
        ),
    ),
)  # fmt: skip
