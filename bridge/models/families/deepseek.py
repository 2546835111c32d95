"""DeepSeek V2 to V3.2, R1, Kimi K2, K2.5 and GLM-5: attention on a latent vector, many small experts and shared ones.

kv_b_proj makes each head's keys (without position) and values from the latent vector. llama.cpp multiplies q by the
first and the attended latent vectors by the second, so GGUF separates them, one matrix per head. The one for the keys
is transposed: no codes can be carried, and it becomes F16. The codes of the one for the values are carried.

DeepSeek V3.2 and GLM-5 attend to the tokens that a smaller attention chooses, the indexer. Layers of GLM-5.2 without
one use the choice of the layer before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES, Graph
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules, yarn_betas
from bridge.models.families.mixtures import LEADING, router_bias
from bridge.models.family import EXPERTS, NO_BIASES, SILU, Expected, Family, Row, decoder, gated_mlp, networks, required
from bridge.models.outline import Part
from bridge.models.prediction import prediction


def latent_sizes(config: Config, args: Arguments) -> dict[str, int]:
    nope, rope, value = config.side("qk_nope_head_dim"), args.more.get("rope", 0), args.more["v_head"]
    return {
        "nope": nope, "q": args.heads * (nope + rope), "attended": args.heads * value,
        "shared": args.expert_inner * config.integer("n_shared_experts", 1),
        "shared_experts": config.count("n_shared_experts", 0),
    }  # fmt: skip


def head_keys(before: str = "") -> Callable[[Arguments, str], tuple[Part, ...]]:
    """One part per head: [latent, head], its first rows transposed; `before`: the beginning of its sizes' names."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        heads, nope, value, lora = _latent_sides(args, before)
        each, shape = nope + value, (lora, nope)
        starts = (head * each + np.arange(nope) for head in range(heads))
        return tuple(Part(source, shape, columns=c, stored=(lora, heads * each), change="transposed") for c in starts)

    return parts


