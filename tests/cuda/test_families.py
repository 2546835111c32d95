"""Models of every architecture on CUDA: a prompt and steps give what the same walk in NumPy does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file.architectures import ARCHITECTURES
from bridge.runtime.config.decoder_config import Routing
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.layers.weights import read_weights
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.sampling import Sampler, Sampling, probabilities
from tests.runtime.test_lora import write_lora
from tests.support import ptx
from tests.support.family_models import MODELS
from tests.support.gpu.device import pretended_gpu
from tests.support.gpu.small_models import BLOCK_FIELDS, FIELDS, LEFT_TO_LLAMA_CPP, ON_THE_CPU, converted
from tests.support.make_families import GOLDENS, UNKNOWN

pytest.importorskip("torch")
pytest.importorskip("transformers")

LENGTH, STEPS = 40, 3  # longer than the small models' windows
TOKENS = np.random.default_rng(5).integers(0, 2048, LENGTH + STEPS).tolist()
# of block types, in which launches take parts of others along
IN_BLOCKS = [
    "deepseek3", "falcon-h1", "gemma3", "gemma4-moe", "gpt-oss", "llama4", "qwen3-next", "qwen3-vl-moe", "step35",
]  # fmt: skip


def check(path: Path) -> str:
    """The model's architecture, once its logits are right."""
    if (reason := ptx.unavailable()) is not None:
        pytest.skip(reason)
    with pretended_gpu(multiprocessors=4), bridge.Model.load(
        path, precision="f32", kv="f32", context=64, device="cuda"
    ) as model:  # fmt: skip
        prompt, decoder = model.logits(TOKENS[:LENGTH]), model._decoder
        decoder.cache.come_back_to(LENGTH)
        steps = np.array([decoder.next_scores(token).copy() for token in TOKENS[LENGTH:]])
        plain = NumpyMachine(read_weights(bridge.open_gguf(path), model.config), model.config, 64)
        expected = np.concatenate([plain.logits(plain.read(part)) for part in (TOKENS[:LENGTH], TOKENS[LENGTH:])])
        limit = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(np.concatenate([prompt, steps]), expected, rtol=0, atol=limit)
        assert decoder.kept([*TOKENS, 5]) == len(TOKENS)
        for length in (LENGTH, LENGTH - 1):  # where a prompt ends, and before its last token
            assert decoder.kept([*TOKENS[:length], 5]) == length
        decoder.cache.length = LENGTH
        np.testing.assert_array_equal(decoder.follow(TOKENS[LENGTH:]), steps)
        return model.config.arch


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted({*MODELS} - LEFT_TO_LLAMA_CPP - ON_THE_CPU))
def test_a_familys_logits_are_those_of_the_walk_in_numpy(name: str, tmp_path: Path) -> None:
    check(converted(name, tmp_path, "F32", **FIELDS.get(name, {})))


@pytest.mark.proof
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_so_are_those_of_block_types(name: str, tmp_path: Path) -> None:
    check(converted(name, tmp_path, "Q8_0", **BLOCK_FIELDS.get(name, {})))


@pytest.mark.proof
def test_what_states_became_in_a_prompt_that_failed_is_forgotten(tmp_path: Path, monkeypatch: Any) -> None:
    if (reason := ptx.unavailable()) is not None:
        pytest.skip(reason)
    import torch
    from bridge.cuda.product.products import Stack

    left = 7  # products, those of the first layer at least
    path = converted("lfm2", tmp_path, "F32")
    with pretended_gpu(), bridge.Model.load(path, precision="f32", kv="f32", context=64, device="cuda") as model:
        right, multiply = model.logits(TOKENS[:9], last=1), Stack.multiply
        decoder = model._decoder
        decoder.scores(TOKENS[:5], 1)
        with monkeypatch.context() as patch:

            def failing(*given: Any, **how: Any) -> Any:
                nonlocal left
                if not left:
                    raise torch.cuda.OutOfMemoryError
                left -= 1
                return multiply(*given, **how)

            patch.setattr(Stack, "multiply", failing)
            with pytest.raises(BridgeError, match="the model needs"):
                next(decoder.draw(TOKENS[:12], Sampler(Sampling(0)), 5))
        cached = decoder.kept(TOKENS[:8])
        token = next(decoder.draw(TOKENS[:9], sampler := Sampler(Sampling(0), logprobs=0), cached))
        assert sampler.probabilities is not None
        expected = probabilities(right[:1], [token], 0)[0].logprob
        assert sampler.probabilities.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["starcoder2", "gpt-oss", "jamba", "gemma3n"])
