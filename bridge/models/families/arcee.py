"""Arcee AFM: Llama's decoder with networks of two matrices and squared ReLU."""

from dataclasses import replace

from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed
from bridge.models.config.rope import yarn_betas
from bridge.models.families.llama import LLAMA
from bridge.models.family import RELU2, Expected, Row, configured, decoder, pre_norm_attention

_NONE = "llama.cpp's graph for this architecture has no such biases"

ARCEE = replace(
    LLAMA,
    titles=("Arcee AFM",), arch="arcee", architectures=("ArceeForCausalLM",), model_type="arcee",
    keys={"max_position_embeddings": 4096, "attention_bias": False, "rms_norm_eps": 1e-5},
    expects=(RELU2, Expected("mlp_bias", (False,), _NONE)),
    metadata=(ATTENTION_BIAS, Computed(lambda config, args: yarn_betas(config, args.rope))),
    in_gguf=lambda _get: True,
    table=decoder(
        *pre_norm_attention(bias=configured, interleaved=True),
        Row("mlp.up_proj", "inner hidden"),
        Row("mlp.down_proj", "hidden inner", columns_of=("mlp.up_proj",)),
    ),
)  # fmt: skip
