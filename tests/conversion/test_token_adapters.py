"""Adapters with rows of tokens (trainable_token_indices), and those of models whose vocabulary was resized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT
from tests.conversion.test_merge import head_and_embeddings
from tests.models.test_logits import divergence, reference_logits
from tests.support.adapters import Arrays, low_rank, write_adapter
from tests.support.family_models import copy_tokenizer, new_model, randomized

EMBEDDINGS, Q = "model.embed_tokens", "model.layers.0.self_attn.q_proj"
DELTA = "token_adapter.trainable_tokens_delta"
ROWS = np.random.default_rng(0).normal(0, 0.1, (3, 256)).astype(np.float32)
HEAD_ROWS = np.random.default_rng(1).normal(0, 0.1, (3, 256)).astype(np.float32)


def embeddings_of(checkpoint: Path) -> np.ndarray:
    with bridge.open_checkpoint(checkpoint) as opened:
        return opened.read_float(f"{EMBEDDINGS}.weight")


def with_rows(table: np.ndarray, tokens: list[int], rows: np.ndarray) -> np.ndarray:
    """The table, longer if tokens are beyond it."""
    longer = np.zeros((max(len(table), max(tokens) + 1), table.shape[1]), np.float32)
    longer[: len(table)] = table
    longer[tokens] = rows
    return longer


TIED = {  # tokens of the config, whether the file has rows of the embeddings and of the head -> tokens, rows of both
    "embeddings": ([3, 5, 9], True, False, ([3, 5, 9], ROWS, None)),
    "a dictionary of both, alike": ({"embed_tokens": [3, 5, 9], "lm_head": [3, 5, 9]}, True, False,
                                    ([3, 5, 9], ROWS, None)),
    "a dictionary of both": ({"embed_tokens": [3, 5, 9], "lm_head": [3, 5, 8]}, True, True,
                             ([3, 5, 9], ROWS, ([3, 5, 8], HEAD_ROWS))),
    "the head": ({"lm_head": [3, 5, 8]}, False, True, (None, None, ([3, 5, 8], HEAD_ROWS))),
}  # fmt: skip


@pytest.mark.parametrize("case", TIED)
def test_rows_of_tied_embeddings_are_the_heads_too_as_in_peft(case: str, tmp_path: Path) -> None:
    indices, has_rows, has_head, (tokens, rows, head) = TIED[case]
    tensors = ({f"{EMBEDDINGS}.{DELTA}": ROWS} if has_rows else {}) | (
        {f"lm_head.{DELTA}": HEAD_ROWS} if has_head else {}
    )
    adapter = write_adapter(tmp_path / "adapter", tensors, trainable_token_indices=indices)
    report = bridge.convert(
        CHECKPOINT, tmp_path / "out.gguf", merge=adapter, tensor_types=[("token_embd|output", "F32")]
    )
    table = embeddings_of(CHECKPOINT)
    embeddings, own_head = head_and_embeddings(tmp_path / "out.gguf")
    np.testing.assert_array_equal(embeddings, table if tokens is None else with_rows(table, tokens, rows))  # type: ignore[arg-type]
    assert (own_head is None) == (head is None)
    if head is not None:
        np.testing.assert_array_equal(own_head, with_rows(table, *head))
    carried = [t for t in report.tensors if t.kind.startswith(("attn_q", "ffn_"))]
    assert {t.outcome for t in carried if len(t.shape) == 2} == {"codes carried"}


def test_an_adapter_of_tokens_alone_has_its_own_kind(tmp_path: Path) -> None:
    """PEFT's TRAINABLE_TOKENS, which saves the rows of a tied head again."""
    tensors = {f"{name}.trainable_tokens_delta": ROWS for name in (EMBEDDINGS, "lm_head")}
    adapter = write_adapter(tmp_path / "adapter", tensors, peft_type="TRAINABLE_TOKENS", token_indices=[3, 5, 9])
    bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter, type="F32")
    embeddings, head = head_and_embeddings(tmp_path / "out.gguf")
    assert head is None
    np.testing.assert_array_equal(embeddings, with_rows(embeddings_of(CHECKPOINT), [3, 5, 9], ROWS))


