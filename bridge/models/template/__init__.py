"""A GGUF that llama.cpp's converter made of the same model, as a template: whatever architecture it is of.

    outline = describe_template(checkpoint, Path("model-f16.gguf"))

Names, metadata, tokenizer and tensors are the template's; each tensor that can be found in the checkpoint, by
gguf's name map and by its values, is made of the checkpoint's instead, and so keeps its codes. What cannot be
found stays as it is and is reported. `template_file` has the template's file, `names` the name map, `match` the
comparison of values, `matrices` and `norms_and_biases` the search, `build` its outcome.
"""

from __future__ import annotations

from pathlib import Path

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import find_template
from bridge.errors import BridgeError
from bridge.models.outline import Outline, OutlineTensor
from bridge.models.template.build import Builder, from_template
from bridge.models.template.template_file import copied_metadata, number, open_template, stop_texts

__all__ = ["describe_template", "template_tensors"]

# what planning reads besides
_COUNTS = ("attention.head_count_kv", "expert_count")


def describe_template(ckpt: Checkpoint, template: str | Path) -> Outline:
    """What a checkpoint becomes in the shape of a template. Compares all weights of the two, so it takes a while.

    template  a GGUF, or a repository on the Hub that has some: the smallest that will do is fetched, a note says which

    Raises BridgeError where the template is no model's GGUF, is of another model or vocabulary, or lacks a
    tensor for a quantized module.
    """
    path, said = find_template(template)
    file = open_template(path)
    for key in _COUNTS:
        number(file, key, 0)
    if not number(file, "attention.head_count", 1):
        raise BridgeError(f"{path}: {file.arch}.attention.head_count is 0; only models with attention can be converted")
    build = Builder(ckpt, file)
    metadata = copied_metadata(file)
    outline = Outline(
        metadata,
        build.tensors(),
        build.folds(),
        zero_only=build.biases_without_place(),
        stop=stop_texts(metadata),
        notes=[*([said] if said else []), *build.notes],
    )
    if unused := build.unused():
        outline.notes.append(f"found nowhere in the template and left out: {', '.join(unused)}")
    return outline


def template_tensors(template: str | Path) -> dict[str, OutlineTensor]:
    """Every tensor of a template as it is, by name. Raises BridgeError where it is no model's GGUF."""
    return {name: from_template(tensor) for name, tensor in open_template(find_template(template)[0]).items()}
