"""The architectures that run, and what their layers do."""

from dataclasses import dataclass


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
    clamped          gpt-oss's form of silu and of what it multiplies, see cpu/decoder_ops.py
    scaled           embeddings are multiplied by the root of their width
    alone            each layer is attention, or what takes its place, or a network: not both
    side_by_side     layers with a state have attention as well, which reads the same; what both make is added
    unrotated_every  every n-th layer rotates nothing; 0: all rotate
    full_every       every n-th layer attends to everything, the others to a window; 0: all to everything
    named_windows    the metadata names the layers with a window
    one_rotation     layers with a window rotate as the others do
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
    full_every: int = 0
    named_windows: bool = False
    one_rotation: bool = False
    values_normed: bool = False
    unit_norms: bool = False
    beside: bool = False
    chunked: bool = False
    sinks: bool = False
    output_gate: bool = False


_NEMOTRON_H = Graph(alone=True, gated=False)
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
    "gemma4": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, beside=True, named_windows=True
    ),
    "gemma3n": Graph(normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, named_windows=True),
    "gpt-oss": Graph(late_norm=True, clamped=True, full_every=2, one_rotation=True, sinks=True),
    "glm4moe": Graph(late_norm=True),  # normed in GLM-4.5 and later large ones, not in Air
    "exaone4": Graph(normed=True, pre_norm=False, post_norm=True),
    "seed_oss": Graph(late_norm=True),
    "ernie4_5": Graph(neighbours=True), "ernie4_5-moe": Graph(neighbours=True), "granitemoe": Graph(neighbours=True),
    "hunyuan-dense": Graph(normed=True, norms_rotated=True), "hunyuan-moe": Graph(normed=True, norms_rotated=True),
    "minimax-m2": Graph(normed=True), "minimax-m3": Graph(normed=True, clamped=True), "dots1": Graph(normed=True),
    "llama4": Graph(
        neighbours=True, norms_rotated=True, unit_norms=True, unrotated_every=4, full_every=4, chunked=True,
        one_rotation=True,
    ),
    "phimoe": Graph(layer_norm=True),
    "command-r": Graph(neighbours=True, layer_norm=True, parallel=True),
    "starcoder2": Graph(layer_norm=True, gated=False, gelu=True),
    "gpt2": Graph(layer_norm=True, gated=False, gelu=True, unrotated_every=1),  # positions are embedded
    "deepseek2": Graph(neighbours=True), "deepseek32": Graph(neighbours=True), "glm-dsa": Graph(neighbours=True),
    "mistral4": Graph(neighbours=True),
    "lfm2": Graph(normed=True), "lfm2moe": Graph(normed=True), "granitehybrid": Graph(neighbours=True),
    "falcon-h1": Graph(side_by_side=True), "mamba2": Graph(alone=True),
    "jamba": Graph(unrotated_every=1),
    "apertus": Graph(normed=True, gated=False),
    "nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H,
    "qwen35": _DELTA, "qwen35moe": _DELTA, "qwen3next": _DELTA,
}  # fmt: skip
