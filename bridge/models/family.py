"""A family of models: its names, the keys of its config.json, and one table of its tensors.

    table=decoder(
        Row("input_layernorm", "hidden"),                   model.layers.0.input_layernorm.weight, in every layer
        Row("self_attn.q_proj", "q hidden", bias=required), its .weight and its .bias
        ...
    )

The tensors of the GGUF are in the order of the table; their names come from gguf's name map.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Entry
from bridge.models.config.model_config import NO_OTHER, Config
from bridge.models.outline import Part

Rule = Callable[[Arguments], bool]
LayerRule = Callable[[Arguments, int], bool]


def required(_args: Arguments) -> bool:
    """Present in every model of the family."""
    return True


def optional(_args: Arguments) -> bool:
    """Used if present: llama.cpp's graph does not need it."""
    return False


def configured(args: Arguments) -> bool:
    """Present if config.json's attention_bias is true."""
    return args.attention_bias


@dataclass(frozen=True)
class Row:
    """A tensor, and its bias.

    source       the module in the checkpoint; {} is the number of the layer. If it has * for the number of an expert,
                 the experts' matrices are one 3-D tensor of the GGUF
    shape        names of `Arguments.sizes`, "q hidden" or "hidden"; with + for rows of several, "q+kv+kv hidden"
    also         other names of the source. For experts, a name without * is one 3-D tensor that has them all: with
                 [0/2] they are the first half of its matrices' rows, with [0::2] every second row; ^ means that these
                 are transposed in the file if the shapes do not tell. An expert's gate_proj and up_proj may be halves
                 of its gate_up_proj without being listed
    bias         None: llama.cpp's graph has none, it must be zero; else whether it must be present
    interleaved  for q and k if GGUF rotates neighbouring rows of a head: see `interleaved_rows`
    separate     the modules that have its rows where the source is missing, one for each size of its rows: EXL3 stores
                 fused matrices so
    columns_of   the modules whose rows its columns are, element by element: see `Fold`
    floats       its float type; it is never quantized, like all vectors
    when         whether it is in the GGUF
    layers       whether a layer of this number has it; None: every layer does
    optional     whether the checkpoint may lack it
    runs         the size that counts the tensors that have its rows, one run after another, where its own is missing:
                 source.shard_0 and so on
    unless       it is left out where the checkpoint has one of these tensors, whose whole names follow the layer's
    exact        the source is the tensor's whole name, without ".weight"
    filled       it is in no checkpoint: all its elements are its factor of `Family.factors`
    name         in the GGUF, after "blk.0." in a layer, if it is not the name of gguf's map with ".weight"
    alone        its name has no "blk.0." before it: one layer at most has such a tensor
    change       how its values are changed, see `Part`
    parts        its parts, if not simply the source: (arguments, name in the checkpoint) -> parts
    """

    source: str
    shape: str
    also: tuple[str, ...] = ()
    bias: Rule | None = None
    interleaved: bool = False
    separate: tuple[str, ...] = ()
    columns_of: tuple[str, ...] = ()
    floats: str | None = None
    when: Rule = required
    layers: LayerRule | None = None
    optional: bool = False
    runs: str = ""
    unless: tuple[str, ...] = ()
    exact: bool = False
    filled: bool = False
    name: str | None = None
    alone: bool = False
    change: str | None = None
    parts: Callable[[Arguments, str], tuple[Part, ...]] | None = None


@dataclass(frozen=True)
class Expected:
    """The only value of a config.json key that llama.cpp's graph can express, with its synonyms, and why.

    by_template  whether llama.cpp has other graphs for other values, so that a template serves them
    written      whether a config.json that is made from a GGUF has the key, with the first of the values
    """

    key: str
    values: tuple[Any, ...]
    why: str = NO_OTHER
    by_template: bool = False
    written: bool = False


SILU = Expected("hidden_act", ("silu", "swish"))
RELU2 = Expected("hidden_act", ("relu2",), written=True)
NO_BIASES = Expected("attention_bias", (False,), "llama.cpp's graph for this architecture has no biases")


def require_layer(config: Config, layers: Iterable[bool], kind: str) -> None:
    """BridgeError where no layer is of a kind for which llama.cpp allocates memory whether or not there is one."""
    if not any(layers):
        raise BridgeError(f"{config.path}: no layer {kind}; llama.cpp loads no such model")


_NOT_ALL = "some layers have no experts, and llama.cpp's graph for this architecture has them in all"
ALL_SPARSE = tuple(
    Expected(key, (value,), _NOT_ALL, written=True)
    for key, value in (("mlp_only_layers", []), ("decoder_sparse_step", 1))
)


