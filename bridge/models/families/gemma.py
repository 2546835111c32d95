"""Gemma 2 and 3: norms around attention and network, stored minus one; layers that only attend to a window.

Gemma 2 caps attention scores and logits by tanh, Gemma 3 normalizes q and k instead. llama.cpp derives the scale of
attention scores from the size of the model, and gives every second or every sixth layer full attention by default.
"""

from typing import Any

from bridge.errors import BridgeError
from bridge.models.arguments import Arguments
from bridge.models.families.windows import local_base, window_keys
from bridge.models.family import NO_BIASES, NO_OTHER, NORM, Expected, Family, Row, attention, decoder, gated_mlp
from bridge.models.model_config import Config

GELU = Expected("hidden_act", ("gelu_pytorch_tanh", "gelu_new"), NO_OTHER)
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models


def _checked(config: Config, args: Arguments, arch: str) -> None:
    """BridgeError if the scale of attention is not llama.cpp's."""
    scalar = config.number("query_pre_attn_scalar", 256)
    scale = args.hidden // args.heads if args.layers == _LARGEST[arch] else args.head_dim
    if scalar != scale:
        raise BridgeError(f"{config.path}: query_pre_attn_scalar is {scalar:g}; llama.cpp uses {scale} for this model")


def _gemma2(config: Config, args: Arguments) -> dict[str, Any]:
    _checked(config, args, "gemma2")
    return {
        "attn_logit_softcapping": config.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
        **window_keys(config, args, "gemma2"),
    }


def _gemma3(config: Config, args: Arguments) -> dict[str, Any]:
    _checked(config, args, "gemma3")
    return {**window_keys(config, args, "gemma3"), "rope.freq_base_swa": local_base(config)}


def _norm(name: str, size: str = "hidden") -> Row:
    return Row(name, size, change="+1")


def _table(*norms: Row) -> tuple[Row, ...]:
    return decoder(
        _norm("input_layernorm"),
        *attention(*norms),
        _norm("post_attention_layernorm"),
        _norm("pre_feedforward_layernorm"),
        *gated_mlp("mlp", "inner"),
        _norm("post_feedforward_layernorm"),
        norm=_norm(NORM.source),
    )


_KEYS = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}

GEMMA2 = Family(
    titles=("Gemma 2",),
    arch="gemma2",
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    keys=_KEYS,
    expects=(GELU, NO_BIASES),
    names={"hidden_act": "hidden_activation"},
    metadata=_gemma2,
    table=_table(),
)

GEMMA3 = Family(
    titles=("Gemma 3",),
    arch="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_type="gemma3_text",
    keys={
        **_KEYS, "max_position_embeddings": 131072, "rope_theta": 1000000.0, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208,
    },
    expects=(
        *GEMMA2.expects,
        Expected("use_bidirectional_attention", (False, None), NO_OTHER),  # EmbeddingGemma's
        Expected("attn_logit_softcapping", (None,), "llama.cpp's graph for this architecture has none"),
        Expected("final_logit_softcapping", (None,), "no published model of this architecture has it"),
    ),
    names=GEMMA2.names,
    metadata=_gemma3,
    wrapped=True,
    table=_table(_norm("self_attn.q_norm", "head"), _norm("self_attn.k_norm", "head")),
)  # fmt: skip
