"""What the config.json of one architecture has beside the usual keys: the inverse of its family's `metadata`."""

from collections.abc import Callable, Collection
from typing import Any

from bridge.gguf_file.architectures import read_windows
from bridge.models.families.deepseek4 import KINDS as COMPRESSED
from bridge.models.families.deepseek4 import RATIOS

ABSENT: Any = object()  # for a key that the config must not have

Keys = Callable[..., Any]  # (name without the architecture's, default) -> value


def _has(names: Collection[str], part: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in names)


def _llama(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"attention_bias": _has(names, "attn_q.bias"), "mlp_bias": _has(names, "ffn_gate.bias")}
    window = get("attention.sliding_window")
    if values.get("num_experts"):
        return {"num_local_experts": values["num_experts"], "num_experts": ABSENT, "sliding_window": window}
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
        more |= {"num_local_experts": values["num_experts"], "num_experts": ABSENT}
        more |= {"shared_expert_intermediate_size": ABSENT, "shared_intermediate_size": shared}
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
        **_windowed("gemma2", get, values), "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def _gemma3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    by_width = values["num_hidden_layers"] == 62
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    windows = _windowed("gemma3", get, values)
    windows["sliding_window"] = windows["sliding_window"] or values["max_position_embeddings"]  # it must be a number
    return {
        "query_pre_attn_scalar": _width(values) if by_width else values["head_dim"],
        **windows, "hidden_activation": "gelu_pytorch_tanh",
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
        "first_k_dense_replace": get("leading_dense_block_count", 0),
        "rope_parameters": {"partial_rotary_factor": 1.0, **values["rope_parameters"]},
        "model_type": "glm4_moe", "class": "Glm4MoeForCausalLM",
    }  # fmt: skip


