"""What a decoder's GGUF metadata says: its shape, its rotary embedding, which pairs it rotates."""

import math
from collections.abc import Callable, Mapping
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
    norms_rotated    they are normalized after the rotation, not before
    pre_norm         attention and network read the normalized state, not the state as it is
    post_norm        what they add is normalized too
    sub_norm         so is what their output matrices multiply
    late_norm        the norm before the network is stored as that after attention
    layer_norm       norms subtract the mean, and may have biases
    parallel         the network reads what attention read
    gated            the network has a gate
    gelu             gelu (its tanh form) in place of silu
    clamped          gpt-oss's form of silu and of what it multiplies, see cpu/expert_ops.py
    scaled           embeddings are multiplied by the root of their width
    unrotated_every  every n-th layer rotates nothing; 0: all rotate
    full_every       every n-th layer attends to everything, the others to a window; 0: all to everything
    one_rotation     layers with a window rotate as the others do
    sinks            each head has a score for no position at all
    output_gate      attention's results are multiplied by a sigmoid; its rows follow those of each head in q's matrix
    """

    neighbours: bool = False
    normed: bool = False
    norms_rotated: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    sub_norm: bool = False
    late_norm: bool = False
    layer_norm: bool = False
    parallel: bool = False
    gated: bool = True
    gelu: bool = False
    clamped: bool = False
    scaled: bool = False
    unrotated_every: int = 0
    full_every: int = 0
    one_rotation: bool = False
    sinks: bool = False
    output_gate: bool = False


_DELTA = Graph(normed=True, late_norm=True, output_gate=True)
ARCHITECTURES = {
    "llama": Graph(neighbours=True), "mistral3": Graph(neighbours=True), "qwen2": Graph(), "qwen2vl": Graph(),
    "qwen2moe": Graph(), "qwen3": Graph(normed=True), "qwen3vl": Graph(normed=True), "qwen3moe": Graph(normed=True),
    "qwen3vlmoe": Graph(normed=True), "smollm3": Graph(neighbours=True, unrotated_every=4),
    "granite": Graph(neighbours=True), "phi3": Graph(), "glm4": Graph(neighbours=True, post_norm=True),
    "olmo2": Graph(normed=True, pre_norm=False, post_norm=True, full_every=4),  # a window in OLMo 3 alone
    "bitnet": Graph(sub_norm=True),
    "gemma2": Graph(post_norm=True, gelu=True, scaled=True, full_every=2),
    "gemma3": Graph(normed=True, post_norm=True, gelu=True, scaled=True, full_every=6),
    "gpt-oss": Graph(late_norm=True, clamped=True, full_every=2, one_rotation=True, sinks=True),
    "glm4moe": Graph(late_norm=True),  # normed in GLM-4.5 and later large ones, not in Air
    "exaone4": Graph(normed=True, pre_norm=False, post_norm=True),
    "seed_oss": Graph(late_norm=True),
    "ernie4_5": Graph(neighbours=True), "ernie4_5-moe": Graph(neighbours=True), "granitemoe": Graph(neighbours=True),
    "hunyuan-dense": Graph(normed=True, norms_rotated=True),
    "minimax-m2": Graph(normed=True),
    "command-r": Graph(neighbours=True, layer_norm=True, parallel=True),
    "starcoder2": Graph(layer_norm=True, gated=False, gelu=True),
    "gpt2": Graph(layer_norm=True, gated=False, gelu=True, unrotated_every=1),  # positions are embedded
    "deepseek2": Graph(neighbours=True),
    "lfm2": Graph(normed=True), "lfm2moe": Graph(normed=True), "granitehybrid": Graph(neighbours=True),
    "qwen35": _DELTA, "qwen35moe": _DELTA, "qwen3next": _DELTA,
}  # fmt: skip
# EXAONE 4's model of 64 layers, which llama.cpp knows by these: layers with a window alone are rotated
_EXAONE4_WINDOWS = 64, replace(ARCHITECTURES["exaone4"], full_every=4, one_rotation=True, unrotated_every=4)
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models, whose scores are scaled by the hidden size's share
_WINDOWS = {"gemma2": 4096, "exaone4": 4096}  # if no key says so
_COUNT_SHARED = {"glm4moe", "deepseek2"}  # the shared expert is so many times as wide as the others
_UNNORMALIZED = {"qwen2moe", "glm4moe", "deepseek2"}  # weights of the experts used do not sum to one, if no key says so
_SIGMOID = {"glm4moe", "minimax-m2"}  # routers, if no key says so
_GATINGS = {1: False, 2: True, 3: False}  # expert_gating_func -> whether it is a sigmoid


@dataclass(frozen=True)
class Routing:
    """How a layer's router chooses experts, and what weights they get; see experts.py."""

    used: int = 0  # by a token
    sigmoid: bool = False  # of each logit, in place of softmax over all of them
    normalized: bool = True  # the weights of the experts used sum to one
    scale: float = 1.0  # that the weights are multiplied by then
    groups: int = 1  # of experts
    groups_used: int = 1  # of which experts are chosen


