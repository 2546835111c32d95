"""Write a synthetic GPTQ checkpoint: a Llama of any size, or a Qwen3-MoE, for measuring speed and memory.

    python -m scripts.make_synthetic OUT_DIR --vocab 4096        # 1.0B parameters, 0.54 GB
    python -m scripts.make_synthetic OUT_DIR --vocab 4096 --experts 64 --layers 6 --intermediate 768   # 1.9B, 1.0 GB

Its codes are distributed like those of rounded Gaussian weights, and its scales vary by 20% around 0.01: converting it
costs as much as converting a real checkpoint, while the model's text is noise. The layout is GPTQ v1 (zero points
stored minus one), as GPTQModel writes it, in shards of a few layers, so that memory stays near 300 MB whatever the
model's size.
"""

import argparse
import json
import math
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bridge.checkpoint.formats.packing import pack_columns, pack_rows
from bridge.gguf_file.pretokenizers import byte_of
from scripts.benchlib import option, parser

LAYERS_PER_SHARD = 4
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SIZES = {
    "layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv-heads": 4, "vocab": 32000,
    "group-size": 128, "experts": 0, "experts-used": 8, "seed": 0,
}  # fmt: skip
OPTIONS = (
    option("out", Path, "OUT_DIR"), *(option(f"--{name}", default) for name, default in SIZES.items()),
    option("--bits", 4, choices=(2, 3, 4, 8)), option("--asym", False, help="give each group its own zero point"),
    option("--act-order", False, help="assign columns to groups in random order"),
)  # fmt: skip


def make(options: argparse.Namespace) -> None:
    """Write the checkpoint that `options` describes into `options.out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(options.seed)
    head_dim = options.hidden // options.heads
    shapes = layer_shapes(options.hidden, options.intermediate, options.heads, options.kv_heads)
    if options.experts:
        numbers, dense = range(options.experts), shapes.items()
        shapes = {name.replace("mlp.", f"mlp.experts.{e}."): shape for e in numbers for name, shape in dense}

    def layer(index: int) -> dict[str, np.ndarray]:
        prefix = f"model.layers.{index}"
        ones = np.ones(options.hidden, np.float16)
        tensors = {f"{prefix}.input_layernorm.weight": ones, f"{prefix}.post_attention_layernorm.weight": ones.copy()}
        if options.experts:
            tensors[f"{prefix}.mlp.gate.weight"] = gaussian(rng, (options.experts, options.hidden))
            for part in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{part}.weight"] = np.ones(head_dim, np.float16)
        orders: dict[str, np.ndarray] = {}
        for module, (rows, columns) in shapes.items():
            network, _, name = module.rpartition(".")
            shared = network + {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(name, name)
            size = columns if options.group_size == -1 else options.group_size
            group = np.arange(columns, dtype=np.int32) // size
            if options.act_order:
                group = orders.setdefault(shared, rng.permutation(group))
            for part, values in linear(rng, rows, group, options.bits, options.asym).items():
                tensors[f"{prefix}.{module}.{part}"] = values
        return tensors

    def embedding_and_head() -> dict[str, np.ndarray]:
        shape = options.vocab, options.hidden
        half = {f"{name}.weight": gaussian(rng, shape) for name in ("model.embed_tokens", "lm_head")}
        return half | {"model.norm.weight": np.ones(options.hidden, np.float16)}

    starts = range(0, options.layers, LAYERS_PER_SHARD)
    index: dict[str, str] = {}
    for number in range(len(starts) + 1):
        file = f"model-{number + 1:05}-of-{len(starts) + 1:05}.safetensors"
        if number < len(starts):
            chosen = range(starts[number], min(starts[number] + LAYERS_PER_SHARD, options.layers))
            tensors = {name: values for i in chosen for name, values in layer(i).items()}
        else:
            tensors = embedding_and_head()
        save_file(tensors, options.out / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    write_json(options.out / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_config(options)
    write_tokenizer(options.out, options.vocab)


def layer_shapes(hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """The modules of a Llama's layer, and their rows and columns."""
    kv = hidden // heads * kv_heads
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """float16 [rows, columns] of standard deviation 0.02."""
    values = np.empty(shape, np.float16)
    for start in range(0, shape[0], 1024):
        rows = values[start : start + 1024]
        rows[:] = rng.standard_normal(rows.shape, np.float32) * np.float32(0.02)
    return values


