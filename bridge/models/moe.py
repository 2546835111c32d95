"""Mixtures of experts: the feed-forward networks of a layer's experts as three tensors of the GGUF.

    ffn_gate_inp                        [experts, hidden]         the router, always F32
    ffn_gate_exps, ffn_up_exps          [experts, inner, hidden]  matrix e is expert e's
    ffn_down_exps                       [experts, hidden, inner]
    ffn_gate_inp_shexp, ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp    Qwen2's shared expert and its own gate

Checkpoints name the experts in three ways:

    block_sparse_moe.experts.E.w1, w3, w2                    Mixtral: gate, up, down
    mlp.experts.E.gate_proj, up_proj, down_proj              Qwen, and Mixtral as transformers 5 names it
    mlp.experts.gate_up_proj [E, 2 * inner, hidden], mlp.experts.down_proj [E, hidden, inner]
                                                             transformers 5 in memory, and where it saves that
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np

from bridge.errors import BridgeError
from bridge.models.decoder import Builder, DecoderArgs, gated_fold
from bridge.models.model_config import Config
from bridge.models.spec import Fold, TensorSpec

_STYLES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))  # gate, up, down
_NAMES = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Experts:
    """How many experts a layer has, how many a token uses, and the widths of their networks."""

    count: int
    used: int
    inner: int
    shared_inner: int = 0  # of the shared expert; 0 where there is none


def read_experts(config: Config, inner_key: str, shared_key: str | None = None) -> Experts:
    """The experts of a config, whose number is num_experts or num_local_experts.

    Raises BridgeError where a count is missing, or more experts are used than there are.
    """
    key = "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
    count, used = config.side(key), config.integer("num_experts_per_tok")
    if used > count:
        raise BridgeError(f"{config.path}: num_experts_per_tok is {used}, of {count} experts")
    return Experts(count, used, config.side(inner_key), config.integer(shared_key) if shared_key else 0)


def expect_sparse_layers(config: Config) -> None:
    """`BridgeError` where some layers have no experts: llama.cpp's Qwen graphs want them in every layer."""
    dense = config.get("mlp_only_layers") or []
    step = config.integer("decoder_sparse_step", 1)
    if dense or step != 1:
        key, value = ("mlp_only_layers", dense) if dense else ("decoder_sparse_step", step)
        raise BridgeError(
            f"{config.path}: {key} is {value}: some layers have no experts, and llama.cpp's graph for this "
            "architecture has them in all; this model cannot be converted"
        )


def add_expert_counts(args: DecoderArgs, writer: gguf.GGUFWriter) -> None:
    """Metadata of a mixture whose experts are as wide as feed_forward_length says."""
    experts = _experts(args)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.used)


def add_expert_metadata(args: DecoderArgs, writer: gguf.GGUFWriter) -> None:
    """Metadata of a mixture whose experts have widths of their own."""
    add_expert_counts(args, writer)
    experts = _experts(args)
    writer.add_expert_feed_forward_length(experts.inner)
    if experts.shared_inner:
        writer.add_expert_shared_feed_forward_length(experts.shared_inner)


def add_experts(build: Builder, layer: int) -> list[Fold]:
    """The tensors of one layer's experts, and their folds: a mixture's `Family.feed_forward`."""
    experts = _experts(build.args)
    prefix = f"model.layers.{layer}"
    block = next(
        (b for b in ("mlp", "block_sparse_moe") if any(n.startswith(f"{prefix}.{b}.") for n in build.names)), "mlp"
    )
    module, hidden = f"{prefix}.{block}", build.args.hidden
    build.add(f"{module}.gate.weight", (experts.count, hidden), layer, quantizable=False)
    folds: list[Fold] = []
    if f"{module}.experts.gate_up_proj" in build.names:
        matrices = _fused(module, experts, hidden)
    else:
        style = next((s for s in _STYLES if f"{module}.experts.0.{s[0]}.weight" in build.names), _STYLES[1])
        matrices, folds = _separate(build, module, style, experts, hidden)
    for name, of_experts in zip(_NAMES, matrices, strict=True):
        build.stack(f"{prefix}.mlp.experts.{name}.weight", of_experts, layer)
    if experts.shared_inner:
        folds.append(_shared(build, layer, experts.shared_inner))
    return folds


def _separate(
    build: Builder, module: str, style: Sequence[str], experts: Experts, hidden: int
) -> tuple[list[list[TensorSpec]], list[Fold]]:
    """Gate, up and down of experts that are modules of their own."""
    shapes = ((experts.inner, hidden), (experts.inner, hidden), (hidden, experts.inner))
    named = [[f"{module}.experts.{i}.{part}" for i in range(experts.count)] for part in style]
    build.linears.update(name for names in named for name in names)
    matrices = [[_matrix(f"{n}.weight", shape) for n in names] for names, shape in zip(named, shapes, strict=True)]
    folds = [Fold(down, (gate, up)) for gate, up, down in zip(*named, strict=True)]
    return matrices, folds


def _fused(module: str, experts: Experts, hidden: int) -> list[list[TensorSpec]]:
    """Gate, up and down from transformers 5's two tensors: gate's rows stand before up's."""
    inner = experts.inner
    both = _matrix(f"{module}.experts.gate_up_proj", (inner, hidden), stored=(2 * inner, hidden))
    down = _matrix(f"{module}.experts.down_proj", (hidden, inner))
    gate = replace(both, row_order=np.arange(inner))
    up = replace(both, row_order=np.arange(inner, 2 * inner))
    return [[replace(part, matrix=i) for i in range(experts.count)] for part in (gate, up, down)]


def _matrix(source: str, shape: tuple[int, int], stored: tuple[int, int] | None = None) -> TensorSpec:
    """One expert's matrix; `Builder.stack` names it."""
    return TensorSpec("", source, shape, "", None, quantizable=True, stored=stored)


def _shared(build: Builder, layer: int, inner: int) -> Fold:
    """Qwen2's shared expert: every token passes through it, weighed by a gate of one row."""
    hidden, module = build.args.hidden, f"model.layers.{layer}.mlp.shared_expert"
    build.add(f"{module}_gate.weight", (hidden,), layer)
    for name, shape in zip(_NAMES, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        build.linear(layer, f"mlp.shared_expert.{name}", shape)
    return gated_fold(module)


def _experts(args: DecoderArgs) -> Experts:
    """The experts of a mixture's arguments."""
    experts = getattr(args, "experts", None)
    assert isinstance(experts, Experts)
    return experts
