"""What a user asks of a conversion: one object for the command line and for Python, with its defaults and checks.

    PlanOptions      what a plan depends on; types are in `recipe.Recipe`
    ConvertOptions   a plan's options and what is done with it
    Budget           a size, and what finding types that fit it may cost
    ...Keywords      the same options as the keywords of functions, for type checkers

How layers are quantized with a text is `bridge.quantize.settings.Calibration`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypedDict

from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.conversion.planning.recipe import MMPROJ_TYPES, Recipe, as_pairs
from bridge.errors import BridgeError, parameter, refused
from bridge.quantize.settings import Calibration
from bridge.system.options import check_types, count, entry, is_key, is_number, option, positive, share, size
from bridge.system.progress import Progress


@dataclass(frozen=True)
class PlanOptions(Recipe):
    """What a plan depends on, besides the checkpoint."""

    config: str | Path | None = option(
        None, "folder with config.json and tokenizer of the model that a bare .pt or .safetensors was made from",
        metavar="DIR", parse=Path,
    )  # fmt: skip
    detect_lattice: bool = option(
        False,
        "read floats that lie on a hidden grid (of models that somebody dequantized, or trained for it) as the codes "
        "they were made from; `inspect` tells where there are any",
    )
    imatrix: str | Path | None = option(
        None, "llama.cpp's importance matrix (GGUF), for tensors that are quantized from floats", metavar="FILE",
        parse=Path,
    )  # fmt: skip
    template: str | Path | None = option(
        None,
        "a GGUF of the same model from llama.cpp's converter, in any type, or a Hub repository that has some "
        "(org/model-GGUF: its smallest suitable file): for architectures that are not supported here. Names, metadata, "
        "tokenizer, and tensors that are not in the checkpoint are taken from it",
        metavar="MODEL.gguf",
    )
    mmproj_type: str = option(
        MMPROJ_TYPES[0],
        "type of the vision tower's matrices in mmproj-MODEL.gguf, which is written beside the language model; none: "
        "it is left out",
        choices=(*MMPROJ_TYPES, "none"),
    )
    no_mtp: bool = option(False, "leave out the layers that predict further tokens at once (MTP)")
    target_model: str | Path | None = option(
        None, "of a drafter (EAGLE-3, DFlash): folder with config.json and tokenizer of the model that it guesses for",
        metavar="DIR", parse=Path,
    )  # fmt: skip
    split_max_size: int | None = option(
        None, "write shards of at most this size, such as 4G or 500M", metavar="SIZE", parse=size, usual=True
    )
    name: str | None = option(
        None, "general.name: what programs call the model", metavar="TEXT", says="from the checkpoint", usual=True
    )
    author: str | None = option(None, "general.author", metavar="TEXT", says="from the checkpoint")
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = option(
        (),
        "set a key of the GGUF's metadata, such as general.description='For tests'; may be repeated. A key that the "
        "file has already keeps its type; a list can be edited in a plan only", metavar="KEY=VALUE", parse=entry,
    )  # fmt: skip
    pre: str | None = option(
        None, "tokenizer.ggml.pre, where the pre-tokenizer is not recognised (such as qwen2)", metavar="NAME"
    )
    threads: int | None = option(None, "worker threads", metavar="N", parse=positive, says="one per CPU", usual=True)
    force: bool = option(False, "replace files that exist", usual=True)
    calibrate: Calibration | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threads", "split_max_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refused(name, value, "must be at least 1")
        if self.mmproj_type not in (*MMPROJ_TYPES, "none"):
            known = ", ".join((*MMPROJ_TYPES, "none"))
            raise BridgeError(f"unknown {parameter('mmproj_type', self.mmproj_type)}: choose one of {known}")
        asked: Any = self.metadata  # or a dict
        if not isinstance(asked, Iterable):
            raise refused("metadata", asked, "must be a dict")
        pairs = [*as_pairs(asked)]
        pairs += [(f"general.{n}", v) for n in ("name", "author") if (v := getattr(self, n)) is not None]
        for each in pairs:
            if not (isinstance(each, tuple | list) and len(each) == 2 and is_key(each[0])):
                raise BridgeError(f"{parameter('metadata')} {each!r}: must be a key and its value")
        object.__setattr__(self, "metadata", tuple((key, value) for key, value in pairs))
        if self.template is not None and self.pre is not None:
            both = f"{parameter('pre')} and {parameter('template')}"
            raise BridgeError(f"{both}: the tokenizer is the template's; give one of the two")
        if self.calibrate is not None:
            self.calibrate.check_gguf()
            if self.calibrate.method == "imatrix" and self.imatrix is not None:
                both = f"{parameter('method', 'imatrix')} and {parameter('imatrix', self.imatrix)}"
                raise BridgeError(f"{both}: the method measures a matrix of its own; leave out one of the two")
            if self.type in FLOAT_TYPES:
                raise refused("type", self.type, f"nothing is quantized; leave out {parameter('calibrate')}")

    def for_source(self, coded: bool) -> Self:
        """The options for a source with codes or without, `auto` replaced where floats alone are to be calibrated."""
        return self if coded or self.calibrate is None or self.type != "auto" else replace(self, type="Q4_K")


@dataclass(frozen=True)
class Budget:
    """How large a file may be, and how long the search for its types may take. Give either `size` or `bpw`.

    tokens    number of tokens that trial models are measured on
    progress  called with the number of steps done, of how many, and the matrix or the trial model just measured

    Raises BridgeError where both or neither of `size` and `bpw` are given, and for values out of range.
    """

    size: int | None = option(
        None, "size of the whole file, such as 4.2G, never exceeded: each tensor gets the type that loses least",
        metavar="SIZE", parse=size, usual=True,
    )  # fmt: skip
    bpw: float | None = option(
        None, "instead of --size: bits per weight over all tensors' data, without the file's head", metavar="X",
        parse=float,
    )  # fmt: skip
    swaps: int = option(0, "maximum number of swaps of types that trial models judge", metavar="N", parse=count)
    requantize: bool = option(False, "choose types for tensors that could keep their codes too, where that pays")
    plan_out: str | Path | None = option(
        None, "write the plan found, with the curve of KL divergence against size", metavar="PLAN.json", parse=Path
    )
    tensor_types_out: str | Path | None = option(
        None, "write the types found as llama-quantize's --tensor-type-file takes them", metavar="FILE", parse=Path
    )
    tokens: int = 4096
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.size is None) == (self.bpw is None):
            both = f"{parameter('size')} and {parameter('bpw')}"
            raise BridgeError(f"{both} ask for different things; give one")
        if self.bpw is not None and not is_number(self.bpw):
            raise refused("bpw", self.bpw, "must be a number")
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise refused("size", self.size, "must be a whole number of bytes, at least 1")
        if self.bpw is not None and not 0 < self.bpw <= 32:
            raise refused("bpw", self.bpw, "must be bits per weight, such as 4.3")
        check_types(self)


@dataclass(frozen=True)
class ConvertOptions(PlanOptions):
    """What `bridge.convert` takes besides the checkpoint and the output's name.

    calibrate  quantizes floats, and codes that no type holds, with a text; None: they are rounded
    budget     the size that the file may have: each tensor gets a type of its own; needs `calibrate`

    Raises BridgeError where options contradict each other, and for values out of range.
    """

    plan: str | Path | None = option(
        None, "execute this plan of `gguf-bridge plan`, instead of choosing types; types in it may have been edited",
        metavar="PLAN.json", parse=Path, usual=True,
    )  # fmt: skip
    shard: tuple[int, int] | None = option(
        None, "with --plan: write only shard I of N (identical to the one a full run writes)", metavar="I/N",
        parse=share,
    )  # fmt: skip
    merge: str | Path | None = option(
        None,
        "folder of a PEFT adapter (LoRA, DoRA) to merge: the matrices that it changes are requantized, all others keep "
        "their codes", metavar="ADAPTER", parse=Path,
    )  # fmt: skip
    modelfile: bool = option(False, "write an Ollama Modelfile next to the GGUF", usual=True)
    budget: Budget | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is None and self.shard is not None:
            raise BridgeError(f"{parameter('shard')} needs {parameter('plan')}, which defines the shards")
        if self.merge is not None and (self.plan or (self.budget and self.budget.plan_out)):
            both = f"{parameter('merge')} and {parameter('plan' if self.plan else 'plan_out')}"
            raise BridgeError(f"{both}: a plan is of the checkpoint without an adapter; give one of the two")
        if self.plan is not None:
            mine = {f.name for f in fields(PlanOptions)} - {"config", "threads", "force", "calibrate"}
            if any(getattr(self, f.name) != f.default for f in fields(self) if f.name in mine):
                raise BridgeError(
                    "a plan defines types, tokenizer, metadata, template and shards; give or edit the plan only"
                )
        alone = self.merge is not None or self.budget is not None
        if self.calibrate is not None and self.calibrate.spread is not None and alone:
            name = "merge" if self.merge is not None else "budget"
            raise refused(name, None, "is for one machine; machines share the work on the result, or with a plan")
        if self.budget is not None:
            self._check_budget(self.budget)

    @property
    def promises_closeness(self) -> bool:
        """Whether every type is chosen by the error it adds: with a budget, a size chooses too."""
        return self.budget is None and super().promises_closeness

    def for_source(self, coded: bool) -> Self:
        """See `PlanOptions`; with a budget or a plan, the type is not chosen here."""
        return self if self.budget is not None or self.plan is not None else super().for_source(coded)

    def _check_budget(self, budget: Budget) -> None:
        asked = "size" if budget.size is not None else "bpw"
        if self.plan is not None:
            raise BridgeError(f"a plan defines every type; give {parameter(asked)} without {parameter('plan')}")
        if self.type != "auto":
            raise BridgeError(
                f"{parameter(asked)} chooses the types itself, so it cannot be combined with "
                f"{parameter('type', self.type)}; pin single tensors with {parameter('tensor_types')}"
            )
        if self.calibrate is None or self.calibrate.text is None or self.calibrate.method in ("awq", "rtn"):
            raise BridgeError(
                f"{parameter(asked)} is measured with a text and two-sided, gptaq, gptq or imatrix: "
                f"give {parameter('calibrate')}"
            )
        if self.calibrate.blocks is not None:
            raise BridgeError(
                f"{parameter(asked)} measures whole models: write the types with {parameter('plan_out')}, and give "
                f"{parameter('blocks')} to each run of convert with {parameter('plan')}"
            )
        if self.split_max_size is not None:
            raise BridgeError(
                f"{parameter(asked)} is for one file: write the plan with {parameter('plan_out')}, set split_max_size "
                f"in it, and convert with {parameter('plan')}"
            )


class FileKeywords(TypedDict, total=False):
    """Fields of `PlanOptions` that say how a GGUF is written, with or without a calibration text."""

    output_type: str | None
    token_embd_type: str | None
    tensor_types: Mapping[str, str] | Sequence[tuple[str, str]]
    config: str | Path | None
    template: str | Path | None
    mmproj_type: str
    no_mtp: bool
    target_model: str | Path | None
    split_max_size: int | None
    name: str | None
    author: str | None
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]]
    pre: str | None
    threads: int | None
    force: bool


class PlanKeywords(FileKeywords, total=False):
    """The fields of `PlanOptions`."""

    type: str
    actorder_type: str | None
    target: str | None
    detect_lattice: bool
    imatrix: str | Path | None
    calibrate: Calibration | None


class ConvertKeywords(PlanKeywords, total=False):
    """The fields of `ConvertOptions`."""

    plan: str | Path | None
    shard: tuple[int, int] | None
    merge: str | Path | None
    modelfile: bool
    budget: Budget | None
