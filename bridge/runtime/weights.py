"""The tensors that a decoder runs on, found in a GGUF and checked against its metadata. Matrices stay in the file."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.runtime.decoder_config import DecoderConfig
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile
from bridge.runtime.recurrent_config import CONVOLUTION, MAMBA, RecurrentConfig


@dataclass
class Experts:
    """A layer's experts: the router float32 [experts, hidden], and gate, up and down of each.

    shared       gate, up and down of the expert that all tokens pass through, and
    shared_gate  float32 [hidden], whose sigmoid weighs it; None where there is none
    """

    router: np.ndarray
    networks: list[tuple[QuantTensor, QuantTensor, QuantTensor]]
    shared: tuple[QuantTensor, QuantTensor, QuantTensor] | None = None
    shared_gate: np.ndarray | None = None


@dataclass
class Recurrent:
    """What a layer with a state has in place of q, k and v; vectors as float32, None where its kind has none.

    inputs       as `RecurrentConfig.inputs` names them
    convolution  [kernel, channels], the newest token's last
    decay        negative: -exp(A_log)
    skip         Mamba-2's D
    """

    inputs: tuple[QuantTensor, ...]
    convolution: np.ndarray
    convolution_bias: np.ndarray | None = None
    decay: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    skip: np.ndarray | None = None
    norm: np.ndarray | None = None


@dataclass
class Layer:
    """One layer's matrices, and its vectors as float32 (None where the model has none).

    With experts, gate, up and down are the stacks [experts, out, in] of all of theirs. With a state, `recurrent` takes
    the place of q, k and v, which are None.
    """

    attn_norm: np.ndarray | None
    q: Any
    k: Any
    v: Any
    o: QuantTensor
    ffn_norm: np.ndarray | None
    gate: QuantTensor
    up: QuantTensor
    down: QuantTensor
    q_bias: np.ndarray | None
    k_bias: np.ndarray | None
    v_bias: np.ndarray | None
    o_bias: np.ndarray | None
    gate_bias: np.ndarray | None
    up_bias: np.ndarray | None
    down_bias: np.ndarray | None
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    attn_post_norm: np.ndarray | None = None
    ffn_post_norm: np.ndarray | None = None
    attn_sub_norm: np.ndarray | None = None
    ffn_sub_norm: np.ndarray | None = None
    experts: Experts | None = None
    recurrent: Recurrent | None = None

    @property
    def matrices(self) -> tuple[QuantTensor, ...]:
        """All of them, with those of each expert."""
        inputs = (self.q, self.k, self.v) if self.recurrent is None else self.recurrent.inputs
        attention = *inputs, self.o
        if self.experts is None:
            return *attention, self.gate, self.up, self.down
        each = (matrix for network in self.experts.networks for matrix in network)
        return *attention, *each, *(self.experts.shared or ())


@dataclass
class Weights:
    """A whole decoder; `output` is `embedding` where the two are tied."""

    embedding: QuantTensor
    layers: list[Layer]
    output_norm: np.ndarray
    output: QuantTensor
    rope_factors: np.ndarray | None
    long_factors: np.ndarray | None = None  # LongRoPE's, for contexts beyond the original one


def read_weights(file: GGUFFile, config: DecoderConfig, whole: bool = False) -> Weights:
    """Find every tensor; `whole`: whether the caller runs all that the CPU does, not plain decoders alone.

    Raises BridgeError where a tensor is missing or of another shape than the metadata says, or for what is not plain.
    """
    if not whole and (config.experts or not config.plain):
        kind = "a mixture of experts" if config.experts else f"{config.arch}'s graph"
        raise BridgeError(f"{file.path}: {kind} runs on the CPU alone (device cpu)")
    if not whole and any(tensor.change is not None for tensor in file.values()):
        raise BridgeError(f"{file.path}: a model with an adapter (LoRA) runs on the CPU alone (device cpu)")
    embedding = file["token_embd.weight"]
    vocab = embedding.shape[0]
    _expect(embedding, vocab, config.hidden)
    output = file.tensors.get("output.weight", embedding)
    _expect(output, vocab, config.hidden)
    factors = {
        name: _vector(file, f"rope_{name}.weight", config.rotated // 2)
        for name in ("freqs", "factors_short", "factors_long")
    }
    return Weights(
        embedding=embedding,
        layers=[_layer(file, config, i) for i in range(config.layers)],
        output_norm=_vector(file, _output_norm(config), config.hidden, True) / np.float32(config.logit_scale),
        output=output,
        rope_factors=factors["freqs"] if factors["factors_short"] is None else factors["factors_short"],
        long_factors=factors["factors_long"],
    )


def _output_norm(c: DecoderConfig) -> str:
    return "token_embd_norm.weight" if c.arch in ("lfm2", "lfm2moe") else "output_norm.weight"


def _layer(file: GGUFFile, c: DecoderConfig, i: int) -> Layer:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def matrix(part: str, rows: int, columns: int) -> QuantTensor:
        return _expect(file[f"blk.{i}.{part}.weight"], rows, columns)

    def vector(part: str, size: int, needed: bool = False) -> Any:
        return _vector(file, f"blk.{i}.{part}", size, needed)

    def stack(part: str, rows: int, columns: int) -> QuantTensor:
        if not c.experts:
            return matrix(part, rows, columns)
        return _expect(file[f"blk.{i}.{part}_exps.weight"], c.experts, rows, columns)

    def norm(part: str, there: bool, size: int = c.hidden) -> Any:
        return vector(part, size, True) if there else None

    parts: dict[str, Any] = dict.fromkeys("qkv")
    biases: dict[str, Any] = dict.fromkeys("qkv")
    recurrent = _recurrent(file, c.recurrent, c.hidden, i) if c.recurrent and c.recurrent.layers[i] else None
    ends = dict(zip("qkv", ((0, q), (q, q + kv), (q + kv, q + 2 * kv)), strict=True))
    if recurrent is not None:
        pass
    elif f"blk.{i}.attn_qkv.weight" in file:  # in one matrix
        whole, bias = matrix("attn_qkv", q + 2 * kv, c.hidden), vector("attn_qkv.bias", q + 2 * kv)
        for name, (first, stop) in ends.items():
            parts[name] = whole.slice_rows(first, stop)
            biases[name] = None if bias is None else bias[first:stop]
    else:
        for name, (first, stop) in ends.items():
            gate = stop - first if name == "q" and c.graph.gated else 0
            parts[name] = matrix(f"attn_{name}", stop - first + gate, c.hidden)
            biases[name] = vector(f"attn_{name}.bias", stop - first)
    if not c.experts and f"blk.{i}.ffn_gate.weight" not in file:
        both = matrix("ffn_up", 2 * c.inner, c.hidden)
        gate, up = both.slice_rows(0, c.inner), both.slice_rows(c.inner, 2 * c.inner)
    else:
        gate, up = stack("ffn_gate", c.inner, c.hidden), stack("ffn_up", c.inner, c.hidden)
    # of all heads at once in OLMo 2
    q_norm, k_norm = (q, kv) if c.arch == "olmo2" else (c.head_dim, c.head_dim)
    normed = c.graph.normed and recurrent is None
    layer = Layer(
        attn_norm=norm("attn_norm.weight", c.graph.pre_norm),
        q=parts["q"],
        k=parts["k"],
        v=parts["v"],
        o=matrix("attn_output", c.hidden, q) if recurrent is None else _recurrent_output(file, c, i),
        ffn_norm=norm("post_attention_norm.weight" if c.graph.gated else "ffn_norm.weight", c.graph.pre_norm),
        gate=gate,
        up=up,
        down=stack("ffn_down", c.hidden, c.inner),
        q_bias=biases["q"],
        k_bias=biases["k"],
        v_bias=biases["v"],
        o_bias=vector("attn_output.bias", c.hidden),
        gate_bias=vector("ffn_gate.bias", c.inner),
        up_bias=vector("ffn_up.bias", c.inner),
        down_bias=vector("ffn_down.bias", c.hidden),
        q_norm=vector("attn_q_norm.weight", q_norm, normed),
        k_norm=vector("attn_k_norm.weight", k_norm, normed),
        attn_post_norm=norm("post_attention_norm.weight", c.graph.post_norm),
        ffn_post_norm=norm("post_ffw_norm.weight", c.graph.post_norm),
        attn_sub_norm=norm("attn_sub_norm.weight", c.graph.sub_norm, q),
        ffn_sub_norm=norm("ffn_sub_norm.weight", c.graph.sub_norm, c.inner),
        recurrent=recurrent,
    )
    if c.experts:
        router = matrix("ffn_gate_inp", c.experts, c.hidden).dequantize()
        networks = [(layer.gate[e], layer.up[e], layer.down[e]) for e in range(c.experts)]
        layer.experts = Experts(router, networks)
        if c.shared_inner:
            layer.experts.shared = (
                matrix("ffn_gate_shexp", c.shared_inner, c.hidden),
                matrix("ffn_up_shexp", c.shared_inner, c.hidden),
                matrix("ffn_down_shexp", c.hidden, c.shared_inner),
            )
            layer.experts.shared_gate = vector("ffn_gate_inp_shexp.weight", c.hidden, True)
    return layer


def _recurrent(file: GGUFFile, c: RecurrentConfig, hidden: int, i: int) -> Recurrent:
    def vector(part: str, size: int) -> np.ndarray:
        """Mamba-2's have one more dimension in llama.cpp."""
        name = f"blk.{i}.{part}"
        tensor = file[name]
        if tensor.shape not in ((size,), (size, 1), (c.groups, size // max(1, c.groups))):
            raise BridgeError(f"{name}: shape {list(tensor.shape)}; must be [{size}]; convert the model again")
        return np.ascontiguousarray(tensor.dequantize().reshape(size))

    inputs = tuple(_expect(file[f"blk.{i}.{part}.weight"], rows, hidden) for part, rows in c.inputs.items())
    name = "shortconv.conv" if c.kind == CONVOLUTION else "ssm_conv1d"
    kernel = _expect(file[f"blk.{i}.{name}.weight"], c.channels, c.kernel).dequantize()
    layer = Recurrent(inputs, np.ascontiguousarray(kernel.T))
    if c.kind == CONVOLUTION:
        return layer
    layer.decay, layer.dt_bias = vector("ssm_a", c.heads), vector("ssm_dt.bias", c.heads)
    layer.norm = vector("ssm_norm.weight", c.values if c.kind == MAMBA else c.value_dim)
    if c.kind == MAMBA:
        layer.skip = vector("ssm_d", c.heads)
        layer.convolution_bias = vector("ssm_conv1d.bias", c.channels)
    return layer


def _recurrent_output(file: GGUFFile, c: DecoderConfig, i: int) -> QuantTensor:
    assert c.recurrent is not None
    name = "shortconv.out_proj" if c.recurrent.kind == CONVOLUTION else "ssm_out"
    return _expect(file[f"blk.{i}.{name}.weight"], c.hidden, c.recurrent.values)


def _vector(file: GGUFFile, name: str, size: int, needed: bool = False) -> Any:
    if name not in file and not needed:
        return None
    tensor = file[name]
    if tensor.shape != (size,):
        raise BridgeError(f"{name}: shape {list(tensor.shape)}; must be [{size}]; convert the model again")
    return np.ascontiguousarray(tensor.dequantize())


def _expect(tensor: QuantTensor, *shape: int) -> QuantTensor:
    if tensor.shape != shape:
        raise BridgeError(
            f"{tensor.name}: shape {list(tensor.shape)}, the metadata says {list(shape)}; convert the model again"
        )
    return tensor
