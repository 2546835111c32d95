"""Reads a PEFT adapter: low-rank changes to a model's layers (LoRA), and values that replace the model's own.

adapter_config.json         see `adapter_config`
adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r]
                                of embeddings .lora_embedding_A [r, vocab], .lora_embedding_B [hidden, r]
                                with DoRA .lora_magnitude_vector [out]
                            base_model.model.<tensor>   of modules_to_save, and embeddings with new tokens
                            base_model.model.<module>.token_adapter.trainable_tokens_delta [tokens, hidden]: rows of
                                the embeddings, or of the head, that replace the model's

W' = W + scale * B A        scale = alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)
DoRA: row j of W' is multiplied by magnitude[j] / |row j|    (arXiv:2402.09353)
QA-LoRA: A is [r, in / n] and reads the means of n columns times in / n    (arXiv:2309.14717, as PEFT has it)

A stack of experts is a parameter, not a layer. PEFT wraps what has it, once for each parameter that it changes; names
tell how deep a wrapper is, but not which parameter it is of: experts.base_layer.lora_A, experts.lora_A.

    lora_A [experts r, in]      an expert's rows follow one another
    lora_B [out, r experts]     an expert's columns are every experts-th
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bridge.checkpoint.adapter_config import FILE, AdapterConfig, read_config
from bridge.checkpoint.files.store import WRAPPERS, Store
from bridge.checkpoint.tensor_names import TEXT_PREFIXES
from bridge.errors import BridgeError
from bridge.system.storage.files import expanded

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
HEAD = "lm_head.weight"
_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.weight)?"
)
_TOKENS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta(\.default)?")
_SAVED = re.compile(r"\.(modules_to_save(\.default)?|token_adapter)(?=\.)")
_PARAMETERS = (".gate_up_proj", ".down_proj")  # beside weights and biases
_LARGEST = 1e30  # of a change, far from what float32 holds


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
class TokenRows:
    """Rows that replace those of the embeddings or the head: of these tokens, int64 [n], float32 [n, hidden]."""

    tokens: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class StackChanges:
    """Changes to matrices of a 3-D tensor, by their number; `transposed`: it has them as [in, out]."""

    matrices: dict[int, LowRank]
    transposed: bool


@dataclass(frozen=True, eq=False)
class Adapter:
    """A PEFT adapter in memory.

    changes     module -> its change
    saved       full name of a tensor -> the values that replace it, float32
    based       the same of the base model's own values, as it was trained: with more tokens, or else the checkpoint's
    tokens      module -> the rows that replace its own
    parameters  module -> lora_A and lora_B of what PEFT wraps it with, from the inside out: of its parameters, or of
                its weight
    stacks      full name of a tensor of the checkpoint -> changes to its matrices, see `place_experts`

    Names are the checkpoint's where `of` returned it, else the adapter's own, without "base_model.model.".
    """

    path: Path
    config: AdapterConfig
    changes: dict[str, LowRank]
    saved: dict[str, np.ndarray]
    based: dict[str, np.ndarray]
    tokens: dict[str, TokenRows]
    parameters: dict[str, list[tuple[np.ndarray, np.ndarray]]]
    stacks: dict[str, StackChanges] = field(default_factory=dict)

    @property
    def transposed(self) -> bool:
        """fan_in_fan_out: Conv1D's weights of the base model are stored transposed."""
        return self.config.values.get("fan_in_fan_out") is True

    @property
    def tying(self) -> bool:
        """ensure_weight_tying: a head that is tied to the embeddings stays tied to them."""
        return self.config.values.get("ensure_weight_tying") is True

    @property
    def files(self) -> list[Path]:
        """What it was read from."""
        return [self.path / FILE, self.path / _WEIGHTS]

    def of(self, names: set[str]) -> "Adapter":
        """The adapter with the names of a checkpoint that has tensors of these names, which end in ".weight".

        Raises BridgeError for a layer that the checkpoint does not have.
        """
        known = Names(names)

        def checkpoint_name(name: str, what: str) -> str:
            if (stored := known.find(name)) is not None:
                return stored
            if short_name(name) == HEAD:  # tied to the embeddings, it is not in the checkpoint
                return HEAD
            raise BridgeError(
                f"{self.path}: changes {what}, which the base checkpoint does not have; give the base model that the "
                "adapter was trained on"
            )

        def checkpoint_module(module: str) -> str:
            return checkpoint_name(f"{module}.weight", module).removesuffix(".weight")

        changes = {checkpoint_module(module): change for module, change in self.changes.items()}
        tokens = {checkpoint_module(module): rows for module, rows in self.tokens.items()}
        saved, based = (
            {checkpoint_name(name, name): values for name, values in tensors.items()}
            for tensors in (self.saved, self.based)
        )
        return replace(self, changes=changes, saved=saved, based=based, tokens=tokens)


