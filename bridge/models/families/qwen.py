"""Qwen2 and Qwen3, their mixtures of experts, embedding models and rerankers, and the language models of Qwen2-VL,
Qwen2.5-VL and Qwen3-VL.

Qwen2 is Llama's decoder with biases on q, k and v; heads are rotated by halves. Qwen3 has no biases, normalizes heads
of q and k, and its head_dim is independent of the hidden size.

Qwen1.5-MoE and Qwen2-MoE have many small experts, and one shared by all tokens; Qwen3-MoE shares none. llama.cpp does
not normalize the first ones' weights of a token's experts, norm_topk_prob must be false; it normalizes Qwen3's to a sum
of one, and norm_topk_prob must be true, while transformers' default is false.

A Qwen3 with a head for classes scores by the share of the first class. Of one class alone, that is the sigmoid of its
logit: the GGUF has its row times 1/2 and times -1/2. llama.cpp's converter knows no such head.

A Qwen3 reranker is asked whether a document answers a query; its head are the rows of "yes" and "no" of the output
matrix, and a GGUF has that question as a chat template, "rerank". config.json does not tell such a model: its card or
its name does.

The vision models' decoders are rotated by three positions, which are equal for text. The sections tell how many pairs
of a head each position rotates.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import PoolingType

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed
from bridge.models.config.model_config import Config
from bridge.models.config.rope import rope_rules
from bridge.models.families.bert import classifies, label_count, labels
from bridge.models.family import (
    ALL_SPARSE,
    EMBEDDINGS,
    EXPERTS,
    HEAD,
    SILU,
    Expected,
    Family,
    Row,
    configured,
    decoder,
    gated_mlp,
    pre_norm_attention,
    required,
)
from bridge.models.outline import Part
from bridge.system.storage.files import read_json, read_text

_KEYS2 = {"max_position_embeddings": 32768, "use_sliding_window": False}
_UNNORMALIZED = "llama.cpp does not normalize this architecture's expert weights"
_ATTENTION2 = pre_norm_attention(bias=required)

QWEN2 = Family(
    titles=("Qwen2 and 2.5",), arch="qwen2", architectures=("Qwen2ForCausalLM", "Qwen2Model"), model_type="qwen2",
    keys=_KEYS2,
    table=decoder(*_ATTENTION2, *gated_mlp("mlp", "inner")),
)  # fmt: skip

QWEN2_MOE = Family(
    titles=("Qwen2-MoE",), arch="qwen2moe", architectures=("Qwen2MoeForCausalLM",), model_type="qwen2_moe",
    keys={**_KEYS2, "num_experts": None, "moe_intermediate_size": None, "shared_expert_intermediate_size": None},
    expects=(
        SILU, *ALL_SPARSE, Expected("norm_topk_prob", (False,), _UNNORMALIZED, written=True),
        Expected("qkv_bias", (True,)),
    ),
    table=decoder(
        *_ATTENTION2,
        *EXPERTS,
        Row("mlp.shared_expert_gate", "hidden", change="squeezed"),  # a matrix of one row
        *gated_mlp("mlp.shared_expert", "shared"),
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip


# 128 is transformers' default, whatever hidden_size / num_attention_heads is
_KEYS3 = {"max_position_embeddings": 32768, "head_dim": 128, "use_sliding_window": False, "attention_bias": False}
_ATTENTION3 = pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head"), bias=configured)

_RERANKER = "qwen3-reranker"
_QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def _reranks(config: Config) -> bool:
    """Whether a model is asked as Qwen3-Reranker is, by its folder's name, the name in config.json, or its card."""
    folder = config.path.parent
    card = read_text(folder / "README.md") if (folder / "README.md").is_file() else ""
    names = folder.resolve().name, str(config.get("_name_or_path", ""))
    return any(_RERANKER in name.lower() for name in names) or f"# {_RERANKER}" in card.lower()


def _answers(config: Config, _args: Arguments) -> dict[str, int]:
    """The tokens of a reranker's two answers, or the classes of a head."""
    if classifies(config):
        count = label_count(config)
        return {"classes": count, "answers": max(count, 2)}
    if not _reranks(config):
        return {}
    data = read_json(config.path.parent / "tokenizer.json")
    vocab = {**data["model"]["vocab"], **{token["content"]: token["id"] for token in data.get("added_tokens") or []}}
    return {"answers": 2, "yes": vocab["yes"], "no": vocab["no"]}


