"""The tensors that a decoder runs on, layer by layer: matrices as they are in the file, vectors as float32."""

import numpy as np

from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.records import record

Network = tuple[QuantTensor, QuantTensor | None, QuantTensor]


@record(frozen=False)
class Experts:
    """A layer's experts: the router float32 [experts, hidden], and gate, up (None where there is no gate, as in
    `Layer`) and down of each.

    biases       of gate, up and down, each float32 [experts, out]; None where there are none, as for the others
    router_bias  float32 [experts], added to the router's logits, and
    choice_bias  to what experts are chosen by, but not to their weights
    shared       gate, up and down of the expert that all tokens pass through, and
    shared_gate  float32 [hidden], whose sigmoid weighs it; None: it is added as it is
    shorten      [latent, hidden], which makes the shorter vector that experts other than the shared one read, and
    lengthen     [hidden, latent], which reads the sum of what they make of it, normalized by
    summed_norm  float32 [latent], if there is one
    limits       as `DecoderConfig.limits_of` has them; the shared expert is one of the other networks
    """

    router: np.ndarray
    networks: list[Network]
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    router_bias: np.ndarray | None = None
    choice_bias: np.ndarray | None = None
    shared: Network | None = None
    shared_gate: np.ndarray | None = None
    shorten: QuantTensor | None = None
    lengthen: QuantTensor | None = None
    summed_norm: np.ndarray | None = None
    limits: tuple[float, float] = (0.0, 0.0)


@record(frozen=False)
class Beside:
    """Norms of experts that are beside a network, float32 [hidden]: of what it makes, they read and they make, and of
    what their router reads, which is ones."""

    network: np.ndarray
    before: np.ndarray
    after: np.ndarray
    routed: np.ndarray


@record(frozen=False)
class LayerInput:
    """How a layer takes what there is for it of a token's own: x += norm * rms(project (gelu(gate x) * input))."""

    gate: QuantTensor
    project: QuantTensor
    norm: np.ndarray


@record(frozen=False)
class Inputs:
    """What makes the inputs of all layers, each of as many elements: of a token's row and of its embedding."""

    embedding: QuantTensor
    project: QuantTensor
    norm: np.ndarray


@record(frozen=False)
class Streams:
    """What several streams of activations are made of, each [hidden, hidden], and what brings them together again."""

    begin: list[QuantTensor]
    end: list[QuantTensor]


@record(frozen=False)
class LayerStreams:
    """How a layer predicts and corrects four streams; float32 each, see cpu/ops/stream_ops.py."""

    router: np.ndarray  # [4, hidden]
    router_norm: np.ndarray  # [hidden]
    predict: np.ndarray  # [16, 4]
    correct: np.ndarray  # [4, 4]
    scale: np.ndarray  # [hidden]


@record(frozen=False)
class Laurel:
    """What a layer adds to attention's result: x + norm * rms(right (left x)), of low rank."""

    left: QuantTensor
    right: QuantTensor
    norm: np.ndarray


@record(frozen=False)
class Recurrent:
    """What a layer with a state has in place of q, k and v; vectors as float32, None where its kind has none.

    inputs       as `RecurrentConfig.inputs` names them
    out          the output matrix
    convolution  [kernel, channels], the newest token's last
    decay        negative: -exp(A_log); Mamba's as its states are, [values / 16, key_dim, 16]
    skip         D of Mamba and Mamba-2
    second       Mamba's matrices that make steps, keys and queries of what is convolved, and steps of a shorter vector;
                 KDA's that make steps, and the output's gate, of a shorter vector each, unless one matrix does
    norms        of that vector, and of keys and queries
    """

    inputs: tuple[QuantTensor, ...]
    out: QuantTensor
    convolution: np.ndarray
    convolution_bias: np.ndarray | None = None
    decay: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    skip: np.ndarray | None = None
    norm: np.ndarray | None = None
    second: tuple[QuantTensor, ...] = ()
    norms: tuple[np.ndarray, ...] = ()


