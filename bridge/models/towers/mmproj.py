"""The GGUF that llama.cpp reads images with (mmproj): the vision tower of a model of several parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.models.config.gguf_keys import typed
from bridge.models.config.model_config import Config
from bridge.models.config.provenance import read_provenance
from bridge.models.outline import Outline
from bridge.models.towers import TOWERS
from bridge.models.towers.tower import TOWER_NAME, Tower, Vision, fill
from bridge.models.wrapper import text_config
from bridge.system.fields import table
from bridge.system.storage.files import read_json


def describe_tower(
    config: Mapping[str, Any], folder: Path, names: Mapping[str, Sequence[int]], type: str
) -> Outline | None:
    """The outline of the GGUF that a checkpoint's vision tower becomes; None where it has none that is known.

    config  the parsed config.json
    folder  the Hugging Face directory, for preprocessor_config.json, tokenizer and model card
    names   every tensor as a float checkpoint names it, with its shape
    type    of the matrices: F16, BF16, F32 or Q8_0

    Raises BridgeError where a tensor is missing, or unknown, or a config file lacks what llama.cpp needs.
    """
    architectures = config.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    towers = [TOWERS[name] for name in classes if isinstance(name, str) and name in TOWERS]
    vision_config, path = config.get("vision_config"), Path(folder) / "config.json"
    if not towers or not isinstance(vision_config, dict) or not any(TOWER_NAME.match(name) for name in names):
        return None
    tower = towers[0]
    model, text = Config(dict(config), path), Config(text_config(dict(config)), path)
    size = Config(vision_config, path, None, tower.names, len(names))
    audio = table(config.get("audio_config"))
    sound = Config(audio, path, None, {}, len(names)) if audio else None
    vision = Vision(size, sound, model, text, _processor(Path(folder)), Path(folder))
    writer = gguf.GGUFWriter(None, "clip")
    tensors, unused = fill(tower, vision, names, type)
    for tensor in tensors:  # the writer counts parameters
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), 0)
    provenance, notes = read_provenance(model, Path(folder), writer.get_total_parameter_count())
    writer.add_type(gguf.GGUFType.MMPROJ)
    provenance.set_gguf_meta_model(writer)
    for key, value in _keys(tower, vision).items():
        writer.kv_data[0][f"clip.{key}"] = typed(value)
    return Outline(writer.kv_data[0], tensors, unused=unused, notes=notes)


def _keys(tower: Tower, vision: Vision) -> dict[str, Any]:
    """What llama.cpp's loader reads, without "clip."."""
    size, of = vision.tower, vision.processor
    keys: dict[str, Any] = {
        "has_vision_encoder": True,
        "projector_type" if tower.sound is None else "vision.projector_type": tower.projector,
        "vision.projection_dim": vision.text.integer("hidden_size"), "vision.patch_size": _side(size, "patch_size"),
        "vision.embedding_length": size.integer("hidden_size"),
        "vision.feed_forward_length": size.integer("intermediate_size") if tower.layered else 0,
        **{f"vision.{key}": count for key, count in _counts(tower, size).items()},
    }  # fmt: skip
    for key in ("image_mean", "image_std"):
        values = of.get(key)
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
            raise BridgeError(
                f"{vision.folder / 'preprocessor_config.json'}: {key} is {values!r}, must be three numbers; take the "
                f"file of the original model, or {parameter('mmproj_type', 'none')} to convert the language model alone"
            )
        keys[f"vision.{key}"] = [float(v) for v in values]
    more = tower.metadata(vision)
    size_key = {} if "vision.image_size" in more else {"vision.image_size": _side(size, "image_size")}
    return {**keys, **size_key, **more, **_sound_keys(tower, vision)}


def _sound_keys(tower: Tower, vision: Vision) -> dict[str, Any]:
    if tower.sound is None or vision.sound is None:
        return {}
    keys = {
        "projector_type": tower.sound.projector,
        "projection_dim": vision.text.integer("hidden_size"),
        **_counts(tower, vision.sound),
        **tower.sound.metadata(vision.sound),
    }
    return {"has_audio_encoder": True} | {f"audio.{key}": value for key, value in keys.items()}


def _counts(tower: Tower, config: Config) -> dict[str, int]:
    """Layers and heads, 0 in a tower without layers."""
    names = {"block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads"}
    return {key: config.integer(name) if tower.layered else 0 for key, name in names.items()}


def _side(config: Config, key: str) -> int:
    """A count, or the first of two that are the same."""
    value = config.get(key)
    if isinstance(value, list) and value and all(side == value[0] for side in value):
        return Config({key: value[0]}, config.path).integer(key)
    return config.integer(key)


def _processor(folder: Path) -> dict[str, Any]:
    """What is said about images: processor_config.json over preprocessor_config.json."""
    settings = read_json(folder / "preprocessor_config.json", optional=True)
    over = read_json(folder / "processor_config.json", optional=True)
    return {**settings, **over, **table(over.get("image_processor"))}
