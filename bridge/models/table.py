"""A family's table of tensors, filled in for one checkpoint."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby, takewhile

import gguf
import numpy as np

from bridge.checkpoint.tensor_names import layer_of
from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.rope import interleaved_rows
from bridge.models.family import HEAD, Family, Row
from bridge.models.outline import Fold, Outline, OutlineTensor, Part, Stack

# buffers in old checkpoints that every runtime computes itself, adapters inside of a checkpoint, and what nomic's
# experts add to their sum
BUFFERS = re.compile(
    r"(.*\.)?(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|self_attn\.bias"
    r"|parametrizations\.weight\.\d+\.lora_[AB]|mlp\.experts\.bias)$"
)


def fill_table(family: Family, args: Arguments, names: Mapping[str, Sequence[int]]) -> Outline:
    """The tensors of a model, and the checkpoint's tensors that are not among them; no metadata yet.

    Raises:
        BridgeError: a tensor is missing, or is unknown to the family.
    """
    filled = _Filled(family, args, names)
    filled.add_all()
    outline = filled.outline()
    outline.unused, outline.zero_only = filled.leftovers()
    return outline


def invert_table(
    family: Family, args: Arguments, stored: Mapping[str, Sequence[int]], quantized: bool = False
) -> Outline:
    """The tensors of a GGUF, and what they are in a checkpoint: `fill_table` with all names that one may have.

    stored     the GGUF's tensors with their shapes, which tell which of a table's alternatives they are
    quantized  whether the checkpoint will be, in which some families' experts have other names

    Raises BridgeError where these leave a tensor of the checkpoint without values.
    """
    needed = _all_names(family, args, "" if quantized and family.unstacked else family.alternative)
    filled = _Filled(family, args, dict.fromkeys(needed, ()), stored)
    filled.add_all()
    if lost := sorted(name for name in needed.keys() - filled.used if needed[name]):
        raise BridgeError(f"{lost[0]}: no tensor of the GGUF has its values, but config.json requires it")
    return filled.outline()


def _all_names(family: Family, args: Arguments, alternative: str) -> dict[str, bool]:
    """Every tensor that a checkpoint of the family may have, and whether it must have it.

    Names are those with `alternative` in them, or else the table's first.
    """
    names = {name.format(layer): False for name, _ in family.numbers.values() for layer in range(args.layers)}
    names |= dict.fromkeys(_integers(family, args).values(), False)
    for row in family.table:
        if row.filled or not row.when(args):
            continue
        for layer in range(args.layers + args.predicting if "{}" in row.source else 1):
            if row.layers is None or row.layers(args, layer):
                also = (name for name in row.also if alternative and alternative in name)
                source = next(also, row.source).format(layer)
                stacked = "*" in row.source and "*" not in source
                if row.runs:
                    count = len(_run_heights(args.sizes[row.shape.split()[0]], args.sizes[row.runs]))
                    names |= dict.fromkeys((_run(source, number) for number in range(count)), True)
                    continue
                for expert in range(args.sizes["experts"]) if "*" in source else [0]:
                    name = source.replace("*", str(expert))
                    stack = source.partition("[")[0].rstrip("^")
                    tensor = stack if stacked else name if row.exact else f"{name}.weight"
                    names[tensor] = names.get(tensor, False) or not row.optional
                    if row.bias is not None:
                        names.setdefault(f"{name}.bias", False)
    return names


def _sources(row: Row) -> tuple[str, ...]:
    """All names of a row's source: an expert's gate_proj or up_proj may be a half of one matrix of both, gate first."""
    expert, _, name = row.source.rpartition(".")
    half = {"gate_proj": "[0/2]", "up_proj": "[1/2]"}.get(name) if "*" in expert else None
    return (row.source, *row.also, *([f"{expert}.gate_up_proj{half}"] if half else []))


def _integers(family: Family, args: Arguments) -> dict[str, str]:
    """The keys of the GGUF that list a tensor's integers, and the tensors."""
    layers = [layer for layer in range(args.layers) if family.with_integers(args, layer)]
    return {key: name.format(layer) for key, name in family.integers.items() for layer in layers}


def _run(source: str, number: int) -> str:
    """The tensor that has a run of a matrix's rows."""
    return f"{source}.shard_{number}.weight"


