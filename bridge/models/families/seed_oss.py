"""Seed-OSS: Llama's decoder with biases on q, k and v; heads are rotated by halves, their size is configured."""

from bridge.models.config.gguf_keys import ATTENTION_BIAS
from bridge.models.family import SILU, Expected, Family, configured, decoder, gated_mlp, pre_norm_attention

_NONE = "llama.cpp's graph for this architecture has no such biases"

SEED_OSS = Family(
    titles=("Seed-OSS",), arch="seed_oss", architectures=("SeedOssForCausalLM",), model_type="seed_oss",
    keys={"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524288},
    expects=(
        SILU, Expected("attention_out_bias", (False,), _NONE, written=True), Expected("mlp_bias", (False,), _NONE),
    ),
    metadata=(ATTENTION_BIAS,),
    table=decoder(
        *pre_norm_attention(bias=configured),
        *gated_mlp("mlp", "inner"),
    ),
)  # fmt: skip
