"""The arguments of a model's graph: checked values of config.json under common names, and as GGUF metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np

from bridge.errors import BridgeError
from bridge.models.config.model_config import Config
from bridge.models.config.rope import Rope, global_rules, read_rope, rope_rules


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of all families; False, None or 0 if a family has no such thing."""

    hidden: int
    inner: int  # width of the dense feed-forward network
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # elements of a head
    vocab: int
    context: int
    norm_eps: float  # of RMSNorm
    tied: bool  # whether the embeddings are also the output matrix
    rope: Rope
    attention_bias: bool = False  # whether q, k, v (and o, in some families) must have biases
    mlp_bias: bool = False  # the same for the MLP
    window: int | None = None  # tokens that every layer attends to; None: all
    upper_window: int | None = None  # tokens that the upper layers attend to, for which GGUF has no key
    experts: int = 0  # of a layer
    experts_used: int = 0  # by a token
    expert_inner: int = 0  # width of an expert, 0 if it is `inner`
    shared_inner: int = 0  # width of the expert that all tokens share, 0 if there is none
    rotated: int = 0  # elements of a head that are rotated, the first ones
    qk_norm: bool = False  # whether heads of q and k are normalized, if models of a family differ
    leading: int = 0  # layers before the first that has experts
    kinds: tuple[str, ...] = ()  # each layer's, as config.json's layer_types names it, in families with several
    predicting: int = 0  # layers after these that predict further tokens, see `prediction`
    more: Mapping[str, int] = field(default_factory=dict)  # sizes that only one family has
    by_layer: Mapping[str, Sequence[int]] = field(default_factory=dict)  # sizes that differ between layers, of each
    # what the rows of a linear layer are multiplied by, for models whose graph multiplies where llama.cpp's does not:
    # its name in the table -> one for each size of its rows ("q+kv+kv": three)
    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names that `Row.shape` uses."""
        return {
            "vocab": self.vocab, "hidden": self.hidden, "inner": self.inner,
            "q": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim, "head": self.head_dim,
            "heads": self.heads, "kv_heads": self.kv_heads,
            "experts": self.experts, "expert": self.expert_inner or self.inner, "shared": self.shared_inner,
            **self.more,
        }  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """Notes for the report: what the conversion loses."""
        window = self.window or self.upper_window
        if window is None or window >= self.context:
            return list(self.rope.notes)
        lost = f"llama.cpp does not apply the sliding window of {window} tokens: it attends to all tokens"
        return [*self.rope.notes, lost]

    def add_metadata(self, writer: gguf.GGUFWriter, layer_norm: bool, rotary: bool) -> None:
        """The keys that several architectures have. `layer_norm`, `rotary`: as in `Family`."""
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers + self.predicting)
        if self.predicting:
            writer.add_nextn_predict_layers(self.predicting)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        (writer.add_layer_norm_eps if layer_norm else writer.add_layer_norm_rms_eps)(self.norm_eps)
        if rotary:
            writer.add_rope_dimension_count(self.rotated)
        writer.add_vocab_size(self.vocab)
        if rotary:
            self.rope.add_metadata(writer)
        if self.window is not None:
            writer.add_sliding_window(self.window)
        if self.experts:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.experts_used)
        if self.expert_inner:
            writer.add_expert_feed_forward_length(self.expert_inner)
        if self.leading:
            writer.add_leading_dense_block_count(self.leading)
        if self.shared_inner:
            writer.add_expert_shared_feed_forward_length(self.shared_inner)


def read_arguments(config: Config, keys: Mapping[str, Any]) -> Arguments:
    """The arguments of a config.json; BridgeError if one is missing, out of range or contradicts another.

    keys  optional keys of the family, and its own defaults: key -> the value if config.json has none. A key that is
          not listed has no meaning in the family and is ignored
    """

    def count(key: str) -> int:
        return config.side(key, keys[key]) if key in keys else 0

    def flag(key: str) -> bool:
        return key in keys and bool(config.get(key, keys[key]))

    hidden = config.side("hidden_size")
    heads = config.integer("num_attention_heads", keys.get("num_attention_heads"))
    kv_heads = config.integer("num_key_value_heads", keys.get("num_key_value_heads") or heads)
    head_dim = config.get("head_dim", keys.get("head_dim"))
    if head_dim is None and hidden % heads:
        raise BridgeError(
            f"{config.path}: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is missing"
        )
    if heads % kv_heads:
        raise BridgeError(f"{config.path}: {heads} heads cannot share {kv_heads} key-value heads")
    head_dim = config.integer("head_dim", head_dim or hidden // heads)
    config.within_sides("num_attention_heads times head_dim", heads * head_dim)
    if head_dim % 2:
        raise BridgeError(f"{config.path}: head_dim {head_dim} is odd; rotary embeddings need pairs of elements")
    experts = used = 0
    if "num_experts" in keys:
        key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
        experts, used = config.side(key), config.integer("num_experts_per_tok")
    if used > experts:
        raise BridgeError(f"{config.path}: num_experts_per_tok is {used}, but there are {experts} experts")
    rotated = head_dim
    partial = rope_rules(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if "partial_rotary_factor" in keys:
        partial = global_rules(config).get("partial_rotary_factor") if partial is None else partial
        partial = keys["partial_rotary_factor"] if partial is None else partial
        rotated = int(head_dim * _share(config, partial))
        if "rotary_dim" in keys:
            rotated = config.integer("rotary_dim", rotated)
        if rotated % 2:
            raise BridgeError(f"{config.path}: {rotated} elements of a head are rotated; llama.cpp rotates pairs")
    elif partial not in (None, 1.0):
        raise BridgeError(f"{config.path}: partial_rotary_factor is {partial}; llama.cpp rotates whole heads here")
    expert_inner, shared_inner = count("moe_intermediate_size"), count("shared_expert_intermediate_size")
    window = config.integer("sliding_window") if config.get("sliding_window") else None
    width = config.side if experts and not expert_inner else config.integer
    # if every layer has experts the dense width is unused, and some configs omit it
    usual_width = shared_inner or expert_inner or keys.get("inner_per_hidden", 0) * hidden or None
    inner, layers = (
        width("intermediate_size", usual_width),
        config.repeats("num_hidden_layers", len(listed_layers(config) or ()) or None),
    )
    kinds = _kinds(config, layers) if "layer_types" in keys else ()
    rope = read_rope(
        config, rotated, keys.get("rope_theta", 10000.0), keys.get("truncate", True), keys.get("yarn_betas", True)
    )
    if "factors_of_heads" in keys:  # llama.cpp wants one for each pair of a head
        rope = replace(rope, factors={name: _with_ones(own, head_dim // 2) for name, own in rope.factors.items()})
    return Arguments(
        hidden, inner, layers, heads, kv_heads, head_dim,
        vocab=config.side("vocab_size", keys.get("vocab_size")),
        context=config.integer("max_position_embeddings", keys.get("max_position_embeddings")),
        norm_eps=config.number("rms_norm_eps", keys.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", keys.get("tie_word_embeddings", False))),
        rope=rope,
        attention_bias=flag("attention_bias"), mlp_bias=flag("mlp_bias"),
        window=window if "sliding_window" in keys else None,
        upper_window=window if flag("use_sliding_window") else None,
        experts=experts, experts_used=used, expert_inner=expert_inner, shared_inner=shared_inner, rotated=rotated,
        qk_norm=flag("use_qk_norm"),
        leading=0 if keys.get("first_k_dense_replace") is None else _leading(config, keys["first_k_dense_replace"]),
        kinds=kinds,
    )  # fmt: skip


def _with_ones(factors: np.ndarray, pairs: int) -> np.ndarray:
    return np.concatenate([factors, np.ones(pairs - len(factors), factors.dtype)])


def _leading(config: Config, default: int) -> int:
    """Layers before the first with experts, in families that may have such layers."""
    kinds = config.get("mlp_layer_types")
    if isinstance(config.get("moe_layer_freq"), list):  # published configs of MiMo V2
        kinds = ["sparse" if sparse else "dense" for sparse in config.get("moe_layer_freq")]
    if isinstance(kinds, list):
        dense = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
        if {*kinds[dense:]} - {"sparse"}:
            raise BridgeError(
                f"{config.path}: mlp_layer_types is {kinds!r:.80}; must be dense, then sparse: llama.cpp has experts "
                "in all layers after the first that has some"
            )
        return dense
    # K-EXAONE's first configs have another name for it
    key = "first_k_dense_replace" if config.get("first_last_k_dense_replace") is None else "first_last_k_dense_replace"
    return config.count(key, default)


def listed_layers(config: Config) -> list[Any] | None:
    """The kinds of a config.json's layers, as a list or a letter for each; they may stand in for their number."""
    kinds = config.get("layer_types", config.get("hybrid_override_pattern"))
    if kinds is None and isinstance(config.get("hybrid_layer_pattern"), list):  # published configs of MiMo V2
        names = {0: "full_attention", 1: "sliding_attention"}
        kinds = [names.get(one, one) for one in config.get("hybrid_layer_pattern")]
    return list(kinds) if isinstance(kinds, (list, str)) else None


def _kinds(config: Config, layers: int) -> tuple[str, ...]:
    kinds = listed_layers(config)
    if kinds is None or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise BridgeError(f"{config.path}: layer_types is {kinds!r:.80}, must name the kind of each of {layers} layers")
    return tuple(kinds)


def _share(config: Config, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise BridgeError(f"{config.path}: partial_rotary_factor is {value!r}, must be a number up to 1")
    return float(value)
