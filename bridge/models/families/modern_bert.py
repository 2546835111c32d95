"""ModernBERT, and nomic-embed-text: encoders whose q and k are rotated, with gated networks, or experts without gates.

ModernBERT's norms come before attention and network, and most of its layers attend to a window. A head for classes
reads one state, or the mean of all (classifier_pooling).
Every second layer of nomic-embed-text v2 has experts, whose matrices are one below another in one tensor.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from gguf import PoolingType

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.bert import EMBEDDING_NORM, NOT_CAUSAL, TYPES, WORDS, encoder_sizes, has_head, labels
from bridge.models.families.windows import local_base
from bridge.models.family import NO_BIASES, Expected, Family, Row, decoder, in_layers, other_layers, required
from bridge.models.outline import Part

_PERIOD = 3  # of the layers without a window
_POOLINGS = {"cls": PoolingType.CLS, "mean": PoolingType.MEAN}


def _windows(config: Config, args: Arguments) -> dict[str, Any]:
    """The keys of windows, of their rotation, and of the network's activation."""
    period = config.integer("global_attn_every_n_layers", _PERIOD)
    kinds = config.get("layer_types") or [_kind(layer, period) for layer in range(args.layers)]
    keys: dict[str, Any] = {
        "attention.sliding_window": config.integer("local_attention", 128),
        "rope.freq_base_swa": local_base(config), "rope.scaling.type": "none",
        "attention.layer_norm_rms_epsilon": args.norm_eps,  # which llama.cpp's converter writes, too
        "hidden_activation": config.get("hidden_activation", "gelu"),
    }  # fmt: skip
    if kinds != [_kind(layer, _PERIOD) for layer in range(args.layers)]:
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    elif config.get("global_attn_every_n_layers") is not None:
        keys["attention.sliding_window_pattern"] = period
    pooling = config.get("classifier_pooling")
    if pooling is not None:
        if pooling not in _POOLINGS:
            raise BridgeError(f"{config.path}: classifier_pooling is {pooling!r}; llama.cpp has cls and mean")
        keys["classifier.pooling_type"] = int(_POOLINGS[pooling])
    return keys


def _kind(layer: int, period: int) -> str:
    return "sliding_attention" if layer % period else "full_attention"


