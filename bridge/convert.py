"""Checkpoint in, GGUF out: reads, maps and writes tensor by tensor.

Worker threads read and map (the kernels hold no GIL); the calling thread writes the results in order. Only
a few tensors are in flight, so memory follows the largest tensor, not the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.errors import BridgeError
from bridge.hub import model_name, resolve
from bridge.models import ModelSpec, describe_model
from bridge.models.modelfile import modelfile as modelfile_text
from bridge.output import GGUFOutput, check_target, write_text
from bridge.recipe import PRESETS, Recipe
from bridge.report import Report, TensorReport, beyond_auto
from bridge.source import Source
from bridge.tensors import Conversion

_ROWS = 1024  # of a matrix, looked at together

Progress = Callable[[int, int, str], None]  # (bytes of checkpoint done, of all, tensor just written: at first none)


def convert(
    checkpoint: str | Path,
    out: str | Path | None = None,
    *,
    config: str | Path | None = None,
    type: str = "auto",
    output_type: str | None = None,
    token_embd_type: str | None = None,
    actorder_type: str | None = None,
    tensor_types: Sequence[tuple[str, str]] = (),
    imatrix: str | Path | None = None,
    pre: str | None = None,
    template: str | Path | None = None,
    split_max_size: int | None = None,
    modelfile: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Convert a GPTQ or AWQ checkpoint to a GGUF file, keeping its integer codes.

    checkpoint      a folder in Hugging Face layout, a Hub id to download (org/name, org/name@branch), or a .pt
    config          folder with config.json and tokenizer, where the checkpoint has none of its own
    out             the GGUF to write; default: the checkpoint's name and the type, in the current folder
    type            "auto", "exact", a block type ("Q4_K") or a llama.cpp preset ("Q4_K_M"); see bridge.recipe
    output_type, token_embd_type, actorder_type, tensor_types
                    types for the head, the embeddings, act-order tensors, and (regex, type) pairs by GGUF name
    imatrix         llama.cpp's GGUF importance matrix, for tensors that are quantized from floats
    pre             tokenizer.ggml.pre, where it cannot be recognised
    template        a GGUF that llama.cpp's converter made of the same model, for any architecture: names, metadata
                    and tokenizer are taken from it, and tensors that are not in the checkpoint
    split_max_size  bytes in a shard
    modelfile       also write an Ollama Modelfile beside the GGUF
    force           replace existing files
    threads         worker threads; default: the CPUs this process may use
    progress        called after each tensor

    Returns the Report; raises BridgeError for anything wrong with the input. Nothing appears under the
    final name before the whole file is on disk.
    """
    started = time.perf_counter()
    if template is not None and pre is not None:
        raise BridgeError("--pre and --template: the tokenizer is the template's; give one of the two")
    for name, number in (("threads", threads), ("split_max_size", split_max_size)):
        if number is not None and number < 1:
            raise BridgeError(f"{name} {number}: at least 1 is needed")
    recipe = Recipe(type, output_type, token_embd_type, actorder_type, tuple(tensor_types))
    with open_checkpoint(resolve(checkpoint, config), config, needs_config=template is None) as ckpt:
        spec = model_of(ckpt, pre, template)
        importance = _read_importance(imatrix)
        work = Conversion(Source(ckpt, spec), recipe, importance)
        path = Path(out) if out is not None else Path(default_name(str(checkpoint), recipe))
        if modelfile:
            check_target(path.parent / "Modelfile", force)
        shapes = [(t.name, t.shape) for t in spec.tensors]
        with GGUFOutput(path, spec.arch, spec.add_metadata, shapes, force, split_max_size) as output:
            done = 0
            total = sum(work.source.nbytes(t) for t in spec.tensors)
            results = []
            if progress:
                progress(0, total, "")
            for tensor, result in zip(spec.tensors, work.results(threads), strict=True):
                output.write(tensor.name, GGMLQuantizationType[result.report.type], result.data)
                results.append(result.report)
                done += work.source.nbytes(tensor)
                if progress:
                    progress(done, total, tensor.name)
            files = output.finish(_file_type(recipe, results))
        if modelfile:
            write_text(path.parent / "Modelfile", modelfile_text(spec, files[0].name))
    notes = [*ckpt.notes, *spec.notes, *(note for t in results for note in t.notes)]
    if recipe.promises_closeness:
        notes += [note for t in results if (note := beyond_auto(t))]
    if spec.unused:
        notes.append(f"not needed in GGUF and left out: {', '.join(spec.unused)}")
    seconds = time.perf_counter() - started
    return Report(str(checkpoint), ckpt.format, files, results, ckpt.nbytes, seconds, notes)


def model_of(ckpt: Checkpoint, pre: str | None = None, template: str | Path | None = None) -> ModelSpec:
    """What the checkpoint becomes in GGUF; `pre` overrides the recognition of its pre-tokenizer.

    Raises BridgeError also where the checkpoint holds a bias that llama.cpp has no place for.
    """
    if template is not None:
        from bridge.template import describe_template

        spec: ModelSpec = describe_template(ckpt, Path(template))
    else:
        names = list(ckpt.tensors) + [f"{module}.weight" for module in ckpt.modules]
        config, notes = _mended(ckpt)
        spec = describe_model(config, ckpt.home, names, pre)
        spec.notes += notes
        spec.tensors = [t for t in spec.tensors if t.source not in spec.optional or ckpt.read_float(t.source).any()]
    for name in spec.zero_only:
        if ckpt.read_float(name).any():
            raise BridgeError(
                f"{name}: llama.cpp's {spec.arch} has no such tensor, and it is not zero; it cannot be kept"
            )
    return spec


def _mended(ckpt: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """config.json and notes: a head that differs from the embeddings is not tied to them, whatever it says."""
    head, embedding = (ckpt.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not ckpt.config.get("tie_word_embeddings") or not head or not embedding or head.shape != embedding.shape:
        return ckpt.config, []
    for start in range(0, head.shape[0], _ROWS):
        rows = start, min(start + _ROWS, head.shape[0])
        if not np.array_equal(ckpt.read_float(head.name, rows), ckpt.read_float(embedding.name, rows)):
            note = "config.json ties lm_head to the embeddings, but it is stored with other values; it is kept"
            return {**ckpt.config, "tie_word_embeddings": False}, [note]
    return ckpt.config, []


def default_name(checkpoint: str, recipe: Recipe) -> str:
    """`<checkpoint>-<TYPE>.gguf`, or `<checkpoint>.gguf` for auto."""
    stem = model_name(checkpoint)
    return f"{stem}.gguf" if recipe.type == "auto" else f"{stem}-{recipe.type}.gguf"


def _read_importance(path: str | Path | None) -> dict[str, np.ndarray]:
    if path is None:
        return {}
    from bridge.mapping.imatrix import read_imatrix

    return read_imatrix(Path(path))


def _file_type(recipe: Recipe, tensors: Sequence[TensorReport]) -> int:
    """general.file_type: the preset, or the type that most weights have."""
    name = recipe.type
    if name not in PRESETS:
        weights: dict[str, int] = {}
        for t in tensors:
            if len(t.shape) > 1 and t.kind not in ("token_embd", "output"):
                weights[t.type] = weights.get(t.type, 0) + t.weights
        name = max(weights, key=lambda k: weights[k]) if weights else "F32"
    for candidate in (name, f"{name}_M", f"{name}_S"):
        if f"MOSTLY_{candidate}" in LlamaFileType.__members__:
            return int(LlamaFileType[f"MOSTLY_{candidate}"])
    return int(LlamaFileType.ALL_F32)
