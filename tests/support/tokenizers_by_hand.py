"""Small tokenizers in the styles of known families, made from the project's own: no download, no training."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import CHECKPOINT

GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen() -> dict[str, Any]:
    """tokenizer.json of 2048 byte-level tokens, cut as Qwen 2 cuts text; <|endoftext|> is 0."""
    return json.loads((CHECKPOINT / "tokenizer.json").read_text())  # type: ignore[no-any-return]


def llama3() -> dict[str, Any]:
    """The same, cut as Llama 3 cuts it; <|begin_of_text|> and <|end_of_text|> are 0 and 1."""
    data = qwen()
    model, split = data["model"], data["pre_tokenizer"]["pretokenizers"][0]
    ordinary = [text for text in model["vocab"] if text != "<|endoftext|>"]
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    model["merges"].pop()  # it makes the last token, whose place is taken
    model["vocab"] = {text: token for token, text in enumerate([*special, *ordinary[:-1]])}
    data["added_tokens"] = [data["added_tokens"][0] | {"id": token, "content": special[token]} for token in (0, 1)]
    data["normalizer"], model["ignore_merges"] = None, True
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    return data


def gpt_oss() -> dict[str, Any]:
    """The tokens of `qwen`, cut as gpt-4o and gpt-oss cut text."""
    data = qwen()
    data["normalizer"], data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = None, GPT4O
    return data


def llama2() -> dict[str, Any]:
    """SentencePiece as transformers writes it: <unk>, <s>, </s>, the bytes, letters and three merges."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁t", "he", "▁the", *"▁abcdefghijklmnopqrstuvwxyz"]
    vocab = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in enumerate(special)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: token for token, text in enumerate(vocab)},
            "merges": [["▁", "t"], ["h", "e"], ["▁t", "he"]],
        },
    }