def _run_heights(rows: int, count: int) -> list[int]:
    """The rows of each run, where a matrix of so many is divided into `count` runs or a few less, as torch does."""
    height = -(-rows // count)
    return [min(height, rows - first) for first in range(0, rows, height)]


class _Filled:
    """The rows filled in so far, and the names in the checkpoint that they use.

    names     the checkpoint's tensors and their shapes, () where these are not known
    stored    the GGUF's tensors, where it is there and the names are of a checkpoint to be made
    modules   linear layers in the checkpoint, several for experts, by the table's name
    optional  biases that the checkpoint has and need not have
    """

    def __init__(
        self,
        family: Family,
        args: Arguments,
        names: Mapping[str, Sequence[int]],
        stored: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.shapes, self.stored = names, stored
        self.family, self.args, self.sizes, self.names = family, args, args.sizes, frozenset(names)
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.named_as or family.arch]
        layers = set(map(layer_of, self.names)) - {None}
        count = min(args.layers + args.predicting, len(layers))  # others are found to be missing
        self.map = gguf.get_tensor_name_map(arch, count)
        self.tensors: list[OutlineTensor] = []
        self.folds: list[Fold] = []
        self.modules: dict[str, list[str]] = {}
        self.optional: set[str] = set()
        self.used: set[str] = set()
        # tied embeddings are one tensor, which may have been saved under either name
        embeddings = family.table[0].source
        tied = (embeddings, HEAD.source) if args.tied else ()
        saved = [name for name in tied if f"{name}.weight" in self.names] or [embeddings]
        self.saved_as = {name: saved[0] for name in tied if name not in saved}

    def add_all(self) -> None:
        """Add every row of the table; BridgeError as for `add`."""
        for repeated, group in groupby(self.family.table, lambda row: "{}" in row.source):
            rows = [row for row in group if row.when(self.args)]
            for layer in range(self.args.layers + self.args.predicting if repeated else 1):
                for row in rows:
                    if row.layers is None or row.layers(self.args, layer):
                        self.add(row, layer)

    def outline(self) -> Outline:
        """The finished outline: rows of the table, tensors derived from the config, and numbers of the GGUF."""
        factors_of_rope = [
            OutlineTensor(f"{name}.weight", factors.shape, data=factors, origin="config", fixed_type="F32")
            for name, factors in self.args.rope.factors.items()
        ]
        outline = Outline({}, [*self.tensors, *factors_of_rope], self.folds, optional=frozenset(self.optional))
        outline.numbers = self.numbers()
        outline.integers = _integers(self.family, self.args)
        for name in outline.integers.values():
            self._use(name)
        return outline

    def add(self, row: Row, layer: int) -> None:
        """Add the tensor of a row in one layer, and its bias; BridgeError if it is not in the checkpoint."""
        source, shape = row.source.format(layer), self._shape(row, layer)
        if row.filled:
            (factor,) = self.args.factors[row.source.rpartition("{}.")[2]]
            data = np.full(shape, factor, np.float32)
            name = self._name(source, "weight")
            self.tensors.append(OutlineTensor(name, shape, data=data, origin="config", fixed_type="F32"))
            return
        block = f"blk.{layer}." if "{}" in row.source and not row.alone else ""
        name = f"{block}{row.name}" if row.name else ""
        parts = self._runs(row, source, shape, name) if row.runs else self._parts(row, layer, shape)
        if row.runs:
            shape = (sum(part.shape[0] for part in parts), *shape[1:])
        if self.stored is None and row.optional and parts[0].source not in self.names:
            return
        if self.stored is None and any(name.format(layer) in self.names for name in row.unless):
            return
        if self.stored is None:  # before the name is looked up: gguf's map ends with the checkpoint's last layer
            self._use(parts[0].source)
        matrix = len(shape) > 1 and not row.floats
        name = name or self._name(source, "weight")
        if self.stored is not None and (row.optional or row.unless) and name not in self.stored:
            return
        several = "*" in source or (len(shape) == 2 and len(_sources(row)) > 1 and row.parts is None and not row.exact)
        stacks = tuple(Stack.of(each.format(layer), shape) for each in _sources(row)) if several else ()
        stored_shape = (len(parts), *shape) if "*" in source else shape
        self._plan(name, stored_shape, parts, None if matrix else row.floats, stacks)
        if matrix and parts[0].matrix is None:
            modules = self.modules[source] = [part.module for part in parts]
            if row.columns_of:
                others = [self.modules[other.format(layer)] for other in row.columns_of]
                producers = zip(*others, strict=True) if "*" in source else [tuple(chain(*others))]
                self.folds += [Fold(*pair) for pair in zip(modules, producers, strict=True)]
        bias, needed = f"{parts[0].module}.bias", row.bias is not None and row.bias(self.args)
        if needed or (row.bias is not None and bias in self.names):
            bias_name = f"{name.removesuffix('weight')}bias" if row.name else self._name(source, "bias")
            self._plan(bias_name, shape[:1], (Part(bias, shape[:1], parts[0].rows),), "F32")
            if not needed:
                self.optional.add(bias)

    def _shape(self, row: Row, layer: int) -> tuple[int, ...]:
        def size(name: str) -> int:
            return self.args.by_layer[name][layer] if name in self.args.by_layer else self.sizes[name]

        return tuple(sum(map(size, side.split("+"))) for side in row.shape.split())

    def _name(self, source: str, suffix: str) -> str:
        try:
            return f"{self.map[source.replace('.*', '')]}.{suffix}"
        except KeyError:
            raise BridgeError(
                f"{source}: gguf's names of {self.family.arch} have no place for it; a newer gguf package may"
            ) from None

    def _parts(self, row: Row, layer: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """The parts of a tensor, from the first of its sources that the checkpoint has."""
        sources = [source.format(layer) for source in _sources(row)]
        if "*" in row.source:
            for source in sources:
                parts = self._experts(source, layer, shape)
                if any(part.source in self.names for part in parts):
                    return parts
            return self._experts(sources[0], layer, shape)
        sources = [self.saved_as.get(source, source) + ("" if row.exact else ".weight") for source in sources]
        source = next((name for name in sources if name in self.names), sources[0])
        if row.parts is not None:
            return row.parts(self.args, source)
        separate = [f"{name.format(layer)}.weight" for name in row.separate]
        if source not in self.names and any(name in self.names for name in separate):
            heights = (self.sizes[name] for name in row.shape.split()[0].split("+"))
            return tuple(Part(name, (rows, *shape[1:])) for name, rows in zip(separate, heights, strict=True))
        head_dim = self.args.head_dim
        rows = interleaved_rows(shape[0] // head_dim, head_dim) if row.interleaved else None
        return (Part(source, shape, rows, change=row.change, factor=self._factor(row)),)

    def _runs(self, row: Row, source: str, shape: tuple[int, ...], name: str) -> tuple[Part, ...]:
        """The runs of a matrix's rows, or the whole of it; BridgeError where one is missing."""
        if f"{source}.weight" in self.names:
            rows, *columns = self.shapes[f"{source}.weight"] or shape
            return (Part(f"{source}.weight", (rows, *columns)),)
        prefix, suffix = _run(source, 0).split("0.weight")[0], ".weight"
        numbers = {n.removeprefix(prefix).removesuffix(suffix) for n in self.names if n.startswith(prefix)}
        runs = [_run(source, number) for number in range(len(numbers))]
        rows, count = shape[0] if self.stored is None else self.stored.get(name, shape)[0], self.sizes[row.runs]
        if not all(self.shapes.get(run) for run in runs):  # names alone
            heights = _run_heights(rows, count)
            return tuple(Part(_run(source, i), (height, *shape[1:])) for i, height in enumerate(heights))
        heights = [self.shapes[run][0] for run in runs]
        if len(runs) not in (count, len(_run_heights(sum(heights), count))):
            raise BridgeError(
                f"{prefix}*: the checkpoint has {len(runs)} of them, config.json says {count}; download what is missing"
            )
        return tuple(Part(run, (height, *shape[1:])) for run, height in zip(runs, heights, strict=True))

    def _factor(self, row: Row) -> np.ndarray | None:
        """What the rows of a row's source are multiplied by; None where nothing is."""
        factors = self.args.factors.get(row.source.rpartition("{}.")[2])
        if factors is None or all(factor == 1 for factor in factors):
            return None
        heights = [self.sizes[name] for name in row.shape.split()[0].split("+")]
        return np.repeat(np.array(factors, np.float32), heights)

    def _experts(self, source: str, layer: int, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """One matrix of every expert, for each way in which a `Row` can name them."""
        count = self.sizes["experts"]
        stack = Stack.of(source, shape)
        stored = None if stack.rows is None else stack.matrix
        if "*" in source:
            names = (f"{stack.name.replace('*', str(expert))}.weight" for expert in range(count))
            return tuple(Part(name, shape, stack.rows, stored=stored) for name in names)
        # a square matrix does not tell, but the others of its experts may
        told = (s.transposed_in(self.shapes) for s in (stack, *self._stacks(layer)))
        change = "transposed" if next((t for t in told if t is not None), stack.transposed) else None
        return tuple(
            Part(stack.name, shape, stack.rows, matrix=expert, stored=stored, change=change) for expert in range(count)
        )

    def _stacks(self, layer: int) -> Iterator[Stack]:
        """The stacked experts that a layer of the family may have."""
        for row in self.family.table:
            for source in row.also if "*" in row.source else ():
                if "*" not in source:
                    yield Stack.of(source.format(layer), self._shape(row, layer))

    def _plan(
        self, name: str, shape: tuple[int, ...], parts: tuple[Part, ...], type: str | None,
        stacks: tuple[Stack, ...] = (),
    ) -> None:  # fmt: skip
        for part in parts:
            self._use(part.source)
            if part.times is not None:
                self._use(part.times)
        fixed = type or ("F32" if len(shape) == 1 else None)
        self.tensors.append(OutlineTensor(name, shape, parts, fixed_type=fixed, stacks=stacks))

    def _use(self, source: str) -> None:
        """Note that a tensor of the checkpoint is used; BridgeError if it is missing."""
        if source not in self.names and self.stored is None:
            raise BridgeError(f"{source} is missing from the checkpoint; {self._why_missing(source)}")
        self.used.add(source)

    def _why_missing(self, source: str) -> str:
        """What the checkpoint has in the place of a tensor: other layers, or the name that is most alike."""
        if source == f"{HEAD.source}.weight":
            return "if the embeddings are the head too, config.json must say tie_word_embeddings: true"
        layers = sorted(layer for layer in set(map(layer_of, self.names)) if layer is not None)
        layer = layer_of(source)
        if layer is not None and layers and layer not in layers:
            has = f"config.json says {self.args.layers} layers, the checkpoint has tensors of {len(layers)}"
            if layers == list(range(len(layers))):
                return f"{has}; if these are all, config.json must say {len(layers)}"
            return f"{has}, numbered {layers[0]} to {layers[-1]}"
        unknown = {name for name in self.names - self.used if not BUFFERS.match(name)}
        unknown -= _all_names(self.family, self.args, "").keys()
        model = f"{self.family.arch} model"
        if not unknown:
            return f"a {model} of this config.json has it, and no name in the checkpoint is unknown in such a model"
        return f"the most alike of the names there that no {model} has ({len(unknown)}) is {_alike(source, unknown)}"

    def numbers(self) -> dict[str, list[str]]:
        """The names of the tensors of one number that a key lists."""
        layers, numbers = range(self.args.layers), self.family.numbers
        names = {key: [name.format(layer) for layer in layers] for key, (name, _) in numbers.items()}
        for name in chain.from_iterable(names.values()):
            self._use(name)
        return names

    def leftovers(self) -> tuple[list[str], list[str]]:
        """The checkpoint's tensors that are not in the GGUF: names to report, and biases that must be zero."""
        biases = {f"{module}.bias" for modules in ([HEAD.source], *self.modules.values()) for module in modules}
        unused, zero_only = [], []
        for name in sorted(self.names - self.used):
            if name.startswith(self.family.unneeded):
                unused.append(name)
            elif name in biases:
                zero_only.append(name)
            elif name.startswith(self.family.ignored):
                unused.append(name)
            elif name == f"{HEAD.source}.weight":
                unused.append(name)  # a copy of tied embeddings
            elif not BUFFERS.match(name):
                raise self._unknown(name)
        return unused, zero_only

    def _unknown(self, name: str) -> BridgeError:
        """The refusal of a tensor that has no place in the GGUF."""
        fact = f"{name}: no tensor of a {self.family.arch} model of {self.args.layers} layers has this name"
        layer = layer_of(name)
        if layer is not None and layer >= self.args.layers + self.args.predicting:
            return BridgeError(f"{fact}; config.json's number of layers must be {layer + 1} or more to have it")
        return BridgeError(
            f"{fact}; the most alike that it has is {_alike(name, self.used)}. llama.cpp's {self.family.arch} "
            "would compute without it"
        )


def _alike(name: str, names: Collection[str]) -> str:
    """The name with the longest start and end in common with another one."""

    def in_common(other: str) -> tuple[int, str]:
        pairs = zip(name, other, strict=False), zip(reversed(name), reversed(other), strict=False)
        return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], run))) for run in pairs), other

    return max(names, key=in_common, default="none")
