"""What llama-server answers besides OpenAI's interface: tokens and texts, the settings, and what is being made."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bridge.runtime.model import Model
from bridge.runtime.sampling import NUMBERS, Sampling
from bridge.serve.engine import Engine
from bridge.serve.request_json import RequestFields, chat, naming, token_ids
from bridge.system.fields import flag, of_type


def tokenize(body: Any, model: Model) -> dict[str, Any]:
    """The body of /tokenize -> the tokens of a text; a piece that is no text as its bytes."""
    asked = RequestFields(body)
    text = asked.needed("content", of_type(str, "a text"))
    add_special, parse_special = asked.take("add_special", flag, False), asked.take("parse_special", flag, True)
    with_pieces = asked.take("with_pieces", flag, False)
    asked.end()
    with naming("content"):
        ids = model.tokenizer.encode(text, add_special, parse_special)
    return {"tokens": [{"id": token, "piece": _piece(model, token)} for token in ids] if with_pieces else ids}


def _piece(model: Model, token: int) -> str | list[int]:
    piece = model.tokenizer.piece(token, special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def detokenize(body: Any, model: Model) -> dict[str, Any]:
    """The body of /detokenize -> the text of tokens."""
    asked = RequestFields(body)
    ids = asked.needed("tokens", token_ids)
    asked.end()
    with naming("tokens"):
        return {"content": model.tokenizer.decode(ids, special=True)}


def apply_template(body: Any, model: Model) -> dict[str, Any]:
    """The body of /apply-template, which is one of /v1/chat/completions -> the conversation as one text."""
    asked = chat(body, model, {})
    with naming("messages"):
        return {"prompt": model.chat_text(asked.messages, asked.variables)}


def properties(model: Model, name: str, slots: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of /props; `defaults`: of requests, as fields of `Sampling`. The file is named without its folder."""
    tokenizer = model.tokenizer
    return {
        "default_generation_settings": {"n_ctx": model.context, "params": _settings(defaults)},
        "total_slots": slots,
        "model_alias": name,
        "model_path": model.path.name,
        "chat_template": model.chat_template or "",
        "bos_token": tokenizer.text(tokenizer.bos),
        "eos_token": tokenizer.text(tokenizer.eos),
        "modalities": {"vision": False, "audio": False},
        "is_sleeping": False,
    }


def _settings(defaults: Mapping[str, Any]) -> dict[str, Any]:
    how = Sampling(**defaults)
    numbers = {field.name: getattr(how, field.name) for field in fields(how) if field.name in NUMBERS}
    return {**numbers, "seed": -1 if how.seed is None else how.seed, "n_predict": -1, "max_tokens": -1, "stop": []}


def slots(model: Model, engine: Engine, count: int) -> list[dict[str, Any]]:
    """The answer of /slots: as many as sequences are made at a time, the busy ones first."""
    busy = engine.batch.active
    return [
        {"id": i, "n_ctx": model.context, "speculative": engine.draft is not None, "is_processing": i < busy}
        for i in range(count)
    ]
