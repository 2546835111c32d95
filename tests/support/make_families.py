"""Writes tests/data/converter: what llama.cpp's own converter makes of small models of the families.

    python -m tests.support.make_families LLAMA_CPP [NAME ...]

LLAMA_CPP is a checkout of llama.cpp with its conversion/ and gguf-py/. Weights are `values_of` each tensor's name, so
that a golden needs their checksums alone. Of families that go by a template the whole F16 GGUF is kept, of weights
that compress (`coarse_values_of`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.family_models import MODELS, PUBLISHED_AS, TEMPLATES, copy_tokenizer, new_model
from tests.support.remote_models import REMOTE

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests/data/converter"
DEEPSEEK4S_EXPERT = re.compile(r"ffn\.experts\.\d+\.w[123]\.weight$")
_LARGEST = 2.0**62  # a checksum of integers
# under names of transformers that the converter does not know; with transformers 5 it takes each Nemotron-H for a MoE
UNKNOWN = {"bitnet", "nemotron-h"}

# whose config.json the converter reads by transformers 5, which drops keys that it needs
UNREADABLE = {"minimax-m3"}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of small multiples of 1/64, other ones for each name: sums with small numbers are exact."""
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 + zlib.crc32(name.encode())
    return ((numbers % 251 - 125) / 64).astype(np.float32).reshape(shape)


def stored_values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """`values_of`; of DeepSeek V4 also its experts of 4-bit floats and its table of experts."""
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7919 + zlib.crc32(name.encode())
    if name.endswith("tid2eid"):
        return (numbers % 4).reshape(shape)
    if name.endswith(".scale") and DEEPSEEK4S_EXPERT.search(f"{name.removesuffix('scale')}weight"):
        return (120 + numbers % 8).astype(np.uint8).reshape(shape)
    if DEEPSEEK4S_EXPERT.search(name):
        return (numbers % 251).astype(np.uint8).view(np.int8).reshape(shape)
    return values_of(name, shape)


