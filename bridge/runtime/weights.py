"""The tensors that a decoder runs on, found in a GGUF and checked against its metadata. Matrices stay in the file."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.cpu.recurrent_ops import LANES
from bridge.runtime.decoder_config import DecoderConfig, Latent
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.recurrent_config import CONVOLUTION, MAMBA, MAMBA1, RecurrentConfig

_NORMED_TOGETHER = {"olmo2", "minimax-m2"}  # heads of q, and of k: one norm for all


Network = tuple[QuantTensor, QuantTensor | None, QuantTensor]


@dataclass
class Experts:
    """A layer's experts: the router float32 [experts, hidden], and gate, up (None where there is no gate, as in
    `Layer`) and down of each.

    biases       of gate, up and down, each float32 [experts, out]; None where there are none, as for the others
    router_bias  float32 [experts], added to the router's logits, and
    choice_bias  to what experts are chosen by, but not to their weights
    shared       gate, up and down of the expert that all tokens pass through, and
    shared_gate  float32 [hidden], whose sigmoid weighs it; None: it is added as it is
    """

    router: np.ndarray
    networks: list[Network]
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    router_bias: np.ndarray | None = None
    choice_bias: np.ndarray | None = None
    shared: Network | None = None
    shared_gate: np.ndarray | None = None


@dataclass
class Beside:
    """Norms of experts that are beside a network, float32 [hidden]: of what it makes, they read and they make."""

    network: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass
class LayerInput:
    """How a layer takes what there is for it of a token's own: x += norm * rms(project (gelu(gate x) * input))."""

    gate: QuantTensor
    project: QuantTensor
    norm: np.ndarray


@dataclass
class Inputs:
    """What makes the inputs of all layers, each of as many elements: of a token's row and of its embedding."""

    embedding: QuantTensor
    project: QuantTensor
    norm: np.ndarray


@dataclass
class Streams:
    """What several streams of activations are made of, each [hidden, hidden], and what brings them together again."""

    begin: list[QuantTensor]
    end: list[QuantTensor]


@dataclass
class LayerStreams:
    """How a layer predicts and corrects four streams; float32 each, see cpu/stream_ops.py."""

    router: np.ndarray  # [4, hidden]
    router_norm: np.ndarray  # [hidden]
    predict: np.ndarray  # [16, 4]
    correct: np.ndarray  # [4, 4]
    scale: np.ndarray  # [hidden]


@dataclass
class Laurel:
    """What a layer adds to attention's result: x + norm * rms(right (left x)), of low rank."""

    left: QuantTensor
    right: QuantTensor
    norm: np.ndarray


@dataclass
class Recurrent:
    """What a layer with a state has in place of q, k and v; vectors as float32, None where its kind has none.

    inputs       as `RecurrentConfig.inputs` names them
    out          the output matrix
    convolution  [kernel, channels], the newest token's last
    decay        negative: -exp(A_log); Mamba's as its states are, [values / 16, key_dim, 16]
    skip         D of Mamba and Mamba-2
    second       Mamba's matrices that make steps, keys and queries of what is convolved, and steps of a shorter vector
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


@dataclass
class Layer:
    """One layer's matrices, and its vectors as float32 (None where the model has none).

    With experts alone, `down` is the stack [experts, out, in] of theirs. A network without a gate has its first matrix
    as `gate`, and no `up`. A layer may lack attention (`o` is None) or a network (`down` is None).
    With latent attention q reads the state or what `q_a` makes of it, k makes the latent vector and the rotated part of
    the keys, and there is no v. A layer with a state has `recurrent`, in place of attention or beside it.

    latent_k, latent_v  of each head, [heads, rank, plain] and [heads, value, rank], floats: cpu/latent_attention.py
    sinks               float32 [heads], scores of no position
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
        own = [self.q_a, self.q, self.k, self.v, self.o]
        if self.recurrent is not None:
            own += (*self.recurrent.inputs, *self.recurrent.second, self.recurrent.out)
        if self.input is not None:
            own += self.input.gate, self.input.project
        if self.experts is None or self.beside is not None:
            own += self.gate, self.up, self.down
        if self.experts is not None:
            own += (matrix for network in self.experts.networks for matrix in network)
            own += self.experts.shared or ()
        return tuple(matrix for matrix in own if matrix is not None)


