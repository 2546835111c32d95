"""Models beside transformers and llama.cpp: the same weights must give the same predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bridge
from bridge.blocks import BLOCKS
from bridge.errors import BridgeError
from bridge.nn import torch_ops
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from bridge.runtime.replies.perplexity import perplexity
from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax, mean_kl
from scripts.peers.reference import hf_model, logits
from tests.conftest import ROOT, checkpoint_names, shared
from tests.models.test_logits import COMMON, LENGTH, MODELS, OWN_LENGTH, random_model, reference_logits
from tests.models.test_logits import FIELDS as OF_LOGITS
from tests.support.family_models import ALL_BLOCKS, copy_tokenizer, new_model, randomized
from tests.support.family_models import MODELS as FAMILIES
from tests.support.float_gguf import outline_of, write_gguf
from tests.support.random_blocks import random_matrix

torch = pytest.importorskip("torch")

WINDOWS, WINDOW = 3, 256
LEFT_TO_LLAMA_CPP = {
    "deepseek4", "dots3-note", "glm5-next", "hy-v4", "qwen4exp",
}  # fmt: skip
FIELDS = OF_LOGITS | {"minimax-m3": ALL_BLOCKS}
LIMITS = {
    "deepseek2-lite": (1e-3, 1e-3, 1e-3), "deepseek3": (1e-6, 1e-6, 1e-5), "glm4-moe-lite": (1e-6, 1e-6, 1e-5),
    "youtu": (1e-6, 1e-6, 1e-5),
    "mistral4": (1e-6, 1e-6, 1e-5), "deepseek3.2": (1e-6, 1e-6, 1e-5), "glm5": (1e-6, 1e-6, 1e-5),
    "gemma4": (1e-6, 1e-6, 1e-5), "gemma3n": (1e-6, 1e-6, 1e-5),
    "phimoe": (math.inf, 1e-8, 1e-5),  # llama.cpp computes something else
}  # fmt: skip
ROUNDED_FAR = {"deepseek3.2", "gemma4-moe", "laguna", "laguna-m", "mimo2", "step35"}
CHECKPOINTS = [name for name in checkpoint_names() if "-ct-" not in name]
SOME = [
    pytest.param(name, marks=[] if name.endswith("3bit-g128-sym") else [pytest.mark.exhaustive])
    for name in CHECKPOINTS
    if name.endswith(("gptq-4bit-g128-sym", "3bit-g128-sym", "g64-asym-v2"))
]


def second_halves(windows: np.ndarray, predict: Callable[[list[int]], np.ndarray]) -> float:
    """Perplexity over positions n/2 .. n-2 of each window."""
    losses = []
    for window in windows.tolist():
        scores = log_softmax(predict(window)[WINDOW // 2 : -1])
        losses.append(-scores[np.arange(len(scores)), window[WINDOW // 2 + 1 :]])
    return math.exp(np.concatenate(losses).mean())


@pytest.mark.parametrize("name", SOME)
def test_perplexity_is_that_of_llama_cpp_and_of_transformers(name: str, converted, wiki_text: str) -> None:
    path, _ = converted(name)
    folder = shared(f"checkpoints/{name}")
    model = bridge.Model.load(path, context=WINDOW)
    tokens = model.tokenizer.encode(wiki_text[:20000])
    windows = np.array(tokens[: WINDOWS * WINDOW]).reshape(WINDOWS, WINDOW)
    own = perplexity(model, wiki_text[:20000], WINDOW, WINDOWS).perplexity
    exact = perplexity(bridge.Model.load(path, precision="f32"), wiki_text[:20000], WINDOW, WINDOWS).perplexity
    with LlamaCpp(path, n_ctx=WINDOW) as other:
        peer = second_halves(windows, other.logits)
    reference = hf_model(folder, gguf_weights(path))
    floats = second_halves(windows, lambda window: logits(reference, np.array([window]))[0])
    print(f"{name}: {own:.4f}, llama.cpp {peer:.4f}; f32 {exact:.4f}, transformers {floats:.4f}")
    assert own == pytest.approx(peer, rel=4e-3)  # 0.2% over 64 windows; these are 3
    assert exact == pytest.approx(floats, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_variant_of_the_decoder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference, weights = random_model(*MODELS[name], tmp_path)
    path = write_gguf(outline_of(tmp_path, set(weights)), weights, tmp_path / "model.gguf")
    tokens = np.random.default_rng(1).integers(0, COMMON["vocab_size"], LENGTH).tolist()
    model = bridge.Model.load(path, precision="f32", kv="f32")
    expected = reference_logits(reference, tokens)
    assert mean_kl(expected, model.logits(tokens)) < 1e-9
    decoder = model._decoder
    decoder.cache.length = 0
    single = [decoder.logits(decoder.run([token]))[0] for token in tokens[:8]]
    assert mean_kl(expected[:8], np.array(single)) < 1e-9


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_layers_with_a_window_rotate_without_the_scaling_of_others_in_mimo(scaling: str, tmp_path: Path) -> None:
    local = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334}
    scaled = local | {"rope_type": scaling, "factor": 4.0, "original_max_position_embeddings": 64}
    rules = {"full_attention": scaled, "sliding_attention": local}
    reference = randomized(new_model("mimo2", rope_parameters=rules))
    reference.save_pretrained(tmp_path / "model", save_original_format=True)
    bridge.convert(copy_tokenizer(tmp_path / "model"), tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    tokens = np.random.default_rng(1).integers(0, 2048, LENGTH).tolist()
    model = bridge.Model.load(tmp_path / "m.gguf", precision="f32", kv="f32", context=LENGTH)
    assert mean_kl(reference_logits(reference, tokens), model.logits(tokens)) < 1e-8


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
        {"num_attention_heads": 8, "num_sliding_attention_heads": 4, "num_key_value_heads": 1},
        {"layer_types": 5 * ["sliding_attention"], "swiglu_limits": None},
    ],
    ids=["layers without experts between others", "fewer heads with a window", "windows alone"],
)
def test_other_models_of_step_are_those_of_llama_cpp(changes: dict, tmp_path: Path) -> None:
    """Over more positions than are attended to at once."""
    text = FAMILIES["step35"][1]["text_config"] | {"max_position_embeddings": 512} | changes
    randomized(new_model("step35", text_config=text)).save_pretrained(tmp_path / "model", save_original_format=True)
    bridge.convert(
        copy_tokenizer(tmp_path / "model"), tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="none"
    )
    tokens = np.random.default_rng(1).integers(0, 2048, 300).tolist()
    with LlamaCpp(tmp_path / "m.gguf", n_ctx=320) as other:
        peer = other.logits(tokens)
    model = bridge.Model.load(tmp_path / "m.gguf", precision="f32", kv="f32", context=320)
    assert mean_kl(peer, model.logits(tokens)) < 1e-9
    decoder = model._decoder
    decoder.prepare()
    decoder.cache.length = 0
    decoder.run(tokens[:250])
    steps = np.array([decoder.next_scores(token).copy() for token in tokens[250:]])
    assert mean_kl(peer[250:], steps) < 1e-9


@pytest.mark.parametrize("name", sorted({*FAMILIES} - LEFT_TO_LLAMA_CPP))
def test_a_familys_graph_is_that_of_llama_cpp_and_of_transformers(name: str, tmp_path: Path) -> None:
    """The same predictions on floats; on blocks token by token what a prompt gives, and llama.cpp's perplexity."""
    reference = randomized(new_model(name, **FIELDS.get(name, {})))
    reference.save_pretrained(tmp_path / "model", save_original_format=True)
    copy_tokenizer(tmp_path / "model")
    tokens = np.random.default_rng(1).integers(0, 2048, LENGTH).tolist()

    def made(type: str) -> tuple[Path, np.ndarray]:
        path = tmp_path / f"{type}.gguf"
        bridge.convert(tmp_path / "model", path, tensor_types=[(".*", type)], mmproj_type="none")
        with LlamaCpp(path, n_ctx=LENGTH) as other:
            return path, other.logits(tokens)

    path, peer = made("F32")
    model = bridge.Model.load(path, precision="f32", kv="f32", context=LENGTH)
    floats = model.logits(tokens)
    plain = NumpyMachine(model._decoder.weights, model.config, LENGTH)
    parts = [plain.logits(plain.read(part)) for part in (tokens[:-3], tokens[-3:-2], tokens[-2:])]
    np.testing.assert_allclose(np.concatenate(parts), floats, atol=1e-4 * np.abs(floats).max())
    # the matrices that make keys of latents, or inputs of layers, are F16; 27 layers carry that far
    of_peer, of_floats, of_steps = LIMITS.get(name, (1e-6, 1e-8, 1e-5))
    assert mean_kl(peer, floats) < of_peer
    few = OWN_LENGTH.get(name, LENGTH)
    assert mean_kl(reference_logits(reference, tokens[:few]), floats[:few]) < of_floats
    path, peer = made("Q8_0")
    model = bridge.Model.load(path, kv="f32", context=LENGTH)
    prompt = model.logits(tokens)
    losses = [-log_softmax(rows[:-1])[np.arange(LENGTH - 1), tokens[1:]].mean() for rows in (prompt, peer)]
    # weights of no training carry rounding far, states and some experts farther
    far = 0.1 if name in ROUNDED_FAR or model.config.recurrent is not None else 1e-2
    assert math.isinf(of_peer) or losses[0] == pytest.approx(losses[1], abs=far)
    decoder = model._decoder
    decoder.prepare()
    decoder.cache.length = 0
    assert mean_kl(prompt, np.array([decoder.next_scores(token).copy() for token in tokens])) < of_steps


