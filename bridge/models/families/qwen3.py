"""Qwen3: no biases, heads of q and k normalized, head_dim independent of the hidden size.

Qwen3-MoE has experts, none of them shared. llama.cpp normalizes the weights of a token's experts to a sum of one:
norm_topk_prob must be true, and transformers' default is false.
"""

from bridge.models.config.gguf_keys import ATTENTION_BIAS
from bridge.models.family import (
    ALL_SPARSE,
    EXPERTS,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    configured,
    decoder,
    gated_mlp,
)  # fmt: skip

# 128 is transformers' default, whatever hidden_size / num_attention_heads is
_KEYS = {"max_position_embeddings": 32768, "head_dim": 128, "use_sliding_window": False, "attention_bias": False}
_ATTENTION = (
    Row("input_layernorm", "hidden"),
    *attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head"), bias=configured),
    Row("post_attention_layernorm", "hidden"),
)

QWEN3 = Family(
    titles=("Qwen3",),
    arch="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    keys=_KEYS,
    metadata=(ATTENTION_BIAS,),
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner")),
)

QWEN3_MOE = Family(
    titles=("Qwen3-MoE",),
    arch="qwen3moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    keys={**_KEYS, "num_experts": None, "moe_intermediate_size": None, "norm_topk_prob": False},
    expects=(
        SILU,
        *ALL_SPARSE,
        Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights", written=True),
    ),
    metadata=(ATTENTION_BIAS,),
    table=decoder(*_ATTENTION, *EXPERTS),
)
