"""A decoder's shape, its rotary embedding, what its layers are."""

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bridge.gguf_file.architectures import Graph
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.system.records import record

ALL = 1 << 30  # tokens, more than any text has


@record
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
    """The heads of a layer's attention: how many have keys of their own, and their sizes."""

    kv: int  # heads of keys and of values
    dim: int  # elements of a head
    rotated: int  # of these, the first ones


@record
class Latent:
    """Sizes of attention on a latent vector (MLA), of which all heads make their keys and values."""

    rank: int  # of the latent vector
    query_rank: int  # of the vector that queries are made of; 0: of the hidden state
    plain: int  # elements of a head's query that are not rotated
    value: int  # elements of a head's value


@record
class DecoderConfig:
    """A decoder with grouped-query or latent attention, and one network a layer or experts.

    With latent attention there is one key-value head: keys are the latent vector and a rotated part, `head_dim` in
    all, values the latent vector alone.
    """

    arch: str
    layers: int
    hidden: int
    inner: int  # of layers without experts, the largest
    heads: int  # of queries, the most in a layer
    kv_heads: int
    head_dim: int
    rotated: int  # elements of a head that are rotated, the first ones
    context: int  # tokens it was trained for, or that it can run with
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
    expert_latent: int = 0  # elements of the shorter vector that experts read and make; 0: they do so with the state
    shared_inner: int = 0  # of the expert that all tokens pass through; 0 where there is none
    routing: Routing = Routing()
    embedding_scale: float = 1.0  # what embeddings are multiplied by
    residual_scale: float = 1.0  # the same for what attention and network add
    logit_scale: float = 1.0  # logits are divided by it
    score_cap: float = 0.0  # scores are c tanh(s / c); 0: as they are
    logit_cap: float = 0.0  # the same for logits
    window: int = 0  # tokens that the layers with a window attend to
    local_base: float = 10000.0  # of their rotary embedding
    windows: tuple[bool, ...] = ()  # whether a layer has a window; none has one: ()
    query_heads: tuple[int, ...] = ()  # of each layer, and those that predict, if not all are alike
    local_heads: Heads | None = None  # of the layers with a window, if they differ
    shared_kv: int = 0  # the last layers, which use the keys and values of earlier ones
    temperature: float = 0.0  # scores are multiplied by 1 + this ln(1 + (position + offset) // length)
    temperature_length: int = 1
    temperature_offset: int = 0
    each_input: int = 0  # elements of what each layer gets of a token's own; 0: they get nothing
    streams: int = 0  # of activations, if there are several: see cpu/ops/stream_ops.py
    sparsity: tuple[float, ...] = ()  # of each layer: deviations above the mean that its gate's values are cut at
    value_dim: int = 0  # elements of a head's values, if they are fewer than those of its keys
    value_scale: float = 1.0  # that the heads' results are multiplied by
    relu2: bool = False  # relu squared in place of silu
    limits: tuple[tuple[float, float], ...] = ()  # of each layer's experts, and of its other networks: see experts.py
    rotated_layers: tuple[bool, ...] = ()  # whether a layer's q and k are rotated; (): the graph says it
    xielu: tuple[tuple[float, ...], ...] = ()  # of each layer, see decoder_ops.py
    situ: tuple[float, ...] = ()  # what tanh keeps gates, and what they multiply, within; see decoder_ops.py
    aside_every: int = 0  # every so many layers, from the first on, the state is put aside; 0: it never is
    recurrent: RecurrentConfig | None = None  # the layers with a state, where there are some
    inners: tuple[int, ...] = ()  # of each layer, if not all are alike; 0: it has no network
    chosen: int = 0  # tokens that an indexer chooses to attend to; up to so many all are attended to
    tapped: tuple[int, ...] = ()  # layers before which a drafter reads the states; `layers`: after the last
    predicting: int = 0  # layers after the others, each of which predicts one token further: see prediction.py
    causal: bool = True  # tokens attend to those before them alone, so that a text can be continued
    head_pooling: str = ""  # what makes the vector that a reranker's head reads: "mean", "cls" or "last"
    pooling: str = ""  # what makes a vector of a text: "mean", "cls", "last" or "rank"; "": the file does not say

    @property
    def attending(self) -> list[int]:
        """The layers with attention."""
        layers = [i for i in range(self.layers) if self.mixes(i)]
        if self.recurrent is None or self.graph.side_by_side:
            return layers
        return [i for i in layers if not self.recurrent.layers[i]]

    @property
    def stored(self) -> dict[int, int]:
        """The layers with attention, and the index of each one's keys and values in a cache."""
        indices: dict[int, int] = {}
        last: dict[bool, int] = {}  # with and without a window
        for layer in self.attending:
            if self.makes_keys(layer):
                last[self.windowed(layer)] = len({*indices.values()})
            indices[layer] = last[self.windowed(layer)]
        return indices

    def makes_keys(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return layer < self.layers - self.shared_kv

    def mixes(self, layer: int) -> bool:
        """Whether a layer has attention, or what takes its place."""
        return not (self.graph.alone and self.feeds(layer))

    def feeds(self, layer: int) -> bool:
        """Whether a layer has a network."""
        return self.inner_of(layer) > 0

    def puts_aside(self, layer: int) -> bool:
        """Whether the state before a layer is put aside, and begins anew with what the layer's attention makes."""
        return self.aside_every > 0 and layer % self.aside_every == 0

    def inner_of(self, layer: int) -> int:
        """Elements between the matrices of a layer's network without experts."""
        return self.inners[layer] if self.inners else self.inner

    def heads_of(self, layer: int) -> Heads:
        """The heads of a layer's attention."""
        heads = Heads(self.kv_heads, self.head_dim, self.rotated)
        if self.local_heads is not None and self.windowed(layer):
            heads = self.local_heads
        return heads if self.rotates(layer) else heads._replace(rotated=0)

    def query_heads_of(self, layer: int) -> int:
        """How many heads of queries a layer's attention has."""
        return self.query_heads[layer] if self.query_heads else self.heads

    def widths(self, layer: int) -> tuple[int, int]:
        """Elements of all heads' queries, as the matrix makes them, and of all heads' results."""
        count, heads = self.query_heads_of(layer), self.heads_of(layer)
        if self.latent is not None:
            return count * (self.latent.plain + heads.rotated), count * self.latent.value
        return count * heads.dim, count * (self.value_dim or heads.dim)

    def attended(self, layer: int) -> int:
        """Elements of all heads' results as attention makes them, where values are as wide as keys."""
        return self.query_heads_of(layer) * (self.heads_of(layer).dim if self.latent is None else self.latent.value)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's network is a mixture of experts."""
        some = self.experts > 0 and layer >= self.leading and (layer + 1) % self.expert_every == 0
        return some and self.feeds(layer)

    @property
    def expert_outer(self) -> int:
        """Elements that each expert reads, and that it makes."""
        return self.expert_latent or self.hidden

    @property
    def activation(self) -> str:
        """What networks bend values by: silu, gelu, erf (gelu, not its tanh form), relu2, situ or clamped."""
        if self.graph.gelu:
            return "erf" if self.graph.erf else "gelu"
        if self.situ:
            return "situ"
        return "clamped" if self.graph.clamped else "relu2" if self.relu2 else "silu"

    def limits_of(self, layer: int) -> tuple[float, float]:
        """What bounds a layer's activations: those of its experts, and of its other networks; 0: nothing does."""
        return self.limits[layer] if self.limits else (0.0, 0.0)

    def activation_within(self, limit: float) -> tuple[str, tuple[float, ...]]:
        """`activation`, or limited where there is a limit; and its numbers, see decoder_ops.py."""
        return ("limited", (limit,)) if limit else (self.activation, self.situ)

    def windowed(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        return layer < len(self.windows) and self.windows[layer]

    def reach(self, layer: int) -> tuple[int, int]:
        """How many tokens up to itself a token attends to (0: all), and how many after itself."""
        if self.causal:
            return self.window if self.windowed(layer) else 0, 0
        return (self.window // 2 + 1, self.window // 2) if self.windowed(layer) else (0, ALL)

    def rotates(self, layer: int) -> bool:
        """Whether a layer's q and k are rotated."""
        if self.rotated_layers:
            return layer >= self.layers or self.rotated_layers[layer]
        if self.windows and self.graph.windows is not None and self.graph.windows.alone_rotated:
            return self.windowed(layer) or (self.graph.windows.dense_rotated and layer < self.leading)
        return not self.graph.unrotated_every or (layer + 1) % self.graph.unrotated_every != 0

    def tempered(self, layer: int) -> bool:
        """Whether a layer's scores have a temperature: in Llama 4 where nothing is rotated."""
        return not self.graph.chunked or not self.rotates(layer)

    def local_angles(self, stop: int, factors: np.ndarray | None, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """`angles` of the layers with a window."""
        rotated = self.rotated if self.local_heads is None else self.local_heads.rotated
        local = replace(self, rope_base=self.local_base, rotated=rotated)
        if self.graph.windows is not None and not self.graph.windows.scaled:
            local, factors = replace(local, rope_scaling="none", rope_attention_factor=1.0), None
        return local.angles(stop, factors, start)

    def angles(self, stop: int, factors: np.ndarray | None, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the rotary angles of positions start..stop, each float32 [positions, rotated / 2], times the
        attention factor.

        factors  rope_freqs.weight: what each frequency is divided by, or None

        Yarn as llama.cpp computes it (Peng et al. 2023, arXiv:2309.00071): frequencies that turn over 32 times
        within the original context stay, those that turn less than once (`rope_betas`) are divided by the factor,
        between them a ramp over whole dimensions; cos and sin grow by 1 + 0.1 ln(factor).
        """
        half = self.rotated // 2
        frequencies = self.rope_base ** (-2.0 * np.arange(half) / self.rotated)
        if self.graph.still:
            frequencies = np.zeros(half)
        if factors is not None:
            frequencies = frequencies / factors[:half].astype(np.float64)
        size = self.rope_attention_factor
        if self.rope_scaling == "linear":
            frequencies = frequencies / self.rope_factor
        elif self.rope_scaling == "yarn":

            def dimension(turns: float) -> float:
                span = self.rope_original_context / (turns * 2 * np.pi)
                return self.rotated * np.log(span) / (2 * np.log(self.rope_base))

            low = max(0.0, np.floor(dimension(self.rope_betas[0])))
            high = min(self.rotated - 1.0, np.ceil(dimension(self.rope_betas[1])))
            ramp = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
            frequencies = frequencies * (ramp + (1 - ramp) / self.rope_factor)
            size *= 1 + 0.1 * np.log(max(self.rope_factor, 1.0))
        angles = np.arange(start, stop)[:, None] * frequencies
        return (size * np.cos(angles)).astype(np.float32), (size * np.sin(angles)).astype(np.float32)

    @cached_property
    def slopes(self) -> np.ndarray | None:
        """float32 [heads]: what scores lose for each position between the tokens (ALiBi, arXiv:2108.12409); or None.

        A geometric sequence that ends with 2^-8 at the largest power of two among the heads; those beyond it have
        every second one of the sequence of twice as many heads.
        """
        if not self.graph.alibi:
            return None
        power = 1 << (self.heads.bit_length() - 1)
        first = 8 * np.arange(1, power + 1) / power
        further = 4 * np.arange(1, 2 * (self.heads - power), 2) / power
        return np.exp2(-np.concatenate([first, further])).astype(np.float32)

    def temperatures(self, context: int) -> np.ndarray | None:
        """float32 [context]: what the scores of the token in each position are multiplied by; None for 1."""
        if not self.temperature:
            return None
        lengths = (np.arange(context) + self.temperature_offset) // self.temperature_length
        return (1 + self.temperature * np.log1p(lengths)).astype(np.float32)
