"""AWQ: 4 bits and true zero points, in three layouts that the tensors' shapes distinguish; 5 to 7 bits of auto-round.

    gemm       qweight int32 [in, out/8]    qzeros int32 [G, out/8]    scales [G, out]
               qweight int32 [in, out*b/32] qzeros int32 [G, out*b/32]
    gemv       qweight int32 [out, in/8]    qzeros int32 [out, zw]     scales [out, zw*8]
    gemv_fast  qweight int16 [out/4, in]    qzeros fp16 [zw*8, out]    scales [zw*8, out]

gemm, of which 4 bits alone are written, interleaves eight output features in a word (see `bits`); with b bits of 5 to
7, the codes of a row, in the same order, are one stream. gemv stores codes in their natural order. gemv_fast (llm-awq's
own layout, where qzeros are named scaled_zeros) stores -s*z and shuffles codes for its kernel's loads. zw*8 is G
rounded up for that kernel; the rest is padding.

In Falcon, MPT, Bloom and others the output of the activation function is divided by scales, which AWQ cannot fold into
the layer before, because the function lies between:

    mlp.act.scales             float [in]     MPT: ffn.act; Bloom: mlp.gelu_impl
    mlp.dense_4h_to_h.qweight  ...            the linear layer after it: as wide, in the same module

Together they are a linear layer whose input columns are divided. Groups of codes cannot express that, so it is floats.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import contradiction, finite_scales
from bridge.checkpoint.formats.module_reader import FloatWeight, ModuleInfo, Reader, module_info
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat, have_shapes
from bridge.checkpoint.formats.zeros import unscaled
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, fit_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.tensor_names import bare_name, pattern_of
from bridge.errors import BridgeError

# gemv_fast: the stored order of each 32 input features
_FAST_ORDER = np.arange(32).reshape(4, 2, 4).transpose(0, 2, 1).reshape(4, 4, 2).transpose(1, 0, 2).reshape(-1)
_GEMM_BITS = (4, 5, 6, 7)

# label -> layout; exllama and ipex are kernels that read gemm, and llm-awq calls gemv_fast's qzeros scaled_zeros
_VERSIONS = {
    "gemm": "gemm", "exllama": "gemm", "exllamav2": "gemm", "ipex": "gemm", "gemv": "gemv", "gemv_fast": "gemv_fast",
    "gemvfast": "gemv_fast", "llm-awq": "gemv_fast",
}  # fmt: skip


class AwqReader(Reader):
    """Reads gemm, gemv and gemv_fast checkpoints."""

    parts: ClassVar = ("qweight", "qzeros", "scaled_zeros", "scales", "bias")
    required: ClassVar = ("qweight", "scales")

    @classmethod
    def label_of(cls, parts: set[str]) -> str | None:
        return "llm-awq" if "scaled_zeros" in parts else None

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw = quant.raw
        version = raw.get("version") or label or ("llm-awq" if raw.get("backend") == "llm-awq" else "gemm")
        version = str(version).lower()
        if version not in _VERSIONS:
            raise BridgeError(
                f"{quant.source}: unknown AWQ version {version!r} (known: {', '.join(sorted(_VERSIONS))}); "
                "save the checkpoint again as gemm"
            )
        return replace(quant, version=_VERSIONS[version], title=f"AWQ version {version}")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self._layouts: dict[str, str] = {}
        self._divided: set[str] = set()  # tensors of modules that are read as floats
        super().__init__(store, quant)
        self.format = f"awq-{next(iter(self._layouts.values()))}"
        scales = [t for name, t in store.tensors.items() if name.endswith(".scales") and t.floating]
        for info in [t for t in scales if t.name.removesuffix(".scales") not in self.modules]:
            self._divide(info)

    def _divide(self, scales: TensorInfo) -> None:
        """Make floats of the layer whose input is divided by an activation's scales."""
        name, shape = _fed_by(self.store, self.modules, scales)
        info = self.modules.pop(name, None)
        weight = self.store.tensors.get(f"{name}.weight")
        codes = None
        if info is not None:
            self._divided |= {t.name for part, t in info.tensors.items() if part != "bias"}
            weight = replace(info.tensors["qweight"], name=f"{name}.weight", shape=shape, nbytes=info.nbytes)
            codes = partial(self._read, info)
        assert weight is not None
        self.floats[weight.name] = DividedFloats(weight, scales, codes)
        self.notes.append(f"{name}: its input is divided by {scales.name}, which codes cannot express; read as floats")

    def claimed_bits(self, module: str) -> int | None:
        return (self.quant.for_module(module) or self.quant).bits if self.quant.labelled else None

    def owned(self) -> set[str]:
        return super().owned() | self._divided

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, scales = tensors["qweight"], tensors["scales"]
        zeros = tensors.get("qzeros") or tensors.get("scaled_zeros")
        if zeros is None or not (weight.is_matrix and scales.is_matrix and zeros.is_matrix):
            raise contradiction(name, tensors)
        rows, words = weight.shape
        bits = words * 32 // max(1, scales.shape[1]) if zeros.shape == (scales.shape[0], words) else 4
        claimed = (self.quant.for_module(name) or self.quant).group_size
        if weight.dtype == "I16":
            layout, out, columns = "gemv_fast", rows * 4, words
            size = _padded_group_size(columns, scales.shape[0], claimed)
            fits = scales.shape[1] == out and zeros.shape == scales.shape and zeros.floating and columns % 64 == 0
        elif weight.dtype == "I32" and bits in _GEMM_BITS and scales.shape[1] * bits == words * 32:
            layout, out, columns = "gemm", scales.shape[1], rows
            size = fit_group_size(columns, scales.shape[0], claimed)
            fits = size is not None and have_shapes(tensors, _shapes(Groups(bits, size), (out, columns)))
        else:
            layout, out, columns = "gemv", rows, words * 8
            size = _padded_group_size(columns, scales.shape[1], claimed)
            fits = weight.dtype == zeros.dtype == "I32" and scales.shape == (rows, zeros.shape[1] * 8)
            fits = fits and zeros.shape[0] == rows
        if not fits or size is None:
            raise contradiction(name, tensors)
        self._layouts[name] = layout
        return module_info(name, tensors, bits if layout == "gemm" else 4, size, (out, columns))

    def read_all_rows(self, name: str) -> GroupedTensor:
        return self._read(self.modules[name])

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        if rows is None or self._layouts[name] != "gemm" or self.modules[name].bits != 4:
            return super().read(name, rows)
        words = np.unique(rows >> 3)  # the words that hold them
        return self._read(self.modules[name], words).take_rows(np.searchsorted(words, rows >> 3) * 8 + (rows & 7))

    def _read(self, info: ModuleInfo, words_of: np.ndarray | None = None) -> GroupedTensor:
        """A module; in the gemm layout, if `words_of` is given, only the eight rows of each of these words."""
        from bridge.checkpoint.formats.bits import unpack_gemm, unpack_rows

        name = info.name
        layout = self._layouts[name]
        out, columns = info.shape
        groups = -(-columns // info.group_size)
        scales = self.scales(name)
        if layout == "gemm":
            words, zeros = (self.part(name, part, words_of, axis=1) for part in ("qweight", "qzeros"))
            if words_of is not None:
                scales = scales.reshape(len(scales), -1, 8)[:, words_of].reshape(len(scales), -1)
            codes, zeros = unpack_gemm(words, info.bits), unpack_gemm(zeros, info.bits).astype(np.float32)
            scales = np.ascontiguousarray(scales.T)
        elif layout == "gemv":
            codes = unpack_rows(self.part(name, "qweight"), 4, columns)
            zeros = unpack_rows(self.part(name, "qzeros"), 4, groups).astype(np.float32)
            scales = np.ascontiguousarray(scales[:, :groups])
        else:
            stream = unpack_rows(self.part(name, "qweight"), 4, columns * 4)
            stream = stream.reshape(out // 4, columns // 32 // 2, 4, 2, 32)
            codes = stream[..., _FAST_ORDER].transpose(0, 2, 1, 3, 4).reshape(out, columns)
            part = "qzeros" if "qzeros" in info.tensors else "scaled_zeros"
            scales = np.ascontiguousarray(scales[:groups].T)
            zeros = unscaled(scales, -self.scales(name, part)[:groups].T)
        notes = []
        if layout != self.quant.version:
            notes.append(
                f"{name}: stored in the {layout} layout but version says {self.quant.version}; read as {layout}"
            )
        claimed = (self.quant.for_module(name) or self.quant).group_size
        if self.quant.labelled and claimed > 0 and info.group_size not in (claimed, columns):
            notes.append(
                f"{name}: scales are for groups of {info.group_size} but group_size says {claimed}; "
                f"read as {info.group_size}"
            )
        bias = self.store.read_float(f"{name}.bias") if "bias" in info.tensors and words_of is None else None
        return GroupedTensor(name, info.bits, codes, scales, zeros, info.group_size, bias=bias, notes=tuple(notes))


@dataclass(frozen=True)
class DividedFloats(FloatWeight):
    """A weight that is divided by the activation's scales; `codes` reads it if it is quantized."""

    codes: Callable[[], GroupedTensor] | None = None

    def __str__(self) -> str:
        return f"{'codes' if self.codes else self.weight.dtype} over activation scales"

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        scales = finite_scales(store, self.scale.name).reshape(-1)
        if not scales.all():
            raise BridgeError(f"{self.scale.file}: {self.scale.name} contains zeros; quantize the model again")
        if self.codes is None:
            return store.read_float(self.weight.name, rows) / scales
        return self.codes().dequantize(slice(*(rows or (None,)))) / scales


def _fed_by(store: Store, modules: dict[str, ModuleInfo], scales: TensorInfo) -> tuple[str, tuple[int, int]]:
    """(module, shape) of the one linear layer after an activation. Raises BridgeError unless exactly one is as wide."""
    activation = scales.name.removesuffix(".scales")
    parent = activation.rpartition(".")[0] + "."
    width = int(np.prod(scales.shape))
    shapes = {name: info.shape for name, info in modules.items()}
    for name, info in store.tensors.items():
        if name.endswith(".weight") and info.floating and len(info.shape) == 2:
            shapes[name.removesuffix(".weight")] = (info.shape[0], info.shape[1])
    layers = [n for n, s in shapes.items() if n.startswith(parent) and "." not in n[len(parent) :] and s[1] == width]
    if len(layers) != 1:
        named = ", ".join(layers) or "none"
        raise BridgeError(
            f"{scales.file}: {scales.name} divides the input of one linear layer of {parent.rstrip('.')}, but "
            f"{len(layers)} are {width} wide ({named}); quantize the model again without scaled activations"
        )
    return layers[0], shapes[layers[0]]


def _padded_group_size(columns: int, stored: int, claimed: int) -> int | None:
    """The group size that gives `stored` groups in the kernel's layout, preferably the claimed one; else None."""
    for size in (claimed, columns, 128, 64, 32):
        size = columns if size <= 0 else min(size, columns)
        if padded_groups(columns, size) == stored:
            return size
    return None


def padded_groups(columns: int, size: int) -> int:
    """zw*8: the number of groups that gemv and gemv_fast store, padded to whole words of their kernel."""
    multiple = 1 if size >= 128 else 2 if size >= 64 else 4
    groups = -(-columns // size)
    return -(-groups // (8 * multiple)) * multiple * 8


def _refusal(groups: Groups, shape: tuple[int, int]) -> str | None:
    if groups.bits != 4:
        return f"AWQ cannot hold {groups.bits} bits; choose 4, or GPTQ for 2, 3 and 8"
    if why := groups.indivisible(shape[1], ", as AWQ needs"):
        return why
    return f"{shape[0]} rows do not fill whole words of 8, as AWQ needs; leave it in floats" if shape[0] % 8 else None


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    """The dtypes and shapes of a layer's tensors in the gemm layout."""
    out, columns = shape
    count = groups.count(columns)
    wide = out * groups.bits // 32
    words = {"qweight": ("I32", (columns, wide)), "qzeros": ("I32", (count, wide))}
    return {**words, "scales": ("F16", (count, out))}


def _pack(tensor: GroupedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_gemm

    scales = np.ascontiguousarray(GEMM.stored_scales(tensor).T)
    return {"qweight": pack_gemm(tensor.codes), "qzeros": pack_gemm(tensor.zeros.astype(np.uint8)), "scales": scales}


def _labels(layers: QuantizedLayers) -> dict[str, Any]:
    if layers.others():
        raise BridgeError("AWQ has one group size for all layers; gptq_v2 has one per layer")
    # readers search names within names: one that is part of a quantized layer's would exclude that too
    every = layers.with_joined()
    names = map(bare_name, every.floats) if layers.towers else every.floats
    left = [name for name in names if not any(name in layer for layer in every.groups)]
    labels: dict[str, Any] = {"quant_method": "awq", "version": "gemm", "zero_point": True}  # qzeros always exist
    if layers.floats:  # GPTQModel reads rules alone
        labels["dynamic"] = {f"-:{pattern_of(name, layers.towers)}": {} for name in layers.floats}
    return {"quantization_config": {**layers.usual.sizes(), **labels, "modules_to_not_convert": left or None}}


GEMM = WrittenFormat(
    "awq", hint="gemm", bits=(4,), refusal=_refusal, shapes=_shapes, pack=_pack, labels=_labels,
    rounding="asymmetric", one_size=True, transposed=True, by_quantize=True,
)  # fmt: skip
AwqReader.written = (GEMM,)
