"""Jina's embedding models: v2, whose scores lose a part of the distance between the tokens, with gated networks, and
v3, which is XLM-RoBERTa with q and k rotated.

The published v3 has an adapter for each task inside of the checkpoint; the GGUF is the model without them.
"""

from dataclasses import replace

from bridge.models.config.model_config import Config
from bridge.models.families.bert import (
    BERT,
    CONTEXT,
    EMBEDDING_NORM,
    GELU,
    LAYERS,
    NOT_CAUSAL,
    ROBERTA,
    TYPES,
    WORDS,
    encoder_sizes,
    roberta_sizes,
)
from bridge.models.family import Expected, Family, Row, decoder, required

_BLOCK = "encoder.layer.{}."

_NAMES2 = ("JinaBertModel", "JinaBertForMaskedLM")

JINA2 = Family(
    titles=("Jina Embeddings v2",), arch="jina-bert-v2", architectures=_NAMES2,
    model_type="bert",
    keys={**BERT.keys, "max_position_embeddings": 8192},
    chosen=lambda config: config.get("position_embedding_type") == "alibi"
    or not {*_NAMES2}.isdisjoint(config.get("architectures") or ()),
    expects=(
        GELU, Expected("position_embedding_type", ("alibi",), written=True),
        Expected("feed_forward_type", ("geglu",), written=True),
    ),
    names=BERT.names,
    sizes=encoder_sizes,
    metadata=(NOT_CAUSAL,),
    layer_norm=True, rotary=False, lacks=BERT.lacks, starts=BERT.starts, unneeded=BERT.unneeded,
    table=(
        WORDS, TYPES, EMBEDDING_NORM,
        *(row for row in LAYERS if ".attention." in row.source),
        Row(f"{_BLOCK}mlp.gated_layers", "inner+inner hidden"),
        Row(f"{_BLOCK}mlp.wo", "hidden inner", bias=required),
        Row(f"{_BLOCK}mlp.layernorm", "hidden", bias=required),
    ),
)  # fmt: skip


def _notes(config: Config) -> list[str]:
    tasks = config.get("lora_adaptations")
    return [f"the adapters for {', '.join(map(str, tasks))} are left out"] if isinstance(tasks, list) and tasks else []


JINA3 = Family(
    titles=("Jina Embeddings v3",), arch="jina-bert-v3",
    architectures=("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM", "XLMRobertaModel"),
    model_type="jina_embeddings_v3",
    keys={**ROBERTA.keys, "max_position_embeddings": 8194, "rope_theta": 20000.0, "vocab_size": 250002},
    expects=(GELU,),
    names={"rms_norm_eps": "layer_norm_eps"},
    sizes=lambda config, args: {**roberta_sizes(config, args), "types": config.integer("type_vocab_size", 1)},
    metadata=(NOT_CAUSAL, CONTEXT),
    notes=_notes,
    layer_norm=True, lacks=BERT.lacks, starts=ROBERTA.starts, unneeded=ROBERTA.unneeded,
    table=(
        WORDS, TYPES, replace(EMBEDDING_NORM, source="emb_ln", also=(EMBEDDING_NORM.source,)),
        *decoder(
            Row("mixer.Wqkv", "q+kv+kv hidden", bias=required),
            Row("mixer.out_proj", "hidden q", bias=required),
            Row("norm1", "hidden", bias=required),
            Row("mlp.fc1", "inner hidden", bias=required),
            Row("mlp.fc2", "hidden inner", bias=required, columns_of=("mlp.fc1",)),
            Row("norm2", "hidden", bias=required),
            first=(), block="encoder.layers",
        )[:-2],
    ),
)  # fmt: skip
# with the keys of the published config.json
PUBLISHED_JINA3 = replace(
    JINA3,
    titles=(),
    chosen=lambda config: "rotary_emb_base" in config.values,
    in_gguf=lambda _get: False,
    expects=(*JINA3.expects, Expected("position_embedding_type", ("rotary",))),
    names={**JINA3.names, "rope_theta": "rotary_emb_base"},
)
