"""Llama 1 to 3.x, and the many other models published as LlamaForCausalLM."""

from bridge.models.config.gguf_keys import ATTENTION_BIAS, Present
from bridge.models.family import Family, configured, decoder, gated_mlp, pre_norm_attention

LLAMA = Family(
    titles=("Llama 1 to 3.x",),
    arch="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second is from its first weeks
    model_type="llama",
    # 2048 is transformers' default, for the configs of the first Llama
    keys={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    metadata=(ATTENTION_BIAS, Present("mlp_bias", "ffn_gate.bias")),
    in_gguf=lambda get: not get("expert_count") and not get("attention.sliding_window"),
    table=decoder(
        *pre_norm_attention(bias=configured, o_bias=configured, interleaved=True),
        *gated_mlp("mlp", "inner", bias=lambda args: args.mlp_bias),
    ),
)
