"""The pre-norm decoder that the Llama, Mistral and Qwen families share, as a list of GGUF tensors.

    token_embd
    blk.N   attn_norm, attn_q, attn_k, attn_v [, attn_q_norm, attn_k_norm], attn_output,
            ffn_norm, ffn_gate, ffn_up, ffn_down
    output_norm [, output where the embeddings are not tied] [, rope_freqs]

Mixtures of experts have other tensors in the place of ffn_gate, ffn_up, ffn_down: see `bridge.models.moe`.

GGUF's llama rotates neighbouring rows of a head (2j, 2j + 1), Hugging Face rows j and j + head_dim/2:
the rows of q and k are reordered for it, biases with them. Qwen's GGUF architectures rotate halves
as Hugging Face does, and keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import gguf
import numpy as np

from bridge.errors import BridgeError
from bridge.models.model_config import Config
from bridge.models.rope import Rope, read_rope
from bridge.models.spec import Fold, TensorSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (*QKV, "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# buffers that old checkpoints carry and every runtime computes anew
_BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|self_attn\.bias)$")


@dataclass(frozen=True)
class DecoderArgs:
    """The shape of a decoder; each family's dataclass says what it adds."""

    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    rope: Rope


@dataclass(frozen=True)
class Family:
    """How an architecture of transformers appears in GGUF.

    arch          the GGUF architecture
    read          config.json -> arguments
    interleaved   whether q and k rows are reordered to neighbouring pairs
    qk_norm       whether heads of q and k are normalized
    biases        layers for which llama.cpp's graph has a bias
    needs_bias    the arguments' layers that must have one
    feed_forward  adds a layer's feed-forward tensors and returns their folds
    head_of_own   whether llama.cpp's graph wants an output tensor even where the embeddings are tied
    add_metadata  keys beyond those of every decoder
    notes         what is lost, for the report
    """

    arch: str
    read: Callable[[Config], DecoderArgs]
    needs_bias: Callable[[DecoderArgs], Collection[str]]
    biases: Collection[str]
    interleaved: bool = False
    qk_norm: bool = False
    feed_forward: Callable[[Builder, int], list[Fold]] = lambda build, layer: build.dense(layer)
    head_of_own: bool = False
    add_metadata: Callable[[DecoderArgs, gguf.GGUFWriter], None] = lambda _args, _writer: None
    notes: Callable[[DecoderArgs], list[str]] = lambda _args: []


