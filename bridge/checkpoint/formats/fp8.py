"""Weights of 8-bit floats with scales, read as the float32 values that they represent.

    weight            F8_E4M3 or F8_E5M2 [out, in]
    weight_scale      float [] or [1], [out] or [out, 1], or [out/r, in/c]: one, one a row, one a block;
                      of blocks [out/r, 1, in/c, 1] too; uint8 [out, in/32]: exponents, F8_E8M0
    weight_scale_inv  the same under another name; also a factor, but for GPTQModel's, which divides: its config has
                      weight_scale_semantics "inverse"
    bias              float [out]

    W[o, k] = scale[o // r, k // c] * weight[o, k]

    weight, scale     the same in DeepSeek V4, whose experts are 4-bit floats (MXFP4, see `fp4`): uint8 or int8
                      [out, in/2] with F8_E8M0 [out, in/32]; in MiMo V2.5 these are weight and weight_scale

MiMo V2.5's qkv_proj is in shares, one after another, for 8 or 4 processes that compute together. Each has its rows of
q, k and v, and blocks of its own, the last of which may be cut: the scales have ranks * ceil(out / ranks / r) rows. It
is read as the rows of q, of k and of v.

Experts in stacks:

    gate_up_proj, down_proj   F8 [experts, rows, columns]
    gate_up_proj_scale        float [experts, 1, out] or [experts, out, 1]: one an output feature, the stack's columns
                              (FBGEMM's experts of Llama 4)
                              float [], [1], [experts], [experts, 1, 1]: one, one an expert
    gate_up_proj_scale_inv    the same, or one a block, float [experts, rows/r, columns/c] (Mistral Small 4)
    gate_up_proj_weight_scale, gate_up_proj_weight_scale_inv   other names of both
    gate_proj.weight, gate_proj.weight_scale_inv   one a block, of stacks named as matrices (Step 3.5)

8-bit floats are not codes: steps between them grow with the value, so no block type holds them as they are. The labels
fp8 (DeepSeek, Qwen: blocks of 128 x 128) and fbgemm_fp8 mean only these; modelopt and compressed-tensors have other
formats too. Blocks of 128 x 128 with weight_scale_inv are written.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32, not_finite
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, contradiction, finite_scales
from bridge.checkpoint.formats.fp4 import Fp4Parts
from bridge.checkpoint.formats.module_reader import FloatWeight, ModuleInfo, Reader
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat
from bridge.checkpoint.grouped import CodedTensor, PackedTensor, fit_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
BLOCK = (128, 128)  # in all known checkpoints


@dataclass(frozen=True)
class ScaledFloats(FloatWeight):
    """A weight of 8-bit floats; `block`: (rows, columns) that share a scale."""

    block: tuple[int, int]
    in_blocks: ClassVar[bool] = True  # whether scale [i, j] is that of block [i, j]

    def __str__(self) -> str:
        rows, columns = self.block
        wide = columns >= self.weight.shape[1]
        if wide and rows >= self.weight.shape[0]:
            return f"{self.weight.dtype}, one scale"
        if rows == 1:
            return f"{self.weight.dtype}, " + ("one scale a row" if wide else f"groups of {columns}")
        return f"{self.weight.dtype}, blocks of {rows}x{columns}"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        out = as_float32(self.codes(store, rows), self.weight.dtype)
        scales = self.scales(store)
        start, stop = rows or (0, len(out))
        scale = spread(scales, stop, self.block[0])[start:]
        for i in range(0, len(out), 64):  # the scale of every weight would take as much memory again
            part = scale[i : i + 64]
            out[i : i + 64] *= np.repeat(part, self.block[1], axis=1)[:, : out.shape[1]]
        return out

    def packed(self, store: Store) -> PackedTensor | None:
        """The bytes and scales of a matrix of F8_E4M3; None for others, and where scales are of no regular blocks.

        Raises BridgeError if a value is not finite.
        """
        if self.weight.dtype != "F8_E4M3" or not self.in_blocks:
            return None
        (out, columns), (rows, width) = self.weight.shape, self.block
        codes, scales = self.codes(store), self.scales(store)
        if (codes & 127 == 127).any():
            raise not_finite(self.weight.file, self.weight.name)
        grid = scales.reshape(-(-out // rows), -(-columns // width))
        module = self.weight.name.removesuffix(".weight")
        return PackedTensor(module, 8, codes, grid, width, kind="FP8", rows=rows)

    def codes(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        """uint8: the bytes of the weight, or of some of its rows."""
        return store.read(self.weight.name, rows)

    def scales(self, store: Store) -> np.ndarray:
        """float32: what blocks are multiplied by, in the shape that is stored."""
        return finite_scales(store, self.scale.name)


@dataclass(frozen=True)
class RenamedFloats(ScaledFloats):
    """A weight of 8-bit floats whose tensor, `source`, is named otherwise than the weight."""

    source: TensorInfo

    @property
    def stored_names(self) -> set[str]:
        return {self.source.name, self.scale.name}

    def codes(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        return store.read(self.source.name, rows)


@dataclass(frozen=True)
class DividedFloats(ScaledFloats):
    """A weight of 8-bit floats that is divided by its scales."""

    def scales(self, store: Store) -> np.ndarray:
        scales = super().scales(store)
        if not scales.all():
            raise BridgeError(
                f"{self.scale.file}: {self.scale.name}, which divides, contains zeros; quantize the model again"
            )
        return 1 / scales


@dataclass(frozen=True)
class SharedRows(ScaledFloats):
    """A weight whose rows are in shares, one for each rank; `parts`: the rows of q, of k and of v in all of them."""

    ranks: int
    parts: tuple[int, ...]
    in_blocks: ClassVar[bool] = False

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        start, stop = rows or (0, self.weight.shape[0])
        share = self.weight.shape[0] // self.ranks
        shares = np.arange(self.weight.shape[0]).reshape(self.ranks, share)
        ends = np.cumsum([part // self.ranks for part in self.parts])[:-1]
        picked = np.concatenate([part.reshape(-1) for part in np.split(shares, ends, axis=1)])[start:stop]
        runs = np.split(picked, 1 + np.flatnonzero(np.diff(picked) != 1))
        out = np.concatenate([store.read_float(self.weight.name, (int(run[0]), int(run[-1]) + 1)) for run in runs])
        blocks = -(-share // self.block[0])
        scale = finite_scales(store, self.scale.name)[picked // share * blocks + picked % share // self.block[0]]
        for i in range(0, len(out), 64):
            out[i : i + 64] *= np.repeat(scale[i : i + 64], self.block[1], axis=1)[:, : out.shape[1]]
        return out


def shared_rows(
    name: str, tensors: dict[str, TensorInfo], block: tuple[int, int], model: Mapping[str, Any]
) -> SharedRows | None:
    """MiMo V2.5's q, k and v in shares; None for other weights, and where rows are not in shares.

    model  the config.json, which tells the rows of each
    """
    keys = "num_attention_heads", "head_dim", "v_head_dim", "swa_num_key_value_heads", "num_key_value_heads"
    heads, size, value, *counts = (number if type(number := model.get(key)) is int else 0 for key in keys)
    if not name.endswith(".qkv_proj") or not tensors["weight"].is_matrix or min(heads, size, value, *counts) < 1:
        return None
    weight, scales = tensors["weight"], tensors["weight_scale_inv"]
    out, columns = weight.shape
    of_layers = [(heads * size, count * size, count * value) for count in counts]
    parts = next((rows for rows in of_layers if sum(rows) == out), None)
    for ranks in (8, 4):  # of V2.5 Pro and V2.5
        grid = (ranks * -(-out // ranks // block[0]), -(-columns // block[1]))
        if parts and scales.shape == grid and not any(part % ranks for part in parts):
            return SharedRows(weight, scales, block, ranks, parts)
    return None


def scaled_floats(name: str, tensors: dict[str, TensorInfo], scale: str, block: tuple[int, int]) -> ScaledFloats:
    """A module's weight with the scale of that name; `block` is the config's.

    Raises BridgeError where the shapes do not fit together.
    """
    weight, scales = tensors["weight"], tensors[scale]
    fits = weight.is_matrix and (scales.floating or scales.dtype == "U8")
    scale_block = block_of(weight.shape, scales.shape, block) if fits else None  # type: ignore[arg-type]
    bias_fits = "bias" not in tensors or tensors["bias"].shape == weight.shape[:1]
    if scale_block is None or (scales.dtype == "U8" and scale_block != (1, 32)) or not bias_fits:
        raise contradiction(name, tensors)
    return ScaledFloats(weight, scales, scale_block)


def block_of(shape: tuple[int, int], scale: tuple[int, ...], claimed: tuple[int, int]) -> tuple[int, int] | None:
    """(rows, columns) that share a scale, from the scale's shape; preferably the claimed ones; else None."""
    out, columns = shape
    if math.prod(scale) == 1:
        return out, columns
    if scale == (out,):
        return 1, columns
    if len(scale) == 4 and scale[1] == scale[3] == 1:  # ModelOpt's blocks of rows and columns
        scale = scale[0], scale[2]
    if len(scale) != 2:
        return None
    rows = 1 if scale[0] == out else fit_group_size(out, scale[0], claimed[0])
    width = fit_group_size(columns, scale[1], claimed[1])
    return (rows, width) if rows and width else None


