"""Apertus: normalized heads of q and k, and a network of two matrices with xIELU, whose numbers each layer has learned.

The numbers are tensors of the checkpoint and keys of the GGUF.
"""

from bridge.models.family import NO_BIASES, Expected, Family, Row, attention, decoder

APERTUS = Family(
    titles=("Apertus",), arch="apertus", architectures=("ApertusForCausalLM",), model_type="apertus",
    keys={"rms_norm_eps": 1e-5, "rope_theta": 12000000.0},
    expects=(Expected("hidden_act", ("xielu",), written=True), NO_BIASES),
    numbers={
        f"xielu.{key}": (f"model.layers.{{}}.mlp.act_fn.{key}", shape)
        for key, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ()))
    },
    divided=True,
    table=decoder(
        Row("attention_layernorm", "hidden"),
        *attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
        Row("feedforward_layernorm", "hidden"),
        Row("mlp.up_proj", "inner hidden"),
        Row("mlp.down_proj", "hidden inner", columns_of=("mlp.up_proj",)),
    ),
)  # fmt: skip
