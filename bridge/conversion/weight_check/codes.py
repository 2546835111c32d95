"""What the codes of a module tell: how often each level occurs, and between which levels the codes of a group lie.

What no quantizer makes, and why:

    codes of one level           a module of codes that are all alike is one weight a group
    few levels                   a scale is chosen so that some code of a group is the least or the greatest: codes that
                                 lie within a quarter of 8 and more levels waste the rest. Not reported where most
                                 modules are so (ternary models in 4 bits), nor of 2 bits
    all levels alike             weights are bell-shaped: of 16 levels, the middle ones occur several times as often as
                                 the outermost, also in groups of 16. Random bits have each level equally often, within
                                 5%: what was encrypted, shifted by a bit, or not written
    a shift by one step          weights have a mean near 0, so codes scatter around the zero point. A mean that is 0.75
                                 to 1.25 steps off, and a quarter of the codes' spread at least, is a zero point of GPTQ
                                 v1 read as v2's or the reverse. Of 8 bits, steps are too small to tell
    scales of 0 of codes that    the group is lost: a quantizer gives a group of zeros codes of the zero point, and any
    differ                       scale. NVFP4 rounds scales of tiny blocks to 0, so there, up to 1% are usual
    scales beyond 65504          programs that compute in halves make them infinite; scales that halves round to 0 are
                                 told where more than 1% are so: those of a few rows that never learned are harmless
    scales of a rare sign        quantizers make scales that are all positive, or of either sign about equally often
                                 (MLX, auto-round); fewer than 1% of the other sign are damage
    pages of zero bytes          unsigned codes of 0 are the least level: 4096 bytes of them in a row, in groups whose
                                 weights are not 0, were not written
"""

from dataclasses import dataclass

import numpy as np

from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.grouped import GroupedTensor
from bridge.conversion.weight_check.finding import Finding, are, first_of, share
from bridge.conversion.weight_check.rows import RowCounts

PAGE = 4096
LEVELS_OF_TRAINED = 4  # bits: of fewer, many small weights are 0
_ENOUGH = 4096  # codes: of fewer, nothing is told
_SAMPLE = 1 << 21  # codes of a large module that are counted, at least, spread over its rows
_NARROW = 0.25  # of the levels
_UNIFORM = 0.05
_PER_LEVEL = 4000  # codes a level that make 5% three standard deviations and more
_SHIFT = (0.75, 1.25)  # steps
_OF_SPREAD = 0.25
_RARE = 0.01
_MANY_SCALES = 512
_LARGEST_HALF, _LEAST_HALF = 65504.0, 2.0**-25  # halves round what is not above the latter to 0


@dataclass(frozen=True)
class CodeCounts:
    """Counts of a module's codes.

    low      uint8 [out, G]: the least code of each group
    high     the greatest
    columns  int64 [G]: the columns of each group
    levels   int64: how often each code occurs among those of every `step`-th row
    """

    low: np.ndarray
    high: np.ndarray
    columns: np.ndarray
    levels: np.ndarray
    step: int

    @property
    def span(self) -> tuple[int, int]:
        """The least and the greatest of all codes."""
        live = self.columns > 0
        return int(self.low[:, live].min()), int(self.high[:, live].max())


