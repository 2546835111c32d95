"""What the user asked for: which type each tensor of the GGUF should have.

`--type` is `auto`, `exact`, a block or float type, or one of llama.cpp's presets. A preset fixes the types of tensors
that arrive as floats by llama.cpp's mixture, and is an upper bound for tensors that arrive as codes: it never
spends bits on codes that already fit a smaller type. A block or float type is taken literally.

Explicit options for single tensors win over `--type`, the most specific first: `--tensor-type REGEX=TYPE`
(searched in the GGUF name, last match wins), then `--output-type`, `--token-embd-type`, `--actorder-type`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from bridge.blocks import BLOCKS, FP4, ROUNDED, TYPES
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.errors import BridgeError, parameter, refused
from bridge.system.options import check_types, option, pair
from bridge.system.patterns import matched, pattern_problem
from bridge.system.text import unknown

MMPROJ_TYPES = ("F16", "BF16", "F32", "Q8_0")  # of the matrices of a vision tower
_SIZES = {name: block.size for name, block in TYPES.items()} | ROUNDED  # block types: weights in a block
# preset -> base type of its mixture; some are block types' names too
PRESETS = {
    "IQ1_S": "IQ1_S", "IQ1_M": "IQ1_M", "TQ1_0": "TQ1_0", "TQ2_0": "TQ2_0", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS",
    "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XXS": "IQ3_XXS", "IQ3_XS": "IQ3_S", "IQ3_S": "IQ3_S", "IQ3_M": "IQ3_S",
    "IQ4_XS": "IQ4_XS", "IQ4_NL": "IQ4_NL", "Q2_K": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0",
}  # fmt: skip
# the types of untied embeddings, where they are not the base type
_EMBEDDINGS = {
    "IQ1_S": "Q2_K", "IQ1_M": "Q2_K", "IQ2_XXS": "Q2_K", "IQ2_XS": "Q2_K", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S",
    "IQ3_XXS": "IQ3_S", "TQ1_0": "Q4_K", "TQ2_0": "Q4_K",
}  # fmt: skip
_LOWEST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")  # presets with rules of their own
# llama.cpp's substitutes for rows that are not a multiple of 256
_SHORT_ROWS = {
    **{name: "IQ4_NL" for name in ROUNDED if name.startswith("IQ")},
    "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
_TARGET = r"llama\.cpp@b?(\d{1,9})"

Q2_0_SINCE = 10015  # llama.cpp's build

Mode = Literal["auto", "exact", "forced", "at_most"]


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is in the model: what mixtures and options depend on."""

    name: str  # in the GGUF
    kind: str  # "attn_q", "ffn_down", "token_embd", "output", ...
    layer: int | None
    n_layers: int
    gqa: int  # query heads per key-value head
    columns: int
    tied: bool = False  # token_embd that is the output head too
    experts: int = 0  # in a layer; 0 for a dense model
    arch: str = "llama"

    @property
    def of_70b(self) -> bool:
        """Whether llama.cpp takes the model for one of 70 billion weights."""
        return self.n_layers == 80 and (self.arch == "qwen2" or (self.arch == "llama" and self.gqa > 1))


TYPE_NAMES = ["auto", "exact", *_SIZES, *FLOAT_TYPES, *(name for name in PRESETS if name not in _SIZES)]


class Unmet(NamedTuple):
    """A type that was asked for, and why a tensor does not become it; `columns`: of its rows, where these are why."""

    type: str
    why: str
    columns: int | None = None


@dataclass(frozen=True)
class Wanted:
    """The type asked for: None for auto and exact, else a block or float type; `unmet` as in `PlannedTensor`."""

    mode: Mode
    type: str | None = None
    unmet: Unmet | None = None


