"""A GGUF's metadata as the config.json of transformers: what `arguments`, `rope` and the families write, read back.

    config_of_gguf(metadata, names)       everything that metadata and names tell
    add_rope_factors(config, factors)     the frequencies' own divisors, which are tensors
    add_told(config, metadata, read)      other numbers that only tensors tell

The keys that all families have are in `config_of_gguf`; what one family adds is its `Family.metadata`.
Vision models give the config of their language model, by the name that transformers has for that.
"""

import math
from collections.abc import Callable, Collection, Mapping
from copy import copy
from itertools import product
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import MOST_BLOCKS
from bridge.models.config.gguf_keys import StoredKeys
from bridge.models.config.rope import NOT_ROTATED, llama3_factors
from bridge.models.families import ALL
from bridge.models.family import Family

# tensors that divide the frequencies of rotary embeddings, without their ".weight"
ROPE_FACTORS = "rope_freqs", "rope_factors_long", "rope_factors_short"

_LLAMA3 = (1.0, 4.0), (1.0, 1.0), (1.0, 32.0)  # low_freq_factor and high_freq_factor; of Llama 4, of Step 3.5
_LLAMA3_CONTEXT = 8192
_MOST = 1 << 16  # of what is counted, but for blocks
_POSITIVE = (
    "block_count", "embedding_length", "context_length", "attention.key_length", "attention.key_length_swa",
    "ssm.time_step_rank", "full_attention_interval", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor",
)  # fmt: skip


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family of a GGUF with this metadata; BridgeError for an unknown architecture."""
    arch = metadata.get("general.architecture")
    models = [family for family in ALL if not family.drafter]
    families = [family for family in models if family.arch == arch]
    if not families:
        known = ", ".join(dict.fromkeys(family.arch for family in models))
        raise BridgeError(f"no config.json can be made for architecture {arch!r}; known are {known}")
    return next((f for f in families if f.in_gguf(lambda key: metadata.get(f"{arch}.{key}"))), families[0])


def gguf_layers(metadata: Mapping[str, Any]) -> int:
    """The layers of a GGUF without those that predict further tokens."""
    arch = metadata["general.architecture"]
    blocks, predicting = (
        _checked(arch, key, metadata.get(f"{arch}.{key}", default))
        for key, default in (("block_count", None), ("nextn_predict_layers", 0))
    )
    if not isinstance(blocks, int) or not isinstance(predicting, int) or predicting >= blocks:
        raise BridgeError(
            f"{arch}.block_count is {blocks} with {predicting} in nextn_predict_layers, which leave no layers; convert "
            "the model again"
        )
    return blocks - predicting


def _checked(arch: str, key: str, value: Any) -> Any:
    """A value of the metadata, with whose numbers the config is computed: what divides is no 0, no count is endless."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    most = MOST_BLOCKS if key == "block_count" else _MOST if key.endswith("_count") else 1 << 32
    if key in _POSITIVE and not (value is None or isinstance(value, int | float)):
        raise BridgeError(f"{arch}.{key} is {value!r:.60}; must be a number; convert the model again")
    for number in value if isinstance(value, list) else [value]:
        if number is None or isinstance(number, bool | str):
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise BridgeError(f"{arch}.{key} is {number}; must be finite; convert the model again")
        counted = isinstance(number, int)
        if (key in _POSITIVE and number <= 0) or (counted and not 0 <= number <= most):
            must = ("above 0" if key in _POSITIVE else "at least 0") + (f" and at most {most}" if counted else "")
            raise BridgeError(f"{arch}.{key} is {number}; must be {must}; convert the model again")
    return value


