"""Nemotron-H and Nemotron 3: every layer is one thing: Mamba-2, attention without rotation, a network or experts.

Networks are down(relu(up(x))^2). A bias is added to the router's sigmoid to choose experts, but not to weight them.
The experts of larger models work on a shorter vector, which a matrix before and one after them make. What predicts a
token further is a layer with attention and one with experts, which are one block in GGUF.
"""

from dataclasses import replace
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mamba2 import mamba2, mamba2_keys, mamba2_sizes
from bridge.models.families.mixtures import router_bias
from bridge.models.family import NO_BIASES, Expected, Family, LayerRule, Row, decoder, in_layers, stacked
from bridge.models.prediction import prediction, predicts

_KINDS = {
    "mamba": ("mamba", "linear_attention", "M"), "attention": ("attention", "full_attention", "*"),
    "network": ("mlp", "-"), "experts": ("moe", "E"),
}  # fmt: skip


_MTP = {
    "layers.1.norm": "post_attention_layernorm", "layers.1.final_layernorm": "shared_head.norm",
    **{f"layers.1.{name}": name for name in ("mixer.gate", "mixer.experts", "mixer.shared_experts")},
    **{f"layers.1.{name}": name for name in ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")},
}  # fmt: skip


def _is(kind: str) -> LayerRule:
    def has(args: Arguments, layer: int) -> bool:
        return kind in ("attention", "experts") if predicts(args, layer) else args.kinds[layer] in _KINDS[kind]

    return has


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    inner = args.more["ssm_heads"] * config.side("mamba_head_dim")
    config.within_sides("mamba_num_heads times mamba_head_dim", inner)
    return {**mamba2_sizes(config, args, inner), "routed": args.more.get("latent") or args.hidden}


def _layers(_config: Config, args: Arguments) -> dict[str, Any]:
    width = args.expert_inner or args.inner
    network, attention = _is("experts" if args.experts else "network"), _is("attention")
    blocks = range(args.layers + args.predicting)
    return {
        "feed_forward_length": [width if network(args, i) else 0 for i in blocks],
        "attention.head_count_kv": [args.kv_heads if attention(args, i) else 0 for i in blocks],
        "rope.dimension_count": args.hidden // args.heads,
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    network = "moe" if stored.get("expert_count") else "mlp"
    pairs = zip(stored.get("attention.head_count_kv"), stored.get("feed_forward_length"), strict=True)
    kinds = ["attention" if count else network if width else "mamba" for count, width in pairs]
    layers = stored.values["num_hidden_layers"]  # what predicts further tokens is none of them
    return {
        "layers_block_type": kinds[:layers],
        "mamba_head_dim": stored.get("ssm.inner_size") // stored.get("ssm.time_step_rank"),
    }


def _network(module: str, inner: str, outer: str = "hidden") -> tuple[Row, ...]:
    up = f"{module}.up_proj"
    return Row(up, f"{inner} {outer}"), Row(f"{module}.down_proj", f"{outer} {inner}", columns_of=(up,))


def _latent(source: str, shape: str, name: str) -> Row:
    return Row(f"mixer.{source}", shape, name=f"ffn_latent_{name}.weight", when=lambda args: bool(args.more["latent"]))


def _table(kind: str, *rows: Row) -> tuple[Row, ...]:
    return decoder(
        Row("norm", "hidden"),
        *mamba2("mixer", _is("mamba")),
        *(
            Row(f"mixer.{part}_proj", shape, layers=_is("attention"), interleaved=part in "qk")
            for part, shape in (("q", "q hidden"), ("k", "kv hidden"), ("v", "kv hidden"), ("o", "hidden q"))
        ),
        Row("post_attention_layernorm", "hidden", name="post_attention_norm.weight", layers=predicts),
        *in_layers(_is(kind), *rows),
        *prediction(),
        first=(Row("backbone.embeddings", "vocab hidden"),),
        norm=Row("backbone.norm_f", "hidden"),
        block="backbone.layers",
    )


NEMOTRON_H = Family(
    titles=("Nemotron-H",), arch="nemotron_h", architectures=("NemotronHForCausalLM",), model_type="nemotron_h",
    keys={"head_dim": 128, "layer_types": None, "rms_norm_eps": 1e-5},
    expects=(
        Expected("mlp_hidden_act", ("relu2",)), NO_BIASES, Expected("mlp_bias", (False,)),
        Expected("use_bias", (False,)), Expected("mamba_proj_bias", (False,)), Expected("use_conv_bias", (True,)),
    ),
    names={"layer_types": "layers_block_type", "rms_norm_eps": "layer_norm_epsilon"},
    sizes=_sizes,
    metadata=(
        *mamba2_keys(("conv_kernel", None), ("ssm_state_size", None), ("n_groups", None), ("mamba_num_heads", None)),
        Computed(_layers, _config), Constant("rope.scaling.finetuned", False),
    ),
    layer_norm=True, rotary=False, predicts="dropped",
    table=_table("network", *_network("mixer", "inner")),
)  # fmt: skip

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    titles=("Nemotron 3",), arch="nemotron_h_moe",
    chosen=lambda config: not {*_KINDS["experts"]}.isdisjoint(
        config.get("layers_block_type", config.get("hybrid_override_pattern", ()))
    ),
    keys={
        **NEMOTRON_H.keys, "num_experts": None, "moe_intermediate_size": None, "shared_expert_intermediate_size": None,
    },
    names={
        **NEMOTRON_H.names, "num_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    },
    metadata=(
        *NEMOTRON_H.metadata, Key("expert_shared_count", "n_shared_experts", 1),
        Key("expert_weights_norm", "norm_topk_prob", True), Key("expert_weights_scale", "routed_scaling_factor", 1.0),
        Key("expert_group_count", "n_group", 1), Key("expert_group_used_count", "topk_group", 1),
        Key("moe_latent_size", "moe_latent_size", defines="latent", optional=True),
    ),
    predicts="carried", mtp=_MTP,
    table=_table(
        "experts",
        Row("mixer.gate", "experts hidden", floats="F32"),
        router_bias("mixer.gate.e_score_correction_bias"),
        _latent("fc1_latent_proj", "latent hidden", "down"),
        *stacked("mixer.experts", *(
            replace(row, name=f"ffn_{part}_exps.weight")
            for row, part in zip(_network("mixer.experts.*", "expert", "routed"), ("up", "down"), strict=True)
        )),
        _latent("fc2_latent_proj", "hidden latent", "up"),
        *_network("mixer.shared_experts", "shared"),
    ),
)  # fmt: skip
