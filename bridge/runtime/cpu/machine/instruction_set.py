"""What differs between targets; the modules intrinsics_*.py have one each, as `ISA`."""

from collections.abc import Callable
from typing import Any

from bridge.system.records import record


@record
class InstructionSet:
    """A target's sizes, and the functions that write its instructions with an `Emitter`; None: it has none.

    widths        columns of x at once, as the registers allow
    byte_shifts   whether there are shifts of bytes
    paired        see `Emitter`
    signed_dots   whether codes are multiplied as signed bytes; otherwise the record's sums take the zero point off
    row_bits      of codes that `emit_row_dots` is faster for than repacking on the way
    unpacks       whether kernels of several columns unpack blocks first, see unpacked.py
    scales_codes  whether 16 columns are multiplied by codes times scales, see scaled.py
    fuses_scales  whether the instruction that widens sums of int16 multiplies them too
    float_scales  whether sums of several columns are multiplied by scales in float32, which is as exact as in int32
    emit_pairs    the products of int16, two neighbours added
    index_bits    of a look-up that takes no notice of a byte's other bits; 0: there is none
    """

    lanes: int
    widths: tuple[int, ...]
    emit_look_up: Callable[..., Any]
    emit_dots: Callable[..., Any]
    emit_tile: Any = None
    emit_start: Any = None
    emit_row_dots: Any = None
    emit_signed_row_dots: Any = None
    emit_blend: Any = None
    emit_permute: Any = None
    emit_pairs: Any = None
    byte_shifts: bool = False
    paired: bool = False
    signed_dots: bool = False
    row_bits: int = 0
    unpacks: bool = False
    scales_codes: bool = False
    fuses_scales: bool = False
    float_scales: bool = False
    index_bits: int = 0
