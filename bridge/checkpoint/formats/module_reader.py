"""The base class of all readers: it finds the tensors of each module.

A module holds codes (ModuleInfo, read as CodedTensor) or is a FloatWeight (8-bit floats with scales: read as float32).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.checks import check_shapes, finite_scales
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.grouped import CodedTensor
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError

# words in the names of scales of activations and of the key-value cache: of what, which number, what may be added
_ACTIVATIONS = frozenset({
    "act", "activation", "activations", "input", "inputs", "in", "output", "out", "q", "k", "v", "o", "kv", "qk", "p",
    "prob", "probs", "softmax", "key", "value", "query", "cache",
})  # fmt: skip
_NUMBERS = frozenset({"scale", "scales", "qscale", "descale", "scaling", "zero", "zp", "azp", "amax"})
_ADDED = frozenset({
    "point", "points", "factor", "global", "inv", "ub", "rcp", "static", "float", "tensor", "token", "per", "1", "2",
    "proj", "gate", "up", "down", "qkv", "attn", "mlp", "experts", "w1", "w2", "w3", "w13", "bmm", "matmul",
})  # fmt: skip
# words in the names of modules that hold such scales: k_bmm_quantizer._amax, k_cache.scale
_HOLDERS = frozenset({"quantizer", "fake", "quant", "post", "process", "observer", "cache"})


def scales_activations(name: str) -> bool:
    """Whether a tensor of this name is a scale or zero point of activations or of the key-value cache.

    A GGUF does not need them, whichever tool wrote them: input_scale, activation_scale, k_scale, kv_cache_scale,
    gate_up_proj_activation_scale, k_fake_quantizer.qscale_act, input_quantizer._amax, ... Names with any other word
    (weight_scale, pre_quant_scale, correct_output_scale) are not theirs.
    """
    module, part = name.split(".")[-2:] if "." in name else ("", name)
    words, owner = ({*text.lower().split("_")} - {""} for text in (part, module))
    if owner & _HOLDERS:
        words |= owner - (_HOLDERS - _ACTIVATIONS)
    return bool(words & _ACTIVATIONS and words & _NUMBERS) and words <= _ACTIVATIONS | _NUMBERS | _ADDED


@dataclass(frozen=True)
class ModuleInfo:
    """A quantized linear layer as its tensors' shapes describe it; its data has not been read.

    group_size   the config's if it fits the shapes; with act-order, the average
    shape        (out, in)
    nbytes       of all its tensors
    tensors      by the last part of their names, one of a Reader's `parts`
    """

    name: str
    bits: int
    group_size: int
    shape: tuple[int, int]
    nbytes: int
    tensors: dict[str, TensorInfo] = field(repr=False)

    @property
    def stores_g_idx(self) -> bool:
        return "g_idx" in self.tensors or "weight_g_idx" in self.tensors

    @property
    def file(self) -> Path:
        """The file of its codes, for messages."""
        return next(iter(self.tensors.values())).file


@dataclass(frozen=True)
class FloatWeight:
    """A weight whose floats are computed when it is read: 8-bit floats times their scale, for example."""

    weight: TensorInfo
    scale: TensorInfo

    @property
    def stored_names(self) -> set[str]:
        """The full names of its tensors in the file, but for one that has the weight's own name."""
        return {self.scale.name}

    def read(self, store: Store, rows: tuple[int, int] | None = None) -> np.ndarray:
        """float32 [out, in], or only rows start..stop. Raises BridgeError if a scale is NaN or infinite."""
        raise NotImplementedError


