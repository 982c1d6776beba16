"""Heat maps of weights between tokens: how they look."""

import io
import itertools
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from .colours import RAMP
from .fonts import drawable

COLOURS = LinearSegmentedColormap.from_list("attention", RAMP)
INK, LINE, _PALE_INK, _FAINT = "#2b2f3a", "#c9ced8", "#6b7280", "#e6e9ef"
_DPI = 150
_CSS_DPI = 96  # pixels of an inch in a browser
# In inches:
_GAP = 0.14  # between neighbours, and at the margins
_MIN_RULED_CELL = 0.12  # smallest cells with lines between them


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a cell, of the smallest map and of all maps in inches, and of type in points."""

    cell: float
    shortest: float
    longest: float
    type: float
    smallest_type: float


_ONE_MAP = _Sizes(cell=0.3, shortest=0.9, longest=12, type=10, smallest_type=5)
_GRID = _Sizes(cell=0.14, shortest=1.1, longest=16, type=7, smallest_type=4.5)


class Picture(Figure):
    """A figure that a notebook shows as a picture.

    IPython shows a plain Figure only after `%matplotlib inline`. Otherwise it prints the name.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Return a PNG file, and the size in which a notebook shows it."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=self.dpi, facecolor=self.get_facecolor())
        width, height = (round(_CSS_DPI * inches) for inches in self.get_size_inches())
        return file.getvalue(), {"width": width, "height": height}