@dataclass(frozen=True)
class Latent:
    """Sizes of attention on a latent vector (MLA), of which all heads make their keys and values."""

    rank: int  # of the latent vector
    query_rank: int  # of the vector that queries are made of; 0: of the hidden state
    plain: int  # elements of a head's query that are not rotated
    value: int  # elements of a head's value


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with grouped-query or latent attention, and one network a layer or experts.

    With latent attention there is one key-value head: keys are the latent vector and a rotated part, `head_dim` in
    all, values the latent vector alone.
    """

    arch: str
    layers: int
    hidden: int
    inner: int  # of layers without experts
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
    rope_betas: tuple[float, float] = (32.0, 1.0)  # yarn: turns of the frequencies where the ramp begins and ends
    latent: Latent | None = None
    experts: int = 0  # in a layer; 0 for a dense model
    leading: int = 0  # layers before the first one with experts
    expert_inner: int = 0  # of each expert
    shared_inner: int = 0  # of the expert that all tokens pass through; 0 where there is none
    routing: Routing = Routing()
    embedding_scale: float = 1.0  # what embeddings are multiplied by
    residual_scale: float = 1.0  # the same for what attention and network add
    logit_scale: float = 1.0  # logits are divided by it
    score_cap: float = 0.0  # scores are c tanh(s / c); 0: as they are
    logit_cap: float = 0.0  # the same for logits
    window: int = 0  # tokens that the layers with a window attend to
    local_base: float = 10000.0  # of their rotary embedding
    temperature: float = 0.0  # scores are multiplied by 1 + this ln(1 + position // original context)
    relu2: bool = False  # relu squared in place of silu
    recurrent: RecurrentConfig | None = None  # the layers with a state, where there are some
    predicting: int = 0  # layers after the others, each of which predicts one token further: see prediction.py

    @property
    def plain(self) -> bool:
        """Whether it is a decoder as Llama's and Qwen's are."""
        scales = self.embedding_scale, self.residual_scale, self.logit_scale, self.score_cap, self.logit_cap
        usual = self.graph in (Graph(), Graph(neighbours=True), Graph(normed=True))
        usual = usual and self.latent is None and self.recurrent is None
        return usual and scales == (1.0, 1.0, 1.0, 0.0, 0.0) and not self.temperature and self.arch != "phi3"

    @property
    def attending(self) -> list[int]:
        """The layers with attention."""
        return [i for i in range(self.layers) if self.recurrent is None or not self.recurrent.layers[i]]

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries, as the matrix makes them."""
        return self.heads * (self.latent.plain + self.rotated if self.latent else self.head_dim)

    @property
    def attended_width(self) -> int:
        """Elements of all heads' results."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's network is a mixture of experts."""
        return self.experts > 0 and layer >= self.leading

    def windowed(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        return self.window > 0 and self.graph.full_every > 0 and (layer + 1) % self.graph.full_every != 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer's q and k are rotated."""
        return not self.graph.unrotated_every or (layer + 1) % self.graph.unrotated_every != 0

    def local(self) -> Self:
        """With the rotary embedding of the layers with a window."""
        if self.graph.one_rotation:
            return self
        return replace(self, rope_base=self.local_base, rope_scaling="none", rope_factor=1.0)

    def angles(self, context: int, factors: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the rotary angles, each float32 [context, rotated / 2], times the attention factor.

        factors  rope_freqs.weight: what each frequency is divided by, or None

        Yarn as llama.cpp computes it (Peng et al. 2023, arXiv:2309.00071): frequencies that turn over 32 times
        within the original context stay, those that turn less than once (`rope_betas`) are divided by the factor,
        between them a ramp over whole dimensions; cos and sin grow by 1 + 0.1 ln(factor).
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

            low = max(0.0, np.floor(dimension(self.rope_betas[0])))
            high = min(self.rotated - 1.0, np.ceil(dimension(self.rope_betas[1])))
            kept = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies * (kept + (1 - kept) / self.rope_factor)
            size *= 1 + 0.1 * np.log(max(self.rope_factor, 1.0))
        angles = np.arange(context)[:, None] * frequencies
        return (size * np.cos(angles)).astype(np.float32), (size * np.sin(angles)).astype(np.float32)

    def temperatures(self, context: int) -> np.ndarray | None:
        """float32 [context]: what the scores of the token in each position are multiplied by; None for 1."""
        if not self.temperature:
            return None
        return (1 + self.temperature * np.log1p(np.arange(context) // self.rope_original_context)).astype(np.float32)


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
    predicting = int(metadata.get(f"{arch}.nextn_predict_layers", 0))
    layers = get("block_count", int) - predicting
    if (arch, layers) == ("exaone4", _EXAONE4_WINDOWS[0]):
        graph = _EXAONE4_WINDOWS[1]
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    recurrent = read_recurrent(metadata, arch, layers, get, path)
    kv_heads = _kv_heads(metadata, arch, path) if recurrent else get("attention.head_count_kv", int, heads)
    head_dim = get("attention.key_length", int, max(1, hidden // heads))
    rotated = get("rope.dimension_count", int, head_dim)
    if arch == "granitehybrid" and metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        rotated = 0  # llama.cpp's sign for it
    if heads % kv_heads:
        raise BridgeError(f"{path}: {heads} heads cannot share {kv_heads} key-value heads; convert the model again")
    latent = None
    if arch == "deepseek2":
        query_rank = get("attention.q_lora_rank", int) if "deepseek2.attention.q_lora_rank" in metadata else 0
        plain = get("attention.key_length_mla", int) - rotated
        latent = Latent(get("attention.kv_lora_rank", int), query_rank, plain, get("attention.value_length_mla", int))
        if latent.rank % 16 or latent.rank + rotated != head_dim or plain < 1:
            raise BridgeError(
                f"{path}: a latent vector of {latent.rank} elements, with {rotated} rotated ones in keys of {head_dim} "
                "cannot run here; must be a multiple of 16, and together the keys"
            )
    values = head_dim if latent is None else latent.rank
    if get("attention.value_length", int, values) != values or head_dim % 2 or rotated % 2 or rotated > head_dim:
        raise BridgeError(
            f"{path}: heads of {head_dim} for keys, {metadata.get(f'{arch}.attention.value_length')} for values with "
            f"{rotated} rotated cannot run here; keys and values must have the same even size"
        )
    scaling, factor = get("rope.scaling.type", str, "none"), get("rope.scaling.factor", float, 1.0)
    if scaling == "none" and f"{arch}.rope.scale_linear" in metadata:
        scaling, factor = "linear", get("rope.scale_linear", float)
    if scaling not in ("none", "linear", "yarn"):
        raise BridgeError(f"{path}: unknown rope scaling {scaling!r}: must be none, linear or yarn")
    window = int(metadata.get(f"{arch}.attention.sliding_window", _WINDOWS.get(arch, 0)))
    base = get("rope.freq_base", float, 10000.0)
    share = hidden // heads if _LARGEST.get(arch) == layers else head_dim
    scale = get("attention.scale", float, share**-0.5)
    size = get("rope.scaling.attn_factor", float, 1.0)
    growth = float(metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)) * math.log(factor)
    if scaling == "yarn" and growth:  # what cos and sin grow by is divided out, see `angles`
        size /= 1 + 0.1 * (math.log(factor) if latent else growth)
    if latent is not None:
        scale = (1 + growth) ** 2 / (latent.plain + rotated) ** 0.5
    cap = 50.0 if arch == "gemma2" else 0.0  # llama.cpp's defaults
    caps_logits = arch == "gemma2" or "gemma3.final_logit_softcapping" in metadata
    context, inner = get("context_length", int), get("feed_forward_length", int)
    expert_inner = get("expert_feed_forward_length", int, inner) if experts else 0
    leading, shared_inner = int(metadata.get(f"{arch}.leading_dense_block_count", 0)), 0
    if experts and (arch == "qwen2moe" or f"{arch}.expert_shared_feed_forward_length" in metadata):
        shared_inner = get("expert_shared_feed_forward_length", int)
    elif arch in _COUNT_SHARED:
        shared_inner = expert_inner * int(metadata.get(f"{arch}.expert_shared_count", 0))
    logit_scale = get("logit_scale", float, 1.0)
    return DecoderConfig(
        arch=arch,
        layers=layers,
        predicting=predicting,
        hidden=hidden,
        inner=inner if leading or not experts else expert_inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=rotated,
        context=context,
        norm_eps=get(f"attention.layer_norm_{'' if graph.layer_norm else 'rms_'}epsilon", float),
        attention_scale=scale,
        graph=graph,
        rope_base=base,
        rope_scaling=scaling,
        rope_factor=factor,
        rope_original_context=get("rope.scaling.original_context_length", int, context),
        rope_attention_factor=size,
        rope_betas=(get("rope.scaling.yarn_beta_fast", float, 32.0), get("rope.scaling.yarn_beta_slow", float, 1.0)),
        latent=latent,
        experts=experts,
        leading=leading,
        expert_inner=expert_inner,
        shared_inner=shared_inner,
        routing=_read_routing(metadata, get, path, experts) if experts else Routing(),
        embedding_scale=get("embedding_scale", float, float(np.float32(hidden**0.5)) if graph.scaled else 1.0),
        residual_scale=get("residual_scale", float, 1.0),
        logit_scale=1 / logit_scale if arch == "command-r" else logit_scale,
        score_cap=get("attn_logit_softcapping", float, cap) if cap else 0.0,
        logit_cap=get("final_logit_softcapping", float, 30.0) if caps_logits else 0.0,
        window=window if graph.full_every else 0,
        local_base=get("rope.freq_base_swa", float, base if arch == "gemma2" else 10000.0),
        temperature=float(metadata.get(f"{arch}.attention.temperature_scale", 0.0)),
        relu2=metadata.get("bitnet.hidden_activation") == "relu2",
        recurrent=recurrent,
    )


def _kv_heads(metadata: Mapping[str, Any], arch: str, path: Path) -> int:
    """Key-value heads of the layers that have some: all the same number."""
    count = metadata.get(f"{arch}.attention.head_count_kv")
    counts = {count} if isinstance(count, int) else set(count or ()) - {0}
    if len(counts) != 1 or min(counts) < 0:
        raise BridgeError(f"{path}: {arch}.attention.head_count_kv is {count!r}; attention must be alike in all layers")
    return int(counts.pop())


def _read_routing(metadata: Mapping[str, Any], get: Callable[..., Any], path: Path, experts: int) -> Routing:
    """The rules of a router; BridgeError for those that are unknown, or contradict themselves."""
    arch = metadata["general.architecture"]
    used = get("expert_used_count", int)
    if used > experts:
        raise BridgeError(f"{path}: {used} of {experts} experts are used; convert the model again")
    gating = metadata.get(f"{arch}.expert_gating_func") or 0
    # GLM-4.7-Flash, whose first files lack the key
    flash = arch == "deepseek2" and metadata.get("deepseek2.vocab_size") == 154880
    if gating and gating not in _GATINGS:
        raise BridgeError(f"{path}: expert_gating_func is {gating!r}, which cannot run here; llama.cpp can run it")
    if metadata.get(f"{arch}.interleave_moe_layer_step", 1) != 1:
        raise BridgeError(f"{path}: experts in some layers alone cannot run here; llama.cpp can run it")
    groups = int(metadata.get(f"{arch}.expert_group_count", 0)) or 1
    groups_used = int(metadata.get(f"{arch}.expert_group_used_count", 0)) or groups
    if experts % groups or groups_used > groups or used > experts // groups * groups_used:
        raise BridgeError(
            f"{path}: {used} of {experts} experts in {groups_used} of {groups} groups; convert the model again"
        )
    return Routing(
        used=used,
        sigmoid=_GATINGS[gating] if gating else arch in _SIGMOID or flash,
        normalized=bool(metadata.get(f"{arch}.expert_weights_norm")) or arch not in _UNNORMALIZED,
        scale=float(metadata.get(f"{arch}.expert_weights_scale", 0.0)) or 1.0,
        groups=groups,
        groups_used=groups_used,
    )
