"""Small models of the families, as transformers configures them: what the goldens and the logits are of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import CHECKPOINT
from tests.support.remote_models import REMOTE, save_remote

TEXT: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def wrapped(model_type: str, vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, "model_type": model_type, **text}, "vision_config": vision}


DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
        "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}  # fmt: skip

QWEN4: dict[str, Any] = {
    **DELTA, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "output_gate_type": "sigmoid", "hc_count": 3, "hc_lowrank": 16,
    "ple_layer_ids": [2], "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 3,
    "ple_conv_kernel_size": 3, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 32, "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

M3: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    "dense_intermediate_size": 64, "intermediate_size": 32, "shared_intermediate_size": 32, "index_n_heads": 2,
    "index_head_dim": 16, "index_block_size": 32, "index_topk_blocks": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "layer_types": ["full_attention", *3 * ["minimax_m3_sparse"]], "mlp_layer_types": ["dense", *3 * ["sparse"]],
}  # fmt: skip

LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 256,
}  # fmt: skip

NEXT: dict[str, Any] = {
    **LATENT, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32,
    "num_hidden_layers": 5, "qk_rope_head_dim": 0, "index_kpool": 4, "swiglu_limit": 1.0,
    "linear_head_dim": 8, "linear_num_heads": 4, "indexer_types": ["full", "full", "shared", "full", "full"],
    "layer_types": [f"{kind}_attention" for kind in ("linear", "indexed", "indexed", "linear", "indexed")],
    "mlp_layer_types": ["dense", *4 * ["sparse"]],
}  # fmt: skip

V4: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 1, "q_lora_rank": 32, "moe_intermediate_size": 32,
    "intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 1,
    "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 64,
    "index_topk": 8, "sliding_window": 32, "swiglu_limit": 1.0, "layer_types": ["sliding_attention",
        "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip

NEMOTRON: dict[str, Any] = {
    "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
}  # fmt: skip


# name -> (config class of transformers, its fields beside TEXT, or a model of several parts)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-vl": ("Qwen2_5_VLConfig", wrapped("qwen2_5_vl_text", VISION, rope_parameters=MROPE)),
    "qwen3-vl": ("Qwen3VLConfig", wrapped("qwen3_vl_text", {**VISION, "deepstack_visual_indexes": [0]}, head_dim=8,
        rope_parameters=MROPE)),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", wrapped("qwen3_vl_moe_text", {**VISION, "deepstack_visual_indexes": []},
        head_dim=8, rope_parameters=MROPE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)),
    "mistral3": ("Mistral3Config", {**wrapped("mistral", {"model_type": "pixtral", "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, head_dim=16),
        "spatial_merge_size": 2}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
        "logits_scaling": 2.0}),
    "minicpm": ("GraniteConfig", {"attention_multiplier": 8**-0.5, "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 2.0}),
    "minicpm4": ("GraniteConfig", {"attention_multiplier": 8**-0.5, "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 2.0, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": 4 * [1.25],
            "long_factor": [1.0, 1.5, 3.0, 8.0], "original_max_position_embeddings": 64}}),
    "phi3": ("Phi3Config", {"sliding_window": 64, "original_max_position_embeddings": 256}),
    "phi3-longrope": ("Phi3Config", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25],
            "long_factor": [1.5, 4.0], "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}}),
    "gemma2": ("Gemma2Config", {"num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True, "sliding_window": 32}),
    "plamo3": ("Gemma3TextConfig", {"num_hidden_layers": 5, "head_dim": 16, "query_pre_attn_scalar": 16,
        "sliding_window": 32, "hidden_activation": "silu", "layer_types": [
            *2 * ["sliding_attention"], "full_attention", *2 * ["sliding_attention"]]}),
    "gemma3": ("Gemma3TextConfig", {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True, "sliding_window": 32}),
    "glm4": ("Glm4Config", {"head_dim": 8, "attention_bias": True}),
    "glm4-moe": ("Glm4MoeConfig", {"head_dim": 8, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1}),
    "solar-open": ("SolarOpenConfig", {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
            "partial_rotary_factor": 1.0}}),
    "dots1": ("Dots1Config", {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5}),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": ("OlmoeConfig", {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "mellum2": ("MellumConfig", {"num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "sliding_window": 32,
        "layer_types": [*3 * ["sliding_attention"], "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 64}}}),
    "afmoe": ("AfmoeConfig", {"num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "sliding_window": 32, "mup_enabled": True, "route_scale": 2.5}),
    "arcee": ("ArceeConfig", {"head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0,
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}}),
    "jais2": ("Jais2Config", {}),
    "bitnet": ("BitNetConfig", {"tie_word_embeddings": True, "hidden_act": "silu"}),
    "command-r": ("CohereConfig", {"tie_word_embeddings": True, "logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 5, "logit_scale": 0.3, "sliding_window": 32,
        "tie_word_embeddings": True}),
    "cohere2-moe": ("Cohere2MoeConfig", {"num_hidden_layers": 5, "head_dim": 16, "logit_scale": 0.3,
        "sliding_window": 32, "num_experts": 4, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96,
        "num_shared_experts": 2, "expert_selection_fn": "sigmoid"}),
    "cohere2-moe-rms": ("Cohere2MoeConfig", {"head_dim": 16, "logit_scale": 0.3, "sliding_window": 32,
        "num_hidden_layers": 4, "num_experts": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "prefix_dense_intermediate_size": 64}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256,
        "tie_word_embeddings": True}),
    "deepseek2-lite": ("DeepseekV2Config", {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    "deepseek3": ("DeepseekV3Config", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "num_key_value_heads": 4, "routed_scaling_factor": 2.5, "rope_parameters": {"rope_type": "yarn",
            "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "youtu": ("YoutuConfig", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 12, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_key_value_heads": 4, "first_k_dense_replace": 1}),
    "kimi-linear": ("KimiLinearConfig", {"num_hidden_layers": 4, "model_max_length": 256, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_experts": 4, "num_experts_per_token": 2,
        "moe_intermediate_size": 16, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
        "layer_types": [*3 * ["linear_attention"], "full_attention"]}),
    "ling3": ("BailingHybridConfig", {"num_hidden_layers": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 16, "layer_group_size": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6}),
    "glm4v-moe": ("Glm4vMoeConfig", wrapped("glm4v_moe_text", VISION, head_dim=8, attention_bias=True,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_hidden_layers=3, n_group=1,
        topk_group=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5})),
    "granite-4": ("GraniteMoeHybridConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48,
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}),
    "qwen3-next": ("Qwen3NextConfig", {"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "qwen3.5-vl": ("Qwen3_5Config", wrapped("qwen3_5_text", {**VISION, "deepstack_visual_indexes": []}, **DELTA)),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA, "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "qwen4exp": ("Qwen4ExpConfig", wrapped("qwen4_exp_text", {**VISION, "deepstack_visual_indexes": []}, **QWEN4)),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16, "attention_bias": True}),
    "olmo3": ("Olmo3Config", {"num_hidden_layers": 5, "sliding_window": 32}),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": 2 * ["full_attention"]}),
    "exaone-moe": ("ExaoneMoeConfig", {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_shared_experts": 2, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5}),
    "exaone4.5": ("Exaone4_5_Config", wrapped("exaone4", {**VISION, "num_key_value_heads": 1,
        "fullatt_block_indexes": [0]}, sliding_window=None, layer_types=2 * ["full_attention"])),
    "ministral3": ("Ministral3Config", {"head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6,
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2,
        "moe_intermediate_size": 16, "moe_num_shared_experts": 2}),
    "granite-moe": ("GraniteMoeConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": ("GraniteMoeSharedConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48}),
    "granite-swa": ("GraniteSWAConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_hidden_layers": 4, "sliding_window": 32,
        "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0]}),
    "granite-moe-swa": ("GraniteMoeSWAConfig", {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4, "logits_scaling": 2.0, "num_hidden_layers": 4, "sliding_window": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 16, "tie_word_embeddings": True}),
    "lfm2-moe": ("Lfm2MoeConfig", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "tie_word_embeddings": True}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2],
        "moe_intermediate_size": [64, 64], "num_shared_expert": [1, 1]}),
    "dots3-note": ("Dots3NoteTextConfig", {"num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
        "shared_experts_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 256,
        "sliding_window": 32, "layer_types": ["indexed_attention", *2 * ["sliding_attention"], "indexed_attention"],
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 48,
        "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 20}),
    "mimo2": ("MiMoV2FlashConfig", {"num_hidden_layers": 4, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "sliding_window": 32,
        "layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention"]}),
    "hy3": ("HYV3Config", {"head_dim": 16, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_shared_experts": 2}),
    "ling": ("GraniteMoeSharedConfig", {"attention_multiplier": 8**-0.5, "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0, "logits_scaling": 1.0, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 128}),
    "ling2": ("Glm4MoeConfig", {"head_dim": 8, "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_hidden_layers": 3, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5}),
    "laguna": ("LagunaConfig", {"head_dim": 16, "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "sliding_window": 32,
        "num_attention_heads_per_layer": [4, 6, 6, 6, 4], "moe_routed_scaling_factor": 2.5,
        "layer_types": ["full_attention", *3 * ["sliding_attention"], "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0,
            "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}}),
    "laguna-m": ("LagunaConfig", {"head_dim": 16, "num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "gating": "per-element",
        "sliding_window": 0, "layer_types": 3 * ["full_attention"]}),
    "hy-v4": ("HYV4Config", {**LATENT, "num_hidden_layers": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16,
        "moe_intermediate_size": 32, "swiglu_limit": 1.0, "hc_magnitude": 1.5, "rms_norm_eps": 1e-6,
        "indexer_types": ["full", "shared", "full", "shared"]}),
    "step35": ("Step3p7Config", {**wrapped("step3p5", {"hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}, head_dim=16,
        pad_token_id=1, num_hidden_layers=5, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, share_expert_dim=24, moe_router_scaling_factor=3.0, sliding_window=32,
        num_sliding_attention_heads=6,
        layer_types=["full_attention", *3 * ["sliding_attention"], "full_attention"],
        mlp_layer_types=[*2 * ["dense"], *3 * ["sparse"]], swiglu_limits=[0.0, 0.0, 0.0, 0.7, 0.5],
        swiglu_limits_shared=[0.9, 0.0, 0.0, 0.4, 0.6], rope_parameters={"full_attention": {"rope_type": "llama3",
            "rope_theta": 5000000.0, "factor": 2.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0,
            "high_freq_factor": 32.0, "partial_rotary_factor": 0.5}, "sliding_attention": {"rope_type": "default",
                "rope_theta": 10000.0, "partial_rotary_factor": 1.0}})}),
    "minimax-m2": ("MiniMaxM2Config", {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "intermediate_size": 32}),
    "minimax-m3": ("MiniMaxM3VLConfig", {"projector_hidden_size": 16, **wrapped("minimax_m3_vl_text",
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, **M3)}),
    "muse-glimmer": ("MuseGlimmerConfig", {**wrapped("muse_glimmer_text", {"num_hidden_layers": 1, "hidden_size": 32,
        "intermediate_size": 16, "num_attention_heads": 2}, num_hidden_layers=5, head_dim=16, sliding_window=32,
        output_multiplier=0.5), "out_hidden_size": 128, "projector_hidden_size": 16}),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 2048,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "per_layer_config": {
            str(layer): {"head_dim": 32} for layer in (1, 3)}}),
    "gemma4-dense": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": True, "num_key_value_heads": 2,
        "per_layer_config": {str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)}}),
    "gemma4-unified": ("Gemma4UnifiedConfig", {"text_config": {**TEXT, **GEMMA4, "model_type": "gemma4_unified_text",
        "pad_token_id": 0, "attention_k_eq_v": True, "per_layer_config": {
            str(layer): {"head_dim": 32, "num_key_value_heads": 1} for layer in (1, 3)}},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16,
            "output_proj_dims": 32}, "audio_config": {"audio_embed_dim": 48}}),
    "gemma4-moe": ("Gemma4TextConfig", {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "per_layer_config": {str(layer): {"head_dim": 32} for layer in (1, 3)}}),
    "gemma3n": ("Gemma3nTextConfig", {"num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0, "sliding_window": 32,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 2048, "laurel_rank": 64,
        "activation_sparsity_pattern": 4 * [0.95]}),
    "mistral4": ("Mistral3Config", {**wrapped("mistral4", {"model_type": "pixtral", "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_shared_experts=1, num_key_value_heads=4, rope_parameters={"type": "yarn",
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5}), "spatial_merge_size": 2}),
    "llama4": ("Llama4TextConfig", {"num_hidden_layers": 4, "head_dim": 8, "intermediate_size_mlp": 64,
        "intermediate_size": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": None, "original_max_position_embeddings": 256}),
    "nemotron-h": ("NemotronHConfig", {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]}),
    "nemotron-h-moe": ("NemotronHConfig", {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24}),
    "nemotron-3-super": ("NemotronHConfig", {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_latent_size": 24,
        "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 5.0}),
    "apertus": ("ApertusConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
        "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2,
        "intermediate_size": None, "tie_word_embeddings": True}),
    "jamba": ("JambaConfig", {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "falcon-h1": ("FalconH1Config", {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "embedding_multiplier": 5.65, "lm_head_multiplier": 0.0195, "mlp_multipliers": [0.88, 0.31],
        "key_multiplier": 0.39, "attention_in_multiplier": 1.25, "attention_out_multiplier": 0.94,
        "ssm_in_multiplier": 1.26, "ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35]}),
    "glm5": ("GlmMoeDsaConfig", {**LATENT, "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default",
        "rope_theta": 1000000.0}}),
    "glm5-next": ("Glm5NextConfig", wrapped("glm5_next_text", VISION, **NEXT)),
    "deepseek3.2": ("DeepseekV32Config", {**LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0}}),
    "deepseek4": ("DeepseekV4Config", V4),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "num_hidden_layers": 3, "num_local_experts": 3,
        "num_experts_per_tok": 2, "sliding_window": 32, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0,
            "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}}),
}  # fmt: skip
# a MiniMax M3 that attends to all of 96 tokens, as it does where an indexer chooses no fewer
ALL_BLOCKS = {"text_config": MODELS["minimax-m3"][1]["text_config"] | {"index_topk_blocks": 3}}
# of whose language models alone transformers has no class
OF_PARTS_ONLY = ("glm5-next", "muse-glimmer", "step35")
# what transformers names otherwise than the published config.json
PUBLISHED_AS: dict[str, dict[str, str]] = {
    "phimoe": {"PhimoeForCausalLM": "PhiMoEForCausalLM"},
    "cohere2": {'"logit_scale"': '"rotary_pct": 1.0, "logit_scale"'},
    "minimax-m3": {
        '"silu"': '"swigluoai"',
        '"index_head_dim": 16,': "",
        '"index_block_size": 32,': "",
        '"index_topk_blocks": 2,': "",
        '"index_local_blocks": 1,': "",
        '"index_n_heads": 2,': '"sparse_attention_config": {"sparse_num_index_heads": 2, "sparse_index_dim": 16, '
        '"sparse_block_size": 32, "sparse_topk_blocks": 2, "sparse_local_block": 1}, "moe_layer_freq": [0, 1, 1, 1], '
        '"n_shared_experts": 1, "scoring_func": "sigmoid",',
    },
    "gemma4-unified": {'"hidden_activation"': '"moe_intermediate_size": null, "hidden_activation"'},
    "granite-swa": {'"layer_rope_theta": [': '"no_rope_layers": [0, 1, 1, 1], "layer_rope_theta": ['},
    "glm5-next": {
        '"linear_conv_kernel_dim": 4,': '"mla_use_nope": true, "first_k_dense_replace": 1, "linear_attn_config": '
        '{"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},',
        '"linear_head_dim": 8,': "",
        '"linear_lower_bound": -5.0,': "",
        '"linear_num_heads": 4,': "",
    },
    "qwen4exp": {'"indexed_attention"': '"full_attention"'},
    "kimi-linear": {
        '"linear_conv_kernel_dim": 4,': '"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], '
        '"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}, "first_k_dense_replace": 1, '
        '"moe_router_activation_func": "sigmoid", "mla_use_nope": true,',
        '"linear_head_dim": 16,': "",
        '"linear_num_heads": 4,': "",
    },
    "ling3": {
        "BailingHybridForCausalLM": "BailingMoeV3ForCausalLM",
        '"head_dim": 8,': '"head_dim": 16, "no_kda_lora": true, "gated_attention_proj_granularity_type": "head_wise", '
        '"score_function": "sigmoid", "moe_shared_expert_intermediate_size": 16,',
        '"linear_head_dim": 16,': "",
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    },
    "granite-4": {'"linear_attention"': '"mamba"', '"full_attention"': '"attention"'},
}

# families that go by a template
TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (kind, {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": True, "eos_token_id": 0,
        "bos_token_id": None, "pad_token_id": None, **fields})
    for name, kind, fields in (
        ("gemma", "GemmaConfig", {"num_key_value_heads": 2, "head_dim": 32}),
        ("falcon", "FalconConfig", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False, "alibi": False,
            "ffn_hidden_size": 256}),
        ("bloom", "BloomConfig", {"n_layer": 2, "n_head": 4}),
        ("stablelm", "StableLmConfig", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
            "num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("olmoe-by-template", "OlmoeConfig", {"intermediate_size": 64, "num_key_value_heads": 4, "num_experts": 3,
            "num_experts_per_tok": 2, "tie_word_embeddings": False}),
        ("falcon-h1-by-template", "FalconH1Config", {"num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 64,
            "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1}),
        ("mamba2-by-template", "Mamba2Config", {"intermediate_size": 128, "num_heads": 8, "head_dim": 16,
            "state_size": 32, "n_groups": 1, "expand": 2}),
    )
}  # fmt: skip


def new_model(name: str, **fields: Any) -> Any:
    """A family's model in transformers; `fields`: of its config, over those of MODELS."""
    import torch
    import transformers

    kind, own = (MODELS | TEMPLATES)[name]
    torch.manual_seed(7)  # what `randomized` leaves, such as the time steps of Mamba
    parts = "text_config" in own
    config = getattr(transformers, kind)(**({} if parts or name in TEMPLATES else TEXT) | own | fields)
    auto = transformers.AutoModelForImageTextToText if parts else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    config.architectures = [type(model).__name__]
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # Nemotron-H's is 0.001 in transformers; llama.cpp has no such limit
            module.time_step_limit = (0.0, float("inf"))
    if name in REMOTE:
        model.save_pretrained = lambda folder, **_: save_remote(name, model, folder)
    return model.eval()


def randomized(model: Any, seed: int = 7) -> Any:
    """Weights that make themselves heard: no norm near one, no bias near zero, a router without near-ties."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("e_score_correction_bias") or parameter.ndim == 1:
                parameter.copy_(0.3 * noise + parameter)
            else:
                parameter.copy_((4 if name.endswith("gate.weight") else 1) * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # DeepSeek V4's experts of a token
                experts = model.config.num_local_experts
                buffer.copy_(torch.rand(len(buffer), experts, generator=generator).argsort(-1)[:, : buffer.shape[1]])
    return model


def copy_tokenizer(folder: Path, size: int | None = None) -> Path:
    """The project's own tokenizer; `size`: its first tokens alone."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / file, folder / file)
    if size is not None:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = {text: token for text, token in data["model"]["vocab"].items() if token < size}
        pairs = ((merge if isinstance(merge, list) else merge.split(" ")) for merge in data["model"]["merges"])
        merges = [pair for pair in pairs if "".join(pair) in vocab]
        data["model"] |= {"vocab": vocab, "merges": merges}
        (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder
