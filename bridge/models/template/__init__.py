"""Any architecture, with a template: a GGUF that llama.cpp's converter made from the same model.

    outline = describe_template(checkpoint, Path("model-f16.gguf"))

Names, metadata, tokenizer and tensors are the template's; each tensor that is found in the checkpoint, by gguf's
name map and by its values, is made from the checkpoint's instead, so its codes are carried. The others are copied
from the template and reported. Read `build` first, the outcome, then `matrices` and `norms_and_biases`, the
search; `match` compares values, `names` has the name map, `template_file` the file.
"""

from pathlib import Path

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import find_template
from bridge.models.outline import Outline, OutlineTensor
from bridge.models.template.build import Builder, from_template, quantizable
from bridge.models.template.template_file import copied_metadata, number, open_template, stop_texts
from bridge.models.towers.tower import TOWER_NAME

__all__ = ["copied_metadata", "describe_template", "quantizable", "stop_texts", "template_tensors"]


def describe_template(ckpt: Checkpoint, template: str | Path) -> Outline:
    """The outline of a checkpoint in the form of a template. It compares all weights of both, which takes a while.

    template  a GGUF, or a repository on the Hub with GGUFs: the smallest suitable one is fetched, and noted

    Raises BridgeError if the template is not a model's GGUF, is of another model or vocabulary, or lacks a
    tensor for a quantized module.
    """
    path, note = find_template(template)
    file = open_template(path)
    for key in ("attention.head_count", "attention.head_count_kv", "expert_count"):  # which planning reads
        number(file, key, 0)
    build = Builder(ckpt, file)
    metadata = copied_metadata(file.metadata)
    outline = Outline(
        metadata, build.tensors(), build.folds(), zero_only=build.biases_without_place(), stop=stop_texts(metadata),
        notes=[*([note] if note else []), *build.notes],
    )  # fmt: skip
    outline.others = [name for name in build.unused() if TOWER_NAME.match(name)]
    if unused := [name for name in build.unused() if name not in outline.others]:
        outline.notes.append(f"not found in the template and dropped: {', '.join(unused)}")
    return outline


def template_tensors(template: str | Path) -> dict[str, OutlineTensor]:
    """All tensors of a template, by name. Raises BridgeError if it is not a model's GGUF."""
    return {name: from_template(tensor) for name, tensor in open_template(find_template(template)[0]).items()}
