"""Small models that make vectors, as transformers configures them, with small tokenizers of their kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT
from tests.support.family_models import copy_tokenizer

CHARSMAP = (ROOT / "tests/data/charsmap.b64").read_text().strip()  # of a few characters, compiled by sentencepiece
WORDS = (
    "the",
    "cat",
    "dog",
    "sat",
    "mat",
    "ran",
    "home",
    "king",
    "queen",
    "red",
    "green",
    "house",
    "one",
    "two",
    "who",
)
PIECES = ("ing", "ed", "er", "ly", "an", "on", "th", "st", "re")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-\u00e9\u4e2d"
TEXTS = (
    "The cat sat on the mat.", "a DOG ran home, who?!", "kings and queens", "caf\u00e9 \u4e2d\u4e2d 12", "x",
    "unknown \u2603 sign", "the red house is greener than the green house, and one cat ran to two dogs " * 3,
)  # fmt: skip


class Encoder(NamedTuple):
    """A model's class and config in transformers, its tokenizer ("wordpiece", "unigram" or "bpe"), how
    sentence-transformers pools its states ("": it is no such model), and a dense layer's width."""

    model: str
    config: str
    fields: dict[str, Any]
    tokenizer: str = "wordpiece"
    pooling: str = ""
    dense: int = 0


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
XLM: dict[str, Any] = {**SIZES, "max_position_embeddings": 258, "pad_token_id": 1, "type_vocab_size": 1}
MODERN: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 5, "local_attention": 16, "pad_token_id": 1, "bos_token_id": 2048,
    "eos_token_id": 2050, "cls_token_id": 2048, "sep_token_id": 2050, "layer_norm_eps": 1e-5,
}  # fmt: skip
JINA2: dict[str, Any] = {
    **SIZES, "model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu",
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2,
}  # fmt: skip
JINA3: dict[str, Any] = {**XLM, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
NOMIC: dict[str, Any] = {  # as published
    "model_type": "nomic_bert", "n_embd": 32, "n_head": 4, "n_inner": 64, "n_layer": 3, "n_positions": 8192,
    "max_trained_positions": 2048, "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "causal": False,
    "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "type_vocab_size": 2,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
}  # fmt: skip
NOMIC_MOE: dict[str, Any] = {
    **NOMIC, "architectures": ["NomicBertModel"], "n_positions": 2048, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "type_vocab_size": 1, "rotary_emb_base": 10000.0, "moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2,
    "moe_normalize_expert_weights": False,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **SIZES, "head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **SIZES, "head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 7, "query_pre_attn_scalar": 16,
    "sliding_window": 8, "use_bidirectional_attention": True, "eos_token_id": 0,
}  # fmt: skip
ENCODERS = {
    "bert": Encoder("BertModel", "BertConfig", SIZES, pooling="mean_tokens"),
    "bert-cls": Encoder("BertModel", "BertConfig", {**SIZES, "num_hidden_layers": 3, "num_attention_heads": 2},
        pooling="cls_token"),
    "bert-masked": Encoder("BertForMaskedLM", "BertConfig", {**SIZES, "num_attention_heads": 1, "type_vocab_size": 1}),
    "xlm-roberta": Encoder("XLMRobertaModel", "XLMRobertaConfig", XLM, "unigram", "cls_token"),
    "roberta": Encoder("RobertaModel", "RobertaConfig", {**XLM, "type_vocab_size": 2}, "roberta", "mean_tokens"),
    "modern-bert": Encoder("ModernBertModel", "ModernBertConfig", MODERN, "roberta", "cls_token"),
    "modern-bert-silu": Encoder("ModernBertForMaskedLM", "ModernBertConfig", {**MODERN, "num_hidden_layers": 4,
        "global_attn_every_n_layers": 2, "hidden_activation": "silu"}, "roberta", "mean_tokens"),
    "jina2": Encoder("JinaBertForMaskedLM", "", JINA2, pooling="mean_tokens"),
    "jina2-heads": Encoder("JinaBertModel", "", {**JINA2, "hidden_size": 96, "num_attention_heads": 6}, "roberta",
        "mean_tokens"),
    "jina3": Encoder("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", JINA3, "unigram", "mean_tokens"),
    "jina3-published": Encoder("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", {**JINA3, "num_attention_heads": 2},
        "unigram", "mean_tokens"),
    "nomic-bert": Encoder("NomicBertModel", "NomicBertConfig", {**SIZES, "type_vocab_size": 2},
        pooling="mean_tokens"),
    "nomic-bert-published": Encoder("NomicBertModel", "NomicBertConfig", {**SIZES, "num_hidden_layers": 3,
        "type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        pooling="mean_tokens"),
    "nomic-bert-moe": Encoder("NomicMoe", "", NOMIC_MOE, "unigram", "mean_tokens"),
    "qwen3-embedding": Encoder("Qwen3Model", "Qwen3Config", QWEN3, "bpe", "lasttoken"),
    "qwen3-embedding-untied": Encoder("Qwen3ForCausalLM", "Qwen3Config", {**QWEN3, "tie_word_embeddings": False,
        "num_key_value_heads": 4, "head_dim": 8}, "bpe", "lasttoken"),
    "embedding-gemma": Encoder("Gemma3TextModel", "Gemma3TextConfig", GEMMA, "bpe", "mean_tokens", 48),
    "embedding-gemma-plain": Encoder("Gemma3TextModel", "Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "bpe", "mean_tokens"),
}  # fmt: skip
# with a head that scores documents
RERANKERS = {
    "bert-reranker": Encoder("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": 1}),
    "xlm-roberta-reranker": Encoder("XLMRobertaForSequenceClassification", "XLMRobertaConfig",
        {**XLM, "num_labels": 1}, "unigram"),
    "modern-bert-reranker": Encoder("ModernBertForSequenceClassification", "ModernBertConfig", {**MODERN,
        "num_labels": 1, "classifier_pooling": "mean"}, "roberta"),
    "qwen3-score": Encoder("Qwen3ForSequenceClassification", "Qwen3Config", {**QWEN3, "num_labels": 1,
        "pad_token_id": None}, "bpe"),
    "qwen3-scores": Encoder("Qwen3ForSequenceClassification", "Qwen3Config", {**QWEN3, "num_labels": 3,
        "tie_word_embeddings": False, "pad_token_id": None}, "bpe"),
    "qwen3-reranker": Encoder("Qwen3ForCausalLM", "Qwen3Config", QWEN3, "bpe"),
    "qwen3-reranker-untied": Encoder("Qwen3ForCausalLM", "Qwen3Config", {**QWEN3, "tie_word_embeddings": False}, "bpe"),
}  # fmt: skip
# what the converter makes the same of; it drops BERT's pooler, which is a part of its head, and which layers of Gemma
# have a window, knows Jina v3 by its published names alone, and no Qwen3 with a head of its own
CONVERTED = {
    name: encoder for name, encoder in (ENCODERS | RERANKERS).items()
    if name not in ("bert-reranker", "embedding-gemma-plain", "jina3") and "score" not in name
}  # fmt: skip

PUBLISHED = {"nomic-bert-published", "nomic-bert-moe"}  # transformers would read other keys than those published


def write_wordpiece(folder: Path) -> int:
    """tokenizer.json and tokenizer_config.json of a WordPiece vocabulary; returns its size."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    parts = [f"##{part}" for part in (*CHARACTERS, *PIECES)]
    tokens = [*special, *CHARACTERS, *WORDS, *parts]
    model = {"type": "WordPiece", "vocab": {text: token for token, text in enumerate(tokens)}, "unk_token": "[UNK]",
             "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}  # fmt: skip
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": False,
                  "lowercase": True}  # fmt: skip
    _write(folder, model, special, normalizer, {"type": "BertPreTokenizer"}, ("[CLS]", "[SEP]"), 1)
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    _write_settings(folder, "BertTokenizer", {f"{role}_token": text for role, text in names.items()})
    return len(tokens)


def write_unigram(folder: Path) -> int:
    """tokenizer.json and tokenizer_config.json of unigrams as XLM-RoBERTa has them; returns the vocabulary's size."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = [f"\u2581{word}" for word in WORDS]
    scored = [(text, -4.0 - 0.01 * n) for n, text in enumerate(words)]
    scored += [(text, -6.0 - 0.02 * n) for n, text in enumerate((*PIECES, "\u2581"))]
    scored += [(text, -9.0 - 0.03 * n) for n, text in enumerate(CHARACTERS + "ABCDOT")]
    vocab = [*((text, 0.0) for text in special), *scored, ("<mask>", 0.0)]
    model = {"type": "Unigram", "vocab": vocab, "unk_id": 3, "byte_fallback": False}
    normalizer = {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    cuts = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]}
    _write(folder, model, [*special, "<mask>"], normalizer, cuts, ("<s>", "</s>"), 2)
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    settings = {f"{role}_token": text for role, text in names.items()}
    _write_settings(folder, "XLMRobertaTokenizer", {**settings, "clean_up_tokenization_spaces": True})
    return len(vocab)


def write_bpe(folder: Path) -> int:
    """The project's own tokenizer with a reranker's answers, and another token after a text than the one that ends
    replies, as Qwen3-Embedding's has it; returns the vocabulary's size."""
    copy_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (end,) = data["added_tokens"]
    size = len(data["model"]["vocab"])
    for number, (text, special) in enumerate((("yes", False), ("no", False), ("<|im_end|>", True))):
        data["added_tokens"].append({**end, "id": size + number, "content": text, "special": special})
    ends = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}]
    both = [*ends, {"Sequence": {"id": "B", "type_id": 0}}, ends[1]]
    known = {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}}
    data["post_processor"] |= {"single": ends, "pair": both, "special_tokens": known}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>"}))
    return size + 3


