"""Calibration tokens: a text, documents or token ids become sequences of equal length.

    .jsonl                         one document per line: the field "text", or the only field that holds a string; or
                                   a chat in "messages", formatted by the tokenizer's chat template
    .pt .safetensors .npy          token ids, [sequences, tokens] or one flat array
    anything else                  plain text, UTF-8

Documents are joined by an empty line, tokenized, and cut into consecutive windows of `length` tokens; a shorter rest,
of the text or of a row of token ids, is not used. If the tokenizer puts BOS before a text, every window starts with it,
as in `gguf-bridge perplexity`: before the text, and instead of the first token of later windows. Token ids are taken
as they are. Without a seed the first windows are taken; with one, a random choice of all, in the text's order.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.errors import BridgeError
from bridge.gguf_file.chat_template import TemplateFailed, render_chats
from bridge.system.storage.files import missing, refuse_pointer

TOKEN_FILES = (".pt", ".safetensors", ".npy")
_NAMES = ("input_ids", "tokens")  # of the tensor to read from a file with several
_CHATS = 64  # lines of a .jsonl that one process formats
_PIECE = 1 << 22  # characters tokenized at a time, to the end of a line: a tokenizer takes 100 bytes a token


def read_tokens(
    path: str | Path, tokenizer: Any, samples: int, length: int, seed: int | None = None, vocabulary: int | None = None
) -> torch.Tensor:
    """Calibration sequences from a file: int64 [n, length], n at most `samples`.

    tokenizer   from `load_tokenizer`; not needed for token files
    seed        for the choice of windows; None: the first ones
    vocabulary  the model's number of tokens

    Raises BridgeError if the file cannot be read, has fewer than `length` tokens, or has a token unknown to the model.
    """
    path = Path(path)
    if samples < 1 or length < 1:
        raise BridgeError(f"{samples} calibration sequences of {length} tokens: both must be at least 1")
    check_text(path)
    bos = None
    if path.suffix in TOKEN_FILES:
        rows = _token_rows(path)
    else:
        enough = None if seed is not None else samples * length
        rows = _tokenize(path, tokenizer, enough)[None]
        bos = bos_of(tokenizer)
    windows = cut_windows(rows, length, bos)
    if not len(windows):
        size = f"{len(rows)} rows of {rows.shape[1]} tokens" if len(rows) > 1 else f"{rows.size} tokens"
        raise BridgeError(
            f"{path}: {size}, but a calibration sequence has {length}; give a longer text, or shorter sequences"
        )
    if len(windows) > samples:
        chosen = np.arange(samples)
        if seed is not None:
            chosen = np.sort(np.random.default_rng(seed).choice(len(windows), samples, replace=False))
        windows = windows[chosen]
    check_vocabulary(path, windows, vocabulary)
    return torch.from_numpy(windows.astype(np.int64))


def check_vocabulary(path: str | Path, tokens: np.ndarray, vocabulary: int | None) -> None:
    """BridgeError where tokens of a text are none of the model's; None: their number is not known."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise BridgeError(
            f"{path}: holds token {low if low < 0 else high}, but the model's vocabulary has {vocabulary} tokens; "
            "use the model's own tokenizer"
        )


