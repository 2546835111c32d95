"""The GGUF in llama.cpp itself: it loads, reads text as the checkpoint's tokenizer does, and says the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.peers.gguf_file import gguf_weights
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax, mean_kl
from tests.conftest import predicting_checkpoints, shared
from tests.support.float_gguf import outline_of, write_gguf

CHECKPOINTS = predicting_checkpoints()
WINDOWS = 6  # of 256 tokens
TOP = 10
MAX_ROUNDING = 1e-3  # KL divergence that 8-bit activations may cost; 2e-4 to 6e-4 measured

TRICKY = (
    "it's  the cat's 3.14159 and 1234567 years;\n\n\n\tdef f(x):\r\n    return x**2  # ok?!\r\n"
    "Größe, naïve, Ελληνικά, Русский, 中文字符, 日本語, हिन्दी, עברית 👩‍🚀🎉 \u00a0\u2003 \n end   "
)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_llama_cpp_cuts_text_into_the_same_tokens(name: str, converted, reference_of) -> None:
    path, _ = converted(name)
    tokenizer = reference_of(name).tokenizer
    texts = [
        shared(f"text/{file}").read_text(encoding="utf-8")[:60000] for file in ("wiki_test.txt", "shakespeare_val.txt")
    ]
    special = f"{tokenizer.eos_token}text{tokenizer.eos_token}\n"
    with LlamaCpp(path) as model:
        assert model.vocab_size == len(tokenizer)
        for text in (*texts, TRICKY, special):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert model.tokenize(text) == ids
            assert model.tokenize(text, add_special=True) == tokenizer(text)["input_ids"]
            assert model.detokenize(ids) == text


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_llama_cpp_continues_a_text_as_the_checkpoint_does(name: str, converted, reference_of) -> None:
    """Greedy tokens are the checkpoint's first choices, or as good: 8-bit activations decide near-ties anew."""
    path, _ = converted(name)
    reference = reference_of(name)
    start = reference.tokens[0, :32].tolist()
    with LlamaCpp(path) as model:
        made = model.generate_greedy(start, 32)
    scores = log_softmax(reference.predict(reference.weights, np.array([start + made])))[0, len(start) - 1 : -1]
    behind = scores.max(-1) - scores[np.arange(len(made)), made]
    print(f"{name}: {(behind > 0).sum()} of {len(made)} tokens not the first choice, by at most {behind.max():.3f}")
    assert made
    assert behind.max() < 0.5
    assert (behind > 0).mean() <= 0.1


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_llama_cpp_predicts_what_the_checkpoint_predicts(name: str, converted, reference_of, tmp_path: Path) -> None:
    """Mean KL divergence from the checkpoint in transformers, of llama.cpp with

    file     the GGUF as it is: llama.cpp rounds activations to 8 bits before a quantized matrix
    twin     its dequantized weights as F32: no such rounding
    linears  its dequantized linears, all else the checkpoint's, as F16
    f16      the checkpoint as F16, which is the GGUF that goes through floats
    """
    path, _ = converted(name)
    reference = reference_of(name)
    tokens, expected = reference.tokens[:WINDOWS], reference.logits[:WINDOWS]
    weights = reference.unfold(gguf_weights(path))
    linears = reference.linears_of(weights)
    outline = outline_of(reference.folder, list(reference.weights))
    files = {
        "file": path,
        "twin": write_gguf(outline, weights, tmp_path / "twin.gguf"),
        "linears": write_gguf(outline, linears, tmp_path / "linears.gguf", np.float16),
        "f16": write_gguf(outline, reference.weights, tmp_path / "f16.gguf", np.float16),
    }
    found = {}
    for what, file in files.items():
        with LlamaCpp(file, n_ctx=tokens.shape[1]) as model:
            found[what] = np.stack([model.logits(window) for window in tokens.tolist()])
    kl = {what: mean_kl(expected, logits) for what, logits in found.items()}
    top = np.argsort(expected, -1)[..., -TOP:]
    error = np.abs(np.take_along_axis(log_softmax(found["file"]) - log_softmax(expected), top, -1))
    shown = ", ".join(f"{what} {value:.2e}" for what, value in kl.items())
    print(f"{name}: KL {shown}; top {TOP} log-probabilities off by {error.mean():.3f}, at most {error.max():.3f}")

    assert mean_kl(reference.predict(weights, tokens), found["twin"]) < 1e-9  # the same weights, the same model
    assert kl["linears"] <= 1.5 * (mean_kl(expected, reference.predict(linears, tokens)) + kl["f16"])
    assert mean_kl(found["twin"], found["file"]) <= MAX_ROUNDING
    assert error.mean() <= 0.1
