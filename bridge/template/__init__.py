"""A GGUF that llama.cpp's converter made of the same model, as a template: whatever architecture it is of.

    spec = describe_template(checkpoint, Path("model-f16.gguf"))

Names, metadata, tokenizer and tensors are the template's; each tensor that can be found in the checkpoint, by
gguf's name map and by its values, is made of the checkpoint's instead, and so keeps its codes. What cannot be
found stays as it is and is reported. `source` has the template's file, `names` the name map, `match` the
comparison of values, `matrices` and `vectors` the search, `build` its outcome.
"""

from __future__ import annotations

from pathlib import Path

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeError
from bridge.files import read_json
from bridge.template.build import Builder
from bridge.template.template_file import TemplateSpec, number, open_template, read_vocabulary

__all__ = ["describe_template"]


def describe_template(ckpt: Checkpoint, path: Path) -> TemplateSpec:
    """What a checkpoint becomes in the shape of a template. Compares all weights of the two, so it takes a while.

    Raises BridgeError where the template is no model's GGUF, is of another model or vocabulary, or lacks a
    tensor for a quantized module.
    """
    file = open_template(path)
    build = Builder(ckpt, file)
    heads = number(file, "attention.head_count", 1)
    hidden = file["token_embd.weight"].shape[-1]
    metadata = file.metadata
    spec = TemplateSpec(
        arch=file.arch,
        n_layers=number(file, "block_count"),
        n_heads=heads,
        n_kv_heads=number(file, "attention.head_count_kv", heads) or heads,
        head_dim=number(file, "attention.key_length", hidden // max(heads, 1)),
        hidden=hidden,
        intermediate=number(file, "feed_forward_length", 0),
        vocab=file["token_embd.weight"].shape[0],
        context=number(file, "context_length", 0),
        tied="output.weight" not in file,
        tensors=build.specs(),
        folds=build.folds(),
        unused=[],
        zero_only=build.biases_without_place(),
        notes=build.notes,
        tokenizer=read_vocabulary(metadata),
        generation=read_json(ckpt.home / "generation_config.json", optional=True),
        experts=number(file, "expert_count", 0),
    )
    if not spec.n_heads:
        raise BridgeError(f"{path}: {file.arch}.attention.head_count is 0; only models with attention can be converted")
    spec.metadata = metadata
    if unused := build.unused():
        spec.notes.append(f"found nowhere in the template and left out: {', '.join(unused)}")
    return spec
