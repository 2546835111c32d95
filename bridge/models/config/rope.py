"""Rotary position embedding: the scaling rules of a config, as llama.cpp applies them.

    transformers          GGUF
    default               rope.freq_base
    linear                rope.scaling.type linear, factor: angles divided by the factor
    llama3                a tensor rope_freqs.weight [rotated / 2]: each frequency's own divisor
    proportional          such a tensor, in which pairs that are not rotated have an immense divisor
    longrope              two such tensors, for contexts up to the original one and beyond, and an attention factor
    yarn                  rope.scaling.type yarn, factor, original context, betas, attention factor
    dynamic               nothing: up to the original context it is the default rule; beyond it the rule
                          depends on the length of the prompt, which llama.cpp cannot express

Older configs have rope_theta and rope_scaling, transformers 5 has rope_parameters for both.

Hugging Face rotates row j of a head with row j + head_dim/2. GGUF's llama rotates neighbours, 2j and 2j + 1, so the
rows of q and k are reordered for it, and their biases. Qwen's GGUF architectures leave the order unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.models.config.model_config import Config, positive

NOT_ROTATED = 1e30  # a divisor that leaves no angle


@dataclass(frozen=True, eq=False)
class Rope:
    """base: theta in the frequencies theta**(-2i / rotated); factors: their float32 divisors, by GGUF name."""

    base: float
    type: str = "default"
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None  # yarn: relative to its own 1 + 0.1 ln(factor); longrope: whole
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(self.base)
        if self.type in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(self.type))
            writer.add_rope_scaling_factor(self.factor)
        if self.original_context is not None:
            writer.add_rope_scaling_orig_ctx_len(self.original_context)
        if self.attention_factor is not None:
            writer.add_rope_scaling_attn_factors(self.attention_factor)


def rope_rules(config: Config) -> dict[str, Any]:
    """A config's rules of rotation, empty where it has none; BridgeError where they are not an object."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rules = config.get(key) or {}
    if not isinstance(rules, dict):
        raise BridgeError(
            f"{config.path}: {key} is {rules!r:.80}, must be an object; take the config.json of the original model"
        )
    if isinstance(rules.get("compress"), dict):  # DeepSeek V4's: scaling is for compressed tokens alone
        return {**rules["compress"], "rope_theta": rules["main"]["rope_theta"]}
    return rules


def global_rules(config: Config) -> dict[str, Any]:
    """`rope_rules`; those of layers with full attention where layers with a window have others."""
    rules = rope_rules(config)
    for kind in ("full_attention", "indexed_attention"):
        if isinstance(rules.get(kind), dict):
            return rules[kind]
    return rules


def read_rope(
    config: Config, rotated: int, default_base: float = 10000.0, truncate: bool = True, betas: bool = True
) -> Rope:
    """The rope of a config for `rotated` elements of a head; BridgeError for rules that llama.cpp does not have.

    truncate  False for a family trained with yarn's truncate: false, which llama.cpp runs rounded; a note tells
    betas     False for a family with betas of its own in yarn, which llama.cpp does not read; a note tells
    """
    rules = global_rules(config)
    base = rope_number(config, rules, "rope_theta", config.get("rope_theta", default_base))
    kind = rules.get("rope_type") or rules.get("type") or "default"
    if kind in ("default", "mrope"):  # for text, mrope is the default rule: its three positions are equal
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, factor=rope_number(config, rules, "factor"))
    if kind == "llama3":
        return Rope(base, kind, factors={"rope_freqs": _llama3_factors(config, rules, base, rotated)})
    if kind == "proportional":
        return _proportional(config, rules, base)
    if kind in ("longrope", "su"):
        return _longrope(config, rules, base, rotated)
    if kind == "yarn":
        return _yarn(config, rules, base, truncate, betas)
    if kind == "dynamic":
        context = config.integer("max_position_embeddings")
        note = f"dynamic rope scaling is dropped: the model works up to {context} tokens, as trained, not beyond"
        return Rope(base, kind, notes=(note,))
    raise BridgeError(
        f"{config.path}: unknown rope type {kind!r}; default, linear, llama3, longrope, mrope, proportional, yarn "
        f"and dynamic are known, any other needs {parameter('template')}"
    )


