"""The language model inside a model of several parts: its config, and its tensors under a language model's own names.

config.json               text_config (llm_config in InternVL), merged over the rest
language_model.*          its tensors, see `bridge.checkpoint.tensor_names`
visual.*, vision_tower.*  other parts: llama.cpp has them in a separate file, see `bridge.models.towers.mmproj`
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bridge.checkpoint.tensor_names import TEXT_PREFIXES
from bridge.models.outline import Fold, Outline, OutlineTensor, Part
from bridge.models.towers.tower import TOWER_NAME

# architectures of several parts whose language model may be of any family
ANY_TEXT = frozenset({"InternVLChatModel", "InternVLForConditionalGeneration", "LlavaForConditionalGeneration"})
_PARTS = frozenset({"text_config", "llm_config", "vision_config", "audio_config"})
# those whose language model and tower are not inside one `model`
_APART = frozenset(
    {
        "InternVLChatModel", "KimiK3ForConditionalGeneration", "Llama4ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
    }
)  # fmt: skip


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its text_config's keys on top, where it has one."""
    text = config.get("text_config", config.get("llm_config"))
    if not isinstance(text, dict):
        return config
    outer = ("architectures", "tie_word_embeddings")  # the whole model's values apply
    return {**config, **{key: value for key, value in text.items() if key not in outer or key not in config}}


def with_text(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with other values where `text_config` finds these keys."""
    for key in ("text_config", "llm_config"):
        if isinstance(text := config.get(key), dict):
            return {**config, key: {**text, **changes}}
    return {**config, **changes}


def has_parts(config: dict[str, Any]) -> bool:
    """Whether a config is of a model of several parts; older ones have no text_config."""
    return not _PARTS.isdisjoint(config)


def name_in_parts(name: str, config: dict[str, Any]) -> str:
    """What transformers calls a tensor of a language model, or of a tower, in the model that has both."""
    tower = TOWER_NAME.match(name)
    if not _APART.isdisjoint(config.get("architectures") or ()):
        return tower[1] if tower else f"language_model.{name}"
    if tower:  # Step 3.7's projector is beside the model
        return tower[1] if tower[1].startswith("vit_large_projector.") else f"model.{tower[1]}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def named_like(name: str, other: str) -> str:
    """A language model's tensor by the prefix that another has in the same checkpoint."""
    text = next(iter(text_names([name])[0]), name)
    prefix, short = next((pair for pair in TEXT_PREFIXES if other.startswith(pair[0])), ("", ""))
    return prefix + text.removeprefix(short)


def text_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """A language model's names -> the checkpoint's, and the names of other parts."""
    stored_names, others = {}, []
    for name in names:
        if TOWER_NAME.match(name):
            others.append(name)
        else:
            prefix, short = next((pair for pair in TEXT_PREFIXES if name.startswith(pair[0])), ("", ""))
            stored_names[short + name.removeprefix(prefix)] = name
    return stored_names, others


def renamed(outline: Outline, names: dict[str, str]) -> None:
    """Give an outline's sources the checkpoint's names, in place."""
    modules = {name.removesuffix(".weight"): stored.removesuffix(".weight") for name, stored in names.items()}

    def part(p: Part) -> Part:
        times = None if p.times is None else names.get(p.times, p.times)
        return replace(p, source=names.get(p.source, p.source), times=times)

    def tensor(t: OutlineTensor) -> OutlineTensor:
        return replace(t, parts=tuple(map(part, t.parts)))

    def fold(f: Fold) -> Fold:
        return Fold(modules.get(f.consumer, f.consumer), tuple(modules.get(p, p) for p in f.producers))

    outline.tensors, outline.folds = list(map(tensor, outline.tensors)), list(map(fold, outline.folds))
    outline.integers = {key: names.get(name, name) for key, name in outline.integers.items()}
    outline.unused = [names.get(name, name) for name in outline.unused]
    outline.zero_only = [names.get(name, name) for name in outline.zero_only]
    outline.optional = frozenset(names.get(name, name) for name in outline.optional)
