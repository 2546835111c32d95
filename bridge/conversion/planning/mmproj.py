"""The vision tower of a checkpoint: the file mmproj-MODEL.gguf beside the language model."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bridge.checkpoint import Checkpoint
from bridge.conversion.planning.part_reader import PartReader
from bridge.errors import parameter
from bridge.models.outline import Outline
from bridge.models.towers.mmproj import describe_tower
from bridge.system.storage.files import without_shard


def mmproj_path(gguf: Path) -> Path:
    """The vision tower's file beside a language model's or one of its shards, with llama.cpp's prefix."""
    return gguf.with_name("mmproj-" + without_shard(gguf.name))


def tower_outline(ckpt: Checkpoint, type: str) -> Outline | None:
    """The outline of a checkpoint's vision tower; None where it has none that is known. Raises BridgeError."""
    shapes = {name: info.shape for name, info in ckpt.tensors.items()}
    shapes |= {f"{module}.weight": info.shape for module, info in ckpt.modules.items()}
    outline = describe_tower(ckpt.config, ckpt.home, shapes, type)
    if outline is not None:
        PartReader(ckpt).check(outline.tensors)
    return outline


def tower_notes(others: Sequence[str], tower: Outline | None, type: str | None) -> list[str]:
    """What becomes of the parts that are not the language model, for the report.

    others  their tensors in the checkpoint
    tower   the outline of the vision tower, if it is written; `type` of its matrices
    """
    if tower is not None:
        heard = "clip.has_audio_encoder" in tower.metadata
        what, are = ("towers for images and sound", "are") if heard else ("vision tower", "is")
        notes = [
            f"the {what}, {len(tower.tensors)} tensors, {are} written beside the language model as mmproj-*.gguf "
            f"({type}): llama.cpp and Ollama take both"
        ]
        short = Counter(t.shape[-1] for t in tower.tensors if type == "Q8_0" and t.fixed_type == "F16")
        notes += [
            f"Q8_0 needs rows of a multiple of 32: {count} tensors of the mmproj have {columns} and became F16"
            for columns, count in short.items()
        ]
        if tower.unused:
            notes.append(f"not needed in the mmproj and left out: {', '.join(tower.unused)}")
        return [*notes, *tower.notes]
    if not others:
        return []
    parts = sorted({f"{re.sub(r'^model[.]', '', name).partition('.')[0]}.*" for name in others})
    file = (
        f"{parameter('mmproj_type', 'none')} leaves out the file (mmproj) that llama.cpp reads images with"
        if type is None
        else "llama.cpp reads images and sound with a separate file (mmproj), made by its own converter"
    )
    return [f"only the language model is converted: {len(others)} tensors of {', '.join(parts)} are dropped; {file}"]
