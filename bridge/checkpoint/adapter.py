"""Reads a PEFT adapter (LoRA): low-rank changes to a model's layers, and tensors that replace the model's own.

adapter_config.json         r, lora_alpha, use_rslora, rank_pattern, alpha_pattern, use_dora, ...
adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]
                                of embeddings .lora_embedding_A [r, vocab], .lora_embedding_B [hidden, r]
                                with DoRA .lora_magnitude_vector [out]
                            base_model.model.<tensor>   of modules_to_save, and embeddings with new tokens

W' = W + scale * B A        scale = alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)
DoRA: row j of W' is multiplied by magnitude[j] / |row j|    (arXiv:2402.09353)
QA-LoRA: A is [r, in / n] and reads the means of n columns times in / n    (arXiv:2309.14717, as PEFT has it)
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoint.files.store import WRAPPERS, Store
from bridge.checkpoint.tensor_names import TEXT_PREFIXES
from bridge.errors import BridgeError
from bridge.system.patterns import matched, pattern_problem
from bridge.system.storage.files import expanded, read_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
HEAD = "lm_head.weight"
_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.weight)?"
)
# keys of adapter_config.json that change what the tensors mean, and how
_REFUSED = (
    ("target_parameters", "it changes parameters that are not linear layers"),
    ("layer_replication", "its model has other layers than the base model"),
    ("alora_invocation_tokens", "it is switched on by tokens of the prompt (activated LoRA)"),
    ("trainable_token_indices", "it replaces single rows of the embeddings"),
    ("arrow_config", "it routes between several adapters"),
)
_LEAST, _MOST = 1e-6, 1 << 31  # of ranks, alphas and group sizes
_LARGEST = 1e30  # of a change, far from what float32 holds
_OTHER_BASES = ("pissa", "olora", "corda")


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change scale * b a to a matrix [out, in]: a float32 [r, in / alike], b float32 [out, r].

    magnitude  DoRA's length of each row, float32 [out]
    alike      each column of a is for so many consecutive columns of the matrix (QA-LoRA)
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    alike: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in) of the matrix that is changed."""
        return self.b.shape[0], self.a.shape[1] * self.alike

    def rows(self, chosen: slice | np.ndarray, each: int = 1) -> np.ndarray:
        """float32 scale * b a of some rows, of every `each`-th column; `each` divides `alike`."""
        product = np.float32(self.scale) * (self.b[chosen] @ self.a)
        return product if self.alike == each else np.repeat(product, self.alike // each, axis=1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A PEFT adapter in memory.

    alpha       lora_alpha times what rsLoRA makes of it: scale * r of most layers
    changes     module -> its change
    saved       full name of a tensor -> the values that replace it, float32
    transposed  fan_in_fan_out: Conv1D's weights of the base model are stored transposed
    tying       ensure_weight_tying: a head that is tied to the embeddings stays tied to them

    Names are the checkpoint's where `of` returned it, else the adapter's own, without "base_model.model.".
    """

    path: Path
    alpha: float
    changes: dict[str, LowRank]
    saved: dict[str, np.ndarray]
    transposed: bool = False
    tying: bool = False

    @property
    def files(self) -> list[Path]:
        """What it was read from."""
        return [self.path / _CONFIG, self.path / _WEIGHTS]

    def of(self, names: set[str]) -> "Adapter":
        """The adapter with the names of a checkpoint that has tensors of these names, which end in ".weight".

        Raises BridgeError for a layer that the checkpoint does not have.
        """
        short = {_short(name): name for name in names}

        def checkpoint_name(name: str, what: str) -> str:
            for each in (_short(name), _short(name).partition(".")[2]):
                if each in short:
                    return short[each]
            if _short(name) == HEAD:  # tied to the embeddings, it is not in the checkpoint
                return HEAD
            raise BridgeError(
                f"{self.path}: changes {what}, which the base checkpoint does not have; give the base model that the "
                "adapter was trained on"
            )

        changes = {
            checkpoint_name(f"{m}.weight", m).removesuffix(".weight"): change for m, change in self.changes.items()
        }
        saved = {checkpoint_name(name, name): values for name, values in self.saved.items()}
        return replace(self, changes=changes, saved=saved)


def _short(name: str) -> str:
    """A tensor's name in a language model of its own."""
    prefix, text_prefix = next((pair for pair in TEXT_PREFIXES if name.startswith(pair[0])), ("", ""))
    return text_prefix + name.removeprefix(prefix)


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a folder. Raises BridgeError if it is incomplete, damaged, or not a LoRA that is known."""
    folder = expanded(path)
    file = folder / _WEIGHTS
    if not (folder / _CONFIG).is_file():
        raise BridgeError(f"{folder}: has no adapter_config.json; give the folder of a PEFT adapter")
    if not file.is_file():
        raise BridgeError(f"{file}: not found; save the adapter with `save_pretrained`, as safetensors")
    config = read_json(folder / _CONFIG)
    _check(config, folder)
    parts: dict[str, dict[str, np.ndarray]] = {}
    saved: dict[str, np.ndarray] = {}
    store = Store([file])
    for stored in store.tensors:
        name = WRAPPERS.sub("", stored)
        name = name.partition(_PREFIX)[2] or name
        if ".original_module." in name:  # the base model's own values, beside those of modules_to_save
            continue
        values = store.read_float(stored)
        if not np.isfinite(values).all():
            raise BridgeError(f"{file}: {stored} holds NaN or infinite values; the adapter is damaged")
        if (part := _PARTS.fullmatch(name)) is not None:
            parts.setdefault(part["module"], {})[part["part"]] = values
        elif "lora_" in name or "token_adapter" in name or not name.endswith((".weight", ".bias")):
            raise BridgeError(f"{file}: {stored} is not a tensor of a LoRA that is known; merge the adapter with PEFT")
        else:
            plain = re.sub(r"\.modules_to_save(\.default)?\.", ".", name)
            if plain in saved:
                raise BridgeError(f"{file}: holds {plain} under two names; save the adapter with `save_pretrained`")
            saved[plain] = values
    if not parts and not saved:
        raise BridgeError(f"{file}: holds no tensors; the adapter is incomplete")
    rs = config.get("use_rslora") is True
    changes = {module: _change(module, tensors, config, rs, file) for module, tensors in parts.items()}
    alpha = config["lora_alpha"] * (math.sqrt(config["r"]) if rs else 1.0)
    flags = (config.get(key) is True for key in ("fan_in_fan_out", "ensure_weight_tying"))
    return Adapter(folder, alpha, changes, saved, *flags)


def _check(config: dict[str, Any], folder: Path) -> None:
    """BridgeError for what is not LoRA, or is one whose tensors mean something else."""
    file = folder / _CONFIG
    if config.get("peft_type") != "LORA":
        raise BridgeError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA can be read")
    for key, per_module in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = config.get(per_module) or {}
        if not isinstance(patterns, dict):
            raise BridgeError(
                f"{file}: {per_module} is {patterns!r:.80}, must map patterns to numbers; correct the file"
            )
        for name, value in ((key, config.get(key)), *((f"{per_module} {p!r:.80}", v) for p, v in patterns.items())):
            if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value < _MOST:
                raise BridgeError(
                    f"{file}: {name} is {value!r:.80}, must be a number from {_LEAST:g} to 2^31; correct the file"
                )
        for pattern in patterns:
            if problem := pattern_problem(pattern):
                raise BridgeError(
                    f"{file}: {per_module} {pattern!r:.80} is not a regular expression: {problem}; correct the file"
                )
    for key, why in _REFUSED:
        if config.get(key):
            raise BridgeError(f"{file}: {key} is set: {why}; merge it into its base model with PEFT")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_OTHER_BASES):
        raise BridgeError(
            f"{file}: init_lora_weights is {start!r}: it changed the base model's weights too; convert it to a plain "
            "LoRA with PEFT's path_initial_model_for_weight_conversion"
        )


def _change(module: str, parts: dict[str, np.ndarray], config: dict[str, Any], rs: bool, file: Path) -> LowRank:
    """A module's change, in the orientation of its weight."""
    embedded = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedded else ("lora_A", "lora_B")
    for name in names:
        if name not in parts:
            raise BridgeError(f"{file}: {module} has no {name}; the adapter is incomplete")
    a, b = (parts[name] for name in names)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise BridgeError(
            f"{file}: {module} has {names[0]} {list(a.shape)} and {names[1]} {list(b.shape)}; must be two matrices "
            "[r, in] and [out, r] of a linear layer"
        )
    rank = int(a.shape[0])
    expected = _by_pattern(config, "rank_pattern", module, config["r"], file)
    if rank != expected:
        raise BridgeError(
            f"{file}: {module} has rank {rank}, adapter_config.json says {expected}; it is of another one"
        )
    alpha = _by_pattern(config, "alpha_pattern", module, config["lora_alpha"], file)
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and (embedded or magnitude.size != b.shape[0]):
        raise BridgeError(
            f"{file}: {module} has a magnitude vector {list(magnitude.shape)} that does not fit; the adapter is damaged"
        )
    if magnitude is None and config.get("use_dora"):
        raise BridgeError(f"{file}: {module} has no lora_magnitude_vector, but use_dora is set; it is incomplete")
    alike = 1
    if embedded:
        a, b = b.T, a.T
    elif config.get("use_qalora"):
        alike = _group_size(config, file)
        a = a * np.float32(a.shape[1] / alike)
    flat = None if magnitude is None else magnitude.reshape(-1)
    scale = alpha / (math.sqrt(rank) if rs else rank)
    most_a, most_b = (float(np.abs(matrix).max(initial=0)) for matrix in (a, b))
    if scale * rank * max(most_a, 1) * most_b > _LARGEST:
        raise BridgeError(
            f"{file}: {module} has values of up to {most_a:.1e} and {most_b:.1e} in its two matrices, which the scale "
            f"{scale:.1e} of adapter_config.json could bring beyond {_LARGEST:g}; lora_alpha, alpha_pattern or the "
            "weights are damaged"
        )
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), scale, flat, alike)


def _group_size(config: dict[str, Any], file: Path) -> int:
    """The columns whose mean QA-LoRA reads."""
    size = config.get("qalora_group_size")
    if type(size) is not int or not 0 < size < _MOST:
        raise BridgeError(
            f"{file.parent / _CONFIG}: qalora_group_size is {size!r:.80}, must be an integer above 0 and below 2^31; "
            "correct the file"
        )
    return size


def _by_pattern(config: dict[str, Any], key: str, module: str, default: float, file: Path) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT compares them."""
    source = f"{file.parent / _CONFIG}: {key}"
    patterns = (config.get(key) or {}).items()
    fitting = (value for pattern, value in patterns if matched("fullmatch", rf"(.*\.)?({pattern})", module, source))
    return next(fitting, default)
