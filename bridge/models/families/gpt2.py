"""GPT-2: embeddings for positions; q, k and v in one matrix. Its layers are Conv1D: floats are stored transposed."""

from bridge.models.config.gguf_keys import Computed
from bridge.models.family import Expected, Family, Row, decoder, required


def _conv1d(name: str, shape: str, columns_of: tuple[str, ...] = ()) -> Row:
    return Row(name, shape, bias=required, change="conv1d", columns_of=columns_of)


GPT2 = Family(
    titles=("GPT-2",), arch="gpt2", architectures=("GPT2LMHeadModel",), model_type="gpt2",
    keys={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "inner_per_hidden": 4},
    expects=(
        Expected("activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu")),
        Expected("scale_attn_by_inverse_layer_idx", (False,)),
    ),
    names={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_key_value_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
    },
    sizes=lambda _config, args: {"context": args.context},
    metadata=(Computed(config=lambda stored: {"n_ctx": stored.values["max_position_embeddings"]}),),
    lacks=("head_dim",), layer_norm=True, rotary=False, bare=True,
    table=decoder(
        Row("ln_1", "hidden", bias=required),
        _conv1d("attn.c_attn", "q+kv+kv hidden"),
        _conv1d("attn.c_proj", "hidden q"),
        Row("ln_2", "hidden", bias=required),
        _conv1d("mlp.c_fc", "inner hidden"),
        _conv1d("mlp.c_proj", "hidden inner", columns_of=("mlp.c_fc",)),
        first=(Row("transformer.wte", "vocab hidden"), Row("transformer.wpe", "context hidden", floats="F32")),
        norm=Row("transformer.ln_f", "hidden", bias=required),
        block="transformer.h",
    ),
)  # fmt: skip
