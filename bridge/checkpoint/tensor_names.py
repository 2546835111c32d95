"""Names of a checkpoint's tensors and modules: the number of a layer, and of an expert; prefixes of a language model;
layers that inference programs join.

Checkpoints of several parts (images, sound) name the tensors of their language model

    model.language_model.X    model.X, as transformers writes since 4.52
    language_model.model.X    model.X, as before; language_model.lm_head is lm_head
"""

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

# (in the checkpoint, in a language model of its own)
TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
# a layer of vLLM and SGLang -> the layers of checkpoints whose rows it has
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}  # fmt: skip
_WHOLE = {part: whole for whole, parts in _JOINED.items() for part in parts}
_Value = TypeVar("_Value")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_EXPERT = re.compile(r"((?:.*?\.)?experts)\.(\d+)\.(.*)", re.DOTALL)


class ExpertName(NamedTuple):
    """The parts of "model.layers.0.mlp.experts.3.gate_proj.weight": up to "experts", the number, and what follows."""

    experts: str
    number: int
    part: str

    @property
    def pattern(self) -> str:
        """The name with * for the number."""
        return f"{self.experts}.*.{self.part}"


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer, the first in its name: 3 of "model.layers.3.mlp.up_proj"; None outside them."""
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else None


def part_of_block(name: str) -> str:
    """A name with * for the number of the layer."""
    return _LAYER.sub(".*.", name, count=1)


def expert_of(name: str) -> ExpertName | None:
    """The parts of a name of one expert's tensor or module; None for others."""
    expert = _EXPERT.fullmatch(name)
    return ExpertName(expert[1], int(expert[2]), expert[3]) if expert else None


def joined_name(module: str) -> str | None:
    """The module of vLLM and SGLang that has a checkpoint's among others: its experts, or a layer of several parts;
    None for one that stays by itself."""
    if (expert := expert_of(module)) is not None:
        return expert.experts
    parent, dot, name = module.rpartition(".")
    return f"{parent}{dot}{_WHOLE[name]}" if name in _WHOLE else None


def joined(modules: Mapping[str, _Value]) -> dict[str, _Value]:
    """The modules of vLLM and SGLang that join several of these, where they have one value."""
    values: dict[str, set[_Value]] = {}
    for module, value in modules.items():
        if (whole := joined_name(module)) is not None:
            values.setdefault(whole, set()).add(value)
    return {whole: value for whole, (value, *others) in values.items() if not others}


def bare_name(module: str) -> str:
    """A module's name without what stands before it in models of several parts, in each program something else."""
    prefix = next((prefix for prefix, _ in (*TEXT_PREFIXES, ("model.", "")) if module.startswith(prefix)), "")
    return module.removeprefix(prefix)


def pattern_of(module: str, parts: bool) -> str:
    """The regular expression of a module's name; `parts`: in a model of several parts, whatever stands before it."""
    return rf"^(?:.*\.)?{re.escape(bare_name(module))}$" if parts else f"^{re.escape(module)}$"
