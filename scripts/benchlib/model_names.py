"""Models as people call them: benchmarks write these names to --json, and pictures show them."""

from pathlib import Path

# a model's name in the benchmarks, or of its folder -> for readers
_NAMES = {
    "smollm2": "SmolLM2 135M",
    "smollm2-dithered": "SmolLM2 135M",
    "gemma3-270m": "Gemma 3 270M",
    "tiny-llama": "small Llama (13.6M)",
    "tiny-qwen3": "small Qwen3 (3.7M)",
}


def model_name(model: str | Path) -> str:
    """The name for readers of a model or its folder; the folder's own if it has none here."""
    folder = Path(model).resolve().name
    return _NAMES.get(folder, folder)