def rope_number(config: Config, rules: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number of a config's rules; BridgeError if it is missing without a default, or is something else."""
    value = rules.get(key, default)
    if value is None:
        value = default
    if not positive(value):
        raise BridgeError(f"{config.path}: the rope parameters' {key} is {value!r}, must be a positive number")
    return float(value)


def _tokens(config: Config, rules: dict[str, Any], default: int | None) -> int:
    """The context that a model was trained with before it was extended."""
    key = "original_max_position_embeddings"
    value = rope_number(config, rules, key, config.get(key, default))
    if not 1 <= value < 1 << 31:
        raise BridgeError(f"{config.path}: the rope parameters' {key} is {value:g}, must be a count of tokens")
    return int(value)


def _llama3_factors(config: Config, rules: dict[str, Any], base: float, rotated: int) -> np.ndarray:
    """float32 [rotated / 2]: 1 for short wavelengths, `factor` for long ones, smooth between."""
    factor = rope_number(config, rules, "factor")
    low, high = rope_number(config, rules, "low_freq_factor"), rope_number(config, rules, "high_freq_factor")
    if low > high:
        raise BridgeError(
            f"{config.path}: the rope parameters' low_freq_factor {low:g} must not be above high_freq_factor {high:g}"
        )
    return llama3_factors(base, rotated, factor, low, high, _tokens(config, rules, None))


def llama3_factors(base: float, rotated: int, factor: float, low: float, high: float, context: int) -> np.ndarray:
    """float32 [rotated / 2]: the divisor of each frequency by llama3's rule."""
    wavelength = 2 * math.pi * base ** (np.arange(0, rotated, 2) / rotated)
    # share of the trained frequency: 0 for wavelengths above context / low, 1 below context / high
    turns = context / wavelength
    trained = np.clip((turns - low) / (high - low), 0.0, 1.0) if low < high else (turns >= low).astype(float)
    return (1.0 / ((1.0 - trained) / factor + trained)).astype(np.float32)


def global_layers(config: Config) -> tuple[int, int]:
    """Elements of a head and key-value heads in layers with full attention, where layers may differ (Gemma 4).

    per_layer_config of transformers 5 has what differs from the other layers, and is empty where nothing does. Configs
    without it have two keys.
    """
    kv_heads, layers = config.integer("num_key_value_heads"), config.get("per_layer_config")
    if layers is None:
        if config.get("attention_k_eq_v"):
            kv_heads = config.integer("num_global_key_value_heads", kv_heads)
        return config.within_sides("head_dim of full attention", config.integer("global_head_dim", 512)), kv_heads
    if not isinstance(layers, dict):
        raise BridgeError(f"{config.path}: per_layer_config is {layers!r:.80}, must be an object")
    kinds = enumerate(config.get("layer_types") or ())
    entries = [layers.get(str(layer), {}) for layer, kind in kinds if kind == "full_attention"]
    shared = entries[0] if entries else {}
    if any(entry != shared for entry in entries) or len(layers) > len(entries):
        raise BridgeError(
            f"{config.path}: per_layer_config is {layers!r:.80}, must have the same for every layer with full "
            "attention, and for no other; llama.cpp has two kinds of layers"
        )
    head = shared.get("head_dim", config.integer("head_dim", 256))
    return config.within_sides("head_dim of full attention", head), shared.get("num_key_value_heads", kv_heads)


def _proportional(config: Config, rules: dict[str, Any], base: float) -> Rope:
    """The first share of the pairs of a head in layers with full attention is rotated."""
    if rules.get("factor", 1.0) != 1.0:
        raise BridgeError(f"{config.path}: proportional rope with factor {rules['factor']!r}; llama.cpp has none")
    head, _ = global_layers(config)
    rotated = int(head * rope_number(config, rules, "partial_rotary_factor", 1.0) / 2)
    factors = np.where(np.arange(head // 2) < rotated, 1.0, NOT_ROTATED).astype(np.float32)
    return Rope(base, factors={"rope_freqs": factors})


def _longrope(config: Config, rules: dict[str, Any], base: float, rotated: int) -> Rope:
    """Two sets of divisors; the attention factor sqrt(1 + ln(factor) / ln(original)) of LongRoPE, arXiv:2402.13753."""
    context = config.integer("max_position_embeddings")
    original = _tokens(config, rules, context)
    factors = {}
    for name in ("long", "short"):
        values = rules.get(f"{name}_factor")
        if not isinstance(values, list) or len(values) != rotated // 2 or not all(positive(v) for v in values):
            problem = f"{name}_factor is {values!r:.60}"
            raise BridgeError(f"{config.path}: the rope parameters' {problem}, must be {rotated // 2} numbers")
        factors[f"rope_factors_{name}"] = np.array(values, np.float32)
    scale = context / original
    size = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    if rules.get("attention_factor") is not None:
        size = rope_number(config, rules, "attention_factor")
    elif rules.get("long_mscale") is not None:  # Phi-3.5-MoE's name of it
        size = rope_number(config, rules, "long_mscale")
        if rope_number(config, rules, "short_mscale", size) != size:
            factors_of = f"short_mscale {rules['short_mscale']} and long_mscale {size:g}"
            raise BridgeError(f"{config.path}: longrope with {factors_of}; llama.cpp has one factor for both")
    return Rope(base, "longrope", original_context=original, attention_factor=size, factors=factors)


def _yarn(config: Config, rules: dict[str, Any], base: float, truncate: bool, betas: bool) -> Rope:
    factor = rope_number(config, rules, "factor")
    original = _tokens(config, rules, config.get("max_position_embeddings"))
    fast, slow = rope_number(config, rules, "beta_fast", 32.0), rope_number(config, rules, "beta_slow", 1.0)
    notes: tuple[str, ...] = ()
    if (fast, slow) != (32.0, 1.0) and not betas:
        notes = (f"yarn with beta_fast {fast:g} and beta_slow {slow:g}; llama.cpp has 32 and 1 for this architecture",)
    elif (fast, slow) != (32.0, 1.0):
        # llama.cpp reads the two keys for a few other architectures only
        raise BridgeError(
            f"{config.path}: yarn with beta_fast {fast:g} and beta_slow {slow:g}; llama.cpp supports only 32 "
            "and 1 for this architecture"
        )
    if rules.get("truncate") is False:
        rounded = "yarn with truncate false; llama.cpp rounds the ramp's ends to dimensions"
        if truncate:
            raise BridgeError(f"{config.path}: {rounded}")
        notes = (*notes, rounded)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    relative = None
    if rules.get("attention_factor") is not None:
        relative = rope_number(config, rules, "attention_factor") / mscale(1.0)
    elif rules.get("mscale") and rules.get("mscale_all_dim"):
        relative = mscale(rope_number(config, rules, "mscale")) / mscale(rope_number(config, rules, "mscale_all_dim"))
        relative /= mscale(1.0)
    return Rope(base, "yarn", factor=factor, original_context=original, attention_factor=relative, notes=notes)


def yarn_betas(config: Config, rope: Rope) -> dict[str, float]:
    """The keys of yarn's betas, which llama.cpp's converter writes if config.json has them."""
    rules = global_rules(config) if rope.type == "yarn" else {}
    return {f"rope.scaling.yarn_{key}": float(rules[key]) for key in ("beta_fast", "beta_slow") if key in rules}


def interleaved_rows(heads: int, head_dim: int) -> np.ndarray:
    """int64 [heads * head_dim]: the Hugging Face row for each GGUF row of q or k; its `np.argsort` is the inverse.

    GGUF row 2j + s of a head is its row s * head_dim/2 + j.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)