def spread(scale: np.ndarray, out: int, rows: int) -> np.ndarray:
    """A scale or zero point as stored, `rows` rows of the weight sharing one -> one a row and group, [out, G]."""
    grid = scale.reshape(len(scale), -1) if scale.ndim > 1 else scale.reshape(-1, 1)
    return grid[np.arange(out) // rows]


def read_block(value: object) -> tuple[int, int] | None:
    """A config's [rows, columns] of a block, "128x128" in old files; None for anything else."""
    if isinstance(value, str) and (sides := re.fullmatch(r"(\d+)x(\d+)", value)):
        value = [int(n) for n in sides.groups()]
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None


@dataclass(frozen=True)
class ExpertFloats(FloatWeight):
    """Experts' matrices of 8-bit floats [experts, rows, columns]; `block`: (rows, columns) that share a scale."""

    block: tuple[int, int]

    def __str__(self) -> str:
        (_, high, wide), (rows, columns) = self.weight.shape, self.block
        if columns >= wide and rows >= high:
            each = "one scale an expert" if math.prod(self.scale.shape) > 1 else "one scale"
        elif rows >= high and columns == 1:
            each = "one scale an output feature"
        else:
            each = f"blocks of {rows}x{columns}"
        return f"{self.weight.dtype}, {each}"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        experts = store.read_float(self.weight.name, rows)
        _, high, wide = self.weight.shape
        scales = finite_scales(store, self.scale.name).reshape(-1, -(-high // self.block[0]), -(-wide // self.block[1]))
        if len(scales) > 1:
            scales = scales[slice(*(rows or (None,)))]
        for i, matrix in enumerate(experts):  # the scale of every weight would take as much memory again
            scale = spread(scales[i % len(scales)], high, self.block[0])
            matrix *= np.repeat(scale, self.block[1], axis=1)[:, :wide]
        return experts


def expert_floats(name: str, tensors: dict[str, TensorInfo], block: tuple[int, int]) -> ExpertFloats:
    """A stack of experts with its scales; `block` is the config's. Raises BridgeError where the shapes do not fit."""
    stack, scale = tensors[STACK], tensors[STACK_SCALE]
    check_shapes(len(stack.shape) == 3 and 0 not in stack.shape and scale.floating, name, tensors)
    count, high, wide = stack.shape
    if not scale.name.endswith("_inv") and scale.shape in ((count, 1, wide), (count, wide, 1)):
        return ExpertFloats(stack, scale, (high, 1))
    each = scale.shape[1:] if scale.shape[:1] == (count,) else scale.shape
    shared = block_of((high, wide), each, block)
    if shared is None or (len(scale.shape) != 3 and math.prod(each) != 1):
        raise contradiction(name, tensors)
    return ExpertFloats(stack, scale, shared)


_STACKED = re.compile(r"(?P<stack>.+\.(?:gate_up_proj|down_proj))(?P<scale>(?:_weight)?_scale(?:_inv)?)?")  # experts
STACK, STACK_SCALE = "experts", "experts_scale"  # parts of the modules that these are
_FP4 = {scale: Fp4Parts("weight", scale, "", reciprocal=False) for scale in ("scale", "weight_scale")}


class Fp8Reader(Reader):
    """Reads checkpoints whose linear layers are 8-bit floats."""

    parts: ClassVar[tuple[str, ...]] = (
        "weight", "weight_scale", "weight_scale_inv", "scale", "bias", STACK, STACK_SCALE,
    )  # fmt: skip
    plain: ClassVar = frozenset({"weight", "bias"})

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        if (match := _STACKED.fullmatch(name)) is not None:
            return match["stack"], STACK_SCALE if match["scale"] else STACK
        return Reader.split(name)

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        stack = tensors.get(STACK)
        plain = super().is_plain(tensors) or tensors.keys() == {"scale"}
        return plain or (stack is not None and stack.dtype not in FLOAT8)

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        block = read_block(quant.raw.get("weight_block_size"))
        blocks = (f"blocks of {block[0]}x{block[1]}",) if block else ()
        return replace(
            quant, title="FP8" if quant.method == "fp8" else f"FP8 ({quant.method})", claims=("8-bit floats", *blocks)
        )

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        if STACK in tensors or STACK_SCALE in tensors:
            return STACK_SCALE, STACK
        return next((part for part in ("weight_scale_inv", "scale") if part in tensors), "weight_scale"), "weight"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | FloatWeight:
        block = read_block(self.quant.raw.get("weight_block_size")) or BLOCK
        if STACK in tensors:
            return expert_floats(name, tensors, block)
        weight = tensors["weight"]
        scale = self.required_parts(tensors)[0]
        if scale in _FP4 and weight.dtype in ("I8", "U8"):
            return _FP4[scale].describe(name, tensors)
        if weight.dtype not in FLOAT8:
            raise BridgeError(
                f"{weight.file}: {name} has scales but its weight is {weight.dtype}, not 8-bit floats; "
                "the checkpoint is not of the format that its config names"
            )
        if len(weight.shape) == 3:
            return expert_floats(name, {STACK: weight, STACK_SCALE: tensors[scale]}, block)
        shared = shared_rows(name, tensors, block, self.quant.model) if scale == "weight_scale_inv" else None
        if shared is not None:
            return shared
        described = scaled_floats(name, tensors, scale, block)
        if self.quant.raw.get("weight_scale_semantics") == "inverse":
            return DividedFloats(described.weight, described.scale, described.block)
        return described

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        info = self.modules[name]
        return _FP4["scale" if "scale" in info.tensors else "weight_scale"].read(self, info, rows)


def fp8_shapes(groups: Groups, shape: tuple[int, int], scale: str = "weight_scale") -> Shapes:
    """The dtypes and shapes of a written module's tensors; `scale`: the name of its scales."""
    out, columns = shape
    each = (1,) if groups.rows < 0 else (-(-out // groups.rows), groups.count(columns))
    scales = ("U8" if groups.kind == "MXFP8" else "F32", each)
    inputs: Shapes = {"input_scale": ("F32", (1,))} if groups.static else {}
    return {"weight": ("F8_E4M3", shape), scale: scales, **inputs}


def fp8_parts(tensor: PackedTensor, scale: str = "weight_scale") -> Parts:
    """A written module's tensors."""
    scales = tensor.scales.reshape(-1) if tensor.rows < 0 else tensor.scales
    inputs = {} if tensor.input_scale is None else {"input_scale": np.array([tensor.input_scale], np.float32)}
    return {"weight": tensor.words, scale: scales, **inputs}


def _labels(layers: QuantizedLayers) -> dict[str, Any]:
    labels = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
    return {"quantization_config": {**labels, "modules_to_not_convert": [*layers.floats, "lm_head"]}}


_INVERSE = "weight_scale_inv"
WRITTEN = WrittenFormat(
    "fp8", hint="8-bit floats in blocks", bits=(), fp8=("block",), labels=_labels,
    shapes=lambda groups, shape: fp8_shapes(groups, shape, _INVERSE), pack=lambda tensor: fp8_parts(tensor, _INVERSE),
)  # fmt: skip
Fp8Reader.written = (WRITTEN,)
