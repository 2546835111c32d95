"""What a decoder's GGUF metadata says: its shape, its rotary embedding, which pairs it rotates."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.architectures import ARCHITECTURES, Graph
from bridge.runtime.cpu.stream_ops import STREAMS
from bridge.runtime.recurrent_config import MAMBA, RecurrentConfig, read_recurrent

# EXAONE 4's model of 64 layers, which llama.cpp knows by these: layers with a window alone are rotated
_EXAONE4_WINDOWS = 64, replace(ARCHITECTURES["exaone4"], full_every=4, one_rotation=True, unrotated_every=4)
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models, whose scores are scaled by the hidden size's share
_WINDOWS = {"gemma2": 4096, "exaone4": 4096, "llama4": 8192}  # if no key says so
_LATENT = {"deepseek2", "mistral4"}
_UNSCALED = {"gemma3n", "gemma4"}  # scores
_COUNT_SHARED = {"glm4moe": 0, "deepseek2": 0, "mistral4": 0, "llama4": 1}  # the shared expert is so many times as wide
# weights of the experts used do not sum to one, if no key says so
_UNNORMALIZED = {"qwen2moe", "glm4moe", "deepseek2", "mistral4", "llama4", "nemotron_h_moe", "jamba"}
_SIGMOID = {"glm4moe", "minimax-m2", "nemotron_h_moe", "llama4"}  # routers, if no key says so
_MAVERICK = 128  # experts of the Llama 4 that does not normalize q and k
_LLAMA4_TEMPERATURE = 0.1, 8192, 1  # factor, length and offset, see `temperatures`
_MIXER = 0.02  # of Phi-3.5-MoE, twice its router_jitter_noise
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
    before: bool = False  # an expert's weight multiplies what it reads, not what it makes
    mixer: float = 0.0  # m of Phi-MoE's rule; 0: it does not apply


class Heads(NamedTuple):
    """Of a layer's attention."""

    kv: int  # heads of keys and of values
    dim: int  # elements of a head
    rotated: int  # of these, the first ones


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
    inner: int  # of layers without experts, the largest
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
    expert_every: int = 1  # every so many layers have some
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
    windows: tuple[bool, ...] = ()  # whether a layer has a window, where the graph does not say
    local_heads: Heads | None = None  # of the layers with a window, if they differ
    shared_kv: int = 0  # the last layers, which use the keys and values of earlier ones
    temperature: float = 0.0  # scores are multiplied by 1 + this ln(1 + (position + offset) // length)
    temperature_length: int = 1
    temperature_offset: int = 0
    each_input: int = 0  # elements of what each layer gets of a token's own; 0: they get nothing
    streams: int = 0  # of activations, if there are several: see cpu/stream_ops.py
    sparsity: tuple[float, ...] = ()  # of each layer: deviations above the mean that its gate's values are cut at
    relu2: bool = False  # relu squared in place of silu
    xielu: tuple[tuple[float, ...], ...] = ()  # of each layer, see decoder_ops.py
    recurrent: RecurrentConfig | None = None  # the layers with a state, where there are some
    inners: tuple[int, ...] = ()  # of each layer, if not all are alike; 0: it has no network
    predicting: int = 0  # layers after the others, each of which predicts one token further: see prediction.py

    @property
    def plain(self) -> bool:
        """Whether it is a decoder as Llama's and Qwen's are."""
        scales = self.embedding_scale, self.residual_scale, self.logit_scale, self.score_cap, self.logit_cap
        usual = self.graph in (Graph(), Graph(neighbours=True), Graph(normed=True))
        usual = usual and not self.inners and self.latent is None and self.recurrent is None
        return usual and scales == (1.0, 1.0, 1.0, 0.0, 0.0) and not self.temperature and self.arch != "phi3"

    @property
    def attending(self) -> list[int]:
        """The layers with attention."""
        layers = [i for i in range(self.layers) if self.mixes(i)]
        if self.recurrent is None or self.graph.side_by_side:
            return layers
        return [i for i in layers if not self.recurrent.layers[i]]

    @property
    def stored(self) -> dict[int, int]:
        """The layers with attention, and the place of each one's keys and values in a cache."""
        places: dict[int, int] = {}
        last: dict[bool, int] = {}  # with and without a window
        for layer in self.attending:
            if self.makes_keys(layer):
                last[self.windowed(layer)] = len({*places.values()})
            places[layer] = last[self.windowed(layer)]
        return places

    def makes_keys(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return layer < self.layers - self.shared_kv

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention, or what takes its place."""
        return not (self.graph.alone and self.feeds(layer))

    def feeds(self, layer: int) -> bool:
        """Whether a layer has a network."""
        return self.inner_of(layer) > 0

    def inner_of(self, layer: int) -> int:
        """Elements between the matrices of a layer's network without experts."""
        return self.inners[layer] if self.inners else self.inner

    def heads_of(self, layer: int) -> Heads:
        """The heads of a layer's attention."""
        own = Heads(self.kv_heads, self.head_dim, self.rotated)
        if self.local_heads is not None and self.windowed(layer):
            own = self.local_heads
        return own if self.rotates(layer) else own._replace(rotated=0)

    def widths(self, own: Heads) -> tuple[int, int]:
        """Elements of all heads' queries, as the matrix makes them, and of all heads' results."""
        if self.latent is not None:
            return self.heads * (self.latent.plain + own.rotated), self.heads * self.latent.value
        return self.heads * own.dim, self.heads * own.dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's network is a mixture of experts."""
        some = self.experts > 0 and layer >= self.leading and (layer + 1) % self.expert_every == 0
        return some and self.feeds(layer)

    @property
    def activation(self) -> str:
        """What networks bend values by: silu, gelu, relu2 or, of experts alone, clamped."""
        return "clamped" if self.graph.clamped else "gelu" if self.graph.gelu else "relu2" if self.relu2 else "silu"

    def windowed(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        if self.windows:
            return self.windows[layer]
        return self.window > 0 and self.graph.full_every > 0 and (layer + 1) % self.graph.full_every != 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer's q and k are rotated."""
        return not self.graph.unrotated_every or (layer + 1) % self.graph.unrotated_every != 0

    def tempered(self, layer: int) -> bool:
        """Whether a layer's scores have a temperature: in Llama 4 where nothing is rotated."""
        return not self.graph.chunked or not self.rotates(layer)

    def local(self) -> Self:
        """With the rotary embedding of the layers with a window."""
        if self.graph.one_rotation:
            return self
        rotated = self.rotated if self.local_heads is None else self.local_heads.rotated
        return replace(self, rope_base=self.local_base, rope_scaling="none", rope_factor=1.0, rotated=rotated)

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
        lengths = (np.arange(context) + self.temperature_offset) // self.temperature_length
        return (1 + self.temperature * np.log1p(lengths)).astype(np.float32)


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
    hidden = get("embedding_length", int)
    inner, inners = _inner_sizes(metadata, arch, layers, get, path)
    networks = {layer for layer, size in enumerate(inners) if size} if graph.alone else set()
    recurrent = read_recurrent(metadata, arch, layers, networks, get, path)
    windows = _named_windows(metadata, arch, layers, path) if graph.named_windows else ()
    heads = kv_heads = local_kv = head_dim = rotated = 0
    if recurrent is None or graph.side_by_side or not all(recurrent.layers):
        heads = get("attention.head_count", int)
        kv_heads, local_kv = _kv_heads(metadata, arch, heads, windows, path)
        head_dim = get("attention.key_length", int, max(1, hidden // heads))
        rotated = get("rope.dimension_count", int, head_dim)
    if recurrent is not None and recurrent.kind == MAMBA and metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        rotated = 0  # llama.cpp's sign for it
    if kv_heads and heads % kv_heads:
        raise BridgeError(f"{path}: {heads} heads cannot share {kv_heads} key-value heads; convert the model again")
    latent = None
    if arch in _LATENT:
        query_rank = get("attention.q_lora_rank", int) if f"{arch}.attention.q_lora_rank" in metadata else 0
        plain = get("attention.key_length_mla", int) - rotated
        latent = Latent(get("attention.kv_lora_rank", int), query_rank, plain, get("attention.value_length_mla", int))
        if latent.rank % 16 or latent.rank + rotated != head_dim or plain < 1:
            raise BridgeError(
                f"{path}: a latent vector of {latent.rank} elements, with {rotated} rotated ones in keys of {head_dim} "
                "cannot run here; must be a multiple of 16, and together the keys"
            )
    local_heads = None
    if f"{arch}.attention.key_length_swa" in metadata:
        local_dim = get("attention.key_length_swa", int)
        local_heads = Heads(local_kv, local_dim, get("rope.dimension_count_swa", int, local_dim))
        if get("attention.value_length_swa", int, local_dim) != local_dim or heads % local_kv:
            raise BridgeError(
                f"{path}: {local_kv} heads of {local_dim} elements for keys of layers with a window, and others for "
                f"values or {heads} of queries cannot run here; convert the model again"
            )
    values = head_dim if latent is None else latent.rank
    same = not heads or get("attention.value_length", int, values) == values
    if not same or head_dim % 2 or rotated % 2 or rotated > head_dim:
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
    share = hidden // heads if _LARGEST.get(arch) == layers else head_dim or 1
    scale = get("attention.scale", float, 1.0 if arch in _UNSCALED else share**-0.5)
    size = get("rope.scaling.attn_factor", float, 1.0)
    growth = float(metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)) * math.log(factor)
    if scaling == "yarn" and growth:  # what cos and sin grow by is divided out, see `angles`
        size /= 1 + 0.1 * (math.log(factor) if latent else growth)
    if latent is not None:
        scale = (1 + growth) ** 2 / (latent.plain + rotated) ** 0.5
    cap = 50.0 if arch == "gemma2" else 0.0  # llama.cpp's defaults
    caps_logits = arch == "gemma2" or (graph.scaled and f"{arch}.final_logit_softcapping" in metadata)
    context = get("context_length", int)
    expert_inner = get("expert_feed_forward_length", int, inner) if experts else 0
    leading, shared_inner = int(metadata.get(f"{arch}.leading_dense_block_count", 0)), 0
    if experts and (arch == "qwen2moe" or f"{arch}.expert_shared_feed_forward_length" in metadata):
        shared_inner = get("expert_shared_feed_forward_length", int)
    elif arch in _COUNT_SHARED:
        shared_inner = expert_inner * int(metadata.get(f"{arch}.expert_shared_count", _COUNT_SHARED[arch]))
    temperature, length, offset = float(metadata.get(f"{arch}.attention.temperature_scale", 0.0)), 0, 0
    original = get("rope.scaling.original_context_length", int, context)
    if arch == "llama4":
        temperature, length, offset = _LLAMA4_TEMPERATURE
        graph = replace(graph, unit_norms=experts != _MAVERICK)
    logit_scale = get("logit_scale", float, 1.0)
    rms = "" if f"{arch}.attention.layer_norm_epsilon" in metadata else "rms_"
    return DecoderConfig(
        arch=arch,
        layers=layers,
        predicting=predicting,
        hidden=hidden,
        inner=inner if leading or inners or graph.beside or arch == "llama4" or not experts else expert_inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotated=rotated,
        context=context,
        norm_eps=get(f"attention.layer_norm_{rms}epsilon", float),
        attention_scale=scale,
        graph=graph,
        rope_base=base,
        rope_scaling=scaling,
        rope_factor=factor,
        rope_original_context=original,
        rope_attention_factor=size,
        rope_betas=(get("rope.scaling.yarn_beta_fast", float, 32.0), get("rope.scaling.yarn_beta_slow", float, 1.0)),
        latent=latent,
        experts=experts,
        leading=leading,
        expert_every=2 if arch == "jamba" else get("interleave_moe_layer_step", int, 1),
        expert_inner=expert_inner,
        shared_inner=shared_inner,
        routing=_read_routing(metadata, get, path, experts) if experts else Routing(),
        embedding_scale=get("embedding_scale", float, float(np.float32(hidden**0.5)) if graph.scaled else 1.0),
        residual_scale=get("residual_scale", float, 1.0),
        logit_scale=1 / logit_scale if arch == "command-r" else logit_scale,
        score_cap=get("attn_logit_softcapping", float, cap) if cap else 0.0,
        logit_cap=get("final_logit_softcapping", float, 30.0) if caps_logits else 0.0,
        window=window if graph.full_every or windows else 0,
        windows=windows,
        local_heads=local_heads,
        shared_kv=int(metadata.get(f"{arch}.attention.shared_kv_layers", 0)),
        local_base=get("rope.freq_base_swa", float, base if arch == "gemma2" else 10000.0),
        temperature=temperature,
        temperature_length=length or original,
        temperature_offset=offset,
        each_input=int(metadata.get(f"{arch}.embedding_length_per_layer_input", 0)),
        streams=_read_streams(metadata, arch, path) if arch == "gemma3n" else 0,
        sparsity=tuple(metadata.get(f"{arch}.activation_sparsity_scale", ())),
        xielu=_read_xielu(metadata, layers, path) if arch == "apertus" else (),
        relu2=graph.alone or metadata.get("bitnet.hidden_activation") == "relu2",
        inners=inners,
        recurrent=recurrent,
    )


def _inner_sizes(
    metadata: Mapping[str, Any], arch: str, layers: int, get: Callable[..., Any], path: Path
) -> tuple[int, tuple[int, ...]]:
    """Elements between the matrices of a network: the most, and those of each layer where they differ."""
    found = metadata.get(f"{arch}.feed_forward_length")
    if found == 0 and ARCHITECTURES[arch].alone:
        return 0, ()
    if not isinstance(found, list):
        return get("feed_forward_length", int), ()
    sizes = tuple(int(size) for size in found[:layers])
    if len(sizes) < layers or min(sizes) < 0 or max(sizes) < 1:
        raise BridgeError(
            f"{path}: {arch}.feed_forward_length is {found!r}; must be a size for each of {layers} layers; convert the "
            "model again"
        )
    return max(sizes), sizes if len({*sizes}) > 1 else ()


def _read_streams(metadata: Mapping[str, Any], arch: str, path: Path) -> int:
    """How many streams of activations there are; BridgeError for others than cpu/stream_ops.py knows."""
    count, active = metadata.get(f"{arch}.altup.num_inputs"), metadata.get(f"{arch}.altup.active_idx", 0)
    if (count, active) != (STREAMS, 0):
        raise BridgeError(
            f"{path}: {count} streams of activations (altup.num_inputs), of which layers read number {active}, cannot "
            f"run here; must be {STREAMS}, and the first"
        )
    return STREAMS


def _read_xielu(metadata: Mapping[str, Any], layers: int, path: Path) -> tuple[tuple[float, ...], ...]:
    """Of each layer alpha_n, alpha_p, beta and eps, as cpu/decoder_ops.py takes them: the checkpoint's are bent."""
    numbers = []
    for key in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"):
        found = metadata.get(key)
        found = [found] * layers if isinstance(found, float) else found
        if not isinstance(found, list) or len(found) < layers or not all(isinstance(one, float) for one in found):
            raise BridgeError(f"{path}: {key} is {found!r:.80}; must be {layers} numbers; convert the model again")
        numbers.append(found[:layers])
    softplus = partial(np.logaddexp, 0.0)
    return tuple(
        (float(beta + softplus(alpha_n)), float(softplus(alpha_p)), beta, eps)
        for alpha_n, alpha_p, beta, eps in zip(*numbers, strict=True)
    )


def _named_windows(metadata: Mapping[str, Any], arch: str, layers: int, path: Path) -> tuple[bool, ...]:
    found = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if not isinstance(found, list) or len(found) < layers:
        raise BridgeError(
            f"{path}: {arch}.attention.sliding_window_pattern is {found!r}; must say of each of {layers} layers "
            "whether it has a window; convert the model again"
        )
    return tuple(bool(one) for one in found[:layers])


def _kv_heads(
    metadata: Mapping[str, Any], arch: str, heads: int, windows: tuple[bool, ...], path: Path
) -> tuple[int, int]:
    """Key-value heads of the layers that have some: all the same number, or those with a window another one."""
    count = metadata.get(f"{arch}.attention.head_count_kv", heads)
    each = count if isinstance(count, list) else [count] * max(1, len(windows))
    pairs = list(zip(each, windows or (False,) * len(each), strict=False))
    counts = {one for one, window in pairs if not window} - {0}
    local = {one for one, window in pairs if window} or set(counts)
    if len(counts) != 1 or len(local) != 1 or not all(isinstance(one, int) and one > 0 for one in counts | local):
        raise BridgeError(f"{path}: {arch}.attention.head_count_kv is {count!r}; attention must be alike in all layers")
    return counts.pop(), local.pop()


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
    if arch != "llama4" and metadata.get(f"{arch}.interleave_moe_layer_step", 1) != 1:
        raise BridgeError(f"{path}: experts in some layers alone cannot run here; llama.cpp can run it")
    if metadata.get(f"{arch}.moe_latent_size"):
        raise BridgeError(f"{path}: experts on a shorter vector (moe_latent_size) cannot run here; llama.cpp runs it")
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
        before=arch == "llama4",
        mixer=_MIXER if arch == "phimoe" else 0.0,
    )