def linear(rng: np.random.Generator, rows: int, group: np.ndarray, bits: int, asym: bool) -> dict[str, np.ndarray]:
    """One module's tensors. group: int32 [columns], the group of each column."""
    groups, top, half = int(group.max()) + 1, 2**bits - 1, 2 ** (bits - 1)
    # P(code) of a Gaussian rounded to 2^bits levels, the outermost at 2.75 standard deviations
    edges = (np.arange(1, top + 1) - half) / (top / 2 / 2.75)
    below = np.array([0.5 * (1 + math.erf(edge / math.sqrt(2))) for edge in edges])
    code_of = np.searchsorted(below, (np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.uint8)
    spread = max(1, half // 4) if asym else 0
    zeros = rng.integers(half - spread, half + spread + 1, (groups, rows), np.uint32)
    scales = rng.uniform(0.008, 0.012, (groups, rows)).astype(np.float16)
    qweight = np.empty((len(group) * bits // 32, rows), np.int32)
    for start in range(0, len(group), 512):
        part = slice(start * bits // 32, (start + 512) * bits // 32)
        draws = rng.integers(0, 1 << 16, (min(512, len(group) - start), rows), np.uint16)
        qweight[part] = pack_columns(code_of[draws].T, bits)
    qzeros = pack_rows((zeros - 1).astype(np.uint8), bits).view(np.int32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": group.astype(np.int32)}


def llama_config(hidden: int, inner: int, heads: int, kv_heads: int, layers: int, vocab: int) -> dict[str, Any]:
    """The fields of config.json; the last two tokens are BOS and EOS, as `write_tokenizer` has them."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "hidden_act": "silu", "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": hidden // heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
    }  # fmt: skip


def write_config(options: argparse.Namespace) -> None:
    quantization = {
        "quant_method": "gptq", "bits": options.bits, "group_size": options.group_size, "sym": not options.asym,
        "desc_act": options.act_order, "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.6.0"]},  # it packs 3 bits this way
    }  # fmt: skip
    sizes = options.hidden, options.intermediate, options.heads, options.kv_heads, options.layers, options.vocab
    config = llama_config(*sizes) | {"torch_dtype": "float16", "quantization_config": quantization}
    if options.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": options.experts,
            "num_experts_per_tok": options.experts_used, "moe_intermediate_size": options.intermediate,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    write_json(options.out / "config.json", config)
    write_json(options.out / "quantize_config.json", quantization)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE whose merges join two letters, then two pairs, until `vocab` is full."""
    single = sorted(byte_of(), key=byte_of().__getitem__)
    twos = list(product(("Ġ", *ascii_lowercase), ascii_lowercase))
    fours = product((a + b for a, b in twos), (a + b for a, b in twos if a != "Ġ"))
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    wanted = vocab - len(single) - len(special)
    merges = list(islice(chain(twos, fours), wanted)) if wanted >= 0 else []
    tokens = single + [a + b for a, b in merges]
    if len(tokens) + len(special) != vocab:
        most = 258 + len(twos) * (1 + len(ascii_lowercase) ** 2)
        raise SystemExit(f"--vocab {vocab}: must be between 258 and {most}")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    added = [{"id": len(tokens) + i, "content": text, "special": True, **flags} for i, text in enumerate(special)]
    tokenizer = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [f"{a} {b}" for a, b in merges]},
    }  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    write_json(folder / "tokenizer_config.json", names)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    options = parser(__doc__, OPTIONS).parse_args()
    make(options)
    size = sum(file.stat().st_size for file in options.out.glob("*.safetensors"))
    print(f"{options.out}: {size / 1e9:.2f} GB of tensors")