def draw_heat_maps(
    maps: Sequence[tuple[str, np.ndarray]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    subtitle: str,
    row_name: str,
    column_name: str,
    across: int | None = None,
) -> Picture:
    """Draw maps of the same tokens with one colour scale.

    The figure grows with the sentences up to a limit. Above the limit, cells and type shrink. If
    type would become too small to read, only every second, third, ... token has a label. The axes
    of the figure are the maps, then the colour bar.

    Args:
        maps: titles and weights of the maps, (rows, columns).
        rows, columns: labels of the tokens.
        title, subtitle: headings of the whole figure. The subtitle may be empty.
        row_name, column_name: names of the two axes.
        across: maps in a row of the figure; None chooses.
    """
    sizes = _ONE_MAP if len(maps) == 1 else _GRID
    across = across or _maps_per_row(len(maps))
    down = math.ceil(len(maps) / across)
    longest = sizes.longest / max(across, down)
    width, height = (_side(len(names), longest, sizes) for names in (columns, rows))
    labels, families = drawable([*rows, *columns])
    style = {"family": families, "color": INK, "parse_math": False, "usetex": False}
    # Until _arrange, the figure is one inch by one inch, so that its fractions are inches.
    figure = Picture(figsize=(1, 1), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    peak = max(float(weights.max()) for _, weights in maps)
    panels = []
    for index, (name, weights) in enumerate(maps):
        panel = figure.add_axes((0, 0, width, height))
        panel.imshow(weights, cmap=COLOURS, vmin=0, vmax=peak, aspect="auto", interpolation="none")
        panel.spines[:].set(color=LINE, linewidth=0.6)
        panel.tick_params(length=0, pad=3, which="both")
        panel.grid(False)
        _label_rows(panel, labels[: len(rows)], sizes, style, shown=index % across == 0)
        _draw_cell_lines(panel)
        is_lowest = index + across >= len(maps)
        _label_columns(panel, labels[len(rows) :], sizes, style, shown=is_lowest)
        if len(maps) > 1:
            panel.set_title(name, fontsize=sizes.type, color=INK, pad=3)
        panels.append(panel)
    bar = figure.add_axes((0, 0, 0.13, min(height, 4)))
    figure.colorbar(panels[0].images[0], cax=bar)
    bar.set_ylabel("weight", color=_PALE_INK, fontsize=9)
    bar.tick_params(length=2, labelsize=8, color=LINE, labelcolor=INK)
    bar.locator_params(nbins=5)
    bar.spines[:].set(color=LINE, linewidth=0.6)
    _arrange(figure, panels, bar, across, (title, subtitle, row_name, column_name))
    return figure


def _maps_per_row(count: int) -> int:
    """Return how many of `count` maps stand in a row, so that few places stay empty."""
    if count <= 4:
        return count
    return 3 if count % 3 == 0 and count % 4 else 4


def _side(tokens: int, longest: float, sizes: _Sizes) -> float:
    """Return a side of a map in inches. Cells with lines between them have whole pixels."""
    cell = min(sizes.cell, longest / tokens)
    if cell >= _MIN_RULED_CELL:
        cell = math.floor(_DPI * cell + 1e-6) / _DPI
    return max(tokens * cell, sizes.shortest)


def _type(tokens: int, side: float, sizes: _Sizes) -> tuple[float, int]:
    """Return the points of labels along a side, and the step between tokens with a label."""
    pitch = 72 * side / tokens
    points = max(min(sizes.type, 0.75 * pitch), sizes.smallest_type)
    return points, math.ceil(1.2 * points / pitch)


def _label_rows(
    panel: Axes, labels: Sequence[str], sizes: _Sizes, style: dict[str, Any], shown: bool
) -> None:
    points, step = _type(len(labels), panel.get_position().height, sizes)
    if not shown:
        panel.set_yticks([])
        return
    panel.set_yticks(range(0, len(labels), step), labels[::step], fontsize=points, **style)


def _label_columns(
    panel: Axes, labels: Sequence[str], sizes: _Sizes, style: dict[str, Any], shown: bool
) -> None:
    side = panel.get_position().width
    points, step = _type(len(labels), side, sizes)
    if not shown:
        panel.set_xticks([])
        return
    panel.set_xticks(range(0, len(labels), step), labels[::step], fontsize=points, **style)
    texts = panel.get_xticklabels()
    room = 72 * side / len(labels) * step
    widths = [text.get_window_extent().width * 72 / panel.figure.dpi for text in texts]
    if any(sum(pair) / 2 + points / 3 > room for pair in itertools.pairwise(widths)):
        # Labels at 45 degrees are closer to each other than their anchors, by this factor.
        slanted = room * math.sin(math.pi / 4) >= 1.2 * points
        for text in texts:
            text.set(
                rotation=45 if slanted else 90,
                horizontalalignment="right",
                verticalalignment="center",
                rotation_mode="anchor",
            )
        panel.tick_params(axis="x", pad=6)


def _draw_cell_lines(panel: Axes) -> None:
    """Draw faint lines between large cells."""
    rows, columns = panel.images[0].get_size()
    width, height = panel.get_position().size
    if min(width / columns, height / rows) >= _MIN_RULED_CELL:
        panel.set_xticks(np.arange(0.5, columns - 1), minor=True)
        panel.set_yticks(np.arange(0.5, rows - 1), minor=True)
        panel.grid(which="minor", color=_FAINT, linewidth=0.4)


def _arrange(
    figure: Figure, panels: Sequence[Axes], bar: Axes, across: int, names: Sequence[str]
) -> None:
    """Place all parts without overlap, and set the size of the figure."""
    texts = [
        figure.text(0, 0, name, fontsize=points, color=colour, rotation=rotation, va="bottom")
        for name, points, colour, rotation in zip(
            names, (11, 9, 9, 9), (INK, *3 * [_PALE_INK]), (0, 0, 90, 0), strict=True
        )
    ]
    title, subtitle, row_name, column_name = (
        np.array(text.get_window_extent().size) / figure.dpi for text in texts
    )
    size, bar_size = panels[0].get_position().size, bar.get_position().size
    # The first map has all labels of rows, and the last one all labels of columns.
    left, below, right, above = np.maximum(_overhang(panels[0]), _overhang(panels[-1]))
    down = math.ceil(len(panels) / across)
    gap = _whole_pixels([_GAP, above + _GAP])

    start = _whole_pixels([row_name[0] + left + 1.5 * _GAP, column_name[1] + below + 1.5 * _GAP])
    end = start + (size + gap) * (across, down) - gap
    middle = (start + end) / 2
    steps = [(index % across, down - 1 - index // across) for index in range(len(panels))]
    corners = [start + (size + gap) * step for step in steps]
    bar_corner = np.array([end[0] + right + _GAP, end[1] - bar_size[1]])
    heading = end[1] + above + _GAP
    places = [
        (_GAP, heading + subtitle[1] + _GAP / 3),
        (_GAP, heading),
        (_GAP, middle[1] - row_name[1] / 2),
        (middle[0] - column_name[0] / 2, _GAP),
    ]
    right_end = bar_corner[0] + bar_size[0] + _overhang(bar)[2]
    figure_size = _whole_pixels(
        [max(right_end, _GAP + max(title[0], subtitle[0])) + _GAP, places[0][1] + title[1] + _GAP]
    )
    figure.set_size_inches(*figure_size)
    for axes, corner in zip((*panels, bar), (*corners, bar_corner), strict=True):
        axes.set_position((*corner / figure_size, *axes.get_position().size / figure_size))
    for text, place in zip(texts, places, strict=True):
        text.set_position(place / figure_size)


def _whole_pixels(inches: Sequence[float]) -> np.ndarray:
    return np.ceil(_DPI * np.array(inches) - 1e-6) / _DPI


def _overhang(axes: Axes) -> np.ndarray:
    """Return the inches of labels beyond the left, lower, right and upper edge."""
    inner, outer = axes.bbox, axes.get_tightbbox()
    assert outer is not None  # it is None for axes that are not drawn
    beyond = (inner.x0 - outer.x0, inner.y0 - outer.y0, outer.x1 - inner.x1, outer.y1 - inner.y1)
    return np.array(beyond) / axes.figure.dpi


def write_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        # Keep the background, because a style sheet may have another one for saved figures.
        figure.savefig(partial, format=path.suffix[1:].lower(), facecolor=figure.get_facecolor())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
