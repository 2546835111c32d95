"""A float model in, a GGUF out whose layers are quantized with a text: `bridge.quantize_gguf`."""

from pathlib import Path
from typing import Unpack

from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.conversion.converter import convert_as
from bridge.conversion.planning.options import Budget, ConvertOptions, FileKeywords
from bridge.conversion.writing.report import Report
from bridge.quantize.settings import Calibration
from bridge.system.options import checked
from bridge.system.progress import Progress


@checked
def quantize_gguf(
    source: str | Path,
    output: str | Path | None = None,
    type: str = "auto",
    *,
    calibrate: Calibration | str | Path | None = None,
    budget: Budget | None = None,
    modelfile: bool = False,
    progress: Progress | None = None,
    save_as: Path | None = None,
    **options: Unpack[FileKeywords],
) -> Report:
    """Quantize a model to a GGUF with a calibration text, as `gguf-bridge quantize` does.

    source     a folder with config.json and float weights, a Hub id (org/name), or a GGUF
    output     the GGUF to write; None: the model's name and the type, in the current folder
    type       a block type or a llama.cpp mixture for the layers, or F16, BF16 or F32, which need no text. "auto":
               Q4_K, or with a budget the types that lose least; for a checkpoint with codes, the types that hold them
    calibrate  the file of the text, or a `bridge.quantize.settings.Calibration` with the text and the method; None: a
               mixture of texts that comes with this program
    budget     the size that the file may have
    modelfile  write an Ollama Modelfile next to the GGUF
    progress   called after the layers are quantized, with the bytes of the model that are written, with all its bytes,
               and with the tensor's name; `Calibration.progress` is called before
    save_as    the path where you will save the report; it is checked before anything is computed
    options    fields of `bridge.conversion.planning.options.ConvertOptions` about how the GGUF is written, such as
               output_type="Q6_K", tensor_types={"ffn_down": "Q6_K"}, force=True

    Finished layers are stored in the folder `<output>.layers` until the GGUF is written: a second run continues where
    an interrupted one stopped.

    Returns a `bridge.conversion.writing.report.Report`. Raises BridgeError where the model or the text is missing,
    damaged or of an unknown kind, where options contradict each other, and where `output` exists without `force`.
    """
    if calibrate is None:
        calibrate = Calibration() if needs_text(type) else None
    elif not isinstance(calibrate, Calibration):
        calibrate = Calibration(calibrate)
    settings = ConvertOptions(type=type, calibrate=calibrate, budget=budget, modelfile=modelfile, **options)
    return convert_as(source, output, settings, progress, save_as)


def needs_text(type: str) -> bool:
    """Whether layers of this type are quantized with a text, where nothing else is asked for."""
    return type.upper() not in FLOAT_TYPES