class Names:
    """Names of tensors or layers, to be looked up by those of the same model under another start: backbone.layers.0.

    Without their starts, names must be of one layer, or of one part of a model, to be found.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._short = {short_name(name): name for name in names}
        tails = [name.partition(".")[2] for name in self._short]
        unique = {tail for tail, count in Counter(tails).items() if count == 1 and "." in tail}
        self._tails = {tail: each for tail, each in zip(tails, self._short.values(), strict=True) if tail in unique}

    def find(self, name: str) -> str | None:
        """The name that is meant by another; None if there is none."""
        short = short_name(name)
        tail = short.partition(".")[2]
        return self._short.get(short) or self._short.get(tail) or self._tails.get(tail)


def short_name(name: str) -> str:
    """A tensor's name in a language model of its own."""
    prefix, text_prefix = next((pair for pair in TEXT_PREFIXES if name.startswith(pair[0])), ("", ""))
    return text_prefix + name.removeprefix(prefix)


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a folder. Raises BridgeError if it is incomplete, damaged, or of a kind that is not known."""
    folder = expanded(path)
    file = folder / _WEIGHTS
    if not (folder / FILE).is_file():
        raise BridgeError(f"{folder}: has no adapter_config.json; give the folder of a PEFT adapter")
    if not file.is_file():
        raise BridgeError(f"{file}: not found; save the adapter with `save_pretrained`, as safetensors")
    config = read_config(folder)
    parts: dict[str, dict[str, np.ndarray]] = {}
    saved: dict[str, np.ndarray] = {}
    based: dict[str, np.ndarray] = {}
    tokens: dict[str, TokenRows] = {}
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
            wrappers = ".base_layer" * stored.count(".base_layer.")
            parts.setdefault(part["module"] + wrappers, {})[part["part"]] = values
        elif (rows := _TOKENS.fullmatch(name)) is not None:
            tokens[rows["module"]] = _token_rows(rows["module"], values, config)
        elif "lora_" in name or not name.endswith((".weight", ".bias", *_PARAMETERS)):
            raise BridgeError(f"{file}: {stored} is not a tensor of a LoRA that is known; merge the adapter with PEFT")
        else:
            plain, kind = _SAVED.sub("", name), based if ".base_layer." in stored else saved
            if plain in kind and not np.array_equal(kind[plain], values):
                raise BridgeError(
                    f"{file}: holds {plain} under two names with different values; save the adapter with "
                    "`save_pretrained`"
                )
            kind[plain] = values
    if not parts and not saved and not tokens:
        raise BridgeError(f"{file}: holds no tensors; the adapter is incomplete")
    parameters: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    changes = {}
    for wrapped in sorted(parts, key=len, reverse=True):
        module = wrapped.replace(".base_layer", "")
        if parts[wrapped].keys() == {"lora_A", "lora_B"} and config.values.get("target_parameters"):
            parameters.setdefault(module, []).append(_pair(module, parts[wrapped], file))
        elif module in changes:
            raise BridgeError(f"{file}: holds two changes of {module}; save the adapter with `save_pretrained`")
        else:
            changes[module] = layer_change(module, parts[wrapped], config)
    return Adapter(folder, config, changes, saved, based, tokens, parameters)


def _token_rows(module: str, values: np.ndarray, config: AdapterConfig) -> TokenRows:
    """The rows of a module that are replaced, with their tokens."""
    tokens = config.tokens(module)
    listed = isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens)
    if not listed or len(set(tokens)) != len(tokens):
        raise BridgeError(
            f"{config.file}: the tokens of {module} are {tokens!r:.80}, must be different integers from 0; "
            "correct the file"
        )
    if values.ndim != 2 or len(values) != len(tokens):
        raise BridgeError(
            f"{config.file}: lists {len(tokens)} tokens of {module}, the adapter has rows {list(values.shape)}; "
            "it is of another one"
        )
    return TokenRows(np.array(tokens, np.int64), values)


def _pair(module: str, parts: dict[str, np.ndarray], file: Path) -> tuple[np.ndarray, np.ndarray]:
    """lora_A and lora_B of a module."""
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
    return a, b


def layer_change(
    module: str, parts: dict[str, np.ndarray], config: AdapterConfig, parameter: str | None = None
) -> LowRank:
    """A module's change, in the orientation of its weight; `parameter`: what config calls it, if not as the module."""
    file, values = config.file.with_name(_WEIGHTS), config.values
    a, b = _pair(module, parts, file)
    rank = int(a.shape[0])
    expected = config.rank(parameter or module)
    if rank != expected:
        raise BridgeError(
            f"{file}: {module} has rank {rank}, adapter_config.json says {expected}; it is of another one"
        )
    embedded = "lora_embedding_A" in parts
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and (embedded or magnitude.size != b.shape[0]):
        raise BridgeError(
            f"{file}: {module} has a magnitude vector {list(magnitude.shape)} that does not fit; the adapter is damaged"
        )
    if magnitude is None and values.get("use_dora"):
        raise BridgeError(f"{file}: {module} has no lora_magnitude_vector, but use_dora is set; it is incomplete")
    alike = 1
    if embedded:
        a, b = b.T, a.T
    elif values.get("use_qalora"):
        alike = config.group_size()
        a = a * np.float32(a.shape[1] / alike)
    flat = None if magnitude is None else magnitude.reshape(-1)
    scale = _scale(module, parameter or module, a, b, config)
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), scale, flat, alike)


