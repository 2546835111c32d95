"""Reads adapter_config.json of PEFT: the kind of an adapter, ranks and scales of its layers, and what it changes.

r, lora_alpha             of all layers, but those whose names end with a pattern of rank_pattern or alpha_pattern
target_parameters         parameters that PEFT changes as LoRA does layers: stacks of experts
trainable_token_indices   tokens whose rows of the embeddings are replaced: [3, 5], or {"lm_head": [3, 5], ...}
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.system.patterns import matched, pattern_problem
from bridge.system.storage.files import read_json

FILE = "adapter_config.json"
_MERGE = "merge it into its base model with PEFT, and convert the result"
# kinds that are no change of weights, so that there is no merged model
_INPUTS = (
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
)
# keys that change what the tensors mean, and how
_REFUSED = (
    ("layer_replication", "its model has other layers than the base model"),
    ("alora_invocation_tokens", "it is switched on by tokens of the prompt (activated LoRA)"),
    ("arrow_config", "it routes between several adapters"),
    ("lora_bias", "its layers add biases, which the base model's do not have"),
    ("use_bdlora", "its matrices are diagonal in blocks"),
    ("monteclora_config", "its matrices are means of samples"),
    ("kasa_config", "it changed the base model's weights too"),
)
_LEAST, _MOST = 1e-6, 1 << 31  # of ranks, alphas and group sizes
_OTHER_BASES = ("pissa", "olora", "corda", "lora_ga")  # of initializations


@dataclass(frozen=True, eq=False)
class AdapterConfig:
    """adapter_config.json, whose values have been checked."""

    file: Path
    values: dict[str, Any]

    @property
    def rs(self) -> bool:
        """rsLoRA: scales are divided by the root of the rank."""
        return self.values.get("use_rslora") is True

    @property
    def alpha(self) -> float:
        """lora_alpha times what rsLoRA makes of it: scale * r of most layers."""
        alpha: float = self.values.get("lora_alpha", 1.0)
        return alpha * (math.sqrt(self.values["r"]) if self.rs else 1.0)

    def rank(self, name: str) -> Any:
        """The rank of a layer, or of each expert of a parameter."""
        return self._by_pattern("rank_pattern", name, self.values.get("r"))

    def scale(self, name: str, rank: int) -> float:
        """What the product of a layer's matrices is multiplied by."""
        alpha: float = self._by_pattern("alpha_pattern", name, self.values.get("lora_alpha"))
        return alpha / (math.sqrt(rank) if self.rs else rank)

    def targets(self, parameter: str) -> bool:
        """Whether target_parameters has a parameter, by its whole name."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.values.get("target_parameters") or ())

    def tokens(self, module: str) -> Any:
        """The tokens whose rows of a module are replaced, as the file has them; None if it does not say."""
        if self.values["peft_type"] == "TRAINABLE_TOKENS":
            return self.values.get("token_indices")
        tokens = self.values.get("trainable_token_indices")
        if not isinstance(tokens, dict):
            return tokens
        return next((each for name, each in tokens.items() if f".{module}".endswith(f".{name}")), None)

    def group_size(self) -> int:
        """The columns whose mean QA-LoRA reads."""
        size = self.values.get("qalora_group_size")
        if type(size) is not int or not 0 < size < _MOST:
            raise BridgeError(
                f"{self.file}: qalora_group_size is {size!r:.80}, must be an integer above 0 and below 2^31; "
                "correct the file"
            )
        return size

    def _by_pattern(self, key: str, name: str, default: Any) -> Any:
        """The value of the first pattern that a name ends with, as PEFT compares them."""
        patterns = (self.values.get(key) or {}).items()
        source = f"{self.file}: {key}"
        fitting = (value for pattern, value in patterns if matched("fullmatch", rf"(.*\.)?({pattern})", name, source))
        return next(fitting, default)


def read_config(folder: Path) -> AdapterConfig:
    """Read an adapter's config. Raises BridgeError for kinds that are neither LoRA nor new tokens, and for LoRA whose
    tensors mean something else."""
    file = folder / FILE
    values = read_json(file)
    kind = values.get("peft_type")
    if kind in _INPUTS:
        raise BridgeError(f"{file}: peft_type is {kind!r}: it is no change of weights, and a GGUF has no place for it")
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        raise BridgeError(f"{file}: peft_type is {kind!r}; only LORA and TRAINABLE_TOKENS can be read: {_MERGE}")
    if kind == "LORA":
        _check_numbers(values, file)
    for key, why in _REFUSED:
        if values.get(key):
            raise BridgeError(f"{file}: {key} is set: {why}; {_MERGE}")
    start = values.get("init_lora_weights")
    if start == "loftq":
        raise BridgeError(f"{file}: init_lora_weights is 'loftq': it changed the base model's weights too; {_MERGE}")
    if isinstance(start, str) and start.startswith(_OTHER_BASES):
        raise BridgeError(
            f"{file}: init_lora_weights is {start!r}: it changed the base model's weights too; convert it to a plain "
            "LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    parameters = values.get("target_parameters")
    if parameters and not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        raise BridgeError(f"{file}: target_parameters is {parameters!r:.80}, must be a list of names; correct the file")
    return AdapterConfig(file, values)


def _check_numbers(values: dict[str, Any], file: Path) -> None:
    """BridgeError for a rank or an alpha that is none, and for a pattern that is not a regular expression."""
    for key, per_module in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = values.get(per_module) or {}
        if not isinstance(patterns, dict):
            raise BridgeError(
                f"{file}: {per_module} is {patterns!r:.80}, must map patterns to numbers; correct the file"
            )
        for name, value in ((key, values.get(key)), *((f"{per_module} {p!r:.80}", v) for p, v in patterns.items())):
            if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value < _MOST:
                raise BridgeError(
                    f"{file}: {name} is {value!r:.80}, must be a number from {_LEAST:g} to 2^31; correct the file"
                )
        for pattern in patterns:
            if problem := pattern_problem(pattern):
                raise BridgeError(
                    f"{file}: {per_module} {pattern!r:.80} is not a regular expression: {problem}; correct the file"
                )
