"""What a decoder's GGUF metadata says: its shape, its rotary embedding, which pairs it rotates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.recurrent_config import RecurrentConfig, read_recurrent


@dataclass(frozen=True)
class Graph:
    """What an architecture's layers do that its metadata does not say.

    neighbours       rotary pairs are neighbours (2i, 2i + 1) rather than halves (i, i + n/2)
    normed           q and k are normalized, each head or all of them together
    pre_norm         attention and network read the normalized state, not the state as it is
    post_norm        what they add is normalized too
    sub_norm         so is what their output matrices multiply
    gelu             gelu (its tanh form) in place of silu
    scaled           embeddings are multiplied by the root of their width
    unrotated_every  every n-th layer rotates nothing; 0: all rotate
    full_every       every n-th layer attends to everything, the others to a window; 0: all to everything
    gated            what attention gives is multiplied by a sigmoid, whose rows follow each head's in q's matrix
    """

    neighbours: bool = False
    normed: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    sub_norm: bool = False
    gelu: bool = False
    scaled: bool = False
    unrotated_every: int = 0
    full_every: int = 0
    gated: bool = False


_DELTA = Graph(normed=True, gated=True)
ARCHITECTURES = {
    "llama": Graph(neighbours=True), "mistral3": Graph(neighbours=True), "qwen2": Graph(), "qwen2vl": Graph(),
    "qwen2moe": Graph(), "qwen3": Graph(normed=True), "qwen3vl": Graph(normed=True), "qwen3moe": Graph(normed=True),
    "qwen3vlmoe": Graph(normed=True), "smollm3": Graph(neighbours=True, unrotated_every=4),
    "granite": Graph(neighbours=True), "phi3": Graph(), "glm4": Graph(neighbours=True, post_norm=True),
    "olmo2": Graph(normed=True, pre_norm=False, post_norm=True, full_every=4),  # a window in OLMo 3 alone
    "bitnet": Graph(sub_norm=True),
    "gemma2": Graph(post_norm=True, gelu=True, scaled=True, full_every=2),
    "gemma3": Graph(normed=True, post_norm=True, gelu=True, scaled=True, full_every=6),
    "lfm2": Graph(normed=True), "qwen35": _DELTA, "qwen35moe": _DELTA, "qwen3next": _DELTA,
}  # fmt: skip
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models, whose scores are scaled by the hidden size's share
_SHARED = {"qwen2moe", "qwen3next", "qwen35moe"}  # have an expert that all tokens pass through
_UNNORMALIZED = {"qwen2moe"}  # the chosen experts' weights are the router's probabilities, not their shares of them


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with grouped-query attention and a gated network, of one network a layer or of experts."""

    arch: str
    layers: int
    hidden: int
    inner: int  # of the MLP, or of each expert
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int  # elements of a head that are rotated, the first ones
    context: int  # tokens it was trained for
    norm_eps: float
    attention_scale: float
    graph: Graph
    rope_base: float
    rope_scaling: str  # "none", "linear" or "yarn"
    rope_factor: float
    rope_original_context: int
    rope_attention_factor: float
    experts: int = 0  # in a layer; 0 for a dense model
    experts_used: int = 0  # by a token
    shared_inner: int = 0  # of the expert that all tokens pass through; 0 where there is none
    normalized: bool = True  # whether the weights of the experts used sum to one
    embedding_scale: float = 1.0  # what embeddings are multiplied by
    residual_scale: float = 1.0  # the same for what attention and network add
    logit_scale: float = 1.0  # logits are divided by it
    score_cap: float = 0.0  # scores are c tanh(s / c); 0: as they are
    logit_cap: float = 0.0  # the same for logits
    window: int = 0  # tokens that the layers with a window attend to
    local_base: float = 10000.0  # of their rotary embedding
    relu2: bool = False  # relu squared in place of silu
    recurrent: RecurrentConfig | None = None  # the layers with a state, where there are some

    @property
    def plain(self) -> bool:
        """Whether it is a decoder as Llama's and Qwen's are."""
        scales = self.embedding_scale, self.residual_scale, self.logit_scale, self.score_cap, self.logit_cap
        usual = self.graph in (Graph(), Graph(neighbours=True), Graph(normed=True))
        return usual and scales == (1.0, 1.0, 1.0, 0.0, 0.0) and self.arch != "phi3" and self.recurrent is None

    @property
    def attending(self) -> list[int]:
        """The layers with attention."""
        return [i for i in range(self.layers) if self.recurrent is None or not self.recurrent.layers[i]]

    def windowed(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        return self.window > 0 and self.graph.full_every > 0 and (layer + 1) % self.graph.full_every != 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer's q and k are rotated."""
        return not self.graph.unrotated_every or (layer + 1) % self.graph.unrotated_every != 0

    def local(self) -> Self:
        """With the rotary embedding of the layers with a window."""
        return replace(self, rope_base=self.local_base, rope_scaling="none", rope_factor=1.0)

    def angles(self, context: int, factors: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the rotary angles, each float32 [context, rotated / 2], times the attention factor.

        factors  rope_freqs.weight: what each frequency is divided by, or None

        Yarn as llama.cpp computes it (Peng et al. 2023, arXiv:2309.00071): frequencies that turn over 32 times
        within the original context stay, those that turn less than once are divided by the factor, between them
        a ramp over whole dimensions; cos and sin grow by 1 + 0.1 ln(factor).
        """
        half = self.rotated // 2
        frequencies = self.rope_base ** (-2.0 * np.arange(half) / self.rotated)
        if factors is not None:
            frequencies = frequencies / factors.astype(np.float64)
        size = self.rope_attention_factor
        if self.rope_scaling == "linear":
            frequencies = frequencies / self.rope_factor
        elif self.rope_scaling == "yarn":

            def dimension(turns: float) -> float:
                span = self.rope_original_context / (turns * 2 * np.pi)
                return self.rotated * np.log(span) / (2 * np.log(self.rope_base))

            low = max(0.0, np.floor(dimension(32.0)))
            high = min(self.rotated - 1.0, np.ceil(dimension(1.0)))
            kept = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies * (kept + (1 - kept) / self.rope_factor)
            size *= 1 + 0.1 * np.log(max(self.rope_factor, 1.0))
        angles = np.arange(context)[:, None] * frequencies
        return (size * np.cos(angles)).astype(np.float32), (size * np.sin(angles)).astype(np.float32)


def read_config(metadata: Mapping[str, Any], path: Path) -> DecoderConfig:
    """The decoder of a GGUF; BridgeError where a key is missing, of the wrong kind, or a rule unknown."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BridgeError(f"{path}: architecture {arch!r} cannot run here; llama.cpp can run it. Known: {known}")
    graph = ARCHITECTURES[arch]

    def get(key: str, kind: type, default: Any = None) -> Any:
        value: Any = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise BridgeError(f"{path}: {arch}.{key} is missing; convert the model again")
        numbers: Any = (int, float) if kind is float else kind
        if not isinstance(value, numbers) or isinstance(value, bool) or (kind is not str and value <= 0):
            must = "a text" if kind is str else "above 0"
            raise BridgeError(f"{path}: {arch}.{key} is {value!r}; must be {must}; convert the model again")
        return kind(value)

    experts = get("expert_count", int) if metadata.get(f"{arch}.expert_count") else 0
    experts_used = get("expert_used_count", int) if experts else 0
    if experts_used > experts:
        raise BridgeError(f"{path}: {experts_used} of {experts} experts are used; convert the model again")
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    layers = get("block_count", int) - int(metadata.get(f"{arch}.nextn_predict_layers", 0))
    recurrent = read_recurrent(metadata, arch, layers, get, path)
    kv_heads = _kv_heads(metadata, arch, path) if recurrent else get("attention.head_count_kv", int, heads)
    head_dim = get("attention.key_length", int, max(1, hidden // heads))
    rotated = get("rope.dimension_count", int, head_dim)
    if heads % kv_heads:
        raise BridgeError(f"{path}: {heads} heads cannot share {kv_heads} key-value heads; convert the model again")
    if get("attention.value_length", int, head_dim) != head_dim or head_dim % 2 or rotated % 2 or rotated > head_dim:
        raise BridgeError(
            f"{path}: heads of {head_dim} for keys, {metadata.get(f'{arch}.attention.value_length')} for values with "
            f"{rotated} rotated cannot run here; keys and values must have the same even size"
        )
    scaling, factor = get("rope.scaling.type", str, "none"), get("rope.scaling.factor", float, 1.0)
    if scaling == "none" and f"{arch}.rope.scale_linear" in metadata:
        scaling, factor = "linear", get("rope.scale_linear", float)
    if scaling not in ("none", "linear", "yarn"):
        raise BridgeError(f"{path}: unknown rope scaling {scaling!r}: must be none, linear or yarn")
    if f"{arch}.attention.temperature_scale" in metadata:
        raise BridgeError(
            f"{path}: attention whose temperature grows with the position cannot run here; llama.cpp can run it"
        )
    window = int(metadata.get(f"{arch}.attention.sliding_window", 4096 if arch == "gemma2" else 0))
    base = get("rope.freq_base", float, 10000.0)
    share = hidden // heads if _LARGEST.get(arch) == get("block_count", int) else head_dim
    cap = 50.0 if arch == "gemma2" else 0.0  # llama.cpp's defaults
    caps_logits = arch == "gemma2" or "gemma3.final_logit_softcapping" in metadata
    context, inner = get("context_length", int), get("feed_forward_length", int)
    return DecoderConfig(
        arch=arch,
        layers=layers,
        hidden=hidden,
        inner=get("expert_feed_forward_length", int, inner) if experts else inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=rotated,
        context=context,
        norm_eps=get("attention.layer_norm_rms_epsilon", float),
        attention_scale=get("attention.scale", float, share**-0.5),
        graph=graph,
        rope_base=base,
        rope_scaling=scaling,
        rope_factor=factor,
        rope_original_context=get("rope.scaling.original_context_length", int, context),
        rope_attention_factor=get("rope.scaling.attn_factor", float, 1.0),
        experts=experts,
        experts_used=experts_used,
        shared_inner=get("expert_shared_feed_forward_length", int) if arch in _SHARED else 0,
        normalized=arch not in _UNNORMALIZED,
        embedding_scale=get("embedding_scale", float, float(np.float32(hidden**0.5)) if graph.scaled else 1.0),
        residual_scale=get("residual_scale", float, 1.0),
        logit_scale=get("logit_scale", float, 1.0),
        score_cap=get("attn_logit_softcapping", float, cap) if cap else 0.0,
        logit_cap=get("final_logit_softcapping", float, 30.0) if caps_logits else 0.0,
        window=window if graph.full_every else 0,
        local_base=get("rope.freq_base_swa", float, base if arch == "gemma2" else 10000.0),
        relu2=metadata.get("bitnet.hidden_activation") == "relu2",
        recurrent=recurrent,
    )


def _kv_heads(metadata: Mapping[str, Any], arch: str, path: Path) -> int:
    """Key-value heads of the layers that have some: all the same number."""
    count = metadata.get(f"{arch}.attention.head_count_kv")
    counts = {count} if isinstance(count, int) else set(count or ()) - {0}
    if len(counts) != 1:
        raise BridgeError(f"{path}: {arch}.attention.head_count_kv is {count!r}; attention must be alike in all layers")
    return int(counts.pop())
