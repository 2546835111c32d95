"""A GGUF's metadata as the config.json of transformers: what `arguments`, `rope` and the families write, read back.

    config_of_gguf(metadata, names)       everything that metadata and names tell
    add_rope_factors(config, factors)     the frequencies' own divisors, which are tensors

The keys that all families have stand in `config_of_gguf`; what one architecture adds is its entry in `_MORE`. Vision
models give the config of their language model, by the name that transformers has for that.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.families import ALL
from bridge.models.family import Family
from bridge.models.rope import llama3_factors

_ABSENT: Any = object()  # for a key that the config must not have

# tensors that divide the frequencies of rotary embeddings, without their ".weight"
ROPE_FACTORS = "rope_freqs", "rope_factors_long", "rope_factors_short"

Keys = Callable[..., Any]  # (name without the architecture's, default) -> value

_LLAMA3 = 1.0, 4.0  # low_freq_factor and high_freq_factor of all of its models
_LLAMA3_CONTEXT = 8192


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF with this metadata; BridgeError for an unknown architecture."""
    arch = metadata.get("general.architecture")
    found = [family for family in ALL if family.arch == arch and family.reversible]
    if not found:
        known = ", ".join(dict.fromkeys(family.arch for family in ALL if family.reversible))
        raise BridgeError(f"no config.json can be made for architecture {arch!r}; known are {known}")
    kind = _KINDS[arch](lambda key, default=None: metadata.get(f"{arch}.{key}", default)) if arch in _KINDS else None
    return next((family for family in found if family.model_type == kind), found[0])


def gguf_layers(metadata: Mapping[str, Any]) -> int:
    """The layers of a GGUF without those that predict further tokens."""
    arch = metadata["general.architecture"]
    return int(metadata[f"{arch}.block_count"]) - int(metadata.get(f"{arch}.nextn_predict_layers", 0))


