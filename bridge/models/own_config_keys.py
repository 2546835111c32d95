"""What one architecture's config.json has beside the usual keys: the metadata of its family, read back.

    OWN_KEYS[architecture](get, names, values)    the keys that it adds to `gguf_config`'s, or has instead of them

get     (key of the metadata without the architecture's name, default) -> value
names   of the GGUF's tensors
values  the usual keys, by their usual names

Beside config.json's keys, a function may give "model_type" and "class", the model's name in `architectures`. Vision
models give those of their language model, by the name that transformers has for it.
"""

from collections.abc import Callable, Collection
from statistics import NormalDist
from typing import Any

Keys = Callable[..., Any]
Names = Collection[str]
Values = dict[str, Any]

ABSENT: Any = object()  # for a key that the config must not have


def _has(names: Names, part: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in names)


def _llama(get: Keys, names: Names, values: Values) -> Values:
    more: Values = {"attention_bias": _has(names, "attn_q.bias"), "mlp_bias": _has(names, "ffn_gate.bias")}
    window = get("attention.sliding_window")
    if values.get("num_experts"):
        return {"num_local_experts": values["num_experts"], "num_experts": ABSENT, "sliding_window": window}
    return {"sliding_window": window} if window else more


def _mistral3(get: Keys, names: Names, values: Values) -> Values:
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


def _qwen2(get: Keys, names: Names, values: Values) -> Values:
    return {"model_type": "qwen2", "class": "Qwen2ForCausalLM"}


def _qwen2_moe(get: Keys, names: Names, values: Values) -> Values:
    return {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen3(get: Keys, names: Names, values: Values) -> Values:
    return {"model_type": "qwen3", "class": "Qwen3ForCausalLM", "attention_bias": _has(names, "attn_q.bias")}


def _qwen3_moe(get: Keys, names: Names, values: Values) -> Values:
    bias = _has(names, "attn_q.bias")
    more = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": bias}
    return {"model_type": "qwen3_moe", "class": "Qwen3MoeForCausalLM", **more}


def _delta(get: Keys, names: Names, values: Values) -> Values:
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


def _qwen3_5(get: Keys, names: Names, values: Values) -> Values:
    sections = (get("rope.dimension_sections") or [])[:3]
    rules = values["rope_parameters"] | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
    experts = bool(values.get("num_experts"))
    kind = ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM") if experts else ("qwen3_5_text", "Qwen3_5ForCausalLM")
    return {**_delta(get, names, values), "rope_parameters": rules, "model_type": kind[0], "class": kind[1]}


def _granite(get: Keys, names: Names, values: Values) -> Values:
    more: Values = {
        "attention_multiplier": get("attention.scale"), "embedding_multiplier": get("embedding_scale"),
        "residual_multiplier": get("residual_scale"), "logits_scaling": get("logit_scale"),
        "attention_bias": _has(names, "attn_q.bias"),
    }  # fmt: skip
    if values.get("num_experts"):
        shared = get("expert_shared_feed_forward_length")
        more |= {"num_local_experts": values["num_experts"], "num_experts": ABSENT}
        more |= {"shared_expert_intermediate_size": ABSENT, "shared_intermediate_size": shared}
        if shared:
            more |= {"model_type": "granitemoeshared", "class": "GraniteMoeSharedForCausalLM"}
    return more


def _granite_hybrid(get: Keys, names: Names, values: Values) -> Values:
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    kinds = ["attention" if count else "mamba" for count in get("attention.head_count_kv")]
    return {
        **_granite(get, names, values), "layer_types": kinds, "mamba_n_heads": heads, "mamba_d_head": inner // heads,
        "mamba_d_state": get("ssm.state_size"), "mamba_n_groups": get("ssm.group_count"),
        "mamba_expand": inner // values["hidden_size"], "mamba_d_conv": get("ssm.conv_kernel"),
        "position_embedding_type": None,  # nothing is rotated
        "model_type": "granitemoehybrid", "class": "GraniteMoeHybridForCausalLM",
    }  # fmt: skip


def _nemotron_h(get: Keys, names: Names, values: Values) -> Values:
    network = "moe" if values.get("num_experts") else "mlp"
    kinds = [
        "attention" if heads else network if width else "mamba"
        for heads, width in zip(get("attention.head_count_kv"), get("feed_forward_length"), strict=True)
    ]
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    return {
        "layers_block_type": kinds, "mamba_num_heads": heads, "mamba_head_dim": inner // heads,
        "ssm_state_size": get("ssm.state_size"), "n_groups": get("ssm.group_count"),
        "conv_kernel": get("ssm.conv_kernel"), "expand": inner // values["hidden_size"],
    }  # fmt: skip


def _nemotron_h_moe(get: Keys, names: Names, values: Values) -> Values:
    return {
        **_nemotron_h(get, names, values), "n_shared_experts": get("expert_shared_count", 1),
        "norm_topk_prob": bool(get("expert_weights_norm", True)),
        "routed_scaling_factor": get("expert_weights_scale", 1.0),
        "n_group": get("expert_group_count", 1), "topk_group": get("expert_group_used_count", 1),
    }  # fmt: skip


def _llama4(get: Keys, names: Names, values: Values) -> Values:
    layers = values["num_hidden_layers"]
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT,
        "interleave_moe_layer_step": get("interleave_moe_layer_step", 1), "use_qk_norm": values["num_experts"] != 128,
        "attention_bias": _has(names, "attn_q.bias"), "attention_chunk_size": 8192,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(layers)],
        "model_type": "llama4_text", "class": "Llama4ForCausalLM",
    }  # fmt: skip


