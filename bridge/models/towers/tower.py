"""A vision tower: the part of a model that turns images into embeddings, and how llama.cpp has it (mmproj).

    table=(
        *vectors_and_matrices,
        Row("encoder.layers.{}.layer_norm1", "v.blk.{}.ln1.weight", bias=True),    for every layer
        ...
    )

`fill` makes an outline of a table: names, shapes and types as `convert_hf_to_gguf.py --mmproj` has them. Vectors are
F32, matrices of the type that was asked for; rows of Q8_0 whose length is no multiple of 32 are F16.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.models.config.model_config import Config
from bridge.models.outline import FRAMES, OutlineTensor, Part, changed_shape

_BLOCK = 32  # weights in a block of Q8_0

# the tensors of towers and of what projects their output, with the whole model's "model." before or without
TOWER_NAME = re.compile(
    r"(?:model\.)?((?:visual|vision_tower|vision_model|multi_modal_projector|vit_large_projector|mlp1|patch_merger"
    r"|patch_merge_mlp|linear_proj|mm_projector|vision_adapter|vision_projection|audio_tower|vision_embedder"
    r"|embed_vision|embed_audio)\..+)"
)


@dataclass(frozen=True)
class Vision:
    """What the config files say about a tower.

    tower      vision_config
    sound      audio_config; None: the model has none
    model      config.json
    text       the same with the keys of the language model on top
    processor  preprocessor_config.json, with what processor_config.json has about images over it
    folder     that they are in
    """

    tower: Config
    sound: Config | None
    model: Config
    text: Config
    processor: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Row:
    """A matrix or vector of the tower, and its bias.

    source       the module in the checkpoint without "model."; {} is the number of the layer
    name         in the GGUF, with ".weight" where it has it; its bias has ".bias" instead
    also         other names of the source
    bias         whether it has one; None: used if present
    kind         "matrix"; "patches": filters of patches, F16 in a file of F16 and F32 in others; or a type
    share        (which, of how many) parts of the source's rows, where it holds q, k and v; `also` has one of them
    order        the rows of q and k as llama.cpp has them: (heads, elements of a head) -> rows of the source
    change       see `outline.Part`
    layers       the layers that have it, as (number in the checkpoint, number in the GGUF); None: all
    exact        the source is the tensor's whole name, without ".weight"
    optional     whether the checkpoint may lack it
    """

    source: str
    name: str
    also: tuple[str, ...] = ()
    bias: bool | None = False
    kind: str = "matrix"
    share: tuple[int, int] | None = None
    order: Callable[[int, int], np.ndarray] | None = None
    change: str | None = None
    layers: Callable[[Config], Sequence[tuple[int, int]]] | None = None
    exact: bool = False
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Sound:
    """The tower that turns sound into embeddings, in the same file.

    projector  clip.audio.projector_type
    table      its tensors
    metadata   more keys, without "clip.audio.": audio_config -> key -> value
    """

    projector: str
    table: tuple[Row, ...]
    metadata: Callable[[Config], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Tower:
    """How the vision tower of an architecture of transformers appears in GGUF.

    architectures  of the whole models, in config.json
    projector      clip.projector_type, or clip.vision.projector_type of a tower beside one for sound
    table          its tensors
    names          vision_config's names of keys: usual name -> its name
    metadata       more keys, without "clip.": Vision -> key -> value
    skipped        names that llama.cpp's graph does not need
    extra          tensors that are not in the tower: (Vision, shapes of the whole checkpoint) -> tensors
    sound          the tower for sound that such models may have
    layered        whether it has layers, as the one for sound then does
    """

    architectures: tuple[str, ...]
    projector: str
    table: tuple[Row, ...]
    metadata: Callable[[Vision], Mapping[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    skipped: str = r"(?!)"
    extra: Callable[[Vision, Mapping[str, Sequence[int]]], list[OutlineTensor]] | None = None
    sound: Sound | None = None
    layered: bool = True


def qkv(source: str, parted: str = "", bias: bool | None = True) -> tuple[Row, ...]:
    """A matrix that holds q, k and v, which llama.cpp has one by one; `parted`: names of the three, * for q, k, v."""
    return tuple(
        Row(
            source, f"v.blk.{{}}.attn_{part}.weight", (parted.replace("*", part),) if parted else (), bias, share=(i, 3)
        )
        for i, part in enumerate("qkv")
    )  # fmt: skip


def fill(
    tower: Tower, vision: Vision, names: Mapping[str, Sequence[int]], type: str
) -> tuple[list[OutlineTensor], list[str]]:
    """The tensors of a tower's GGUF, and names in the checkpoint that it does not need.

    names  every tensor of the checkpoint, quantized modules by their weights, with its shape
    type   of the matrices

    Raises BridgeError where a tensor is missing, or the tower has one that the table does not know.
    """
    filled = _Filled(vision, names, type)
    filled.add_all(tower.table, vision.tower)
    if tower.sound is not None and vision.sound is not None:
        filled.add_all(tower.sound.table, vision.sound)
    left = [name for short, name in sorted(filled.tower_names.items()) if short not in filled.used]
    unused = [name for name in left if re.search(tower.skipped, name)]
    left = [name for name in left if name not in unused]
    if left:
        raise BridgeError(
            f"{left[0]}: the vision tower of {', '.join(tower.architectures)} has no such tensor ({len(left)} in all); "
            f"{_way_out()}"
        )
    return [*filled.tensors, *(tower.extra(vision, names) if tower.extra is not None else [])], unused


def _way_out() -> str:
    return f"{parameter('mmproj_type', 'none')} converts the language model alone"


class _Filled:
    """The rows filled in so far. `tower_names`: the tower's names without "model." -> the checkpoint's."""

    def __init__(self, vision: Vision, names: Mapping[str, Sequence[int]], type: str) -> None:
        self.vision, self.names, self.type = vision, names, type
        self.tower_names = {match[1]: name for name in names if (match := TOWER_NAME.match(name))}
        self.used: set[str] = set()
        self.tensors: list[OutlineTensor] = []

    def add_all(self, table: Sequence[Row], config: Config) -> None:
        for row in table:
            if "{}" not in row.source:
                self.add(row, 0, 0)
                continue
            every = [(i, i) for i in range(config.repeats("num_hidden_layers"))]
            for layer, number in every if row.layers is None else row.layers(config):
                self.add(row, layer, number)

    def add(self, row: Row, layer: int, number: int) -> None:
        sources = [source.format(layer) for source in (row.source, *row.also)]
        suffix = "" if row.exact else ".weight"
        source = next((source for source in sources if f"{source}{suffix}" in self.tower_names), None)
        if source is None:
            if row.optional:
                return
            raise BridgeError(f"{sources[0]}{suffix} is missing from the checkpoint's vision tower; {_way_out()}")
        name = row.name.format(number)
        share = row.share if source == sources[0] else None
        self._plan(row, f"{source}{suffix}", name, share, row.change)
        bias = f"{source}.bias"
        if row.bias and bias not in self.tower_names:
            raise BridgeError(f"{bias} is missing from the checkpoint's vision tower; {_way_out()}")
        if row.bias is not False and bias in self.tower_names:
            self._plan(row, bias, f"{name.removesuffix('.weight')}.bias", share, None)

    def _plan(self, row: Row, short: str, name: str, share: tuple[int, int] | None, change: str | None) -> None:
        self.used.add(short)
        source = self.tower_names[short]
        shape = tuple(self.names[source])
        if change in FRAMES and (len(shape) != 5 or shape[2] != len(FRAMES)):
            raise BridgeError(f"{source}: has shape {list(shape)}, must be filters of two frames; {_way_out()}")
        if change is not None:
            shape = changed_shape(change, shape)
        rows, stored = None, None
        if share is not None:
            which, of = share
            stored, shape = shape, (shape[0] // of, *shape[1:])
            rows = which * shape[0] + np.arange(shape[0])
        elif row.order is not None:
            heads = self.vision.tower.side("num_attention_heads")
            rows = row.order(heads, shape[0] // heads)
        part = Part(source, shape, rows, stored=stored, change=change)
        self.tensors.append(OutlineTensor(name, shape, (part,), fixed_type=self._type(row.kind, shape)))

    def _type(self, kind: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1:
            return "F32"
        if kind == "patches":
            return "F16" if self.type == "F16" else "F32"
        if kind != "matrix":
            return kind
        return "F16" if self.type == "Q8_0" and shape[-1] % _BLOCK else self.type