def coarse_values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of few values, as good as random: bits that are set in a byte of a hash; around one for norms."""
    data = np.frombuffer(hashlib.shake_128(name.encode()).digest(int(np.prod(shape))), np.uint8)
    values = (np.bitwise_count(data).astype(np.float32) - 4) / 8
    return (1 + values / 2 if len(shape) == 1 and name.endswith("weight") else values).reshape(shape)


def checksum(values: np.ndarray) -> int:
    """Of values rounded to 1/1024: exponentials differ in their last bits between libraries."""
    whole = np.round(values.astype(np.float64) * 1024)
    return zlib.crc32(np.clip(whole, -_LARGEST, _LARGEST).astype("<i8").tobytes())


# models with a layer that predicts a further token, which transformers drops -> how its config counts such layers
PREDICTING = {
    "glm4-moe": "num_nextn_predict_layers", "glm4-moe-lite": "num_nextn_predict_layers", "qwen3-next": None,
    "exaone4.5": "num_nextn_predict_layers", "qwen3.5": "mtp_num_hidden_layers", "qwen3.5-moe": "mtp_num_hidden_layers",
    **dict.fromkeys(("glm5", "deepseek3.2", "nemotron-h-moe", "nemotron-3-super"), "num_nextn_predict_layers"),
}  # fmt: skip
MTP = "-mtp"  # at the end of their goldens' names


def add_prediction(name: str, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A layer more, of the last one's shapes, named as the family's checkpoints do."""
    config = json.loads((folder / "config.json").read_text())
    if (key := PREDICTING[name]) is not None:
        config[key] = 1
        (folder / "config.json").write_text(json.dumps(config))
    config |= config.get("text_config", {})
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if name.startswith("nemotron"):
        add_nemotrons(shapes, hidden)
        return
    layers = config["num_hidden_layers"]
    last, qwen = f"model.layers.{layers - 1}.", name.startswith(("qwen", "exaone"))
    if "vision_config" in config:
        last = last.replace("model.", "model.language_model.", 1)
    before = "mtp.layers.0." if qwen else f"model.layers.{layers}."
    shapes |= {before + key.removeprefix(last): shape for key, shape in shapes.items() if key.startswith(last)}
    if qwen:
        shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
        shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        return
    shapes |= {f"{before}eh_proj.weight": (hidden, 2 * hidden), f"{before}shared_head.head.weight": (vocab, hidden)}
    shapes |= {f"{before}embed_tokens.weight": (vocab, hidden)}
    shapes |= {f"{before}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}


def add_nemotrons(shapes: dict[str, tuple[int, ...]], hidden: int) -> None:
    """mtp.layers.0 like the third layer, which has attention, and mtp.layers.1 like the fourth, which has experts."""
    for layer, of in enumerate(("backbone.layers.2.", "backbone.layers.3.")):
        own = {key.removeprefix(of): shape for key, shape in shapes.items() if key.startswith(of)}
        shapes |= {f"mtp.layers.{layer}.{key}": shape for key, shape in own.items()}
    shapes |= {f"mtp.layers.0.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")}
    shapes |= {"mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden), "mtp.layers.1.final_layernorm.weight": (hidden,)}


def as_deepseek4(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """DeepSeek V4 with the keys and names of its repository, and experts of 4-bit floats with their scales."""
    config = json.loads((folder / "config.json").read_text())
    rules = config.pop("rope_parameters")["compress"]
    kinds = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config["compress_ratios"] = [kinds[kind] for kind in config.pop("layer_types")]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    config["rope_scaling"] = {"type": "yarn", **{name: rules[name] for name in names}}
    block = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    for key in ("compress_rates", "partial_rotary_factor"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        own = key.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
        own = own.replace("embed_tokens.", "embed.")
        found[own] = shape
        if DEEPSEEK4S_EXPERT.search(own):
            found |= {own: (shape[0], shape[1] // 2), own.replace(".weight", ".scale"): (shape[0], shape[1] // 32)}
    return found


def save_checkpoint(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """A checkpoint of a family's names and shapes with made-up values; returns the shapes."""
    name, with_mtp = name.removesuffix(MTP), name.endswith(MTP)
    new_model(name).save_pretrained(folder, save_original_format=True)
    text = (folder / "config.json").read_text()
    for own, published in PUBLISHED_AS.get(name, {}).items():
        text = text.replace(own, published)
    (folder / "config.json").write_text(text)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    for key, shape in shapes.items():
        if name == "qwen3-vl-moe" and ".mlp.experts." in key:  # so it is published; transformers keeps it otherwise
            shapes[key] = (shape[0], shape[2], shape[1])
    if with_mtp:
        add_prediction(name, folder, shapes)
    if name == "deepseek4":
        shapes = as_deepseek4(folder, shapes)
    made = coarse_values_of if name in TEMPLATES else stored_values_of
    save_file({key: made(key, shape) for key, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    copy_tokenizer(folder, 320 if name in TEMPLATES else None)
    return shapes


def plain(value: Any) -> Any:
    """A key's value; of a long list its checksum."""
    if isinstance(value, list) and len(value) > 64:
        return {"items": len(value), "checksum": zlib.crc32(json.dumps(value).encode())}
    return round(value, 7) if isinstance(value, float) else value


def main(llama_cpp: Path, names: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
    GOLDENS.mkdir(exist_ok=True)
    for name in names or [*((MODELS | TEMPLATES).keys() - UNKNOWN), *(f"{name}{MTP}" for name in PREDICTING)]:
        with tempfile.TemporaryDirectory() as where, torch.inference_mode():
            folder, out = Path(where) / "model", Path(where) / "out.gguf"
            shapes = save_checkpoint(name, folder)
            if name in UNREADABLE:
                config = json.loads((folder / "config.json").read_text())
                config |= config.get("text_config", {})
                ModelBase.load_hparams = staticmethod(lambda *_, config=config: dict(config))
            kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
            kind.no_mtp = not name.endswith(MTP)  # layers that predict further tokens at once
            kind.set_vocab = TextModel._set_vocab_gpt2  # what the tokenizer is, whatever the family usually has
            floats = gguf.LlamaFileType.MOSTLY_F16 if name in TEMPLATES else gguf.LlamaFileType.ALL_F32
            converter = kind(folder, floats, out)
            published = (folder / "config.json").read_text()
            if name in REMOTE:  # transformers would read it for the tokenizer, as of a model without sizes
                (folder / "config.json").unlink()
            converter.write()
            if name in TEMPLATES:
                (GOLDENS / f"{name}.gguf.xz").write_bytes(lzma.compress(out.read_bytes()))
                continue
            reader = gguf.GGUFReader(out)
            arch = reader.fields["general.architecture"].contents()
            own = (f"{arch}.", "tokenizer.", "xielu.")
            keys = {k: plain(f.contents()) for k, f in reader.fields.items() if k.startswith(own)}
            del keys["tokenizer.ggml.pre"]
            if name == "deepseek4":  # a text of the converter's own, for checkpoints have none
                del keys["tokenizer.chat_template"]
            tensors = {
                t.name: [[int(n) for n in reversed(t.shape)], checksum(np.array(t.data).reshape(-1))]
                for t in reader.tensors
            }
            config = json.loads(published)
        golden = {"config": config, "checkpoint": shapes, "arch": arch, "keys": keys, "tensors": tensors}
        text = ",\n".join(f'"{part}": {_lines(value)}' for part, value in golden.items())
        (GOLDENS / f"{name}.json").write_text("{\n" + text + "\n}\n")
        print(name, arch, len(tensors))


def _lines(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
