"""Names of what a conversion writes."""

from pathlib import Path

from bridge.checkpoint.files.hub import model_name
from bridge.conversion.recipe import Recipe


def layers_of(path: Path) -> Path:
    """The folder next to a GGUF in which its finished layers are stored while it is made."""
    return path.with_name(f"{path.name}.layers")


def default_name(checkpoint: str, recipe: Recipe) -> str:
    """`<checkpoint>-<TYPE>.gguf`, or `<checkpoint>.gguf` for auto."""
    stem = model_name(checkpoint)
    return f"{stem}.gguf" if recipe.type == "auto" else f"{stem}-{recipe.type}.gguf"
