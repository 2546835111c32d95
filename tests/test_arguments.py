"""Arguments of a wrong type are refused in a sentence, by every public function; `progress` is explained by each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.converter import plan_checkpoint
from bridge.errors import BridgeError
from bridge.runtime.replies.batch import Batch
from bridge.runtime.replies.perplexity import perplexity
from tests.conftest import CHECKPOINT

LINEAR = torch.nn.Linear(32, 32)
NOWHERE = "no/such/file.gguf"

# function, its other arguments, and the ones to be of a wrong type: all are checked before any file is opened
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "convert": (
        bridge.convert,
        {"checkpoint": NOWHERE},
        [
            "checkpoint",
            "out",
            "config",
            "template",
            "imatrix",
            "merge",
            "plan",
            "type",
            "threads",
            "force",
            "progress",
            "name",
        ],
    ),
    "plan_checkpoint": (plan_checkpoint, {"checkpoint": NOWHERE}, ["checkpoint", "out", "progress"]),
    "verify": (
        bridge.verify,
        {"model": NOWHERE, "reference": NOWHERE},
        [
            *("model", "reference", "config", "template", "mtp_text", "mmproj", "target_model", "allow_missing"),
            *("text", "window", "n_windows", "progress", "text_progress", "save_as"),
        ],
    ),
    "check_weights": (bridge.check_weights, {"path": NOWHERE}, ["path", "config", "progress"]),
    "convert_lora": (
        bridge.convert_lora,
        {"adapter": NOWHERE, "out": NOWHERE, "base": NOWHERE},
        ["adapter", "out", "base", "config", "template", "force"],
    ),
    "repack": (
        bridge.repack,
        {"source": NOWHERE, "out": NOWHERE},
        ["source", "out", "format", "host", "bits", "config", "dtype", "calibrate", "clamp", "force", "progress"],
    ),
    "quantize_gguf": (
        bridge.quantize_gguf,
        {"source": NOWHERE},
        ["source", "output", "type", "calibrate", "budget", "modelfile", "progress", "save_as", "config", "threads"],
    ),
    "quantize_checkpoint": (
        quantize_checkpoint,
        {"checkpoint": NOWHERE, "calibrate": bridge.Calibration(None, method="rtn")},
        ["checkpoint", "out", "format", "config", "bits", "group_size", "symmetric", "calibrate", "progress"],
    ),
    "upload": (
        bridge.upload,
        {"result": object.__new__(bridge.Report), "repository": "org/name"},
        ["result", "repository", "private", "card_only", "force"],
    ),
    "open_checkpoint": (bridge.open_checkpoint, {"path": NOWHERE}, ["path", "config", "needs_config"]),
    "open_gguf": (bridge.open_gguf, {"path": NOWHERE}, ["path", "load"]),
    "Model.load": (
        bridge.Model.load,
        {"path": NOWHERE},
        ["path", "threads", "kv", "context", "precision", "load", "lora"],
    ),
    "perplexity": (
        perplexity,
        {"model": object.__new__(bridge.Model), "text": ""},
        ["model", "text", "window", "n_windows", "progress"],
    ),
    "nn.load": (bridge.nn.load, {"model_id_or_config": NOWHERE, "gguf": NOWHERE}, ["gguf", "precision", "dtype"]),
    "nn.replace_linears": (
        bridge.nn.replace_linears,
        {"model": LINEAR, "gguf": NOWHERE},
        ["model", "gguf", "precision", "prepare"],
    ),
    "nn.replace_trellis": (
        bridge.nn.replace_trellis,
        {"model": LINEAR, "checkpoint": NOWHERE},
        ["model", "checkpoint"],
    ),
    "quantize.gptq": (
        bridge.quantize.gptq,
        {"module": LINEAR, "batches": []},
        ["module", "batches", "bits", "group_size", "symmetric", "act_order", "damping", "sweeps", "type", "wanted"],
    ),
    "Calibration": (
        bridge.Calibration,
        {"text": None},
        [
            *("text", "samples", "length", "seed", "method", "act_order", "damping", "alpha", "sweeps", "feed"),
            *("device", "memory", "offload", "imatrix_out", "progress", "say"),
        ],
    ),
    "Budget": (
        bridge.Budget,
        {"size": 1 << 20},
        ["size", "swaps", "requantize", "plan_out", "tensor_types_out", "tokens", "progress"],
    ),
}


@pytest.mark.parametrize("value", [object(), ..., 3 + 4j], ids=["object", "ellipsis", "complex"])
@pytest.mark.parametrize(("function", "argument"), [(f, a) for f, (_, _, names) in FUNCTIONS.items() for a in names])
def test_an_argument_of_a_wrong_type_is_named_in_a_sentence(function, argument, value) -> None:
    call, others, _ = FUNCTIONS[function]
    with pytest.raises(BridgeError, match=rf"^{argument}\b.*(is of type {type(value).__name__}; )?must be "):
        call(**{**others, argument: value})


def test_none_is_no_path_where_one_is_needed() -> None:
    with pytest.raises(BridgeError, match="path is of type NoneType; must be a path"):
        bridge.open_gguf(None)  # type: ignore[arg-type]


def test_paths_may_be_texts_and_paths() -> None:
    for path in (str(CHECKPOINT), Path(CHECKPOINT)):
        with bridge.open_checkpoint(path) as checkpoint:
            assert checkpoint.modules


def test_python_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        bridge.open_gguf()  # type: ignore[call-arg]


@pytest.mark.parametrize("function", [f for f, (_, _, names) in FUNCTIONS.items() if "progress" in names])
def test_every_function_with_progress_tells_what_it_is_called_with(function) -> None:
    text = " ".join((inspect.getdoc(FUNCTIONS[function][0]) or "").split())
    assert "called" in text.partition("progress")[2][:80]


WRONG_KEYWORDS = [
    (bridge.Model.generate, "tempreature", "temperature"),
    (bridge.Model.generate_tokens, "max_token", "max_tokens"),
    (bridge.Model.generate_scored, "logprob", "logprobs"),
    (bridge.Model.generate_batch, "regexp", "regex"),
    (bridge.Model.chat, "template_option", "template_options"),
    (Batch.add, "sed", "seed"),
    (bridge.convert, "tensor_type", "tensor_types"),
    (bridge.quantize_gguf, "calibration", "calibrate"),
    (plan_checkpoint, "treads", "threads"),
    (bridge.open_gguf, "laod", "load"),
    (bridge.quantize.gptq, "groupsize", "group_size"),
    (bridge.quantize.quantize_model, "two_side", "two_sided"),
    (bridge.quantize.write_checkpoint, "shardsize", "shard_size"),
]


@pytest.mark.parametrize(("function", "wrong", "meant"), WRONG_KEYWORDS)
def test_a_wrong_keyword_is_said_with_the_function_and_the_keyword_that_is_near(function, wrong, meant) -> None:
    said = f"{function.__name__}() got an unexpected keyword argument"
    for keyword, hint in ((wrong, f"; did you mean {meant}?"), ("zzz", "")):
        with pytest.raises(TypeError) as error:
            function(None, None, **{keyword: 1})
        assert str(error.value) == f"{said} {keyword!r}{hint}"
