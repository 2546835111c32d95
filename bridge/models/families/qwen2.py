"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v; heads are rotated by halves.

Qwen1.5-MoE and Qwen2-MoE have many small experts, and one shared by all tokens. llama.cpp does not normalize the
router's probabilities: norm_topk_prob must be false.
"""

from bridge.models.family import (
    ALL_SPARSE,
    EXPERTS,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    required,
)  # fmt: skip

_KEYS = {"max_position_embeddings": 32768, "use_sliding_window": False}
_UNNORMALIZED = "llama.cpp does not normalize this architecture's expert weights"
_ATTENTION = (
    Row("input_layernorm", "hidden"),
    *attention(bias=required),
    Row("post_attention_layernorm", "hidden"),
)

QWEN2 = Family(
    titles=("Qwen2 and 2.5",),
    arch="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    keys=_KEYS,
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner")),
)

QWEN2_MOE = Family(
    titles=("Qwen2-MoE",),
    arch="qwen2moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    keys={**_KEYS, "num_experts": None, "moe_intermediate_size": None, "shared_expert_intermediate_size": None},
    expects=(
        SILU,
        *ALL_SPARSE,
        Expected("norm_topk_prob", (False,), _UNNORMALIZED, written=True),
        Expected("qkv_bias", (True,)),
    ),
    table=decoder(
        *_ATTENTION,
        *EXPERTS,
        Row("mlp.shared_expert_gate", "hidden", change="squeezed"),  # a matrix of one row
        *gated_mlp("mlp.shared_expert", "shared"),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)
