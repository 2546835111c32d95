"""What becomes of every tensor of a model, decided before anything is written.

`planner` makes a plan, `convert` executes it, `plan` and `inspect` print it, and a user may edit it.
Whoever wants to know what happens to a tensor reads `how`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gguf.gguf_writer import GGUFValue

from bridge.blocks import BLOCKS, NEWER, ROUNDED
from bridge.blocks.ggml import GGML_QUANT_SIZES, GGMLQuantizationType
from bridge.conversion.planning.recipe import Unmet
from bridge.errors import parameter
from bridge.models.outline import ModelTensor, tied

How = Literal["carried", "requantized", "calibrated", "rounded", "as it came"]
"""What happens to a part of a tensor.

carried      its integer codes become the GGUF's
requantized  its codes are made floats, and these are quantized to another grid or stored
calibrated   it is quantized with the Hessians of a text
rounded      it came as floats, which are quantized to nearest
as it came   it came as floats and is stored as floats, or in the blocks that a GGUF has it in
"""
QUANTIZED = ("requantized", "calibrated", "rounded")  # neither the codes nor the floats that came


@dataclass(frozen=True, eq=False)
class PlannedTensor(ModelTensor):
    """A tensor with its type.

    type         a block or float type
    how          of each part
    reason       why that type: text for people, which nothing reads
    limit        the most of the checkpoint's own noise that it may add; None: whatever it adds
    unmet        the type that was asked for where it is another one, and why
    quantizable  whether a type was chosen for it; norms, biases, routers and a template's tensors have one type only
    """

    type: str = field(kw_only=True)
    how: tuple[How, ...] = ()
    reason: str = ""
    limit: float | None = None
    quantizable: bool = True
    unmet: Unmet | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the GGUF."""
        size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // size * nbytes


def unmet_notes(tensors: Sequence[PlannedTensor]) -> list[str]:
    """Where tensors do not become the type that was asked for: a note for each reason and type, with the count.

    Where their rows are the reason, also the bits, and which types of fewer bits these rows hold.
    """
    counts = Counter((t.unmet, t.type) for t in tensors if t.unmet is not None)
    notes, fewer = [], dict[int, str]()
    for (unmet, type), count in counts.most_common():
        became = f"{count} tensor{'s' * (count != 1)}"
        if unmet.columns is None:
            notes.append(f"{unmet.why}: {became} became {type}")
            continue
        became += f" {'has' if count == 1 else 'have'} {unmet.columns} and became {type}"
        notes.append(f"{unmet.why}: {became} ({_bits(type):.2f} bits a weight, not {_bits(unmet.type):.2f})")
        fewer.setdefault(unmet.columns, type)
    for columns, type in fewer.items():
        smaller = [name for name in (*BLOCKS, *NEWER, *ROUNDED) if _fits(name, columns) and _bits(name) < _bits(type)]
        if smaller:
            listed = ", ".join(f"{name} ({_bits(name):.2f} bits)" for name in sorted(smaller, key=_bits))
            notes.append(
                f"smaller than {type}, for rows of {columns}: {listed}; with {parameter('size')}, the best mixture of "
                "that size"
            )
    return notes


def _bits(type: str) -> float:
    """Bits per weight."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return 8 * nbytes / size


def _fits(type: str, columns: int) -> bool:
    return columns % GGML_QUANT_SIZES[GGMLQuantizationType[type]][0] == 0


def main_type(tensors: Sequence[PlannedTensor]) -> str:
    """The type that most weights of the layers have."""
    weights: dict[str, int] = {}
    for t in tensors:
        if len(t.shape) > 1 and t.kind not in ("token_embd", "output"):
            weights[t.type] = weights.get(t.type, 0) + math.prod(t.shape)
    return max(weights, key=lambda k: weights[k]) if weights else "F32"


@dataclass(eq=False)
class Plan:
    """A whole GGUF, or its shards: every tensor with its type.

    metadata, stop, notes  as in Outline, general.file_type among the keys
    template        path of the GGUF that tensors are taken from, if any
    imatrix         path of the importance matrix for tensors that are quantized from floats, if any
    split_max_size  bytes of tensor data in a shard; None for one file
    detect_lattice  whether floats on a hidden grid are read as codes
    mmproj_type     of the matrices of the vision tower's own GGUF; None: none is written
    curve           (bytes of the file, estimated KL divergence in nats a token) of other sizes, from a size budget
    """

    metadata: dict[str, GGUFValue]
    tensors: list[PlannedTensor]
    stop: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    template: str | None = None
    imatrix: str | None = None
    split_max_size: int | None = None
    detect_lattice: bool = False
    mmproj_type: str | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def arch(self) -> str:
        return str(self.metadata["general.architecture"].value)

    @property
    def tied(self) -> bool:
        """Whether the embeddings are the output head too."""
        return tied(self.tensors)

    @property
    def by_gguf_names(self) -> bool:
        """Whether tensors are read by their own names: those of a GGUF that is not calibrated."""
        return all(part.source == tensor.name for tensor in self.tensors for part in tensor.parts)