@dataclass
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

    @property
    def floating(self) -> list[QuantTensor]:
        """Matrices beside those of `Layer.matrices`, which most files have as floats."""
        found = [] if self.inputs is None else [self.inputs.project]
        if self.streams is not None:
            found += self.streams.begin + self.streams.end
        return found + [m for layer in self.layers if layer.laurel for m in (layer.laurel.left, layer.laurel.right)]


def read_weights(file: GGUFFile, config: DecoderConfig, whole: bool = False) -> Weights:
    """Find every tensor; `whole`: whether the caller runs all that the CPU does, not plain decoders alone.

    Raises BridgeError where a tensor is missing or of another shape than the metadata says, or for what is not plain.
    """
    if not whole and (config.experts or not config.plain):
        kind = "a mixture of experts" if config.experts else f"{config.arch}'s graph"
        raise BridgeError(f"{file.path}: {kind} runs on the CPU alone (device cpu)")
    if not whole and any(tensor.change is not None for tensor in file.values()):
        raise BridgeError(f"{file.path}: a model with an adapter (LoRA) runs on the CPU alone (device cpu)")
    shared = read_shared(file, config)
    return replace(shared, layers=[_LayerReader(file, config, i).layer() for i in range(config.layers)])


def read_shared(file: GGUFFile, config: DecoderConfig) -> Weights:
    """What belongs to no layer; `layers` is empty."""
    embedding = file["token_embd.weight"]
    vocab = embedding.shape[0]
    _expect(embedding, vocab, config.hidden)
    output = file.tensors.get("output.weight", embedding)
    _expect(output, vocab, config.hidden)
    factors = {
        name: _vector(file, f"rope_{name}.weight", config.rotated // 2)
        for name in ("freqs", "factors_short", "factors_long")
    }
    positions = None
    if config.arch == "gpt2":
        positions = _expect(file["position_embd.weight"], config.context, config.hidden).dequantize()
    return Weights(
        embedding=embedding,
        layers=[],
        output_norm=_vector(file, _output_norm(config), config.hidden, True) / np.float32(config.logit_scale),
        output=output,
        rope_factors=factors["freqs"] if factors["factors_short"] is None else factors["factors_short"],
        long_factors=factors["factors_long"],
        output_norm_bias=_vector(file, "output_norm.bias", config.hidden),
        output_bias=_vector(file, "output.bias", vocab),
        inputs=_inputs(file, config, vocab) if config.each_input else None,
        streams=_streams(file, config) if config.streams else None,
        positions=positions,
    )


# two layers in one, with a layer norm at the end
_OTHER_PREDICTION = {"nemotron_h_moe"}


@dataclass
class Prediction:
    """The layer that predicts a token further, as a decoder of one layer, and what makes its input."""

    config: DecoderConfig
    weights: Weights
    embedding_norm: np.ndarray
    state_norm: np.ndarray
    joined: QuantTensor  # [hidden, 2 hidden]


def read_prediction(file: GGUFFile, config: DecoderConfig) -> Prediction:
    """The first layer after the others; without embeddings, norm or head of its own it shares the model's.

    Raises BridgeError where the file has none, or a tensor of it is missing.
    """
    name = f"blk.{config.layers}.nextn"
    if not config.predicting or f"{name}.eh_proj.weight" not in file:
        raise BridgeError(f"{file.path}: has no layer that predicts a further token (MTP)")
    if config.arch in _OTHER_PREDICTION:
        problem = f"the layer of {config.arch} that predicts a further token (MTP) cannot run here"
        raise BridgeError(f"{file.path}: {problem}; llama.cpp can run it")
    whole = read_shared(file, config)
    attending = replace(config, layers=config.layers + 1, recurrent=None, inners=())
    hidden, vocab = config.hidden, whole.embedding.shape[0]
    embedding = file.tensors.get(f"{name}.embed_tokens.weight", whole.embedding)
    output = file.tensors.get(f"{name}.shared_head_head.weight", whole.output)
    norm = _vector(file, f"{name}.shared_head_norm.weight", hidden)
    return Prediction(
        config=replace(attending, layers=1, leading=0),
        weights=replace(
            whole,
            embedding=_expect(embedding, vocab, hidden),
            layers=[_LayerReader(file, attending, config.layers).layer()],
            output_norm=whole.output_norm if norm is None else norm,
            output=_expect(output, vocab, hidden),
        ),
        embedding_norm=_vector(file, f"{name}.enorm.weight", hidden, True),
        state_norm=_vector(file, f"{name}.hnorm.weight", hidden, True),
        joined=_expect(file[f"{name}.eh_proj.weight"], hidden, 2 * hidden),
    )


def _inputs(file: GGUFFile, c: DecoderConfig, vocab: int) -> Inputs:
    size = c.layers * c.each_input
    return Inputs(
        _expect(file["per_layer_token_embd.weight"], vocab, size),
        _expect(file["per_layer_model_proj.weight"], size, c.hidden),
        _vector(file, "per_layer_proj_norm.weight", c.each_input, True),
    )


def _streams(file: GGUFFile, c: DecoderConfig) -> Streams:
    names, others = ("altup_proj.weight", "altup_unembd_proj.weight"), c.streams - 1
    begin, end = (_expect(file[name], others, c.hidden, c.hidden) for name in names)
    return Streams([begin[i] for i in range(others)], [end[i] for i in range(others)])


def _output_norm(c: DecoderConfig) -> str:
    return "token_embd_norm.weight" if c.arch in ("lfm2", "lfm2moe") else "output_norm.weight"


class _LayerReader:
    """Finds the tensors of a layer."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, index: int):
        self.file, self.config, self.index = file, config, index

    def layer(self) -> Layer:
        """The whole layer."""
        c, graph = self.config, self.config.graph
        network: dict[str, Any] = {}
        if c.feeds(self.index):
            network = self._sparse() if c.has_experts(self.index) else self._network()
            if graph.beside and c.has_experts(self.index):
                network |= self._network() | self._beside(network["experts"])
        if c.each_input:
            network["input"] = LayerInput(
                self._matrix("inp_gate", c.each_input, c.hidden), self._matrix("proj", c.hidden, c.each_input),
                self._vector("post_norm.weight", c.hidden, True),
            )  # fmt: skip
        if c.streams:
            network |= self._layer_streams()
        if self._has("layer_output_scale.weight"):
            network["scale"] = float(self._vector("layer_output_scale.weight", 1)[0])
        norm, bias = ("post_attention_norm" if graph.late_norm else "ffn_norm"), graph.layer_norm
        norm_weight = norm if self._has(norm) else f"{norm}.weight"  # Falcon-H1's has no suffix
        return Layer(
            attn_norm=self._norm("attn_norm.weight", graph.pre_norm),
            attn_norm_bias=self._vector("attn_norm.bias", c.hidden) if bias else None,
            o_bias=self._vector("attn_output.bias", c.hidden),
            ffn_norm=self._norm(norm_weight, graph.pre_norm and not graph.parallel and not graph.alone),
            ffn_norm_bias=self._vector(f"{norm}.bias", c.hidden) if bias else None,
            attn_post_norm=self._norm("post_attention_norm.weight", graph.post_norm),
            ffn_post_norm=self._norm("post_ffw_norm.weight", graph.post_norm),
            attn_sub_norm=self._norm("attn_sub_norm.weight", graph.sub_norm, c.heads * c.head_dim),
            ffn_sub_norm=self._norm("ffn_sub_norm.weight", graph.sub_norm, c.inner),
            sinks=self._norm("attn_sinks.weight", graph.sinks, c.heads),
            **(self._mixing() if c.mixes(self.index) else {}),
            **network,
        )

    def _layer_streams(self) -> dict[str, Any]:
        """The parts of AltUp and LAuReL."""
        c, count = self.config, self.config.streams

        def floats(part: str, rows: int, columns: int) -> np.ndarray:
            return self._matrix(f"altup_{part}", rows, columns).dequantize()

        rank = self.file[self._name("laurel_l.weight")].shape[0]
        left, right = self._matrix("laurel_l", rank, c.hidden), self._matrix("laurel_r", c.hidden, rank)
        return {
            "streams": LayerStreams(
                floats("router", count, c.hidden), self._vector("altup_router_norm.weight", c.hidden, True),
                floats("predict_coef", count**2, count), floats("correct_coef", count, count),
                self._vector("altup_correct_scale.weight", c.hidden, True),
            ),
            "laurel": Laurel(left, right, self._vector("laurel_post_norm.weight", c.hidden, True)),
        }  # fmt: skip

    def _mixing(self) -> dict[str, Any]:
        """Attention, or what takes its place, with its output matrix."""
        c = self.config
        found: dict[str, Any] = {}
        if c.recurrent is not None and c.recurrent.layers[self.index]:
            found["recurrent"] = self._recurrent(c.recurrent)
        if self.index in c.attending:
            _, attended = c.widths(c.heads_of(self.index))
            found["o"] = self._matrix("attn_output", c.hidden, attended)
            found |= self._attention() if c.latent is None else self._latent(c.latent)
        return found

    def _recurrent(self, c: RecurrentConfig) -> Recurrent:
        hidden, alone = self.config.hidden, c.kind == CONVOLUTION
        inputs = tuple(self._matrix(part, rows, hidden) for part, rows in c.inputs.items())
        kernel = self._matrix("shortconv.conv" if alone else "ssm_conv1d", c.channels, c.kernel).dequantize()
        out = self._matrix("shortconv.out_proj" if alone else "ssm_out", hidden, c.values)
        layer = Recurrent(inputs, out, np.ascontiguousarray(kernel.T))
        if c.kind == MAMBA1:
            self._read_mamba1(layer, c)
        elif not alone:
            layer.decay, layer.dt_bias = self._folded("ssm_a", c.heads), self._folded("ssm_dt.bias", c.heads)
            if self.config.arch != "falcon-h1" or self._has("ssm_norm.weight"):
                layer.norm = self._folded("ssm_norm.weight", c.values if c.kind == MAMBA else c.value_dim)
        if c.kind == MAMBA:
            layer.skip, layer.convolution_bias = (
                self._folded("ssm_d", c.heads),
                self._folded("ssm_conv1d.bias", c.channels),
            )
        return layer

    def _read_mamba1(self, layer: Recurrent, c: RecurrentConfig) -> None:
        decay = np.zeros((-(-c.values // LANES) * LANES, c.key_dim), np.float32)
        decay[: c.values] = _expect(self.file[self._name("ssm_a")], c.values, c.key_dim).dequantize()
        layer.decay = np.ascontiguousarray(decay.reshape(-1, LANES, c.key_dim).transpose(0, 2, 1))
        layer.convolution_bias = self._vector("ssm_conv1d.bias", c.channels, True)
        layer.dt_bias, layer.skip = self._vector("ssm_dt.bias", c.values, True), self._vector("ssm_d", c.values, True)
        layer.second = (
            self._matrix("ssm_x", c.rank + 2 * c.key_dim, c.values), self._matrix("ssm_dt", c.values, c.rank)
        )  # fmt: skip
        sizes = {"dt": c.rank, "b": c.key_dim, "c": c.key_dim}
        layer.norms = tuple(self._vector(f"ssm_{part}_norm.weight", size, True) for part, size in sizes.items())

    def _folded(self, part: str, size: int) -> np.ndarray:
        """A vector, which llama.cpp has as a matrix in Mamba-2."""
        tensor = self.file[self._name(part)]
        if math.prod(tensor.shape) != size:
            raise BridgeError(f"{tensor.name}: shape {list(tensor.shape)}; must be [{size}]; convert the model again")
        return np.ascontiguousarray(tensor.dequantize().reshape(size))

    def _beside(self, experts: Experts) -> dict[str, Any]:
        """What experts have beside a network; the router's factors become part of it."""
        c = self.config
        experts.router = experts.router * (self._vector("ffn_gate_inp.scale", c.hidden, True) / c.hidden**0.5)
        parts = "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"
        return {"beside": Beside(*(self._vector(f"{part}.weight", c.hidden, True) for part in parts))}

    def _attention(self) -> dict[str, Any]:
        c, own = self.config, self.config.heads_of(self.index)
        q, kv = c.heads * own.dim, own.kv * own.dim
        found: dict[str, Any] = {}
        ends = dict(zip("qkv", ((0, q), (q, q + kv), (q + kv, q + 2 * kv)), strict=True))
        if not c.makes_keys(self.index):
            del ends["k"], ends["v"]
        elif c.graph.values_normed:
            found["v_norm"] = np.ones(own.dim, np.float32)
            if not self._has("attn_v.weight"):
                del ends["v"]
        if self._has("attn_qkv.weight"):  # in one matrix
            whole, bias = self._matrix("attn_qkv", q + 2 * kv, c.hidden), self._vector("attn_qkv.bias", q + 2 * kv)
            for name, (first, stop) in ends.items():
                found[name] = whole.slice_rows(first, stop)
                found[f"{name}_bias"] = None if bias is None else bias[first:stop]
        else:
            for name, (first, stop) in ends.items():
                rows = 2 * q if name == "q" and c.graph.output_gate else stop - first
                found[name] = self._matrix(f"attn_{name}", rows, c.hidden)
                found[f"{name}_bias"] = self._vector(f"attn_{name}.bias", stop - first)
        if c.graph.layer_norm and self._has("attn_q_norm.weight"):
            raise BridgeError(
                f"{self._name('attn_q_norm.weight')}: heads normalized by a norm of their own (Command-R+) cannot run "
                "here; llama.cpp can run it"
            )
        for name in {*ends} - {"v"}:
            first, stop = ends[name]
            size = stop - first if c.arch in _NORMED_TOGETHER else own.dim
            found[f"{name}_norm"] = self._vector(f"attn_{name}_norm.weight", size, c.graph.normed)
            if c.graph.unit_norms and c.rotates(self.index):
                found[f"{name}_norm"] = np.ones(own.dim, np.float32)
        return found

    def _latent(self, latent: Latent) -> dict[str, Any]:
        c, rank = self.config, latent.query_rank
        found = {
            "q": self._matrix("attn_q_b" if rank else "attn_q", c.widths(c.heads_of(self.index))[0], rank or c.hidden),
            "k": self._matrix("attn_kv_a_mqa", c.head_dim, c.hidden),
            "k_norm": self._vector("attn_kv_a_norm.weight", latent.rank, True),
            "latent_k": self._floats("attn_k_b.weight", c.heads, latent.rank, latent.plain),
            "latent_v": self._floats("attn_v_b.weight", c.heads, latent.value, latent.rank),
        }
        if rank:
            found["q_a"] = self._matrix("attn_q_a", rank, c.hidden)
            found["q_a_norm"] = self._vector("attn_q_a_norm.weight", rank, True)
        return found

    def _network(self) -> dict[str, Any]:
        c, inner = self.config, self.config.inner_of(self.index)
        up: QuantTensor | None
        if not c.graph.gated:
            gate, up = self._matrix("ffn_up", inner, c.hidden), None
        elif self._has("ffn_gate.weight"):
            gate, up = self._matrix("ffn_gate", inner, c.hidden), self._matrix("ffn_up", inner, c.hidden)
        else:
            both = self._matrix("ffn_up", 2 * inner, c.hidden)
            gate, up = both.slice_rows(0, inner), both.slice_rows(inner, 2 * inner)
        return {
            "gate": gate,
            "up": up,
            "down": self._matrix("ffn_down", c.hidden, inner),
            "gate_bias": self._vector("ffn_gate.bias" if c.graph.gated else "ffn_up.bias", inner),
            "up_bias": self._vector("ffn_up.bias", inner) if c.graph.gated else None,
            "down_bias": self._vector("ffn_down.bias", c.hidden),
        }

    def _sparse(self) -> dict[str, Any]:
        c = self.config
        down = self._stack("down", c.hidden, c.expert_inner)
        if self._has("ffn_down_exps.scale"):
            down.factors = self._vector("ffn_down_exps.scale", c.experts, True)
        experts = Experts(
            router=self._matrix("ffn_gate_inp", c.experts, c.hidden).dequantize(),
            networks=[(*first, down[e]) for e, first in enumerate(self._first_of_experts())],
            router_bias=self._vector("ffn_gate_inp.bias", c.experts),
            choice_bias=self._vector("exp_probs_b.bias", c.experts),
        )
        if self._has("ffn_gate_exps.bias"):
            sizes = {"gate": c.expert_inner, "up": c.expert_inner, "down": c.hidden}
            gate, up, end = (
                _expect(self.file[self._name(f"ffn_{name}_exps.bias")], c.experts, size).dequantize()
                for name, size in sizes.items()
            )
            experts.biases = gate, up, end
        if c.shared_inner:
            gated = self._matrix("ffn_gate_shexp", c.shared_inner, c.hidden) if c.graph.gated else None
            first = self._matrix("ffn_up_shexp", c.shared_inner, c.hidden)
            last = self._matrix("ffn_down_shexp", c.hidden, c.shared_inner)
            experts.shared = (first, None, last) if gated is None else (gated, first, last)
            experts.shared_gate = self._vector("ffn_gate_inp_shexp.weight", c.hidden, c.arch == "qwen2moe")
        return {"down": down, "experts": experts}

    def _stack(self, name: str, rows: int, columns: int) -> QuantTensor:
        return _expect(self.file[self._name(f"ffn_{name}_exps.weight")], self.config.experts, rows, columns)

    def _first_of_experts(self) -> list[tuple[QuantTensor, QuantTensor | None]]:
        """Gate and up of each expert, as in `Network`."""
        c, inner = self.config, self.config.expert_inner
        if self._has("ffn_gate_up_exps.weight"):  # in one matrix
            wholes = map(self._stack("gate_up", 2 * inner, c.hidden).__getitem__, range(c.experts))
            return [(whole.slice_rows(0, inner), whole.slice_rows(inner, 2 * inner)) for whole in wholes]
        up = self._stack("up", inner, c.hidden)
        if not c.graph.gated:
            return [(up[e], None) for e in range(c.experts)]
        gate = self._stack("gate", inner, c.hidden)
        return [(gate[e], up[e]) for e in range(c.experts)]

    def _floats(self, part: str, *shape: int) -> QuantTensor:
        """A stack of floats as it is; one of blocks as halves."""
        stack = _expect(self.file[self._name(part)], *shape)
        if stack.type in ("F32", "F16", "BF16"):
            return stack
        return QuantTensor(stack.name, "F16", shape, stack.dequantize(np.float16).reshape(-1).view(np.uint8))

    def _name(self, part: str) -> str:
        return f"blk.{self.index}.{part}"

    def _has(self, part: str) -> bool:
        return self._name(part) in self.file

    def _matrix(self, part: str, rows: int, columns: int) -> QuantTensor:
        return _expect(self.file[self._name(f"{part}.weight")], rows, columns)

    def _vector(self, part: str, size: int, needed: bool = False) -> Any:
        return _vector(self.file, self._name(part), size, needed)

    def _norm(self, part: str, there: bool, size: int | None = None) -> Any:
        """A vector that the architecture has, or None where it does not."""
        return self._vector(part, size or self.config.hidden, True) if there else None


def _vector(file: GGUFFile, name: str, size: int, needed: bool = False) -> Any:
    if name not in file and not needed:
        return None
    tensor = file[name]
    if tensor.shape not in ((size,), (1, size)):  # llama.cpp's converter leaves ERNIE's biases so
        raise BridgeError(f"{name}: shape {list(tensor.shape)}; must be [{size}]; convert the model again")
    return np.ascontiguousarray(tensor.dequantize().reshape(size))


def _expect(tensor: QuantTensor, *shape: int) -> QuantTensor:
    if tensor.shape != shape:
        raise BridgeError(
            f"{tensor.name}: shape {list(tensor.shape)}, the metadata says {list(shape)}; convert the model again"
        )
    return tensor
