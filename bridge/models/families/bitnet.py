"""BitNet b1.58: Llama's decoder with squared ReLU, and with norms before the output matrices of attention and network.

Heads are rotated by halves. llama.cpp's graph has no output matrix but the embeddings.

The activation is written as bitnet.hidden_activation, as ModernBERT's is. llama.cpp does not read it (tried:
build 11549): it computes SiLU, as the first models of this architecture had.
"""

from bridge.models.config.gguf_keys import Key
from bridge.models.config.model_config import Config
from bridge.models.family import NO_BIASES, Expected, Family, Row, decoder, pre_norm_attention

_NO_HEAD = "llama.cpp's graph for this architecture has no other head"


def _notes(config: Config) -> list[str]:
    if config.get("hidden_act", "relu2") == "silu":
        return []
    return [
        "the model has squared ReLU; llama.cpp computes SiLU for bitnet (build 11549 and before; later ones may read "
        "bitnet.hidden_activation), so what it predicts is wrong. `gguf-bridge run` computes what the model has"
    ]


BITNET = Family(
    titles=("BitNet",), arch="bitnet", architectures=("BitNetForCausalLM",), model_type="bitnet",
    keys={"max_position_embeddings": 2048, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    expects=(
        Expected("hidden_act", ("relu2", "silu")), NO_BIASES,
        Expected("tie_word_embeddings", (True,), _NO_HEAD, written=True),
    ),
    metadata=(Key("hidden_activation", "hidden_act", "relu2", missing="silu"),),
    notes=_notes,
    table=decoder(
        *pre_norm_attention(Row("self_attn.attn_sub_norm", "hidden", name="attn_sub_norm.weight")),
        Row("mlp.ffn_sub_norm", "inner", name="ffn_sub_norm.weight"),
        Row("mlp.gate_proj", "inner hidden"),
        Row("mlp.up_proj", "inner hidden"),
        Row("mlp.down_proj", "hidden inner"),  # its columns keep their order, since the norm before it has weights
    ),
)  # fmt: skip
