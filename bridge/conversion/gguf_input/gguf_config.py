"""config.json, generation_config.json and tokenizer of a GGUF, from its metadata.

`bridge.models` makes both, for every architecture that it writes. A key that it does not read would silently become a
default, so the result is checked: `convert` must make the same metadata of it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from bridge.conversion.gguf_input.gguf_source import GgufSource
from bridge.errors import BridgeError, parameter
from bridge.gguf_file.reader import StoredModel
from bridge.models import describe_model
from bridge.models.gguf_config import ROPE_FACTORS, add_rope_factors, add_told, config_of_gguf, family_of_gguf
from bridge.models.sentence_transformers import module_files
from bridge.models.tokenizer.tokenizer_json import tokenizer_files
from bridge.runtime.tokenizer import stop_tokens

# keys that GGUFs of other programs have without need: they repeat what others say
_REPEATED = ("vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")
# what a model with images has beside its language model's keys
_OF_IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
_SCALING = "rope.scaling."
_TOKENS = ("tokens", "merges", "bos_token_id", "eos_token_id", "add_bos_token")


def write_config(model: StoredModel, folder: Path) -> None:
    """Write the files of a GGUF that its metadata tells.

    Raises BridgeError for an unknown architecture, and where a key or the tokenizer cannot be converted.
    """
    file = model.files[0]
    try:
        config = config_of_gguf(model.metadata, model.tensors)
        factors = {name: model.tensors[f"{name}.weight"] for name in ROPE_FACTORS if f"{name}.weight" in model.tensors}
        add_rope_factors(config, {name: tensor.raw.view(np.float32) for name, tensor in factors.items()})
        add_told(config, model.metadata, lambda name: model.tensors[name].raw.view(np.float32))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        arch = model.metadata["general.architecture"]
        pooling, hidden = (model.metadata.get(f"{arch}.{key}") for key in ("pooling_type", "embedding_length"))
        modules = module_files(pooling, hidden)
        for name, text in {**tokenizer_files(model.metadata), **modules}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    except BridgeError as problem:
        raise _refused(file, str(problem)) from problem
    tokens = {"bos_token_id": _plain(model.metadata.get("tokenizer.ggml.bos_token_id")),
              "eos_token_id": stop_tokens(model.metadata) or None}  # fmt: skip
    generation = {key: value for key, value in tokens.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def checked_source(model: StoredModel, folder: Path, dtype: str, quantized: bool = False) -> GgufSource:
    """The GGUF with the files that `write_config` made in a folder; see `GgufSource`.

    Raises BridgeError unless a checkpoint with this config and tokenizer has the GGUF's metadata.
    """
    file, arch = model.files[0], str(model.metadata.get("general.architecture"))
    pre = model.metadata.get("tokenizer.ggml.pre")
    try:
        source = GgufSource(model, folder, dtype, quantized, made=True)
        shapes = {name: info.shape for name, info in source.tensors.items()}
        metadata = describe_model(source.config, folder, shapes, str(pre) if pre is not None else None).metadata
    except (BridgeError, TypeError, ValueError, LookupError, ArithmeticError) as problem:  # of values of a wrong kind
        raise _refused(file, f"the config made of its metadata is not read again ({problem})") from problem
    unscaled = model.metadata.get(f"{arch}.{_SCALING}type") == "none"
    prefix = f"{metadata['general.architecture'].value}."
    of_tensors = family_of_gguf(model.metadata).integers  # no config says them
    for key, stored in model.metadata.items():
        name = key.removeprefix(f"{arch}.")
        repeated = name in (*_REPEATED, *_OF_IMAGES) or key in of_tensors
        of_arch = name != key and not repeated and not (unscaled and name.startswith(_SCALING))
        if of_arch or (key in metadata and key.removeprefix("tokenizer.ggml.") in _TOKENS):
            entry = metadata.get(prefix + name if of_arch else key)
            value = None if entry is None else entry.value
            if not _same(_plain(stored), _plain(value)):
                difference = f"{key} is {_short(stored)}, but {_short(value)} in the config made of it"
                raise _refused(file, difference)
    return source


def _refused(file: Path, why: str) -> BridgeError:
    return BridgeError(f"{file}: {why}; {parameter('config', 'DIR')} takes config.json and tokenizer from a folder")


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _short(value: Any) -> str:
    return "missing" if value is None else f"{_plain(value)!r:.60}"


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, int | float):
        return first == second or abs(first - second) <= 1e-6 * abs(first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
