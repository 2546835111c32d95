"""The GGUF name of each tensor of the checkpoint, by gguf's name map of the architecture."""

from collections.abc import Container
from dataclasses import dataclass

import gguf

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.tensor_names import TEXT_PREFIXES, expert_of, layer_of

_PREFIXES = (*TEXT_PREFIXES, ("transformer.", ""))  # the last: the map has Bloom's names without it
_BIASES = (".bias", "_proj.bias")  # e_score_correction_bias, dt_bias


@dataclass(frozen=True)
class Candidate:
    """A tensor of the checkpoint that may be, or be part of, one of the GGUF.

    source  as in `bridge.models.outline.Part`: "<module>.weight" for a quantized module
    module  the name of a quantized module, else None
    shape   (out, in) or (n,); a matrix of one row that is a vector in GGUF has two dimensions here
    layer   None outside the blocks
    name    in the GGUF, by the map, or None
    expert  its number, or None
    matrix  which matrix of a 3-D source this is, or None
    change  as in Part: "transposed"; "squeezed" for a convolution's [channels, 1, size]
    """

    source: str
    module: str | None
    shape: tuple[int, ...]
    layer: int | None
    name: str | None
    expert: int | None
    matrix: int | None = None
    change: str | None = None


def candidates(
    ckpt: Checkpoint, arch: str, n_layers: int, stored: Container[str], n_experts: int = 0
) -> list[Candidate]:
    """All tensors of the checkpoint. They have no names if gguf does not know the architecture. Of experts that are one
    tensor, each matrix is a candidate as it is and another one transposed.

    stored  the names of the template's tensors
    """
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}.get(arch)
    names = None if known is None else gguf.get_tensor_name_map(known, n_layers)
    shapes: list[tuple[str, str | None, tuple[int, ...]]] = [
        *((f"{module}.weight", module, info.shape) for module, info in ckpt.modules.items()),
        *((name, None, info.shape) for name, info in ckpt.tensors.items()),
    ]
    listed = []
    for source, module, shape in shapes:
        expert, layer = expert_of(source), layer_of(source)
        mapped = f"{expert.experts}.{expert.part}" if expert else source
        name = None if names is None else _gguf_name(names, mapped, stored)
        if len(shape) == 3 and shape[0] == n_experts > 1:
            for i in range(n_experts):
                listed.append(Candidate(source, None, shape[1:], layer, name, i, i))
                listed.append(Candidate(source, None, shape[:0:-1], layer, name, i, i, "transposed"))
        elif len(shape) == 3 and shape[1] == 1 < min(shape[0], shape[2]):
            listed.append(Candidate(source, None, (shape[0], shape[2]), layer, name, None, None, "squeezed"))
        else:
            listed.append(Candidate(source, module, shape, layer, name, expert.number if expert else None))
    return listed


def _gguf_name(names: gguf.TensorNameMap, source: str, stored: Container[str]) -> str | None:
    """The name in the GGUF; the converter adds endings to tensors without one, and changes those of biases."""
    forms = [source] + [new + source.removeprefix(old) for old, new in _PREFIXES if source.startswith(old)]
    forms += [form.removesuffix("_bias") + ending for form in forms if form.endswith("_bias") for ending in _BIASES]
    for form in forms:
        if (name := names.get_name(form, try_suffixes=(".weight", ".bias"))) is not None:
            return next((name + ending for ending in ("", ".weight", ".bias") if name + ending in stored), name)
    return None
