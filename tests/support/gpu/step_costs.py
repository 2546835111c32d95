"""What a token of five models costs on an H100: launches counted, bytes counted, tokens a second modelled.

    python -m tests.support.gpu.step_costs

Launches are those of a decoder that runs here with kernels that do nothing: of the model's layers and types, but of
small matrices, as sizes change no launch. Bytes are those of a Q4_K_M file (gpt-oss: MXFP4 and Q8_0) at the real sizes:
matrices, of experts those that a token goes through, of the embeddings a row, and keys and values of 4,096 tokens. A
step of four tokens, whose guesses are checked together, reads what a step of one does but for experts: of these as many
as four tokens choose that choose at random. It reads the cache four times.

**Tokens a second are a model**, for llama.cpp too:

    seconds = weights / 3.0 TB/s + cache / 1.5 TB/s + 4.7 us a launch that reads weights or cache + 2 us another one

An H100 gave 3.0 TB/s as the slope between two products in Q4_K, 1.5 TB/s as the difference between Llama 3 8B after 16
and after 3,000 tokens (docs/measurements/cuda.md, Q4_K), and 4.7 us are what these leave of that model's step. The
2 us were not measured. `checks` compares the model with everything else that was measured.

llama.cpp's launches are counted by hand: the operations that its build 11549 computes in a layer of such a file, less
what its CUDA backend fuses (a norm with its weight and a sum; rotation and storing a key where they are neighbours;
top-k; gate and up; neighbouring sums; biases). Each product rounds its input in a launch of its own. Its products in
Q4_K get 2.6 TB/s from the H100 by the same slope; launches and cache are taken to be as fast as ours.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np

import bridge
from bridge.conversion.planning.recipe import Recipe, TensorPlace
from bridge.models.outline import Outline, OutlineTensor, tied
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import DecoderConfig
from tests.support.family_models import copy_tokenizer
from tests.support.float_gguf import outline_of, write_keys
from tests.support.gpu.costs import Work
from tests.support.gpu.device import pretended_gpu

CONTEXT = 4096
_WEIGHTS = (8192 * 28672 - 4096 * 4096) * 4.5 / 8 / (45.9e-6 - 5.2e-6)  # bytes a second in Q4_K
_LLAMA_CPPS = (8192 * 28672 - 4096 * 4096) * 4.5 / 8 / (54.4e-6 - 7.3e-6)
_CACHE = 32 * 2984 * 4096 / (1 / 412 - 1 / 461)
_READING, _OTHER = 4.7e-6, 2e-6  # seconds of a launch
_H100 = 3.35e12  # bytes a second, by its data sheet
_SMALL = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256}
_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"
_OTHERS = "_norm", "_quantize", "_weigh", "_greedy", "_dequantize"  # kernels that read neither weights nor cache


@dataclass(frozen=True)
class Model:
    """
    kind       the class of its config in transformers
    fields     of its config.json
    small      those that are smaller where launches are counted
    llama_cpp  launches of llama.cpp in a layer: products and attention, others
    dense      the type of what is not an expert where experts are MXFP4; None: the file is a Q4_K_M
    """

    kind: str
    fields: dict[str, Any]
    small: dict[str, int]
    llama_cpp: tuple[int, int]
    dense: str | None = None


@dataclass(frozen=True)
class Published:
    """A speed of llama.cpp, tokens/s: on which GPU, of how many bytes a second, after how many tokens."""

    speed: float
    gpu: str
    memory: float
    link: str
    context: int = 64
    type: str = "Q4_K_M"


MODELS = {
    "Llama 3 8B": Model("LlamaConfig", {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}, {}, (7, 14)),
    "Gemma 3 4B": Model("Gemma3TextConfig", {"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 1024}, {}, (7, 18)),
    "Qwen3-30B-A3B": Model("Qwen3MoeConfig", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        {"moe_intermediate_size": 256, "num_experts": 9}, (8, 19)),
    "gpt-oss-20b": Model("GptOssConfig", {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4},
        {"num_local_experts": 5}, (8, 17), "Q8_0"),
    "DeepSeek V2 Lite": Model("DeepseekV2Config", {"vocab_size": 102400, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        {"moe_intermediate_size": 256, "n_routed_experts": 7}, (11, 24)),
}  # fmt: skip

PUBLISHED = {  # no speed of these models on an H100 was found, and none of Gemma 3 4B
    "Qwen3-30B-A3B": Published(
        166.9, "RTX 3090 Ti", 1008e9, "https://smeltcore.com/recipes/qwen3-30b-a3b-rtx-3090-ti/", CONTEXT
    ),
    "gpt-oss-20b": Published(173.33, "RTX 4090", 1008e9, "https://github.com/ggml-org/llama.cpp/pull/16649"),
    "DeepSeek V2 Lite": Published(
        180.89, "RTX 3090", 936e9, "https://github.com/ggml-org/llama.cpp/pull/15525", 256, "Q4_0"
    ),
}


def _outline(model: Model, small: bool, folder: Path) -> Outline:
    """The GGUF of the model, or of one with the same layers and small matrices."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    fields = model.fields | (_SMALL | model.small if small else {})
    config = getattr(transformers, model.kind)(max_position_embeddings=131072, **fields)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(empty).__name__]
    config.save_pretrained(folder)
    copy_tokenizer(folder)
    shapes = {name: tuple(x.shape) for name, x in revert_weight_conversion(empty, empty.state_dict()).items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return outline_of(folder, shapes)


def _types(model: Model, outline: Outline, recipe: Recipe) -> dict[str, str]:
    """The types of all tensors."""
    fields, arch = model.fields, str(outline.metadata["general.architecture"].value)
    group = fields["num_attention_heads"] // fields["num_key_value_heads"]
    experts = next((fields[key] for key in _EXPERTS if key in fields), 0)

    def of(tensor: OutlineTensor) -> str:
        if tensor.fixed_type is not None or len(tensor.shape) == 1 or tensor.name.endswith(".bias"):
            return tensor.fixed_type or "F32"
        if model.dense is not None:
            return "MXFP4" if tensor.kind.endswith("_exps") else model.dense
        head = tensor.kind == "token_embd" and tied(outline.tensors)
        layers, columns = fields["num_hidden_layers"], tensor.shape[-1]
        place = TensorPlace(tensor.name, tensor.kind, tensor.layer, layers, group, columns, head, experts, arch)
        return str(recipe.wanted(place, as_codes=False).type)

    return {tensor.name: of(tensor) for tensor in outline.tensors}


def _stored(shape: tuple[int, ...], type: str) -> tuple[int, ...]:
    """The shape of a tensor's bytes."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    return (*shape[:-1], shape[-1] // size * nbytes)


def _config(outline: Outline) -> DecoderConfig:
    return read_config({key: entry.value for key, entry in outline.metadata.items()}, Path("model.gguf"))


def file_bytes(outline: Outline, types: dict[str, str]) -> int:
    """Bytes of all tensors."""
    return sum(math.prod(_stored(tensor.shape, types[tensor.name])) for tensor in outline.tensors)


def weight_bytes(outline: Outline, types: dict[str, str], tokens: int = 1) -> int:
    """Bytes of weights that a step reads."""
    c = _config(outline)

    def of(tensor: OutlineTensor) -> int:
        nbytes = math.prod(_stored(tensor.shape, types[tensor.name]))
        if tensor.kind == "token_embd" and not tied(outline.tensors):
            return nbytes // tensor.shape[0]
        if not tensor.kind.endswith("_exps"):
            return nbytes
        return int(nbytes * (1 - (1 - c.routing.used / c.experts) ** tokens))

    return sum(map(of, outline.tensors))


def cache_bytes(c: DecoderConfig, context: int) -> int:
    """Bytes of keys and values in f16 that a token reads; a latent vector is both."""
    windows = c.windows or (False,) * c.layers
    element = 2 * (c.head_dim if c.latent is not None else 2 * c.kv_heads * c.head_dim)
    return sum(element * (min(context, c.window) if window else context) for window in windows)


def launches(model: Model, types: dict[str, str], tokens: int = 1) -> tuple[int, int, int]:
    """Launches in a step: of ours those that read weights or cache, and others, and operations of torch.

    A step of one token also chooses the next one; one of several leaves that to the host.
    """
    from bridge.cuda.decoder import Decoder
    from bridge.cuda.toolchain.launch import Kernel

    names: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder, pretended_gpu(overlapping=True),
        mock.patch.object(Kernel, "run", lambda kernel, *given: names.append(kernel.name)),
    ):  # fmt: skip
        file = bridge.open_gguf(_written(_outline(model, True, Path(folder)), types, Path(folder) / "model.gguf"))
        decoder = Decoder(file, read_config(file.metadata, file.path), 64, "f16", "int8", "cuda")
        decoder.prepare()
        launch = (lambda: decoder._launch(None)) if tokens == 1 else decoder._step_of(tokens)[0].run
        launch()  # uploads matrices
        names.clear()
        with Work() as work:
            launch()
    others = sum(name.startswith(_OTHERS) for name in names)
    return len(names) - others, others, work.count


def _written(outline: Outline, types: dict[str, str], path: Path) -> Path:
    """The outline as a GGUF whose matrices are zeros."""
    writer = write_keys(outline, path)
    for tensor in outline.tensors:
        type = types[tensor.name]
        if type == "F32":
            values = np.zeros(tensor.shape) if tensor.data is None else tensor.data
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
        else:
            codes = np.zeros(_stored(tensor.shape, type), np.uint8)
            writer.add_tensor(tensor.name, codes, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def seconds(weights: float, cache: float, reading: float, others: float, rate: float = _WEIGHTS) -> float:
    """The model of a step of ours; weights and cache in bytes."""
    return weights / rate + cache / _CACHE + reading * _READING + others * _OTHER


def llama_cpp(name: str, weights: float, cache: float, memory: float = _H100) -> tuple[int, int, float]:
    """Its launches, as ours, and tokens a second on a GPU whose memory gives so many bytes a second."""
    model, share = MODELS[name], memory / _H100
    reading, others = (model.fields["num_hidden_layers"] * n for n in model.llama_cpp)
    return reading, others, 1 / seconds(weights / share, cache / share, reading, others, _LLAMA_CPPS)


def described(name: str, type: str = "Q4_K_M") -> tuple[Outline, dict[str, str]]:
    """The model's GGUF at its real size, and the types."""
    with tempfile.TemporaryDirectory() as folder:
        outline = _outline(MODELS[name], False, Path(folder))
    return outline, _types(MODELS[name], outline, Recipe(type))


def row(name: str) -> str:
    """The row of docs/measurements/cuda.md."""
    outline, types = described(name)
    reading, others, torchs = launches(MODELS[name], types)
    weights, cache = weight_bytes(outline, types), cache_bytes(_config(outline), CONTEXT)
    ours, theirs = 1 / seconds(weights, cache, reading, others + torchs), llama_cpp(name, weights, cache)
    cells = [f"{reading} + {others} + {torchs}", f"{weights / 1e9:.2f} + {cache / 1e9:.2f} GB", f"{ours:.0f}"]
    cells += [f"{theirs[0]} + {theirs[1]}", f"{theirs[2]:.0f}"]
    return f"| {name} | {' | '.join(cells)} |"


def row_of_four(name: str) -> str:
    """The row for a step of four tokens: its launches, and how long it takes, in steps of one."""
    outline, types = described(name)
    cache, took = cache_bytes(_config(outline), CONTEXT), []
    for tokens in (1, 4):
        reading, others, torchs = launches(MODELS[name], types, tokens)
        weights = weight_bytes(outline, types, tokens)
        took.append(seconds(weights, tokens * cache, reading, others + torchs))
    cells = (
        f"{reading} + {others} + {torchs}",
        f"{weights / 1e9:.2f} GB",
        f"{1e3 * took[1]:.1f} ms",
        f"{took[1] / took[0]:.2f}",
    )
    return f"| {name}, four tokens | {' | '.join(cells)} |"


def checks() -> list[str]:
    """What the model says of what was measured."""
    found = []
    for type, measured in (("Q4_K", {16: 461, 3000: 412}), ("Q4_K_M", {16: 433, 3000: 384})):
        outline, types = described("Llama 3 8B", type)
        reading, others, torchs = launches(MODELS["Llama 3 8B"], types)
        for context, speed in measured.items():
            cache = cache_bytes(_config(outline), context)
            modelled = 1 / seconds(weight_bytes(outline, types), cache, reading, others + torchs)
            found.append(f"Llama 3 8B, {type}, after {context:,} tokens: {modelled:.0f} tokens/s, measured {speed}")
    experts = seconds(8 * 3 * 2048 * 768 * 4.5 / 8, 0, 2, 2)
    found.append(f"eight experts of Qwen3-30B-A3B in Q4_K: {1e6 * experts:.0f} us, measured 20")
    attention = seconds(0, 8192 * 4096, 1, 0)
    found.append(f"attention of Llama 3 8B over 8,192 positions: {1e6 * attention:.0f} us, measured 24")
    for name, one in PUBLISHED.items():
        outline, types = described(name, one.type)
        cache = cache_bytes(_config(outline), one.context)
        *_, modelled = llama_cpp(name, weight_bytes(outline, types), cache, one.memory)
        found.append(f"llama.cpp, {name} on an {one.gpu}: {modelled:.0f} tokens/s, published {one.speed} ({one.link})")
    return found


def main() -> None:
    print(*checks(), sep="\n")
    for name in MODELS:
        print(row(name), row_of_four(name), sep="\n", flush=True)


if __name__ == "__main__":
    main()