def test_rows_of_a_model_with_a_head_are_a_gguf_adapter(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = randomized(new_model("glm4"))
    model.save_pretrained(tmp_path / "base", save_original_format=True)
    copy_tokenizer(tmp_path / "base")
    used = [5, 9, 20, 11, 3, 7]
    before = reference_logits(model, used)
    rows = {name: np.random.default_rng(i).normal(size=(2, 32)).astype(np.float32) for i, name in enumerate("eh")}
    with torch.no_grad():
        model.get_input_embeddings().weight[[9, 3]] = torch.tensor(rows["e"])
        model.get_output_embeddings().weight[[9, 8]] = torch.tensor(rows["h"])
    expected = reference_logits(model, used)
    adapter = write_adapter(
        tmp_path / "adapter", {f"{EMBEDDINGS}.{DELTA}": rows["e"], f"lm_head.{DELTA}": rows["h"]},
        trainable_token_indices={"embed_tokens": [9, 3], "lm_head": [9, 8]},
    )  # fmt: skip
    base, lora, merged = (tmp_path / f"{part}.gguf" for part in ("base-model", "lora", "merged"))
    bridge.convert(tmp_path / "base", base, tensor_types=[(".*", "F32")])
    bridge.convert(tmp_path / "base", merged, tensor_types=[(".*", "F32")], merge=adapter)
    changed = bridge.convert_lora(adapter, lora, base=tmp_path / "base")
    assert changed == ["token_embd.weight", "output.weight"]
    assert divergence(expected, before) > 0.01
    for path, of_path in ((base, lora), (merged, None)):
        with LlamaCpp(path, n_ctx=64, lora=of_path) as loaded:
            assert divergence(expected, loaded.logits(used)) < 1e-6
    own = bridge.Model.load(base, lora=lora, precision="f32", kv="f32").logits(used)
    assert divergence(expected, own) < 1e-6


def add_tokens(folder: Path, count: int) -> None:
    """The checkpoint's tokenizer with more tokens, as a user saves it beside the adapter."""
    copy_tokenizer(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] += [{"id": 2048 + i, "content": f"<new{i}>", "special": True, **flags} for i in range(count)]
    path.write_text(json.dumps(data), encoding="utf-8")


GROWN = np.random.default_rng(2).normal(0, 0.1, (2050, 256)).astype(np.float32)
RESIZED: dict[str, tuple[Arrays, dict[str, Any], bool]] = {  # and whether the embeddings get GROWN's old rows too
    "modules_to_save": (
        {f"{EMBEDDINGS}.modules_to_save.weight": GROWN, f"{EMBEDDINGS}.weight": GROWN, "lm_head.weight": GROWN},
        {}, True,
    ),
    "the base's own, resized": (
        {f"{EMBEDDINGS}.base_layer.weight": GROWN, **low_rank({Q: (256, 256)})}, {}, True
    ),
    "rows beyond the base's": ({f"{EMBEDDINGS}.{DELTA}": GROWN[2047:]},
                               {"trainable_token_indices": [2047, 2048, 2049]}, False),
    "rows of the base's own, resized": (
        {f"{EMBEDDINGS}.token_adapter.base_layer.weight": GROWN + 1, f"{EMBEDDINGS}.{DELTA}": GROWN},
        {"trainable_token_indices": [*range(2050)]}, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RESIZED)
def test_added_tokens_are_merged_with_the_adapters_tokenizer(case: str, tmp_path: Path) -> None:
    tensors, config, whole = RESIZED[case]
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    add_tokens(adapter, 2)
    report = bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter, type="F32")
    embeddings, head = head_and_embeddings(tmp_path / "out.gguf")
    assert head is None
    old = embeddings_of(CHECKPOINT)
    np.testing.assert_array_equal(embeddings, GROWN if whole else with_rows(old, [2047, 2048, 2049], GROWN[2047:]))
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-2:] == ["<new0>", "<new1>"]
    assert any("the tokenizer is that of the adapter" in note for note in report.notes)


