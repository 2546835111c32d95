"""Command-R and Aya: attention and network in parallel after one layer norm without bias; scaled logits, tied."""

from typing import Any

from bridge.models.arguments import Arguments
from bridge.models.family import NO_BIASES, SILU, Expected, Family, Row, attention, decoder, gated_mlp
from bridge.models.model_config import Config


def _logits(config: Config, _args: Arguments) -> dict[str, Any]:
    context = config.get("model_max_length")  # the trained context; the other key says 8192
    found = {"logit_scale": config.number("logit_scale", 0.0625), "rope.scaling.type": "none"}
    return found | ({"context_length": config.integer("model_max_length")} if context else {})


COMMAND_R = Family(
    titles=("Command-R",),
    arch="command-r",
    architectures=("CohereForCausalLM",),
    model_type="cohere",
    keys={"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "use_qk_norm": False},
    expects=(
        SILU,
        NO_BIASES,
        Expected("tie_word_embeddings", (True,), "llama.cpp's graph for this architecture has no head of its own"),
    ),
    names={"rms_norm_eps": "layer_norm_eps"},
    metadata=_logits,
    layer_norm=True,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(
            Row("self_attn.q_norm", "heads head", floats="F32", when=lambda args: args.qk_norm),
            Row("self_attn.k_norm", "kv_heads head", floats="F32", when=lambda args: args.qk_norm),
        ),
        *gated_mlp("mlp", "inner"),
    ),
)
