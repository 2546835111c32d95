"""Step 3.5 and 3.7 Flash: windows in most layers, which may have other heads; a gate for each head; clamped networks.

Layers with full attention rotate the first half of each head, those with a window all of it. A bias is added to the
router's sigmoid to choose experts, but not to weight them. All norms are stored minus one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.mixtures import router_bias
from bridge.models.families.windows import local_base, rules_of_both
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    NORM,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    in_layers,
    other_layers,
    require_layer,
)
from bridge.models.prediction import prediction

_FULL, _WINDOW = "full_attention", "sliding_attention"
_SHARES = {_FULL: 0.5, _WINDOW: 1.0}  # of a head that are rotated
_NAMES = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok", "share_expert_dims": "share_expert_dim",
}  # fmt: skip


def _usual(config: dict[str, Any]) -> dict[str, Any]:
    """The published keys, lists with an entry for each layer, as transformers names them."""
    usual = {_NAMES.get(key, key): value for key, value in config.items()}
    layers, kinds = usual.get("num_hidden_layers"), usual.get("layer_types")
    if not isinstance(layers, int):
        return usual
    if kinds is None:
        kinds = [_FULL] * layers
    if isinstance(kinds, list):
        usual["layer_types"] = kinds[:layers]
        usual.setdefault("mtp_layer_types", kinds[layers:])
    if usual.get("mlp_layer_types") is None:
        sparse = usual.get("moe_layers_enum")
        sparse = sparse.split(",") if isinstance(sparse, str) else range(3, layers) if sparse is None else sparse
        numbers = {int(layer) for layer in sparse if str(layer).strip()}
        of_all = range(max([layers, *(layer + 1 for layer in numbers)]))
        usual["mlp_layer_types"] = ["sparse" if layer in numbers else "dense" for layer in of_all]
    if not usual.get("rope_parameters") and isinstance(kinds, list):
        usual["rope_parameters"] = {kind: _rules(usual, kinds, kind) for kind in _SHARES}
    return usual


def _rules(config: dict[str, Any], kinds: list[str], kind: str) -> dict[str, Any]:
    """The rotation in layers of a kind, of lists that have that of each layer."""
    rules: dict[str, Any] = {"rope_type": "default"}
    if kind == _FULL:
        rules |= config.get("rope_scaling") or {}
    for key, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        values = config.get(key)
        if isinstance(values, list):
            of_kind = {value for value, other in zip(values, kinds, strict=False) if other == kind}
            values = None if not of_kind else of_kind.pop() if len(of_kind) == 1 else values
        if values is not None:
            rules[name] = values
    return rules


def _kinds(config: Config, args: Arguments) -> list[str]:
    """Those of all layers; the last, which predict further tokens, have full attention if nothing says otherwise."""
    more = [*config.get("mtp_layer_types", ()), *args.predicting * [_FULL]][: args.predicting]
    kinds = [*args.kinds, *more]
    if unknown := {*kinds} - {*_SHARES}:
        raise BridgeError(
            f"{config.path}: layer_types has {sorted(map(str, unknown))[0]!r}; must be {_FULL}, {_WINDOW}"
        )
    return kinds


def _heads(config: Config, args: Arguments) -> dict[str, tuple[int, int]]:
    """Heads, and those of keys and values, in layers of each kind."""
    other = config.get("attention_other_setting") or {}
    heads = config.get("num_sliding_attention_heads") or other.get("num_attention_heads", args.heads)
    kv_heads = other.get("num_attention_groups", args.kv_heads)
    if not all(type(count) is int and count > 0 for count in (heads, kv_heads)) or heads % kv_heads:
        raise BridgeError(
            f"{config.path}: {heads} heads cannot share {kv_heads} key-value heads in layers with a window"
        )
    for key, size in (
        ("head_dim", other.get("head_dim")),
        ("query_pre_attn_scalar", config.get("query_pre_attn_scalar")),
    ):
        if size not in (None, args.head_dim):
            raise BridgeError(
                f"{config.path}: {key} is {size}; llama.cpp has {args.head_dim}, the size of heads, in all layers"
            )
    config.within_sides("heads of layers with a window times head_dim", heads * args.head_dim)
    return {_FULL: (args.heads, args.kv_heads), _WINDOW: (heads, kv_heads)}


def _layer_sizes(config: Config, args: Arguments) -> Mapping[str, Sequence[int]]:
    of_kind, kinds = _heads(config, args), _kinds(config, args)
    heads, kv_heads = zip(*(of_kind[kind] for kind in kinds), strict=True)
    sparse = [kind == "sparse" for kind in config.get("mlp_layer_types")]
    sparse += [kind == "sparse" for kind in config.get("mtp_mlp_layer_types", ())]
    return {
        "gate": heads, "kv_groups": kv_heads, "q": [count * args.head_dim for count in heads],
        "kv": [count * args.head_dim for count in kv_heads],
        "sparse": [*sparse, *len(kinds) * [False]][: len(kinds)],
    }  # fmt: skip


def _check_rotation(config: Config, args: Arguments) -> None:
    rules = rope_rules(config)
    for kind in dict.fromkeys(args.kinds):
        share = rules[kind].get("partial_rotary_factor", 1.0)
        if share != _SHARES[kind]:
            raise BridgeError(
                f"{config.path}: partial_rotary_factor is {share!r:.80} in layers of {kind}; llama.cpp rotates "
                f"{_SHARES[kind]:g} of a head there"
            )
    kind = rules.get(_FULL, {}).get("rope_type") or "default"
    if kind not in ("default", "llama3"):
        raise BridgeError(f"{config.path}: rope of type {kind!r}; llama.cpp would scale layers with a window as well")


def _limits(config: Config, args: Arguments, key: str) -> list[float] | None:
    limits = config.get(key)
    if limits is None:
        return None
    return [*(float(limit or 0.0) for limit in limits), *args.predicting * [0.0]][: args.layers + args.predicting]


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    _check_rotation(config, args)
    require_layer(config, (kind == _WINDOW for kind in args.kinds), "has a window")
    kinds, sparse = _kinds(config, args), list(args.by_layer["sparse"])
    return {
        "attention.head_count": list(args.by_layer["gate"]),
        "attention.head_count_kv": list(args.by_layer["kv_groups"]),
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": [kind == _WINDOW for kind in kinds],
        "rope.dimension_count": args.head_dim,  # of which llama.cpp takes half in layers without a window
        "rope.freq_base_swa": local_base(config, args.rope.base),
        "leading_dense_block_count": sparse.index(True) if True in sparse else 0,
        "swiglu_clamp_exp": _limits(config, args, "swiglu_limits"),
        "swiglu_clamp_shexp": _limits(config, args, "swiglu_limits_shared"),
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    windows = stored.get("attention.sliding_window_pattern")
    heads, kv_heads = stored.get("attention.head_count"), stored.get("attention.head_count_kv")
    of_kind = dict(zip(windows, zip(heads, kv_heads, strict=False), strict=False))
    count, groups = of_kind.get(False) or of_kind[True]
    other, other_groups = of_kind.get(True) or of_kind[False]
    rules = rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0))
    for kind, share in _SHARES.items():
        rules["rope_parameters"][kind]["partial_rotary_factor"] = share
    limits = {"swiglu_limits": "swiglu_clamp_exp", "swiglu_limits_shared": "swiglu_clamp_shexp"}
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in stored.names for layer in range(len(windows))]
    return {
        **rules, "num_attention_heads": count, "num_key_value_heads": groups,
        "attention_other_setting": {"num_attention_heads": other, "num_attention_groups": other_groups},
        "layer_types": [_WINDOW if window else _FULL for window in windows],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "sliding_window": stored.get("attention.sliding_window"),
        **{name: stored.get(key) for name, key in limits.items() if stored.get(key) is not None},
    }  # fmt: skip


def _sparse(args: Arguments, layer: int) -> bool:
    return bool(args.by_layer["sparse"][layer])


def _experts() -> tuple[Row, ...]:
    """Three stacks, as they are published, or what `EXPERTS` knows."""
    gate, *parts = EXPERTS
    stacks = (replace(row, also=(f"moe.{row.source.rpartition('.')[2]}.weight", *row.also)) for row in parts)
    return replace(gate, also=("moe.gate", *gate.also)), *stacks


def _prediction() -> Iterator[Row]:
    """As `prediction`, also by the names of the shared head that are published."""
    for row in prediction("+1"):
        name = row.source.rpartition("}.")[2].replace("shared_head.head", "shared_head.output")
        yield replace(row, also=(f"transformer.{name}",)) if "shared_head" in name else row


STEP35 = Family(
    titles=("Step 3.5 and 3.7",), arch="step35",
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), model_type="step3p5",
    keys={
        "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": None, "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 1280, "partial_rotary_factor": 0.5, "layer_types": None,
        "factors_of_heads": True,
    },
    names={"num_experts": "n_routed_experts", "shared_expert_intermediate_size": "share_expert_dim"},
    expects=(
        SILU, NO_BIASES, Expected("mlp_bias", (False,)), Expected("zero_centered", (True,)),
        Expected("moe_router_activation", ("sigmoid",)), Expected("tie_word_embeddings", (False,)),
    ),
    usual=_usual, layer_sizes=_layer_sizes,
    metadata=(
        Computed(_metadata, _config), Key("expert_weights_scale", "moe_router_scaling_factor", 1.0),
        Key("expert_weights_norm", "norm_expert_weight", True), Constant("expert_gating_func", 2),
        Key("moe_every_n_layers", "moe_every_n_layer", 1),
    ),
    wrapped=True, predicts="carried", alternative="moe.",
    divided=True,
    table=decoder(
        Row("input_layernorm", "hidden", change="+1"),
        *attention(
            Row("self_attn.q_norm", "head", change="+1", optional=True),
            Row("self_attn.k_norm", "head", change="+1", optional=True),
            Row("self_attn.g_proj", "gate hidden", name="attn_gate.weight", optional=True),
        ),
        Row("post_attention_layernorm", "hidden", name="ffn_norm.weight", change="+1"),
        *in_layers(other_layers(_sparse), *gated_mlp("mlp", "inner")),
        *in_layers(
            _sparse,
            *_experts(),
            replace(router_bias("moe.router_bias", "mlp.gate.e_score_correction_bias"), optional=True),
            *(
                replace(row, also=(row.source.replace("share_expert", "mlp.shared_experts"),))
                for row in gated_mlp("share_expert", "shared")
            ),
        ),
        *_prediction(),
        norm=replace(NORM, change="+1"),
    ),
)  # fmt: skip
