"""StarCoder2: layer norms and biases throughout, and a network of two matrices with gelu."""

from dataclasses import replace

from bridge.models.family import NORM, Expected, Family, Row, attention, decoder, required

STARCODER2 = Family(
    titles=("StarCoder2",), arch="starcoder2", architectures=("Starcoder2ForCausalLM",), model_type="starcoder2",
    keys={"sliding_window": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    expects=(
        Expected("hidden_act", ("gelu_pytorch_tanh", "gelu_new", "gelu")), Expected("use_bias", (True,), written=True),
        Expected("norm_type", ("layer_norm",)),
    ),
    names={"rms_norm_eps": "norm_epsilon"},
    layer_norm=True,
    table=decoder(
        Row("input_layernorm", "hidden", bias=required),
        *attention(bias=required, o_bias=required),
        Row("post_attention_layernorm", "hidden", bias=required),
        Row("mlp.c_fc", "inner hidden", bias=required),
        Row("mlp.c_proj", "hidden inner", bias=required, columns_of=("mlp.c_fc",)),
        norm=replace(NORM, bias=required),
    ),
)  # fmt: skip
