"""What a GGUF's metadata says of layers with a state: which layers they are, and how their states are shaped.

    CONVOLUTION   LFM2: a short convolution between two gates; the state is what it still looks back at
    DELTA         Qwen3-Next, Qwen3.5: a gated delta net: a convolution, and for each head a matrix that it edits
    KDA           Kimi Linear and K3, Ling 3: the same, with a convolution for each of q, k and v, and a state that
                  decays by channel
    MAMBA         Mamba-2, Granite 4, Nemotron-H, Falcon-H1: the same, but the matrix is only added to
    MAMBA1        Jamba: each value has a state of its own, a vector, and its own steps

The other layers of these models have attention; in Nemotron-H, where each layer is one thing, or a network. All layers
of Mamba-2 have a state, and all of Falcon-H1, which have attention as well. See cpu/ops/recurrent_ops.py for what the
layers compute.
"""

import math
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import CONVOLUTION, DELTA, KDA, MAMBA, MAMBA1, State
from bridge.system.records import record

_INTERVAL = 4  # of the layers with full attention, where a delta net's metadata does not say

Get = Callable[..., Any]  # reads a key of the architecture: its name, kind and default


@record
class RecurrentConfig:
    """The layers with a state; a convolution alone has no heads."""

    kind: str
    layers: tuple[bool, ...]  # whether a layer is one of them
    kernel: int  # tokens that the convolution sees
    channels: int  # values that it makes
    heads: int = 0  # states
    groups: int = 0  # heads of keys and queries, which several states share
    key_dim: int = 0  # rows of a state
    value_dim: int = 0  # its columns
    tiled: bool = False  # state h has the keys of head h modulo `groups`, rather than of head h * groups / heads
    rank: int = 0  # of the vector that Mamba's steps are made of
    joined: bool = False  # a delta net's beta and alpha come of one matrix, group by group
    full_decay: str = ""  # the matrix that makes KDA's decays; "": two of low rank do
    full_gate: str = ""  # that which makes the gates of its output; "": two of low rank do
    least: float = 0.0  # KDA's: the least logarithm of what stays of a state in a step; 0: there is none
    may_lack_norm: bool = False

    @property
    def values(self) -> int:
        """Values of all heads, the columns of the output matrix."""
        return self.heads * self.value_dim or self.channels

    @property
    def inputs(self) -> dict[str, int]:
        """The matrices that a layer's input is multiplied by, and their rows."""
        if self.kind == CONVOLUTION:
            return {"shortconv.in_proj": 3 * self.channels}
        if self.kind == KDA:
            parts = dict.fromkeys(("attn_q", "attn_k", "attn_v"), self.values)
            decay = {self.full_decay: self.values} if self.full_decay else {"ssm_f_a": self.key_dim}
            gate = {self.full_gate: self.values} if self.full_gate else {"ssm_g_a": self.key_dim}
            return {**parts, **decay, "ssm_beta": self.heads, **gate}
        if self.kind == MAMBA1:
            return {"ssm_in": 2 * self.values}
        if self.kind == MAMBA:
            return {"ssm_in": self.values + self.channels + self.heads}
        gates = {"ssm_ba": 2 * self.heads} if self.joined else {"ssm_beta": self.heads, "ssm_alpha": self.heads}
        return {"attn_qkv": self.channels, "attn_gate": self.values, **gates}

    @property
    def second(self) -> tuple[str, ...]:
        """KDA's matrices that read the shorter vectors."""
        matrices = {"ssm_f_b": self.full_decay, "ssm_g_b": self.full_gate}
        return tuple(matrix for matrix, full in matrices.items() if not full)

    def index_of(self, layer: int) -> int:
        """The number of a layer with a state among these."""
        return sum(self.layers[:layer])


def read_recurrent(
    metadata: Mapping[str, Any], arch: str, state: State | None, layers: int, networks: Set[int], get: Get, path: Path
) -> RecurrentConfig | None:
    """The layers with a state; None where `state` is.

    networks  the layers that are a network alone

    Raises BridgeError where a key is missing or sizes do not divide.
    """
    if state is None:
        return None
    kind = state.kind
    stateful = _layers_with_state(metadata, arch, state, layers, path)
    recurrent = tuple(stateful[layer] and layer not in networks for layer in range(layers))
    if kind == CONVOLUTION:
        return RecurrentConfig(kind, recurrent, get("shortconv.l_cache", int), get("embedding_length", int))
    if kind == KDA:
        heads, size = get("attention.head_count", int), get("kda.head_dim", int)
        return RecurrentConfig(
            kind, recurrent, get("ssm.conv_kernel", int), 3 * heads * size, heads, heads, size, size,
            full_decay=state.full_decay, full_gate=state.full_gate, least=_least(metadata, arch, state, path),
        )  # fmt: skip
    inner, key_dim, kernel = (get(f"ssm.{key}", int) for key in ("inner_size", "state_size", "conv_kernel"))
    if kind == MAMBA1:
        rank = get("ssm.time_step_rank", int)
        return RecurrentConfig(kind, recurrent, kernel, inner, 1, 1, key_dim, inner, rank=rank)
    heads, groups = get("ssm.time_step_rank", int), get("ssm.group_count", int)
    if inner % heads or heads % groups or inner % groups:
        raise BridgeError(
            f"{path}: {inner} values in {heads} heads that share {groups} groups cannot run here; convert the model "
            "again"
        )
    return RecurrentConfig(
        kind, recurrent, kernel, inner + 2 * groups * key_dim, heads, groups, key_dim,
        inner // heads, tiled=state.tiled, joined=state.joined, may_lack_norm=state.may_lack_norm,
    )  # fmt: skip


def _least(metadata: Mapping[str, Any], arch: str, state: State, path: Path) -> float:
    """The least logarithm of KDA's decays; 0: there is none."""
    key = f"{arch}.kda.gate_lower_bound"
    least = metadata.get(key)
    if least is None and not state.bounded:
        return 0.0
    if not isinstance(least, float) or not -math.inf < least < 0:
        must = "must be below 0" if state.bounded else "must be below 0, or missing"
        raise BridgeError(f"{path}: {key} is {least!r:.80}; {must}; convert the model again")
    return least


def _layers_with_state(
    metadata: Mapping[str, Any], arch: str, state: State, layers: int, path: Path
) -> tuple[bool, ...]:
    """Those without key-value heads; of a delta net those that the metadata names, or all but every n-th."""
    stateful = metadata.get(f"{arch}.attention.recurrent_layers")
    if state.everywhere:
        stateful = [True] * layers
    elif state.kind != DELTA:
        heads = metadata.get(f"{arch}.attention.head_count_kv")
        stateful = [count == 0 for count in heads] if isinstance(heads, list) else None
        if stateful is None:
            raise BridgeError(
                f"{path}: {arch}.attention.head_count_kv is {heads!r}; must be a list, one for each layer"
            )
    elif stateful is None:
        interval = int(metadata.get(f"{arch}.full_attention_interval", _INTERVAL))
        stateful = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(stateful) < layers:
        raise BridgeError(f"{path}: {arch} names {len(stateful)} of {layers} layers; convert the model again")
    return tuple(bool(one) for one in stateful[:layers])
