"""The architectures that run, and what their metadata does not say: what layers do, and llama.cpp's defaults.

Everything that reads a model asks for these facts, never for the name of its architecture.
"""

from collections.abc import Callable
from typing import Any

from bridge.errors import BridgeError
from bridge.system.records import record

MOST_BLOCKS = 512  # as in llama.cpp
CONVOLUTION, DELTA, KDA, MAMBA, MAMBA1 = "convolution", "delta", "kda", "mamba", "mamba-1"


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
    alone_whole    the other layers rotate half of what the metadata says that these do
    dense_rotated  but those before the first with experts
    layers         that the models with a window have; 0: any number
    last           the layer without a window is the last of each period, not the first

    Where attention goes both ways (`Graph.causal`), the window reaches half its tokens back and as many ahead.
    """

    period: int | None
    tokens: int | None = 0
    base: float | None = 0.0
    scaled: bool = True
    alone_rotated: bool = False
    alone_whole: bool = False
    dense_rotated: bool = False
    layers: int = 0
    last: bool = True

    def by_default(self, layers: int) -> tuple[bool, ...] | None:
        """Whether each layer has a window, where no key says so; None if the key must be there."""
        return None if self.period is None else self.by_period(self.period, layers)

    def by_period(self, period: int, layers: int) -> tuple[bool, ...]:
        """Whether each layer has a window, where every n-th has none."""
        return tuple(period == 0 or (layer + self.last) % period != 0 for layer in range(layers))


@record
class State:
    """Layers with a state; see runtime/config/recurrent_config.py."""

    kind: str  # CONVOLUTION, DELTA, KDA, MAMBA or MAMBA1
    everywhere: bool = False  # all layers have one
    may_lack_norm: bool = False  # models may have no norm after it
    tiled: bool = False  # state h has the keys of head h modulo the groups, rather than of head h * groups / heads
    joined: bool = False  # a delta net's beta and alpha come of one matrix, group by group
    full_decay: str = ""  # the matrix that makes KDA's decays alone; "": two of low rank do, ssm_f_a and ssm_f_b
    full_gate: str = ""  # that which makes the gates of its output; "": ssm_g_a and ssm_g_b do
    bounded: bool = False  # KDA's decays have a bound in all models, kda.gate_lower_bound


@record
class Graph:
    """What an architecture's layers do that its metadata does not say, and llama.cpp's defaults for what it may say."""

    # attention
    causal: bool = True  # tokens attend to those before them alone, if attention.causal does not say so
    neighbours: bool = False  # rotary pairs are neighbours (2i, 2i + 1) rather than halves (i, i + n/2)
    halves_of_images: bool = False  # but halves in models with rope.dimension_sections, which see images
    normed: bool = False  # q and k are normalized, each head or all of them together
    normed_together: bool = False  # they are so together: one norm for the heads of q, one for those of k
    norms_rotated: bool = False  # they are normalized after the rotation, not before
    unit_norms: bool = False  # q and k are normalized by no weights, where they are rotated
    no_unit_norms: int = 0  # experts of the model that does not normalize them
    values_normed: bool = False  # by no weights; where a layer has no matrix for values they are the keys
    output_gate: bool = False  # results are multiplied by a sigmoid; its rows follow those of each head in q's matrix
    gate_matrix: bool = False  # they are by that of what a matrix of its own makes, attn_gate: of each element or head
    some_gates: bool = False  # but in layers without such a matrix in the file
    softplus: bool = False  # they are by a softplus of it
    latent: bool = False  # keys and values are made of a latent vector
    still: bool = False  # rotations are by no angle: of latent attention's keys too the part that others rotate
    sinks: bool = False  # each head has a score for no position at all
    some_sinks: bool = False  # but in layers without such scores in the file
    unscaled: bool = False  # scores are not scaled, if attention.scale does not say so
    scaled_by_width: int = 0  # layers of the model whose scores are scaled by hidden / heads, not by a head's size
    score_cap: float = 0.0  # c: scores are c tanh(s / c), if attn_logit_softcapping is missing; 0: never
    unrotated_every: int = 0  # every n-th layer rotates nothing; 0: all rotate
    windows: Windows | None = None  # of the layers that attend to one; None: all attend to everything
    alibi: bool = False  # scores lose a part of the distance between the tokens, see `DecoderConfig.slopes`
    chunked: bool = False  # the window is a chunk of positions, one of many of the same size
    temperature: tuple[float, int, int] | None = None  # factor, length and offset, see `DecoderConfig.temperatures`
    state: State | None = None  # of the layers that have one in place of attention
    side_by_side: bool = False  # layers with a state have attention as well; what both make of the same is added

    # norms
    pre_norm: bool = True  # attention and network read the normalized state, not the state as it is
    post_norm: bool = False  # what they add is normalized too
    post_norm_eps: float = 0.0  # by norms with this eps; 0: the others'
    sub_norm: bool = False  # so is what their output matrices multiply
    late_norm: bool = False  # the norm before the network is stored as that after attention
    layer_norm: bool = False  # norms subtract the mean, and may have biases
    rms_by_key: bool = False  # they do not where attention.layer_norm_rms_epsilon is there
    renormed: bool = False  # what is added is normalized with the state, which goes on so: there is no norm before
    embedding_norm: bool = False  # embeddings are normalized
    unit_embedding_norm: bool = False  # they are so by no weights
    output_norm: str = "output_norm"  # the name of the last norm

    # networks
    parallel: bool = False  # the network reads what attention read
    gated: bool = True  # the network has a gate
    gelu: bool = False  # gelu (its tanh form) in place of silu
    relu2: bool = False  # relu squared in place of silu
    erf: bool = False  # gelu is not its tanh form
    clamped: bool = False  # gpt-oss's form of silu and of what it multiplies, see cpu/ops/decoder_ops.py
    xielu: bool = False  # an activation with numbers of each layer, see cpu/ops/decoder_ops.py
    situ: bool = False  # a gate and what it multiplies are bent by tanh, see cpu/ops/decoder_ops.py
    alone: bool = False  # each layer is attention, or what takes its place, or a network: not both

    # experts
    beside: bool = False  # layers with experts have a network as well, which reads the same
    leading: int = 0  # layers before the first with experts, if leading_dense_block_count is missing
    expert_every: int | None = 1  # every n-th layer has experts; None: interleave_moe_layer_step says so
    by_router: bool = False  # but layers without a router in the file have plain networks
    one_is_dense: bool = False  # a model of one expert has plain networks
    sigmoid: bool = False  # of routers, if expert_gating_func is missing, which llama.cpp may want
    sigmoid_vocab: int = 0  # tokens of the model with a sigmoid without that key
    unnormalized: bool = False  # weights of the experts used do not sum to one, if expert_weights_norm is missing
    before: bool = False  # an expert's weight multiplies what it reads, not what it makes
    mixer: float = 0.0  # m of Phi-MoE's rule; 0: it does not apply
    shared_gate: bool = False  # layers with experts have one that all tokens share, multiplied by a gate
    shared_mean: bool = False  # the mean of what the experts and the shared one make is added, not their sum
    shared_experts: int | None = None  # the shared one is so many times as wide, if expert_shared_count is missing

    # ends
    scaled: bool = False  # embeddings are multiplied by the root of their width
    positions: bool = False  # each position has an embedding
    streams: bool = False  # there are several streams of activations
    put_aside: bool = False  # every few layers the state begins anew; what is read is mixed of it and those before
    logit_cap: float = 0.0  # as score_cap, of logits: final_logit_softcapping
    factors_said: bool = False  # what scales embeddings, layers and logits must be said
    logits_times: bool = False  # logits are multiplied by logit_scale, not divided
    head_gelu: bool = False  # a reranker's head has gelu between its matrices, in place of tanh
    head_mean: bool = False  # it reads the mean of all states, if classifier.pooling_type does not say otherwise
    head_softmax: bool = False  # its outputs are shares of one


_ENCODER: dict[str, Any] = {
    "causal": False, "layer_norm": True, "renormed": True, "embedding_norm": True, "gelu": True, "erf": True,
}  # fmt: skip
_CONVOLVED: dict[str, Any] = {
    "normed": True, "windows": Windows(0, base=None), "state": State(CONVOLUTION), "output_norm": "token_embd_norm",
}  # fmt: skip
_LATENT: dict[str, Any] = {"neighbours": True, "latent": True, "unnormalized": True, "shared_experts": 0}
_DELTA: dict[str, Any] = {"normed": True, "late_norm": True, "output_gate": True}
_COHERE: dict[str, Any] = {"neighbours": True, "layer_norm": True, "parallel": True, "logits_times": True}
_NEMOTRON_H: dict[str, Any] = {"alone": True, "gated": False, "relu2": True, "state": State(MAMBA)}
_INDEXED, _TILED = Graph(**_LATENT, sigmoid=True), Graph(**_DELTA, state=State(DELTA, tiled=True))
ARCHITECTURES = {
    "llama": Graph(neighbours=True), "mistral3": Graph(neighbours=True), "qwen2": Graph(), "qwen2vl": Graph(),
    "qwen2moe": Graph(unnormalized=True, shared_gate=True),
    "qwen3": Graph(normed=True, head_softmax=True), "qwen3vl": Graph(normed=True, head_softmax=True),
    "qwen3moe": Graph(normed=True), "qwen3vlmoe": Graph(normed=True),
    "smollm3": Graph(neighbours=True, unrotated_every=4), "granite": Graph(neighbours=True),
    "phi3": Graph(), "glm4": Graph(neighbours=True, post_norm=True),
    "olmo2": Graph(  # a window in OLMo 3 alone
        normed=True, normed_together=True, pre_norm=False, post_norm=True,
        windows=Windows(4, base=None, scaled=False),
    ),
    "olmoe": Graph(normed=True, normed_together=True, unnormalized=True),
    "mellum": Graph(normed=True, windows=Windows(4, base=None, scaled=False)),
    "minicpm": Graph(neighbours=True, factors_said=True),
    "granite_swa": Graph(neighbours=True, windows=Windows(None, tokens=None, base=None), sinks=True),
    "afmoe": Graph(
        normed=True, post_norm=True, scaled=True, gate_matrix=True, windows=Windows(4), unrotated_every=4, sigmoid=True,
        unnormalized=True, shared_experts=0,
    ),
    "laguna": Graph(  # windows in the models whose layers differ in their heads
        normed=True, gate_matrix=True, softplus=True, windows=Windows(4, scaled=False, last=False), sigmoid=True,
        unnormalized=True, shared_experts=1,
    ),
    "arcee": Graph(neighbours=True, gated=False, relu2=True),
    "jais2": Graph(layer_norm=True, gated=False, relu2=True),
    "bitnet": Graph(sub_norm=True),
    "gemma2": Graph(
        post_norm=True, gelu=True, scaled=True, windows=Windows(2, tokens=4096), score_cap=50.0, logit_cap=30.0,
        scaled_by_width=46,  # of 27 B, as in Gemma 3
    ),
    "gemma3": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, windows=Windows(6, base=10000.0, scaled=False),
        scaled_by_width=62,
    ),
    "gemma-embedding": Graph(
        causal=False, normed=True, post_norm=True, gelu=True, scaled=True,
        windows=Windows(6, tokens=None, base=10000.0, scaled=False),
    ),
    "gemma4": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, beside=True, unscaled=True,
        windows=Windows(None, tokens=None, base=10000.0, scaled=False),
    ),
    "gemma3n": Graph(
        normed=True, post_norm=True, gelu=True, scaled=True, values_normed=True, unscaled=True, streams=True,
        windows=Windows(5, tokens=None, base=10000.0, scaled=False),
    ),
    "muse-glimmer": Graph(
        neighbours=True, normed=True, post_norm=True, post_norm_eps=1e-8, unit_embedding_norm=True, gate_matrix=True,
        windows=Windows(4, tokens=None, scaled=False, alone_rotated=True), logits_times=True, logit_cap=30.0,
    ),
    "plamo3": Graph(normed=True, post_norm=True, windows=Windows(8, base=10000.0, scaled=False)),
    "gpt-oss": Graph(late_norm=True, clamped=True, windows=Windows(2, tokens=None), sinks=True),
    # normed in GLM-4.5 and later large ones, not in Air
    "glm4moe": Graph(late_norm=True, sigmoid=True, unnormalized=True, shared_experts=0),
    "exaone4": Graph(  # llama.cpp knows the model with windows by its 64 layers
        normed=True, pre_norm=False, post_norm=True,
        windows=Windows(4, tokens=4096, base=None, alone_rotated=True, layers=64),
    ),
    "exaone-moe": Graph(
        normed=True, unnormalized=True, windows=Windows(4, tokens=128, base=None, alone_rotated=True), shared_experts=0
    ),
    "seed_oss": Graph(late_norm=True),
    "ernie4_5": Graph(neighbours=True), "ernie4_5-moe": Graph(neighbours=True), "granitemoe": Graph(neighbours=True),
    "bailingmoe": Graph(neighbours=True, unnormalized=True, shared_experts=0),
    "bailingmoe2": Graph(normed=True, sigmoid=True, unnormalized=True),
    "hy_v3": Graph(normed=True, sigmoid=True, unnormalized=True, leading=1),
    "step35": Graph(
        gate_matrix=True, some_gates=True, by_router=True, sigmoid=True, unnormalized=True,
        windows=Windows(None, None, base=10000.0, scaled=False, alone_whole=True),
    ),
    "mimo2": Graph(sigmoid=True, sinks=True, some_sinks=True, windows=Windows(None, None, scaled=False)),
    "hunyuan-dense": Graph(normed=True, norms_rotated=True), "hunyuan-moe": Graph(normed=True, norms_rotated=True),
    "minimax-m2": Graph(normed=True, normed_together=True, sigmoid=True),
    "minimax-m3": Graph(normed=True, clamped=True, sigmoid=True, shared_experts=0),
    "dots1": Graph(normed=True, sigmoid=True, unnormalized=True, shared_experts=0),
    "llama4": Graph(
        neighbours=True, norms_rotated=True, unit_norms=True, no_unit_norms=128, unrotated_every=4, chunked=True,
        windows=Windows(4, tokens=8192), temperature=(0.1, 8192, 1), expert_every=None, sigmoid=True,
        unnormalized=True, before=True, shared_experts=1,
    ),
    "phimoe": Graph(layer_norm=True, mixer=0.02),  # twice its router_jitter_noise
    "command-r": Graph(**_COHERE), "cohere2": Graph(**_COHERE, windows=Windows(4, None, base=None, alone_rotated=True)),
    "cohere2moe": Graph(
        **_COHERE, rms_by_key=True, sigmoid=True, unnormalized=True, shared_mean=True,
        windows=Windows(None, None, base=None, alone_rotated=True, dense_rotated=True),
    ),
    "starcoder2": Graph(layer_norm=True, gated=False, gelu=True),
    "gpt2": Graph(layer_norm=True, gated=False, gelu=True, unrotated_every=1, positions=True),
    "bert": Graph(**_ENCODER, gated=False, unrotated_every=1, positions=True),
    "jina-bert-v2": Graph(**_ENCODER, unrotated_every=1, alibi=True),
    "jina-bert-v3": Graph(**_ENCODER, gated=False),
    "nomic-bert": Graph(**{**_ENCODER, "gelu": False}),
    "nomic-bert-moe": Graph(**_ENCODER, gated=False, expert_every=2, unnormalized=True),
    "modern-bert": Graph(
        causal=False, layer_norm=True, embedding_norm=True, gelu=True, erf=True, head_gelu=True, head_mean=True,
        windows=Windows(3, base=10000.0, last=False),
    ),
    "deepseek2": Graph(**_LATENT, sigmoid_vocab=154880),  # GLM-4.7-Flash, whose first files lack the key
    "kimi-linear": Graph(latent=True, still=True, sigmoid=True, shared_experts=0, state=State(KDA)),
    "kimi-k3": Graph(
        latent=True, still=True, gate_matrix=True, some_gates=True, situ=True, sigmoid=True, unnormalized=True,
        shared_experts=0, put_aside=True, state=State(KDA, full_gate="ssm_g"),
    ),
    "bailingmoe3": Graph(
        **(_LATENT | {"shared_experts": 1}), halves_of_images=True, gate_matrix=True,
        state=State(KDA, full_decay="ssm_f_a", full_gate="ssm_g_a", bounded=True),
    ),
    "deepseek32": _INDEXED, "glm-dsa": _INDEXED, "mistral4": Graph(**_LATENT),
    "lfm2": Graph(**_CONVOLVED), "lfm2moe": Graph(**_CONVOLVED, sigmoid=True),
    "granitehybrid": Graph(neighbours=True, state=State(MAMBA)),
    "falcon-h1": Graph(side_by_side=True, state=State(MAMBA, everywhere=True, may_lack_norm=True)),
    "mamba2": Graph(alone=True, state=State(MAMBA, everywhere=True)),
    "jamba": Graph(  # Jamba Reasoning 3B has one expert
        unrotated_every=1, state=State(MAMBA1), expert_every=2, one_is_dense=True, unnormalized=True
    ),
    "apertus": Graph(normed=True, gated=False, xielu=True),
    "nemotron_h": Graph(**_NEMOTRON_H), "nemotron_h_moe": Graph(**_NEMOTRON_H, sigmoid=True, unnormalized=True),
    "qwen35": _TILED, "qwen35moe": _TILED, "qwen3next": Graph(**_DELTA, state=State(DELTA, joined=True)),
}  # fmt: skip

EAGLE, ASSISTANT, BLOCK = "eagle", "assistant", "block"


@record
class DraftGraph:
    """An architecture whose models guess tokens for another one: how (EAGLE, ASSISTANT or BLOCK), and its layers."""

    kind: str
    graph: Graph


DRAFTERS = {
    "eagle3": DraftGraph(EAGLE, Graph(neighbours=True)),
    "dflash": DraftGraph(BLOCK, Graph(normed=True, windows=Windows(None, tokens=0, base=None))),
    "gemma4-assistant": DraftGraph(ASSISTANT, ARCHITECTURES["gemma4"]),
}


def read_windows(arch: str, get: Callable[[str], Any], layers: int) -> tuple[int, tuple[bool, ...]]:
    """Tokens of the window, and whether each layer has it; 0 and () where none does.

    get  the value of a key, without the architecture's name before it; None if it is not there

    Raises BridgeError for keys that are missing or of the wrong kind.
    """
    rule = (ARCHITECTURES[arch] if arch in ARCHITECTURES else DRAFTERS[arch].graph).windows
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
        windows = rule.by_period(pattern, layers)
    if windows is None:
        period = "" if rule.period is None else ", or be a period"
        raise BridgeError(
            f"{arch}.attention.sliding_window_pattern is {pattern!r:.80}; must say of each of {layers} layers whether "
            f"it has a window{period}; convert the model again"
        )
    return tokens, windows if any(windows) else ()