REFUSED: dict[str, tuple[Arrays, dict[str, Any], str]] = {
    "a token far beyond": ({f"{EMBEDDINGS}.{DELTA}": ROWS}, {"trainable_token_indices": [3, 5, 5000]},
                           "has a row for token 5000, but not for each token from 2048 on: the base model has 2048"),
    "tokens twice": ({f"{EMBEDDINGS}.{DELTA}": ROWS}, {"trainable_token_indices": [3, 5, 5]}, "must be different"),
    "negative tokens": ({f"{EMBEDDINGS}.{DELTA}": ROWS}, {"trainable_token_indices": [3, 5, -1]}, "different integers"),
    "an empty list": ({f"{EMBEDDINGS}.{DELTA}": ROWS[:0]}, {"trainable_token_indices": []}, r"are \[\], must be"),
    "no tokens": ({f"{EMBEDDINGS}.{DELTA}": ROWS}, {}, f"the tokens of {EMBEDDINGS} are None"),
    "another number of tokens": ({f"{EMBEDDINGS}.{DELTA}": ROWS}, {"trainable_token_indices": [3, 5]},
                                 r"lists 2 tokens of model\.embed_tokens, the adapter has rows \[3, 256\]"),
    "another width": ({f"{EMBEDDINGS}.{DELTA}": ROWS[:, :128]}, {"trainable_token_indices": [3, 5, 9]},
                      r"is of shape \[2048, 128\], the base checkpoint has \[2048, 256\]|has shape \[10, 128\]"),
    "LoRA at once": ({f"{EMBEDDINGS}.{DELTA}": ROWS, f"{EMBEDDINGS}.lora_embedding_A": np.ones((4, 2048), "f4"),
                      f"{EMBEDDINGS}.lora_embedding_B": np.ones((256, 4), "f4")},
                     {"trainable_token_indices": [3, 5, 9]}, "changed by LoRA and by rows of tokens at once"),
    "biases of LoRA": ({"model.layers.0.self_attn.q_proj.lora_B.bias": ROWS[0]}, {"lora_bias": True},
                       "lora_bias is set: its layers add biases"),
    "prompts": ({"prompt_embeddings": ROWS}, {"peft_type": "PROMPT_TUNING"}, "it is no change of weights"),
    "LoHa": ({"q_proj.hada_w1_a": ROWS}, {"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA and TRAINABLE"),
    "LoftQ": (low_rank({"q_proj": (4, 4)}), {"init_lora_weights": "loftq"}, "it changed the base model's weights too"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_tokens_that_do_not_fit_are_refused_in_a_sentence(why: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[why]
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(BridgeError, match=message):
        bridge.convert(CHECKPOINT, tmp_path / "out.gguf", merge=adapter)


def test_a_gguf_adapter_and_a_gguf_have_no_place_for_what_merging_adds(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "rows", {f"{EMBEDDINGS}.{DELTA}": ROWS}, trainable_token_indices=[3, 5, 9])
    with pytest.raises(
        BridgeError, match=r"is also the head of the base model; .*convert the base checkpoint with merge"
    ):
        bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=CHECKPOINT)
    adapter = write_adapter(
        tmp_path / "grown", {f"{EMBEDDINGS}.modules_to_save.weight": GROWN, "lm_head.weight": GROWN}
    )
    bridge.convert(CHECKPOINT, tmp_path / "base.gguf")
    with pytest.raises(BridgeError, match="has tokens that the GGUF does not have"):
        bridge.convert(tmp_path / "base.gguf", tmp_path / "out.gguf", merge=adapter)