def head_values(before: str = "") -> Callable[[Arguments, str], tuple[Part, ...]]:
    """One part per head: [head, latent], its last rows; `before` as in `head_keys`."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        heads, nope, value, lora = _latent_sides(args, before)
        each = nope + value
        rows = (head * each + nope + np.arange(value) for head in range(heads))
        return tuple(Part(source, (value, lora), r, stored=(heads * each, lora)) for r in rows)

    return parts


def _latent_sides(args: Arguments, before: str) -> tuple[int, ...]:
    return tuple(args.sizes[f"{before}{name}"] for name in ("heads", "nope", "v_head", "lora"))


def _heads(_config: Config, args: Arguments) -> dict[str, Any]:
    m = args.sizes
    return {
        "attention.head_count_kv": 1, "attention.key_length": m["lora"] + m["rope"],
        "attention.value_length": m["lora"], "attention.key_length_mla": m["nope"] + m["rope"],
    }  # fmt: skip


def _heads_config(stored: StoredKeys) -> dict[str, Any]:
    nope = stored.get("attention.key_length_mla") - stored.get("rope.dimension_count")
    return {"qk_nope_head_dim": nope, "num_key_value_heads": stored.values["num_attention_heads"]}


def _scoring(config: Config, _args: Arguments) -> dict[str, Any]:
    scoring = config.get("scoring_func") or ("softmax" if config.get("model_type") == "deepseek_v2" else "sigmoid")
    return {"expert_gating_func": 2 if scoring == "sigmoid" else 1}


def _scoring_config(stored: StoredKeys) -> dict[str, Any]:
    default = 2 if ARCHITECTURES.get(stored.arch, Graph()).sigmoid else 1
    sigmoid = stored.get("expert_gating_func", default) == 2
    return {"scoring_func": "sigmoid"} if sigmoid else {"scoring_func": "softmax", "topk_method": "greedy"}


def _scaling(config: Config, args: Arguments) -> dict[str, Any]:
    rules = rope_rules(config)
    scaling: dict[str, Any] = {"rope.scaling.attn_factor": None}
    if args.rope.type == "yarn":
        scale = rules.get("mscale_all_dim") or 0.0
        if rules.get("mscale", 1.0) != scale:
            factors = f"mscale {rules.get('mscale')} and mscale_all_dim {scale}"
            raise BridgeError(f"{config.path}: yarn with {factors}; must be equal for llama.cpp")
        scaling["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return {**scaling, **yarn_betas(config, args.rope)}


def latent_rules(stored: StoredKeys) -> dict[str, Any]:
    rules = {key: value for key, value in stored.values["rope_parameters"].items() if key != "partial_rotary_factor"}
    if rules["rope_type"] == "yarn":
        scale = 10 * stored.get("rope.scaling.yarn_log_multiplier", 0.0)
        rules |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_parameters": rules}


_ATTENTION = (
    Computed(_heads, _heads_config),
    Key("attention.value_length_mla", "v_head_dim", defines="v_head"),
    Key("attention.kv_lora_rank", "kv_lora_rank", defines="lora"),
    Key("attention.q_lora_rank", "q_lora_rank", defines="q_lora", optional=True),
    Key("rope.dimension_count", "qk_rope_head_dim", defines="rope"),
)
LATENT = (
    *_ATTENTION,
    LEADING,
    Key("expert_shared_count", "n_shared_experts", size="shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", 1.0),
    Key("expert_weights_norm", "norm_topk_prob", False, optional=True),
    Computed(_scoring, _scoring_config),
    Key("expert_group_count", "n_group", optional=True),
    Key("expert_group_used_count", "topk_group", optional=True),
    Computed(_scaling, latent_rules),
)


def _version(stored: StoredKeys) -> dict[str, Any]:
    two = {"model_type": "deepseek_v2", "class": "DeepseekV2ForCausalLM"}
    return two if stored.get("expert_gating_func", 1) != 2 else {}


# the rows of attention on a latent vector, after its norm
LATENT_ATTENTION = (
    Row("self_attn.q_proj", "q hidden", when=lambda args: not args.more["q_lora"]),
    Row("self_attn.q_a_proj", "q_lora hidden", when=lambda args: bool(args.more["q_lora"])),
    Row("self_attn.q_a_layernorm", "q_lora", when=lambda args: bool(args.more["q_lora"])),
    Row("self_attn.q_b_proj", "q q_lora", when=lambda args: bool(args.more["q_lora"])),
    Row("self_attn.kv_a_proj_with_mqa", "lora+rope hidden"),
    Row("self_attn.kv_a_layernorm", "lora"),
    Row("self_attn.kv_b_proj", "heads lora nope", parts=head_keys(), name="attn_k_b.weight", floats="F16"),
    Row("self_attn.kv_b_proj", "heads v_head lora", parts=head_values(), name="attn_v_b.weight"),
    Row("self_attn.o_proj", "hidden attended"),
)
ROUTER_BIAS = replace(router_bias("mlp.gate.e_score_correction_bias"), optional=True)


def latent_table(*experts: Row, indexer: tuple[Row, ...] = ()) -> tuple[Row, ...]:
    """The table of an architecture with DeepSeek's attention; without experts every layer has one network.

    indexer  what chooses the tokens to attend to
    """
    network, shared = gated_mlp("mlp", "inner"), gated_mlp("mlp.shared_experts", "shared")
    sparse = *networks(network, *experts, ROUTER_BIAS, *shared), *prediction()
    return decoder(
        Row("input_layernorm", "hidden"),
        *LATENT_ATTENTION,
        *indexer,
        Row("post_attention_layernorm", "hidden"),
        *(sparse if experts else network),
    )


DEEPSEEK2 = Family(
    titles=("DeepSeek V2 and V3", "Kimi K2 and K2.5"), arch="deepseek2",
    architectures=(
        "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration",
    ),
    model_type="deepseek_v3",
    keys={"num_experts": None, "moe_intermediate_size": None, "first_k_dense_replace": 0},
    expects=(SILU,),
    names={"num_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    sizes=latent_sizes,
    metadata=(*LATENT, Computed(config=_version)),
    in_gguf=lambda get: bool(get("expert_count")), wrapped=True, predicts="dropped",
    table=latent_table(*EXPERTS),
)  # fmt: skip


def _no_experts(_config: Config, args: Arguments) -> dict[str, Any]:
    return {"leading_dense_block_count": args.layers, "expert_feed_forward_length": args.inner}


# a dense model
YOUTU = replace(
    DEEPSEEK2,
    titles=("Youtu-LLM",), architectures=("YoutuForCausalLM",), model_type="youtu",
    keys={"tie_word_embeddings": True, "max_position_embeddings": 131072},
    expects=(SILU, NO_BIASES, Expected("rope_interleave", (True,), "llama.cpp rotates neighbours here")),
    metadata=(
        *_ATTENTION, Constant("expert_shared_count", 0), Computed(_no_experts), Computed(_scaling, latent_rules),
    ),
    in_gguf=lambda get: not get("expert_count"), wrapped=False, predicts=None, table=latent_table(),
)  # fmt: skip

# GLM-4.7-Flash
GLM4_MOE_LITE = replace(
    DEEPSEEK2,
    titles=("GLM-4.7 Flash",), architectures=("Glm4MoeLiteForCausalLM",), predicts="carried",
    model_type="glm4_moe_lite",
    keys={**DEEPSEEK2.keys, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
)  # fmt: skip


def full_keys(config: Config, _args: Arguments) -> dict[str, Any]:
    kinds = config.get("indexer_types")
    return {"attention.indexer.types": [kind == "full" for kind in kinds] if kinds else None}


def full_config(stored: StoredKeys) -> dict[str, Any]:
    full = stored.get("attention.indexer.types")
    return {"indexer_types": ["full" if one else "shared" for one in full]} if full else {}


INDEXER = (
    Row("self_attn.indexer.k_norm", "index_head", bias=required),
    Row("self_attn.indexer.weights_proj", "index_heads hidden"),
    Row("self_attn.indexer.wk", "index_head hidden"),
    Row("self_attn.indexer.wq_b", "index_q q_lora"),
)

DEEPSEEK32 = replace(
    DEEPSEEK2,
    titles=("DeepSeek V3.2",), arch="deepseek32", named_as="glm-dsa", architectures=("DeepseekV32ForCausalLM",),
    predicts="carried", model_type="deepseek_v32",
    keys={**DEEPSEEK2.keys, "first_k_dense_replace": 3},
    sizes=lambda config, args: {
        **latent_sizes(config, args), "index_q": args.more["index_heads"] * args.more["index_head"],
    },
    metadata=(
        *LATENT, Key("attention.indexer.head_count", "index_n_heads", defines="index_heads"),
        Key("attention.indexer.key_length", "index_head_dim", defines="index_head"),
        Key("attention.indexer.top_k", "index_topk"), Computed(full_keys, full_config),
    ),
    table=latent_table(*EXPERTS, indexer=INDEXER),
)  # fmt: skip

GLM5 = replace(
    DEEPSEEK32,
    titles=("GLM-5",), arch="glm-dsa", architectures=("GlmMoeDsaForCausalLM",), model_type="glm_moe_dsa",
    keys={**DEEPSEEK32.keys, "rms_norm_eps": 1e-5},
    table=latent_table(*EXPERTS, indexer=tuple(replace(row, optional=True) for row in INDEXER)),
)  # fmt: skip
