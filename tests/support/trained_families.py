"""Compares perplexities of small trained models of all families with llama.cpp's and transformers'; prints a table.

    python -m tests.support.trained_families --train calib_wiki.txt --text wiki_test.txt [FAMILY ...]

The models are those of family_models.py, trained for --steps steps of 8 windows on the tokens of --train: weights that
no one trained amplify what rounding differs. Perplexities are over the second halves of --windows windows of --text.
The F32 file runs with float activations and float keys and values on both sides, the Q8_0 file with activations of 8
bits on both.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from scripts.benchlib import Lines, bench, option
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import log_softmax
from tests.conftest import CHECKPOINT
from tests.support.family_models import ALL_BLOCKS, MODELS, copy_tokenizer, new_model

LENGTH = 96  # tokens of a window: more than the small models' windows of attention
_TOGETHER = 8  # windows in a step of the training
LITE = {"num_hidden_layers": 27}  # llama.cpp knows DeepSeek V2 Lite by its layers
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek2-lite": LITE,
    "gemma3n": {"intermediate_size": 4096},  # a deviation over n values there, over n - 1 in llama.cpp
    "phi3": {"sliding_window": None},  # llama.cpp applies none
    "minimax-m3": ALL_BLOCKS,
}
LLAMA_CPP_DIFFERS = {"phimoe", "hy-v4"}  # see docs/checkpoints.md


@dataclass(frozen=True)
class Found:
    """Perplexities: of transformers, and of both runtimes on the F32 and the Q8_0 file."""

    floats: float
    ours: float
    theirs: float
    ours_q8: float
    theirs_q8: float

    def worst(self) -> float:
        """The largest difference from llama.cpp, as a share."""
        return max(abs(self.ours / self.theirs - 1), abs(self.ours_q8 / self.theirs_q8 - 1))


def windows_of(text: str, count: int) -> np.ndarray:
    """int64 [count, LENGTH] of a text's tokens."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(CHECKPOINT)(text, add_special_tokens=False)["input_ids"]
    found = np.array(tokens[: count * LENGTH])
    return found.reshape(count, LENGTH)


def train(model: Any, windows: np.ndarray, steps: int) -> None:
    """AdamW; the rate falls as a cosine."""
    import torch

    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    tokens = torch.from_numpy(windows)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (_TOGETHER,))]
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def perplexity(windows: np.ndarray, predict: Callable[[list[int]], np.ndarray]) -> float:
    """Over the second half of each window."""
    losses = []
    for window in windows.tolist():
        scores = log_softmax(predict(window)[LENGTH // 2 : -1])
        losses.append(-scores[np.arange(len(scores)), window[LENGTH // 2 + 1 :]])
    return math.exp(np.concatenate(losses).mean())


def measured(name: str, learned: np.ndarray, tested: np.ndarray, steps: int, folder: Path) -> Found:
    """A family's small model, trained, in transformers and in both runtimes."""
    import torch

    model = new_model(name, **FIELDS.get(name, {}))
    train(model, learned, steps)
    model.save_pretrained(folder / "model", save_original_format=True)
    copy_tokenizer(folder / "model")

    @torch.no_grad()
    def reference(window: list[int]) -> np.ndarray:
        return np.asarray(model(torch.tensor([window])).logits[0].float())

    found = [perplexity(tested, reference)]
    for type, precision in (("F32", "f32"), ("Q8_0", "int8")):
        path = folder / f"{type}.gguf"
        bridge.convert(folder / "model", path, tensor_types=[(".*", type)], mmproj_type="none")
        with bridge.Model.load(path, precision=precision, kv="f32", context=LENGTH) as own:
            found.append(perplexity(tested, own.logits))
        with LlamaCpp(path, n_ctx=LENGTH) as peer:
            found.append(perplexity(tested, peer.logits))
    return Found(*found)


OPTIONS = (
    option("families", str, "FAMILY", "default: all", nargs="*"),
    option("--train", Path, "FILE", "the text that models learn", required=True),
    option("--text", required=True),
    option("--steps", 120, "N", "of training"),
    option("--windows", 64),
)
COLUMNS = "family", "transformers", "F32", "llama.cpp", "difference", "Q8_0", "llama.cpp", "difference", "CPU s"


def measure(options: argparse.Namespace) -> Lines:
    learned = windows_of(options.train.read_text(encoding="utf-8"), 2000)
    tested = windows_of(options.text.read_text(encoding="utf-8"), options.windows)
    for name in options.families or MODELS:
        begun = time.process_time()
        with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as folder:
            f = measured(name, learned, tested, options.steps, Path(folder))
        yield (
            name, f"{f.floats:.3f}", f"{f.ours:.3f}", f"{f.theirs:.3f}", f"{f.ours / f.theirs - 1:+.4%}",
            f"{f.ours_q8:.3f}", f"{f.theirs_q8:.3f}", f"{f.ours_q8 / f.theirs_q8 - 1:+.3%}",
            f"{time.process_time() - begun:.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, COLUMNS)
