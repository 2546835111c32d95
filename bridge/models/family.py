"""What a family of models is: its names, the keys of its config.json, and one table of its tensors.

    table=decoder(
        Row("input_layernorm", "hidden"),                   model.layers.0.input_layernorm.weight, in every layer
        Row("self_attn.q_proj", "q hidden", bias=required), its .weight and its .bias
        ...
    )

The tensors of the GGUF stand in the order of the table; their names are those of gguf's map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.models.arguments import Arguments
from bridge.models.model_config import Config
from bridge.models.outline import Part

Rule = Callable[[Arguments], bool]


def required(_args: Arguments) -> bool:
    """There in every model of the family."""
    return True


def optional(_args: Arguments) -> bool:
    """Taken where it is there: llama.cpp's graph can do without it."""
    return False


@dataclass(frozen=True)
class Row:
    """A tensor, and the bias beside it.

    source       the module in the checkpoint; {} is the number of the layer. With * for the number of an expert the
                 experts' matrices are one 3-D tensor of the GGUF
    shape        names of `Arguments.sizes`, "q hidden" or "hidden"; with + for rows of several, "q+kv+kv hidden"
    also         other names of the source. Of experts without *: one 3-D tensor of that very name has them all, and
                 with [0/2] they are the first half of its matrices' rows, with [0::2] every second row; with ^ those
                 are transposed in the file where the shapes do not tell
    bias         None: llama.cpp's graph has none, it must be zero; else whether it must be there
    interleaved  of q and k where GGUF rotates neighbouring rows of a head: see `interleaved_rows`
    columns_of   the modules whose rows its columns are, element by element: see `Fold`
    floats       the float type that it has: never quantized, as no vector is
    when         whether it is in the GGUF
    layers       whether it is in a layer of this number; None: in every one
    optional     whether a checkpoint may do without it
    exact        the source is the tensor's whole name, no ".weight" follows
    name         in the GGUF, after "blk.0.", where gguf's map and ".weight" do not give it
    change       what is done to its values, see `Part`
    parts        what it is made of, where that is not simply the source: (arguments, name in the checkpoint) -> parts
    """

    source: str
    shape: str
    also: tuple[str, ...] = ()
    bias: Rule | None = None
    interleaved: bool = False
    columns_of: tuple[str, ...] = ()
    floats: str | None = None
    when: Rule = required
    layers: Callable[[Arguments, int], bool] | None = None
    optional: bool = False
    exact: bool = False
    name: str | None = None
    change: str | None = None
    parts: Callable[[Arguments, str], tuple[Part, ...]] | None = None


@dataclass(frozen=True)
class Expected:
    """The one value of a key of config.json that llama.cpp's graph can express, with its other names, and why."""

    key: str
    values: tuple[Any, ...]
    why: str


SILU = Expected("hidden_act", ("silu", "swish"), "llama.cpp's graph for this architecture has no other")
ALL_SPARSE = tuple(
    Expected(key, (value,), "some layers have no experts, and llama.cpp's graph for this architecture has them in all")
    for key, value in (("mlp_only_layers", []), ("decoder_sparse_step", 1))
)


@dataclass(frozen=True, eq=False)
class Family:
    """How an architecture of transformers appears in GGUF.

    arch           the GGUF architecture
    architectures  its names in config.json
    model_type     its name there where `architectures` is missing
    keys           the optional keys of its config.json with their defaults, see `read_arguments`
    expects        what llama.cpp's graph takes for granted
    names          its config.json's own names for keys: usual name -> its name
    sizes          more names for shapes: (config, arguments) -> name -> size
    metadata       more keys of the GGUF, without the architecture's name: (config, arguments) -> key -> value, None
                   for one that is not to be there
    layer_norm     whether its norms are layer norms, not RMS norms
    rotary         whether positions are rotations of q and k
    wrapped        whether the language model may be a part of a larger one, see `wrapper`
    predicts       whether layers beyond the last, or mtp.*, may be there that predict further tokens at once
    prefix         what all names of the table begin with and some checkpoints leave out
    """

    arch: str
    architectures: tuple[str, ...]
    model_type: str
    table: tuple[Row, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[Expected, ...] = (SILU,)
    names: Mapping[str, str] = field(default_factory=dict)
    sizes: Callable[[Config, Arguments], Mapping[str, int]] | None = None
    metadata: Callable[[Config, Arguments], Mapping[str, Any]] | None = None
    layer_norm: bool = False
    rotary: bool = True
    wrapped: bool = False
    predicts: bool = False
    prefix: str = ""


EMBEDDINGS = Row("model.embed_tokens", "vocab hidden")
NORM = Row("model.norm", "hidden")
HEAD = Row("lm_head", "vocab hidden", when=lambda args: not args.tied)


def decoder(
    *rows: Row, head: Row = HEAD, first: tuple[Row, ...] = (EMBEDDINGS,), norm: Row = NORM, block: str = "model.layers"
) -> tuple[Row, ...]:
    """A table of embeddings, the rows in every layer (named from there on), the last norm and the head."""

    def named(*names: str) -> tuple[str, ...]:
        return tuple(f"{block}.{{}}.{name}" for name in names)

    layers = (
        replace(row, source=named(row.source)[0], also=named(*row.also), columns_of=named(*row.columns_of))
        for row in rows
    )
    return (*first, *layers, norm, head)


def gated_mlp(module: str, inner: str, bias: Rule | None = None) -> tuple[Row, ...]:
    """down(silu(gate(x)) * up(x)), of the width `inner`."""
    gate, up = f"{module}.gate_proj", f"{module}.up_proj"
    return (
        Row(gate, f"{inner} hidden", bias=bias),
        Row(up, f"{inner} hidden", bias=bias),
        Row(f"{module}.down_proj", f"hidden {inner}", bias=bias, columns_of=(gate, up)),
    )


def leading(*rows: Row) -> tuple[Row, ...]:
    """Rows of the layers before the first that has experts."""
    return tuple(replace(row, layers=lambda args, layer: layer < args.leading) for row in rows)


def sparse(*rows: Row) -> tuple[Row, ...]:
    """Rows of the layers that have experts."""
    return tuple(replace(row, layers=lambda args, layer: layer >= args.leading) for row in rows)


# the router and the experts, as Qwen names them (and transformers 5 Mixtral), as Mixtral does, and as transformers 5
# holds them in memory
EXPERTS = (
    Row("mlp.gate", "experts hidden", ("block_sparse_moe.gate",), floats="F32"),
    Row(
        "mlp.experts.*.gate_proj", "expert hidden",
        ("block_sparse_moe.experts.*.w1", "mlp.experts.gate_up_proj[0/2]"),
    ),
    Row(
        "mlp.experts.*.up_proj", "expert hidden",
        ("block_sparse_moe.experts.*.w3", "mlp.experts.gate_up_proj[1/2]"),
    ),
    Row(
        "mlp.experts.*.down_proj", "hidden expert",
        ("block_sparse_moe.experts.*.w2", "mlp.experts.down_proj"),
        columns_of=("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    ),
)  # fmt: skip
