"""The texts that the program ships to calibrate on, in `calibration_text`, and openings for the model's own samples.

    prose.txt scripts.txt           written for this project: stories, essays, letters, news; sentences in 27 languages
    articles.txt tables.txt lists.txt chats.jsonl    made by scripts/make_calibration_text.py
    code.txt technical.txt          of this project, and made by that script
    prompts.txt                     questions that a chat model's samples answer, one in each line

All of them have the licence of this program. Each file but the last is one kind of text.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.quantize.text.texts import bos_of, chat_text, cut_windows, formatted, token_ids

_FOLDER = Path(__file__).parents[1] / "calibration_text"
KINDS = (
    "prose.txt", "chats.jsonl", "code.txt", "articles.txt", "scripts.txt", "tables.txt", "technical.txt", "lists.txt",
)  # fmt: skip
_WORDS = 3  # of a text, at the head of a sample


def shipped_windows(tokenizer: Any, length: int) -> dict[str, np.ndarray]:
    """Windows int64 [n, length] of each kind of text that has one. Chats are in the tokenizer's template, if it has
    one that formats them."""
    bos = bos_of(tokenizer)
    texts = {kind: (_FOLDER / kind).read_text(encoding="utf-8") for kind in KINDS}
    texts["chats.jsonl"] = chat_text(_FOLDER / "chats.jsonl", tokenizer)
    by_kind = {kind: cut_windows(token_ids(text, tokenizer)[None], length, bos) for kind, text in texts.items()}
    return {kind: windows for kind, windows in by_kind.items() if len(windows)}


def openings(tokenizer: Any) -> list[list[int]]:
    """Token ids that samples start with, in a fixed order: a chat model's questions in its template, the mark that a
    text starts or ends with, and first words of the shipped texts. None is empty."""
    bos, eos = bos_of(tokenizer), tokenizer.eos_token_id
    start = [bos] if bos is not None else []
    files = (_FOLDER / kind for kind in ("prose.txt", "articles.txt", "scripts.txt", "code.txt", "lists.txt"))
    paragraphs = (part for file in files for part in file.read_text(encoding="utf-8").split("\n\n")[:40] if part)
    heads = [part.lstrip("# ") for part in paragraphs]
    plain = [start + token_ids(" ".join(head.split(" ")[:_WORDS]), tokenizer).tolist() for head in heads]
    questions = _questions(tokenizer)
    if not questions:
        mark = start or ([eos] if eos is not None else [])
        questions = [mark] * len(plain) if mark else []
    dice = np.random.default_rng(0)
    mixed: list[list[int]] = []
    for i, index in enumerate(dice.permutation(len(plain))):
        mixed += [plain[index], *([questions[i % len(questions)]] if questions else [])]
    return [opening for opening in mixed if opening]


def _questions(tokenizer: Any) -> list[list[int]]:
    lines = (_FOLDER / "prompts.txt").read_text(encoding="utf-8").splitlines()
    try:
        chats = formatted([[{"role": "user", "content": line}] for line in lines], tokenizer, answer=True)
    except BridgeError:  # no template
        return []
    return [token_ids(chat, tokenizer).tolist() for chat in chats]