def config_of_gguf(metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """config.json of a GGUF.

    metadata  as read; tokenizer.ggml.tokens may be their number
    names     of its tensors

    Raises BridgeError for an architecture without a family, and where a key is missing or its value of the wrong kind.
    """
    family = family_of_gguf(metadata)
    try:
        return _config(family, metadata, names)
    except (TypeError, ValueError, LookupError, ArithmeticError) as problem:  # of some 300 keys, lists and numbers
        raise BridgeError(
            f"a key of {family.arch}, or a token id, is missing from the metadata or has a value of the wrong kind "
            f"({problem}); convert the model again"
        ) from problem


def _config(family: Family, metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    arch = family.arch

    def get(key: str, default: Any = None) -> Any:
        return _checked(arch, key, metadata.get(f"{arch}.{key}", default))

    def needed(key: str) -> Any:
        value = get(key)
        if value is None:
            raise BridgeError(f"{arch}.{key} is missing from the metadata; convert the model again")
        return value

    heads, hidden = _largest(needed("attention.head_count")), needed("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    vocab = get("vocab_size") or (tokens if isinstance(tokens, int) else len(tokens))
    eps = "attention.layer_norm_epsilon" if family.layer_norm else "attention.layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": _largest(get("feed_forward_length", get("expert_feed_forward_length", 0))),
        "num_hidden_layers": gguf_layers(metadata), "num_attention_heads": heads,
        "num_key_value_heads": _largest(kv_heads), "head_dim": get("attention.key_length", hidden // (heads or 1)),
        "max_position_embeddings": needed("context_length"), "rms_norm_eps": needed(eps),
        "tie_word_embeddings": "output.weight" not in names,
    }  # fmt: skip
    if family.rotary:
        share = family.keys.get("partial_rotary_factor", 1.0)
        values["rope_parameters"] = _rope(get, needed, values["head_dim"], share)
    if get("expert_count") and "num_experts" in family.keys:
        values |= {"num_experts": get("expert_count"), "num_experts_per_tok": needed("expert_used_count")}
        for key, name in _EXPERT_KEYS.items():
            if key in family.keys and get(name) is not None:
                values[key] = get(name)
        if "first_k_dense_replace" in family.keys:
            values["first_k_dense_replace"] = get("leading_dense_block_count", 0)
    if "sliding_window" in family.keys:
        values["sliding_window"] = get("attention.sliding_window") or None
    names_of = {key: name if isinstance(name, str) else name[0] for key, name in family.names.items()}
    names_of |= family.written_as
    config = {names_of.get(key, key): value for key, value in values.items() if key not in family.lacks}
    if predicting := needed("block_count") - gguf_layers(metadata):
        config["num_nextn_predict_layers"] = predicting
    if (types := metadata.get("tokenizer.ggml.token_type_count")) is not None:
        config["type_vocab_size"] = int(types)
    config |= {names_of.get(e.key, e.key): copy(e.values[0]) for e in family.expects if e.written}
    stored = StoredKeys(arch, get, names, values)
    for entry in family.metadata:
        config |= entry.config(stored)
    model_type, architecture = family.language_model or (family.model_type, family.architectures[0])
    model_type, architectures = config.pop("model_type", model_type), [config.pop("class", architecture)]
    ids = {f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    return {
        "model_type": model_type, "architectures": architectures,
        **{key: None if value is None else int(value) for key, value in ids.items()},
        **{key: value for key, value in config.items() if key not in family.lacks},
    }  # fmt: skip


_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
_EXPERT_KEYS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def add_rope_factors(config: dict[str, Any], factors: Mapping[str, np.ndarray]) -> None:
    """Put the rules into rope_parameters that give these divisors of frequencies.

    factors  a GGUF's rope_freqs, or rope_factors_long and rope_factors_short, by those names; float32 [rotated / 2]

    Raises BridgeError for factors that neither llama3's rule nor the proportional one gives.
    """
    rules = config.get("rope_parameters", {})
    rules = rules.get("full_attention", rules)  # in layers with a window, pairs have no divisors
    if "rope_factors_long" in factors:
        rules |= {
            "rope_type": "longrope",
            "long_factor": [float(f) for f in factors["rope_factors_long"]],
            "short_factor": [float(f) for f in factors["rope_factors_short"]],
        }
        return
    if "rope_freqs" not in factors:
        return
    stored = factors["rope_freqs"]
    if np.all(stored == 1):
        return
    rotated = int(np.count_nonzero(stored == 1))
    if np.all(stored[rotated:] >= NOT_ROTATED):
        rules |= {"rope_type": "proportional", "partial_rotary_factor": rotated / len(stored)}
        return
    stored = stored[: 1 + np.flatnonzero(stored != 1)[-1]]  # ones after the largest are of pairs without a rule
    factor, base = float(stored.max()), float(rules["rope_theta"])
    # where no divisor is between the two, several contexts give the same
    contexts = (_LLAMA3_CONTEXT, *(1 << n for n in range(4, 24)))
    for (low, high), context in product(_LLAMA3, contexts):
        factors_by_rule = llama3_factors(base, 2 * len(stored), factor, low, high, context)
        if np.allclose(factors_by_rule, stored, rtol=1e-5):
            rules |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            rules["original_max_position_embeddings"] = context
            return
    raise BridgeError("rope_freqs.weight: is neither of llama3's rule nor proportional, which no config expresses")


def add_told(config: dict[str, Any], metadata: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
    """Put the numbers into the config that fill vectors of its GGUF; `read`: a tensor's values, float32, by its name.

    Raises BridgeError where a vector has several values.
    """
    for key, name in family_of_gguf(metadata).told.items():
        values = read(name)
        if values.min() != values.max():
            raise BridgeError(f"{name}: has several values, but config.json's {key} is one number")
        config[key] = float(values[0])


def _largest(value: Any) -> int:
    return int(max(value)) if isinstance(value, list | tuple) else int(value)


def _rope(get: Callable[..., Any], needed: Callable[[str], Any], head_dim: int, default_share: float) -> dict[str, Any]:
    rules: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}
    share = get("rope.dimension_count", head_dim) / head_dim
    if share != 1 or default_share != 1:
        rules["partial_rotary_factor"] = share
    kind = get("rope.scaling.type", "none")
    if kind == "none" and get("rope.scale_linear"):
        return rules | {"rope_type": "linear", "factor": get("rope.scale_linear")}
    if kind == "linear":
        return rules | {"rope_type": kind, "factor": needed("rope.scaling.factor")}
    if kind == "yarn":
        factor = needed("rope.scaling.factor")
        rules |= {"rope_type": kind, "factor": factor}
        if get("rope.scaling.original_context_length"):
            rules["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        if get("rope.scaling.attn_factor"):
            rules["attention_factor"] = get("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1)
        for beta in ("beta_fast", "beta_slow"):
            if get(f"rope.scaling.yarn_{beta}") is not None:
                rules[beta] = get(f"rope.scaling.yarn_{beta}")
    return rules
