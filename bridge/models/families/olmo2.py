"""OLMo 2: norms after attention and network, not before them; q and k are normalized over all heads at once."""

from bridge.models.family import SILU, Expected, Family, Row, decoder, gated_mlp

OLMO2 = Family(
    arch="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, Expected("attention_bias", (False,), "llama.cpp's graph for this architecture has no biases")),
    table=decoder(
        Row("self_attn.q_proj", "q hidden"),
        Row("self_attn.k_proj", "kv hidden"),
        Row("self_attn.v_proj", "kv hidden"),
        Row("self_attn.q_norm", "q"),
        Row("self_attn.k_norm", "kv"),
        Row("self_attn.o_proj", "hidden q"),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
        Row("post_feedforward_layernorm", "hidden"),
    ),
)
