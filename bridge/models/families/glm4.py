"""GLM-4-0414: norms before and after attention and network, half of each head rotated, gate and up in one matrix.

GLM-4.5 and its successors are mixtures of experts with a shared one; a bias is added to the router's sigmoid to choose
experts, but not to weight them. Solar Open and dots.llm1 are such, too.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Constant, Entry, Key, Present
from bridge.models.config.model_config import Config
from bridge.models.families.mixtures import router_bias
from bridge.models.families.qwen import rope_sections
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    configured,
    decoder,
    gated_mlp,
    networks,
    pre_norm_attention,
)  # fmt: skip
from bridge.models.prediction import prediction

GLM4 = Family(
    titles=("GLM-4-0414",), arch="glm4", architectures=("Glm4ForCausalLM",), model_type="glm4",
    keys={"partial_rotary_factor": 0.5, "attention_bias": False, "head_dim": 128, "rms_norm_eps": 1e-5},
    metadata=(ATTENTION_BIAS,),
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(bias=configured),
        Row("post_self_attn_layernorm", "hidden"),
        Row("post_attention_layernorm", "hidden"),
        Row("mlp.gate_up_proj", "inner+inner hidden", separate=("mlp.gate_proj", "mlp.up_proj")),
        Row("mlp.down_proj", "hidden inner", columns_of=("mlp.gate_up_proj",)),
        Row("post_mlp_layernorm", "hidden"),
    ),
)  # fmt: skip


def _router(normalized: bool) -> tuple[Entry, ...]:
    """`normalized`: whether the weights of a token's experts sum to one, if a config does not say so."""
    return (
        Key("expert_shared_count", "n_shared_experts", 1),
        Constant("expert_gating_func", 2),  # sigmoid
        Key("expert_weights_scale", "routed_scaling_factor", 1.0),
        Key("expert_weights_norm", "norm_topk_prob", normalized),
        Key("expert_group_count", "n_group", 1),
        Key("expert_group_used_count", "topk_group", 1),
        ATTENTION_BIAS,
    )


def _dots1(config: Config, args: Arguments) -> dict[str, Any]:
    if args.kv_heads != args.heads:
        raise BridgeError(
            f"{config.path}: num_key_value_heads is {args.kv_heads}; llama.cpp has {args.heads}, all heads"
        )
    return {}


GLM4_MOE = Family(
    titles=("GLM-4.5 to 4.7",), arch="glm4moe", architectures=("Glm4MoeForCausalLM",), model_type="glm4_moe",
    keys={
        "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False, "num_experts": None,
        "moe_intermediate_size": None, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    },
    expects=(SILU, Expected("n_group", (1,), "llama.cpp chooses among all experts here")),
    names={"num_experts": "n_routed_experts"},
    sizes=lambda config, args: {"shared": args.expert_inner * config.integer("n_shared_experts", 1)},
    metadata=(*_router(True), Present("use_qk_norm", "attn_q_norm.weight")),
    predicts="carried",
    table=decoder(
        *pre_norm_attention(
            Row("self_attn.q_norm", "head", when=lambda args: args.qk_norm),
            Row("self_attn.k_norm", "head", when=lambda args: args.qk_norm),
            bias=configured,
        ),
        *networks(
            gated_mlp("mlp", "inner"),
            *EXPERTS,
            router_bias("mlp.gate.e_score_correction_bias"),
            *gated_mlp("mlp.shared_experts", "shared"),
        ),
        *prediction(),
    ),
)  # fmt: skip


SOLAR_OPEN = replace(
    GLM4_MOE,
    titles=("Solar Open",), architectures=("SolarOpenForCausalLM",), model_type="solar_open",
    keys={
        **GLM4_MOE.keys, "partial_rotary_factor": 1.0, "first_k_dense_replace": 0, "head_dim": 128,
        "rope_theta": 1000000.0,
    },
    predicts=None,
)  # fmt: skip

DOTS1 = replace(
    GLM4_MOE,
    titles=("dots.llm1",), arch="dots1", architectures=("Dots1ForCausalLM",), model_type="dots1",
    keys={"use_qk_norm": True, "num_experts": None, "moe_intermediate_size": 1408, "first_k_dense_replace": 0},
    expects=(*GLM4_MOE.expects, NO_BIASES),
    metadata=(*_router(False), Computed(_dots1)),
    predicts=None,
)  # fmt: skip


# the language model of GLM-4.5V and 4.6V
GLM4V_MOE = replace(
    GLM4_MOE,
    titles=("GLM-4.5V and 4.6V",), architectures=("Glm4vMoeForConditionalGeneration",), model_type="glm4v_moe",
    keys={**GLM4_MOE.keys, "attention_bias": True},
    metadata=(*GLM4_MOE.metadata, Computed(rope_sections)),
    wrapped=True,
)  # fmt: skip
