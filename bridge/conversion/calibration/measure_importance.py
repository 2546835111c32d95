"""`quantize --method imatrix`: llama.cpp's importance matrix of a model, from a text, to round its floats with.

The matrix goes through a file, `imatrix_out` or a temporary one, so that the GGUF is what `convert --imatrix` makes of
that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.checkpoint import Checkpoint
from bridge.conversion.planning.importance import Importance, importance_of_tensors
from bridge.models.outline import ModelTensor
from bridge.quantize.run.calibration_text import calibration_set
from bridge.quantize.settings import Calibration


def measured_importance(ckpt: Checkpoint, tensors: Sequence[ModelTensor], settings: Calibration) -> Importance:
    """The importance of the tensors' columns on the calibration text.

    Raises BridgeError as `calibration_set` and `mean_input_squares` do.
    """
    from bridge.gguf_file.imatrix import read_imatrix, write_imatrix
    from bridge.quantize.input_squares import mean_input_squares
    from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
    from bridge.quantize.run.needs import needs_of_pass
    from bridge.quantize.run.walk import sequences_together

    assert settings.length is not None  # by with_length
    model = FloatModel(ckpt, fast_arithmetic(settings.device), settings.device)  # means need no more precision
    tokens = calibration_set(model, settings, ()).tokens
    batch = sequences_together(settings.length)
    needs = needs_of_pass(model, (len(tokens), settings.length), settings)
    if settings.say:
        settings.say(f"importance of {tokens.numel():,} tokens: {needs}")

    def done(blocks: int, total: int) -> None:
        if settings.progress:
            settings.progress(blocks, total, "importance matrix")

    with TemporaryDirectory(dir=settings.offload) as folder:
        layers = mean_input_squares(model, tokens, batch=batch, offload=folder, memory=needs.layers, done=done)
        file = settings.imatrix_out or Path(folder) / "imatrix.gguf"
        importance = importance_of_tensors(tensors, layers)
        write_imatrix(file, importance, settings.length, [str(source) for source in settings.sources])
        return Importance(read_imatrix(file), None if settings.imatrix_out is None else str(file))
