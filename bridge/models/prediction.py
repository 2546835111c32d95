"""Layers after the last that predict further tokens at once (MTP, "nextn" in GGUF): DeepSeek-AI 2024, arXiv:2412.19437.

    h' = layer(W_eh [norm(embedding of the next token), norm(h)])        logits of the token after it: head(norm(h'))

Checkpoints number them after the other layers, or name them mtp.*. GGUF has them as the last of its blocks, and their
number in ARCH.nextn_predict_layers. What is no other layer has is blk.N.nextn.*.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from bridge.gguf_file.tensor_names import block_of
from bridge.models.config.arguments import Arguments
from bridge.models.family import Row

_LAYER = re.compile(r"(?:model|backbone)\.layers\.(?P<layer>\d+)\.(?P<rest>.*)")
_APART = re.compile(r"(?:model\.)?mtp\.(?P<all>(?:layers\.(?P<layer>\d+)\.)?(?P<rest>.*))")
# Qwen's modules of mtp.* that belong to no layer there
QWENS = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


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


def with_prediction(
    names: dict[str, str], layers: int, mtp: Mapping[str, str], block: str
) -> tuple[dict[str, str], int]:
    """Names (-> the checkpoint's) with those of mtp.* as layers after the others, and the number of such layers.

    mtp    as `Family.mtp`
    block  what the numbers of layers follow in the family's table, "model.layers"
    """
    numbered = {_numbered(name, layers, mtp, block): stored for name, stored in names.items()}
    numbers = [int(layer["layer"]) for name in numbered if (layer := _LAYER.match(name))]
    return numbered, max(0, max(numbers, default=-1) + 1 - layers)


def mtp_name(name: str, layers: int, mtp: Mapping[str, str]) -> str:
    """A name that `with_prediction` returns as a checkpoint has it; without `mtp` it is the same."""
    match = _LAYER.fullmatch(name)
    if not mtp or match is None or (layer := int(match["layer"]) - layers) < 0:
        return name
    for stored, module in mtp.items():
        if match["rest"].startswith(f"{module}."):
            return f"mtp.{stored}{match['rest'].removeprefix(module)}"
    return f"mtp.layers.{layer}.{match['rest']}"


def without_prediction(names: dict[str, str], layers: int) -> tuple[dict[str, str], list[str]]:
    """Names without those of these layers, and the latter."""

    def one_of_them(name: str) -> bool:
        match = _LAYER.match(name)
        return name.startswith(("mtp.", "model.mtp")) or (match is not None and int(match["layer"]) >= layers)

    return {n: stored for n, stored in names.items() if not one_of_them(n)}, [n for n in names if one_of_them(n)]


def predicting_in(stored: Collection[str], layers: int) -> int:
    """The number of such layers among a GGUF's tensors."""
    return max(0, max((block + 1 for name in stored if (block := block_of(name)) is not None), default=0) - layers)


def left_out(names: Collection[str]) -> list[str]:
    """A note for the report about the layers that are not converted."""
    if not names:
        return []
    return [f"{len(names)} tensors that predict further tokens at once (MTP) are dropped: they affect only speed"]


def _numbered(name: str, layers: int, mtp: Mapping[str, str], block: str) -> str:
    apart = _APART.fullmatch(name)
    if apart is None:
        return name
    for stored, module in mtp.items():
        if apart["all"].startswith(f"{stored}."):
            return f"{block}.{layers}.{module}{apart['all'].removeprefix(stored)}"
    return f"{block}.{layers + int(apart['layer'] or 0)}.{apart['rest']}"