def test_all_is_uploaded_by_the_first_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured uploads nothing: biases, experts, states, streams."""
    path = converted(name, tmp_path, "F32")
    with pretended_gpu(multiprocessors=4), bridge.Model.load(path, context=64, device="cuda") as model:
        decoder = model.prepare()._decoder
        expected = decoder.next_scores(5)
        decoder.cache.length = 0
        monkeypatch.setattr("bridge.cuda.weights.upload", lambda *given: pytest.fail("uploaded again"))
        np.testing.assert_array_equal(decoder.next_scores(5), expected)


REFUSED = {
    "an adapter": (r"m.gguf: a model with an adapter \(LoRA\) cannot run on CUDA here; the CPU can \(device cpu\)", {}),
    "hidden": ("48 hidden features, which are not a multiple of 32, cannot", {"hidden_size": 48}),
    "delta attention": ("delta attention whose state decays by channel cannot run", {}),
    "heads": (r"4 heads over 2 of 20 with kv f32 cannot", {"head_dim": 20}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_is_refused_before_it_is_loaded(what: str, tmp_path: Path, monkeypatch: Any) -> None:
    message, fields = REFUSED[what]
    path = converted("kimi-linear" if what == "delta attention" else "seed-oss", tmp_path, "F32", **fields)
    lora = None
    if what == "an adapter":
        rows = bridge.open_gguf(path)["blk.0.attn_q.weight"].shape[0]
        pair = {"blk.0.attn_q.weight.lora_a": np.ones((2, 32)), "blk.0.attn_q.weight.lora_b": np.ones((rows, 2))}
        lora = write_lora(tmp_path / "l.gguf", {name: x.astype(np.float32) for name, x in pair.items()}, "seed_oss")
    monkeypatch.setattr("bridge.cuda.decoder.read_weights", lambda *given: pytest.fail("loaded"))
    options: dict[str, Any] = {"kv": "f32", "context": 64, "lora": lora}
    with pretended_gpu():
        with pytest.raises(BridgeError, match=message):
            bridge.Model.load(path, device="cuda", **options)
        model = bridge.Model.load(path, device="auto", **options)
        assert model.device == "cpu"
        assert model.note is not None
        assert re.search(message, model.note)


def test_experts_with_factors_that_nothing_applies_are_refused_before_they_are_loaded() -> None:
    """Those of down multiply the weights of experts, unless these multiply what is read."""
    from bridge.cuda.supported import check_supported

    down = QuantTensor("blk.0.ffn_down_exps.weight", "Q4_0", (2, 32, 32), np.zeros(2 * 32 * 18, np.uint8))
    down.factors = np.ones(2, np.float32) / 2
    file: Any = SimpleNamespace(values=lambda: [down], path="m.gguf")
    for before, hidden in ((True, 32), (False, 33)):
        config: Any = SimpleNamespace(routing=Routing(before=before), hidden=hidden, causal=True)
        with pytest.raises(BridgeError, match="33 hidden" if hidden == 33 else "weight, Q4_0 with factors, cannot run"):
            check_supported(file, config, "f16", "int8")


def test_every_architecture_is_among_them() -> None:
    goldens = [GOLDENS / f"{name}.json" for name in {*MODELS} - LEFT_TO_LLAMA_CPP - UNKNOWN]
    made = {json.loads(golden.read_text())["arch"] for golden in goldens} | {"bitnet", "nemotron_h"}
    # which have tests of their own, or the graph of another one, or do not run on CUDA
    others = {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "kimi-k3"}
    assert {*ARCHITECTURES} - made == others | {arch for arch, graph in ARCHITECTURES.items() if not graph.causal}


def test_an_encoder_is_refused() -> None:
    from bridge.cuda.supported import check_supported

    config: Any = SimpleNamespace(causal=False)
    file: Any = SimpleNamespace(path="m.gguf", values=list)
    with pytest.raises(BridgeError, match="attention both ways cannot run on CUDA here; the CPU can"):
        check_supported(file, config, "f16", "int8")
