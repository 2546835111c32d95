"""Adapters in the CPU runtime: a model and its adapter are the merged model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.layers.lora import add_adapter
from bridge.runtime.reader import open_gguf
from tests.conftest import CHECKPOINT
from tests.support.adapters import Arrays, low_rank, write_adapter
from tests.support.family_models import copy_tokenizer, new_model, randomized
from tests.support.tiny_gguf import write_decoder

TOKENS = [5, 9, 20, 11, 3, 7]
SHAPES = {
    "blk.0.attn_q": (64, 32), "blk.0.attn_k": (32, 32), "blk.0.attn_v": (32, 32), "blk.0.attn_output": (32, 64),
    "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
}  # fmt: skip


def pairs(shapes: Mapping[str, tuple[int, int]], r: int = 3) -> Arrays:
    """a and b of tensors of these shapes, by their names in an adapter's GGUF."""
    found = low_rank(shapes, r)
    return {n.replace(".lora_A.weight", ".weight.lora_a").replace(".lora_B.weight", ".weight.lora_b"): w
            for n, w in found.items()}  # fmt: skip


def write_lora(path: Path, tensors: Arrays, arch: str = "llama", alpha: object = 6.0, type: str = "adapter") -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_type(type)
    writer.add_string("adapter.type", "lora")
    if isinstance(alpha, float):
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge(path: Path, changes: Mapping[str, np.ndarray]) -> Path:
    """The GGUF of floats with these changes added to its tensors."""
    out = Path(shutil.copy(path, path.with_name("merged.gguf")))
    for tensor in gguf.GGUFReader(str(out), "r+").tensors:
        if tensor.name in changes:
            tensor.data[:] += changes[tensor.name]
    return out


def decoder(path: Path, lora: Path | None = None) -> Decoder:
    file = open_gguf(path)
    if lora is not None:
        add_adapter(file, open_gguf(lora))
    return Decoder(file, read_config(file.metadata, path), 32, "f32", "f32")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_decoder(tmp_path / "base.gguf", types={"": "F32"})


@pytest.mark.parametrize("alpha", [6.0, 0.0])
def test_a_model_and_its_adapter_are_the_merged_model(alpha: float, base: Path, tmp_path: Path) -> None:
    """In every matrix, the embeddings' and the head's included; alpha 0 means a scale of 1."""
    tensors = pairs(SHAPES | {"output": (32, 32)})
    of_tokens = pairs({"token_embd": (32, 32)})
    a, b = of_tokens["token_embd.weight.lora_b"], of_tokens["token_embd.weight.lora_a"].T
    stored = tensors | {"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": np.ascontiguousarray(b)}
    lora = write_lora(tmp_path / "lora.gguf", stored, alpha=alpha)
    scale = alpha / 3 if alpha else 1.0
    changes = {n.removesuffix(".lora_b"): scale * w @ tensors[n[:-1] + "a"] for n, w in tensors.items() if n[-1] == "b"}
    whole = merge(base, changes | {"token_embd.weight": scale * a @ b.T})
    adapted, merged = decoder(base, lora), decoder(whole)
    scores = adapted.scores(TOKENS, len(TOKENS))
    np.testing.assert_allclose(scores, merged.scores(TOKENS, len(TOKENS)), rtol=1e-4, atol=1e-4)
    assert np.abs(scores - decoder(base).scores(TOKENS, len(TOKENS))).max() > 0.1
    np.testing.assert_allclose(adapted.next_scores(4), merged.next_scores(4), rtol=1e-4, atol=1e-4)


