"""Names of a checkpoint's tensors and modules: the number of a layer, and of an expert; prefixes of a language model.

Checkpoints of several parts (images, sound) name the tensors of their language model

    model.language_model.X    model.X, as transformers writes since 4.52
    language_model.model.X    model.X, as before; language_model.lm_head is lm_head
"""

import re
from typing import NamedTuple

# (in the checkpoint, in a language model of its own)
TEXT_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
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


def expert_of(name: str) -> ExpertName | None:
    """The parts of a name of one expert's tensor or module; None for others."""
    expert = _EXPERT.fullmatch(name)
    return ExpertName(expert[1], int(expert[2]), expert[3]) if expert else None