def cut_windows(rows: np.ndarray, length: int, bos: int | None) -> np.ndarray:
    """Consecutive windows [n, length] of integers [rows, tokens]; each starts with BOS if there is one."""
    if bos is not None and rows.size and rows[0, 0] != bos:  # formatted chats have it
        rows = np.insert(rows, 0, bos, axis=1)
    windows = rows[:, : rows.shape[1] // length * length].reshape(-1, length)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a checkpoint's folder, read by `transformers`; nothing is downloaded.

    Raises BridgeError if there is none, or it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise BridgeError("calibration on a text needs transformers; pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # whatever a damaged file causes
        why = str(problem).strip().splitlines()
        raise BridgeError(
            f"{folder}: its tokenizer cannot be loaded ({why[0] if why else type(problem).__name__}); "
            "copy the model's tokenizer files there, or calibrate on a token file"
        ) from None


def bos_of(tokenizer: Any) -> int | None:
    """BOS, if the tokenizer puts it before a text."""
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def token_ids(text: str, tokenizer: Any) -> np.ndarray:
    """int64 [tokens] of a text, without BOS and EOS."""
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)


def chat_text(path: Path, tokenizer: Any) -> str:
    """The chats of a .jsonl by the tokenizer's chat template; without one, each message is a line with its role."""
    chats = [json.loads(line)["messages"] for line in _lines(path)]
    try:
        texts = [text for i in range(0, len(chats), _CHATS) for text in formatted(chats[i : i + _CHATS], tokenizer)]
    except BridgeError:
        texts = ["\n".join(f"{m['role'].title()}: {m['content']}" for m in chat) for chat in chats]
    return "\n\n".join(texts)


def check_text(path: Path) -> None:
    """Raise BridgeError if a text to calibrate on is missing, a folder, empty or a pointer of Git LFS."""
    if not path.exists():
        raise missing(path)
    if path.is_dir():
        raise BridgeError(f"{path}: is a folder; give a text, .jsonl or token file")
    refuse_pointer(path)
    if not path.stat().st_size:
        raise BridgeError(f"{path}: is empty; give a text to calibrate on")


def _tokenize(path: Path, tokenizer: Any, enough: int | None) -> np.ndarray:
    """int64 [tokens] of a text; stops once there are more than `enough`."""
    if tokenizer is None:
        raise BridgeError(f"{path}: a text needs a tokenizer; give a token file")
    parts: list[np.ndarray] = []
    total = 0
    for piece in _pieces(path, tokenizer):
        parts.append(token_ids(piece, tokenizer))
        total += len(parts[-1])
        if enough is not None and total > enough:
            break
    if not total:
        raise BridgeError(f"{path}: the tokenizer finds no tokens in it; is it a text, and the tokenizer the model's?")
    return np.concatenate(parts)


def _pieces(path: Path, tokenizer: Any) -> Iterator[str]:
    """The text in pieces of whole lines."""
    piece: list[str] = []
    size = 0
    for part in _documents(path, tokenizer) if path.suffix == ".jsonl" else _lines(path):
        piece.append(part)
        size += len(part)
        if size >= _PIECE:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _lines(path: Path) -> Iterator[str]:
    """A file's lines with their line ends, without a byte order mark."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            for line in stream:
                if "\0" in line:
                    raise BridgeError(f"{path}: holds zero bytes; give a text in UTF-8")
                yield line
    except UnicodeDecodeError as problem:
        raise BridgeError(f"{path}: is not UTF-8 text ({problem.reason}); convert it") from None
    except OSError as problem:
        raise BridgeError(f"{path}: cannot be read ({problem.strerror})") from None


def _documents(path: Path, tokenizer: Any) -> Iterator[str]:
    """The documents of a .jsonl, an empty line between them."""
    between = ""
    lines = ((number, line) for number, line in enumerate(_lines(path), 1) if line.strip())
    while some := list(islice(lines, _CHATS)):
        records = [(number, _record(path, number, line)) for number, line in some]
        chats = iter(formatted([record["messages"] for _, record in records if _is_chat(record)], tokenizer))
        for number, record in records:
            text = next(chats) if _is_chat(record) else _text(record)
            if text is None:
                fields = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
                raise BridgeError(
                    f"{path}: line {number} has no text, but {fields or 'no field'}; "
                    'call the field with the text "text", or use "messages" for a chat'
                )
            yield between + text
            between = "\n\n"


def _record(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise BridgeError(f"{path}: line {number} is not JSON ({problem}); is it a .jsonl?") from None


def _is_chat(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and not isinstance(record.get("text"), str)
        and isinstance(record.get("messages"), list)
    )


def formatted(chats: list[Any], tokenizer: Any, answer: bool = False) -> list[str]:
    """The texts of chats, by the tokenizer's chat template; with `answer` up to where the model answers.

    Raises BridgeError if there is no template, or it cannot format one of them.
    """
    if not chats:
        return []
    try:
        template = tokenizer.get_chat_template()
        texts = render_chats(template, [(chat, answer) for chat in chats], tokenizer.special_tokens_map)
    except Exception as problem:  # there is no template, or a message is not a dict
        texts = [TemplateFailed((str(problem).strip().splitlines() or [repr(problem)])[0])]
    rendered = [text for text in texts if isinstance(text, str)]
    if len(rendered) < len(chats):
        why = next(text for text in texts if not isinstance(text, str))
        raise BridgeError(f'the tokenizer\'s chat template cannot format a chat ({why}); give its text as "text"')
    return rendered


def _text(record: Any) -> str | None:
    """The text of a line of a .jsonl that is not a chat; None if there is none, or several."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("text"), str):
        return record["text"]
    texts = [value for value in record.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else None


def _token_rows(path: Path) -> np.ndarray:
    """Integers [rows, tokens] of a token file."""
    try:
        tokens = _read_array(path)
    except BridgeError:
        raise
    except Exception as problem:  # pickles, headers and zips break in many ways
        kind = type(problem).__name__
        raise BridgeError(f"{path}: cannot be read as a tensor of tokens ({kind}); write it again") from None
    if not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim not in (1, 2):
        raise BridgeError(
            f"{path}: {tokens.dtype} of shape {list(tokens.shape)} is not a list of tokens; "
            "save integers [sequences, tokens]"
        )
    return np.atleast_2d(tokens)


def _read_array(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded: Any = load_file(path)
    else:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(loaded, dict):
        names = [name for name in _NAMES if name in loaded] or (list(loaded) if len(loaded) == 1 else [])
        if not names:
            raise BridgeError(f"{path}: holds {', '.join(map(str, loaded))}; name the tensor of tokens input_ids")
        loaded = loaded[names[0]]
    return np.asarray(loaded)
