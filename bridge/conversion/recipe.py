"""What the user asked for: which type each tensor of the GGUF should have.

`--type` is `auto`, `exact`, a block type, or one of llama.cpp's presets. A preset fixes the types of tensors
that arrive as floats by llama.cpp's mixture, and is an upper bound for tensors that arrive as codes: it never
spends bits on codes that already fit a smaller type. A block type is taken literally.

Explicit options for single tensors win over `--type`, the most specific first: `--tensor-type REGEX=TYPE`
(searched in the GGUF name, last match wins), then `--output-type`, `--token-embd-type`, `--actorder-type`.

`--for llama.cpp@BUILD` says what the file is for. Q2_0 is known to llama.cpp since build 10015 (July 2026): `auto` uses
it where the file is for such a build, `exact` unless it is for an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bridge.blocks import BLOCKS, FP4, TYPES, BlockType
from bridge.errors import BridgeError

FLOAT_TYPES = ("F32", "F16", "BF16")
# preset -> base type of its mixture; Q2_K, Q6_K and Q8_0 are block types too
PRESETS = {
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
}
# llama.cpp's substitutes for rows that are not a multiple of 256
_SHORT_ROWS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_TARGET = r"llama\.cpp@b?(\d{1,9})"

Q2_0_SINCE = 10015  # llama.cpp's build

Mode = Literal["auto", "exact", "forced", "at_most"]


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor stands in the model: what mixtures and options go by."""

    name: str  # in the GGUF
    kind: str  # "attn_q", "ffn_down", "token_embd", "output", ...
    layer: int | None
    n_layers: int
    gqa: int  # query heads per key-value head
    columns: int
    tied: bool = False  # token_embd that serves as the output head too
    experts: int = 0  # in a layer; 0 for a dense model


@dataclass(frozen=True)
class Wanted:
    """The type asked for: `type` is None for auto and exact, else a block or float type's name."""

    mode: Mode
    type: str | None = None


@dataclass(frozen=True)
class Recipe:
    """The options of a conversion that decide on types. Names are checked and spelled as ggml does."""

    type: str = "auto"
    output_type: str | None = None
    token_embd_type: str | None = None
    actorder_type: str | None = None
    tensor_types: Sequence[tuple[str, str]] = field(default=())
    target: str | None = None  # "llama.cpp@11549"

    def __post_init__(self) -> None:
        base = {"AUTO": "auto", "EXACT": "exact"}.get(self.type.upper(), self.type.upper())
        if base not in ("auto", "exact", *TYPES, *PRESETS):
            known = ", ".join(["auto", "exact", *TYPES, *(p for p in PRESETS if p not in TYPES)])
            raise BridgeError(f"unknown type {self.type!r}; known: {known}")
        object.__setattr__(self, "type", base)
        for option in ("output_type", "token_embd_type", "actorder_type"):
            if getattr(self, option):
                object.__setattr__(self, option, _tensor_type(getattr(self, option)))
        if self.actorder_type in FLOAT_TYPES:
            raise BridgeError(f"--actorder-type {self.actorder_type} is not a block type; known: {', '.join(BLOCKS)}")
        checked = []
        for pattern, name in self.tensor_types:
            try:
                re.compile(pattern)
            except re.error as problem:
                raise BridgeError(f"--tensor-type {pattern}={name}: not a regular expression: {problem}") from None
            checked.append((pattern, _tensor_type(name)))
        object.__setattr__(self, "tensor_types", tuple(checked))
        if self.target is not None and not re.fullmatch(_TARGET, self.target):
            raise BridgeError(f"--for {self.target}: llama.cpp and its build are wanted, as in llama.cpp@11549")
        asked = (self.type, self.output_type, self.token_embd_type, self.actorder_type, *(t for _, t in checked))
        if "Q2_0" in asked and self.uses_q2_0 is False:
            raise BridgeError(
                f"--for {self.target}: llama.cpp knows Q2_0 since build {Q2_0_SINCE}; choose another type"
            )

    def check(self, names: Sequence[str]) -> None:
        """BridgeError where a tensor_types pattern matches none of the tensors that can be quantized, `names`."""
        for pattern, name in self.tensor_types:
            if not any(re.search(pattern, n) for n in names):
                raise BridgeError(
                    f"--tensor-type {pattern}={name}: matches no tensor that can be quantized; "
                    f"they are named as {names[0]}"
                )

    @property
    def uses_q2_0(self) -> bool | None:
        """Whether the llama.cpp that the file is for knows Q2_0; None where it is not said."""
        return None if self.target is None else int(re.fullmatch(_TARGET, self.target)[1]) >= Q2_0_SINCE  # type: ignore[index]

    @property
    def promises_closeness(self) -> bool:
        """Whether every type is chosen here, by what it adds, and none by the user."""
        given = self.output_type or self.token_embd_type or self.actorder_type or self.tensor_types
        return self.type in ("auto", "exact") and not given

    def wanted(self, place: TensorPlace, as_codes: bool, act_order: bool = False) -> Wanted:
        """The type for a 2-D tensor that arrives as codes or as floats; `act_order`: codes that cannot be carried."""
        explicit = self.explicit(place)
        if explicit is None and act_order:
            explicit = self.actorder_type
        if explicit is not None:
            return Wanted("forced", for_rows(explicit, place.columns))
        if as_codes and for_rows("Q8_0", place.columns) == "F16":  # rows that no block type holds; F32 is exact
            return Wanted("forced", "F32" if self.type == "exact" else "F16")
        if self.type in ("auto", "exact") or (self.type in FP4 and not as_codes):
            return Wanted(self.type) if as_codes else Wanted("forced", for_rows("Q8_0", place.columns))  # type: ignore[arg-type]
        if as_codes and self.type in TYPES:
            return Wanted("forced", for_rows(self.type, place.columns))
        name = _mixture(self.type, place) if self.type in PRESETS else self.type
        return Wanted("at_most" if as_codes else "forced", for_rows(name, place.columns))

    def explicit(self, place: TensorPlace) -> str | None:
        """The type that an option for single tensors gives it, if one does."""
        for pattern, name in reversed(self.tensor_types):
            if re.search(pattern, place.name):
                return name
        if place.kind == "output" or (place.tied and self.output_type):  # as llama.cpp: the head's type comes first
            return self.output_type
        return self.token_embd_type if place.kind == "token_embd" else None


