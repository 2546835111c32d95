"""What a layer of a GGUF becomes in a checkpoint's format, and its codes, some rows at a time.

    form = form_of(place, "mlx", None, first_rows_tell=True)     None: it stays in floats
    for runs in slices(place.shape, "mlx", form):
        tensor = codes_at(place, "mlx", form, runs, room)
        error, signal = lost(place, "mlx", form, tensor, runs)

Bits and groups are those of the blocks if the format holds them (`codes_of_blocks`), else of rounding to nearest.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from bridge.blocks.read import READ
from bridge.checkpoint.files.dtypes import not_finite
from bridge.checkpoint.formats.fp4_layouts import fp4_obstacle
from bridge.checkpoint.formats.layouts import (
    GPTQ_BITS,
    HQQ_BITS,
    HQQ_SIZES,
    LAYOUTS,
    MLX_BITS,
    MLX_SIZES,
    PLANAR_BITS,
    mlx_biases,
)
from bridge.checkpoint.grouped import GroupedTensor, PackedTensor
from bridge.conversion.codes_of_blocks import (
    codes_of,
    fp4_of,
    fp4_scales,
    is_plain,
    own_noise,
    packed_of,
    regrouped,
)
from bridge.conversion.gguf_source import Place
from bridge.encode.block_words import TILE, TYPES_IN_WORDS, Room
from bridge.encode.limits import REQUANTIZED_LIMIT
from bridge.encode.round_groups import round_to_groups
from bridge.quantize.checkpoint_writer import Groups, refusal
from bridge.runtime.cpu.dequantize import UNQUANTIZED

BITS: dict[str, tuple[int, ...]] = {
    "gptq": GPTQ_BITS, "gptq_v2": GPTQ_BITS, "gptq_p": PLANAR_BITS, "awq": (4,), "compressed-tensors": (4, 8),
    "mlx": MLX_BITS, "hqq": HQQ_BITS, "modelopt": (),
}  # fmt: skip
EXACT, ALL_CODES, ROUNDED, CALIBRATED, AS_FLOATS = "exact", "all codes", "rounded", "calibrated", "floats"
_OFFSET_SIZES = {"mlx": MLX_SIZES, "hqq": HQQ_SIZES}  # formats with any zero points, and their group sizes
_IN_WORDS = ("gptq", "gptq_v2", "gptq_p", "compressed-tensors", "mlx")  # formats that pack consecutive codes
_AT_ONCE = 1 << 20  # values of a layer that are rounded or compared
# what is written at once: bytes of words, which stay in a core's cache unless rows are their columns; codes of a byte
_WORDS_AT_ONCE, _TRANSPOSED_AT_ONCE, _CODES_AT_ONCE = 1 << 20, 32 << 20, 4 << 20


@dataclass(frozen=True)
class Form:
    """How a layer is written, which its data tells: what becomes of it, and how the format describes it.

    how      EXACT, CALIBRATED, ROUNDED, or ALL_CODES, which only its error tells from EXACT
    offsets  zero points are not whole numbers
    packed   codes and scales of the blocks are the format's, see `packed_of`
    """

    how: str
    groups: Groups
    offsets: bool = False
    packed: bool = False


def form_of(place: Place, format: str, bits: int | None, first_rows_tell: bool) -> Form | None:
    """What a layer becomes in a format; None if it stays in floats.

    bits             that it has at most: it is rounded to them if its codes take more, or if it is of floats; None:
                     those that its codes take, or that add little noise
    first_rows_tell  whether its blocks are packed as they are
    """
    type, shape = place.stored.type, (place.part.shape[0], place.part.shape[1])
    fixed = place.tensor.fixed_type is not None
    if place.part.change is not None or (type in UNQUANTIZED and (bits is None or fixed)):
        return None
    first = fp4_of(place.part.module, type, place.raw(slice(1), ordered=False), place.scale)
    known = tuple(n for n in BITS[format] if bits is None or n <= bits)
    if (
        first is not None
        and (bits is None or bits >= 4)
        and fp4_obstacle(format, first) is None
        and (
            first_rows_tell
            or all(fp4_scales(type, place.raw(rows, ordered=False)) is not None for rows in _runs(shape))
        )
    ):
        return Form(EXACT, Groups(4, first.group_size, True, first.kind), packed=True)
    for offsets in _ways_of_offsets(type, format):
        found = _coded_form(place, format, known, offsets, first_rows_tell)
        if found is not None:
            break
    else:
        found = _rounded_form(place, format, bits)
    return None if found is None or refusal(format, found.groups, shape) else found


def _ways_of_offsets(type: str, format: str) -> tuple[bool, ...]:
    """`Form.offsets` in the order in which they are tried."""
    if format not in _OFFSET_SIZES:
        return (False,)
    block = READ.get(type)
    as_they_are = block is not None and block.has_min and not block.is_k  # halves, as the format has them
    return (True,) if as_they_are else (False, True)


def common_size(forms: Mapping[str, Form], places: Mapping[str, Place]) -> dict[str, Form]:
    """The forms with the largest group size that divides those of all; scales of larger groups are repeated."""
    if len({form.groups.group_size for form in forms.values()}) <= 1:
        return dict(forms)
    columns = {module: places[module].part.shape[1] for module in forms}
    size = math.gcd(*(max(form.groups.group_size, 0) or columns[module] for module, form in forms.items()))
    return {module: replace(form, groups=form.groups._replace(group_size=size)) for module, form in forms.items()}


def _coded_form(place: Place, format: str, bits: tuple[int, ...], offsets: bool, first_rows_tell: bool) -> Form | None:
    """Bits and groups of a layer that keeps its codes; None where the format does not hold them in any of `bits`.

    Of a plain type, some rows tell both mostly; the others are only looked through for scales that do not fit, or not
    at all with `first_rows_tell`.
    """
    type, shape = place.stored.type, (place.part.shape[0], place.part.shape[1])
    block, width, size, middle = READ.get(type), 0, shape[1], True
    if block is None:
        return None
    plain = offsets or not block.has_min  # whether offsets are whole is for all rows to tell
    own = (block.levels - 1).bit_length(), block.sub
    in_words = type in TYPES_IN_WORDS and format in _IN_WORDS
    most = next((n for n in bits if n >= own[0]), 0)
    for rows in _runs(shape, first=16):
        if rows.start and plain and in_words and first_rows_tell and (width, size) == own:
            break
        raw = place.raw(rows, ordered=False)
        plain &= is_plain(type, raw)
        if (width, size) == (most, block.sub) and plain:
            continue
        tensor = _coded(place, raw, format, bits, offsets)
        if tensor is None:
            return None
        width, size = max(width, tensor.bits), min(size, tensor.group_size)
        middle &= bool((tensor.zeros == 1 << (tensor.bits - 1)).all())
    packed = plain and in_words and (width, size) == own
    return Form(EXACT, _groups(width, size, middle, shape, format), offsets, packed)


def _coded(place: Place, raw: np.ndarray, format: str, bits: tuple[int, ...], offsets: bool) -> GroupedTensor | None:
    """The codes of blocks of a layer in groups that a format has; None where it does not hold them."""
    tensor = codes_of(place.part.module, place.stored.type, raw, bits, offsets, place.scale)
    if tensor is not None and format in _OFFSET_SIZES:
        tensor = regrouped(tensor, _OFFSET_SIZES[format])
        if tensor is not None and not np.isfinite(mlx_biases(tensor)).all():
            return None
    if tensor is None or not np.isfinite(tensor.scales).all() or (format == "gptq" and (tensor.zeros == 0).any()):
        return None
    return tensor


def _rounded_form(place: Place, format: str, bits: int | None) -> Form | None:
    """Bits of a layer that is rounded to nearest; None where the format has too few, or groups of 32 do not fit."""
    shape = place.part.shape[0], place.part.shape[1]
    if shape[1] % 32:
        return None
    noise = noise_of(place)
    limit = REQUANTIZED_LIMIT * noise if noise is not None and bits is None else np.inf
    for width in BITS[format] if bits is None else (bits,):
        if bits is None and width < 8 and noise is None:
            continue
        error, finite = 0.0, False
        for rows in _runs(shape):
            weights = place.floats(rows)
            if not np.isfinite(weights).all():
                raise not_finite(place.stored.file, place.part.source)
            found = _rounded(place.part.module, weights, width, format)
            finite = bool(np.isfinite(found.scales).all())
            if not finite:
                break
            error += float(np.square(found.dequantize() - weights, dtype=np.float64).sum())
            if width < 8 and not error <= limit:
                break
        if finite and (width == 8 or error <= limit):
            return Form(ROUNDED, _groups(width, 32, is_symmetric(width, format), shape, format))
    return None


def is_symmetric(bits: int, format: str) -> bool:
    """Whether layers are rounded around the middle: below 8 bits they have zero points, but for compressed-tensors,
    which transformers does not load with them."""
    return bits == 8 or format == "compressed-tensors"


def _rounded(name: str, weights: np.ndarray, bits: int, format: str) -> GroupedTensor:
    """Weights rounded to nearest, in groups of 32."""
    return round_to_groups(name, weights, bits, is_symmetric(bits, format), least=format == "gptq")


def _groups(bits: int, size: int, middle: bool, shape: tuple[int, int], format: str) -> Groups:
    """How a format describes a layer; `middle`: all zero points are the middle of the codes."""
    whole = 32 < size == shape[1] and format not in _OFFSET_SIZES  # rows of 32 are groups as other layers have
    return Groups(bits, -1 if whole else size, format == "compressed-tensors" and middle)


def slices(shape: tuple[int, ...], format: str, form: Form) -> Iterator[tuple[slice, ...]]:
    """The rows of a layer that are packed at once: a run, or one of each part that a word has codes of."""
    bits, at_once = form.groups.bits, _CODES_AT_ONCE * (4 if _is_transposed(format) else 1)
    if form.packed:
        at_once = (_TRANSPOSED_AT_ONCE if _is_transposed(format) else _WORDS_AT_ONCE) * 8 // bits
    lanes = 1 if format == "modelopt" else LAYOUTS[format].lanes(bits)
    if shape[0] % lanes:
        return iter([(slice(0, shape[0]),)])
    height = shape[0] // lanes
    runs = _runs((height, shape[1]), at_once // lanes)
    return (tuple(slice(i * height + run.start, i * height + run.stop) for i in range(lanes)) for run in runs)


def codes_at(
    place: Place, format: str, form: Form, runs: tuple[slice, ...], room: Room
) -> GroupedTensor | PackedTensor:
    """Rows of a layer in the form that was found. Raises NotPlain where first rows did not tell it."""
    if form.packed:
        (rows,), columns = runs, place.part.shape[1]
        pieces, shape = (place.raw(run) for run in _runs_of(rows, columns)), (rows.stop - rows.start, columns)
        return packed_of(place.part.module, place.stored.type, pieces, shape, place.scale, _is_transposed(format), room)
    parts = [part for rows in runs for part in _grouped(place, format, form, rows)]
    if len(parts) == 1:
        return parts[0]
    codes, scales, zeros = (np.concatenate(x) for x in zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True))
    return replace(parts[0], codes=codes, scales=scales, zeros=zeros)


def _grouped(place: Place, format: str, form: Form, rows: slice) -> Iterator[GroupedTensor]:
    """The codes of a run of rows, in one piece or several."""
    module, columns, groups = place.part.module, place.part.shape[1], form.groups
    if form.how == ROUNDED:
        for run in _runs_of(rows, columns):
            yield _in_groups(_rounded(module, place.floats(run), groups.bits, format), groups.group_size)
        return
    found = _coded(place, place.raw(rows), format, (groups.bits,), form.offsets)
    assert found is not None  # `form_of` looked through all rows
    yield _in_groups(found, groups.group_size)


def _in_groups(tensor: GroupedTensor, size: int) -> GroupedTensor:
    """The tensor in groups of a size, -1 for whole rows: some rows may be more alike than all of a layer are."""
    size = size if size > 0 else tensor.shape[1]
    found = tensor if tensor.group_size == size else regrouped(tensor, (size,))
    assert found is not None
    return found


def lost(
    place: Place, format: str, form: Form, tensor: GroupedTensor | PackedTensor, runs: tuple[slice, ...]
) -> tuple[float, float]:
    """The squared error of rows as a format has them, and their squared weights; 0 where they are the blocks'."""
    error, signal, at = 0.0, 0.0, 0
    carried = form.how not in (ROUNDED, CALIBRATED)
    if isinstance(tensor, GroupedTensor) and not (carried and not _is_changed(place.stored.type, format)):
        for run in (run for rows in runs for run in _runs_of(rows, place.part.shape[1])):
            weights = place.floats(run)
            held = _held(tensor, format, slice(at, at := at + len(weights)))
            error += float(np.square(held - weights, dtype=np.float64).sum())
            signal += float(np.square(weights, dtype=np.float64).sum())
    return error, signal