def config_of_gguf(metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """config.json of a GGUF.

    metadata  as read; tokenizer.ggml.tokens may be their number
    names     of its tensors

    Raises BridgeError for an architecture without a family, and where a key is missing.
    """
    family = family_of_gguf(metadata)
    arch = family.arch

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    def needed(key: str) -> Any:
        value = get(key)
        if value is None:
            raise BridgeError(f"{arch}.{key} is missing from the metadata; convert the model again")
        return value

    heads, hidden = needed("attention.head_count"), needed("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    vocab = get("vocab_size") or (tokens if isinstance(tokens, int) else len(tokens))
    eps = "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": _largest(needed("feed_forward_length")),
        "num_hidden_layers": gguf_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _largest(kv_heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "max_position_embeddings": needed("context_length"),
        "rms_norm_eps": needed(eps),
        "tie_word_embeddings": "output.weight" not in names,
    }
    if family.rotary:
        values["rope_parameters"] = _rope(get, needed, values["head_dim"])
    if get("expert_count"):
        values |= {"num_experts": get("expert_count"), "num_experts_per_tok": needed("expert_used_count")}
        for key, name in _EXPERT_KEYS.items():
            if get(name) is not None:
                values[key] = get(name)
    named = {family.names.get(key, key): value for key, value in values.items()}
    if predicting := needed("block_count") - gguf_layers(metadata):
        named["num_nextn_predict_layers"] = predicting
    own = {**named, **_MORE[arch](get, names, values)} if arch in _MORE else named
    model_type = own.pop("model_type", family.model_type)
    ids = {f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    architectures = {"architectures": [own.pop("class", family.architectures[0])]}
    kept = {key: value for key, value in own.items() if value is not _ABSENT}
    return {
        "model_type": model_type, **architectures, **kept, **{k: None if v is None else int(v) for k, v in ids.items()}
    }  # fmt: skip


_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
_EXPERT_KEYS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
}


def add_rope_factors(config: dict[str, Any], factors: Mapping[str, np.ndarray]) -> None:
    """Put the rules into rope_parameters that give these divisors of frequencies.

    factors  a GGUF's rope_freqs, or rope_factors_long and rope_factors_short, by those names; float32 [rotated / 2]

    Raises BridgeError for factors that llama3's rule does not give.
    """
    rules = config.get("rope_parameters", {})
    if "rope_factors_long" in factors:
        rules |= {
            "rope_type": "longrope",
            "long_factor": [float(f) for f in factors["rope_factors_long"]],
            "short_factor": [float(f) for f in factors["rope_factors_short"]],
        }
        return
    if "rope_freqs" not in factors:
        return
    stored = factors["rope_freqs"]
    if np.all(stored == 1):
        return
    factor, base = float(stored.max()), float(rules["rope_theta"])
    # where no divisor is between the two, several contexts give the same
    for context in (_LLAMA3_CONTEXT, *(1 << n for n in range(4, 24))):
        found = llama3_factors(base, 2 * len(stored), factor, *_LLAMA3, context)
        if np.allclose(found, stored, rtol=1e-5):
            low, high = _LLAMA3
            rules |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            rules["original_max_position_embeddings"] = context
            return
    raise BridgeError("rope_freqs.weight: is not of llama3's rule with factors 1 and 4, which no config expresses")


def _largest(value: Any) -> int:
    return int(max(value)) if isinstance(value, list | tuple) else int(value)


def _rope(get: Keys, needed: Keys, head_dim: int) -> dict[str, Any]:
    rules: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}
    share = get("rope.dimension_count", head_dim) / head_dim
    if share != 1:
        rules["partial_rotary_factor"] = share
    kind = get("rope.scaling.type", "none")
    if kind == "none" and get("rope.scale_linear"):
        return rules | {"rope_type": "linear", "factor": get("rope.scale_linear")}
    if kind == "linear":
        return rules | {"rope_type": kind, "factor": needed("rope.scaling.factor")}
    if kind == "yarn":
        factor = needed("rope.scaling.factor")
        rules |= {"rope_type": kind, "factor": factor}
        if get("rope.scaling.original_context_length"):
            rules["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        if get("rope.scaling.attn_factor"):
            rules["attention_factor"] = get("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1)
        for beta in ("beta_fast", "beta_slow"):
            if get(f"rope.scaling.yarn_{beta}") is not None:
                rules[beta] = get(f"rope.scaling.yarn_{beta}")
    return rules


# what one architecture has beside the usual keys: (key of its metadata, names of its tensors, usual values) -> keys


def _has(names: Collection[str], part: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in names)


def _llama(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"attention_bias": _has(names, "attn_q.bias"), "mlp_bias": _has(names, "ffn_gate.bias")}
    window = get("attention.sliding_window")
    if values.get("num_experts"):
        return {"num_local_experts": values["num_experts"], "num_experts": _ABSENT, "sliding_window": window}
    return {"sliding_window": window} if window else more


def _mistral3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    beta = get("attention.temperature_scale")
    if beta is None:
        return {
            "model_type": "mistral",
            "class": "MistralForCausalLM",
            "sliding_window": get("attention.sliding_window"),
        }
    whole = get("rope.scaling.yarn_log_multiplier")
    rules = values["rope_parameters"] | {"mscale": whole, "mscale_all_dim": whole, "llama_4_scaling_beta": beta}
    return {"model_type": "ministral3", "class": "Ministral3ForCausalLM", "rope_parameters": rules}


def _qwen2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen2", "class": "Qwen2ForCausalLM"}


def _qwen2_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3", "class": "Qwen3ForCausalLM", "attention_bias": _has(names, "attn_q.bias")}


def _qwen3_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    bias = _has(names, "attn_q.bias")
    more = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": bias}
    return {"model_type": "qwen3_moe", "class": "Qwen3MoeForCausalLM", **more}


def _delta(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    v_heads, interval = get("ssm.time_step_rank"), get("full_attention_interval", 4)
    kinds = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(values["num_hidden_layers"])
    ]
    return {
        "linear_conv_kernel_dim": get("ssm.conv_kernel"), "linear_key_head_dim": get("ssm.state_size"),
        "linear_num_key_heads": get("ssm.group_count"), "linear_num_value_heads": v_heads,
        "linear_value_head_dim": get("ssm.inner_size") // v_heads, "layer_types": kinds, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


def _qwen3_5(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    sections = (get("rope.dimension_sections") or [])[:3]
    rules = values["rope_parameters"] | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
    experts = bool(values.get("num_experts"))
    kind = ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") if experts else ("qwen3_5_text", "Qwen3_5ForCausalLM")
    return {**_delta(get, names, values), "rope_parameters": rules, "model_type": kind[0], "class": kind[1]}


def _granite(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {
        "attention_multiplier": get("attention.scale"), "embedding_multiplier": get("embedding_scale"),
        "residual_multiplier": get("residual_scale"), "logits_scaling": get("logit_scale"),
        "attention_bias": _has(names, "attn_q.bias"),
    }  # fmt: skip
    if values.get("num_experts"):
        shared = get("expert_shared_feed_forward_length")
        more |= {"num_local_experts": values["num_experts"], "num_experts": _ABSENT}
        more |= {"shared_expert_intermediate_size": _ABSENT, "shared_intermediate_size": shared}
        if shared:
            more |= {"model_type": "granitemoeshared", "class": "GraniteMoeSharedForCausalLM"}
    return more


def _granite_hybrid(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    kinds = ["attention" if count else "mamba" for count in get("attention.head_count_kv")]
    return {
        **_granite(get, names, values), "layer_types": kinds, "mamba_n_heads": heads, "mamba_d_head": inner // heads,
        "mamba_d_state": get("ssm.state_size"), "mamba_n_groups": get("ssm.group_count"),
        "mamba_expand": inner // values["hidden_size"], "mamba_d_conv": get("ssm.conv_kernel"),
        "position_embedding_type": None,  # nothing is rotated
        "model_type": "granitemoehybrid", "class": "GraniteMoeHybridForCausalLM",
    }  # fmt: skip


def _phi3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    original = get("rope.scaling.original_context_length") or values["max_position_embeddings"]
    rules = dict(values["rope_parameters"])
    if get("rope.scaling.attn_factor"):
        rules["attention_factor"] = get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in names:
        rules |= {"original_max_position_embeddings": original}
    window = get("attention.sliding_window") or None
    return {"original_max_position_embeddings": original, "sliding_window": window, "rope_parameters": rules}


def _width(values: dict[str, Any]) -> int:
    return int(values["hidden_size"] // values["num_attention_heads"])


def _gemma2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    by_width = values["num_hidden_layers"] == 46
    return {
        "query_pre_attn_scalar": _width(values) if by_width else values["head_dim"],
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
        "sliding_window": get("attention.sliding_window", 4096), "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    by_width = values["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": _width(values) if by_width else values["head_dim"],
        "sliding_window": get("attention.sliding_window", 4096), "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
        "model_type": "gemma3_text", "class": "Gemma3ForCausalLM",
    }  # fmt: skip


def _attention_bias(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has(names, "attn_q.bias")}


def _seed_oss(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has(names, "attn_q.bias"), "attention_out_bias": False}


def _glm4_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": _has(names, "attn_q.bias"), "use_qk_norm": _has(names, "attn_q_norm.weight"),
        "n_shared_experts": get("expert_shared_count", 1), "n_group": get("expert_group_count", 1),
        "topk_group": get("expert_group_used_count", 1), "norm_topk_prob": bool(get("expert_weights_norm", True)),
        "routed_scaling_factor": get("expert_weights_scale", 1.0),
        "model_type": "glm4_moe", "class": "Glm4MoeForCausalLM",
    }  # fmt: skip


def _windowed(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """Layer by layer, or all but every fourth; OLMo 2 and the smaller EXAONE 4 have no window."""
    window, layers = get("attention.sliding_window"), values["num_hidden_layers"]
    pattern = get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        pattern = [(i + 1) % (pattern or 4) != 0 for i in range(layers)]
    kinds = [f"{'sliding' if window and local else 'full'}_attention" for local in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _olmo(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return _windowed(get, names, values) if get("attention.sliding_window") else {}


def _command_r(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": get("logit_scale", 0.0625), "use_qk_norm": _has(names, "attn_q_norm.weight")}


def _starcoder2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": get("attention.sliding_window"), "use_bias": True}


def _gpt2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"n_ctx": values["max_position_embeddings"], "num_key_value_heads": _ABSENT, "head_dim": _ABSENT}


def _bitnet(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": get("hidden_activation", "silu"), "tie_word_embeddings": True}


def _ernie_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"moe_num_shared_experts": get("expert_shared_count", 0), "shared_expert_intermediate_size": _ABSENT}


def _hunyuan(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """Its alpha has become a part of theta."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}}


def _minimax(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": values["num_experts"], "num_experts": _ABSENT, "moe_intermediate_size": _ABSENT,
        "rotary_dim": get("rope.dimension_count", values["head_dim"]), "scoring_func": "sigmoid",
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
    }  # fmt: skip


def _lfm2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if count else "conv" for count in get("attention.head_count_kv")]
    return {"conv_L_cache": get("shortconv.l_cache"), "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    more = {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    return {**_lfm2(get, names, values), "block_auto_adjust_ff_dim": _ABSENT, **more}


def _gpt_oss(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    kinds = [f"{('full', 'sliding')[i % 2 == 0]}_attention" for i in range(values["num_hidden_layers"])]
    rules = dict(values["rope_parameters"])
    if rules["rope_type"] == "yarn":
        rules["truncate"] = False
    return {
        "num_local_experts": values["num_experts"], "num_experts": _ABSENT, "moe_intermediate_size": _ABSENT,
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
        "sliding_window": get("attention.sliding_window", 128), "layer_types": kinds, "rope_parameters": rules,
    }  # fmt: skip


def _deepseek(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    rotated, lora = get("rope.dimension_count"), get("attention.kv_lora_rank")
    rules = {key: value for key, value in values["rope_parameters"].items() if key != "partial_rotary_factor"}
    if rules["rope_type"] == "yarn":
        whole = 10 * get("rope.scaling.yarn_log_multiplier", 0.0)
        rules |= {"mscale": whole, "mscale_all_dim": whole}
    sigmoid = get("expert_gating_func", 1) == 2
    kind = {"model_type": "deepseek_v3", "class": "DeepseekV3ForCausalLM"}
    if not sigmoid:
        kind = {"model_type": "deepseek_v2", "class": "DeepseekV2ForCausalLM"}
    return {
        **kind, "kv_lora_rank": lora, "q_lora_rank": get("attention.q_lora_rank"), "rope_parameters": rules,
        "qk_nope_head_dim": get("attention.key_length_mla") - rotated, "qk_rope_head_dim": rotated,
        "v_head_dim": get("attention.value_length_mla"), "n_shared_experts": get("expert_shared_count"),
        "num_key_value_heads": values["num_attention_heads"],
        "routed_scaling_factor": get("expert_weights_scale", 1.0), "norm_topk_prob": bool(get("expert_weights_norm")),
        "scoring_func": "sigmoid" if sigmoid else "softmax", "n_group": get("expert_group_count"),
        "topk_group": get("expert_group_used_count"), "topk_method": _ABSENT if sigmoid else "greedy",
    }  # fmt: skip


_MORE: dict[str, Callable[[Keys, Collection[str], dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama, "mistral3": _mistral3, "qwen2": _qwen2, "qwen2vl": _qwen2, "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3, "qwen3vl": _qwen3, "qwen3moe": _qwen3_moe, "qwen3vlmoe": _qwen3_moe, "qwen3next": _delta,
    "qwen35": _qwen3_5, "qwen35moe": _qwen3_5, "granite": _granite, "granitemoe": _granite,
    "granitehybrid": _granite_hybrid, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3, "glm4": _attention_bias,
    "glm4moe": _glm4_moe, "olmo2": _olmo, "exaone4": _windowed, "command-r": _command_r, "starcoder2": _starcoder2,
    "gpt2": _gpt2, "bitnet": _bitnet, "seed_oss": _seed_oss, "ernie4_5-moe": _ernie_moe, "hunyuan-dense": _hunyuan,
    "minimax-m2": _minimax, "lfm2": _lfm2, "lfm2moe": _lfm2_moe, "gpt-oss": _gpt_oss, "deepseek2": _deepseek,
}  # fmt: skip

# which of an architecture's families a GGUF is of: key of its metadata -> model_type
_KINDS: dict[str, Callable[[Keys], str]] = {
    "llama": lambda get: (
        "mixtral" if get("expert_count") else "mistral" if get("attention.sliding_window") else "llama"
    ),
    "olmo2": lambda get: "olmo3" if get("attention.sliding_window") else "olmo2",
}
