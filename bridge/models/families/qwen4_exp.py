"""Qwen3.8 Flash Next (qwen4_exp): Qwen3.5's layers between several residual streams, and a table of n-grams.

No layer has norms of its own: a hyper-connection normalizes the streams, mixes them by a gate of low rank into what
attention or experts read, and adds what these make to each stream, weighted. Attention chooses blocks of tokens by an
indexer. One layer adds rows of a table that a hash of the last tokens chooses (ple.*); the table is most of the model,
and checkpoints have it in many tensors. llama.cpp reads single rows of it from the file.
"""

from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.qwen3_next import (
    FULL_ROWS,
    LINEAR,
    LINEAR_ROWS,
    QWEN3_5_MOE,
    SECTIONS,
    SHARED_ROWS,
    delta_sizes,
    linear,
)
from bridge.models.family import EXPERTS, NO_BIASES, SILU, Expected, Family, Row, decoder, in_layers, other_layers
from bridge.models.outline import Part

_INDEXED = ("indexed_attention", "full_attention")  # what transformers and the published config.json call it
_MOST_NGRAM, _MOST_HEADS = 8, 64  # that llama.cpp has place for
_RUN = 1 << 28  # elements of the table in one tensor of a checkpoint that is made from a GGUF


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    m = delta_sizes(config, args)
    if m["v_dim"] != args.more["k_dim"]:
        raise BridgeError(
            f"{config.path}: linear_value_head_dim is {m['v_dim']}; llama.cpp has heads of one size here, "
            f"linear_key_head_dim {args.more['k_dim']}"
        )
    kinds = config.get("layer_types") or [
        _INDEXED[0] if (layer + 1) % m["interval"] == 0 else LINEAR for layer in range(args.layers)
    ]
    if len(kinds) != args.layers or not {*kinds} <= {LINEAR, *_INDEXED}:
        raise BridgeError(
            f"{config.path}: layer_types is {kinds!r:.80}, must be {LINEAR} or {_INDEXED[1]} for each of {args.layers} "
            "layers"
        )
    return {
        **m, **{f"linear.{layer}": int(kind == LINEAR) for layer, kind in enumerate(kinds)},
        "all": args.more["streams"] * args.hidden,
        "index_q": args.more["index_heads"] * args.more["index_head"], **_table_sizes(config, args, kinds),
    }  # fmt: skip


