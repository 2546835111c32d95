"""DeepSeek V2 to V3.2, R1, Kimi K2, K2.5 and GLM-5: attention on a latent vector, many small experts and shared ones.

kv_b_proj makes each head's keys (without position) and values from the latent vector. llama.cpp multiplies q by the
first and the attended latent vectors by the second, so GGUF separates them, one matrix per head. The one for the keys
is transposed: no codes can be carried, and it becomes F16. The codes of the one for the values are carried.

DeepSeek V3.2 and GLM-5 attend to the tokens that a smaller attention chooses, the indexer. Layers of GLM-5.2 without
one use the choice of the layer before.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.family import EXPERTS, SILU, Family, Row, decoder, gated_mlp, leading, required, sparse
from bridge.models.model_config import Config
from bridge.models.outline import Part
from bridge.models.prediction import prediction
from bridge.models.rope import rope_rules, yarn_betas


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    nope, rope = config.side("qk_nope_head_dim"), config.side("qk_rope_head_dim")
    value, lora = config.side("v_head_dim"), config.side("kv_lora_rank")
    return {
        "nope": nope, "rope": rope, "v_head": value, "lora": lora,
        "q_lora": config.side("q_lora_rank") if config.get("q_lora_rank") else 0,
        "q": args.heads * (nope + rope), "attended": args.heads * value,
        "shared": args.expert_inner * config.integer("n_shared_experts", 1),
        "shared_experts": config.get("n_shared_experts", 0) and config.integer("n_shared_experts"),
    }  # fmt: skip


def _keys(args: Arguments, source: str) -> tuple[Part, ...]:
    """One part per head: [latent, head], the transpose of its first rows."""
    m = args.sizes
    each, stored = m["nope"] + m["v_head"], (m["lora"], args.heads * (m["nope"] + m["v_head"]))
    starts = (head * each + np.arange(m["nope"]) for head in range(args.heads))
    shape = (m["lora"], m["nope"])
    return tuple(Part(source, shape, columns=rows, stored=stored, change="transposed") for rows in starts)


def _values(args: Arguments, source: str) -> tuple[Part, ...]:
    """One part per head: [head, latent], its last rows."""
    m = args.sizes
    each = m["nope"] + m["v_head"]
    rows = (head * each + m["nope"] + np.arange(m["v_head"]) for head in range(args.heads))
    return tuple(Part(source, (m["v_head"], m["lora"]), r, stored=(args.heads * each, m["lora"])) for r in rows)


def latent(config: Config, args: Arguments) -> dict[str, Any]:
    m, rules = args.sizes, rope_rules(config)
    scoring = config.get("scoring_func") or ("softmax" if config.get("model_type") == "deepseek_v2" else "sigmoid")
    scaling: dict[str, Any] = {"rope.scaling.attn_factor": None}
    if args.rope.type == "yarn":
        whole = rules.get("mscale_all_dim") or 0.0
        if rules.get("mscale", 1.0) != whole:
            factors = f"mscale {rules.get('mscale')} and mscale_all_dim {whole}"
            raise BridgeError(f"{config.path}: yarn with {factors}; must be equal for llama.cpp")
        scaling["rope.scaling.yarn_log_multiplier"] = 0.1 * whole
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": m["lora"] + m["rope"], "attention.value_length": m["lora"],
        "attention.key_length_mla": m["nope"] + m["rope"], "attention.value_length_mla": m["v_head"],
        "attention.kv_lora_rank": m["lora"], "attention.q_lora_rank": m["q_lora"] or None,
        "rope.dimension_count": m["rope"],
        "leading_dense_block_count": args.leading,
        "expert_shared_count": m["shared_experts"],
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "expert_weights_norm": True if config.get("norm_topk_prob") else None,
        "expert_gating_func": 2 if scoring == "sigmoid" else 1,
        "expert_group_count": config.get("n_group") and config.integer("n_group"),
        "expert_group_used_count": config.get("topk_group") and config.integer("topk_group"),
        **scaling, **yarn_betas(config, args.rope),
    }  # fmt: skip


def latent_table(*experts: Row, indexer: tuple[Row, ...] = ()) -> tuple[Row, ...]:
    """The table of an architecture with DeepSeek's attention; `indexer`: what chooses the tokens to attend to."""
    return decoder(
            Row("input_layernorm", "hidden"),
            Row("self_attn.q_proj", "q hidden", when=lambda args: not args.more["q_lora"]),
            Row("self_attn.q_a_proj", "q_lora hidden", when=lambda args: bool(args.more["q_lora"])),
            Row("self_attn.q_a_layernorm", "q_lora", when=lambda args: bool(args.more["q_lora"])),
            Row("self_attn.q_b_proj", "q q_lora", when=lambda args: bool(args.more["q_lora"])),
            Row("self_attn.kv_a_proj_with_mqa", "lora+rope hidden"),
            Row("self_attn.kv_a_layernorm", "lora"),
            Row("self_attn.kv_b_proj", "heads lora nope", parts=_keys, name="attn_k_b.weight", floats="F16"),
            Row("self_attn.kv_b_proj", "heads v_head lora", parts=_values, name="attn_v_b.weight"),
            Row("self_attn.o_proj", "hidden attended"),
            *indexer,
            Row("post_attention_layernorm", "hidden"),
            *leading(*gated_mlp("mlp", "inner")),
            *sparse(
                *experts,
                Row(
                    "mlp.gate.e_score_correction_bias", "experts", exact=True, name="exp_probs_b.bias", optional=True,
                ),
                *gated_mlp("mlp.shared_experts", "shared"),
            ),
            *prediction(),
    )  # fmt: skip


