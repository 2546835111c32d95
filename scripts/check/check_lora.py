"""Adapters that PEFT trains on quantized checkpoints, beside PEFT: what converting and merging them costs.

    python -m scripts.check.check_lora CHECKPOINT... --train TEXT --text TEXT [--only KIND ...]

PEFT trains each kind of adapter for --steps steps on the dequantized weights of each checkpoint, in transformers and
float32, and saves it. Printed are KL divergences from PEFT's model, in nats a token: of the base model, which says
how much the adapter does; of base and adapter as GGUFs (codes carried, embeddings and head in F16), in this program
with precision f32 and in llama.cpp; and of the merged file, in this program. llama.cpp rounds activations to 8 bits:
what that costs is the divergence of the base alone in llama.cpp from transformers, the last figure.

Needs peft, and xllamacpp of the tests.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.gptq import GPTQLoraLinear
from peft.utils import TaskType

import bridge
from bridge.conversion.writing.report import CARRIED
from bridge.errors import BridgeError
from scripts.benchlib import Lines, bench, option
from scripts.peers import reference
from scripts.peers.llama.llama_cpp import window_logits
from scripts.peers.predictions import mean_kl

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"down_proj": 32}},
    "modules_to_save": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["down_proj"]},
    "norms": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["input_layernorm"]},
    "DoRA": {"use_dora": True},
    "QA-LoRA": {"use_qalora": True, "qalora_group_size": 128},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "new tokens": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}
_OUTSIDE = {r"token_embd|^output\.weight": "F16"}
_TOGETHER = 4  # windows in a step of the training


OPTIONS = (
    option("--text", required=True), option("--windows", 8), "--length",
    option("checkpoints", Path, "CHECKPOINT", "folders", nargs="+"),
    option("--train", Path, "FILE", "the text that adapters learn", required=True),
    option("--steps", 20, "N", "of training"),
    option("--only", nargs="+", choices=[*KINDS], help="some kinds; default: all"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    for folder in options.checkpoints:
        with bridge.open_checkpoint(folder) as checkpoint:
            weights = reference.checkpoint_weights(checkpoint)
        for kind in options.only or KINDS:
            with tempfile.TemporaryDirectory(prefix="gguf-bridge-") as scratch:
                yield folder.name, kind, *figures(folder, weights, kind, Path(scratch), options)


def figures(folder: Path, weights: reference.Weights, kind: str, out: Path, options: argparse.Namespace) -> list[str]:
    """The cells of a row."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, train = (path.read_text(encoding="utf-8") for path in (options.text, options.train))
    tokens = reference.windows(tokenizer, text, options.windows, options.length)
    base = reference.hf_model(folder, weights)
    plain = reference.logits(base, tokens)
    if kind == "new tokens":
        base.resize_token_embeddings(len(weights["model.embed_tokens.weight"]) + 8)  # type: ignore[operator]
    model = trained(base, kind, reference.windows(tokenizer, train, 64, options.length), options.steps)
    model.save_pretrained(out / "adapter")
    expected = reference.logits(model, tokens)[..., : plain.shape[-1]]
    path, lora, merged = (out / f"{name}.gguf" for name in ("base", "lora", "merged"))
    bridge.convert(folder, path, tensor_types=_OUTSIDE)
    cells = [f"{mean_kl(expected, plain):.1e}"]
    try:
        bridge.convert_lora(out / "adapter", lora, base=folder)
        cells += [kl(expected, ours(path, tokens, lora)), kl(expected, window_logits(path, tokens, lora=lora))]
    except BridgeError as refused:
        cells += [f"refused: {str(refused).partition('adapter: ')[2]:.60}", "-"]
    try:
        report = bridge.convert(folder, merged, merge=out / "adapter", tensor_types=_OUTSIDE)
        carried = sum(t.outcome == CARRIED for t in report.tensors)
        cells.append(f"{kl(expected, ours(merged, tokens))} ({carried} of codes)")
    except BridgeError as refused:
        cells.append(f"refused: {str(refused).partition('adapter: ')[2]:.60}")
    return [*cells, kl(plain, window_logits(path, tokens))]


def trained(base: Any, kind: str, windows: np.ndarray, steps: int) -> Any:
    """PEFT's model, after some steps of AdamW."""
    fields = {"target_modules": LINEARS, **copy.deepcopy(KINDS[kind])}
    config = LoraConfig(r=8, lora_alpha=16, task_type=TaskType.CAUSAL_LM, **fields)
    if kind == "QA-LoRA":  # which PEFT has for GPTQModel's layers alone
        config._register_custom_module({torch.nn.Linear: GPTQLoraLinear})
    torch.manual_seed(0)
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for batch in torch.from_numpy(windows).split(_TOGETHER)[:steps]:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.eval()


def ours(path: Path, tokens: np.ndarray, lora: Path | None = None) -> np.ndarray:
    """float32 [windows, length, vocab]: logits here, with float activations."""
    with bridge.Model.load(path, precision="f32", kv="f32", lora=lora) as model:
        return np.stack([model.logits(window.tolist()) for window in tokens])


def kl(expected: np.ndarray, logits: np.ndarray) -> str:
    return f"{mean_kl(expected, logits[..., : expected.shape[-1]]):.1e}"


if __name__ == "__main__":
    columns = "checkpoint", "adapter", "base", "run f32", "llama.cpp", "merged", "8 bits alone"
    bench(__doc__, OPTIONS, measure, columns)