def _table_sizes(config: Config, args: Arguments, kinds: list[str]) -> dict[str, int]:
    """Of the table of n-grams: its rows, their size, the tensors that have them; the layer that reads it, from one."""
    layers = config.get("ple_layer_ids", [])
    if not layers:
        return {"ple": 0}
    if len(layers) != 1 or layers[0] not in range(1, args.layers + 1) or kinds[layers[0] - 1] != LINEAR:
        raise BridgeError(
            f"{config.path}: ple_layer_ids is {layers!r:.60}; llama.cpp has a table of n-grams in one layer, of linear "
            "attention"
        )
    config.expect("ple_embed_dim", (args.hidden,), args.hidden, "llama.cpp has rows of n-grams as wide as the state")
    ngram, each = config.integer("ngram_size", 3), config.integer("heads_per_ngram", 8)
    heads = (ngram - 1) * each
    if not 2 <= ngram <= _MOST_NGRAM or heads > _MOST_HEADS or args.hidden % heads:
        raise BridgeError(
            f"{config.path}: n-grams of 2 to {ngram} tokens with {each} heads each; llama.cpp has at most "
            f"{_MOST_NGRAM} tokens and {_MOST_HEADS} heads, which must divide hidden_size {args.hidden}"
        )
    divisor = config.integer("make_ngram_vocab_size_divisible_by", 128)
    rows = sum(_primes(config.integer("ngram_vocab_size_base", 20_000_000), heads))
    return {
        "ple": layers[0], "ngram": ngram, "ngram_heads": heads, "row": args.hidden // heads,
        "ngrams": -(-rows // divisor) * divisor, "runs": config.integer("split_ngram_parts", 512),
        "ple_kernel": config.integer("ple_conv_kernel_size", 4),
    }  # fmt: skip


def _primes(least: int, count: int) -> list[int]:
    """The first primes from `least` on: a head has so many rows."""
    primes: list[int] = []
    candidate = max(2, least)
    while len(primes) < count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    m, layers = args.more, range(args.layers)
    ratio = config.integer("indexer_compress_ratio")
    keys = {
        "attention.recurrent_layers": [linear(args, layer) for layer in layers],
        "attention.compress_ratios": [0 if linear(args, layer) else ratio for layer in layers],
    }
    if not m["ple"]:
        return keys
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end  # as in transformers
    if type(end) is not int or end < 0:
        raise BridgeError(f"{config.path}: eos_token_id is {end!r:.60}, must be a token: n-grams begin after it")
    return {
        **keys, "ple.layers": [m["ple"] - 1], "ple.ngram_size": m["ngram"],
        "ple.heads_per_ngram": m["ngram_heads"] // (m["ngram"] - 1), "ple.conv_kernel": m["ple_kernel"],
        "ple.eos_token_id": end, "ple.image_token_id": config.get("image_token_id"),
        "embedding_length_per_layer_input": m["row"],
    }  # fmt: skip


def _config(stored: StoredKeys) -> dict[str, Any]:
    ratios = stored.get("attention.compress_ratios")
    inner, heads = stored.get("ssm.inner_size"), stored.get("ssm.time_step_rank")
    keys = {
        "linear_value_head_dim": inner // heads, "indexer_compress_ratio": max(ratios), "indexer_kv_heads": 1,
        "layer_types": [_INDEXED[1] if ratio else LINEAR for ratio in ratios], "norm_topk_prob": True,
        "ple_layer_ids": [layer + 1 for layer in stored.get("ple.layers", [])],
    }  # fmt: skip
    if not keys["ple_layer_ids"]:
        return keys
    sizes, offsets = stored.get("ple.head_vocab_sizes", [1]), stored.get("ple.head_offsets", [0])
    elements = (offsets[-1] + sizes[-1]) * stored.get("embedding_length_per_layer_input")
    return {
        **keys, "ngram_size": stored.get("ple.ngram_size"), "heads_per_ngram": stored.get("ple.heads_per_ngram"),
        "ple_conv_kernel_size": stored.get("ple.conv_kernel"), "ngram_vocab_size_base": sizes[0],
        "eos_token_id": stored.get("ple.eos_token_id"), "image_token_id": stored.get("ple.image_token_id"),
        "split_ngram_parts": -(-elements // _RUN),
    }  # fmt: skip


def _ple(args: Arguments, layer: int) -> bool:
    return layer + 1 == args.more["ple"]


def _streams(module: str, name: str, layer: bool = True) -> tuple[Row, ...]:
    """What mixes the streams, before attention or experts, or in the end."""
    rows = (
        Row(f"{module}.hc_norm", "all", name=f"{name}_norm.weight", change="+1"),
        Row(f"{module}.input_mix_weight_down", "low all", name=f"{name}_down.weight"),
        Row(f"{module}.input_mix_weight_up", "all low", name=f"{name}_up.weight"),
    )
    return (*rows, Row(f"{module}.block_inject_weight", "streams all", name=f"{name}_inject.weight")) if layer else rows


def _index_part(which: str) -> Any:
    """The rows of the indexer's queries, or of its keys."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        queries, head = args.more["index_q"], args.more["index_head"]
        rows = np.arange(queries) if which == "q" else queries + np.arange(head)
        return (Part(source, (len(rows), args.hidden), rows, stored=(queries + head, args.hidden)),)

    return parts


_INDEXER = (
    Row("self_attn.indexer.index_qk_proj", "index_q hidden", name="indexer.q_proj.weight", parts=_index_part("q")),
    Row("self_attn.indexer.index_qk_proj", "index_head hidden", name="indexer.k_proj.weight", parts=_index_part("k")),
    Row("self_attn.indexer.q_layernorm", "index_head", name="indexer.q_norm.weight", change="+1"),
    Row("self_attn.indexer.k_layernorm", "index_head", name="indexer.k_norm.weight", change="+1"),
)
_TABLE = "ple.ple_embedding"
_PLE = (
    Row("ple.key_proj", "all hidden", name="ple_key.weight"),
    Row("ple.value_proj", "hidden hidden", name="ple_value.weight"),
    *(Row(f"ple.norm_{n}", "all", name=f"ple_norm_{n}.weight", change="+1") for n in ("key", "query", "conv")),
    Row("ple.conv1d", "all ple_kernel", name="ple_conv1d.weight", change="squeezed", floats="F32"),
    Row(f"{_TABLE}.ngram_embedding", "ngrams row", name="per_layer_token_embd.weight", alone=True, runs="runs"),
)
_FIRST, *_ENDS = _streams("model.hyper_connection_mixer", "output_hc", layer=False)
_IN_GGUF = {"layer_multipliers": "layer_multipliers", "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes"}  # fmt: skip

QWEN4_EXP = Family(
    titles=("Qwen3.8 Flash Next",), arch="qwen4exp", named_as="qwen35moe",
    architectures=("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"), model_type="qwen4_exp",
    keys={**QWEN3_5_MOE.keys, "num_experts": 512, "output_gate_type": None},
    expects=(
        SILU, NO_BIASES, Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights"),
        Expected("output_gate_type", ("sigmoid",), "llama.cpp's linear attention has that gate", written=True),
        Expected("indexer_kv_heads", (1,)),
    ),
    sizes=_sizes,
    metadata=(
        *(key for key in QWEN3_5_MOE.metadata if isinstance(key, Key)),
        SECTIONS,
        Key("hyper_connection.count", "hc_count", 4, defines="streams"),
        Key("hyper_connection.low_rank", "hc_lowrank", 320, defines="low"),
        Key("attention.indexer.head_count", "indexer_n_heads", defines="index_heads"),
        Key("attention.indexer.key_length", "indexer_head_dim", defines="index_head"),
        Key("attention.indexer.top_k", "indexer_budget"), Computed(_metadata, _config),
    ),
    integers={f"qwen4exp.ple.{key}": f"model.layers.{{}}.{_TABLE}.{name}" for name, key in _IN_GGUF.items()},
    with_integers=_ple, integers_of="qwen4exp.ple.layers",
    language_model=("qwen4_exp_text", "Qwen4ExpForCausalLM"), wrapped=True, predicts="dropped",
    table=(
        *decoder(
            *in_layers(_ple, *_PLE),
            *_streams("attn_hyper_connection", "hc_attn"),
            *FULL_ROWS,
            *in_layers(other_layers(linear), *_INDEXER),
            *LINEAR_ROWS,
            *_streams("mlp_hyper_connection", "hc_ffn"),
            *EXPERTS,
            *SHARED_ROWS,
            norm=_FIRST,
        ),
        *_ENDS,
    ),
)  # fmt: skip
