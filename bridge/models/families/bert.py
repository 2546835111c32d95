"""BERT and RoBERTa: encoders, whose tokens attend to all of a text; what a layer adds is normalized with the state.

A model for classification, such as a reranker, has a head: two matrices with tanh between, on the first token's state.
In BERT the first of them is the pooler, which embeddings do without.

RoBERTa's positions begin after the number of its token for padding; GGUF has the rows from there on.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, Constant, Key, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import Expected, Family, Row, required
from bridge.models.outline import Part

GELU = Expected("hidden_act", ("gelu", "gelu_python", "gelu_new"))
ENCODER = (
    GELU, Expected("is_decoder", (False,)), Expected("add_cross_attention", (False,)),
    Expected("position_embedding_type", ("absolute",)),
)  # fmt: skip
NOT_CAUSAL = Constant("attention.causal", False)
_CLASSIFIES = "ForSequenceClassification"


def classifies(config: Config) -> bool:
    """Whether a model's class has a head for classes of texts."""
    return any(str(name).endswith(_CLASSIFIES) for name in config.get("architectures") or [])


def label_count(config: Config) -> int:
    """Classes of texts that a model tells apart; 0 without a head."""
    return len(labels(config).get("classifier.output_labels", ()))


def labels(config: Config, _args: Arguments | None = None) -> dict[str, list[str]]:
    """The key of the names of classes."""
    if not classifies(config):
        return {}
    names = config.get("id2label") or {str(n): f"LABEL_{n}" for n in range(config.integer("num_labels", 2))}
    return {"classifier.output_labels": [str(names[key]) for key in sorted(names, key=int)]}


def _classes(stored: StoredKeys) -> dict[str, Any]:
    """The class and the names of classes of texts in config.json; RoBERTa's head is BERT's by other names."""
    names = stored.get("classifier.output_labels")
    if not names:
        return {}
    return {"class": f"Bert{_CLASSIFIES}", "id2label": {str(number): name for number, name in enumerate(names)}}


def has_head(args: Arguments) -> bool:
    """Whether there is a head for classes of texts."""
    return args.more["labels"] > 0


def encoder_sizes(config: Config, args: Arguments) -> dict[str, int]:
    """The names of sizes that encoders have besides."""
    return {
        "context": args.context, "types": config.integer("type_vocab_size", 2), "labels": label_count(config)
    }  # fmt: skip


def head(dense: str, out: str) -> tuple[Row, ...]:
    """The two matrices of a head."""
    return (
        Row(dense, "hidden hidden", bias=required, floats="F32", when=has_head, name="cls.weight"),
        Row(out, "labels hidden", bias=required, floats="F32", when=has_head, name="cls.output.weight"),
    )


def _layer(name: str, shape: str, **more: Any) -> Row:
    return Row(f"encoder.layer.{{}}.{name}", shape, bias=required, **more)


LAYERS = (
    _layer("attention.self.query", "q hidden"),
    _layer("attention.self.key", "kv hidden"),
    _layer("attention.self.value", "kv hidden"),
    _layer("attention.output.dense", "hidden q"),
    _layer("attention.output.LayerNorm", "hidden"),
    _layer("intermediate.dense", "inner hidden"),
    _layer("output.dense", "hidden inner", columns_of=("encoder.layer.{}.intermediate.dense",)),
    _layer("output.LayerNorm", "hidden"),
)
WORDS = Row("embeddings.word_embeddings", "vocab hidden")
POSITIONS = Row("embeddings.position_embeddings", "context hidden", floats="F32")
TYPES = Row("embeddings.token_type_embeddings", "types hidden", floats="F32")
EMBEDDING_NORM = Row("embeddings.LayerNorm", "hidden", bias=required)

BERT = Family(
    titles=("BERT",), arch="bert",
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"), model_type="bert",
    keys={"rms_norm_eps": 1e-12, "tie_word_embeddings": True, "max_position_embeddings": 512, "vocab_size": 30522},
    expects=ENCODER,
    names={"rms_norm_eps": "layer_norm_eps"},
    sizes=encoder_sizes,
    metadata=(NOT_CAUSAL, Computed(labels, _classes)),
    layer_norm=True, rotary=False, lacks=("head_dim",), starts={"bert.": ""},
    unneeded=("pooler.", "cls.", "embeddings.position_ids"),
    table=(
        WORDS, POSITIONS, TYPES, EMBEDDING_NORM,
        *LAYERS,
        *head("pooler.dense", "classifier"),
    ),
)  # fmt: skip


def _first_position(config: Config) -> int:
    return config.count("pad_token_id", 1) + 1


def roberta_sizes(config: Config, args: Arguments) -> dict[str, int]:
    """`encoder_sizes` without the positions up to padding's."""
    context = args.context - _first_position(config)
    if context < 1:
        raise BridgeError(f"{config.path}: max_position_embeddings {args.context} leaves no position after padding's")
    return {**encoder_sizes(config, args), "context": context}


CONTEXT = Key("context_length", size="context")


def _positions(args: Arguments, source: str) -> tuple[Part, ...]:
    rows = np.arange(args.context - args.more["context"], args.context)
    return (Part(source, (len(rows), args.hidden), rows, stored=(args.context, args.hidden)),)


ROBERTA = replace(
    BERT,
    titles=("RoBERTa and XLM-RoBERTa",),
    architectures=(
        "XLMRobertaModel", "XLMRobertaForSequenceClassification", "XLMRobertaForMaskedLM", "RobertaModel",
        "RobertaForSequenceClassification", "RobertaForMaskedLM", "CamembertModel",
    ),
    model_type="xlm-roberta",
    keys={**BERT.keys, "rms_norm_eps": 1e-5, "max_position_embeddings": 514},
    chosen=lambda config: config.get("position_embedding_type") != "rotary" and not config.get("lora_adaptations"),
    in_gguf=lambda _get: False,
    sizes=roberta_sizes,
    metadata=(*BERT.metadata, CONTEXT),
    starts={"roberta.": ""}, unneeded=("pooler.", "lm_head.", "embeddings.position_ids"),
    table=(
        WORDS, replace(POSITIONS, parts=_positions), TYPES, EMBEDDING_NORM,
        *LAYERS,
        *head("classifier.dense", "classifier.out_proj"),
    ),
)  # fmt: skip