def _is_transposed(format: str) -> bool:
    return format == "awq" or format.startswith("gptq")


def noise_of(place: Place) -> float | None:
    """The noise of a layer's type by itself, see `own_noise`."""
    found = [own_noise(place.stored.type, place.raw(rows, ordered=False)) for rows in _runs(place.part.shape)]
    return None if found[0] is None else sum(n for n in found if n is not None)


def _is_changed(type: str, format: str) -> bool:
    """Whether a format may round the scales or offsets of a type whose codes it holds."""
    block = READ[type]
    return block.is_k or bool(block.scales) or (block.has_min and format != "mlx")


def _held(tensor: GroupedTensor, format: str, rows: slice) -> np.ndarray:
    """float32 of some rows of a layer as the checkpoint has it."""
    if format not in _OFFSET_SIZES:
        return tensor.dequantize(rows)
    scales = tensor.scales[rows].astype(np.float32)
    codes, scales = tensor.codes[rows], np.repeat(scales, tensor.group_size, 1)
    if format == "mlx":
        return codes * scales + np.repeat(mlx_biases(tensor)[rows].astype(np.float32), tensor.group_size, 1)
    zeros = tensor.zeros[rows].astype(np.float16).astype(np.float32)
    return (codes - np.repeat(zeros, tensor.group_size, 1)) * scales


def _runs_of(rows: slice, columns: int) -> Iterator[slice]:
    """The runs of some rows."""
    for run in _runs((rows.stop - rows.start, columns)):
        yield slice(rows.start + run.start, rows.start + run.stop)


def _runs(shape: tuple[int, ...], at_once: int = _AT_ONCE, first: int | None = None) -> Iterator[slice]:
    """Slices of rows of about `at_once` values that cover a matrix, whole tiles; `first`: rows of the first."""
    step, start = max(TILE, at_once // shape[1] // TILE * TILE), 0
    while start < shape[0]:
        stop = min(start + (min(first, step) if first and start == 0 else step), shape[0])
        yield slice(start, stop)
        start = stop