def common_args(config: Config, tied: bool = False, norm_eps: float = 1e-6, context: int | None = None) -> DecoderArgs:
    """The arguments that every family reads alike; `tied`, `norm_eps`, `context`: the family's defaults."""
    if config.get("hidden_act") != "swish":  # silu's first name
        config.expect("hidden_act", "silu", "llama.cpp's graph for this architecture has no other")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if config.get("head_dim") is None and hidden % heads:
        raise BridgeError(
            f"{config.path}: hidden_size {hidden} is no multiple of {heads} heads and head_dim is missing"
        )
    if heads % kv_heads:
        raise BridgeError(f"{config.path}: {heads} heads cannot share {kv_heads} key-value heads")
    head_dim = config.integer("head_dim", hidden // heads)
    config.within_sides("num_attention_heads times head_dim", heads * head_dim)
    if head_dim % 2:
        raise BridgeError(f"{config.path}: head_dim {head_dim} is odd, rotary embeddings pair its elements")
    return DecoderArgs(
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        n_layers=config.integer("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.side("vocab_size"),
        context=config.integer("max_position_embeddings", context),
        norm_eps=config.number("rms_norm_eps", norm_eps),
        tied=bool(config.get("tie_word_embeddings", tied)),
        rope=read_rope(config, head_dim),
    )


def add_decoder_metadata(args: DecoderArgs, writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(args.context)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.n_layers)
    writer.add_feed_forward_length(args.intermediate)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.n_kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_layer_norm_rms_eps(args.norm_eps)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_vocab_size(args.vocab)
    args.rope.add_metadata(writer)


def gated_fold(mlp: str) -> Fold:
    """The fold of a gated feed-forward network whose module is `mlp`."""
    return Fold(f"{mlp}.down_proj", (f"{mlp}.gate_proj", f"{mlp}.up_proj"))


def interleaved_rows(heads: int, head_dim: int) -> np.ndarray:
    """int64 [heads * head_dim]: the Hugging Face row of each GGUF row of q or k.

    GGUF row 2j + s of a head is its row s * head_dim/2 + j.
    """
    rows = np.arange(heads * head_dim, dtype=np.int64).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


class Builder:
    """Collects tensor specs, and which names of the checkpoint they use.

    names   every tensor that the checkpoint has
    linears modules whose bias may be there and be zero
    optional biases that are there and need not be
    """

    def __init__(self, family: Family, args: DecoderArgs, names: Collection[str]) -> None:
        self.args, self.family, self.names = args, family, frozenset(names)
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.arch]
        layers = {found[1] for name in self.names if (found := _LAYER.match(name))}
        self.map = gguf.get_tensor_name_map(arch, min(args.n_layers, len(layers)))  # others are found to be missing
        self.tensors: list[TensorSpec] = []
        self.used: set[str] = set()
        self.linears: set[str] = set()
        self.optional: set[str] = set()

    def add(self, source: str, shape: tuple[int, ...], layer: int | None = None, rows: np.ndarray | None = None,
            known_as: str | None = None, quantizable: bool = True) -> None:  # fmt: skip
        """One tensor; `known_as`: the name that GGUF's map knows, where the checkpoint uses another."""
        self.use(source)
        name, kind = self.gguf_name(known_as or source, layer)
        self.tensors.append(TensorSpec(name, source, shape, kind, layer, quantizable and len(shape) == 2, rows))

    def stack(self, known_as: str, experts: list[TensorSpec], layer: int) -> None:
        """A tensor [experts, out, in] of the experts' matrices; their names are made here."""
        name, kind = self.gguf_name(known_as, layer)
        parts = tuple(replace(expert, name=f"{name}[{i}]", kind=kind, layer=layer) for i, expert in enumerate(experts))
        for part in parts:
            self.use(str(part.source))
        self.tensors.append(
            TensorSpec(name, None, (len(parts), *parts[0].shape), kind, layer, quantizable=True, parts=parts)
        )

    def gguf_name(self, known_as: str, layer: int | None) -> tuple[str, str]:
        """The GGUF's name of a tensor, and its kind."""
        name = self.map.get_name(known_as, try_suffixes=(".weight", ".bias"))
        assert name is not None, known_as
        return name, name.removeprefix(f"blk.{layer}.").rsplit(".", 1)[0]

    def use(self, source: str) -> None:
        """Note that a tensor of the checkpoint is needed; BridgeError where it is not there."""
        if source not in self.names:
            alike = next((name for name in sorted(self.names) if name.endswith(source.removeprefix("model."))), None)
            if alike is not None:
                raise BridgeError(
                    f"{source} is missing from the checkpoint, which has {alike}; it is another kind of model than its "
                    "config.json says, or a part of one: take the checkpoint of the language model alone"
                )
            tied = ", or config.json should say tie_word_embeddings: true" if source == "lm_head.weight" else ""
            raise BridgeError(f"{source} is missing from the checkpoint; a shard may not have been downloaded{tied}")
        self.used.add(source)

    def dense(self, layer: int) -> list[Fold]:
        """The plain feed-forward network of a layer."""
        hidden, inner = self.args.hidden, self.args.intermediate
        self.linear(layer, "mlp.gate_proj", (inner, hidden))
        self.linear(layer, "mlp.up_proj", (inner, hidden))
        self.linear(layer, "mlp.down_proj", (hidden, inner))
        return [gated_fold(f"model.layers.{layer}.mlp")]

    def linear(self, layer: int, part: str, shape: tuple[int, int], rows: np.ndarray | None = None) -> None:
        module = f"model.layers.{layer}.{part}"
        self.linears.add(module)
        self.add(f"{module}.weight", shape, layer, rows)
        needed = part in self.family.needs_bias(self.args)
        if needed or (f"{module}.bias" in self.names and part in self.family.biases):
            self.add(f"{module}.bias", shape[:1], layer, rows)
            if not needed:
                self.optional.add(f"{module}.bias")


def build_tensors(
    family: Family, args: DecoderArgs, names: Collection[str]
) -> tuple[list[TensorSpec], list[Fold], list[str], list[str], frozenset[str]]:
    """Tensors, folds, unused names, names that must be all zeros, and biases that may be left out, of a decoder.

    Raises:
        BridgeError: a tensor is missing, or one is there that nothing here knows.
    """
    build = Builder(family, args, names)
    folds: list[Fold] = []
    hidden = args.hidden
    q, kv = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    q_rows = interleaved_rows(args.n_heads, args.head_dim) if family.interleaved else None
    k_rows = interleaved_rows(args.n_kv_heads, args.head_dim) if family.interleaved else None

    embedding = "model.embed_tokens.weight"
    if args.tied and embedding not in build.names and "lm_head.weight" in build.names:
        build.add("lm_head.weight", (args.vocab, hidden), known_as=embedding)  # the one copy that was saved
    else:
        build.add(embedding, (args.vocab, hidden))
    for layer in range(args.n_layers):
        prefix = f"model.layers.{layer}"
        build.add(f"{prefix}.input_layernorm.weight", (hidden,), layer)
        build.linear(layer, "self_attn.q_proj", (q, hidden), q_rows)
        build.linear(layer, "self_attn.k_proj", (kv, hidden), k_rows)
        build.linear(layer, "self_attn.v_proj", (kv, hidden))
        if family.qk_norm:
            build.add(f"{prefix}.self_attn.q_norm.weight", (args.head_dim,), layer)
            build.add(f"{prefix}.self_attn.k_norm.weight", (args.head_dim,), layer)
        build.linear(layer, "self_attn.o_proj", (hidden, q))
        build.add(f"{prefix}.post_attention_layernorm.weight", (hidden,), layer)
        folds += family.feed_forward(build, layer)
    build.add("model.norm.weight", (hidden,))
    if not args.tied:
        build.add("lm_head.weight", (args.vocab, hidden))
    elif family.head_of_own:
        build.add(str(build.tensors[0].source), (args.vocab, hidden), known_as="lm_head.weight")
    if (factors := args.rope.factors) is not None:
        build.tensors.append(
            TensorSpec("rope_freqs.weight", None, factors.shape, "rope_freqs", None, False, data=factors)
        )
    unused, zero_only = _leftovers(build)
    return build.tensors, folds, unused, zero_only, frozenset(build.optional)


def _leftovers(build: Builder) -> tuple[list[str], list[str]]:
    """What is in the checkpoint and not in the GGUF: names to report, and biases to be zero."""
    biases = {f"{module}.bias" for module in (*build.linears, "lm_head")}
    unused, zero_only = [], []
    for name in sorted(build.names - build.used):
        if name in biases:
            zero_only.append(name)
        elif _BUFFERS.match(name):
            continue
        elif name == "lm_head.weight":
            unused.append(name)  # a saved copy of tied embeddings
        else:
            raise BridgeError(
                f"{name}: no tensor of a {build.family.arch} model of {build.args.n_layers} layers has this name; "
                "the checkpoint is of another architecture than its config.json says"
            )
    return unused, zero_only
