"""A GGUF of a Llama 3 8B's shape that exists in memory only: every matrix Q4_K, of random codes."""

from pathlib import Path
from typing import Any

import numpy as np

from bridge.runtime.quant_tensor import QuantTensor


class SyntheticFile:
    """The part of a GGUFFile that a decoder uses; matrices of equal shape share their bytes."""

    HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 4096, 14336, 32, 8, 32, 128256

    def __init__(self) -> None:
        self.path = Path("synthetic-8b")
        self.metadata = {
            "general.architecture": "llama", "llama.block_count": self.LAYERS, "llama.context_length": 8192,
            "llama.embedding_length": self.HIDDEN, "llama.feed_forward_length": self.INNER,
            "llama.attention.head_count": self.HEADS, "llama.attention.head_count_kv": self.KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0,
        }  # fmt: skip
        kv = self.HIDDEN // self.HEADS * self.KV_HEADS
        shapes = {
            "attn_q": (self.HIDDEN, self.HIDDEN), "attn_k": (kv, self.HIDDEN), "attn_v": (kv, self.HIDDEN),
            "attn_output": (self.HIDDEN, self.HIDDEN), "ffn_gate": (self.INNER, self.HIDDEN),
            "ffn_up": (self.INNER, self.HIDDEN), "ffn_down": (self.HIDDEN, self.INNER),
        }  # fmt: skip
        self.tensors: dict[str, Any] = {}
        made: dict[tuple[int, int], np.ndarray] = {}
        matrices = {name: (self.VOCAB, self.HIDDEN) for name in ("token_embd", "output")}
        matrices |= {f"blk.{i}.{part}": shape for i in range(self.LAYERS) for part, shape in shapes.items()}
        for name, shape in matrices.items():
            if shape not in made:
                made[shape] = _codes(shape, len(made))
            self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", "Q4_K", shape, made[shape])
        ones = np.ones(self.HIDDEN, np.float32).view(np.uint8)
        norms = [f"blk.{i}.{part}_norm" for i in range(self.LAYERS) for part in ("attn", "ffn")]
        for name in [*norms, "output_norm"]:
            self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", "F32", (self.HIDDEN,), ones)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def _codes(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of Q4_K whose weights have a mean of 0 and a deviation of about 0.02."""
    raw = np.random.default_rng(seed).integers(0, 256, (shape[0], shape[1] // 256, 144), np.uint8)
    raw[:, :, 0:4] = np.array([1.1e-4, 7.5 * 1.1e-4], np.float16).view(np.uint8)
    return raw.reshape(-1)