@dataclass(frozen=True)
class Recipe:
    """The options of a conversion that decide on types. Names are checked and spelled as ggml does."""

    type: str = option(
        "auto",
        "auto (the smallest that keeps the checkpoint's codes), exact (the smallest that keeps them bit for bit), a "
        "type (Q4_K, Q8_0, IQ4_XS, F16, ...) or a llama.cpp mixture (Q4_K_M, ...)",
        metavar="TYPE",
        usual=True,
    )
    output_type: str | None = option(
        None, "type of the output head: a block type, F16, BF16 or F32", metavar="TYPE", says="by --type"
    )
    token_embd_type: str | None = option(None, "type of the token embeddings", metavar="TYPE", says="by --type")
    actorder_type: str | None = option(
        None, "type of act-order tensors, whose codes GGUF cannot hold", metavar="TYPE",
        says=f"the smallest that adds under {REQUANTIZED_LIMIT:.0%} of the noise",
    )  # fmt: skip
    tensor_types: Mapping[str, str] | Sequence[tuple[str, str]] = option(
        (),
        "type of the tensors whose GGUF name matches, such as 'ffn_down=Q6_K'; may be repeated, the last match wins",
        flag="--tensor-type", metavar="REGEX=TYPE", parse=pair,
    )  # fmt: skip
    target: str | None = option(
        None,
        "the llama.cpp build that must be able to load the file. Since build 10015 (July 2026) llama.cpp has Q2_0, "
        "2.25 bits per weight, which holds symmetric 2-bit codes bit for bit: auto uses it for such builds only, exact "
        "unless an earlier one is named", flag="--for", metavar="llama.cpp@BUILD",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        base = {"AUTO": "auto", "EXACT": "exact"}.get(self.type.upper(), self.type.upper())
        if base not in ("auto", "exact", *_SIZES, *FLOAT_TYPES, *PRESETS):
            raise unknown("type", self.type, TYPE_NAMES)
        object.__setattr__(self, "type", base)
        for name in ("output_type", "token_embd_type", "actorder_type"):
            if getattr(self, name):
                object.__setattr__(self, name, _tensor_type(getattr(self, name)))
        if self.actorder_type in FLOAT_TYPES:
            raise refused(
                "actorder_type", self.actorder_type, f"is not a block type; choose one of {', '.join(BLOCKS)}"
            )
        checked = []
        asked: Any = self.tensor_types  # or a dict of them
        if not isinstance(asked, Iterable):
            raise refused("tensor_types", asked, "must be a list of pairs, or a dict")
        pairs = as_pairs(asked)
        for each in pairs:
            if not isinstance(each, tuple | list) or [type(text) for text in each] != [str, str]:
                raise BridgeError(f"{parameter('tensor_types')} {each!r}: must be a regular expression and a type")
        for pattern, name in pairs:
            if problem := pattern_problem(pattern):
                raise refused("tensor_types", (pattern, name), f"is not a regular expression: {problem}")
            checked.append((pattern, _tensor_type(name)))
        object.__setattr__(self, "tensor_types", tuple(checked))
        if self.target is not None and not re.fullmatch(_TARGET, self.target):
            raise refused("target", self.target, "must be llama.cpp and its build, as in llama.cpp@11549")
        asked = (self.type, self.output_type, self.token_embd_type, self.actorder_type, *(t for _, t in checked))
        if "Q2_0" in asked and self.uses_q2_0 is False:
            raise refused("target", self.target, f"llama.cpp has Q2_0 since build {Q2_0_SINCE}; choose another type")

    @property
    def type_patterns(self) -> Sequence[tuple[str, str]]:
        """`tensor_types` as pairs."""
        return as_pairs(self.tensor_types)

    def check(self, names: Sequence[str]) -> None:
        """BridgeError where a tensor_types pattern matches none of the tensors that can be quantized, `names`."""
        for pattern, name in self.type_patterns:
            if not any(matched("search", pattern, n, parameter("tensor_types", (pattern, name))) for n in names):
                why = f"matches no tensor that can be quantized; they have names like {names[0]}"
                raise refused("tensor_types", (pattern, name), why)

    @property
    def uses_q2_0(self) -> bool | None:
        """Whether the llama.cpp that the file is for has Q2_0; None where no build is named."""
        return None if self.target is None else int(re.fullmatch(_TARGET, self.target)[1]) >= Q2_0_SINCE  # type: ignore[index]

    @property
    def promises_closeness(self) -> bool:
        """Whether every type is chosen by the error it adds, and none by the user."""
        explicit = self.output_type or self.token_embd_type or self.actorder_type or self.tensor_types
        return self.type in ("auto", "exact") and not explicit

    def wanted(
        self,
        place: TensorPlace,
        as_codes: bool,
        act_order: bool = False,
        calibrated: bool = False,
        imatrix: bool = False,
    ) -> Wanted:
        """The type for a 2-D tensor that arrives as codes or as floats.

        act_order   codes that cannot be carried
        calibrated  with a calibration text, a head of floats below Q6_K gets that, as in llama.cpp's presets, and
                    layers of floats may become 4-bit floats
        imatrix     whether there is one: some presets spend less on some tensors then
        """
        explicit = self.explicit(place.name, place.kind, place.tied)
        if explicit is None and act_order:
            explicit = self.actorder_type
        if explicit is not None:
            return _fitted("forced", explicit, place)
        if self.type in FLOAT_TYPES:
            return Wanted("forced", self.type)
        if as_codes and for_rows("Q8_0", place.columns) == "F16":  # rows that no block type holds; F32 is exact
            asked = self.type if self.type in _SIZES else "Q8_0"
            return Wanted("forced", "F32" if self.type == "exact" else "F16", _short_rows(asked, place))
        lacks_text = self.type in FP4 and not as_codes and not (calibrated and place.layer is not None)
        if self.type in ("auto", "exact") or lacks_text:
            if as_codes:
                return Wanted(self.type)  # type: ignore[arg-type]
            wanted = _fitted("forced", "Q8_0", place)
            why = f"floats are rounded to {self.type} in layers, with a calibration text"
            return replace(wanted, unmet=Unmet(self.type, why)) if lacks_text else wanted
        if as_codes and self.type in _SIZES:
            return _fitted("forced", self.type, place)
        name = _mixture(self.type, place, imatrix) if self.type in PRESETS else self.type
        is_head = place.kind == "output" or place.tied
        raised = calibrated and is_head and not as_codes and BLOCKS.get(name, BLOCKS["Q6_K"]).bpw < BLOCKS["Q6_K"].bpw
        wanted = _fitted("at_most" if as_codes else "forced", "Q6_K" if raised else name, place)
        if raised and self.type not in PRESETS and wanted.unmet is None:
            why = "with a calibration text, the output head has the bits of Q6_K or more, as in llama.cpp's presets"
            return replace(wanted, unmet=Unmet(name, why))
        return wanted

    def explicit(self, name: str, kind: str, tied: bool) -> str | None:
        """The type that an option for single tensors gives a tensor, if one does; `tied`: it is the head too."""
        for pattern, type in reversed(self.type_patterns):
            if matched("search", pattern, name, parameter("tensor_types")):
                return type
        if kind == "output" or (tied and self.output_type):  # as llama.cpp: the head's type comes first
            return self.output_type
        return self.token_embd_type if kind == "token_embd" else None


def as_pairs(given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """The items of a dict, or of what lists them."""
    return tuple(given.items() if isinstance(given, Mapping) else given)


def _fitted(mode: Mode, name: str, place: TensorPlace) -> Wanted:
    """A type, or what llama.cpp puts in its place for these rows."""
    type = for_rows(name, place.columns)
    return Wanted(mode, type, None if type == name else _short_rows(name, place))


def _short_rows(name: str, place: TensorPlace) -> Unmet:
    return Unmet(name, f"{name} needs rows of a multiple of {_SIZES[name]}", place.columns)


def for_rows(name: str, columns: int) -> str:
    """The type itself, or what llama.cpp puts in its place for rows that do not hold whole blocks."""
    if name in _SIZES and columns % _SIZES[name]:
        name = _SHORT_ROWS.get(name, name)
        if columns % _SIZES[name]:
            return "F16"
    return name


def _tensor_type(name: str) -> str:
    upper = name.upper()
    if upper not in _SIZES and upper not in FLOAT_TYPES:
        raise unknown("tensor type", name, [*_SIZES, *FLOAT_TYPES])
    return upper


def _mixture(preset: str, place: TensorPlace, imatrix: bool) -> str:
    """llama.cpp's type for a tensor of an unquantized model under a preset (llama_tensor_get_type)."""
    base = PRESETS[preset]
    kind = place.kind
    same = {"attn_qkv": "attn_v", "attn_kv_b": "attn_v", "ffn_down_exps": "ffn_down", "ffn_down_shexp": "ffn_down"}
    kind = same.get(kind, "ffn_up" if kind.startswith(("ffn_up", "ffn_gate")) else kind)
    if kind == "output" or place.tied:
        if base == "Q8_0" or place.columns % 256:
            return "Q8_0"
        return "Q5_K" if preset in _LOWEST or preset == "IQ3_XXS" else "Q6_K"
    if kind == "token_embd":
        return _EMBEDDINGS.get(preset, base)
    if preset in _LOWEST:
        return _lowest(preset, place, kind)
    if place.experts == 8:  # Mixtral: these are small compared with the experts
        if kind in ("attn_k", "attn_v"):
            return "Q8_0"
        if kind == "attn_output":
            return base if preset in ("Q3_K_L", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "TQ1_0", "TQ2_0") else "Q5_K"
    usual = _usual(preset, place, kind, imatrix)
    return "Q5_K" if kind == "attn_v" and place.of_70b and usual in ("Q3_K", "Q4_K") else usual


def _usual(preset: str, place: TensorPlace, kind: str, imatrix: bool) -> str:
    """`_mixture` for a layer's tensor under a preset of 3 bits or more, without the rules for experts and for 70B."""
    base, i, n = PRESETS[preset], place.layer or 0, place.n_layers
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
    if preset in ("IQ4_XS", "IQ4_NL"):
        more = (kind == "attn_v" and place.gqa >= 4) or (kind == "ffn_down" and i < n // 8 and not imatrix)
        return "Q5_K" if more else base
    if preset == "IQ3_M":
        down = kind == "ffn_down" and (i < n // 8 or (place.experts == 8 and more_bits))
        return "Q4_K" if down or kind in ("attn_v", "attn_output") else base
    if preset.startswith("IQ3") and kind == "attn_v" and place.gqa >= 4:
        return "Q4_K"
    if preset == "IQ3_XS":
        return "IQ3_XXS" if kind in ("attn_q", "attn_k") or (kind == "ffn_up" and n // 8 <= i < 7 * n // 8) else base
    if preset == "IQ3_XXS":
        if kind == "ffn_down" and not imatrix:
            return "Q4_K" if i < n // 8 else "Q3_K"
        if kind == "attn_v" and not imatrix:
            return "IQ3_S"
        return {"attn_q": "IQ2_S", "attn_k": "IQ2_S", "attn_output": "IQ3_S"}.get(kind, base)
    return base


def _lowest(preset: str, place: TensorPlace, kind: str) -> str:
    """`_mixture` for presets below 3 bits."""
    base = PRESETS[preset]
    more = "IQ3_S" if preset in ("IQ2_S", "IQ2_M") else "Q2_K"
    if kind == "attn_v":
        return "Q4_K" if place.gqa >= 4 or place.experts >= 4 else more
    if kind == "attn_k" and place.experts == 8:
        return "Q4_K"
    if kind == "ffn_down":
        return more if (place.layer or 0) < place.n_layers // 8 else base
    if kind == "attn_output":
        if place.experts == 8:
            return "Q5_K"
        return {"IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S"}.get(preset, base)
    return base
