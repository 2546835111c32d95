"""Jais 2: layer norms and biases throughout, and networks of two matrices with squared ReLU."""

from dataclasses import replace

from bridge.models.family import NORM, RELU2, Expected, Family, Row, attention, decoder, required

_ALL = "llama.cpp's graph for this architecture has biases throughout"

JAIS2 = Family(
    titles=("Jais 2",), arch="jais2", architectures=("Jais2ForCausalLM",), model_type="jais2",
    keys={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    names={"rms_norm_eps": "layer_norm_eps"},
    expects=(
        RELU2,
        *(Expected(key, (True,), _ALL, written=True) for key in ("attention_bias", "mlp_bias")),
    ),
    layer_norm=True,
    table=decoder(
        Row("input_layernorm", "hidden", bias=required),
        *attention(bias=required, o_bias=required),
        Row("post_attention_layernorm", "hidden", bias=required),
        Row("mlp.up_proj", "inner hidden", bias=required),
        Row("mlp.down_proj", "hidden inner", bias=required, columns_of=("mlp.up_proj",)),
        norm=replace(NORM, bias=required),
    ),
)  # fmt: skip
