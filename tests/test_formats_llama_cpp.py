"""Every format that the shared checkpoints lack, written here from the small model: llama.cpp runs its GGUF.

What llama.cpp predicts on a text is near what transformers predicts with the checkpoint's weights in float, and
it goes on writing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import bridge
from tests.support.encode_compressed import write_float8, write_int8, write_mixed, write_packed
from tests.support.fidelity import Reference
from tests.support.llama_cpp import LlamaCpp
from tests.support.reference import mean_kl

# name -> (writes the checkpoint: folder, model folder; block types of its linears)
FORMATS: dict[str, tuple[Callable[[Path, Path], object], set[str]]] = {
    "compressed-tensors 2 bits": (partial(write_packed, bits=2, group_size=64, sym=False), {"Q2_K"}),
    "compressed-tensors 3 bits": (partial(write_packed, bits=3, by_words=True), {"Q3_K"}),
    "compressed-tensors 4 bits, channels": (partial(write_packed, bits=4, group_size=-1), {"Q4_K"}),
    "compressed-tensors 4 bits, act-order": (partial(write_packed, bits=4, act_order=True), {"Q4_K", "Q5_K"}),
    "compressed-tensors 5 bits": (partial(write_packed, bits=5, sym=False), {"Q5_K"}),
    "compressed-tensors 6 bits": (partial(write_packed, bits=6, by_words=True), {"Q6_K"}),
    "compressed-tensors 8 bits": (write_int8, {"Q8_0"}),
    "compressed-tensors mixed": (write_mixed, {"Q4_K", "Q8_0"}),
    "compressed-tensors FP8": (partial(write_float8, block=(1, 1 << 20)), {"Q8_0"}),
    "FP8": (partial(write_float8, block=(128, 128), method="fp8"), {"Q8_0"}),
}
LENGTH = 96
MAX_KL = 1e-3  # 8-bit activations and Q8_0 embeddings; 3e-4 to 6e-4 measured
MAX_KL_OF = {
    "compressed-tensors 2 bits": 5e-3,  # Q2_K's own scales allow no better than about 2e-3
    "compressed-tensors 4 bits, act-order": 4e-3,  # all but down_proj are rounded anew
}


@pytest.mark.parametrize("name", FORMATS)
def test_llama_cpp_goes_on_from_what_the_checkpoint_predicts(
    name: str, tmp_path: Path, model_folder, wiki_text
) -> None:
    write, types = FORMATS[name]
    folder, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    write(folder, model_folder)
    report = bridge.convert(folder, path)
    linears = [t for t in report.tensors if ".attn_" in t.name or ".ffn_" in t.name]
    assert {t.type for t in linears if len(t.shape) == 2} == types
    with bridge.open_checkpoint(folder) as checkpoint:
        reference = Reference(folder, checkpoint, wiki_text, n=1, length=LENGTH)
    start = reference.tokens[0].tolist()
    with LlamaCpp(path) as model:
        predicted = model.logits(start)
        made = model.generate_greedy(start[:32], 8)
    kl = mean_kl(reference.logits, np.asarray(predicted)[None])
    print(f"{name}: KL {kl:.1e}, {sorted(types)}, {report.bpw():.2f} bpw, makes {made}")
    assert kl < MAX_KL_OF.get(name, MAX_KL)
    assert made
