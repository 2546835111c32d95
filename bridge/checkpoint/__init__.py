"""Opens checkpoints on disk: quantized layers are read as CodedTensor, all other tensors as float32.

    with open_checkpoint("Qwen2.5-7B-GPTQ") as checkpoint:
        for name in checkpoint.modules:
            tensor = checkpoint.read_module(name)

Opening reads configs and headers only. Reading is thread-safe; every array is a new one. Start with `grouped`, the form
to which all formats are converted. files/ finds and reads tensors, labels/ identifies the format, formats/ has a reader
for each, repack/ rewrites GPTQ's zero points, write/ writes checkpoints of quantized layers. `files.hub` also downloads
from the Hub.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.files.weight_files import config_folder, open_store
from bridge.checkpoint.formats.fp8 import FLOAT8, ScaledFloats
from bridge.checkpoint.formats.lattice import Lattice, find_lattice
from bridge.checkpoint.formats.module_reader import ModuleInfo, Reader, in_words, scales_activations
from bridge.checkpoint.formats.registry import READERS
from bridge.checkpoint.formats.trellis_coded import TrellisReader
from bridge.checkpoint.grouped import CodedTensor, GroupedTensor, PackedTensor
from bridge.checkpoint.labels.detect_format import read_quant_config
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.checkpoint.labels.unlabelled import recognise
from bridge.errors import BridgeError, parameter
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.storage.files import expanded, read_json
from bridge.system.text import size_text
from bridge.trellis.layer import TrellisLayer

__all__ = ["Checkpoint", "CodedTensor", "GroupedTensor", "ModuleInfo", "QuantConfig", "TensorInfo", "open_checkpoint"]

_CODES = ("qweight", "weight_packed")  # names of codes that may lack a config
# integers that are read as they are: the experts of a token, the tokens of a drafter's head, and those that it has, and
# what hashes n-grams
_TABLES = (
    "tid2eid", "d2t", "t2d", "token_ordering", "layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes",
)  # fmt: skip


class Checkpoint:
    """An open checkpoint.

    path      its folder, or its one file
    home      the folder with config.json and tokenizer
    config    the contents of config.json
    quant     the quantization that its configs describe
    format    gptq, gptq_v2, gptq_p, awq-gemm, awq-gemv, awq-gemv_fast, marlin, mlx, hqq,
              compressed-tensors ..., FP8, BitNet, QTIP ..., EXL3, or float
    modules   the linear layers that are stored as codes, by Hugging Face name, without ".weight"
    tensors   the floating-point tensors by full name, including biases of quantized modules and 8-bit floats; and
              tables of integers, which are read as floats
    files     the files that hold them
    nbytes    bytes of all tensors
    notes     contradictions between labels and data that concern the whole checkpoint
    on_activations  the notes about activations, which a GGUF does not quantize
    reader    the format's reader; None if all tensors are floats
    store     the stored tensors
    merged    functions that read the rows of tensors that an adapter has changed, by name, see `merge.merge`
    moved     the same for modules whose zero points alone an adapter changes
    unties    whether a head that is tied to the embeddings can become a matrix of its own
    """

    unties: ClassVar[bool] = True

    def __init__(
        self, path: Path, config: dict[str, Any], quant: QuantConfig, store: Store, home: Path | None = None
    ) -> None:
        self.path = path
        self.home = home or path
        self.config, self.quant, self.store = config, quant, store
        self.reader: Reader | None = None if quant.method is None else READERS[quant.method](store, quant)
        self.modules: dict[str, ModuleInfo] = self.reader.modules if self.reader else {}
        self._floats = self.reader.floats if self.reader else {}
        self.format = self.reader.format if self.reader else "float"
        self.files = store.files
        self.nbytes = sum(info.nbytes for info in store.tensors.values())
        self.tensors: dict[str, TensorInfo] = {}
        owned = self.reader.owned() if self.reader else set()
        left_out, unknown = set(), []
        for name, info in store.tensors.items():
            part = name.rpartition(".")[2]
            if name in owned:
                pass
            elif scales_activations(name) and (self.reader or math.prod(info.shape) == 1):
                left_out.add(part)
            elif info.floating or part in _TABLES:
                self.tensors[name] = info
            elif not (self.reader and part in self.reader.settings):
                unknown.append(name)
            codes = part in _CODES or (part == "weight" and not info.floating)
            small = info.dtype in FLOAT8 and name not in self._floats
            if name not in owned and ((codes and not self.modules) or small):
                raise self._unlabelled(info)
        self._lattices: dict[str, Lattice] = {}
        self.merged: dict[str, Callable[[tuple[int, int] | None], np.ndarray]] = {}
        self.moved: dict[str, Callable[[np.ndarray | None], CodedTensor]] = {}
        self.tensors |= {name: scaled.weight for name, scaled in self._floats.items()}
        self.notes = [*quant.notes, *store.notes, *(self.reader.notes if self.reader else [])]
        self.on_activations = [*(self.reader.on_activations if self.reader else [])]
        if quant.method is not None and not quant.labelled:
            self.notes.append(
                f"no config describes the quantization; its tensors show {quant.title}, {self.settings()}"
            )
        if left_out:
            parts = ", ".join(sorted(left_out))
            self.on_activations.append(
                f"scales of activations and of the key-value cache are not needed: {parts} left out"
            )
        self.notes += self.on_activations
        self.notes += [f"{name}: integer tensor of unknown purpose; skipped" for name in unknown]

    def __repr__(self) -> str:
        counts = f"{len(self.modules)} modules, {len(self.tensors)} other tensors"
        return f"{type(self).__name__}({str(self.path)!r}, {self.format}, {counts}, {size_text(self.nbytes)})"

    def _unlabelled(self, info: TensorInfo) -> BridgeError:
        if self.reader:
            return BridgeError(f"{info.file}: {info.name} is {info.dtype} without a scale; is the checkpoint complete?")
        return BridgeError(
            f"{info.file}: {info.name} is quantized, but {self.home / 'config.json'} has no quantization_config "
            "and there is no quantize_config.json; add the one that came with the model"
        )

    def find_lattices(self, progress: Progress | None = None) -> dict[str, Lattice]:
        """The hidden grids of float matrices, by module. `progress`: called with the tensors done, of how many."""
        lattices = {}
        for done, (name, info) in enumerate(self.tensors.items()):
            if progress:
                progress(done, len(self.tensors), name)
            if name.endswith(".weight") and name not in self._floats and (grid := find_lattice(self.store, info)):
                lattices[name.removesuffix(".weight")] = grid
        return lattices

    def take_lattices(self) -> None:
        """Turn every matrix that lies on a hidden grid into a module of codes, with a note."""
        for name, grid in self.find_lattices().items():
            if grid.read(self.store, name) is not None:
                info = self.tensors.pop(grid.weight.name)
                self._lattices[name] = grid
                self.modules[name] = ModuleInfo(
                    name, grid.bits, grid.group_size, (info.shape[0], info.shape[1]), info.nbytes, {"weight": info}
                )
        self.notes += lattice_notes(self._lattices, "their codes are carried")

    def settings(self) -> str:
        """The modules' bits and group sizes in words, with counts where they differ."""
        return self.reader.in_words() if self.reader else in_words(self.modules.values())

    def read_trellis(self, name: str) -> TrellisLayer:
        """A linear layer of QTIP or EXL3 that multiplies with its codes. Thread-safe.

        name  of a module, without ".weight"

        Returns a `bridge.trellis.layer.TrellisLayer`. Raises KeyError for a name that is not in `modules`, BridgeError
        for damaged data and other formats.
        """
        self.modules[name]
        if not isinstance(self.reader, TrellisReader):
            raise BridgeError(f"{name}: is {self.format}, not trellis codes; call read_module")
        return self.reader.layer(name)

    def read_module(self, name: str, rows: np.ndarray | None = None) -> CodedTensor:
        """A quantized linear layer. Thread-safe.

        name  of a module, without ".weight"
        rows  int64 [n], in any order: read only these, without the bias; None: all

        Returns a `bridge.checkpoint.grouped.GroupedTensor` for integer codes, and another CodedTensor for 4-bit floats.
        Trellis codes and codebooks become a DecodedTensor, which holds floats. Raises KeyError for a name that is not
        in `modules`, BridgeError for damaged data.
        """
        self.modules[name]
        if name in self.moved:
            return self.moved[name](rows)
        if name in self._lattices:
            grouped = self._lattices[name].read(self.store, name, rows)
            assert grouped is not None  # the whole matrix was checked when it was taken
            return grouped
        assert self.reader is not None  # as there are modules
        tensor = self.reader.read(name, rows)
        if isinstance(tensor, GroupedTensor):
            with np.errstate(over="ignore", invalid="ignore"):
                largest = np.abs(tensor.scales) * (np.abs(tensor.zeros) + np.float32(2**tensor.bits))
            if not np.isfinite(largest).all():
                raise BridgeError(
                    f"{self.modules[name].file}: {name}: its scales and zero points give weights that are NaN or "
                    "infinite; take another copy of the checkpoint"
                )
        return tensor

    def read_float(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """A tensor as float32 in its own shape. Thread-safe.

        name  of a tensor, in full
        rows  (start, stop): read only these rows; None: all

        8-bit floats are multiplied by their scales. Raises BridgeError for damaged data.
        """
        if name in self.merged:
            return self.merged[name](rows)
        scaled = self._floats.get(name)
        if name.endswith(_TABLES) and not self.store.tensors[name].floating:
            return self.store.read(name, rows).astype(np.float32)
        return scaled.read(self.store, rows) if scaled else self.store.read_float(name, rows)

    def read_float8(self, name: str) -> PackedTensor | None:
        """A matrix of F8_E4M3 as it is stored, with float32 scales of blocks; None for other weights.

        Raises BridgeError if a value is not finite.
        """
        weight = self._floats.get(name)
        if not isinstance(weight, ScaledFloats) or name in self.merged:
            return None
        return weight.packed(self.store)

    def stored_as(self, name: str) -> str:
        """The dtype of a tensor in words, with the layout of its scales if it has any."""
        dtype = self.tensors[name].dtype
        return dtype if name in self.merged else str(self._floats.get(name, dtype))

    def float_scale(self, name: str) -> TensorInfo | None:
        """The stored scales of a tensor of 8-bit floats; None for other tensors."""
        return self._floats[name].scale if name in self._floats and name not in self.merged else None

    def tensor_scales(self, name: str) -> dict[str, float]:
        """See `Reader.tensor_scales`."""
        floats = name in self._lattices or f"{name}.weight" in self.merged
        return self.reader.tensor_scales(name) if self.reader and not floats else {}

    def group_order(self, name: str) -> np.ndarray | None:
        """int32 [in]: the group of each column; None if groups are consecutive. Reads only g_idx."""
        return self.reader.group_order(name) if self.reader and name not in self._lattices else None

    def refit(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """See `Reader.refit`."""
        return self.reader.refit(name) if self.reader and name in self.modules else (None, None)

    def close(self) -> None:
        """Close the files."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lattice_notes(lattices: Mapping[str, Lattice], what: str) -> list[str]:
    """A note on each kind of grid: how many matrices lie on it, followed by `what`."""
    kinds = Counter(map(str, lattices.values()))
    return [f"{count} matrices of floats lie on a grid ({kind}): {what}" for kind, count in kinds.items()]


@checked
def open_checkpoint(
    path: str | Path, config: str | Path | None = None, *, needs_config: bool = True, detect_lattice: bool = False
) -> Checkpoint:
    """Open a local checkpoint. Only configs and headers are read.

    path            a folder in Hugging Face layout, or one file of weights (.pt of the first GPTQ tools)
    config          the folder with config.json and tokenizer, where `path` has none
    needs_config    whether config.json is required; without it, another file must describe the quantization
    detect_lattice  whether float matrices that lie on a hidden grid become modules of codes, with a note

    Returns a `bridge.checkpoint.Checkpoint`. Raises BridgeError if it is incomplete, damaged, or quantized in a way
    that is not supported.
    """
    path = expanded(path)
    if not path.exists():
        raise BridgeError(f"{path}: no such folder; give the folder that holds config.json and the weights")
    home = config_folder(path, config)
    has_config = (home / "config.json").exists()
    if needs_config and not has_config and (home / "adapter_config.json").exists():
        raise BridgeError(
            f"{home}: is an adapter (LoRA), not a whole model; convert its base model with {parameter('merge')} set "
            "to this folder"
        )
    if needs_config and not has_config:
        raise BridgeError(
            f"{home / 'config.json'}: not found; is this the folder of a whole checkpoint? "
            f"{parameter('config')} takes config.json and tokenizer from another folder"
        )
    values = read_json(home / "config.json") if has_config else {}
    quant = QuantConfig()
    if home != path and path.is_dir():
        config_file = path / "config.json"
        quant = read_quant_config(path, read_json(config_file) if config_file.exists() else {})
    if quant.method is None:
        quant = read_quant_config(home, values)
    stem = quant.raw.get("model_file_base_name")
    store = open_store(path, stem if isinstance(stem, str) and "/" not in stem and "\\" not in stem else None)
    checkpoint = Checkpoint(path, values, recognise(store, quant, values), store, home)
    if detect_lattice:
        checkpoint.take_lattices()
    return checkpoint
