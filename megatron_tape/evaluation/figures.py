"""How the pictures of evaluations look: one colour and one marker per model, heat maps, lengths on an axis.

Tasks draw with matplotlib's objects (no pyplot, no global style), which are imported when the first figure is made.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_tape.evaluation.task import Picture
from megatron_tape.text import CONTROLS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1670fa", "#df6e08", "#035736", "#7a2c81", "#aa4615", "#a583bb", "#3a8e69", "#147573")
"""Colours of models, in order, which those who do not see red or green tell apart too."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
"""Their markers, as many as no number of colours is a multiple of, so that more models look different."""
LINES = ("-", "--", ":", "-.")
COLOR_MAP = "cividis"
"""Of heat maps: from dark blue to light yellow, alike to all kinds of eyes and in grey."""
SHADES = ("#2a78c8", "#8a6fc0", "#c8588e", "#d97a20")
"""From the first to the last of an ordered series, such as layers."""
ON_DARK, ON_LIGHT = "#fdfdfd", "#050505"
"""Of texts upon the cells of a heat map."""
CELLS_WITH_TEXT = 144
LONGEST_LABEL, LONGEST_AXIS_LABEL = 36, 48
"""Characters of a model's or panel's name, and of the label of an axis, that fit in their places."""
_LONGEST_TEXT = 80
MOST_PANELS = 24
"""Axes that one figure may have: laying out many takes minutes."""
# Lone surrogates and noncharacters are shown by neither pages nor pictures.
_UNSHOWABLE = re.compile(f"[{CONTROLS}\ud800-\udfff\ufffe\uffff]")
_ORDER: ContextVar[tuple[str, ...]] = ContextVar("order of models", default=())
DOTS_PER_INCH = 150


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return how each model is drawn: `axes.plot(x, y, **styles(results)[label])`.

    The keys are `color`, `marker`, `markersize`, `linestyle`, `linewidth` and `label`. Use the latter as the text of a
    legend or title: it is shortened if it is very long, and matplotlib shows it as it is.
    """
    labels = list(labels)
    drawn: dict[str, dict[str, Any]] = {}
    for index, label in enumerate(dict.fromkeys([*_ORDER.get(), *labels])):
        short = plain(label, LONGEST_LABEL)
        if any(look["label"] == short for look in drawn.values()):
            short = f"{plain(label, LONGEST_LABEL - 6)} ({index + 1})"
        drawn[label] = {
            "color": COLORS[index % len(COLORS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
            "linestyle": LINES[index // len(COLORS) % len(LINES)],
            "linewidth": 1.6,
            "label": short,
        }
    return {label: drawn[label] for label in labels}


@contextmanager
def in_order(labels: Iterable[str]) -> Iterator[None]:
    """Give each of these models the same style in all pictures, also in those that do not show every one of them."""
    token = _ORDER.set(tuple(labels))
    try:
        yield
    finally:
        _ORDER.reset(token)


def shades(count: int) -> list[tuple[float, ...]]:
    """Return colours for curves that have an order, such as those of layers."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("shades", SHADES)
    return [colors(index / max(1, count - 1)) for index in range(count)]


