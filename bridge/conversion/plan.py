"""What becomes of every tensor of a model, decided before anything is written.

`convert` executes a plan, `plan` and `inspect` print it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gguf.gguf_writer import GGUFValue

from bridge.models.outline import PlannedTensor


@dataclass(eq=False)
class Plan:
    """A whole GGUF, or its shards: every tensor with its type.

    metadata, stop, notes  as in Outline, general.file_type among the keys
    template        path of the GGUF that tensors are kept from, if any
    imatrix         path of the importance matrix for tensors that are quantized from floats, if any
    split_max_size  bytes of tensor data in a shard; None for one file
    detect_lattice  floats on a hidden grid are taken for codes
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
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def arch(self) -> str:
        """The GGUF architecture."""
        return str(self.metadata["general.architecture"].value)