def write_roberta(folder: Path) -> int:
    """Byte-level BPE with RoBERTa's tokens around a text; returns the vocabulary's size."""
    copy_tokenizer(folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (end,) = data["added_tokens"]
    size = len(data["model"]["vocab"])
    names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    (second,) = (text for text, token in data["model"]["vocab"].items() if token == 1)
    data["model"]["vocab"][second] = size + 1  # for padding is number 1
    data["model"]["vocab"]["unused"] = data["model"]["vocab"].pop(end["content"])  # would be taken for an end
    ids = (size, 1, size + 2, size + 3, size + 4)
    data["model"]["vocab"] |= dict(zip(names.values(), ids, strict=True))
    data["added_tokens"] = [{**end, "id": n, "content": text} for n, text in zip(ids, names.values(), strict=True)]
    data |= {
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }
    data["post_processor"] = {"type": "RobertaProcessing", "sep": ["</s>", size + 2], "cls": ["<s>", size],
                              "trim_offsets": True, "add_prefix_space": False}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    names |= {"cls": "<s>", "sep": "</s>"}
    _write_settings(folder, "RobertaTokenizer", {f"{role}_token": text for role, text in names.items()})
    return size + 5


def _write(
    folder: Path, model: dict[str, Any], special: list[str], normalizer: dict[str, Any], cuts: dict[str, Any],
    ends: tuple[str, str], between: int,
) -> None:  # fmt: skip
    """tokenizer.json whose texts are between two tokens, and two texts have so many of the last between them."""
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {t: i for i, (t, _) in enumerate(model["vocab"])}
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ends)
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": vocab[text], "content": text, **flags} for text in special],
        "normalizer": normalizer, "pre_tokenizer": cuts,
        "post_processor": {
            "type": "TemplateProcessing", "single": [first, a, last],
            "pair": [first, a, *between * [last], b, last],
            "special_tokens": {text: {"id": text, "ids": [vocab[text]], "tokens": [text]} for text in ends},
        },
        "decoder": None, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _write_settings(folder: Path, kind: str, names: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **names}))


