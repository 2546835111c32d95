"""The files that a conversion reads and writes, by name."""

from dataclasses import replace
from pathlib import Path

from bridge.blocks.ggml import GGMLQuantizationType
from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import kind_of, model_name
from bridge.conversion.planning.options import ConvertOptions
from bridge.conversion.planning.recipe import PRESETS
from bridge.gguf_file.reader import shards
from bridge.system.storage.files import without_shard
from bridge.system.storage.outputs import ProtectedPaths


def layers_of(path: Path) -> Path:
    """The folder next to a GGUF in which its finished layers are stored while it is made."""
    return path.with_name(f"{path.name}.layers")


def default_path(checkpoint: str, type: str | None = None) -> Path:
    """`<checkpoint>-<TYPE>.gguf` in the current folder, as llama.cpp's converter names it; without a type where types
    are chosen by size. A GGUF's own type and number of shards do not count to its name."""
    name = model_name(checkpoint)
    if kind_of(checkpoint) == "gguf":
        name = without_shard(name)
        known = next((t for t in (*PRESETS, *GGMLQuantizationType.__members__) if name.upper().endswith(f"-{t}")), None)
        name = name if known is None else name[: -len(known) - 1]
    return Path(f"{name}{'' if type is None else f'-{type}'}.gguf")


def other_outputs(folder: Path, options: ConvertOptions) -> list[Path]:
    """The files that are written besides the GGUF, which is written to a folder."""
    files = [
        folder / "Modelfile" if options.modelfile else None,
        options.calibrate.imatrix_out if options.calibrate else None,
        options.budget.plan_out if options.budget else None,
        options.budget.tensor_types_out if options.budget else None,
    ]
    return [Path(file) for file in files if file is not None]


def files_of(*named: str | Path | None) -> list[Path]:
    """Input files that were named, with all shards of a GGUF."""
    paths = [Path(name) for name in named if name is not None]
    return [file for path in paths for file in (shards(path) if path.suffix == ".gguf" else [path])]


def with_checkpoint(protected: ProtectedPaths, ckpt: Checkpoint) -> ProtectedPaths:
    """The protected paths with the files of a checkpoint, and its folders."""
    folders = dict.fromkeys(folder for folder in (ckpt.home, ckpt.path) if folder.is_dir())
    return replace(protected.with_files(ckpt.files), folders=(*protected.folders, *folders))
