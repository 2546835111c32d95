"""The tensors of a decoder's layer, found in a GGUF and checked against its metadata."""

import math
from typing import Any

import numpy as np

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import CONVOLUTION, KDA, MAMBA, MAMBA1
from bridge.runtime.config.decoder_config import DecoderConfig, Latent
from bridge.runtime.config.recurrent_config import RecurrentConfig
from bridge.runtime.cpu.ops.recurrent_ops import LANES
from bridge.runtime.layers.layers import Beside, Experts, Laurel, Layer, LayerInput, LayerStreams, Recurrent
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile


class LayerReader:
    """Finds the tensors of a layer."""

    def __init__(self, file: GGUFFile, config: DecoderConfig, index: int):
        self.file, self.config, self.index = file, config, index

    def layer(self) -> Layer:
        """The whole layer."""
        c, graph = self.config, self.config.graph
        network: dict[str, Any] = {}
        if c.feeds(self.index):
            sparse = c.has_experts(self.index) and (not graph.by_router or self._has("ffn_gate_inp.weight"))
            network = self._sparse() if sparse else self._network()
            if graph.beside and sparse:
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
        first = self._name("attn_norm")
        if graph.renormed:  # the norm after the layer before, and that after attention
            first, norm = f"blk.{self.index - 1}.layer_output_norm", "attn_output_norm"
        may_lack = graph.embedding_norm and self.index == 0  # what it reads is normalized
        return Layer(
            attn_norm=vector(self.file, f"{first}.weight", c.hidden, not may_lack) if graph.pre_norm else None,
            attn_norm_bias=vector(self.file, f"{first}.bias", c.hidden) if bias else None,
            o_bias=self._vector("attn_output.bias", c.hidden),
            ffn_norm=self._norm(norm, graph.pre_norm and not graph.parallel and not graph.alone),
            ffn_norm_bias=self._vector(f"{norm}.bias", c.hidden) if bias else None,
            attn_post_norm=self._norm("post_attention_norm", graph.post_norm),
            ffn_post_norm=self._norm("post_ffw_norm", graph.post_norm),
            attn_sub_norm=self._norm("attn_sub_norm", graph.sub_norm, c.heads * c.head_dim),
            ffn_sub_norm=self._norm("ffn_sub_norm", graph.sub_norm, c.inner),
            sinks=self._sinks() if graph.sinks else None,
            attn_score=self._norm("attn_res_score.weight", c.aside_every > 0),
            ffn_score=self._norm("ffn_res_score.weight", c.aside_every > 0),
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

    def _sinks(self) -> np.ndarray:
        """float32 [heads]; a score of minus infinity, which takes no share, where layers may have no sinks."""
        heads = self.config.query_heads_of(self.index)
        sinks = self._vector("attn_sinks.weight", heads, not self.config.graph.some_sinks)
        return np.full(heads, -np.inf, np.float32) if sinks is None else sinks

    def _mixing(self) -> dict[str, Any]:
        """Attention, or what takes its place, with its output matrix."""
        c = self.config
        parts: dict[str, Any] = {}
        if c.recurrent is not None and c.recurrent.layers[self.index]:
            parts["recurrent"] = self._recurrent(c.recurrent)
        if self.index in c.attending:
            _, attended = c.widths(self.index)
            parts["o"] = self._matrix("attn_output", c.hidden, attended)
            parts |= self._attention() if c.latent is None else self._latent(c.latent)
        return parts

    def _recurrent(self, c: RecurrentConfig) -> Recurrent:
        hidden, alone = self.config.hidden, c.kind == CONVOLUTION
        if c.kind == KDA:
            return self._kda(c)
        inputs = tuple(self._matrix(part, rows, hidden) for part, rows in c.inputs.items())
        kernel = self._matrix("shortconv.conv" if alone else "ssm_conv1d", c.channels, c.kernel).dequantize()
        out = self._matrix("shortconv.out_proj" if alone else "ssm_out", hidden, c.values)
        layer = Recurrent(inputs, out, np.ascontiguousarray(kernel.T))
        if c.kind == MAMBA1:
            self._read_mamba1(layer, c)
        elif not alone:
            layer.decay, layer.dt_bias = self._folded("ssm_a", c.heads), self._folded("ssm_dt.bias", c.heads)
            if not c.may_lack_norm or self._has("ssm_norm.weight"):
                layer.norm = self._folded("ssm_norm.weight", c.values if c.kind == MAMBA else c.value_dim)
        if c.kind == MAMBA:
            layer.skip = self._folded("ssm_d", c.heads)
            layer.convolution_bias = self._folded("ssm_conv1d.bias", c.channels)
        return layer

    def _kda(self, c: RecurrentConfig) -> Recurrent:
        inputs = tuple(self._matrix(part, rows, self.config.hidden) for part, rows in c.inputs.items())
        kernels = [self._folded(f"ssm_conv1d_{part}.weight", c.values * c.kernel) for part in "qkv"]
        layer = Recurrent(
            inputs, self._matrix("attn_output", self.config.hidden, c.values),
            np.ascontiguousarray(np.concatenate(kernels).reshape(c.channels, c.kernel).T),
        )  # fmt: skip
        layer.decay = -np.abs(self._folded("ssm_a", c.heads))  # Ling 3's files have exp(A_log), others -exp(A_log)
        layer.dt_bias = self._folded("ssm_dt.bias", c.values)
        layer.norm = self._vector("ssm_norm.weight", c.value_dim, True)
        layer.second = tuple(self._matrix(part, c.values, c.key_dim) for part in c.second)
        return layer

    def _read_mamba1(self, layer: Recurrent, c: RecurrentConfig) -> None:
        decay = np.zeros((-(-c.values // LANES) * LANES, c.key_dim), np.float32)
        decay[: c.values] = expect(self.file[self._name("ssm_a")], c.values, c.key_dim).dequantize()
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
        network, before, after = (self._vector(f"{part}.weight", c.hidden, True) for part in parts)
        return {"beside": Beside(network, before, after, np.ones(c.hidden, np.float32))}

    def _attention(self) -> dict[str, Any]:
        c, heads, count = self.config, self.config.heads_of(self.index), self.config.query_heads_of(self.index)
        q, kv = count * heads.dim, heads.kv * heads.dim
        parts: dict[str, Any] = {}
        rows = q + kv + heads.kv * (c.value_dim or heads.dim)
        ends = dict(zip("qkv", ((0, q), (q, q + kv), (q + kv, rows)), strict=True))
        if not c.makes_keys(self.index):
            del ends["k"], ends["v"]
        elif c.graph.values_normed:
            parts["v_norm"] = np.ones(heads.dim, np.float32)
            if not self._has("attn_v.weight"):
                del ends["v"]
        if self._has("attn_qkv.weight"):  # in one matrix
            joined, bias = self._matrix("attn_qkv", rows, c.hidden), self._vector("attn_qkv.bias", rows)
            for name, (first, stop) in ends.items():
                parts[name] = joined.slice_rows(first, stop)
                parts[f"{name}_bias"] = None if bias is None else bias[first:stop]
        else:
            for name, (first, stop) in ends.items():
                gated = name == "q" and c.graph.output_gate
                parts[name] = self._matrix(f"attn_{name}", 2 * q if gated else stop - first, c.hidden)
                parts[f"{name}_bias"] = self._vector(f"attn_{name}.bias", stop - first)
        if c.graph.layer_norm and self._has("attn_q_norm.weight"):
            raise BridgeError(
                f"{self._name('attn_q_norm.weight')}: heads normalized by a norm of their own (Command-R+) cannot run "
                "here; llama.cpp can run it"
            )
        for name in {*ends} - {"v"}:
            first, stop = ends[name]
            size = stop - first if c.graph.normed_together else heads.dim
            parts[f"{name}_norm"] = self._vector(f"attn_{name}_norm.weight", size, c.graph.normed)
            if c.graph.unit_norms and c.rotates(self.index):
                parts[f"{name}_norm"] = np.ones(heads.dim, np.float32)
        return parts | self._head_gate(count, heads.dim)

    def _latent(self, latent: Latent) -> dict[str, Any]:
        c, rank = self.config, latent.query_rank
        parts = {
            "q": self._matrix("attn_q_b" if rank else "attn_q", c.widths(self.index)[0], rank or c.hidden),
            "k": self._matrix("attn_kv_a_mqa", c.head_dim, c.hidden),
            "k_norm": self._vector("attn_kv_a_norm.weight", latent.rank, True),
            "latent_k": self._floats("attn_k_b.weight", c.heads, latent.rank, latent.plain),
            "latent_v": self._floats("attn_v_b.weight", c.heads, latent.value, latent.rank),
        }
        if rank:
            parts["q_a"] = self._matrix("attn_q_a", rank, c.hidden)
            parts["q_a_norm"] = self._vector("attn_q_a_norm.weight", rank, True)
        return parts | self._head_gate(c.heads, latent.value)

    def _head_gate(self, heads: int, elements: int) -> dict[str, Any]:
        """What gates the heads' results: each, or each of its elements."""
        graph = self.config.graph
        if not graph.gate_matrix or (graph.some_gates and not self._has("attn_gate.weight")):
            return {}
        by_head = self.file[self._name("attn_gate.weight")].shape[0] == heads
        return {"head_gate": self._matrix("attn_gate", heads if by_head else heads * elements, self.config.hidden)}

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
        down = self._stack("down", c.expert_outer, c.expert_inner)
        if self._has("ffn_down_exps.scale"):
            down.factors = self._vector("ffn_down_exps.scale", c.experts, True)
        experts = Experts(
            router=self._matrix("ffn_gate_inp", c.experts, c.hidden).dequantize(),
            networks=[(*first, down[e]) for e, first in enumerate(self._first_of_experts())],
            router_bias=self._vector("ffn_gate_inp.bias", c.experts),
            choice_bias=self._vector(f"exp_probs_b{'' if self._has('exp_probs_b') else '.bias'}", c.experts),
            limits=c.limits_of(self.index),
        )
        if self._has("ffn_gate_exps.bias"):
            sizes = {"gate": c.expert_inner, "up": c.expert_inner, "down": c.hidden}
            gate, up, end = (
                expect(self.file[self._name(f"ffn_{name}_exps.bias")], c.experts, size).dequantize()
                for name, size in sizes.items()
            )
            experts.biases = gate, up, end
        if c.shared_inner:
            last = self._matrix("ffn_down_shexp", c.hidden, c.shared_inner)
            experts.shared = (*self._first_of_shared(), last)
            experts.shared_gate = self._vector("ffn_gate_inp_shexp.weight", c.hidden, c.graph.shared_gate)
            if c.graph.shared_mean:
                experts.shared_gate = np.zeros(c.hidden, np.float32)  # one half; the routed ones' weights are halved
        if c.expert_latent:
            name = "ffn_routed" if self._has("ffn_routed_down.weight") else "ffn_latent"
            experts.shorten = self._matrix(f"{name}_down", c.expert_latent, c.hidden)
            experts.lengthen = self._matrix(f"{name}_up", c.hidden, c.expert_latent)
            experts.summed_norm = self._vector("ffn_routed_norm.weight", c.expert_latent)
        return {"down": down, "experts": experts}

    def _first_of_shared(self) -> tuple[QuantTensor, QuantTensor | None]:
        """Gate and up of the expert that all tokens share, as in `Network`."""
        c, inner = self.config, self.config.shared_inner
        if c.graph.gated and not self._has("ffn_gate_shexp.weight"):  # in one matrix
            both = self._matrix("ffn_up_shexp", 2 * inner, c.hidden)
            return both.slice_rows(0, inner), both.slice_rows(inner, 2 * inner)
        up = self._matrix("ffn_up_shexp", inner, c.hidden)
        return (self._matrix("ffn_gate_shexp", inner, c.hidden), up) if c.graph.gated else (up, None)

    def _stack(self, name: str, rows: int, columns: int) -> QuantTensor:
        return expect(self.file[self._name(f"ffn_{name}_exps.weight")], self.config.experts, rows, columns)

    def _first_of_experts(self) -> list[tuple[QuantTensor, QuantTensor | None]]:
        """Gate and up of each expert, as in `Network`."""
        c, inner, outer = self.config, self.config.expert_inner, self.config.expert_outer
        if self._has("ffn_gate_up_exps.weight"):  # in one matrix
            stack = map(self._stack("gate_up", 2 * inner, outer).__getitem__, range(c.experts))
            return [(joined.slice_rows(0, inner), joined.slice_rows(inner, 2 * inner)) for joined in stack]
        up = self._stack("up", inner, outer)
        if not c.graph.gated:
            return [(up[e], None) for e in range(c.experts)]
        gate = self._stack("gate", inner, outer)
        return [(gate[e], up[e]) for e in range(c.experts)]

    def _floats(self, part: str, *shape: int) -> QuantTensor:
        """A stack of floats as it is; one of blocks as halves."""
        stack = expect(self.file[self._name(part)], *shape)
        if stack.type in ("F32", "F16", "BF16"):
            return stack
        return QuantTensor(stack.name, "F16", shape, stack.dequantize(np.float16).reshape(-1).view(np.uint8))

    def _name(self, part: str) -> str:
        return f"blk.{self.index}.{part}"

    def _has(self, part: str) -> bool:
        return self._name(part) in self.file

    def _matrix(self, part: str, rows: int, columns: int) -> QuantTensor:
        return expect(self.file[self._name(f"{part}.weight")], rows, columns)

    def _vector(self, part: str, size: int, needed: bool = False) -> Any:
        return vector(self.file, self._name(part), size, needed)

    def _norm(self, part: str, present: bool, size: int | None = None) -> Any:
        """A vector that the architecture has, or None where it does not. Falcon-H1's and PLaMo's have no suffix."""
        name = part if self._has(part) else f"{part}.weight"
        return self._vector(name, size or self.config.hidden, True) if present else None


def vector(file: GGUFFile, name: str, size: int, needed: bool = False) -> Any:
    """float32 [size] of a file, or None where it has none and none is needed."""
    if name not in file and not needed:
        return None
    tensor = file[name]
    if tensor.shape not in ((size,), (1, size)):  # llama.cpp's converter leaves ERNIE's biases so
        raise BridgeError(f"{name}: shape {list(tensor.shape)}; must be [{size}]; convert the model again")
    return np.ascontiguousarray(tensor.dequantize().reshape(size))


def expect(tensor: QuantTensor, *shape: int) -> QuantTensor:
    """The tensor; BridgeError if it has another shape."""
    if tensor.shape != shape:
        raise BridgeError(
            f"{tensor.name}: shape {list(tensor.shape)}, the metadata says {list(shape)}; convert the model again"
        )
    return tensor
