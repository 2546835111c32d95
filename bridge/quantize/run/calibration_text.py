"""The tokens that layers are calibrated on: how many, how long their sequences are, and the model's own samples."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bridge.checkpoint import Checkpoint
from bridge.errors import BridgeWarning, parameter, refused
from bridge.quantize.settings import Calibration
from bridge.system.cpu.memory import free_memory

if TYPE_CHECKING:
    import torch

    from bridge.quantize.model.float_model import FloatModel
    from bridge.quantize.text.mixture import CalibrationSet

_LENGTH = 2048  # tokens in a sequence
_IMATRIX_LENGTH = 512  # the same for an importance matrix, as llama-imatrix has it
_IMATRIX_TOKENS = 1 << 14  # means over tokens need fewer than Hessians
_TOKENS_PER_COLUMN = 4  # of the widest input, at least
_TOKENS_WANTED = 8  # for each column of it
_SEQUENCES, _TOKENS = 128, 1 << 16  # the least that are taken without `samples`, the smaller of the two

# own samples by seed, count and length, those drawn last: with a size, they are asked for twice
_drawn: WeakKeyDictionary[Checkpoint, dict[tuple[int | None, int, int], torch.Tensor]] = WeakKeyDictionary()


def with_length(ckpt: Checkpoint, settings: Calibration) -> tuple[Calibration, list[str]]:
    """The settings with the number of tokens in a sequence, where it was not given, and notes.

    Raises BridgeError if the model has fewer positions than were asked for.
    """
    from bridge.quantize.model.float_model import positions
    from bridge.quantize.model.streamed_model import check_length

    if settings.method == "rtn":
        return settings, []
    most = positions(ckpt)
    if settings.length is not None:
        check_length(settings.length, most)
        return settings, []
    usual = _IMATRIX_LENGTH if settings.method == "imatrix" else _LENGTH
    if most is None or most >= usual:
        return replace(settings, length=usual), []
    return replace(settings, length=most), [
        f"calibration sequences have {most} tokens instead of {usual}, as many as the model has positions"
    ]


def calibration_set(model: FloatModel, settings: Calibration, layers: Collection[str]) -> CalibrationSet:
    """The sequences to calibrate on; a BridgeWarning where they are few for the inputs of these layers."""
    from bridge.quantize.text.mixture import calibration_sequences
    from bridge.quantize.text.texts import TOKEN_FILES, load_tokenizer

    ckpt = model.ckpt
    assert settings.length is not None  # by with_length
    if settings.text is None:
        raise refused("method", settings.method, "needs a calibration text; only rtn does without")
    texts = [source for source in settings.sources if source.file is None or source.file.suffix not in TOKEN_FILES]
    tokenizer = load_tokenizer(ckpt.home) if texts else None
    columns = {name: shape[1] for name, shape in [*model.linears().items(), model.head()] if name in layers}
    widest = max(columns, key=columns.__getitem__, default=None)
    samples = settings.samples
    if samples is None and settings.method == "imatrix":
        samples = -(-_IMATRIX_TOKENS // settings.length)
    elif samples is None:
        enough = _TOKENS_WANTED * columns[widest] if widest is not None else 0
        samples = max(-(-enough // settings.length), min(_SEQUENCES, -(-_TOKENS // settings.length)))
    calibration_set = calibration_sequences(
        settings.sources, tokenizer, samples, settings.length, settings.seed, model.vocabulary,
        lambda count, length: _samples(model, tokenizer, settings, count, length),
    )  # fmt: skip
    tokens = calibration_set.tokens
    if widest is not None and tokens.numel() < (enough := _TOKENS_PER_COLUMN * columns[widest]):
        ways = ["a longer text"] if len(tokens) < samples else []
        if samples * settings.length < enough:
            ways.append(parameter("samples", -(-enough // settings.length)))
        warnings.warn(
            f"{tokens.numel()} calibration tokens are few for the {columns[widest]} inputs of {widest}, whose codes "
            f"may suit this text alone; give at least {enough} tokens: {' and '.join(ways)}",
            BridgeWarning,
            stacklevel=2,
        )
    return calibration_set


def enough_of(tokens: torch.Tensor, columns: int) -> torch.Tensor:
    """Evenly spaced sequences of int64 [sequences, length], as many as hold the tokens wanted for so many inputs."""
    count = min(len(tokens), -(-_TOKENS_WANTED * columns // tokens.shape[1]))
    return tokens[[i * len(tokens) // count for i in range(count)]]


def _samples(model: FloatModel, tokenizer: Any, settings: Calibration, count: int, length: int) -> torch.Tensor | None:
    """The model's own samples int64 [count, length]; None, and a BridgeWarning, where it cannot give any."""
    from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
    from bridge.quantize.text.default_text import openings
    from bridge.quantize.text.own_samples import fits_in_memory, own_samples

    def report(done: int, total: int) -> None:
        if settings.progress:
            settings.progress(0, 1, f"own samples: {done} of {total} tokens")

    key = settings.seed, count, length
    samples = _drawn.get(model.ckpt, {}).get(key)
    if samples is not None:
        return samples
    model = FloatModel(model.ckpt, fast_arithmetic(model.device), model.device)  # samples need no more precision
    why = "its weights do not fit in memory"
    if fits_in_memory(model, free_memory()):
        why = "transformers keeps no cache for it"
        end = model.model.config.get_text_config().eos_token_id
        ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
        samples = own_samples(model, openings(tokenizer), sorted(ends), count, length, settings.seed or 0, report)
    if samples is not None:
        _drawn[model.ckpt] = {key: samples}
    else:
        warnings.warn(
            f"{model.ckpt.path}: {why}, so it is calibrated without samples of its own, on the shipped texts alone",
            BridgeWarning,
            stacklevel=2,
        )
    return samples
