"""Gemma 3n: four streams of activations (AltUp), a low-rank path beside attention (LAuReL), inputs of every layer.

The last layers use the keys and values of earlier ones. llama.cpp wants matrices for them all the same: published
checkpoints have such, and where they are missing those of the first layer, which nothing multiplies with, stand in.
"""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.gemma import GELU
from bridge.models.families.gemma4 import INPUT_OF_LAYER, INPUTS, NORMS, inputs_config, layers_with_window
from bridge.models.families.windows import local_base
from bridge.models.family import NO_BIASES, Expected, Family, Row, attention, decoder, gated_mlp, other_layers
from bridge.models.outline import Part

_STREAMS = 4
_OWN_KV = 20  # layers with keys and values of their own
_SPARSE, _SHARE = 10, 0.95  # layers whose networks drop the lower share of the gate's values


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    each, shared = config.side("hidden_size_per_layer_input"), config.get("num_kv_shared_layers", 0)
    if (shared and args.layers - shared != _OWN_KV) or (not shared and args.layers > _OWN_KV):
        raise BridgeError(
            f"{config.path}: {shared} of {args.layers} layers use the keys of earlier ones; in llama.cpp those do that "
            f"follow the first {_OWN_KV}"
        )
    return {
        "streams": _STREAMS, "predictions": _STREAMS**2, "others": _STREAMS - 1, "laurel": config.side("laurel_rank"),
        "each_input": each, "inputs": args.layers * each,
        "input_vocab": config.side("vocab_size_per_layer_input", args.vocab),
    }  # fmt: skip


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    sparse = [_SHARE if layer < _SPARSE else 0.0 for layer in range(args.layers)]
    config.expect("activation_sparsity_pattern", (sparse,), sparse)
    return {
        "feed_forward_length": [args.inner] * args.layers,
        "final_logit_softcapping": config.number("final_logit_softcapping", 30.0),
        "altup.active_idx": 0, "altup.num_inputs": _STREAMS,
        "embedding_length_per_layer_input": args.more["each_input"],
        "attention.shared_kv_layers": config.get("num_kv_shared_layers", 0),
        "activation_sparsity_scale": [NormalDist().inv_cdf(share) if share else -math.inf for share in sparse],
        "rope.freq_base_swa": local_base(config),
        "attention.sliding_window": config.integer("sliding_window", 512),
        "attention.sliding_window_pattern": layers_with_window(args),
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    sparse = [_SHARE if scale > 0 else 0.0 for scale in stored.get("activation_sparsity_scale")]
    return {**inputs_config(stored), "activation_sparsity_pattern": sparse}


def _other_streams(args: Arguments, source: str) -> tuple[Part, ...]:
    side = args.hidden
    return tuple(Part(source.replace(".0.", f".{stream}."), (side, side)) for stream in range(_STREAMS - 1))


def _inputs(args: Arguments, source: str) -> tuple[Part, ...]:
    """The rows of all tokens: those of images and sound, the last ones, have the first's, as in transformers."""
    known, width, tokens = args.more["input_vocab"], args.more["inputs"], np.arange(args.vocab)
    if known == args.vocab:
        return (Part(source, (known, width)),)
    return (Part(source, (args.vocab, width), np.where(tokens < known, tokens, 0), stored=(known, width)),)


def _has_own_kv(_args: Arguments, layer: int) -> bool:
    return layer < _OWN_KV


def _everywhere(table: tuple[Row, ...]) -> tuple[Row, ...]:
    """A table whose later layers may take k, v and their norm from the first."""
    shared = {row for row in table if row.source.endswith(("k_proj", "v_proj", "k_norm"))}
    later = {row: replace(row, layers=other_layers(_has_own_kv), also=(row.source.format(0),)) for row in shared}
    return tuple(
        one for row in table for one in ((replace(row, layers=_has_own_kv), later[row]) if row in later else (row,))
    )


GEMMA3N = Family(
    titles=("Gemma 3n",), arch="gemma3n", architectures=("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM"),
    model_type="gemma3n_text",
    keys={"tie_word_embeddings": True, "head_dim": 256, "layer_types": None, "rope_theta": 1000000.0},
    expects=(
        GELU, NO_BIASES, Expected("altup_num_inputs", (_STREAMS,)), Expected("altup_active_idx", (0,)),
        Expected("altup_correct_scale", (True,)), Expected("laurel_rank", (64,), written=True),
        Expected("hidden_size_per_layer_input", (256,)),
    ),
    names={"hidden_act": "hidden_activation"},
    sizes=_sizes,
    metadata=(Computed(_metadata, _config),),
    language_model=("gemma3n_text", "Gemma3nForCausalLM"), wrapped=True,
    table=_everywhere(
        decoder(
            *NORMS,
            *attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head")),
            *gated_mlp("mlp", "inner"),
            *INPUT_OF_LAYER,
            Row("altup.correct_output_scale", "hidden", exact=True),
            Row("altup.correction_coefs", "streams streams", floats="F32"),
            Row("altup.modality_router", "streams hidden", floats="F32"),
            Row("altup.prediction_coefs", "predictions streams", floats="F32"),
            Row("altup.router_norm", "hidden"),
            Row("laurel.linear_left", "laurel hidden", floats="F16"),
            Row("laurel.linear_right", "hidden laurel", floats="F16"),
            Row("laurel.post_laurel_norm", "hidden"),
            first=(
                INPUTS[0], replace(INPUTS[1], shape="vocab inputs", parts=_inputs),
                *INPUTS[2:],
                *(
                    Row(
                        f"model.altup_{stem}rojections.0", "others hidden hidden", floats="F16", parts=_other_streams,
                        name=f"altup_{name}.weight",
                    )
                    for stem, name in (("p", "proj"), ("unembed_p", "unembd_proj"))
                ),
            ),
        )
    ),
)  # fmt: skip