MODERN_BERT = Family(
    titles=("ModernBERT",), arch="modern-bert",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    model_type="modernbert",
    keys={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_theta": 160000.0},
    expects=(
        NO_BIASES, Expected("hidden_activation", ("gelu", "silu")), Expected("norm_bias", (False,)),
        Expected("mlp_bias", (False,)), Expected("classifier_activation", ("gelu",)),
        Expected("classifier_bias", (False,)),
    ),
    names={
        "rms_norm_eps": "norm_eps", "rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta",
    },
    sizes=encoder_sizes,
    metadata=(NOT_CAUSAL, Computed(_windows), Computed(labels)),
    layer_norm=True, starts={"model.": ""}, unneeded=("head.", "decoder.", "classifier."),
    table=(
        Row("embeddings.tok_embeddings", "vocab hidden"),
        Row("embeddings.norm", "hidden"),
        *decoder(
            Row("attn_norm", "hidden", layers=lambda _args, layer: layer > 0),
            Row("attn.Wqkv", "q+kv+kv hidden"),
            Row("attn.Wo", "hidden q"),
            Row("mlp_norm", "hidden"),
            Row("mlp.Wi", "inner+inner hidden"),
            Row("mlp.Wo", "hidden inner"),
            first=(), block="layers",
        )[:-2],
        Row("final_norm", "hidden"),
        Row("head.dense", "hidden hidden", floats="F32", when=has_head, name="cls.weight"),
        Row("head.norm", "hidden", when=has_head, name="cls.norm.weight"),
        Row("classifier", "labels hidden", bias=required, floats="F32", when=has_head, name="cls.output.weight"),
    ),
)  # fmt: skip


def _norm(name: str) -> Row:
    return Row(name, "hidden", bias=required)


NOMIC_BERT = Family(
    titles=("nomic-embed-text",), arch="nomic-bert", architectures=("NomicBertModel", "NomicBertForMaskedLM"),
    model_type="nomic_bert",
    keys={
        "rms_norm_eps": 1e-12, "tie_word_embeddings": True, "max_position_embeddings": 2048, "rope_theta": 1000.0,
        "vocab_size": 30528,
    },
    expects=(Expected("hidden_act", ("silu", "swish", "swiglu")),),
    names={"rms_norm_eps": "layer_norm_eps"},
    sizes=encoder_sizes,
    metadata=(NOT_CAUSAL,),
    layer_norm=True, starts={"nomic_bert.": "", "bert.": ""}, unneeded=("pooler.", "cls."),
    table=(
        WORDS, TYPES, replace(EMBEDDING_NORM, source="emb_ln", also=(EMBEDDING_NORM.source,)),
        *decoder(
            Row("attn.Wqkv", "q+kv+kv hidden", separate=tuple(f"self_attn.{part}_proj" for part in "qkv")),
            Row("attn.out_proj", "hidden q"),
            _norm("norm1"),
            Row("mlp.fc11", "inner hidden"),
            Row("mlp.fc12", "inner hidden"),
            Row("mlp.fc2", "hidden inner", columns_of=("mlp.fc11", "mlp.fc12")),
            _norm("norm2"),
            first=(), block="encoder.layers",
        )[:-2],
    ),
)  # fmt: skip


def _trained_positions(config: Config, args: Arguments) -> dict[str, Any]:
    """Of positions that the rotation could be stretched to, those that the model was trained for."""
    trained = config.integer("max_trained_positions", 2048)
    return {"context_length": min(trained, args.context)}


def _published(biases: bool) -> tuple[Expected, ...]:
    """What the keys of a published config.json must say."""
    named = (Expected(f"{part}_bias", (biases,)) for part in ("qkv_proj", "mlp_fc1", "mlp_fc2"))
    return (
        *named, Expected("prenorm", (False,)), Expected("causal", (False,)), Expected("rotary_emb_fraction", (1.0, 1)),
        Expected("rotary_emb_interleaved", (False,)), Expected("rotary_emb_scale_base", (None,)),
    )  # fmt: skip


# with the keys of the published config.json
PUBLISHED_NOMIC_BERT = replace(
    NOMIC_BERT,
    titles=(),
    chosen=lambda config: "n_embd" in config.values and not config.get("moe_every_n_layers"),
    in_gguf=lambda _get: False,
    expects=(*NOMIC_BERT.expects, *_published(False)),
    names={
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_key_value_heads": "n_head",
        "num_hidden_layers": "n_layer", "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function", "rope_theta": "rotary_emb_base",
    },
    metadata=(*NOMIC_BERT.metadata, Computed(_trained_positions)),
)  # fmt: skip


_SHORT = 2048  # positions of the config.json of v2, which was trained for 512 tokens


def _of_moe(config: Config, args: Arguments) -> dict[str, Any]:
    keys = _trained_positions(config, args)
    if args.context == _SHORT == keys["context_length"]:
        keys["context_length"] = 512  # so llama.cpp's converter, too
    return {**keys, "moe_every_n_layers": 2}


def _config_of_moe(stored: StoredKeys) -> dict[str, Any]:
    return {"moe_every_n_layers": 2, "moe_top_k": stored.get("expert_used_count")}


def _sparse(_args: Arguments, layer: int) -> bool:
    return layer % 2 == 1


def _rows_of_experts(args: Arguments, source: str) -> tuple[Part, ...]:
    inner, stored = args.inner, (args.experts * args.inner, args.hidden)
    rows = (np.arange(expert * inner, (expert + 1) * inner) for expert in range(args.experts))
    return tuple(Part(source, (inner, args.hidden), part, stored=stored) for part in rows)


def _columns_of_experts(args: Arguments, source: str) -> tuple[Part, ...]:
    stored = (args.hidden, args.experts * args.inner)
    return tuple(
        Part(source, part.shape[::-1], columns=part.rows, stored=stored, change="transposed")
        for part in _rows_of_experts(args, source)
    )


NOMIC_BERT_MOE = replace(
    PUBLISHED_NOMIC_BERT,
    titles=("nomic-embed-text v2",), arch="nomic-bert-moe", architectures=("NomicBertModel",),
    chosen=lambda config: bool(config.get("moe_every_n_layers")),
    in_gguf=lambda _get: True,
    keys={**NOMIC_BERT.keys, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_experts": None, "vocab_size": 250048},
    expects=(
        Expected("hidden_act", ("gelu",)), *_published(True), Expected("moe_every_n_layers", (2,)),
        Expected("moe_normalize_expert_weights", (False,)), Expected("num_shared_experts", (0, None)),
    ),
    names={**PUBLISHED_NOMIC_BERT.names, "num_experts_per_tok": "moe_top_k"},
    metadata=(NOT_CAUSAL, Computed(_of_moe, _config_of_moe)),
    notes=lambda _config: ["what is added to the experts' sums is left out, as by llama.cpp's converter"],
    table=(
        WORDS, TYPES, replace(EMBEDDING_NORM, source="emb_ln", also=(EMBEDDING_NORM.source,)),
        *decoder(
            Row("attn.Wqkv", "q+kv+kv hidden", bias=required),
            Row("attn.out_proj", "hidden q", bias=required),
            _norm("norm1"),
            *in_layers(_sparse,
                Row("mlp.router.layer", "experts hidden", floats="F32"),
                Row("mlp.experts.mlp.w1", "experts expert hidden", exact=True, parts=_rows_of_experts),
                Row("mlp.experts.mlp.w2", "experts hidden expert", exact=True, parts=_columns_of_experts),
            ),
            *in_layers(other_layers(_sparse),
                Row("mlp.fc1", "inner hidden", bias=required),
                Row("mlp.fc2", "hidden inner", bias=required, columns_of=("mlp.fc1",)),
            ),
            _norm("norm2"),
            first=(), block="encoder.layers",
        )[:-2],
    ),
)  # fmt: skip