def count_codes(t: GroupedTensor) -> CodeCounts:
    """The counts of a module."""
    low, high = t.code_ranges()
    sizes = np.bincount(t.groups(), minlength=t.scales.shape[1])
    step = max(1, t.codes.size // _SAMPLE)
    levels = np.bincount(t.codes[::step].reshape(-1), minlength=2**t.bits)
    return CodeCounts(low, high, sizes, levels, step)


def rows_of_codes(t: GroupedTensor, counts: CodeCounts) -> RowCounts:
    """Which rows of a module are 0 or of one code; of its zeros, an estimate."""
    rows = RowCounts(1, *t.shape)
    rows.zero[:] = _zero_groups(t, counts).all(axis=1)
    rows.constant[:] = (counts.low.min(axis=1) == counts.high.max(axis=1)) & ~rows.zero
    zero = t.zeros.flat[0]
    if t.bits >= LEVELS_OF_TRAINED and (t.zeros == zero).all() and zero in range(len(counts.levels)):
        rows.zeros = int(counts.levels[int(zero)] / counts.levels.sum() * t.codes.size)
    return rows


def _zero_groups(t: GroupedTensor, counts: CodeCounts) -> np.ndarray:
    """bool [out, G]: groups whose weights are all 0."""
    alike = (counts.low == counts.high) & (counts.low == t.zeros)
    return np.asarray((t.scales == 0) | alike | (counts.columns == 0))


def code_findings(name: str, t: GroupedTensor, counts: CodeCounts, pages: int, nbytes: int) -> list[Finding]:
    """What is wrong with a module's codes; `pages` of zero bytes are among the `nbytes` of its codes."""
    findings = _scales(name, t, counts)
    zero_share = float(_zero_groups(t, counts).mean())
    least, greatest = counts.span
    if least == greatest:
        if zero_share < 1:
            findings.append(Finding(name, "codes", f"all {t.codes.size} codes are {least}", {"code": least}))
        return findings
    if t.codes.size >= _ENOUGH:
        findings += _histogram(name, t, counts)
    if pages * PAGE > zero_share * nbytes:
        text = f"{pages} pages of {PAGE} bytes of its codes are zero bytes, as if they had not been written"
        findings.append(Finding(name, "unwritten", text, {"pages": pages, "bytes": PAGE}))
    return findings


def _histogram(name: str, t: GroupedTensor, counts: CodeCounts) -> list[Finding]:
    """What is wrong with how often each level occurs."""
    levels, n = np.arange(len(counts.levels)), int(counts.levels.sum())
    first, last = counts.span
    span, equal = last - first + 1, n / len(levels)
    mean = float(counts.levels @ levels) / n
    deviation = float(np.sqrt(counts.levels @ np.square(levels - mean) / n))
    zeros = t.zeros[:: counts.step].mean(axis=0, dtype=np.float64)
    offset = mean - float(zeros @ counts.columns) / t.codes.shape[1]
    if t.bits > 2 and span <= _NARROW * t.levels and not t.ternary:
        text = f"the codes lie within {span} of {t.levels} levels, {first} to {last}"
        return [Finding(name, "levels", text, {"levels": span, "of": t.levels})]
    if t.bits > 2 and equal >= _PER_LEVEL and np.abs(counts.levels / equal - 1).max() < _UNIFORM:
        text = f"all {len(levels)} levels of codes occur equally often, within {_UNIFORM:.0%}, as in random bits"
        return [Finding(name, "codes", text, {"levels": len(levels)})]
    if t.bits <= 4 and _SHIFT[0] <= abs(offset) <= _SHIFT[1] and abs(offset) > _OF_SPREAD * deviation:
        text = (
            f"the codes are {abs(offset):.2f} steps {'above' if offset > 0 else 'below'} their zero points on average, "
            "as if these were GPTQ v1's read as v2's or the reverse"
        )
        return [Finding(name, "codes", text, {"offset": offset})]
    return []


def _scales(name: str, t: GroupedTensor, counts: CodeCounts) -> list[Finding]:
    magnitude, differ = np.abs(t.scales), counts.low != counts.high
    small = (magnitude <= _LEAST_HALF) & (magnitude > 0) & differ
    negative, positive = t.scales < 0, t.scales > 0
    is_negative = np.count_nonzero(negative) < np.count_nonzero(positive)
    rare, usual = (negative, positive) if is_negative else (positive, negative)
    is_rare = np.count_nonzero(rare) < _RARE * np.count_nonzero(usual) and rare.size >= _MANY_SCALES
    sign = "negative" if is_negative else "positive"
    masks = {
        "zero": ((t.scales == 0) & differ, "0 though their codes differ"),
        "large": (magnitude > _LARGEST_HALF, "beyond 65504, infinite in halves"),
        "small": (small & (small.mean() > _RARE), "too small for halves, 0 in them"),
        sign: (rare & is_rare, f"{sign}, the others are not"),
    }
    return _scales_that(name, masks)


def lost_blocks(name: str, t: Fp4Tensor) -> list[Finding]:
    """Scales of 0 of codes that are not 0, where there are many."""
    starts = np.flatnonzero(np.diff(t.groups(), prepend=-1))
    lost = (t.scale_values() == 0) & np.logical_or.reduceat((t.codes & 7).astype(bool), starts, axis=1)
    return _scales_that(name, {"zero": (lost & (lost.mean() > _RARE), "0 though their codes are not")})


def _scales_that(name: str, masks: dict[str, tuple[np.ndarray, str]]) -> list[Finding]:
    """One finding on scales [out, G], by what those of each mask are."""
    texts: list[str] = []
    numbers: dict[str, int] = {}
    for key, (mask, what) in masks.items():
        if count := int(mask.sum()):
            numbers |= {key: count, "of": mask.size}
            first = first_of(np.logical_or.reduce(mask, axis=1))
            texts.append(f"{share(count, mask.size)} scales {are(count)} {what}, the first in row {first}")
    return [Finding(name, "scales", "; ".join(texts), numbers)] if texts else []
