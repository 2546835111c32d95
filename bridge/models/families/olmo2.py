"""OLMo 2: norms after attention and network, not before them; q and k are normalized over all heads at once."""

from bridge.models.family import NO_BIASES, SILU, Family, Row, attention, decoder, gated_mlp

OLMO2 = Family(
    titles=("OLMo 2",),
    arch="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, NO_BIASES),
    in_gguf=lambda get: not get("attention.sliding_window"),
    table=decoder(
        *attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
        Row("post_feedforward_layernorm", "hidden"),
    ),
)