@dataclass(frozen=True, eq=False)
class Family:
    """How an architecture of transformers appears in GGUF.

    titles         what people call its models, for docs/checkpoints.md
    arch           the GGUF architecture
    named_as       the architecture whose map of names the table uses, if gguf's first supported release lacks its own
    architectures  its names in config.json
    model_type     its name in config.json if `architectures` is missing
    keys           the optional keys of its config.json with their defaults, see `read_arguments`
    expects        values that llama.cpp's graph assumes
    names          its config.json's names of keys: usual name -> its name, or several, the one that is written first
    usual          its config.json with the keys that transformers has for what is published otherwise
    sizes          more names for shapes than those of `metadata`: (config, arguments) -> name -> size
    layer_sizes    sizes that differ between layers: (config, arguments) -> name -> one for each layer
    factors        what rows of linear layers are multiplied by, see `Arguments`, and what fills vectors (`Row.filled`)
    metadata       more keys of the GGUF, and how a config.json is made of them: see `gguf_keys`
    numbers        keys of the GGUF, whole names, that list a number for each layer: key -> the checkpoint's tensor of
                   one number, with {} for the layer, and its shape
    told           numbers of config.json that a GGUF has as vectors alone, all of whose elements they are: key -> the
                   vector's name
    integers       keys of the GGUF, whole names, that list the integers of a tensor: key -> the checkpoint's tensor,
                   with {} for the layer
    with_integers  whether a layer has these tensors, one at most, and
    integers_of    the key of the GGUF, a whole name, that lists it
    notes          what llama.cpp does otherwise, for the report: config -> sentences
    layer_norm     whether its norms are layer norms, not RMS norms
    rotary         whether positions are rotations of q and k
    divided        whether llama.cpp's graph reads what frequencies are divided by, see `Rope`
    wrapped        whether the language model may be a part of a larger one, see `wrapper`
    predicts       what becomes of extra layers, or mtp.*, that predict further tokens at once: "carried", or "dropped"
                   where llama.cpp's converter drops them; None: there are none; see `prediction`
    mtp            modules after mtp. -> what they are called in a layer, where checkpoints have mtp.*; all others are
                   called the same
    templates      chat templates that its models have beside those of the checkpoint: config -> name -> text
    unneeded       beginnings of the names of tensors that the GGUF has no use for
    bare           whether checkpoints are published without the start of the table's names, "transformer." of GPT-2
    chosen         whether it is the one for a config.json, where an architecture's name stands for several families
    in_gguf        whether a GGUF of the architecture is of the family, where several have it; by the keys: `get` of
                   `StoredKeys`
    language_model model_type and architecture in a config.json made from a GGUF, if they are not the family's first
    written_as     names of keys in such a config.json, where several are read: usual name -> its name
    lacks          keys that such a config.json has not, of the usual ones or those of a family it is made of
    tokenizer      tokenizer.ggml.model of a tokenizer.json with byte fallback
    alternative    a part of the names, of several that a row knows (`Row.also`), that its checkpoints have
    of_parts       `alternative` in a model of several parts, with `unstacked`
    unstacked      whether the experts that its float checkpoints have in stacks are modules in quantized ones
    drafter        whether its models guess tokens for another one: they have config.json of their own alone
    needs_target   whether the tokenizer, and some keys, are those of the model that it guesses for
    nested         the key of config.json that may hold the keys of its layers
    starts         beginnings of names in some checkpoints -> what the table has for them
    ignored        beginnings of names of tensors that llama.cpp's graph computes without
    """

    titles: tuple[str, ...]
    arch: str
    architectures: tuple[str, ...]
    model_type: str
    table: tuple[Row, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[Expected, ...] = (SILU,)
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    usual: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    sizes: Callable[[Config, Arguments], Mapping[str, int]] | None = None
    layer_sizes: Callable[[Config, Arguments], Mapping[str, Sequence[int]]] | None = None
    factors: Callable[[Config, Arguments], Mapping[str, Sequence[float]]] | None = None
    metadata: tuple[Entry, ...] = ()
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    integers: Mapping[str, str] = field(default_factory=dict)
    with_integers: LayerRule = lambda _args, _layer: False
    integers_of: str = ""
    notes: Callable[[Config], list[str]] | None = None
    layer_norm: bool = False
    rotary: bool = True
    divided: bool = False
    wrapped: bool = False
    predicts: str | None = None
    mtp: Mapping[str, str] = field(default_factory=dict)
    templates: Callable[[Config], Mapping[str, str]] = lambda _config: {}
    unneeded: tuple[str, ...] = ()
    bare: bool = False
    chosen: Callable[[Config], bool] = lambda _config: True
    in_gguf: Callable[[Callable[..., Any]], bool] = lambda _get: True
    language_model: tuple[str, str] | None = None
    written_as: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    tokenizer: str = "llama"
    alternative: str = ""
    of_parts: str = ""
    unstacked: bool = False
    drafter: bool = False
    needs_target: bool = False
    nested: str = ""
    starts: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    named_as: str = ""

    @property
    def block(self) -> str:
        """What the numbers of layers follow in the table, "model.layers"."""
        return next(row.source.partition(".{}.")[0] for row in self.table if "{}" in row.source)


EMBEDDINGS = Row("model.embed_tokens", "vocab hidden")
NORM = Row("model.norm", "hidden")
HEAD = Row("lm_head", "vocab hidden", when=lambda args: not args.tied)


def decoder(
    *rows: Row, head: Row = HEAD, first: tuple[Row, ...] = (EMBEDDINGS,), norm: Row = NORM, block: str = "model.layers"
) -> tuple[Row, ...]:
    """A table: embeddings, the rows of every layer (their names follow `block`), the last norm and the head."""

    def named(*names: str) -> tuple[str, ...]:
        return tuple(f"{block}.{{}}.{name}" for name in names)

    layers = (
        replace(
            row, source=named(row.source)[0], also=named(*row.also), separate=named(*row.separate),
            columns_of=named(*row.columns_of), unless=named(*row.unless),
        )
        for row in rows
    )  # fmt: skip
    return (*first, *layers, norm, head)


def attention(
    *norms: Row, bias: Rule | None = None, o_bias: Rule | None = None, interleaved: bool = False
) -> tuple[Row, ...]:
    """The matrices of q, k and v, with `bias`, the norms of q and k if there are any, and the matrix of the output."""
    return (
        Row("self_attn.q_proj", "q hidden", bias=bias, interleaved=interleaved),
        Row("self_attn.k_proj", "kv hidden", bias=bias, interleaved=interleaved),
        Row("self_attn.v_proj", "kv hidden", bias=bias),
        *norms,
        Row("self_attn.o_proj", "hidden q", bias=o_bias),
    )


def pre_norm_attention(
    *norms: Row, bias: Rule | None = None, o_bias: Rule | None = None, interleaved: bool = False
) -> tuple[Row, ...]:
    """`attention` between the norm before it and the one before the network."""
    rows = attention(*norms, bias=bias, o_bias=o_bias, interleaved=interleaved)
    return Row("input_layernorm", "hidden"), *rows, Row("post_attention_layernorm", "hidden")


def gated_mlp(module: str, inner: str, bias: Rule | None = None) -> tuple[Row, ...]:
    """down(silu(gate(x)) * up(x)), `inner` wide."""
    gate, up = f"{module}.gate_proj", f"{module}.up_proj"
    return (
        Row(gate, f"{inner} hidden", bias=bias),
        Row(up, f"{inner} hidden", bias=bias),
        Row(f"{module}.down_proj", f"hidden {inner}", bias=bias, columns_of=(gate, up)),
    )


def in_layers(rule: LayerRule, *rows: Row) -> tuple[Row, ...]:
    """Rows of some layers only."""
    return tuple(replace(row, layers=rule) for row in rows)


def other_layers(rule: LayerRule) -> LayerRule:
    """All layers but those of a rule."""
    return lambda args, layer: not rule(args, layer)


def networks(first: tuple[Row, ...], *sparse: Row) -> tuple[Row, ...]:
    """Rows of the layers before the first that has experts, and of those that have them."""
    before = in_layers(lambda args, layer: layer < args.leading, *first)
    return *before, *in_layers(lambda args, layer: layer >= args.leading, *sparse)


# the router and the experts with Qwen's names (in transformers 5 Mixtral's too), with Mixtral's, and as transformers 5
# has them in memory
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


def experts_with_gate_up(module: str) -> tuple[Row, ...]:
    """Experts whose gate and up are one stack in GGUF too; two stacks where each expert has two modules for them."""
    stack = f"{module}.gate_up_proj"
    both = (stack, f"{module}.0.gate_up_proj.weight")
    return (
        Row(f"{module}.*.gate_up_proj", "expert+expert hidden", (stack,), optional=True),
        Row(f"{module}.*.gate_proj", "expert hidden", (f"{stack}[0/2]",), name="ffn_gate_exps.weight", unless=both),
        Row(f"{module}.*.up_proj", "expert hidden", (f"{stack}[1/2]",), name="ffn_up_exps.weight", unless=both),
        Row(f"{module}.*.down_proj", "hidden expert", (f"{module}.down_proj",)),
    )


def stacked(module: str, *rows: Row) -> tuple[Row, ...]:
    """Rows of experts' gate, up and down, or of up and down, with the stacks that transformers 5 has in memory."""
    names = ("gate_up_proj[0/2]", "gate_up_proj[1/2]", "down_proj") if len(rows) == 3 else ("up_proj", "down_proj")
    return tuple(replace(row, also=(*row.also, f"{module}.{name}")) for row, name in zip(rows, names, strict=True))


def float_names(family: Family) -> set[str]:
    """The modules of a layer that are floats in every GGUF, by their names after the layer's number: "mlp.gate"."""
    names: dict[bool, set[str]] = {False: set(), True: set()}
    for row in family.table:
        if "{}" in row.source:
            always = row.floats is not None or len(row.shape.split()) == 1
            names[always] |= {source.rpartition("{}.")[2] for source in (row.source, *row.also)}
    return names[True] - names[False]