def _answer_rows(args: Arguments, source: str) -> tuple[Part, ...]:
    source = f"{EMBEDDINGS.source}.weight" if args.tied else source
    rows = np.array([args.more["yes"], args.more["no"]])
    return (Part(source, (2, args.hidden), rows, stored=(args.vocab, args.hidden)),)


def _class_rows(args: Arguments, source: str) -> tuple[Part, ...]:
    if args.more["classes"] > 1:
        return (Part(source, (args.more["classes"], args.hidden)),)
    return tuple(Part(source, (1, args.hidden), factor=np.array([half], np.float32)) for half in (0.5, -0.5))


def _reranker_keys(config: Config, args: Arguments) -> dict[str, Any]:
    if "answers" not in args.more:
        return {}
    named = labels(config) if args.more.get("classes", 1) > 1 else {"classifier.output_labels": ["yes", "no"]}
    return {"pooling_type": int(PoolingType.RANK), **named}


def _question(config: Config) -> Mapping[str, str]:
    return {"rerank": _QUESTION} if _reranks(config) else {}


QWEN3 = Family(
    titles=("Qwen3",), arch="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"), model_type="qwen3",
    keys=_KEYS3,
    sizes=_answers,
    metadata=(Computed(_reranker_keys), ATTENTION_BIAS),
    templates=_question,
    table=(
        *decoder(
            *_ATTENTION3, *gated_mlp("mlp", "inner"),
            head=replace(HEAD, when=lambda args: not args.tied and "answers" not in args.more),
        ),
        Row("lm_head", "answers hidden", name="cls.output.weight", floats="F32", parts=_answer_rows,
            when=lambda args: "answers" in args.more and "classes" not in args.more),
        Row("score", "answers hidden", name="cls.output.weight", floats="F32", parts=_class_rows,
            when=lambda args: "classes" in args.more),
    ),
)  # fmt: skip

QWEN3_MOE = Family(
    titles=("Qwen3-MoE",), arch="qwen3moe", architectures=("Qwen3MoeForCausalLM",), model_type="qwen3_moe",
    keys={**_KEYS3, "num_experts": None, "moe_intermediate_size": None, "norm_topk_prob": False},
    expects=(
        SILU, *ALL_SPARSE,
        Expected("norm_topk_prob", (True,), "llama.cpp normalizes this architecture's expert weights", written=True),
    ),
    metadata=(ATTENTION_BIAS,),
    table=decoder(*_ATTENTION3, *EXPERTS),
)  # fmt: skip


def rope_sections(config: Config, _args: Arguments, default: list[int] | None = None) -> dict[str, Any]:
    sections = rope_rules(config).get("mrope_section", default)
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int for n in sections):
        raise BridgeError(f"{config.path}: the rope parameters' mrope_section is {sections!r}, must be three counts")
    return {"rope.dimension_sections": [*sections, 0]}


def _deepstack(config: Config, args: Arguments) -> dict[str, Any]:
    """The sections, and the number of first layers to which image features are added."""
    layers = (config.get("vision_config") or {}).get("deepstack_visual_indexes") or []
    return {**rope_sections(config, args), "n_deepstack_layers": len(layers)}


QWEN2_VL = replace(
    QWEN2,
    titles=("Qwen2-VL and 2.5-VL",), arch="qwen2vl",
    architectures=("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"), model_type="qwen2_5_vl",
    metadata=(Computed(rope_sections),),
    language_model=("qwen2", "Qwen2ForCausalLM"), wrapped=True,
)  # fmt: skip

QWEN3_VL = replace(
    QWEN3,
    titles=("Qwen3-VL",), arch="qwen3vl", architectures=("Qwen3VLForConditionalGeneration",), model_type="qwen3_vl",
    sizes=None, templates=lambda _config: {},
    metadata=(Computed(_deepstack), ATTENTION_BIAS),
    language_model=("qwen3", "Qwen3ForCausalLM"), wrapped=True,
)  # fmt: skip

QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    titles=("Qwen3-VL-MoE",), arch="qwen3vlmoe", architectures=("Qwen3VLMoeForConditionalGeneration",),
    model_type="qwen3_vl_moe",
    keys={**QWEN3_MOE.keys, "norm_topk_prob": True},
    metadata=QWEN3_VL.metadata,
    language_model=("qwen3_moe", "Qwen3MoeForCausalLM"), wrapped=True,
    # the published files have each expert's matrices transposed
    of_parts="^",
    table=tuple(replace(row, also=(f"{row.also[-1]}^",)) if "*" in row.source else row for row in QWEN3_MOE.table),
)  # fmt: skip
