"""DeepSeek V4: several residual streams, attention on a window and on compressed tokens, experts by a hash at first.

A layer's streams are mixed by matrices that each token makes (hc_*). Keys are values, one head of them; every 4 or 128
tokens become one (compressor), of which a smaller attention chooses those that are attended to where it is 4 (indexer).
The first layers take the experts that a table lists for the token (tid2eid), the others those of their router.

Names are those of transformers' modules; the published ones, layers.0.attn.wq_a, follow. transformers saves the latter
with "model." before, and kv_norm as norm.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import yarn_betas
from bridge.models.families.mixtures import router_bias
from bridge.models.family import SILU, Expected, Family, Row, decoder, other_layers

RATIOS = (0, 4, 128)  # tokens that become one; 0: none do
_, _SPARSE, _HEAVY = RATIOS
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    streams, groups = args.more["streams"], config.side("o_groups", 8)
    return {
        "hashed": _hashed(config, args), "chosen": args.experts_used,
        "grouped": args.heads * args.head_dim // groups, "o_lora": groups * config.side("o_lora_rank", 1024),
        "shared": args.expert_inner * config.integer("n_shared_experts", 1),
        "index_q": args.more["index_heads"] * args.more["index_head"], "mixes": (2 + streams) * streams,
        "all": streams * args.hidden, "one": 1, "three": 3, "four": _SPARSE, "many": _HEAVY,
        **{f"ratio.{layer}": ratio for layer, ratio in enumerate(_ratios(config, args))},
    }  # fmt: skip


def _hashed(config: Config, args: Arguments) -> int:
    """The number of layers whose experts a table lists, the first ones."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return config.count("num_hash_layers", min(3, args.layers))
    count = sum(kind == "hash_moe" for kind in kinds)
    if list(kinds) != count * ["hash_moe"] + (args.layers - count) * ["moe"]:
        raise BridgeError(
            f"{config.path}: mlp_layer_types is {kinds!r:.80}; llama.cpp has hash_moe in first layers only"
        )
    return count


def _ratios(config: Config, args: Arguments) -> list[int]:
    """How many tokens become one, by layer."""
    listed = config.get("compress_ratios")
    if listed is None:
        listed = [dict(zip(KINDS, RATIOS, strict=True))[kind] for kind in config.get("layer_types") or ()]
    if len(listed) < args.layers or not {*listed} <= {*RATIOS}:
        raise BridgeError(f"{config.path}: compresses {listed!r:.80} tokens to one, must be 0, 4 or 128 in every layer")
    return [int(ratio) for ratio in listed]


def _rope(config: Config, args: Arguments) -> dict[str, Any]:
    return {
        "rope.scaling.attn_factor": None, **yarn_betas(config, args.rope),
        "rope.dimension_count": config.integer("qk_rope_head_dim", args.rotated),
    }  # fmt: skip


def _limits(config: Config, args: Arguments) -> dict[str, Any]:
    limits = args.layers * [config.number("swiglu_limit", 10.0)]
    return {"swiglu_clamp_exp": limits, "swiglu_clamp_shexp": limits}


def _config(stored: StoredKeys) -> dict[str, Any]:
    layers, rules = stored.values["num_hidden_layers"], stored.values["rope_parameters"]
    hashed, kinds = stored.get("hash_layer_count"), dict(zip(RATIOS, KINDS, strict=True))
    base = stored.get("attention.compress_rope_freq_base")
    share = {"partial_rotary_factor": rules.get("partial_rotary_factor", 1.0)}
    main = {"rope_type": "default", "rope_theta": rules["rope_theta"], **share}
    ones = {"attention_factor": 1.0} if rules["rope_type"] == "yarn" else {}
    return {
        "layer_types": [kinds[ratio] for ratio in stored.get("attention.compress_ratios")[:layers]],
        "mlp_layer_types": hashed * ["hash_moe"] + (layers - hashed) * ["moe"], **share,
        "rope_parameters": {"main": main, "compress": {**rules, **share, **ones, "rope_theta": base}},
        "rope_theta": rules["rope_theta"], "swiglu_limit": stored.get("swiglu_clamp_exp")[0],
    }  # fmt: skip


def _hash(args: Arguments, layer: int) -> bool:
    return layer < args.more["hashed"]


def _indexed(args: Arguments, layer: int) -> bool:
    return args.more[f"ratio.{layer}"] == _SPARSE


def _named(name: str, shape: str, source: str, *also: str, **more: Any) -> Row:
    return Row(source, shape, also, name=f"{name}.weight", **more)


def _compressor(name: str, prefix: str, published: str, size: str, ratio: int) -> tuple[Row, ...]:
    """What makes one of `ratio` tokens; of 4, two that overlap."""
    twice, tokens = (f"{size}+{size}", "four") if ratio == _SPARSE else (size, "many")

    def row(kind: str, shape: str, module: str, stored: str, **more: Any) -> Row:
        more["layers"] = lambda args, layer: args.more[f"ratio.{layer}"] == ratio
        return _named(f"{name}_{kind}", shape, f"self_attn.{prefix}.{module}", f"attn.{published}.{stored}", **more)

    return (
        row("kv", f"{twice} hidden", "kv_proj", "wkv"), row("gate", f"{twice} hidden", "gate_proj", "wgate"),
        row("ape", f"{tokens} {twice}", "position_bias", "ape", exact=True, floats="F32"),
        row("norm", size, "kv_norm", "norm"),
    )  # fmt: skip


def _streams(part: str) -> tuple[Row, ...]:
    """What mixes the streams before and after a layer's attention, or its experts."""
    shapes = {"fn": "mixes all", "base": "mixes", "scale": "three"}
    return tuple(
        _named(f"hc_{part}_{name}", shape, f"{part}_hc.{name}", f"hc_{part}_{name}", exact=True, floats="F32")
        for name, shape in shapes.items()
    )