class Reader:
    """The quantized modules of one checkpoint."""

    parts: ClassVar[tuple[str, ...]] = ()  # last parts of the names of a module's tensors
    required: ClassVar[tuple[str, ...]] = ()
    short: ClassVar[str] = ""  # the format's name if it is not the config's title
    claim: ClassVar[Mapping[str, Any]] = {}  # what every config of the format means: fields of QuantConfig
    settings: ClassVar[frozenset[str]] = frozenset()  # integer tensors of modules that are not needed
    written: ClassVar[tuple[WrittenFormat, ...]] = ()  # the records of those of its formats that are also written
    plain: ClassVar[frozenset[str]] = frozenset({"bias", "scales"})  # other layers have these too (AWQ: act.scales)

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        self.store = store
        self.quant = quant
        self.format = self.short or quant.title
        self.modules: dict[str, ModuleInfo] = {}
        self.floats: dict[str, FloatWeight] = {}  # by the weight's full name
        self.notes: list[str] = []  # on the whole checkpoint
        self.on_activations: list[str] = []  # notes on why those of a GGUF are not quantized
        self.folding = True  # whether scales may move between layers, see `refit`
        by_module: dict[str, dict[str, TensorInfo]] = {}
        for name, info in store.tensors.items():
            module, part = self.split(name)
            if part in self.parts:
                by_module.setdefault(module, {})[part] = info
            elif part == "B" and info.dtype == "I32":
                raise BridgeError(
                    f"{info.file}: {name} is in the marlin layout but {quant.source} says {quant.method}; "
                    "set checkpoint_format to marlin there"
                )
        for module, tensors in by_module.items():
            if self.is_plain(tensors):
                continue
            for part in self.required_parts(tensors):
                if part not in tensors:
                    some = next(iter(tensors.values()))
                    raise BridgeError(
                        f"{some.file}: {module} has {', '.join(sorted(tensors))} but no {part}; "
                        "is the checkpoint complete?"
                    )
            described = self.describe(module, tensors)
            if isinstance(described, ModuleInfo):
                self.modules[module] = described
            else:
                self.floats[described.weight.name] = described
        if not self.modules and not self.floats and self.expected():
            raise BridgeError(
                f"{quant.source}: says {quant.method}, but no tensor of the checkpoint ends in "
                f".{self.required_parts({})[0]}; is this the folder of the quantized model?"
            )

    @staticmethod
    def split(name: str) -> tuple[str, str]:
        """A tensor's full name, split into the module's name and the part's."""
        module, _, part = name.rpartition(".")
        return module, part

    def owned(self) -> set[str]:
        """The tensors that modules are made of, by full name: codes, scales and so on, but not biases."""
        codes = {t.name for m in self.modules.values() for part, t in m.tensors.items() if part != "bias"}
        return codes.union(*(f.stored_names for f in self.floats.values()))

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        """The config with the format's own entries; `label` is its checkpoint_format or format, in lower case.

        Raises BridgeError for unsupported entries.
        """
        return replace(quant, **cls.claim)

    @classmethod
    def label_of(cls, parts: set[str]) -> str | None:
        """The label for `complete` of a checkpoint without a config, if the last parts of its tensors' names tell that
        it is the format's; None if they do not."""
        return None

    def expected(self) -> bool:
        """Whether the config says that there are quantized modules."""
        return True

    def claimed(self, module: str) -> bool:
        """Whether the config names this module as quantized; rules for all linear layers do not count."""
        return self.quant.names(module)

    def claimed_bits(self, module: str) -> int | None:
        """The bits that the config gives a module; None where it gives none, or `read` notes the difference."""
        return None

    def disagreements(self) -> list[str]:
        """Notes for `inspect` on where the config's bits are not those of the codes."""
        pairs = ((self.claimed_bits(name), info.bits) for name, info in self.modules.items())
        return modules_with(
            f"codes of {bits} bits, but the label says {label}" for label, bits in pairs if label not in (None, bits)
        )

    def in_words(self) -> str:
        """The codes of all modules, for `inspect`."""
        return in_words(self.modules.values())

    def is_plain(self, tensors: dict[str, TensorInfo]) -> bool:
        """Whether these are the parts of a layer that is not quantized."""
        return self.plain.issuperset(tensors)

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        """The parts that a module with `tensors` must have, starting with the one that marks a module."""
        return self.required

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo | FloatWeight:
        """The module that the shapes describe. Raises BridgeError if they contradict each other."""
        raise NotImplementedError

    def read(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        """One module, or some of its rows (int64, in any order); if the layout allows, others' codes are not read.

        Thread-safe.
        """
        t = self.read_all_rows(name)
        return t if rows is None else t.take_rows(rows)

    def read_all_rows(self, name: str) -> CodedTensor:
        """One whole module, for layouts that cannot be read row by row."""
        raise NotImplementedError

    def tensor_scales(self, name: str) -> dict[str, float]:
        """The separate tensors of NVFP4 in GGUF: `scale`, of the whole weight, and `input_scale`; else empty."""
        return {}

    def group_order(self, name: str) -> np.ndarray | None:
        """int32 [in]: the group of each column under act-order, else None."""
        return None

    def refit(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What the rows and the columns of a weight, as it is read, are multiplied with beyond the stored weight's.

        float32 [out] and [in], or None: what was made for the stored model (adapters, importances) must follow.
        """
        return None, None

    def part(self, name: str, part: str, some: np.ndarray | None = None, axis: int = 0) -> np.ndarray:
        """A module's stored tensor, or some of its entries along an axis."""
        full = f"{name}.{part}"
        return self.store.read(full) if some is None else np.take(self.store.view(full), some, axis)

    def bias(self, name: str, rows: np.ndarray | None = None) -> np.ndarray | None:
        """float32 [out] of a whole module; None if it has none, or if only some of its rows are read."""
        return self.store.read_float(f"{name}.bias") if rows is None and "bias" in self.modules[name].tensors else None

    def scales(self, name: str, part: str = "scales") -> np.ndarray:
        """float32, in the file's layout. Raises BridgeError if a value is NaN or infinite."""
        return finite_scales(self.store, f"{name}.{part}")


def module_info(
    name: str, tensors: dict[str, TensorInfo], bits: int, group_size: int, shape: tuple[int, int]
) -> ModuleInfo:
    """A module of that shape. Raises BridgeError if its bias does not fit."""
    check_shapes("bias" not in tensors or tensors["bias"].shape == shape[:1], name, tensors)
    return ModuleInfo(name, bits, group_size, shape, sum(t.nbytes for t in tensors.values()), tensors)


def in_words(modules: Iterable[ModuleInfo]) -> str:
    """The modules' bits and group sizes, with counts where they differ."""
    modules = list(modules)
    rows = sum(m.group_size >= m.shape[1] for m in modules)
    sizes = counted(f"groups of {m.group_size}" for m in modules if m.group_size < m.shape[1])
    per_row = [f"one group a row ({rows})" if sizes else "one group a row"] if rows else []
    return ", ".join([counted(f"{m.bits} bits" for m in modules), *([sizes] if sizes else []), *per_row])


def counted(words: Iterable[str]) -> str:
    """The distinct words, with counts if there are several."""
    counts = Counter(words)
    return ", ".join(word if len(counts) == 1 else f"{word} ({count})" for word, count in sorted(counts.items()))


def modules_with(what: Iterable[str]) -> list[str]:
    """A note for each distinct thing that modules have, with their number."""
    return [f"{n} {'module has' if n == 1 else 'modules have'} {word}" for word, n in Counter(what).items()]