def expert_changes(
    parameter: str, a: np.ndarray, b: np.ndarray, experts: int, crossed: bool, config: AdapterConfig
) -> list[LowRank]:
    """The change of each expert of a stack, whose rank has been checked.

    crossed  whether PEFT took inputs for outputs, as it does with stacks of transposed matrices: the change is (b a)^T
    """
    scale = _scale(parameter, parameter, a[: len(a) // experts], b, config)
    each = zip(a.reshape(experts, -1, a.shape[1]), b.reshape(len(b), -1, experts).transpose(2, 0, 1), strict=True)
    return [
        LowRank(np.ascontiguousarray(first), np.ascontiguousarray(second), scale)
        for first, second in (((y.T, x.T) if crossed else (x, y)) for x, y in each)
    ]


def _scale(module: str, name: str, a: np.ndarray, b: np.ndarray, config: AdapterConfig) -> float:
    """The scale of a product of two matrices; BridgeError where it could overflow."""
    rank = len(a)
    scale = config.scale(name, rank)
    most_a, most_b = (float(np.abs(matrix).max(initial=0)) for matrix in (a, b))
    if scale * rank * max(most_a, 1) * most_b > _LARGEST:
        raise BridgeError(
            f"{config.file.with_name(_WEIGHTS)}: {module} has values of up to {most_a:.1e} and {most_b:.1e} in its two "
            f"matrices, which the scale {scale:.1e} of adapter_config.json could bring beyond {_LARGEST:g}; "
            "lora_alpha, alpha_pattern or the weights are damaged"
        )
    return scale
