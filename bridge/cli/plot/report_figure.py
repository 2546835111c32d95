"""A report as maps of layers and kinds of tensors: added error, codes kept, bits per weight."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bridge.cli.plot.layout import EDGE, LINE, wrapped
from bridge.cli.plot.logarithms import plain_logarithm
from bridge.cli.plot.theme import TEXT, WIDTH, NothingToDraw, Theme, new_figure
from bridge.gguf_file.tensor_names import block_of
from bridge.system.text import percent, size_text

_EXACT = "#b6bdc5"
_PITCH = 1.75 * TEXT  # points, from row to row
_AROUND = 54  # points, above and below a map
_MOST_TEXTS = 4  # layers whose cells have room for their values
_SHADES = 48  # matplotlib draws the scale of more as a bitmap
_COLOURS = "viridis"  # yellow is worst: much error, codes lost, many bits


class _Cells:
    """The measured matrices of a report's layers: rows are kinds, columns layers."""

    def __init__(self, tensors: list[dict[str, Any]]) -> None:
        self.inside: dict[tuple[str, int], dict[str, Any]] = {}
        self.outside: list[dict[str, Any]] = []
        for tensor in tensors:
            if tensor["fidelity"] is None:
                continue
            block = block_of(tensor["name"])
            if block is None:
                self.outside.append(tensor)
            else:
                self.inside[tensor["kind"], block] = tensor
        if not self.inside:
            raise NothingToDraw("no tensor of a layer was carried or quantized")
        self.kinds = list(dict.fromkeys(kind for kind, _ in self.inside))
        self.layers = range(max(layer for _, layer in self.inside) + 1)

    def values(self, of: Any) -> np.ndarray:
        """float64 [kinds, layers] of a function of the tensors; NaN without a tensor."""
        grid = np.full((len(self.kinds), len(self.layers)), np.nan)
        for (kind, layer), tensor in self.inside.items():
            value = of(tensor)
            grid[self.kinds.index(kind), layer] = math.nan if value is None else float(value)
        return grid


def figure(record: dict[str, Any], theme: Theme) -> Figure:
    """The picture of a report's JSON."""
    cells = _Cells(record["tensors"])
    codes = cells.values(lambda t: t["fidelity"]["codes_kept"])
    error = cells.values(lambda t: t["fidelity"]["nmse"])
    bits = cells.values(lambda t: t["bpw"])
    panels = 2 + bool(np.isfinite(codes).any())
    title = wrapped(_title(record), WIDTH - 2 * EDGE, bold=True)
    height = _PITCH * len(cells.kinds) + _AROUND
    picture = new_figure(
        height * panels + LINE * (len(title) + 2), layout=ConstrainedLayoutEngine(w_pad=EDGE / 72)
    )  # inches
    picture.suptitle("\n".join(title), x=EDGE / WIDTH, ha="left", fontsize=TEXT, weight="bold")
    axes = picture.subplots(panels, 1, squeeze=False)[:, 0]
    _error_map(axes[0], cells, error)
    if panels == 3:
        image = _map(axes[1], cells, codes, Normalize(0, 1), lambda v, _: percent(v, 3), f"{_COLOURS}_r")
        axes[1].set_title("share of the checkpoint's codes in the GGUF", loc="left")
        bar = _colour_bar(axes[1], image)
        bar.set_ticks([0, 0.5, 1])
        bar.ax.set_yticklabels(["0%", "50%", "100%"])
    _bits_map(axes[-1], cells, bits)
    axes[-1].set_xlabel("\n".join(["layer", *_outside(cells.outside)]))
    return picture


def _error_map(axes: Axes, cells: _Cells, error: np.ndarray) -> None:
    positive = error[error > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-7, 1e-6)
    # at least a decade, so that similar errors look similar
    middle = math.sqrt(low * high)
    low, high = min(low, middle / math.sqrt(10)), max(high, middle * math.sqrt(10))
    shown = np.where(error == 0, low / 10, error)  # below the scale: drawn as exact
    image = _map(axes, cells, shown, LogNorm(low, high), lambda v, _: "exact" if v < low else f"{v:.1e}")
    exact = "; grey: exact" if (error == 0).any() else ""
    axes.set_title(f"added squared error over squared weights (NMSE){exact}", loc="left")
    bar = _colour_bar(axes, image)
    plain_logarithm(bar.ax.yaxis)


def _bits_map(axes: Axes, cells: _Cells, bits: np.ndarray) -> None:
    names = {key: tensor["type"] for key, tensor in cells.inside.items()}
    low, high = np.nanmin(bits), np.nanmax(bits)
    norm = Normalize(low - 0.5, high + 0.5)
    image = _map(axes, cells, bits, norm, lambda v, key: f"{names[key]} {v:.2f}")
    axes.set_title("bits per weight in the GGUF, scales included", loc="left")
    levels: dict[float, set[str]] = {}
    for (kind, layer), name in names.items():
        levels.setdefault(round(bits[cells.kinds.index(kind), layer], 3), set()).add(name)
    bar = _colour_bar(axes, image)
    if len(levels) <= 4:
        bar.set_ticks(sorted(levels))
        bar.ax.set_yticklabels([f"{level:.2f} {'/'.join(sorted(levels[level]))}" for level in sorted(levels)])


def _map(
    axes: Axes, cells: _Cells, values: np.ndarray, norm: Normalize, text: Any, colours: str = _COLOURS
) -> ScalarMappable:
    """Draw one map; `text(value, (kind, layer))` is the text of a cell if there is room."""
    shades: Colormap = matplotlib.colormaps[colours].resampled(_SHADES).with_extremes(under=_EXACT, bad=(0, 0, 0, 0))
    # rectangles: viewers smear a bitmap of a few pixels
    image = axes.pcolormesh(
        range(len(cells.layers)), range(len(cells.kinds)), np.ma.masked_invalid(values), cmap=shades, norm=norm,
        edgecolors="face", linewidth=0.4,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set_yticks(range(len(cells.kinds)), cells.kinds)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(cells.layers) <= _MOST_TEXTS:
        axes.set_xticks(list(cells.layers))
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                red, green, blue, _ = image.to_rgba(value)
                light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                label = text(value, (cells.kinds[row], column))
                # near black and near white: the theme's own colours would change with the page
                axes.text(column, row, label, ha="center", va="center", color="#000001" if light else "#fffffe")
    return image


def _colour_bar(axes: Axes, image: ScalarMappable) -> Any:
    bar: Any = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=12)
    bar.outline.set_visible(False)
    bar.solids.set_edgecolor("face")  # no gaps between the shades
    bar.ax.tick_params(length=0, which="both")
    return bar


def _title(record: dict[str, Any]) -> str:
    weights = sum(math.prod(t["shape"]) for t in record["tensors"])
    bits = 8 * sum(t["nbytes"] for t in record["tensors"]) / weights
    source, output = size_text(record["source_bytes"]), size_text(record["output_bytes"])
    name = record.get("title") or Path(record["checkpoint"]).name
    return f"{name}: {source} {record['format']} to {output} GGUF, {bits:.2f} bits per weight in all"


def _outside(tensors: list[dict[str, Any]]) -> list[str]:
    texts = [f"{t['kind']} {t['type']}, NMSE {t['fidelity']['nmse']:.1e}" for t in tensors]
    return wrapped(f"outside of layers: {'; '.join(texts)}", WIDTH - 100) if texts else []
