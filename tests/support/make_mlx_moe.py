"""Makes tests/data/mlx-moe with Apple's own mlx-lm (0.32.2; pip install "mlx[cpu]" mlx-lm): a Qwen3-MoE, its logits.

The float model and its tokenizer are this project's own (transformers 5.23); tokenizer.json is left out, as
tests/data has it once.
"""

import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm import convert
from mlx_lm.utils import load_model

from tests.support.tiny_models import save_model

FOLDER = Path(__file__).parent.parent / "data" / "mlx-moe"
TOKENS = np.random.default_rng(1).integers(0, 320, 24)

with tempfile.TemporaryDirectory() as scratch:
    floats = save_model(
        Path(scratch) / "float", "Qwen3MoeConfig", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    config = json.loads((floats / "config.json").read_text())
    config |= {"num_experts": 4, "rope_theta": 10000.0}  # as published checkpoints have them, and mlx-lm wants them
    (floats / "config.json").write_text(json.dumps(config))
    convert(str(floats), str(Path(scratch) / "mlx"), quantize=True, q_bits=4, q_group_size=64, dtype="float16")
    model, _ = load_model(Path(scratch) / "mlx")
    model.set_dtype(mx.float32)  # activations; the scales' values stay
    logits = np.array(model(mx.array(TOKENS[None]))[0].astype(mx.float32))
    FOLDER.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(Path(scratch) / "mlx" / name, FOLDER / name)
np.savez_compressed(FOLDER / "expected.npz", tokens=TOKENS, logits=logits)