def test_single_tokens_and_repacked_weights_keep_the_adapter(tmp_path: Path) -> None:
    """Types of blocks run as one table of calls without an adapter."""
    path = write_decoder(tmp_path / "base.gguf")
    adapted = decoder(path, write_lora(tmp_path / "lora.gguf", pairs(SHAPES)))
    together = adapted.scores(TOKENS, 1)[0]
    for prepared in (False, True):
        if prepared:
            adapted.prepare()
        adapted.cache.length = 0
        for token in TOKENS:
            one = adapted.next_scores(token)
        np.testing.assert_allclose(one, together, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_the_head_alone_changes_single_tokens(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "base.gguf")
    adapted = decoder(path, write_lora(tmp_path / "lora.gguf", pairs({"output": (32, 32)})))
    together = adapted.scores([5, 9], 1)[0]
    adapted.cache.length = 0
    adapted.next_scores(5)
    np.testing.assert_allclose(adapted.next_scores(9), together, rtol=1e-4, atol=1e-4)


def test_rows_of_a_matrix_take_their_part_of_the_change(base: Path, tmp_path: Path) -> None:
    file = open_gguf(base)
    add_adapter(file, open_gguf(write_lora(tmp_path / "lora.gguf", pairs(SHAPES))))
    whole = file["blk.0.attn_q.weight"]
    part = whole.slice_rows(8, 24)
    x = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    np.testing.assert_allclose(part.matmul(x, precision="f32"), whole.matmul(x, precision="f32")[:, 8:24], rtol=1e-5)
    # a BLAS may sum the product of one row in another order than that of all: the last bit
    np.testing.assert_allclose(whole.rows([3])[0], whole.dequantize()[3], rtol=0, atol=1e-7)


def without(tensors: Arrays, name: str) -> Arrays:
    return {n: t for n, t in tensors.items() if n != name}


Q = pairs({"blk.0.attn_q": (64, 32)})
A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another architecture": (lambda p: write_lora(p, Q, "qwen3"), "it is for qwen3, the model is llama"),
    "other shapes": (
        lambda p: write_lora(p, pairs({"blk.0.attn_q": (64, 64)})),
        r"is a change of shape \[64, 64\], the model has \[64, 32\]",
    ),
    "a layer that is missing": (
        lambda p: write_lora(p, pairs({"blk.7.attn_q": (64, 32)})),
        r"changes blk\.7\.attn_q\.weight, which the model does not have",
    ),
    "ranks that differ": (lambda p: write_lora(p, Q | {A: np.ones((2, 32), np.float32)}), "which do not multiply"),
    "three dimensions": (lambda p: write_lora(p, Q | {B: np.ones((1, 64, 3), np.float32)}), "which do not multiply"),
    "half a pair": (lambda p: write_lora(p, without(Q, A)), "has no lora_a"),
    "not finite": (lambda p: write_lora(p, Q | {B: np.full((64, 3), np.nan, np.float32)}), "not finite"),
    "no alpha": (lambda p: write_lora(p, Q, alpha=None), r"adapter\.lora\.alpha is None"),
    "alpha that is infinite": (lambda p: write_lora(p, Q, alpha=float("inf")), r"adapter\.lora\.alpha is inf"),
    "a norm": (
        lambda p: write_lora(p, {n.replace("attn_q", "attn_norm"): t for n, t in Q.items()}),
        r"attn_norm\.weight, which is not a matrix",
    ),
    "another tensor": (lambda p: write_lora(p, Q | {"rope": np.ones(4, np.float32)}), "rope is not a tensor of a LoRA"),
    "a model": (write_decoder, "is not an adapter"),
    "another type": (lambda p: write_lora(p, Q, type="model"), "is not an adapter"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_in_a_sentence(why: str, base: Path, tmp_path: Path) -> None:
    write, message = REFUSED[why]
    with pytest.raises(BridgeError, match=message):
        add_adapter(open_gguf(base), open_gguf(write(tmp_path / "lora.gguf")))


def test_embeddings_that_are_also_the_head_are_not_changed(tmp_path: Path) -> None:
    tied = open_gguf(write_decoder(tmp_path / "tied.gguf", tied=True))
    tensors = {"token_embd.weight.lora_a": np.ones((32, 3), np.float32),
               "token_embd.weight.lora_b": np.ones((32, 3), np.float32)}  # fmt: skip
    with pytest.raises(BridgeError, match=r"is also the model's head; .*convert the base checkpoint with merge"):
        add_adapter(tied, open_gguf(write_lora(tmp_path / "lora.gguf", tensors)))


EXPERTS = {"ffn_gate_exps": (4, 32, 32), "ffn_up_exps": (4, 32, 32), "ffn_down_exps": (4, 32, 32)}


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_experts_are_changed_one_by_one(type: str, tmp_path: Path) -> None:
    """In prompts, in steps, and in the machine made of NumPy; those of blocks run as one table without an adapter."""
    pytest.importorskip("transformers")
    model = randomized(new_model("glm4-moe", moe_intermediate_size=32, num_hidden_layers=2))
    model.save_pretrained(tmp_path / "model", save_original_format=True)
    bridge.convert(copy_tokenizer(tmp_path / "model"), tmp_path / "base.gguf", tensor_types=[(".*", type)])
    rng, stored, changes = np.random.default_rng(0), Arrays(), Arrays()
    for name, (experts, out, columns) in EXPERTS.items():
        tensor = f"blk.1.{name}.weight"
        a, b = rng.normal(size=(experts, 3, columns)) / 6, rng.normal(size=(experts, out, 3))
        stored |= {f"{tensor}.lora_a": a.astype(np.float32), f"{tensor}.lora_b": b.astype(np.float32)}
        changes[tensor] = 2 * (b @ a)
    lora = write_lora(tmp_path / "lora.gguf", stored, arch="glm4moe")
    adapted, plain = decoder(tmp_path / "base.gguf", lora), decoder(tmp_path / "base.gguf")
    scores = adapted.scores(TOKENS, len(TOKENS))
    assert np.abs(scores - plain.scores(TOKENS, len(TOKENS))).max() > 0.1
    bridge.convert(tmp_path / "base.gguf", tmp_path / "floats.gguf", tensor_types=[(".*", "F32")])
    of_merged = decoder(merge(tmp_path / "floats.gguf", changes)).scores(TOKENS, len(TOKENS))
    np.testing.assert_allclose(scores, of_merged, rtol=1e-3, atol=1e-3)
    machine = NumpyMachine(adapted.weights, adapted.config, 32)
    np.testing.assert_allclose(machine.logits(machine.read(TOKENS)), scores, rtol=1e-3, atol=1e-3)
    adapted.prepare()
    adapted.cache.length = 0
    for token in TOKENS:
        one = adapted.next_scores(token)
    np.testing.assert_allclose(one, scores[-1], rtol=1e-3, atol=1e-3)


def test_a_change_of_other_experts_is_refused(base: Path, tmp_path: Path) -> None:
    file = open_gguf(base)
    file["blk.0.ffn_up.weight"].shape = (2, 16, 32)
    name = "blk.0.ffn_up.weight"
    for experts, out, message in ((3, 16, r"\[3, 16, 32\], the model has \[2, 16, 32\]"), (2, 8, r"\[2, 8, 32\]")):
        pair = {f"{name}.lora_a": np.ones((experts, 3, 32), "f4"), f"{name}.lora_b": np.ones((experts, out, 3), "f4")}
        with pytest.raises(BridgeError, match=rf"is a change of shape {message}"):
            add_adapter(file, open_gguf(write_lora(tmp_path / "lora.gguf", pair)))
    with pytest.raises(BridgeError, match="which do not multiply"):
        add_adapter(file, open_gguf(write_lora(tmp_path / "lora.gguf", pairs({"blk.0.ffn_up": (32, 32)}))))


def test_commands_and_python_take_what_convert_lora_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q = "model.layers.0.self_attn.q_proj"
    adapter = write_adapter(tmp_path / "adapter", {n: 20 * t for n, t in low_rank({q: (256, 256)}).items()})
    path, lora = tmp_path / "model.gguf", tmp_path / "lora.gguf"
    bridge.convert(CHECKPOINT, path)
    bridge.convert_lora(adapter, lora, base=CHECKPOINT)
    plain, adapted = bridge.Model.load(path), bridge.Model.load(path, lora=lora)
    tokens = plain.tokenizer.encode("The tower is")
    assert np.abs(plain.logits(tokens) - adapted.logits(tokens)).max() > 0.1
    (tmp_path / "text.txt").write_text("The tower is 324 metres tall. " * 100)
    measure = ["perplexity", str(path), "-f", str(tmp_path / "text.txt"), "--length", "64", "--windows", "1"]
    assert main(measure) == main([*measure, "--lora", str(lora)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[1] != second.split()[1]
    reply = "".join(adapted.generate("The tower is", 8, temperature=0))
    run = ["run", str(path), "--lora", str(lora), "-p", "The tower is", "-n", "8", "--temperature", "0"]
    assert main(run) == 0
    assert capsys.readouterr().out == f"The tower is{reply}\n"
