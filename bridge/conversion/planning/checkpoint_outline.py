"""The outline of an opened checkpoint: its family's, a template's or a GGUF's own, with the data looked at.

Biases that are all zeros are left out, act-order is undone where rows elsewhere can be permuted instead, and a head
that is stored with values of its own is not tied to the embeddings, whatever the config says.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from bridge.checkpoint import Checkpoint
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.conversion.planning.part_reader import PartReader
from bridge.errors import BridgeError
from bridge.models import describe_model
from bridge.models.outline import Outline, OutlineTensor, Part, number
from bridge.models.template import describe_template
from bridge.models.tokenizer.gguf_tokenizer import highest_token
from bridge.models.wrapper import text_config, text_names, with_text

_ROWS = 1024  # of a matrix that are compared at a time
_EMBEDDINGS = re.compile(r"(\w+\.)?(embed_tokens|wte|embeddings)\.weight")  # of tokens, by their usual names


def outline_of(
    ckpt: Checkpoint, pre: str | None = None, template: str | Path | None = None, no_mtp: bool = False,
    target: str | Path | None = None, undo_act_order: bool = True,
) -> Outline:  # fmt: skip
    """A checkpoint's outline, by its family or a template; a GGUF's own.

    pre     overrides the recognition of the pre-tokenizer
    no_mtp  whether layers that predict further tokens are left out
    target  as `describe_model` takes it
    undo_act_order  whether rows and columns are permuted as `without_act_order` does

    Raises BridgeError where the family is unknown, the checkpoint incomplete, or a bias has no place in llama.cpp.
    """
    if isinstance(ckpt, GgufCheckpoint):
        outline = ckpt.outline
        if pre is not None:
            outline.metadata["tokenizer.ggml.pre"] = GGUFValue(pre, GGUFValueType.STRING)
    elif template is not None:
        outline = describe_template(ckpt, template)
    else:
        shapes = {name: info.shape for name, info in ckpt.tensors.items()}
        shapes |= {f"{module}.weight": info.shape for module, info in ckpt.modules.items()}
        ckpt.config, notes = _mended(ckpt)  # calibration builds the model from it, too
        outline = describe_model(ckpt.config, ckpt.home, shapes, pre, no_mtp, target)
        outline.notes += notes
    for key, names in outline.numbers.items():
        outline.metadata[key] = GGUFValue([_number(ckpt, name) for name in names], GGUFValueType.ARRAY)
    for key, name in outline.integers.items():
        outline.metadata[key] = GGUFValue(_integers(ckpt, name), GGUFValueType.ARRAY, GGUFValueType.UINT64)
    for name in outline.zero_only:
        if ckpt.read_float(name).any():
            arch = outline.metadata["general.architecture"].value
            raise BridgeError(f"{name}: llama.cpp's {arch} has no such tensor, and it is not zero; it cannot be kept")
    left_out = {name for name in outline.optional if not ckpt.read_float(name).any()}
    outline.tensors = [t for t in outline.tensors if t.source not in left_out]
    reader = PartReader(ckpt)
    reader.check(outline.tensors)
    for part in (part for tensor in outline.tensors for part in tensor.parts if part.change == "targets"):
        _check_targets(reader.targets(part), part.source, number(outline.metadata, "vocab_size"))
    if undo_act_order:
        outline.tensors = without_act_order(ckpt, outline)
    return outline


def _check_targets(tokens: np.ndarray, name: str, vocab: int) -> None:
    """BridgeError for tokens of a model that it does not have, or that are there twice."""
    if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < len(tokens):
        raise BridgeError(
            f"{name}: must name {len(tokens)} different ones of the model's {vocab} tokens; the drafter is damaged, "
            "or of another model"
        )


def _number(ckpt: Checkpoint, name: str) -> float:
    """The number of a tensor that has one; BridgeError if it has several, or none that is finite."""
    values = ckpt.read_float(name).reshape(-1)
    if len(values) != 1 or not np.isfinite(values[0]):
        raise BridgeError(f"{name}: is {values.tolist()!r:.60}, must be one number; the checkpoint is damaged")
    return float(values[0])


def _integers(ckpt: Checkpoint, name: str) -> list[int]:
    """The integers of a tensor; BridgeError if it has other values."""
    values = ckpt.store.read(name).reshape(-1)
    if values.dtype.kind not in "iu" or not values.size or values.min() < 0:
        raise BridgeError(f"{name}: is {ckpt.tensors[name].dtype}, must be counts of I64; the checkpoint is damaged")
    return [int(value) for value in values]


def _mended(ckpt: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """config.json with what the tensors contradict put right, and notes: the vocabulary's size, and whether a head is
    tied to the embeddings."""
    text, _ = text_names([*ckpt.tensors, *(f"{module}.weight" for module in ckpt.modules)])
    config, notes = _with_rows(ckpt, ckpt.config, text)
    untied = _untied(ckpt, config, text)
    return ({**config, "tie_word_embeddings": False}, [*notes, *untied]) if untied else (config, notes)


def _with_rows(ckpt: Checkpoint, config: dict[str, Any], text: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The config with as many tokens as the embeddings have rows, where these are more and not only padding: rows of
    zeros that have no token."""
    stored = next((name for text_name, name in text.items() if _EMBEDDINGS.fullmatch(text_name)), None)
    embedding = _weight(ckpt, stored.removesuffix(".weight")) if stored is not None else None
    size = text_config(config).get("vocab_size")
    if embedding is None or type(size) is not int or not 0 < size < (rows := embedding.shape[0]):
        return config, []
    head = _weight(ckpt, text["lm_head.weight"].removesuffix(".weight")) if "lm_head.weight" in text else None
    if head is not None and head.shape[0] < rows:
        return config, []
    tokens = highest_token(ckpt.home) + 1
    spans = range(size, rows, _ROWS)
    if tokens <= size and not any(embedding.rows(start, min(start + _ROWS, rows)).any() for start in spans):
        return config, []
    has = f"the tokenizer has {tokens} tokens and the embedding" if tokens else "the embedding has"
    note = f"config.json says vocab_size {size}, but {has} {rows} rows ({stored}): {rows} is used"
    return with_text(config, vocab_size=rows), [note]


