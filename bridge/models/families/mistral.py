"""Mistral: Llama's graph, plus a sliding window in the paper. Mixtral: the same with experts.

llama.cpp's llama graph attends to the whole context. A window is written to the metadata and
reported; up to its length the two agree. Both transformers and llama.cpp normalize the weights of a
token's experts to a sum of one.
"""

from bridge.models.family import EXPERTS, Family, Row, attention, decoder, gated_mlp, optional

_ATTENTION = (
    Row("input_layernorm", "hidden"),
    *attention(bias=optional, o_bias=optional, interleaved=True),
    Row("post_attention_layernorm", "hidden"),
)

MISTRAL = Family(
    titles=("Mistral",),
    arch="llama",
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    keys={"sliding_window": None},
    in_gguf=lambda get: not get("expert_count") and bool(get("attention.sliding_window")),
    table=decoder(*_ATTENTION, *gated_mlp("mlp", "inner", bias=optional)),
)

MIXTRAL = Family(
    titles=("Mixtral",),
    arch="llama",
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    keys={"sliding_window": None, "num_experts": None},
    in_gguf=lambda get: bool(get("expert_count")),
    written_as={"num_experts": "num_local_experts"},
    table=decoder(*_ATTENTION, *EXPERTS),
    own="block_sparse_moe",
)
