"""Logarithmic axes with plain numbers: matplotlib's small exponents cannot be read on a phone."""

from math import floor, log10

from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

_LEAST = 1.0  # decades of an axis
_FEW = 2.0  # decades that have room for ticks between the powers of ten
_MOST = 7  # powers of ten with ticks


def decades(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis: room around these values, and a decade or more."""
    middle, half = (low * high) ** 0.5, 10 ** (0.55 * max(log10(high / low), _LEAST))
    return middle / half, middle * half


def _ticks(low: float, high: float) -> list[float]:
    powers = range(floor(log10(low)), floor(log10(high)) + 1)
    few = log10(high / low) < _FEW
    step = -(-len(powers) // _MOST)
    values = [m * 10.0**p for p in (powers if few else powers[::step]) for m in ((1, 2, 5) if few else (1,))]
    return [value for value in values if low <= value <= high]


def tick_names(low: float, high: float) -> list[str]:
    """The texts at the ticks of an axis with these limits."""
    return [plain_number(value) for value in _ticks(low, high)]


def plain_logarithm(axis: Axis) -> None:
    """Set the ticks of an axis that has its limits."""
    axis.set_major_locator(FixedLocator(_ticks(*sorted(axis.get_view_interval()))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))


def plain_number(value: float, digits: int = 1) -> str:
    """A positive number with so many digits: decimals, or a power of ten below 1e-3."""
    if value < 0.9e-3:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    return f"{value:.{max(digits - 1 - floor(log10(value) + 1e-9), 0)}f}"