def _untied(ckpt: Checkpoint, config: dict[str, Any], text: Mapping[str, str]) -> list[str]:
    """A note where a head that config.json ties to the embeddings has other values.

    Values are compared over the rows and columns that both have; further ones are padding.
    """
    tied = config.get("tie_word_embeddings")
    stored = (text.get(f"{name}.weight", "").removesuffix(".weight") for name in ("lm_head", "model.embed_tokens"))
    head, embedding = (_weight(ckpt, name) if tied and name else None for name in stored)
    if head is None or embedding is None:
        return []
    rows, columns = map(min, zip(head.shape, embedding.shape, strict=True))
    for start in range(0, rows, _ROWS):
        stop = min(start + _ROWS, rows)
        if not np.array_equal(head.rows(start, stop)[:, :columns], embedding.rows(start, stop)[:, :columns]):
            return ["config.json ties lm_head to the embeddings, but it is stored with other values; it is kept"]
    return []


class _Weight(NamedTuple):
    """A matrix: `rows` gives float32 of the rows start..stop."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]


def _weight(ckpt: Checkpoint, name: str) -> _Weight | None:
    """A module's matrix, whichever way it is stored; None where there is none."""
    if name in ckpt.modules:
        t = ckpt.read_module(name)
        return _Weight(t.shape, lambda start, stop: t.dequantize(slice(start, stop)))
    info = ckpt.tensors.get(f"{name}.weight")
    if info is None or len(info.shape) != 2:
        return None
    return _Weight(info.shape, lambda start, stop: ckpt.read_float(info.name, (start, stop)))


def without_act_order(ckpt: Checkpoint, outline: Outline) -> list[OutlineTensor]:
    """The tensors with act-order undone where it can be: a consumer's columns and its producers' rows permuted."""
    widths = {part.module: part.shape[-1] for t in outline.tensors for part in t.parts}
    heights = {part.module: (part.stored or part.shape)[0] for t in outline.tensors for part in t.parts}
    rows: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    for fold in outline.folds:
        group = ckpt.group_order(fold.consumer) if fold.consumer in ckpt.modules else None
        if group is not None:
            # columns beyond the model's true width are padding, and will be cropped
            order = np.argsort(group[: widths[fold.consumer]], kind="stable")
            columns[fold.consumer] = order
            for producer in fold.producers:  # one that holds gate and up has the rows of both
                starts = np.arange(0, heights[producer], len(order))
                rows[producer] = (starts[:, None] + order).reshape(-1)

    def ordered(part: Part) -> Part:
        """The fold's permutation, then the architecture's; a producer's bias goes with its rows."""
        fold = rows.get(part.source.rpartition(".")[0])
        if fold is not None:
            part = replace(part, rows=fold if part.rows is None else fold[part.rows])
        return replace(part, columns=columns[part.module], folded=True) if part.module in columns else part

    return [replace(t, parts=tuple(map(ordered, t.parts))) for t in outline.tensors]