@pytest.mark.parametrize("name", CHECKPOINTS[:1] + CHECKPOINTS[-1:])
def test_a_models_tokens_are_those_of_llama_cpp(name: str, converted, wiki_text: str) -> None:
    path, _ = converted(name)
    tokenizer = bridge.Model.load(path).tokenizer
    with LlamaCpp(path) as other:
        for text in (wiki_text[:40000], "  two\n\n\tthree<|endoftext|><|end_of_text|> 日本語 🙂", "", " "):
            for special in (False, True):
                for parse in (False, True):
                    assert tokenizer.encode(text, special, parse) == other.tokenize(text, special, parse)
            assert tokenizer.decode(tokenizer.encode(text), special=True) == text
        assert {t for t in range(len(tokenizer)) if other._lib.llama_vocab_is_eog(other._vocab, t)} == tokenizer.stops


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_gguf_under_a_transformers_model_predicts_what_its_weights_do(arch: str, converted) -> None:
    name = f"{arch}-gptq-4bit-g128-sym"
    path, _ = converted(name)
    weights = gguf_weights(path)
    reference = hf_model(shared(f"checkpoints/{name}"), weights)
    zeros = {key: np.zeros_like(values) for key, values in weights.items()}
    replaced = bridge.nn.replace_linears(hf_model(shared(f"checkpoints/{name}"), zeros), path, precision="f32")
    tokens = torch.randint(0, 2000, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(tokens).logits.numpy()
        assert mean_kl(expected, replaced(tokens).logits.numpy()) < 1e-9
        integer = bridge.nn.replace_linears(hf_model(shared(f"checkpoints/{name}"), zeros), path)
        assert mean_kl(expected, integer(tokens).logits.numpy()) < 1e-3
    made = [m.generate(tokens[:1], max_new_tokens=6, do_sample=False).tolist() for m in (reference, replaced)]
    assert made[0] == made[1]


def test_a_quantized_linear_is_a_linear(tmp_path: Path) -> None:
    bridge.convert(ROOT / "tests/data/qwen3-gptq-4bit-g128-sym", tmp_path / "m.gguf")
    tensor = bridge.open_gguf(tmp_path / "m.gguf")["blk.0.ffn_up.weight"]
    bias = torch.randn(tensor.shape[0])
    order = np.random.default_rng(0).permutation(tensor.shape[0])
    layer = bridge.nn.QuantLinear(tensor, bias, order, precision="f32")
    x = torch.randn(2, 3, tensor.shape[1])
    expected = torch.nn.functional.linear(x, torch.from_numpy(tensor.dequantize()[order]), bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(x[0, 0]), expected[0, 0], rtol=1e-4, atol=1e-4)
    assert layer(x.half()).dtype == torch.float16
    with pytest.raises(BridgeError, match=r"blk.0.ffn_up.weight: x has shape \[2, 255\]; must be \[..., 256\]"):
        layer(torch.ones(2, 255))
    norm = bridge.open_gguf(tmp_path / "m.gguf")["output_norm.weight"]
    with pytest.raises(BridgeError, match=r"output_norm.weight: is not a matrix"):
        bridge.nn.QuantLinear(norm)


@pytest.mark.parametrize("tokens", [1, 5])
def test_gradients_pass_through_a_quantized_linear(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "_TILE", 600)  # two rows, and one that is left
    tensor, weights = random_matrix(BLOCKS["Q4_K"], 5, 256)
    order, bias = np.array([3, 0, 4, 1, 2]), torch.linspace(-1, 1, 5)
    weight = torch.from_numpy(weights[order]).float()
    layer = bridge.nn.QuantLinear(tensor, bias, order, precision="f32")
    x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).sigmoid().sum(), x, create_graph=True)[0]
    (found,) = torch.autograd.grad(layer(x).sigmoid().sum(), x, create_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    again = [torch.autograd.grad(first.square().sum(), x)[0] for first in (found, expected)]  # the gradient's own
    torch.testing.assert_close(*again, rtol=1e-4, atol=1e-5 * max(1.0, float(again[1].abs().max())))
    half = x.detach().bfloat16().requires_grad_()
    bridge.nn.QuantLinear(tensor)(half).sum().backward()
    assert half.grad is not None
    torch.testing.assert_close(half.grad, weight.sum(0).expand(tokens, -1).bfloat16(), rtol=0.01, atol=1e-3)
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_gguf_of_another_model_is_refused(tmp_path: Path) -> None:
    import transformers

    bridge.convert(ROOT / "tests/data/qwen3-gptq-4bit-g128-sym", tmp_path / "m.gguf")
    config = transformers.Qwen3Config(**(COMMON | {"num_hidden_layers": 4}))
    with pytest.raises(BridgeError, match=r"token_embd.weight: is \[2048, 256\] in the GGUF, but \[300, 64\] by "):
        bridge.nn.replace_linears(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "m.gguf")
    config = transformers.AutoConfig.from_pretrained(ROOT / "tests/data/qwen3-gptq-4bit-g128-sym")
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config)
    bridge.nn.replace_linears(model, tmp_path / "m.gguf", prepare=False)
    with pytest.raises(BridgeError, match=r"Qwen3ForCausalLM: has a GGUF's weights already; .* anew for .*m.gguf"):
        bridge.nn.replace_linears(model, tmp_path / "m.gguf")
    config.num_hidden_layers, config.layer_types = 6, ["full_attention"] * 6
    with pytest.raises(BridgeError, match=r"m.gguf: has 4 layers, the model's config 6"):
        bridge.nn.replace_linears(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "m.gguf")
