"""MLX, which Apple's mlx-lm writes: 2 to 8 bits; embeddings and head may be quantized too.

    weight   uint32 [out, in*b/32]   codes, a stream of b bits along the row
    scales   float  [out, G]         may be negative
    biases   float  [out, G]         W = s * q + b
    bias     float  [out]            the layer's own, optional

The modes of floats have no biases. mxfp8 is read like other 8-bit floats (see `fp8`), the others as in `fp4`:

             weight uint32                                          scales uint8
    mxfp8    [out, in/4], four F8_E4M3 a word, lowest byte first    [out, in/32] F8_E8M0: powers of two
    mxfp4    [out, in/8], eight codes a word, lowest bits first     [out, in/32] F8_E8M0
    nvfp4    as mxfp4                                               [out, in/16] F8_E4M3

A mixture's experts are stacked, switch_mlp.gate_proj.weight [experts, out, in*b/32] and so on: they become modules
of their own, experts.E.gate_proj (see `mlx_models`).

config.json has quantization {group_size, bits, mode} and in the same table, by module, false or {group_size, bits};
null means mlx's own defaults, 64 and 4. Tools that mix widths (JANG) may name them in a file of their own. A module's
shapes give bits * group size: where config.json contradicts that for any module, the model's sizes, as config.json has
them, decide between 4 bits in groups of 64 and 8 bits in groups of 32.
Scales and biases are written as halves.
The zero point is -b/s. mlx chooses b as s times an integer, then rounds both: -b/s is near that integer.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.dtypes import as_float32
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, finite_scales
from bridge.checkpoint.formats.fp4 import GROUPS, Fp4Tensor, checked_scales, unpacked
from bridge.checkpoint.formats.fp8 import ScaledFloats
from bridge.checkpoint.formats.mlx_models import mlx_config, module_of, stack_of
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, modules_with
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat, have_shapes
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, PackedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import bare_name
from bridge.errors import BridgeError
from bridge.system.fields import table, whole_number

_BITS, _SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of affine codes: mlx has no others
_MODES = ("affine", "mxfp8", "mxfp4", "nvfp4")
_FAR = 1 << 12  # a zero point so far away belongs to a constant group: mlx's smallest scale is 1e-7
_AFFINE = tuple((bits, size) for size in (64, 32, 128) for bits in (4, 8, 2, 3, 5, 6))  # the usual ones first
# modules by the last part of their names -> what config.json says of the width of their input, in one layer or another
_INPUTS = {
    **dict.fromkeys(
        (
            "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj",
            "gate_up_proj", "gate", "shared_expert_gate", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba",
            "in_proj_a", "in_proj_b", "embed_tokens", "lm_head",
        ),
        ("hidden_size",),
    ),
    "down_proj": ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "o_proj": tuple(f"num_attention_heads {each}" for each in ("head_dim", "global_head_dim", "v_head_dim")),
    "out_proj": ("linear_num_value_heads linear_value_head_dim",),
    "q_b_proj": ("q_lora_rank",),
    "kv_b_proj": ("kv_lora_rank",),
}  # fmt: skip


@dataclass(frozen=True)
class Mxfp8(ScaledFloats):
    """A weight in mode mxfp8.

    source  the tensor that holds it
    matrix  which matrix of it, where it is a stack
    """

    source: str
    matrix: int | None = None

    def codes(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        return self._matrix(store, self.source, rows).view(np.uint8)

    def scales(self, store: Store) -> np.ndarray:
        scales = as_float32(self._matrix(store, self.scale.name), "F8_E8M0")
        if not np.isfinite(scales).all():
            raise BridgeError(f"{self.scale.file}: {self.scale.name} has scales that are NaN; download it again")
        return scales

    def _matrix(self, store: Store, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A stored tensor of the matrix, or some of its rows."""
        if self.matrix is None:
            return store.read(name, rows)
        return store.read(name, (self.matrix, self.matrix + 1))[0][slice(*(rows or (None,)))]


