"""EAGLE-3 heads (Li et al. 2025, arXiv:2503.01840): one layer of Llama that guesses a model's next tokens.

It reads states of three of the model's layers, which `fc` fuses to one, and the embeddings of the tokens. It may have
its own embeddings and head or use the model's; a head of fewer tokens has a table (d2t) of the tokens that these are.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed
from bridge.models.config.model_config import Config
from bridge.models.family import EMBEDDINGS, NO_BIASES, SILU, Expected, Family, Row, attention, decoder, gated_mlp

_STATES = 3  # of layers that it reads


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    return {
        "draft": config.side("draft_vocab_size", args.vocab), "pair": 2 * args.hidden,
        "fused": _STATES * _target_hidden(config),
    }  # fmt: skip


def target_of(config: Config) -> Config:
    """The config of the model that a drafter guesses for."""
    assert config.target is not None
    return config.target


def _target_hidden(config: Config) -> int:
    return config.integer("target_hidden_size", target_of(config).integer("hidden_size"))


def listed_target_layers(config: Config, layers: Any, key: str, least: int = 0) -> list[int]:
    """The numbers of a model's layers that a drafter's config lists; BridgeError where these are none of it."""
    count = target_of(config).integer("num_hidden_layers")
    known = isinstance(layers, list) and all(type(layer) is int and least <= layer <= count for layer in layers)
    if not known:
        raise BridgeError(
            f"{config.path}: {key} is {layers!r:.80}; must be numbers from {least} to {count}, the layers that the "
            f"model in {target_of(config).path.parent} has"
        )
    return list(layers)


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(key) or (config.get("eagle_config") or {}).get(key)
    if not layers:
        count = target_of(config).integer("num_hidden_layers")
        layers = [2, count // 2, count - 3]
    layers = listed_target_layers(config, layers, key)
    if len(layers) != _STATES:
        raise BridgeError(f"{config.path}: {key} is {layers}; llama.cpp has EAGLE-3 heads that read {_STATES} layers")
    return {
        "target_layers": layers, "target_hidden_size": _target_hidden(config),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": bool(config.get("norm_before_fc")),
    }  # fmt: skip


_ONE = "llama.cpp's graph of EAGLE-3 has one layer"
_ROWS = (
    Row("input_layernorm", "hidden"),
    Row("hidden_norm", "hidden", name="attn_norm_2.weight"),
    *(
        replace(row, shape=row.shape.replace(" hidden", " pair")) if "o_proj" not in row.source else row
        for row in attention(interleaved=True)
    ),
    Row("post_attention_layernorm", "hidden"),
    *gated_mlp("mlp", "inner"),
)
_TARGETS = Row("model.d2t", "draft", exact=True, name="d2t", floats="I64", change="targets")


def _of_some(args: Arguments) -> bool:
    """Whether the head has a row for some of the tokens only."""
    return args.more["draft"] != args.vocab


EAGLE3 = Family(
    titles=("EAGLE-3 heads",), arch="eagle3", named_as="llama", drafter=True, needs_target=True,
    architectures=(
        "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM",
    ),
    model_type="llama", nested="transformer_layer_config",
    chosen=lambda config: "draft_vocab_size" in config.values,
    keys={"max_position_embeddings": 2048},
    expects=(SILU, NO_BIASES, Expected("mlp_bias", (False,)), Expected("num_hidden_layers", (1,), _ONE)),
    sizes=_sizes,
    metadata=(Computed(_metadata),),
    bare=True, starts={"midlayer.": "layers.0."}, ignored=("model.t2d",),
    divided=True,
    table=(
        *decoder(
            *_ROWS,
            first=(replace(EMBEDDINGS, optional=True),),
            head=Row("lm_head", "draft hidden", optional=True),
        ),
        Row("model.fc", "hidden fused", name="fc.weight"),
        Row("model.input_norm", "fused", name="enc.output_norm.weight", optional=True),
        replace(_TARGETS, when=_of_some),
        replace(_TARGETS, when=lambda args: not _of_some(args), optional=True),
    ),
)  # fmt: skip