def shorten(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a text on one line, with dots in its middle if it has more than `longest` characters."""
    text = " ".join(text.split())
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return text[: longest - 1 - tail] + "\N{HORIZONTAL ELLIPSIS}" + text[len(text) - tail :]


def clean(text: str, longest: int = 10_000) -> str:
    """Return a text on one line, shortened, without the characters that neither a page nor a picture can show."""
    return shorten(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text), longest)


def plain(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a text as a figure can show it: clean and short, and without the underscore that hides a legend's entry.

    A dollar sign begins no formula in figures of this module (see `new_figure`).
    """
    text = clean(text, longest)
    return f" {text}" if text.startswith("_") else text


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 4.6, height: float = 3.2, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in reading order; `width` and `height` are those of one of them, in inches.

    Further arguments are those of `Figure.subplots`, such as `sharey=True`. More than three columns become narrow on a
    page: put many models into several rows. Raises ValueError for more than MOST_PANELS axes.
    """
    if rows * columns > MOST_PANELS:
        raise ValueError(f"it would have {rows * columns:,} panels, and at most {MOST_PANELS} are drawn")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # labels come from files, and a stray $ would end the drawing
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots).ravel().tolist()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(True, linewidth=0.6, alpha=0.6)
        one.set_axisbelow(True)
        one.tick_params(labelsize=9)
    return figure, axes


def panels(count: int, columns: int = 3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes, at most `columns` side by side; the rest of the last row is empty."""
    columns = max(1, min(count, columns))
    figure, axes = new_figure(-(-count // columns), columns, **options)
    for one in axes[count:]:
        one.remove()
    return figure, axes[:count]


def model_panels(labels: Iterable[str], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with titled axes for each model."""
    labels = list(labels)
    figure, axes = panels(len(labels), **options)
    for one, label in zip(axes, labels):
        one.set_title(plain(label, LONGEST_LABEL), fontsize=10)
    return figure, axes


def curve(
    axes: Axes,
    style: Mapping[str, Any],
    x: Sequence[float],
    y: Sequence[float | None],
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
) -> None:
    """Draw a model's values with their intervals as bars; None leaves a gap, or a point without an interval."""
    values = np.array(_numbers(y))
    axes.plot(x, values, **style)
    if low is not None and high is not None:
        distances = np.clip([values - _numbers(low), np.array(_numbers(high)) - values], 0, None)
        axes.errorbar(x, values, distances, fmt="none", ecolor=style["color"], elinewidth=1, capsize=2.5, alpha=0.8)


def length_axis(axes: Axes, lengths: Iterable[int]) -> None:
    """Make the x axis one of lengths in tokens: logarithmic, with a tick at each length (at most about ten)."""
    from matplotlib.ticker import NullLocator

    shown = sorted(set(lengths))
    shown = shown[:: -(-len(shown) // 10)] if shown else []
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [length_name(length) for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length (tokens)")


def log_scale(axes: Axes, which: Literal["x", "y"], base: float = 10) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks, where matplotlib's own would be formulas.

    Those of base 2 are exact, as 1e+05 would not show that it is 131,072.
    """
    from matplotlib.ticker import FuncFormatter, LogFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    for put in (axis.set_major_formatter, axis.set_minor_formatter):
        put(FuncFormatter(lambda value, _: f"{value:,.12g}") if base == 2 else LogFormatter(base))


def length_name(length: int) -> str:
    """Return 1024 as 1K and 1000 as 1,000."""
    return f"{length // 1024:,}K" if length >= 1024 and length % 1024 == 0 else f"{length:,}"


def legend(figure: Figure) -> None:
    """Put one legend of everything that the figure's axes label under them; the figure grows by its height."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        longest = max(map(len, found))
        columns = max(1, min(len(found), int(figure.get_figwidth() * 12 / (longest + 6))))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(found) // columns) + 0.1)
        look = {"frameon": False, "fontsize": 9, "handlelength": 2.4}
        figure.legend(found.values(), found, loc="outside lower center", ncols=columns, **look)


def heat_map(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    row_label: str = "",
    column_label: str = "",
    high: float = 1.0,
    bar: str | None = None,
) -> None:
    """Draw a matrix of values (rows from top to bottom) whose colours run from 0 to `high`.

    None or NaN is a cell without a value, marked by a cross. A matrix of few cells shows its values. `bar` adds a
    colour bar with that label; of several panels with the same range, give it to the last one.
    """
    matrix = np.array([_numbers(row) for row in values], dtype=float).reshape(len(rows), len(columns))
    image = axes.imshow(matrix, vmin=0, vmax=high, cmap=COLOR_MAP, aspect="auto", interpolation="none")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    for ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        step = max(1, -(-len(names) // 12))
        shown = range(0, len(names), step)
        ticks(list(shown), [plain(str(names[index])) for index in shown])
    if sum(len(str(name)) for name in columns[:: max(1, -(-len(columns) // 12))]) > 44:
        axes.tick_params(axis="x", rotation=45)
    axes.set(xlabel=column_label, ylabel=row_label)
    for (row, column), value in np.ndenumerate(matrix) if matrix.size <= CELLS_WITH_TEXT else ():
        if np.isnan(value):
            axes.text(column, row, "\N{MULTIPLICATION SIGN}", ha="center", va="center", fontsize=8)
        else:
            light = sum(np.multiply(image.to_rgba(value)[:3], (0.299, 0.587, 0.114))) > 0.5
            color = ON_LIGHT if light else ON_DARK
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    if bar is not None:
        drawn: Any = axes.figure.colorbar(image, ax=[axes], label=bar, pad=0.02)
        drawn.outline.set_visible(False)
        drawn.ax.tick_params(labelsize=8)


def png(picture: Picture) -> bytes:
    """Return a picture as a PNG file, dark on white."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is odd in labels and values, such as characters that no font has
        picture.figure.savefig(content, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return content.getvalue()


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