def write_tokenizer(encoder: Encoder, folder: Path) -> int:
    """An encoder's tokenizer; returns its size."""
    if encoder.tokenizer == "bpe":
        return write_bpe(folder)
    if encoder.tokenizer == "roberta":
        return write_roberta(folder)
    return write_unigram(folder) if encoder.tokenizer == "unigram" else write_wordpiece(folder)


def write_modules(encoder: Encoder, folder: Path) -> None:
    """modules.json and the folders that it names, as sentence-transformers writes them."""
    if not encoder.pooling:
        return
    kinds = ["Transformer", "Pooling", *(2 * ["Dense"] if encoder.dense else []), "Normalize"]
    paths = ["" if kind == "Transformer" else f"{number}_{kind}" for number, kind in enumerate(kinds)]
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{mode}": mode == encoder.pooling
        for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    width = encoder.fields.get("hidden_size", encoder.fields.get("n_embd"))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": width, **modes}))
    for number, sizes in ((2, (width, encoder.dense)), (3, (encoder.dense, width))):
        if encoder.dense:
            (folder / f"{number}_Dense").mkdir()
            config = {"in_features": sizes[0], "out_features": sizes[1], "bias": False,
                      "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
            (folder / f"{number}_Dense/config.json").write_text(json.dumps(config))


def new_encoder(encoder: Encoder, folder: Path, **fields: Any) -> Any:
    """The model in transformers, saved in a folder with its tokenizer and modules; weights are random."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.support.family_models import randomized
    from tests.support.remote_encoders import REMOTE, as_published_jina3, as_published_nomic

    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(encoder, folder)
    torch.manual_seed(7)
    own = {"pad_token_id": 1 if encoder.tokenizer == "unigram" else 0, **encoder.fields, "vocab_size": size, **fields}
    if encoder.model in REMOTE:
        model: Any = REMOTE[encoder.model]({"architectures": [encoder.model], **own})
    else:
        config = getattr(transformers, encoder.config)(**own)
        config.architectures = [encoder.model]
        config._attn_implementation = "eager"
        model = randomized(getattr(transformers, encoder.model)(config).eval())
    model.save_pretrained(folder, save_original_format=True)
    if folder.name == "jina3-published":
        as_published_jina3(folder)
    if folder.name == "nomic-bert-published":
        as_published_nomic(folder, NOMIC)
    write_modules(encoder, folder)
    for number in (2, 3) if encoder.dense else ():
        sizes = (encoder.dense, own["hidden_size"]) if number == 2 else (own["hidden_size"], encoder.dense)
        weight = torch.randn(sizes, generator=torch.Generator().manual_seed(number)) / sizes[1] ** 0.5
        save_file({"linear.weight": weight}, folder / f"{number}_Dense/model.safetensors")
    return model
