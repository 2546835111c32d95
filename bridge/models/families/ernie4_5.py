"""ERNIE 4.5: Llama's decoder without reordered rows: its heads are rotated by neighbours in the checkpoint too."""

from bridge.models.family import SILU, Expected, Family, Row, attention, decoder, gated_mlp

ERNIE4_5 = Family(
    arch="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    model_type="ernie4_5",
    keys={"tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128},
    expects=(SILU, Expected("use_bias", (False,), "llama.cpp's converter knows no such model")),
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
    ),
)
