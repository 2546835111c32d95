"""The architectures that run, and what their layers do."""

from collections.abc import Callable
from typing import Any

from bridge.errors import BridgeError
from bridge.system.records import record

MOST_BLOCKS = 512  # as in llama.cpp


@record
class Windows:
    """Which layers of an architecture attend to a window, and how these rotate: llama.cpp's rule, and its defaults.

    period         every n-th layer attends to everything, the others to the window; 0: none attends to everything;
                   None: there is no default (attention.sliding_window_pattern: a period, or a list of all layers)
    tokens         of the window; 0: no layer has one; None: there is no default (attention.sliding_window)
    base           theta of their rotation; 0: that of the other layers (rope.freq_base_swa); None: that of the other
                   layers, whatever the key says
    scaled         their frequencies are scaled and divided as those of the other layers
    alone_rotated  the other layers rotate nothing
    layers         that the models with a window have; 0: any number
    """

    period: int | None
    tokens: int | None = 0
    base: float | None = 0.0
    scaled: bool = True
    alone_rotated: bool = False
    layers: int = 0

    def by_default(self, layers: int) -> tuple[bool, ...] | None:
        """Whether each layer has a window, where no key says so; None if the key must be there."""
        return None if self.period is None else _by_period(self.period, layers)


def _by_period(period: int, layers: int) -> tuple[bool, ...]:
    return tuple(period == 0 or (layer + 1) % period != 0 for layer in range(layers))


@record
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
    clamped          gpt-oss's form of silu and of what it multiplies, see cpu/decoder_ops.py
    scaled           embeddings are multiplied by the root of their width
    alone            each layer is attention, or what takes its place, or a network: not both
    side_by_side     layers with a state have attention as well, which reads the same; what both make is added
    unrotated_every  every n-th layer rotates nothing; 0: all rotate
    windows          of the layers that attend to one; None: all attend to everything
    values_normed    values are normalized too, by no weights; where a layer has no matrix for them they are the keys
    unit_norms       q and k are normalized by no weights, where they are rotated
    beside           layers with experts have a network as well, which reads the same
    chunked          the window is a chunk of positions, one of many of the same size
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
    alone: bool = False
    side_by_side: bool = False
    unrotated_every: int = 0
    windows: Windows | None = None
    values_normed: bool = False
    unit_norms: bool = False
    beside: bool = False
    chunked: bool = False
    sinks: bool = False
    output_gate: bool = False


_NEMOTRON_H = Graph(alone=True, gated=False)
_ALL_WINDOWED = Windows(0, base=None)
_DELTA = Graph(normed=True, late_norm=True, output_gate=True)
ARCHITECTURES = {
    "llama": Graph(neighbours=True), "mistral3": Graph(neighbours=True), "qwen2": Graph(), "qwen2vl": Graph(),
    "qwen2moe": Graph(), "qwen3": Graph(normed=True), "qwen3vl": Graph(normed=True), "qwen3moe": Graph(normed=True),
    "qwen3vlmoe": Graph(normed=True), "smollm3": Graph(neighbours=True, unrotated_every=4),
    "granite": Graph(neighbours=True), "phi3": Graph(), "glm4": Graph(neighbours=True, post_norm=True),
    "olmo2": Graph(  # a window in OLMo 3 alone
        normed=True, pre_norm=False, post_norm=True, windows=Windows(4, base=None, scaled=False)
    ),
    "bitnet": Graph(sub_norm=True),
    "gemma2": Graph(post_norm=True, gelu=True, scaled=True, windows=Windows(2, tokens=4096)),
    "gemma3": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, windows=Windows(6, base=10000.0, scaled=False)
    ),
    "gemma4": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, beside=True,
        windows=Windows(None, tokens=None, base=10000.0, scaled=False),
    ),
    "gemma3n": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True,
        windows=Windows(5, tokens=None, base=10000.0, scaled=False),
    ),
    "gpt-oss": Graph(late_norm=True, clamped=True, windows=Windows(2, tokens=None), sinks=True),
    "glm4moe": Graph(late_norm=True),  # normed in GLM-4.5 and later large ones, not in Air
    "exaone4": Graph(  # llama.cpp knows the model with windows by its 64 layers
        normed=True, pre_norm=False, post_norm=True,
        windows=Windows(4, tokens=4096, base=None, alone_rotated=True, layers=64),
    ),
    "seed_oss": Graph(late_norm=True),
    "ernie4_5": Graph(neighbours=True), "ernie4_5-moe": Graph(neighbours=True), "granitemoe": Graph(neighbours=True),
    "hunyuan-dense": Graph(normed=True, norms_rotated=True), "hunyuan-moe": Graph(normed=True, norms_rotated=True),
    "minimax-m2": Graph(normed=True), "minimax-m3": Graph(normed=True, clamped=True), "dots1": Graph(normed=True),
    "llama4": Graph(
        neighbours=True, norms_rotated=True, unit_norms=True, unrotated_every=4, chunked=True,
        windows=Windows(4, tokens=8192),
    ),
    "phimoe": Graph(layer_norm=True),
    "command-r": Graph(neighbours=True, layer_norm=True, parallel=True),
    "starcoder2": Graph(layer_norm=True, gated=False, gelu=True),
    "gpt2": Graph(layer_norm=True, gated=False, gelu=True, unrotated_every=1),  # positions are embedded
    "deepseek2": Graph(neighbours=True), "deepseek32": Graph(neighbours=True), "glm-dsa": Graph(neighbours=True),
    "mistral4": Graph(neighbours=True),
    "lfm2": Graph(normed=True, windows=_ALL_WINDOWED), "lfm2moe": Graph(normed=True, windows=_ALL_WINDOWED),
    "granitehybrid": Graph(neighbours=True),
    "falcon-h1": Graph(side_by_side=True), "mamba2": Graph(alone=True),
    "jamba": Graph(unrotated_every=1),
    "apertus": Graph(normed=True, gated=False),
    "nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H,
    "qwen35": _DELTA, "qwen35moe": _DELTA, "qwen3next": _DELTA,
}  # fmt: skip


def read_windows(arch: str, get: Callable[[str], Any], layers: int) -> tuple[int, tuple[bool, ...]]:
    """Tokens of the window, and whether each layer has it; 0 and () where none does.

    get  the value of a key, without the architecture's name before it; None if it is not there

    Raises BridgeError for keys that are missing or of the wrong kind.
    """
    rule = ARCHITECTURES[arch].windows
    if rule is None or rule.layers not in (0, layers):
        return 0, ()
    tokens = get("attention.sliding_window")
    tokens = rule.tokens if tokens is None else tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise BridgeError(
            f"{arch}.attention.sliding_window is {tokens!r:.80}; must be a number of tokens; convert the model again"
        )
    if not tokens:
        return 0, ()
    pattern = get("attention.sliding_window_pattern")
    windows: tuple[bool, ...] | None = None
    if pattern is None:
        windows = rule.by_default(layers)
    elif isinstance(pattern, list) and len(pattern) >= layers and all(isinstance(one, int) for one in pattern):
        windows = tuple(bool(one) for one in pattern[:layers])
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0 and rule.period is not None:
        windows = _by_period(pattern, layers)
    if windows is None:
        period = "" if rule.period is None else ", or be a period"
        raise BridgeError(
            f"{arch}.attention.sliding_window_pattern is {pattern!r:.80}; must say of each of {layers} layers whether "
            f"it has a window{period}; convert the model again"
        )
    return tokens, windows if any(windows) else ()