def _expert(kind: str, shape: str, module: str, published: str, stack: str) -> tuple[Row, ...]:
    """A matrix of every expert, and the shared ones'."""
    experts, shared = f"mlp.experts.*.{published}", shape.replace("expert", "shared")
    return (
        _named(f"ffn_{kind}_exps", shape, experts, experts.replace("mlp", "ffn"), f"mlp.experts.{stack}"),
        _named(f"ffn_{kind}_shexp", shared, f"mlp.shared_experts.{module}", f"ffn.shared_experts.{published}"),
    )


DEEPSEEK4 = Family(
    titles=("DeepSeek V4",), arch="deepseek4", named_as="deepseek2", architectures=("DeepseekV4ForCausalLM",),
    model_type="deepseek_v4",
    keys={
        "head_dim": 512, "num_key_value_heads": 1, "num_experts": None, "moe_intermediate_size": None,
        "partial_rotary_factor": 1.0,
    },
    expects=(
        SILU, Expected("scoring_func", ("sqrtsoftplus",)), Expected("norm_topk_prob", (True,)),
        Expected("hc_mult", (4,)), Expected("num_key_value_heads", (1,)), Expected("tie_word_embeddings", (False,)),
    ),
    names={"num_experts": "n_routed_experts"},
    sizes=_sizes,
    metadata=(
        Constant("feed_forward_length", None), Computed(_rope, _config),
        Key("attention.q_lora_rank", "q_lora_rank", 1024, defines="q_lora"),
        Key("attention.sliding_window", "sliding_window", 128), Key("expert_shared_count", "n_shared_experts", 1),
        Constant("expert_gating_func", 4),  # sqrt(softplus)
        Key("expert_weights_scale", "routed_scaling_factor", 1.5), Constant("expert_weights_norm", True),
        Computed(_limits), Key("attention.indexer.head_count", "index_n_heads", 64, defines="index_heads"),
        Key("attention.indexer.key_length", "index_head_dim", 128, defines="index_head"),
        Key("attention.indexer.top_k", "index_topk", 512), Key("attention.output_group_count", "o_groups", 8),
        Key("attention.output_lora_rank", "o_lora_rank", 1024),
        Computed(lambda config, args: {"attention.compress_ratios": _ratios(config, args)}),
        Key("attention.compress_rope_freq_base", "compress_rope_theta", 160000.0),
        Key("hyper_connection.count", "hc_mult", 4, defines="streams"),
        Key("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters", 20),
        Key("hyper_connection.epsilon", "hc_eps", 1e-6), Key("hash_layer_count", size="hashed"),
        Key("embedding_length_out", size="all"),
    ),
    predicts="dropped", bare=True,
    table=(
        *decoder(
            _named("attn_norm", "hidden", "input_layernorm", "attn_norm"),
            _named("attn_sinks", "heads", "self_attn.sinks", "attn.attn_sink", exact=True),
            _named("attn_q_a", "q_lora hidden", "self_attn.q_a_proj", "attn.wq_a"),
            _named("attn_q_a_norm", "q_lora", "self_attn.q_a_norm", "attn.q_norm"),
            _named("attn_q_b", "q q_lora", "self_attn.q_b_proj", "attn.wq_b"),
            _named("attn_kv", "head hidden", "self_attn.kv_proj", "attn.wkv"),
            _named("attn_kv_a_norm", "head", "self_attn.kv_norm", "attn.kv_norm", "attn.norm"),
            _named("attn_output_a", "o_lora grouped", "self_attn.o_a_proj", "attn.wo_a"),
            _named("attn_output_b", "hidden o_lora", "self_attn.o_b_proj", "attn.wo_b"),
            *_compressor("attn_compressor", "compressor", "compressor", "head", _SPARSE),
            *_compressor("attn_compressor", "compressor", "compressor", "head", _HEAVY),
            _named(
                "indexer.proj", "index_heads hidden", "self_attn.compressor.indexer.scorer.weights_proj",
                "attn.indexer.weights_proj", layers=_indexed,
            ),
            _named(
                "indexer.attn_q_b", "index_q q_lora", "self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b",
                layers=_indexed,
            ),
            *_compressor("indexer_compressor", "compressor.indexer", "indexer.compressor", "index_head", _SPARSE),
            *_streams("attn"),
            *_streams("ffn"),
            _named("ffn_norm", "hidden", "post_attention_layernorm", "ffn_norm"),
            _named("ffn_gate_inp", "experts hidden", "mlp.gate", "ffn.gate", floats="F32"),
            _named(
                "ffn_gate_tid2eid", "vocab chosen", "mlp.gate.tid2eid", "ffn.gate.tid2eid", exact=True, floats="I32",
                layers=_hash,
            ),
            replace(router_bias("mlp.gate.e_score_correction_bias", "ffn.gate.bias"), layers=other_layers(_hash)),
            *_expert("gate", "expert hidden", "gate_proj", "w1", "gate_up_proj[0/2]"),
            *_expert("up", "expert hidden", "up_proj", "w3", "gate_up_proj[1/2]"),
            *_expert("down", "hidden expert", "down_proj", "w2", "down_proj"),
            first=(_named("token_embd", "vocab hidden", "model.embed_tokens", "model.embed"),),
            norm=_named("output_norm", "hidden", "model.norm"),
            head=_named("output", "vocab hidden", "lm_head", "model.head"),
        ),
        *(
            _named(
                f"output_hc_{key}", shape, f"model.hc_head.hc_{key}", f"model.hc_head_{key}", exact=True, floats="F32"
            )
            for key, shape in (("fn", "streams all"), ("base", "streams"), ("scale", "one"))
        ),
    ),
)  # fmt: skip