def for_rows(name: str, columns: int) -> str:
    """The type itself, or what llama.cpp puts in its place for rows that do not hold whole blocks."""
    if name in TYPES and columns % TYPES[name].size:
        name = _SHORT_ROWS.get(name, name)
        if columns % TYPES[name].size:
            return "F16"
    return name


def block_type(name: str) -> BlockType | None:
    """The block type of that name; None for F32, F16, BF16."""
    return TYPES.get(name)


def _tensor_type(name: str) -> str:
    upper = name.upper()
    if upper not in TYPES and upper not in FLOAT_TYPES:
        raise BridgeError(f"unknown tensor type {name!r}; known: {', '.join((*TYPES, *FLOAT_TYPES))}")
    return upper


def _mixture(preset: str, place: TensorPlace) -> str:
    """llama.cpp's type for a tensor of an unquantized model under a preset (llama_tensor_get_type)."""
    base = PRESETS[preset]
    kind, i, n = place.kind, place.layer or 0, place.n_layers
    kind = {"ffn_down_exps": "ffn_down", "ffn_down_shexp": "ffn_down", "attn_qkv": "attn_v"}.get(kind, kind)
    if kind == "output" or place.tied:
        if base == "Q8_0" or place.columns % 256:
            return "Q8_0"
        return "Q6_K"
    if place.experts == 8:  # Mixtral: these are small beside the experts
        if kind in ("attn_k", "attn_v"):
            return "Q8_0"
        if kind == "attn_output":
            return "Q5_K" if preset in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M") else base
    more_bits = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
    if preset in ("Q4_K_M", "Q5_K_M") and kind in ("attn_v", "ffn_down"):
        return "Q6_K" if more_bits else base
    if preset == "Q4_K_S" and ((kind == "attn_v" and i < 4) or (kind == "ffn_down" and i < n // 8)):
        return "Q5_K"
    if preset == "Q3_K_L" and kind in ("attn_v", "ffn_down", "attn_output"):
        return "Q5_K"
    if preset == "Q3_K_M":
        if kind == "attn_v":
            return "Q5_K" if i < 2 else "Q4_K"
        if kind == "ffn_down":
            return "Q5_K" if i < n // 16 else "Q4_K"
        return "Q4_K" if kind == "attn_output" else base
    if preset == "Q2_K":
        if kind == "attn_v":
            return "Q4_K" if place.gqa >= 4 else "Q3_K"
        return "Q3_K" if kind in ("ffn_down", "attn_output") else base
    return base