DEEPSEEK2 = Family(
    titles=("DeepSeek V2 and V3", "Kimi K2 and K2.5"),
    arch="deepseek2",
    architectures=(
        "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration",
    ),
    model_type="deepseek_v3",
    keys={"num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 0},
    expects=(SILU,),
    names={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    sizes=_sizes,
    metadata=latent,
    wrapped=True,
    predicts="dropped",
    table=latent_table(*EXPERTS),
)  # fmt: skip

# GLM-4.7-Flash
GLM4_MOE_LITE = replace(
    DEEPSEEK2,
    titles=("GLM-4.7 Flash",),
    architectures=("Glm4MoeLiteForCausalLM",),
    predicts="carried",
    model_type="glm4_moe_lite",
    keys={**DEEPSEEK2.keys, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
)


def _indexed_sizes(config: Config, args: Arguments) -> dict[str, int]:
    heads, size = config.side("index_n_heads"), config.side("index_head_dim")
    return {**_sizes(config, args), "index_heads": heads, "index_head": size, "index_q": heads * size}


def _indexed(config: Config, args: Arguments) -> dict[str, Any]:
    kinds = config.get("indexer_types")
    return {
        **latent(config, args),
        "attention.indexer.head_count": args.more["index_heads"],
        "attention.indexer.key_length": args.more["index_head"],
        "attention.indexer.top_k": config.integer("index_topk"),
        "attention.indexer.types": [kind == "full" for kind in kinds] if kinds else None,
    }


_INDEXER = (
    Row("self_attn.indexer.k_norm", "index_head", bias=required),
    Row("self_attn.indexer.weights_proj", "index_heads hidden"),
    Row("self_attn.indexer.wk", "index_head hidden"),
    Row("self_attn.indexer.wq_b", "index_q q_lora"),
)

DEEPSEEK32 = replace(
    DEEPSEEK2,
    titles=("DeepSeek V3.2",),
    arch="deepseek32",
    named_as="glm-dsa",
    architectures=("DeepseekV32ForCausalLM",),
    predicts="carried",
    model_type="deepseek_v32",
    keys={**DEEPSEEK2.keys, "first_k_dense_replace": 3},
    sizes=_indexed_sizes,
    metadata=_indexed,
    table=latent_table(*EXPERTS, indexer=_INDEXER),
)

GLM5 = replace(
    DEEPSEEK32,
    titles=("GLM-5",),
    arch="glm-dsa",
    architectures=("GlmMoeDsaForCausalLM",),
    model_type="glm_moe_dsa",
    keys={**DEEPSEEK32.keys, "rms_norm_eps": 1e-5},
    table=latent_table(*EXPERTS, indexer=tuple(replace(row, optional=True) for row in _INDEXER)),
)
