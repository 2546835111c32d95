"""GPTQ, as AutoGPTQ, GPTQModel and auto-round (with that packing) write it.

    qweight  int [in*b/w, out]   codes, a stream of b bits down each column of w-bit words
    qzeros   int [G, out*b/w]    zero points, the same stream along the rows: see `zeros`
    scales   float [G, out]
    g_idx    int32 [in]          group of each input feature; may be absent, negative means + G
    bias     float [out]         optional

Bits, group size and act-order are taken from the tensors, module by module; the config only breaks ties.

It is written with words of 32 bits, which the codes of `in` and `out` must fill, and with g_idx. v1 (z - 1) and v2 (z)
have 2, 3, 4 and 8 bits; GPTQModel's planar packing (gptq_p, z) has 2 to 8. v1 has no zero point of 0.
"""

import threading
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import contradiction
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, module_info
from bridge.checkpoint.formats.written import Groups, Parts, QuantizedLayers, Shapes, WrittenFormat, zeros_of_0
from bridge.checkpoint.formats.zeros import Dialect, code_means, decode, dialects, lost_words, recode, symmetric_dialect
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor, column_group_size, fit_group_size
from bridge.checkpoint.labels.quant_config import OWN_BITS_WRITER, QuantConfig, gptq_labels, packer
from bridge.errors import BridgeError, parameter