class MlxReader(Reader):
    """Reads mlx-lm's modes."""

    short: ClassVar = "mlx"
    parts: ClassVar = ("weight", "scales", "biases", "bias", "global_scale")
    required: ClassVar = ("weight", "scales", "biases")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        for module, entry in [("", quant.raw), *quant.raw.items()]:
            if table(entry).get("mode", "affine") not in _MODES:
                raise BridgeError(
                    f"{quant.source}: {module + ': ' if module else ''}MLX's mode {entry['mode']!r} is not supported, "
                    f"{', '.join(_MODES)} are; quantize the model again with --q-mode affine"
                )
        default, mode = 64 if quant.raw.get("group_size") is None else quant.group_size, quant.raw.get("mode", "affine")
        size = 16 if mode == "nvfp4" else 32
        claims = () if mode == "affine" else (f"{mode[-1]}-bit floats", f"groups of {size}")
        return replace(quant, sym=False, group_size=default, title=f"MLX, {mode}", claims=claims)

    def __init__(self, *args: Any) -> None:
        self._expert: dict[str, tuple[str, int]] = {}  # module -> the stack that it is in, and where
        self._relabelled: list[tuple[int, int]] = []  # bits and group size of modules for which the config has others
        store, quant = args
        if (coded := next((i for n, i in store.tensors.items() if n.endswith(".tq_packed")), None)) is not None:
            raise BridgeError(
                f"{coded.file}: {coded.name} holds JANGTQ's codebook codes (tq_packed, tq_norms, tq_bits), which are "
                "not supported; use a checkpoint of the same model in another format"
            )
        self._contradicted = _contradicted(store, quant)
        super().__init__(store, quant)
        self.notes += modules_with(
            f"{bits} bits in groups of {size}, which {quant.source} does not say; read as the shapes and the model's "
            "sizes tell"
            for bits, size in self._relabelled
        )
        for stack, info in list(self.modules.items()):
            count = info.tensors["weight"].shape[0]
            if len(info.tensors["weight"].shape) == 3:
                del self.modules[stack]
                for i in range(count):
                    name = module_of(stack, i)
                    self._expert[name] = stack, i
                    self.modules[name] = replace(info, name=name, nbytes=info.nbytes // count)
        for stack, scaled in list(self.floats.items()):
            if isinstance(scaled, Mxfp8) and len(scaled.weight.shape) == 3:
                del self.floats[stack]
                count, *shape = scaled.weight.shape
                for i in range(count):
                    name = module_of(stack, i)
                    weight = replace(scaled.weight, name=name, shape=tuple(shape), nbytes=scaled.weight.nbytes // count)
                    self.floats[name] = replace(scaled, weight=weight, matrix=i)

    def owned(self) -> set[str]:
        return super().owned() | {f.source for f in self.floats.values() if isinstance(f, Mxfp8)}

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return self.required[:2] if _is_mx(tensors) and "biases" not in tensors else self.required

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        return tensors.keys() <= {"weight", "bias"} and not ("weight" in tensors and tensors["weight"].dtype == "U32")

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | ScaledFloats:
        if "global_scale" in tensors:
            raise BridgeError(
                f"{tensors['global_scale'].file}: {name} has a global_scale, which is not supported; "
                "quantize the model again without it"
            )
        if _is_mx(tensors):
            return self._floats(name, tensors)
        weight, scales, biases = (tensors[part] for part in self.required)
        dimensions = 3 if ".switch_mlp." in name else 2
        fits = all(len(t.shape) == dimensions and 0 not in t.shape for t in (weight, scales, biases))
        check_shapes(fits, name, tensors)
        *rows, _ = weight.shape
        out, groups = rows[-1], scales.shape[-1]
        bits, size = self._bits_and_size(name, weight, groups)
        fits = have_shapes(tensors, _shapes(Groups(bits, size), (out, groups * size)), tuple(rows[:-1]))
        check_shapes(fits and ("bias" not in tensors or tensors["bias"].shape == tuple(rows)), name, tensors)
        nbytes = sum(t.nbytes for t in tensors.values())
        return ModuleInfo(name, bits, size, (out, groups * size), nbytes, tensors)

    def _floats(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | Mxfp8:
        """A module of mode mxfp8, mxfp4 or nvfp4, distinguished by the words and groups in a row."""
        weight, scales = tensors["weight"], tensors["scales"]
        rows, bias = weight.shape[:-1], tensors.get("bias")
        dimensions = 3 if ".switch_mlp." in name else 2
        fits = len(weight.shape) == dimensions and 0 not in weight.shape and scales.shape[:-1] == rows
        fits = fits and weight.dtype == "U32" and "biases" not in tensors
        check_shapes(fits and (bias is None or bias.shape == rows), name, tensors)
        words, groups = weight.shape[-1], scales.shape[-1]
        stated_mode = {**self.quant.raw, **table(self.quant.raw.get(name))}.get("mode")
        mode = {8 * groups: "mxfp8", 4 * groups: "mxfp4", 2 * groups: "nvfp4"}.get(words, "")
        if not mode or stated_mode != mode:
            raise BridgeError(
                f"{weight.file}: {name} has {words} words and {groups} groups a row, which are not {stated_mode} as "
                f"{self.quant.source} says; take config and weights of the same model"
            )
        if mode == "mxfp8":
            values = replace(weight, name=f"{name}.weight", dtype="F8_E4M3", shape=(*rows, 4 * words))
            return Mxfp8(values, scales, (1, 32), source=weight.name)
        nbytes = sum(t.nbytes for t in tensors.values())
        return ModuleInfo(name, 4, GROUPS[mode.upper()], (rows[-1], 8 * words), nbytes, tensors)

    def _bits_and_size(self, name: str, weight: TensorInfo, groups: int) -> tuple[int, int]:
        """(bits, group size) of a module: the config's, unless that is contradicted anywhere and does not fit here."""
        words, claimed = weight.shape[-1], _claims(self.quant, name)
        fits = [pair for pair in dict.fromkeys((claimed, *_AFFINE)) if words * 32 == groups * pair[0] * pair[1]]
        fits = [pair for pair in fits if 2 <= pair[0] <= 8]
        if self._contradicted:
            widths = _input_widths(self.quant.model, name)
            fits = [pair for pair in fits if groups * pair[1] in widths] or fits
        if claimed not in fits and len(fits) != 1:
            may_be = " or ".join(f"{bits} bits in groups of {size}" for bits, size in fits) or "no widths that MLX has"
            raise BridgeError(
                f"{weight.file}: {name} has {words} words and {groups} groups a row, which are not {claimed[0]} bits "
                f"in groups of {claimed[1]} as {self.quant.source} says, but {may_be}; take config and weights of the "
                "same model"
            )
        chosen = claimed if claimed in fits else fits[0]
        if chosen != claimed:
            self._relabelled.append(chosen)
        return chosen

    def tensor_scales(self, name: str) -> dict[str, float]:
        return {"scale": 1.0} if _is_mx(self.modules[name].tensors) else {}

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        info = self.modules[name]
        stack, matrix = self._expert.get(name, (name, None))
        expert = None if matrix is None else (matrix, matrix + 1)

        def stored(part: str) -> np.ndarray:
            if rows is None:
                return self.store.read(f"{stack}.{part}", expert).reshape(info.shape[0], -1)
            view = self.store.view(f"{stack}.{part}")
            return np.ascontiguousarray((view if matrix is None else view[matrix])[rows])

        has_bias = rows is None and "bias" in info.tensors
        bias = self.store.read_float(f"{stack}.bias", expert).reshape(-1) if has_bias else None
        if _is_mx(info.tensors):
            kind = "NVFP4" if info.group_size == 16 else "MXFP4"
            bits = checked_scales(kind, stored("scales"), info.tensors["scales"])
            return Fp4Tensor(name, kind, unpacked(stored("weight").view(np.uint8)), bits, info.group_size, bias=bias)
        from bridge.checkpoint.formats.bits import unpack_rows

        scales, offsets = (
            finite_scales(self.store, f"{stack}.{part}", expert).reshape(info.shape[0], -1)
            for part in ("scales", "biases")
        )
        if rows is not None:
            scales, offsets = scales[rows], offsets[rows]
        codes = unpack_rows(stored("weight"), info.bits, info.shape[1])
        notes = []
        if self.quant.raw.get(stack) is False:
            notes.append(f"{name}: quantization says it is not quantized, but it is; read as stored")
        scales, zeros = affine_zeros(codes, scales, offsets, info.group_size)
        if not np.isfinite(zeros).all():
            raise BridgeError(f"{info.file}: {name} has biases far too large for its scales; the checkpoint is damaged")
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=bias, notes=tuple(notes))


def _claims(quant: QuantConfig, name: str) -> tuple[int, int]:
    """(bits, group size) of a module, which shapes do not determine: 4 bits by 64 look like 8 by 32."""
    entry = quant.raw.get(name)
    entry = entry if isinstance(entry, dict) else {"bits": quant.bits, "group_size": quant.group_size}
    label = tuple(default if entry.get(k) is None else entry[k] for k, default in (("bits", 4), ("group_size", 64)))
    bits, size = map(whole_number, label)
    if bits is None or size is None:
        raise BridgeError(f"{quant.source}: {name} has bits {label[0]!r}, group_size {label[1]!r}; correct the file")
    return bits, size


def _contradicted(store: Store, quant: QuantConfig) -> bool:
    """Whether the shapes of any module of affine codes contradict the bits and group size that the config says."""
    for name, scales in store.tensors.items():
        module, _, part = name.rpartition(".")
        weight = store.tensors.get(f"{module}.weight")
        if part == "scales" and scales.floating and scales.shape and weight is not None and weight.shape:
            bits, size = _claims(quant, module)
            if weight.shape[-1] * 32 != scales.shape[-1] * size * bits:
                return True
    return False


def _input_widths(model: dict[str, Any], name: str) -> set[int]:
    """What config.json says of the width of a module's input, in any layer; nothing for modules of other names."""
    sizes = {key: whole_number(value) or 0 for key, value in model.items()}
    sizes.setdefault("head_dim", sizes.get("hidden_size", 0) // max(1, sizes.get("num_attention_heads", 1)))
    products = _INPUTS.get(name.rpartition(".")[2], ())
    return {math.prod(sizes.get(key, 0) for key in product.split()) for product in products} - {0}


def _is_mx(tensors: dict[str, TensorInfo]) -> bool:
    """Whether the scales are bytes, as in the modes of floats."""
    return "scales" in tensors and tensors["scales"].dtype == "U8"


def affine_zeros(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(scales, zero points) float32 [out, G] of W = s * q + offset; groups are runs of `group_size` columns.

    Groups of a single value have a scale near 0, and no usable zero point. Their codes, which have no effect,
    become 1, in place, with the value as scale and 0 as zero point.
    """
    with np.errstate(over="ignore"):
        zeros = np.divide(-offsets, scales, out=np.zeros_like(scales), where=scales != 0)
    far = (np.abs(zeros) > _FAR) | ((scales == 0) & (offsets != 0))
    if not far.any():
        return scales, zeros
    scales = scales.copy()
    for row, group in zip(*np.nonzero(far), strict=True):
        run = codes[row, group * group_size : (group + 1) * group_size]
        if (run == run[0]).all() or scales[row, group] == 0:
            scales[row, group] = scales[row, group] * run[0] + offsets[row, group]
            zeros[row, group] = 0
            run[:] = 1
    return scales, zeros


def _refusal(groups: Groups, shape: tuple[int, int]) -> str | None:
    if groups.bits not in _BITS:
        return f"MLX cannot hold {groups.bits} bits; choose 2, 3, 4, 5, 6 or 8"
    if groups.group_size not in _SIZES:
        return f"MLX has no groups of {groups.group_size}; choose 32, 64 or 128"
    return groups.indivisible(shape[1])


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    each = out, columns // groups.group_size
    words: Shapes = {"weight": ("U32", (out, columns * groups.bits // 32))}
    if groups.kind != "int":
        return words | {"scales": ("U8", each)}
    return words | {"scales": ("F16", each), "biases": ("F16", each)}


def _pack(tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_rows

    if isinstance(tensor, GroupedTensor):
        scales = WRITTEN.stored_scales(tensor)
        return {"weight": pack_rows(tensor.codes, tensor.bits), "scales": scales, "biases": tensor.half_products()}
    if tensor.kind != "int":
        return {"weight": tensor.words.view(np.uint32), "scales": tensor.scales}
    halves, factor = (tensor.scales, -tensor.zero) if tensor.biases is None else (tensor.biases, 1)
    biases = _products(factor).take(halves.view(np.uint16))
    return {"weight": tensor.words, "scales": tensor.scales, "biases": biases}


@cache
def _products(factor: int) -> np.ndarray:
    """All halves times a factor, as halves, by their bits: NumPy is slow at their arithmetic. -0 is 0."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        return (halves.astype(np.float32) * np.float32(factor)).astype(np.float16) + np.float16(0)


def _labels(layers: QuantizedLayers) -> dict[str, Any]:
    others = {key: _mode(groups) for name, groups in layers.others().items() for key in _keys(name, layers.towers)}
    table = {**_mode(layers.usual), **others}
    return {"quantization": table, "quantization_config": table}


def _keys(module: str, towers: bool) -> tuple[str, ...]:
    """A layer's name, and the one that MLX's programs have for it in models of several parts."""
    bare = bare_name(module)
    return (module, f"language_model.{'model.' if bare != module else ''}{bare}") if towers else (module,)


def _mode(groups: Groups) -> dict[str, Any]:
    return {**groups.sizes(), "mode": "affine" if groups.kind == "int" else groups.kind.lower()}


WRITTEN = WrittenFormat(
    "mlx", bits=_BITS, group_sizes=_SIZES, fp4=("NVFP4", "MXFP4"), fp8=("group",), tensor_scale=False,
    zeros="products", refusal=_refusal, shapes=_shapes, pack=_pack, labels=_labels, in_words=True, config=mlx_config,
    dtype="F16", stack_of=stack_of, head=True, embeddings=True,
)  # fmt: skip
MlxReader.written = (WRITTEN,)
