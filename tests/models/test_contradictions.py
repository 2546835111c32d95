"""Configs and weights that contradict each other: the sentence has what was looked for, what is there, the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.conversion.converter import plan_checkpoint
from bridge.errors import BridgeError
from bridge.models.config.model_config import sizes_of
from tests.support.command_line import edit_json
from tests.support.plain_llama import CONFIG, llama_weights, write_llama

WEIGHTS = llama_weights(CONFIG)
UP = "model.layers.1.mlp.up_proj.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(BridgeError) as refused:
        plan_checkpoint(folder)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "config.json says hidden_size 128; if the weights are right, it must be 96"),
        ({"hidden_size": 64}, "not [2048, 64]; config.json says hidden_size 64; if the weights are right"),
        ({"intermediate_size": 512}, "intermediate_size 512; if the weights are right, it must be 256"),
        ({"intermediate_size": 128}, "says intermediate_size 128; if the weights are right, it must be 256"),
        ({"num_attention_heads": 8}, "times head_dim 24; if the weights are right, it must be 96"),
        ({"num_key_value_heads": 1}, "24 in config.json is head_dim 24 or num_key_value_heads 1 times head_dim 24"),
        ({"num_hidden_layers": 3}, "config.json says 3 layers, the checkpoint has tensors of 2; if these are all"),
        ({"num_hidden_layers": 1}, "has this name; config.json's number of layers must be 2 or more to have it"),
        ({"quantization_config": {"bits": 4}}, "describes a quantization (bits) without quant_method"),
    ],
)  # fmt: skip
def test_a_number_of_the_config_is_named_with_the_one_that_the_weights_have(tmp_path, changes, said):
    assert said in refusal(write_llama(tmp_path / "model", WEIGHTS, **changes))


def without(start: str) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {name: w for name, w in WEIGHTS.items() if not name.startswith(start)}


def with_name(old: str, new: str) -> Callable[[], dict[str, np.ndarray]]:
    return lambda: {name.replace(old, new): w for name, w in WEIGHTS.items()}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (without("lm_head"), "if the embeddings are the head too, config.json must say tie_word_embeddings: true"),
        (without("model.layers.0."), "config.json says 2 layers, the checkpoint has tensors of 1, numbered 1 to 1"),
        (without(UP), f"{UP} is missing from the checkpoint; a llama model of this config.json has it, and no name in"),
        (with_name("q_proj", "query"), "the names there that no llama model has (2) is model.layers.0.self_attn.query"),
        (lambda: WEIGHTS | {"score.weight": np.ones((2, 96), np.float16)}, "the most alike that it has is model.norm"),
        (lambda: WEIGHTS | {"model.embed_tokens.weight": WEIGHTS["model.embed_tokens.weight"][:2000]},
         "config.json says vocab_size 2048; if the weights are right, it must be 2000"),
        (lambda: WEIGHTS | {UP: WEIGHTS[UP][:, :90].copy()}, "times head_dim 24; the weights have 90"),
        (lambda: WEIGHTS | {UP: np.ones((512, 96), np.float16)}, "if the weights are right, it must be 512"),
    ],
)  # fmt: skip
def test_a_missing_or_unknown_tensor_is_named_with_what_is_there(tmp_path, weights, said):
    assert said in refusal(write_llama(tmp_path / "model", weights()))


def test_no_cause_is_named_that_was_not_checked(tmp_path):
    for i, weights in enumerate((without(UP), with_name("q_proj", "query"), without("model.norm"))):
        sentence = refusal(write_llama(tmp_path / str(i), weights()))
        assert not any(word in sentence for word in ("shard", "download", "another", "not of the model"))


@pytest.mark.parametrize("tied", [False, True])
def test_an_old_vocabulary_size_is_put_right_with_a_note(tmp_path, tied):
    weights = without("lm_head")() if tied else WEIGHTS
    folder = write_llama(tmp_path / "model", weights, vocab_size=2000, tie_word_embeddings=tied)
    plan = plan_checkpoint(folder)
    assert "config.json says vocab_size 2000, but the tokenizer has 2048 tokens and the embedding 2048 rows " in str(
        plan.notes
    )
    assert next(t.shape for t in plan.tensors if t.name == "token_embd.weight") == (2048, 96)
    assert plan.metadata["llama.vocab_size"].value == 2048


def test_rows_of_zeros_without_a_token_are_padding(tmp_path):
    weights = {
        name: np.concatenate([w, np.zeros((64, 96), np.float16)]) if w.shape == (2048, 96) else w
        for name, w in WEIGHTS.items()
    }
    report = bridge.convert(write_llama(tmp_path / "model", weights), tmp_path / "m.gguf")
    assert next(t.shape for t in report.tensors if t.name == "output.weight") == (2048, 96)
    assert not any("vocab_size" in note for note in report.notes)


def test_rows_of_the_embeddings_alone_are_not_the_vocabulary(tmp_path):
    embedding = "model.embed_tokens.weight"
    folder = write_llama(tmp_path / "model", WEIGHTS | {embedding: np.ones((2100, 96), np.float16)})
    assert f"{embedding} has shape [2100, 96], not [2048, 96]; config.json says vocab_size 2048" in refusal(folder)


def test_the_vocabulary_of_a_config_inside_is_put_right(tmp_path):
    from bridge.models.wrapper import with_text

    assert with_text({"vocab_size": 1}, vocab_size=2) == {"vocab_size": 2}
    inside = {"text_config": {"vocab_size": 1, "hidden_size": 3}, "vocab_size": 1}
    assert with_text(inside, vocab_size=2)["text_config"] == {"vocab_size": 2, "hidden_size": 3}


def test_sizes_are_looked_up_in_the_config_of_the_language_model_too():
    config = {
        "text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        "eos_token_id": 32,
    }
    assert sizes_of(config, 64) == ["hidden_size 64"]
    assert sizes_of(config, 32) == ["num_key_value_heads 2 of heads of 16"]


def test_a_key_of_the_wrong_kind_is_still_named(tmp_path):
    folder = write_llama(tmp_path / "model", WEIGHTS)
    edit_json(folder / "config.json", vocab_size="many")
    assert "vocab_size is 'many', must be a positive integer" in refusal(folder)