def _dots1(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    own = {**_glm4_moe(get, names, values), "use_qk_norm": ABSENT, "rope_parameters": values["rope_parameters"]}
    return {**own, "model_type": "dots1", "class": "Dots1ForCausalLM"}


def _windowed(arch: str, get: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """The window and the layers that have it; None and full attention where none has."""
    tokens, windows = read_windows(arch, get, values["num_hidden_layers"])
    kinds = [f"{'sliding' if local else 'full'}_attention" for local in windows or values["num_hidden_layers"] * (0,)]
    return {"sliding_window": tokens or None, "layer_types": kinds}


def _olmo(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    if not get("attention.sliding_window"):
        return {}
    rules = values["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": rules["rope_theta"]}
    return {
        **_windowed("olmo2", get, values),
        "rope_parameters": {"full_attention": rules, "sliding_attention": local},
    }


def _exaone4(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return _windowed("exaone4", get, values)


def _command_r(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": get("logit_scale", 0.0625), "use_qk_norm": _has(names, "attn_q_norm.weight")}


def _starcoder2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": get("attention.sliding_window"), "use_bias": True}


def _gpt2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"n_ctx": values["max_position_embeddings"], "num_key_value_heads": ABSENT, "head_dim": ABSENT}


def _bitnet(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": get("hidden_activation", "silu"), "tie_word_embeddings": True}


def _ernie_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {"moe_num_shared_experts": get("expert_shared_count", 0), "shared_expert_intermediate_size": ABSENT}


def _hunyuan(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """Its alpha has become a part of theta."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}}


def _hunyuan_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {**_hunyuan(get, names, values), "shared_expert_intermediate_size": ABSENT}


def _minimax(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT, "moe_intermediate_size": ABSENT,
        "rotary_dim": get("rope.dimension_count", values["head_dim"]), "scoring_func": "sigmoid",
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
    }  # fmt: skip


def _minimax_m3(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    layers, dense, shared = values["num_hidden_layers"], get("leading_dense_block_count", 0), get("expert_shared_count")
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT, "first_k_dense_replace": ABSENT,
        "rotary_dim": get("rope.dimension_count", values["head_dim"]), "scoring_func": "sigmoid",
        "shared_intermediate_size": shared * get("expert_feed_forward_length"), "n_shared_experts": shared,
        "routed_scaling_factor": get("expert_weights_scale", 1.0),
        "index_n_heads": get("attention.indexer.head_count"), "index_head_dim": get("attention.indexer.key_length"),
        "index_block_size": get("attention.indexer.block_size"), "index_topk_blocks": get("attention.indexer.top_k"),
        "index_local_blocks": get("attention.indexer.local_blocks"),
        "mlp_layer_types": dense * ["dense"] + (layers - dense) * ["sparse"],
        "layer_types": dense * ["full_attention"] + (layers - dense) * ["minimax_m3_sparse"],
        "class": "MiniMaxM3SparseForCausalLM",
    }  # fmt: skip


def _lfm2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if count else "conv" for count in get("attention.head_count_kv")]
    return {"conv_L_cache": get("shortconv.l_cache"), "layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    more = {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    return {**_lfm2(get, names, values), "block_auto_adjust_ff_dim": ABSENT, **more}


def _gpt_oss(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    rules = dict(values["rope_parameters"])
    if rules["rope_type"] == "yarn":
        rules["truncate"] = False
    return {
        "num_local_experts": values["num_experts"], "num_experts": ABSENT, "moe_intermediate_size": ABSENT,
        "intermediate_size": get("expert_feed_forward_length", values["intermediate_size"]),
        **_windowed("gpt-oss", get, values), "rope_parameters": rules,
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
        "topk_group": get("expert_group_used_count"), "topk_method": ABSENT if sigmoid else "greedy",
    }  # fmt: skip


def _period(layers: list[int], count: int) -> tuple[int, int]:
    """The distance of evenly spaced layers, and the first of them."""
    if len(layers) < 2:
        return count, layers[0] if layers else count - 1
    return layers[1] - layers[0], layers[0]


def _mamba2(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    return {
        "num_heads": heads, "head_dim": inner // heads, "state_size": get("ssm.state_size"),
        "n_groups": get("ssm.group_count"), "conv_kernel": get("ssm.conv_kernel"),
        "expand": inner // values["hidden_size"], "intermediate_size": ABSENT, "num_attention_heads": ABSENT,
        "num_key_value_heads": ABSENT,
    }  # fmt: skip


def _falcon_h1(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """Without its factors, by which the GGUF's weights are multiplied."""
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    return {
        "mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_d_ssm": inner,
        "mamba_d_state": get("ssm.state_size"), "mamba_n_groups": get("ssm.group_count"),
        "mamba_d_conv": get("ssm.conv_kernel"), "mamba_rms_norm": _has(names, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }  # fmt: skip


def _jamba(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    attends = [i for i, count in enumerate(get("attention.head_count_kv")) if count]
    chooses = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in names]
    (period, first), (expert_period, expert_first) = _period(attends, layers), _period(chooses, layers)
    return {
        "attn_layer_period": period, "attn_layer_offset": first, "expert_layer_period": expert_period,
        "expert_layer_offset": expert_first, "mamba_d_state": get("ssm.state_size"), "mamba_expand": 2,
        "mamba_d_conv": get("ssm.conv_kernel"), "mamba_dt_rank": get("ssm.time_step_rank"), "head_dim": ABSENT,
    }  # fmt: skip


def _indexed(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V3.2 and GLM-5."""
    own, full = _deepseek(get, names, values), get("attention.indexer.types")
    kinds = {"indexer_types": ["full" if one else "shared" for one in full]} if full else {}
    return {
        **{key: value for key, value in own.items() if key not in ("model_type", "class")}, **kinds,
        "index_n_heads": get("attention.indexer.head_count"), "index_head_dim": get("attention.indexer.key_length"),
        "index_topk": get("attention.indexer.top_k"), "first_k_dense_replace": get("leading_dense_block_count", 0),
    }  # fmt: skip


def _deepseek4(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    layers, hashed, rules = values["num_hidden_layers"], get("hash_layer_count"), values["rope_parameters"]
    kinds, base = dict(zip(RATIOS, COMPRESSED, strict=True)), get("attention.compress_rope_freq_base")
    share = {"partial_rotary_factor": rules.get("partial_rotary_factor", 1.0)}
    main = {"rope_type": "default", "rope_theta": rules["rope_theta"], **share}
    ones = {"attention_factor": 1.0} if rules["rope_type"] == "yarn" else {}
    return {
        "layer_types": [kinds[ratio] for ratio in get("attention.compress_ratios")[:layers]],
        "mlp_layer_types": hashed * ["hash_moe"] + (layers - hashed) * ["moe"], **share,
        "rope_parameters": {"main": main, "compress": {**rules, **share, **ones, "rope_theta": base}},
        "rope_theta": rules["rope_theta"], "compress_rope_theta": base, "q_lora_rank": get("attention.q_lora_rank"),
        "sliding_window": get("attention.sliding_window"), "swiglu_limit": get("swiglu_clamp_exp")[0],
        "n_shared_experts": get("expert_shared_count"), "routed_scaling_factor": get("expert_weights_scale"),
        "index_n_heads": get("attention.indexer.head_count"), "index_head_dim": get("attention.indexer.key_length"),
        "index_topk": get("attention.indexer.top_k"), "o_groups": get("attention.output_group_count"),
        "o_lora_rank": get("attention.output_lora_rank"), "hc_mult": get("hyper_connection.count"),
        "hc_sinkhorn_iters": get("hyper_connection.sinkhorn_iterations"), "hc_eps": get("hyper_connection.epsilon"),
    }  # fmt: skip


def _mistral4(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    own = _deepseek(get, names, values)
    rules, beta = own["rope_parameters"], get("attention.temperature_scale")
    if beta is not None:
        rules |= {"llama_4_scaling_beta": beta}
    kind = {"model_type": "mistral4", "class": "Mistral4ForCausalLM", "scoring_func": ABSENT, "topk_method": ABSENT}
    return {**own, **kind, "first_k_dense_replace": get("leading_dense_block_count", 0), "rope_parameters": rules}


def _llama4(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    experts = values["num_experts"]
    return {
        "num_local_experts": experts, "num_experts": ABSENT, "use_qk_norm": experts != 128,
        "interleave_moe_layer_step": get("interleave_moe_layer_step", 1), "shared_expert_intermediate_size": ABSENT,
        "attention_bias": _has(names, "attn_q.bias"), "model_type": "llama4_text", "class": "Llama4ForCausalLM",
    }  # fmt: skip


def _phimoe(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    own = _phi3(get, names, values)
    rules = own["rope_parameters"]
    if "rope_factors_long.weight" in names:  # what others call attention_factor
        rules |= dict.fromkeys(("short_mscale", "long_mscale"), rules.get("attention_factor", 1.0))
    return {
        **own, "num_local_experts": values["num_experts"], "num_experts": ABSENT,
        "moe_intermediate_size": ABSENT, "attention_bias": True, "lm_head_bias": True, "class": "PhimoeForCausalLM",
    }  # fmt: skip


def _nemotron(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    heads, inner = get("ssm.time_step_rank"), get("ssm.inner_size")
    network = "moe" if values.get("num_experts") else "mlp"
    pairs = zip(get("attention.head_count_kv"), get("feed_forward_length"), strict=True)
    kinds = ["attention" if count else network if width else "mamba" for count, width in pairs]
    own: dict[str, Any] = {
        "layers_block_type": kinds[: values["num_hidden_layers"]],  # what predicts further tokens is none of them
        "mamba_num_heads": heads, "mamba_head_dim": inner // heads,
        "n_groups": get("ssm.group_count"), "ssm_state_size": get("ssm.state_size"),
        "conv_kernel": get("ssm.conv_kernel"),
    }  # fmt: skip
    if network == "moe":
        own |= {
            "n_shared_experts": get("expert_shared_count", 1), "norm_topk_prob": bool(get("expert_weights_norm", True)),
            "routed_scaling_factor": get("expert_weights_scale", 1.0), "n_group": get("expert_group_count", 1),
            "topk_group": get("expert_group_used_count", 1), "moe_latent_size": get("moe_latent_size"),
        }  # fmt: skip
    return own


def _inputs(arch: str, get: Keys, values: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3n and 4 have alike."""
    width = get("embedding_length_per_layer_input", 0)
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    return {
        **_windowed(arch, get, values),
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0), "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": values["vocab_size"], "final_logit_softcapping": get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
    }  # fmt: skip


def _gemma3n(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    sparse = [0.95 if scale > 0 else 0.0 for scale in get("activation_sparsity_scale")]
    return {
        **_inputs("gemma3n", get, values), "activation_sparsity_pattern": sparse, "laurel_rank": 64,
        "model_type": "gemma3n_text", "class": "Gemma3nForCausalLM",
    }  # fmt: skip


def _gemma4(get: Keys, names: Collection[str], values: dict[str, Any]) -> dict[str, Any]:
    own = _inputs("gemma4", get, values)
    full = [kind == "full_attention" for kind in own["layer_types"]]
    counts, widths = get("attention.head_count_kv"), get("feed_forward_length")
    counts = counts if isinstance(counts, list) else len(full) * [counts]
    local, everywhere = (
        next((n for n, f in zip(counts, full, strict=False) if f == kind), counts[0]) for kind in (False, True)
    )
    last = next((i for i, f in enumerate(full) if f and f"blk.{i}.attn_k.weight" in names), None)
    own = {
        **own, "head_dim": get("attention.key_length_swa"),
        "global_head_dim": get("attention.key_length"), "num_key_value_heads": local,
        "num_global_key_value_heads": everywhere,
        "attention_k_eq_v": last is not None and f"blk.{last}.attn_v.weight" not in names,
        "use_double_wide_mlp": isinstance(widths, list), "model_type": "gemma4_text", "class": "Gemma4ForCausalLM",
        "intermediate_size": widths[0] if isinstance(widths, list) else widths, "num_experts_per_tok": ABSENT,
    }  # fmt: skip
    if values.get("num_experts"):
        own |= {"enable_moe_block": True, "top_k_experts": values["num_experts_per_tok"]}
    return own


MORE: dict[str, Callable[[Keys, Collection[str], dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama, "mistral3": _mistral3, "qwen2": _qwen2, "qwen2vl": _qwen2, "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3, "qwen3vl": _qwen3, "qwen3moe": _qwen3_moe, "qwen3vlmoe": _qwen3_moe, "qwen3next": _delta,
    "qwen35": _qwen3_5, "qwen35moe": _qwen3_5, "granite": _granite, "granitemoe": _granite,
    "granitehybrid": _granite_hybrid, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3, "glm4": _attention_bias,
    "glm4moe": _glm4_moe, "olmo2": _olmo, "exaone4": _exaone4, "command-r": _command_r, "starcoder2": _starcoder2,
    "gpt2": _gpt2, "bitnet": _bitnet, "seed_oss": _seed_oss, "ernie4_5-moe": _ernie_moe, "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe, "dots1": _dots1,
    "minimax-m2": _minimax, "minimax-m3": _minimax_m3,
    "lfm2": _lfm2, "lfm2moe": _lfm2_moe, "gpt-oss": _gpt_oss, "deepseek2": _deepseek,
    "deepseek32": _indexed, "deepseek4": _deepseek4, "glm-dsa": _indexed, "mistral4": _mistral4, "llama4": _llama4,
    "phimoe": _phimoe, "nemotron_h": _nemotron, "nemotron_h_moe": _nemotron, "gemma3n": _gemma3n, "gemma4": _gemma4,
    "mamba2": _mamba2, "jamba": _jamba, "falcon-h1": _falcon_h1,
    "apertus": lambda _get, _names, _values: {"hidden_act": "xielu"},
}  # fmt: skip

# which of an architecture's families a GGUF is of: key of its metadata -> model_type
KINDS: dict[str, Callable[[Keys], str]] = {
    "llama": lambda get: (
        "mixtral" if get("expert_count") else "mistral" if get("attention.sliding_window") else "llama"
    ),
    "olmo2": lambda get: "olmo3" if get("attention.sliding_window") else "olmo2",
}
