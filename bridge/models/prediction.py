"""Layers after the last that predict further tokens at once (MTP, "nextn" in GGUF): DeepSeek-AI 2024, arXiv:2412.19437.

    h' = layer(W_eh [norm(embedding of the next token), norm(h)])        logits of the token after it: head(norm(h'))

Checkpoints number them after the other layers, or name them mtp.*. GGUF has them as the last of its blocks, and their
number in ARCH.nextn_predict_layers. What is no other layer has is blk.N.nextn.*.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from bridge.models.arguments import Arguments
from bridge.models.family import Row

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_APART = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<layer>\d+)\.)?(?P<rest>.*)")
# names of Qwen's that belong to no layer -> what they are called in one
_OF_A_LAYER = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}


def predicts(args: Arguments, layer: int) -> bool:
    """Whether a layer is one of them."""
    return layer >= args.layers


def prediction(norms: str | None = None) -> tuple[Row, ...]:
    """What they have besides a layer's own tensors; `norms`: the `Row.change` of norms."""
    rows = (
        Row("eh_proj", "hidden hidden+hidden"),
        Row("enorm", "hidden", change=norms),
        Row("hnorm", "hidden", change=norms),
        Row("shared_head.norm", "hidden", change=norms, optional=True),
        Row("embed_tokens", "vocab hidden", optional=True),
        Row("shared_head.head", "vocab hidden", optional=True),
    )
    # gguf's map does not know them in all architectures
    return tuple(replace(r, name=f"nextn.{r.source.replace('.', '_')}.weight", layers=predicts) for r in rows)


def with_prediction(names: dict[str, str], layers: int) -> tuple[dict[str, str], int]:
    """Names (-> the checkpoint's) with those of mtp.* as layers after the others, and the number of such layers."""
    own = {_numbered(name, layers): stored for name, stored in names.items()}
    found = [int(layer[1]) for name in own if (layer := _LAYER.match(name))]
    return own, max(0, max(found, default=-1) + 1 - layers)


def without_prediction(names: dict[str, str], layers: int) -> tuple[dict[str, str], list[str]]:
    """Names without those of these layers, and the latter."""

    def one_of_them(name: str) -> bool:
        found = _LAYER.match(name)
        return name.startswith(("mtp.", "model.mtp")) or (found is not None and int(found[1]) >= layers)

    return {n: stored for n, stored in names.items() if not one_of_them(n)}, [n for n in names if one_of_them(n)]


def predicting_in(stored: Collection[str], layers: int) -> int:
    """The number of such layers among a GGUF's tensors."""
    return max(0, max((int(block[1]) + 1 for name in stored if (block := _BLOCK.match(name))), default=0) - layers)


def left_out(names: Collection[str]) -> list[str]:
    """A note for the report about the layers that are not converted."""
    if not names:
        return []
    return [f"{len(names)} tensors that predict further tokens at once (MTP) are dropped: they affect only speed"]


def _numbered(name: str, layers: int) -> str:
    apart = _APART.fullmatch(name)
    if apart is None:
        return name
    if apart["layer"] is not None:
        return f"model.layers.{layers + int(apart['layer'])}.{apart['rest']}"
    return f"model.layers.{layers}.{_OF_A_LAYER.get(apart['rest'], apart['rest'])}"
