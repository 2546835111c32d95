"""A GGUF of a Llama 3 8B's shape that exists in memory only: every matrix Q4_K, of random codes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.conversion.planning.recipe import Recipe, TensorPlace
from bridge.runtime.bench import put_d, put_dmin
from bridge.runtime.quant_tensor import QuantTensor


class SyntheticFile(Mapping[str, Any]):
    """The part of a GGUFFile that a decoder uses, in a type or a mixture of llama.cpp's; matrices alike share bytes."""

    HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 4096, 14336, 32, 8, 32, 128256

    def __init__(self, preset: str = "Q4_K") -> None:
        recipe = Recipe(preset)
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
        blocks: dict[tuple[str, tuple[int, int]], np.ndarray] = {}
        matrices = {name: (self.VOCAB, self.HIDDEN) for name in ("token_embd", "output")}
        matrices |= {f"blk.{i}.{part}": shape for i in range(self.LAYERS) for part, shape in shapes.items()}
        for name, shape in matrices.items():
            part, layer = name.rpartition(".")[2], int(name.split(".")[1]) if name.startswith("blk.") else None
            tensor_place = TensorPlace(
                f"{name}.weight", part, layer, self.LAYERS, self.HEADS // self.KV_HEADS, shape[1]
            )
            type = recipe.wanted(tensor_place, as_codes=False).type
            assert type is not None
            if (type, shape) not in blocks:
                blocks[type, shape] = _codes(type, shape, len(blocks))
            self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", type, shape, blocks[type, shape])
        ones = np.ones(self.HIDDEN, np.float32).view(np.uint8)
        norms = [f"blk.{i}.{part}_norm" for i in range(self.LAYERS) for part in ("attn", "ffn")]
        for name in [*norms, "output_norm"]:
            self.tensors[f"{name}.weight"] = QuantTensor(f"{name}.weight", "F32", (self.HIDDEN,), ones)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _codes(type: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of Q4_K or Q6_K whose weights have a mean of 0 and a deviation of about 0.02."""
    block = WRITTEN[type]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (shape[0], shape[1] // block.size, block.nbytes), np.uint8)
    d = {"Q4_K": 1.1e-4, "Q6_K": 1.5e-5}[type]
    put_d(block, raw, np.full(raw.shape[:2], d, np.float16))
    put_dmin(block, raw, np.full(raw.shape[:2], 7.5 * d, np.float16))
    return raw.reshape(-1)