_WORD_BITS = {"I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_BITS, _PLANAR_BITS = (2, 3, 4, 8), (2, 3, 4, 5, 6, 7, 8)  # that are written
_SAMPLED_MODULES = 4
_SAMPLED_COLUMNS = 256
_SAMPLED_ROWS = 4096
_FEWEST_CODES = 1 << 14  # with fewer, the codes' mean says too little about the zero points
_FEWEST_ZEROS = 64  # so many equal zero points do not occur by chance in asymmetric quantization


class GptqReader(Reader):
    """Reads `gptq`, `gptq_v2` and `gptq_p` checkpoints."""

    parts: ClassVar = ("qweight", "qzeros", "scales", "g_idx", "bias")
    required: ClassVar = ("qweight", "qzeros", "scales")

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        label = label or "gptq"
        if label not in ("gptq", "gptq_v2", "gptq_p"):
            raise BridgeError(
                f"{quant.source}: unknown checkpoint_format {label!r} (known: gptq, gptq_v2, gptq_p); "
                "save the checkpoint again as gptq"
            )
        return replace(quant, checkpoint_format=label, title=f"GPTQ, checkpoint_format {label}")

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        super().__init__(store, quant)
        self.format = self.short or quant.checkpoint_format
        self._lock = threading.Lock()
        self._by_bits: dict[int, Dialect] = {}

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        weight, zeros, scales = (tensors[p] for p in ("qweight", "qzeros", "scales"))
        g_idx = tensors.get("g_idx")
        fits = all(len(t.shape) == 2 for t in (weight, zeros, scales))
        fits = fits and weight.dtype in _WORD_BITS and zeros.dtype in _WORD_BITS
        if not fits or (g_idx and (len(g_idx.shape) != 1 or 0 in g_idx.shape)):
            raise contradiction(name, tensors)
        quant = self.quant.for_module(name) or self.quant
        (rows, out), groups = weight.shape, scales.shape[0]
        columns = g_idx.shape[0] if g_idx else None
        bits = _infer_bits(quant.bits, rows * _WORD_BITS[weight.dtype], columns, zeros, out)
        if bits is None or 0 in weight.shape or scales.shape != (zeros.shape[0], out):
            raise contradiction(name, tensors)
        if columns is None:
            columns = rows * _WORD_BITS[weight.dtype] // bits
        size = fit_group_size(columns, groups, quant.group_size)
        if size is None and g_idx is None:
            raise contradiction(name, tensors)
        return module_info(name, tensors, bits, size or -(-columns // groups), (out, columns))

    def read(self, name: str, rows: np.ndarray | None = None) -> GroupedTensor:
        from bridge.checkpoint.formats.bits import unpack_columns

        info = self.modules[name]
        out, columns = info.shape
        notes: list[str] = []
        size, order = self._groups(name, notes)
        words = self.part(name, "qzeros")
        dialect = self.dialect(name, words, notes)
        self._note_claims(name, size, order is None, notes)
        groups = words.shape[0] if order is not None else -(-columns // size)
        zeros = decode(words, info.bits, out, dialect)[:groups]
        scales = self.scales(name)[:groups]
        if rows is not None:
            scales, zeros = scales[:, rows], zeros[:, rows]
        codes = unpack_columns(self.part(name, "qweight", rows, axis=1), info.bits, columns, dialect.planar)
        scales, zeros = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T).astype(np.float32)
        return GroupedTensor(name, info.bits, codes, scales, zeros, size, order, self.bias(name, rows), tuple(notes))

    def group_order(self, name: str) -> np.ndarray | None:
        return self._groups(name, [])[1] if self.modules[name].stores_g_idx else None

    def _note_claims(self, name: str, size: int, sequential: bool, notes: list[str]) -> None:
        """Note where bits and group size differ from the config's."""
        info, quant = self.modules[name], self.quant.for_module(name)
        if not self.quant.labelled:
            return
        if quant is None:
            notes.append(f"{name}: dynamic says it is not quantized, but it is; read as stored")
            return
        if quant.bits != info.bits:
            notes.append(f"{name}: stored with {info.bits} bits but the config says {quant.bits}; read as {info.bits}")
        claimed = quant.group_size if 0 < quant.group_size < info.shape[1] else info.shape[1]
        if sequential and size != claimed:
            notes.append(f"{name}: groups of {size} but the config says {quant.group_size}; read as {size}")

    def _groups(self, name: str, notes: list[str]) -> tuple[int, np.ndarray | None]:
        """(group size, None) if groups are consecutive, else (average size, int32 [in])."""
        info = self.modules[name]
        groups = self._stored_groups(name)
        if not info.stores_g_idx:
            return info.group_size, None
        group = self.part(name, "g_idx").astype(np.int64)
        group[group < 0] += groups
        file = info.tensors["g_idx"].file
        if group.min() < 0 or group.max() >= groups:
            raise BridgeError(
                f"{file}: {name}.g_idx names a group beyond the {groups} that have scales; the checkpoint is damaged"
            )
        if groups > 1 and not group.any():
            if fit_group_size(info.shape[1], groups, info.group_size) is None:
                raise contradiction(name, info.tensors)
            notes.append(f"{name}: g_idx is all zeros for {groups} groups; read as consecutive groups")
            return info.group_size, None
        size = column_group_size(group)
        return (size, None) if size else (info.group_size, group.astype(np.int32))

    def _stored_groups(self, name: str) -> int:
        return self.modules[name].tensors["scales"].shape[0]

    def _choices(self, bits: int) -> list[Dialect]:
        choices = dialects(bits, self.quant.bits, self.quant.checkpoint_format, self.quant.gptqmodel)
        return choices[:1] if self.quant.packed_here else choices

    def dialect(self, name: str, words: np.ndarray, notes: list[str]) -> Dialect:
        """How a module's qzeros are stored, as far as the data shows it; see `zeros`.

        Contradictions to the config, and zero points that are lost, are added to `notes`.
        """
        dialect = self._dialect(name, words, notes)
        lost = lost_words(words, self.modules[name].bits) if dialect.undo and self.quant.gptqmodel is None else 0
        if lost:
            notes.append(
                f"{name}: {lost} words of qzeros were overwritten with ones by AutoGPTQ, which cannot store "
                "a zero point of 0; the rows they belong to are wrong in every program that reads this file"
            )
        return dialect

    def _dialect(self, name: str, words: np.ndarray, notes: list[str]) -> Dialect:
        info = self.modules[name]
        choices = self._choices(info.bits)
        quant = self.quant.for_module(name) or self.quant
        label = self.quant.checkpoint_format
        dialect = symmetric_dialect(words, info.bits, info.shape[0], choices)
        enough = quant.sym or words.shape[0] * info.shape[0] >= _FEWEST_ZEROS
        if dialect is not None and (dialect == choices[0] or enough):
            if dialect != choices[0]:
                word = f"0x{int(words.view(f'u{words.dtype.itemsize}')[0, 0]):0{words.dtype.itemsize * 2}X}"
                told = label if str(dialect) != str(choices[0]) else f"{label} of {self.quant.bits} bits"
                notes.append(
                    f"{name}: qzeros are symmetric {dialect} ({word}) but {self._claim(told)}; read as {dialect}"
                )
            return dialect
        dialect = self._by_evidence(info.bits)
        if dialect != choices[0]:
            notes.append(
                f"{name}: the codes centre on {dialect} zero points but {self._claim(label)}; read as {dialect}"
            )
        return dialect

    def _claim(self, label: str) -> str:
        """The config's claim, for a note."""
        return f"checkpoint_format says {label}" if self.quant.labelled else "no config says so"

    def _by_evidence(self, bits: int) -> Dialect:
        """The dialect of asymmetric zero points of `bits`: the config's, unless the codes clearly contradict it."""
        with self._lock:
            if bits not in self._by_bits:
                self._by_bits[bits] = self._weigh(bits)
            return self._by_bits[bits]

    def _weigh(self, bits: int) -> Dialect:
        choices = self._choices(bits)
        if len(choices) == 1:
            return choices[0]
        names = [n for n, info in self.modules.items() if info.bits == bits]
        some = names[:: -(-len(names) // _SAMPLED_MODULES)]
        sampled = [gain for n in some if (gain := self._gains(n, choices)) is not None]
        if not sampled:
            return choices[0]
        gain = np.median(sampled, axis=0)
        best = int(np.argmax(gain))
        # 8-bit codes scatter by dozens of steps, and their mean by a few: only a gross error is visible
        clear = 0.5 if bits <= 4 else 128.0
        return choices[best] if gain[best] > clear else choices[0]

    def _gains(self, name: str, choices: list[Dialect]) -> np.ndarray | None:
        """How much closer the zero points of each dialect are to the mean code than those of the first dialect.

        In squared steps, for the median group of a corner of the module. None if the module is symmetric
        or too small to decide.
        """
        from bridge.checkpoint.formats.bits import unpack_columns

        info = self.modules[name]
        words = self.part(name, "qzeros")
        if symmetric_dialect(words, info.bits, info.shape[0], choices) is not None:
            return None
        out, columns = min(info.shape[0], _SAMPLED_ROWS), min(info.shape[1], _SAMPLED_COLUMNS)
        if out * columns < _FEWEST_CODES:
            return None
        weight = info.tensors["qweight"]
        rows = -(-columns * info.bits // _WORD_BITS[weight.dtype])
        corner = self.store.read(weight.name, (0, min(rows, weight.shape[0])))[:, :out]
        size, order = self._groups(name, [])
        group = (order if order is not None else np.arange(info.shape[1]) // size)[:columns]
        distances = []
        for planar in (False, True):
            if planar in {choice.planar for choice in choices}:
                means, present = code_means(unpack_columns(corner, info.bits, columns, planar), group)
            for choice in choices:
                if choice.planar == planar:
                    zeros = decode(words, info.bits, info.shape[0], choice)[present, :out]
                    distances.append((choice, np.square(means - zeros.T)))
        by_choice = dict(distances)
        return np.array([np.median(by_choice[choices[0]] - by_choice[choice]) for choice in choices])


def _infer_bits(claimed: int, total: int, columns: int | None, zeros: TensorInfo, out: int) -> int | None:
    """Bits of a code: from the words per input feature, else from the zero points per output feature.

    `total` is the number of bits in a column of qweight, `columns` the length of g_idx. Either may be padded to
    a word or to 32 codes; bits that fit without padding are preferred, then those of the config.
    """
    width = _WORD_BITS[zeros.dtype]
    stored = zeros.shape[1] * width
    fits = []
    for bits in (claimed, 2, 3, 4, 5, 6, 7, 8):
        words = -(-out * bits // width) * width
        if not 2 <= bits <= 8 or not words <= stored <= max(words, -(-out // 32) * 32 * bits):
            continue
        if columns is None:
            if total >= bits:
                fits.append((stored != out * bits, bits))
        elif columns * bits <= total < (columns + 32) * bits + 64:
            fits.append((total != columns * bits, bits))
    return min(fits, key=lambda fit: fit[0])[1] if fits else None


def _refusal(planar: bool, groups: Groups, shape: tuple[int, int]) -> str | None:
    if groups.bits not in (_PLANAR_BITS if planar else _BITS):
        return f"GPTQ v1 and v2 cannot hold {groups.bits} bits; choose 2, 3, 4 or 8"
    for count, what in ((shape[1], "columns"), (shape[0], "rows")):
        if count * groups.bits % 32 or (planar and count % 32):
            codes = f"{count} {what} of {groups.bits} bits"
            return f"{codes} do not fill whole 32-bit words, as GPTQ needs; leave it in floats"
    return None


def _shapes(groups: Groups, shape: tuple[int, int]) -> Shapes:
    out, columns = shape
    count = groups.count(columns)
    return {
        "qweight": ("I32", (columns * groups.bits // 32, out)), "qzeros": ("I32", (count, out * groups.bits // 32)),
        "scales": ("F16", (count, out)), "g_idx": ("I32", (columns,)),
    }  # fmt: skip


def _pack(format: str, tensor: GroupedTensor | PackedTensor) -> Parts:
    from bridge.checkpoint.formats.packing import pack_columns, pack_rows

    bits, planar, v1 = tensor.bits, format == PLANAR.name, format == V1.name

    def packed(zeros: np.ndarray) -> np.ndarray:
        words = pack_rows(zeros, bits, planar).view(np.int32)
        return recode(words, bits, Dialect(), Dialect(bits)) if v1 else words

    if isinstance(tensor, PackedTensor):  # all groups have one zero point
        out, columns = tensor.shape
        zeros = packed(np.full((1, out), tensor.zero, np.uint8))
        return {
            "qweight": tensor.words.T.view(np.int32),
            "qzeros": np.broadcast_to(zeros, (tensor.scales.shape[1], zeros.shape[1])),
            "scales": tensor.scales.T,
            "g_idx": np.arange(columns, dtype=np.int32) // np.int32(tensor.group_size),
        }
    scales = next(written for written in (V1, V2, PLANAR) if written.name == format).stored_scales(tensor)
    if v1 and (count := zeros_of_0(tensor)):
        raise BridgeError(
            f"{tensor.name}: {count} groups have a zero point of 0, which GPTQ v1 cannot hold; "
            f"{parameter('clamp', True)} makes them 1, gptq_v2 keeps them"
        )
    return {
        "qweight": pack_columns(tensor.codes, bits, planar),
        "qzeros": packed(np.ascontiguousarray(tensor.zeros.T.astype(np.uint8))),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": tensor.groups().astype(np.int32),
    }


def _labels(format: str, layers: QuantizedLayers) -> dict[str, Any]:
    usual, writers = layers.usual, packer()
    if layers.asymmetric and format == V1.name:
        writers.append(OWN_BITS_WRITER)
    every = layers.with_joined()
    labels = gptq_labels(
        format, usual.bits, usual.group_size, desc_act=layers.act_order, sym=not layers.asymmetric,
        floats=every.floats, others={n: groups.sizes() for n, groups in every.groups.items() if groups != usual},
        parts=layers.towers,
    )  # fmt: skip
    labels |= {"lm_head": "lm_head" in layers.groups, "format": format, "pack_dtype": "int32"}
    return {"quantization_config": labels | {"meta": {"quantizer": writers, "packer": packer()}}}


V2 = WrittenFormat(
    "gptq_v2", bits=_BITS, refusal=partial(_refusal, False), shapes=_shapes, pack=partial(_pack, "gptq_v2"),
    labels=partial(_labels, "gptq_v2"), labels_file="quantize_config.json", act_order=True, in_words=True,
    transposed=True, head=True, by_quantize=True,
)  # fmt: skip
V1 = replace(
    V2, name="gptq", hint="v1", zeros="integers from 1", pack=partial(_pack, "gptq"), labels=partial(_labels, "gptq")
)
PLANAR = replace(
    V2, name="gptq_p", hint="planar, of GPTQModel: 5 to 7 bits too", bits=_PLANAR_BITS, by_quantize=False,
    refusal=partial(_refusal, True), pack=partial(_pack, "gptq_p"), labels=partial(_labels, "gptq_p"),
)  # fmt: skip
GptqReader.written = V1, V2, PLANAR
