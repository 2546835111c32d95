"""Gemma 2 and 3: norms around attention and network, stored minus one; layers that only attend to a window.

Gemma 2 caps attention scores and logits by tanh, Gemma 3 normalizes q and k instead. llama.cpp derives the scale of
attention scores from the size of the model, and gives every second or every sixth layer full attention by default.

EmbeddingGemma is Gemma 3 with attention both ways, in windows too, and two matrices after the pooled states.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.windows import local_base, rules_of_both, window_config, window_keys
from bridge.models.family import NO_BIASES, NORM, Expected, Family, Row, Rule, attention, decoder, gated_mlp
from bridge.models.sentence_transformers import DENSE, dense_sizes

GELU = Expected("hidden_act", ("gelu_pytorch_tanh", "gelu_new"), written=True)
_TOKENS = 4096  # of the window, if a config does not say so


def _width(arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """What llama.cpp scales scores by: the root of it."""
    return hidden // heads if layers == ARCHITECTURES[arch].scaled_by_width else head_dim


def _checked(config: Config, args: Arguments, arch: str) -> None:
    """BridgeError if the scale of attention is not llama.cpp's."""
    scalar = config.number("query_pre_attn_scalar", 256)
    scale = _width(arch, args.layers, args.hidden, args.heads, args.head_dim)
    if scalar != scale:
        raise BridgeError(f"{config.path}: query_pre_attn_scalar is {scalar:g}; llama.cpp uses {scale} for this model")


def _config(stored: StoredKeys) -> dict[str, Any]:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim")
    width = _width(stored.arch, *(stored.values[key] for key in keys))
    return {"query_pre_attn_scalar": width, **window_config(stored)}


def _gemma2(config: Config, args: Arguments) -> dict[str, Any]:
    _checked(config, args, "gemma2")
    return window_keys(config, args, "gemma2", tokens=_TOKENS)


def _gemma3(config: Config, args: Arguments) -> dict[str, Any]:
    _checked(config, args, "gemma3")
    return {**window_keys(config, args, "gemma3", tokens=_TOKENS), "rope.freq_base_swa": local_base(config)}


def _embedding(config: Config, args: Arguments) -> dict[str, Any]:
    _checked(config, args, "gemma-embedding")
    windows = window_keys(config, args, "gemma-embedding", tokens=_TOKENS)
    return {**windows, "rope.freq_base_swa": local_base(config), **_dense(config, args)}


def _dense(config: Config, args: Arguments) -> dict[str, int]:
    return dense_sizes(config.path.parent, args.hidden)


def _gemma3_config(stored: StoredKeys) -> dict[str, Any]:
    config = _config(stored)
    config["sliding_window"] = config["sliding_window"] or stored.values["max_position_embeddings"]  # must be a number
    return {**config, **rules_of_both(stored, stored.get("rope.freq_base_swa", 10000.0))}


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


def _has(size: str) -> Rule:
    return lambda args: size in args.more


_KEYS = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}

GEMMA2 = Family(
    titles=("Gemma 2",), arch="gemma2", architectures=("Gemma2ForCausalLM",), model_type="gemma2",
    keys=_KEYS,
    expects=(GELU, NO_BIASES),
    names={"hidden_act": "hidden_activation"},
    metadata=(
        Key("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        Key("final_logit_softcapping", "final_logit_softcapping", 30.0), Computed(_gemma2, _config),
    ),
    table=_table(),
)  # fmt: skip

GEMMA3 = Family(
    titles=("Gemma 3",), arch="gemma3", architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    model_type="gemma3_text",
    keys={
        **_KEYS, "max_position_embeddings": 131072, "rope_theta": 1000000.0, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208,
    },
    expects=(
        *GEMMA2.expects, Expected("use_bidirectional_attention", (False, None)),  # EmbeddingGemma's
        Expected("attn_logit_softcapping", (None,), "llama.cpp's graph for this architecture has none"),
        Expected("final_logit_softcapping", (None,), "no published model of this architecture has it"),
    ),
    names=GEMMA2.names,
    metadata=(Computed(_gemma3, _gemma3_config),),
    wrapped=True,
    table=_table(_norm("self_attn.q_norm", "head"), _norm("self_attn.k_norm", "head")),
)  # fmt: skip

GEMMA_EMBEDDING = replace(
    GEMMA3,
    titles=("EmbeddingGemma",), arch="gemma-embedding", architectures=("Gemma3TextModel",),
    chosen=lambda config: bool(config.get("use_bidirectional_attention")),
    expects=(*GEMMA3.expects[:2], *GEMMA3.expects[3:], Expected("use_bidirectional_attention", (True,), written=True)),
    sizes=_dense,
    metadata=(Computed(_embedding, _gemma3_config),),
    wrapped=False,
    table=(
        *GEMMA3.table,
        *(
            Row(
                f"{folder}.linear", f"dense_{folder[0]}_feat_out dense_{folder[0]}_feat_in",
                name=f"dense_{folder[0]}.weight", when=_has(f"dense_{folder[0]}_feat_in"),
            )
            for folder in DENSE
        ),
    ),
)  # fmt: skip
