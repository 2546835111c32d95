"""Models in the IQ and TQ types, made with llama.cpp's own quantizer, beside llama.cpp."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest

import bridge
from scripts.peers.gguf_file import rewrite
from scripts.peers.llama import ggml
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax
from tests.conftest import shared

pytest.importorskip("xllamacpp")

WINDOW = 256
# the types that llama.cpp makes models of; at fewer bits this small one predicts nothing
MIXTURES = {
    "IQ4_XS": ["IQ4_XS"] * 5 + ["IQ2_XS"],  # the latter takes ggml longest to write
    "IQ3": ["IQ3_S", "IQ3_XXS", "IQ4_NL"],
    "IQ2": ["IQ2_S", "IQ2_XXS", "IQ4_XS"],
    "UD": ["Q4_K", "IQ3_XXS", "IQ2_XS", "IQ1_S", "IQ4_XS", "IQ1_M", "TQ2_0"],
}


def mixture(types: list[str], out: Path) -> Path:
    """A small Llama whose matrices have these types in turn."""
    source = out.with_suffix(".f32.gguf")
    bridge.convert(shared("models/tiny-llama"), source, type="F32")
    turn = cycle(types)
    chosen = {t.name: next(turn) for t in gguf.GGUFReader(str(source)).tensors if len(t.shape) == 2}

    def data_of(tensor: gguf.ReaderTensor, type: str) -> np.ndarray:
        rows = tensor.data.reshape(-1, int(tensor.shape[0]))
        return ggml.quantize(rows, type, np.square(rows).mean(0))  # some types demand an importance

    rewrite(source, out, lambda t: chosen.get(t.name, str(t.tensor_type.name)), data_of, {})
    return out


@pytest.mark.parametrize(
    ("name", "windows", "limit"),
    [
        ("IQ4_XS", 2, 5e-3),  # the two programs round activations differently, which evens out over many tokens
        *(pytest.param(name, 32, 1e-3, marks=pytest.mark.exhaustive) for name in MIXTURES),
    ],
)
def test_a_mixture_of_iq_types_predicts_what_it_does_in_llama_cpp(
    name: str, windows: int, limit: float, tmp_path: Path, wiki_text: str
) -> None:
    path = mixture(MIXTURES[name], tmp_path / f"{name}.gguf")
    model = bridge.Model.load(path, context=WINDOW)
    assert {t.type for t in bridge.open_gguf(path).values()} == {"F32", *MIXTURES[name]}
    tokens = model.tokenizer.encode(wiki_text[: 2000 * windows])[: windows * WINDOW]
    losses, choices = [], []
    with LlamaCpp(path, n_ctx=WINDOW) as other:
        for window in np.array(tokens).reshape(windows, WINDOW).tolist():
            half = window[WINDOW // 2 + 1 :]
            both = [predict(window)[WINDOW // 2 : -1] for predict in (model.logits, other.logits)]
            losses.append([-log_softmax(rows)[np.arange(len(half)), half].mean() for rows in both])
            choices.append(np.equal(*(rows.argmax(1) for rows in both)).mean())
    own, peer = (math.exp(loss) for loss in np.mean(losses, 0))
    matrices = model._decoder._matrices
    assert all(m.prepared for m in matrices if m.type.startswith(("IQ1", "IQ2", "IQ3")))  # before the first token
    print(f"{name}: perplexity {own:.4f}, llama.cpp {peer:.4f}; same token {np.mean(choices):.1%}")
    assert own == pytest.approx(peer, rel=limit)
    assert np.mean(choices) > 0.95