@record(frozen=False)
class Layer:
    """One layer's matrices, and its vectors as float32 (None where the model has none).

    With experts alone, `down` is the stack [experts, out, in] of theirs. A network without a gate has its first matrix
    as `gate`, and no `up`. A layer may lack attention (`o` is None) or a network (`down` is None).
    With latent attention q reads the state or what `q_a` makes of it, k makes the latent vector and the rotated part of
    the keys, and there is no v. A layer with a state has `recurrent`, in place of attention or beside it.

    latent_k, latent_v  of each head, [heads, rank, plain] and [heads, value, rank], floats: cpu/ops/latent_attention.py
    sinks               float32 [heads], scores of no position
    attn_score, ffn_score  float32 [hidden], by which attention and network mix the states that they read: machine.py
    """

    attn_norm: np.ndarray | None
    ffn_norm: np.ndarray | None
    o: QuantTensor | None = None
    gate: QuantTensor | None = None
    up: QuantTensor | None = None
    down: QuantTensor | None = None
    q: QuantTensor | None = None
    k: QuantTensor | None = None
    v: QuantTensor | None = None
    head_gate: QuantTensor | None = None  # what it makes of what q reads gates the heads' results
    q_bias: np.ndarray | None = None
    k_bias: np.ndarray | None = None
    v_bias: np.ndarray | None = None
    o_bias: np.ndarray | None = None
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    attn_post_norm: np.ndarray | None = None
    ffn_post_norm: np.ndarray | None = None
    attn_sub_norm: np.ndarray | None = None
    ffn_sub_norm: np.ndarray | None = None
    attn_norm_bias: np.ndarray | None = None
    ffn_norm_bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    attn_score: np.ndarray | None = None
    ffn_score: np.ndarray | None = None
    q_a: QuantTensor | None = None
    q_a_norm: np.ndarray | None = None
    latent_k: QuantTensor | None = None
    latent_v: QuantTensor | None = None
    v_norm: np.ndarray | None = None
    experts: Experts | None = None
    beside: Beside | None = None
    recurrent: Recurrent | None = None
    input: LayerInput | None = None
    streams: LayerStreams | None = None
    laurel: Laurel | None = None
    scale: float = 1.0  # that the state is multiplied by in the end

    @property
    def mixes(self) -> bool:
        """Whether there is attention, or what takes its place."""
        return self.o is not None or self.recurrent is not None

    @property
    def matrices(self) -> tuple[QuantTensor, ...]:
        """All of them, with those of each expert."""
        matrices = [self.q_a, self.q, self.k, self.v, self.head_gate, self.o]
        if self.recurrent is not None:
            matrices += (*self.recurrent.inputs, *self.recurrent.second, self.recurrent.out)
        if self.input is not None:
            matrices += self.input.gate, self.input.project
        if self.experts is None or self.beside is not None:
            matrices += self.gate, self.up, self.down
        if self.experts is not None:
            matrices += (matrix for network in self.experts.networks for matrix in network)
            matrices += self.experts.shorten, self.experts.lengthen, *(self.experts.shared or ())
        return tuple(matrix for matrix in matrices if matrix is not None)


@record
class Pairs:
    """What makes the input of a layer that predicts a further token: see decoder/prediction.py."""

    embedding_norm: np.ndarray
    state_norm: np.ndarray
    joined: QuantTensor  # [hidden, 2 hidden]


@record(frozen=False)
class Weights:
    """A whole decoder; `output` is `embedding` where the two are tied."""

    embedding: QuantTensor
    layers: list[Layer]
    output_norm: np.ndarray
    output: QuantTensor
    rope_factors: np.ndarray | None
    long_factors: np.ndarray | None = None  # LongRoPE's, for contexts beyond the original one
    output_norm_bias: np.ndarray | None = None
    output_bias: np.ndarray | None = None
    inputs: Inputs | None = None  # of the layers
    streams: Streams | None = None
    positions: np.ndarray | None = None  # float32 [context, hidden], added to the embeddings
    type: np.ndarray | None = None  # float32 [hidden], added to all embeddings: that of a first text's tokens
    embedding_norm: np.ndarray | None = None
    embedding_norm_bias: np.ndarray | None = None
    pairs: Pairs | None = None  # where tokens come with states
    output_score: np.ndarray | None = None  # as `Layer.attn_score`, of what the output matrix reads

    def factors(self, context: int, original: int) -> np.ndarray | None:
        """What frequencies are divided by in a context; LongRoPE's differ beyond the original one."""
        return self.long_factors if self.long_factors is not None and context > original else self.rope_factors

    @property
    def floating(self) -> list[QuantTensor]:
        """Matrices beside those of `Layer.matrices`, which most files have as floats."""
        matrices = [] if self.inputs is None else [self.inputs.project]
        if self.streams is not None:
            matrices += self.streams.begin + self.streams.end
        if self.pairs is not None:
            matrices.append(self.pairs.joined)
        return matrices + [m for layer in self.layers if layer.laurel for m in (layer.laurel.left, layer.laurel.right)]
