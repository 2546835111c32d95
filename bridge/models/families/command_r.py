"""Command-R and Aya: attention and network in parallel after one layer norm without bias; scaled logits, tied."""

from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, Present
from bridge.models.config.model_config import Config
from bridge.models.family import NO_BIASES, SILU, Expected, Family, Row, attention, decoder, gated_mlp


def _context(config: Config, _args: Arguments) -> dict[str, Any]:
    """The trained context; max_position_embeddings says 8192."""
    return {"context_length": config.integer("model_max_length")} if config.get("model_max_length") else {}


COMMAND_R = Family(
    titles=("Command-R",), arch="command-r", architectures=("CohereForCausalLM",), model_type="cohere",
    keys={"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "use_qk_norm": False},
    expects=(
        SILU, NO_BIASES,
        Expected("tie_word_embeddings", (True,), "llama.cpp's graph for this architecture has no head of its own"),
    ),
    names={"rms_norm_eps": "layer_norm_eps"},
    metadata=(
        Key("logit_scale", "logit_scale", 0.0625), Constant("rope.scaling.type", "none"), Computed(_context),
        Present("use_qk_norm", "attn_q_norm.weight"),
    ),
    layer_norm=True,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(
            Row("self_attn.q_norm", "heads head", floats="F32", when=lambda args: args.qk_norm),
            Row("self_attn.k_norm", "kv_heads head", floats="F32", when=lambda args: args.qk_norm),
        ),
        *gated_mlp("mlp", "inner"),
    ),
)  # fmt: skip
