"""The architectures that run, and what their metadata does not say: what layers do, and llama.cpp's defaults.

Everything that reads a model asks for these facts, never for the name of its architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.system.records import record

MOST_BLOCKS = 512  # as in llama.cpp
CONVOLUTION, DELTA, MAMBA, MAMBA1 = "convolution", "delta", "mamba", "mamba-1"


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
class State:
    """Layers with a state, which have no attention.

    kind           what it is: CONVOLUTION, a short convolution between two gates; DELTA, a gated delta net; MAMBA,
                   Mamba-2; MAMBA1, Mamba. See runtime/recurrent_config.py
    everywhere     all layers have one
    may_lack_norm  models may have no norm after it
    tiled          state h has the keys of head h modulo the groups, rather than of head h * groups / heads
    joined         a delta net's beta and alpha come of one matrix, group by group
    """

    kind: str
    everywhere: bool = False
    may_lack_norm: bool = False
    tiled: bool = False
    joined: bool = False


@record
class Graph:
    """What an architecture's layers do that its metadata does not say, and llama.cpp's defaults for what it may say.

    Attention:
    neighbours       rotary pairs are neighbours (2i, 2i + 1) rather than halves (i, i + n/2)
    normed           q and k are normalized, each head or all of them together
    normed_together  they are so together: one norm for the heads of q, one for those of k
    norms_rotated    they are normalized after the rotation, not before
    unit_norms       q and k are normalized by no weights, where they are rotated
    no_unit_norms    number of experts of the model that does not normalize them; 0: all do
    values_normed    values are normalized too, by no weights; where a layer has no matrix for them they are the keys
    output_gate      attention's results are multiplied by a sigmoid; its rows follow those of each head in q's matrix
    one_matrix       q, k and v are one matrix, the network's gate and up another
    latent           keys and values are made of a latent vector
    sinks            each head has a score for no position at all
    unscaled         scores are not scaled, if attention.scale does not say so
    scaled_by_width  layers of the models whose scores are scaled by hidden / heads, not by a head's size; 0: none
    score_cap        scores are c tanh(s / c), if attn_logit_softcapping does not say so; 0: as they are, always
    unrotated_every  every n-th layer rotates nothing; 0: all rotate
    windows          of the layers that attend to one; None: all attend to everything
    chunked          the window is a chunk of positions, one of many of the same size
    temperature      of the scores in layers that rotate nothing, where others have a window: factor, length and offset,
                     see `DecoderConfig.temperatures`; None: attention.temperature_scale says so
    state            of the layers that have one; None: none has
    side_by_side     layers with a state have attention as well, which reads the same; what both make is added

    Norms:
    pre_norm         attention and network read the normalized state, not the state as it is
    post_norm        what they add is normalized too
    sub_norm         so is what their output matrices multiply
    late_norm        the norm before the network is stored as that after attention
    layer_norm       norms subtract the mean, and may have biases
    output_norm      the name of the last norm

    Networks:
    parallel         the network reads what attention read
    gated            the network has a gate
    gelu             gelu (its tanh form) in place of silu
    clamped          gpt-oss's form of silu and of what it multiplies, see cpu/decoder_ops.py
    xielu            an activation with numbers of each layer, see cpu/decoder_ops.py
    alone            each layer is attention, or what takes its place, or a network: not both

    Experts:
    beside           layers with experts have a network as well, which reads the same
    expert_every     every n-th layer has experts; None: interleave_moe_layer_step says so
    one_is_dense     a model of one expert has plain networks
    sigmoid          routers have a sigmoid, if expert_gating_func does not say so; llama.cpp wants that key of some,
                     which in transformers have a sigmoid
    sigmoid_vocab    tokens of the model that has a sigmoid, but not the key; 0: there is none
    unnormalized     weights of the experts used do not sum to one, if expert_weights_norm does not say so
    before           an expert's weight multiplies what it reads, not what it makes
    mixer            m of Phi-MoE's rule; 0: it does not apply
    shared_gate      layers with experts have one that all tokens share, multiplied by a gate
    shared_experts   the shared expert is so many times as wide as the others, if expert_shared_count does not say so;
                     None: its width has a key, or there is none

    Ends:
    scaled           embeddings are multiplied by the root of their width
    positions        each position has an embedding
    streams          there are several streams of activations
    logit_cap        logits are c tanh(l / c), if final_logit_softcapping does not say so
    logits_times     logits are multiplied by logit_scale, not divided
    """

    neighbours: bool = False
    normed: bool = False
    normed_together: bool = False
    norms_rotated: bool = False
    unit_norms: bool = False
    no_unit_norms: int = 0
    values_normed: bool = False
    output_gate: bool = False
    one_matrix: bool = False
    latent: bool = False
    sinks: bool = False
    unscaled: bool = False
    scaled_by_width: int = 0
    score_cap: float = 0.0
    unrotated_every: int = 0
    windows: Windows | None = None
    chunked: bool = False
    temperature: tuple[float, int, int] | None = None
    state: State | None = None
    side_by_side: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    sub_norm: bool = False
    late_norm: bool = False
    layer_norm: bool = False
    output_norm: str = "output_norm"
    parallel: bool = False
    gated: bool = True
    gelu: bool = False
    clamped: bool = False
    xielu: bool = False
    alone: bool = False
    beside: bool = False
    expert_every: int | None = 1
    one_is_dense: bool = False
    sigmoid: bool = False
    sigmoid_vocab: int = 0
    unnormalized: bool = False
    before: bool = False
    mixer: float = 0.0
    shared_gate: bool = False
    shared_experts: int | None = None
    scaled: bool = False
    positions: bool = False
    streams: bool = False
    logit_cap: float = 0.0
    logits_times: bool = False


_CONVOLVED = Graph(normed=True, windows=Windows(0, base=None), state=State(CONVOLUTION), output_norm="token_embd_norm")
_LATENT = Graph(neighbours=True, latent=True, unnormalized=True, shared_experts=0)
_INDEXED = replace(_LATENT, sigmoid=True)
ARCHITECTURES = {
    "llama": Graph(neighbours=True),
    "mistral3": Graph(neighbours=True),
    "qwen2": Graph(),
    "qwen2vl": Graph(),
    "qwen2moe": Graph(unnormalized=True, shared_gate=True),
    "qwen3": Graph(normed=True),
    "qwen3vl": Graph(normed=True),
    "qwen3moe": Graph(normed=True),
    "qwen3vlmoe": Graph(normed=True),
    "smollm3": Graph(neighbours=True, unrotated_every=4),
    "granite": Graph(neighbours=True),
    "phi3": Graph(one_matrix=True),
    "glm4": Graph(neighbours=True, post_norm=True),
    "olmo2": Graph(  # a window in OLMo 3 alone
        normed=True, normed_together=True, pre_norm=False, post_norm=True,
        windows=Windows(4, base=None, scaled=False),
    ),
    "bitnet": Graph(sub_norm=True),
    "gemma2": Graph(
        post_norm=True, gelu=True, scaled=True, windows=Windows(2, tokens=4096), score_cap=50.0, logit_cap=30.0,
        scaled_by_width=46,  # of 27 B, as in Gemma 3
    ),
    "gemma3": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, windows=Windows(6, base=10000.0, scaled=False),
        scaled_by_width=62,
    ),
    "gemma4": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, beside=True, unscaled=True,
        windows=Windows(None, tokens=None, base=10000.0, scaled=False),
    ),
    "gemma3n": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, unscaled=True, streams=True,
        windows=Windows(5, tokens=None, base=10000.0, scaled=False),
    ),
    "gpt-oss": Graph(late_norm=True, clamped=True, windows=Windows(2, tokens=None), sinks=True),
    # normed in GLM-4.5 and later large ones, not in Air
    "glm4moe": Graph(late_norm=True, sigmoid=True, unnormalized=True, shared_experts=0),
    "exaone4": Graph(  # llama.cpp knows the model with windows by its 64 layers
        normed=True, pre_norm=False, post_norm=True,
        windows=Windows(4, tokens=4096, base=None, alone_rotated=True, layers=64),
    ),
    "seed_oss": Graph(late_norm=True),
    "ernie4_5": Graph(neighbours=True),
    "ernie4_5-moe": Graph(neighbours=True),
    "granitemoe": Graph(neighbours=True),
    "hunyuan-dense": Graph(normed=True, norms_rotated=True),
    "hunyuan-moe": Graph(normed=True, norms_rotated=True),
    "minimax-m2": Graph(normed=True, normed_together=True, sigmoid=True),
    "minimax-m3": Graph(normed=True, clamped=True, sigmoid=True, shared_experts=0),
    "dots1": Graph(normed=True, sigmoid=True, unnormalized=True, shared_experts=0),
    "llama4": Graph(
        neighbours=True, norms_rotated=True, unit_norms=True, no_unit_norms=128, unrotated_every=4, chunked=True,
        windows=Windows(4, tokens=8192), temperature=(0.1, 8192, 1), expert_every=None, sigmoid=True,
        unnormalized=True, before=True, shared_experts=1,
    ),
    "phimoe": Graph(layer_norm=True, mixer=0.02),  # twice its router_jitter_noise
    "command-r": Graph(neighbours=True, layer_norm=True, parallel=True, logits_times=True),
    "starcoder2": Graph(layer_norm=True, gated=False, gelu=True),
    "gpt2": Graph(layer_norm=True, gated=False, gelu=True, unrotated_every=1, positions=True),
    "deepseek2": replace(_LATENT, sigmoid_vocab=154880),  # GLM-4.7-Flash, whose first files lack the key
    "deepseek32": _INDEXED,
    "glm-dsa": _INDEXED,
    "mistral4": _LATENT,
    "lfm2": _CONVOLVED,
    "lfm2moe": replace(_CONVOLVED, sigmoid=True),
    "granitehybrid": Graph(neighbours=True, state=State(MAMBA)),
    "falcon-h1": Graph(side_by_side=True, state=State(MAMBA, everywhere=True, may_lack_norm=True)),
    "mamba2": Graph(alone=True, state=State(MAMBA, everywhere=True)),
    "jamba": Graph(  # Jamba Reasoning 3B has one expert
        unrotated_every=1, state=State(MAMBA1), expert_every=2, one_is_dense=True, unnormalized=True
    ),
    "apertus": Graph(normed=True, gated=False, xielu=True),
    "nemotron_h": Graph(alone=True, gated=False, state=State(MAMBA)),
    "nemotron_h_moe": Graph(alone=True, gated=False, state=State(MAMBA), sigmoid=True, unnormalized=True),
    "qwen35": Graph(normed=True, late_norm=True, output_gate=True, state=State(DELTA, tiled=True)),
    "qwen35moe": Graph(normed=True, late_norm=True, output_gate=True, state=State(DELTA, tiled=True)),
    "qwen3next": Graph(normed=True, late_norm=True, output_gate=True, state=State(DELTA, joined=True)),
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