def _phi3(get: Keys, names: Names, values: Values) -> Values:
    original = get("rope.scaling.original_context_length") or values["max_position_embeddings"]
    rules = dict(values["rope_parameters"])
    if get("rope.scaling.attn_factor"):
        rules["attention_factor"] = get("rope.scaling.attn_factor")
    if "rope_factors_long.weight" in names:
        rules |= {"original_max_position_embeddings": original}
    window = get("attention.sliding_window") or None
    return {"original_max_position_embeddings": original, "sliding_window": window, "rope_parameters": rules}


def _phimoe(get: Keys, names: Names, values: Values) -> Values:
    own = _phi3(get, names, values)
    rules = own["rope_parameters"]
    if "rope_factors_long.weight" in names:  # what others call attention_factor
        rules |= dict.fromkeys(("short_mscale", "long_mscale"), rules.get("attention_factor", 1.0))
    more = {"num_local_experts": values["num_experts"], "num_experts": ABSENT}
    return {**own, **more, "attention_bias": True, "lm_head_bias": True}


def _width(values: Values) -> int:
    return int(values["hidden_size"] // values["num_attention_heads"])


def _gemma2(get: Keys, names: Names, values: Values) -> Values:
    by_width = values["num_hidden_layers"] == 46
    return {
        "query_pre_attn_scalar": _width(values) if by_width else values["head_dim"],
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
        "sliding_window": get("attention.sliding_window", 4096), "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(get: Keys, names: Names, values: Values) -> Values:
    by_width = values["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": _width(values) if by_width else values["head_dim"],
        "sliding_window": get("attention.sliding_window", 4096), "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
        "model_type": "gemma3_text", "class": "Gemma3ForCausalLM",
    }  # fmt: skip


def _local_and_global(get: Keys, values: Values) -> Values:
    """Layers with a window and layers without, each with their own base of rotation."""
    kinds = [f"{'sliding' if local else 'full'}_attention" for local in get("attention.sliding_window_pattern")]
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    return {
        "layer_types": kinds, "sliding_window": get("attention.sliding_window", 512),
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
        "hidden_activation": "gelu_pytorch_tanh", "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": values["vocab_size"],
        "final_logit_softcapping": get("final_logit_softcapping"),
    }  # fmt: skip


def _gemma3n(get: Keys, names: Names, values: Values) -> Values:
    scales = get("activation_sparsity_scale")  # how many deviations above the mean a value must be to stay
    return {
        **_local_and_global(get, values),
        "laurel_rank": 64, "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 4) for scale in scales],
        "model_type": "gemma3n_text", "class": "Gemma3nForCausalLM",
    }  # fmt: skip


def _gemma4(get: Keys, names: Names, values: Values) -> Values:
    own = _local_and_global(get, values)
    kinds, layers = own["layer_types"], values["num_hidden_layers"]
    widths, kv_heads = (
        found if isinstance(found, list) else layers * [found]
        for found in (get("feed_forward_length"), get("attention.head_count_kv"))
    )
    of_local = [heads for heads, kind in zip(kv_heads, kinds, strict=True) if kind != "full_attention"] or kv_heads
    of_global = [heads for heads, kind in zip(kv_heads, kinds, strict=True) if kind == "full_attention"] or kv_heads
    with_keys = range(layers - own["num_kv_shared_layers"])
    experts = {}
    if values.get("num_experts"):
        experts = {"top_k_experts": values["num_experts_per_tok"], "num_experts_per_tok": ABSENT}
    return {
        **own, **experts, "enable_moe_block": bool(experts),
        "intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0],
        "head_dim": get("attention.key_length_swa"), "global_head_dim": get("attention.key_length"),
        "num_key_value_heads": of_local[0], "num_global_key_value_heads": of_global[0],
        "attention_k_eq_v": any(
            kinds[i] == "full_attention" and f"blk.{i}.attn_v.weight" not in names for i in with_keys
        ),
        "model_type": "gemma4_text", "class": "Gemma4ForCausalLM",
    }  # fmt: skip


def _attention_bias(get: Keys, names: Names, values: Values) -> Values:
    return {"attention_bias": _has(names, "attn_q.bias")}


def _seed_oss(get: Keys, names: Names, values: Values) -> Values:
    return {"attention_bias": _has(names, "attn_q.bias"), "attention_out_bias": False}


def _glm4_moe(get: Keys, names: Names, values: Values) -> Values:
    return {
        "attention_bias": _has(names, "attn_q.bias"), "use_qk_norm": _has(names, "attn_q_norm.weight"),
        "n_shared_experts": get("expert_shared_count", 1), "n_group": get("expert_group_count", 1),
        "topk_group": get("expert_group_used_count", 1), "norm_topk_prob": bool(get("expert_weights_norm", True)),
        "routed_scaling_factor": get("expert_weights_scale", 1.0),
        "model_type": "glm4_moe", "class": "Glm4MoeForCausalLM",
    }  # fmt: skip


def _windowed(get: Keys, names: Names, values: Values) -> Values:
    """Layer by layer, or all but every fourth; OLMo 2 and the smaller EXAONE 4 have no window."""
    window, layers = get("attention.sliding_window"), values["num_hidden_layers"]
    pattern = get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        pattern = [(i + 1) % (pattern or 4) != 0 for i in range(layers)]
    kinds = [f"{'sliding' if window and local else 'full'}_attention" for local in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _olmo(get: Keys, names: Names, values: Values) -> Values:
    return _windowed(get, names, values) if get("attention.sliding_window") else {}


def _command_r(get: Keys, names: Names, values: Values) -> Values:
    return {"logit_scale": get("logit_scale", 0.0625), "use_qk_norm": _has(names, "attn_q_norm.weight")}


def _starcoder2(get: Keys, names: Names, values: Values) -> Values:
    return {"sliding_window": get("attention.sliding_window"), "use_bias": True}


def _gpt2(get: Keys, names: Names, values: Values) -> Values:
    return {"n_ctx": values["max_position_embeddings"], "num_key_value_heads": ABSENT, "head_dim": ABSENT}


def _bitnet(get: Keys, names: Names, values: Values) -> Values:
    return {"hidden_act": get("hidden_activation", "silu"), "tie_word_embeddings": True}


def _ernie_moe(get: Keys, names: Names, values: Values) -> Values:
    return {"moe_num_shared_experts": get("expert_shared_count", 0), "shared_expert_intermediate_size": ABSENT}


def _hunyuan(get: Keys, names: Names, values: Values) -> Values:
    """Its alpha has become a part of theta."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}}


def _minimax(get: Keys, names: Names, values: Values) -> Values:
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT, "moe_intermediate_size": ABSENT,
        "rotary_dim": get("rope.dimension_count", values["head_dim"]), "scoring_func": "sigmoid",
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
    }  # fmt: skip


def _lfm2(get: Keys, names: Names, values: Values) -> Values:
    kinds = ["full_attention" if count else "conv" for count in get("attention.head_count_kv")]
    return {"conv_L_cache": get("shortconv.l_cache"), "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(get: Keys, names: Names, values: Values) -> Values:
    more = {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    return {**_lfm2(get, names, values), "block_auto_adjust_ff_dim": ABSENT, **more}


def _gpt_oss(get: Keys, names: Names, values: Values) -> Values:
    kinds = [f"{('full', 'sliding')[i % 2 == 0]}_attention" for i in range(values["num_hidden_layers"])]
    rules = dict(values["rope_parameters"])
    if rules["rope_type"] == "yarn":
        rules["truncate"] = False
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT, "moe_intermediate_size": ABSENT,
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
        "sliding_window": get("attention.sliding_window", 128), "layer_types": kinds, "rope_parameters": rules,
    }  # fmt: skip


def _deepseek(get: Keys, names: Names, values: Values) -> Values:
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
        "topk_group": get("expert_group_used_count"), "topk_method": ABSENT if sigmoid else "greedy",
    }  # fmt: skip


def _mistral4(get: Keys, names: Names, values: Values) -> Values:
    own = _deepseek(get, names, values)
    rotated = own["qk_rope_head_dim"] / (own["qk_nope_head_dim"] + own["qk_rope_head_dim"])
    rules = own["rope_parameters"] | {"partial_rotary_factor": rotated}
    if get("attention.temperature_scale"):
        rules["llama_4_scaling_beta"] = get("attention.temperature_scale")
    more = {"rope_parameters": rules, "scoring_func": ABSENT, "topk_method": ABSENT}
    return {**own, **more, "model_type": "mistral4", "class": "Mistral4ForCausalLM"}


OWN_KEYS: dict[str, Callable[[Keys, Names, Values], Values]] = {
    "llama": _llama, "mistral3": _mistral3, "qwen2": _qwen2, "qwen2vl": _qwen2, "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3, "qwen3vl": _qwen3, "qwen3moe": _qwen3_moe, "qwen3vlmoe": _qwen3_moe, "qwen3next": _delta,
    "qwen35": _qwen3_5, "qwen35moe": _qwen3_5, "granite": _granite, "granitemoe": _granite,
    "granitehybrid": _granite_hybrid, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3, "glm4": _attention_bias,
    "glm4moe": _glm4_moe, "olmo2": _olmo, "exaone4": _windowed, "command-r": _command_r, "starcoder2": _starcoder2,
    "gpt2": _gpt2, "bitnet": _bitnet, "seed_oss": _seed_oss, "ernie4_5-moe": _ernie_moe, "hunyuan-dense": _hunyuan,
    "minimax-m2": _minimax, "lfm2": _lfm2, "lfm2moe": _lfm2_moe, "gpt-oss": _gpt_oss, "deepseek2": _deepseek,
    "mistral4": _mistral4, "phimoe": _phimoe, "llama4": _llama4, "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe, "gemma3n": _gemma3n, "gemma4": _gemma4,
}  # fmt: skip

# which of an architecture's families a GGUF is of: key of its metadata -> model_type
KINDS: dict[str, Callable[[Keys], str]] = {
    "llama": lambda get: (
        "mixtral" if get("expert_count") else "mistral" if get("attention.sliding_window") else "llama"
    ),
    "olmo2": lambda get: "olmo3" if get("attention.sliding_window") else "olmo2",
}
