"""Small models of every architecture that runs on CUDA, of random weights, as GGUFs.

python -m tests.support.gpu.small_models build/models       84 of them, in Q8_0 where rows are whole blocks
python scripts/gpu_check.py --models build/models           on a machine with a GPU
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import bridge
from tests.support.family_models import ALL_BLOCKS, MODELS, copy_tokenizer, new_model, randomized

LEFT_TO_LLAMA_CPP = {
    "deepseek4", "dots3-note", "glm5-next", "hy-v4", "qwen4exp",
}  # fmt: skip
ON_THE_CPU = {"kimi-linear", "ling3"}  # alone
# torch's activations and softplus for AVX2 round what is behind whole vectors otherwise, as rows of 8 of one token are,
# not those of three
STEP = MODELS["step35"][1]["text_config"] | {
    "num_attention_heads": 16, "num_sliding_attention_heads": 32, "share_expert_dim": 32,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek2-lite": {"num_hidden_layers": 27}, "gemma4": {"hidden_size_per_layer_input": 16},
    "laguna": {"num_attention_heads_per_layer": [16, 32, 32, 32, 16]},
    "minimax-m3": ALL_BLOCKS, "step35": {"text_config": STEP},
}  # fmt: skip
# rows of whole blocks
BLOCK_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek3": {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 32},
    "gemma4-moe": {"moe_intermediate_size": 32}, "llama4": {"intermediate_size": 64},
    "step35": {"text_config": STEP | {"moe_intermediate_size": 32}},
}  # fmt: skip


def converted(name: str, folder: Path, type: str, **fields: Any) -> Path:
    """A family's small model with random weights."""
    model = randomized(new_model(name, **fields))
    model.save_pretrained(folder / "model", save_original_format=True)
    bridge.convert(copy_tokenizer(folder / "model"), folder / "m.gguf", tensor_types=[(".*", type)], mmproj_type="none")
    return folder / "m.gguf"


def main() -> None:
    options = argparse.ArgumentParser(description="Write small models of every architecture that runs on CUDA.")
    options.add_argument("folder", type=Path, help="for the GGUFs; gpu_check.py takes it as --models")
    out: Path = options.parse_args().folder
    out.mkdir(parents=True, exist_ok=True)
    for name in sorted({*MODELS} - LEFT_TO_LLAMA_CPP - ON_THE_CPU):
        with tempfile.TemporaryDirectory() as folder:
            path = converted(name, Path(folder), "Q8_0", **FIELDS.get(name, {}) | BLOCK_FIELDS.get(name, {}))
            shutil.move(path, out / f"{name}.gguf")


if __name__ == "__main__":
    main()
