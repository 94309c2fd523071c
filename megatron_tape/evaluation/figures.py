"""The style of pictures: the color of each encoding, heat maps, axes of lengths.

Tasks draw with matplotlib's objects, without pyplot and global styles. matplotlib is imported with
the first figure.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_tape.evaluation.task import Picture
from megatron_tape.text import CONTROLS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENCODING_COLORS = {
    "rope": "#1670fa",
    "tape": "#df6e08",
    "cope": "#7a24c5",
    "fox": "#007468",
    "path": "#004161",
    "fire": "#cf003f",
    "alibi": "#17c094",
    "repo": "#18a6d6",
    "nope": "#8c8c8c",
    "t5": "#e86ee8",
    "xpos": "#cca71e",
    "randpe": "#26009d",
    "path_fox": "#6e1d00",
    "sincos": "#1a1a1a",
}
"""The color of each positional encoding in every picture. Readers with protanopia or deuteranopia
can distinguish any two of them."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
LINES = ("-", "--", ":", "-.")
BLENDS = ((0.0, 0.0), (0.0, 0.35), (1.0, 0.4))
"""Shades of an encoding's color: the gray level that is blended in (0 is black, 1 white), and its
fraction.
"""
COLOR_MAP = "cividis"
"""Color map of heat maps, from dark blue to light yellow. It also works in gray and for color-blind
readers.
"""
SHADES = ("#2a78c8", "#8a6fc0", "#c8588e", "#d97a20")
"""Colors of an ordered series, such as layers, from first to last."""
ON_DARK, ON_LIGHT = "#fdfdfd", "#050505"
"""Text colors on dark and light cells of a heat map."""
CELLS_WITH_TEXT = 144
"""Maximum number of cells of a heat map that shows the values."""
LONGEST_LABEL = 36
LONGEST_AXIS_LABEL = 48
"""Maximum characters of the name of a model or panel, and of the label of an axis."""
_LONGEST_TEXT = 80
MOST_PANELS = 24
"""Maximum number of panels (axes) of a figure; the layout of more takes minutes."""
# Pages and pictures cannot show lone surrogates and noncharacters.
_UNSHOWABLE = re.compile(f"[{CONTROLS}\ud800-\udfff\ufffe\uffff]")
_ENCODINGS: ContextVar[Mapping[str, str | None]] = ContextVar(
    "encodings of the models", default=MappingProxyType({})
)
DOTS_PER_INCH = 150


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the plot style of each model: `axes.plot(x, y, **styles(results)[label])`.

    The color is that of the model's encoding (see `model_encodings`). Models of one encoding differ
    in shade and line style. The keys are `color`, `marker`, `markersize`, `linestyle`, `linewidth`
    and `label`. Use `label` in legends and titles: it is short, and contains no markup of
    matplotlib.
    """
    labels = list(labels)
    encodings = {
        **_ENCODINGS.get(),
        **{label: None for label in labels if label not in _ENCODINGS.get()},
    }
    # Models of unknown encodings never get the colors of RoPE and TAPE.
    reserved = {"rope", "tape", *encodings.values()}
    free = [color for name, color in ENCODING_COLORS.items() if name not in reserved] or list(
        ENCODING_COLORS.values()
    )
    colors = {**ENCODING_COLORS}
    uses: Counter[str] = Counter()
    looks: dict[str, dict[str, Any]] = {}
    for index, (label, encoding) in enumerate(encodings.items()):
        family = encoding or f"model {label}"
        base = colors.setdefault(family, free[(len(colors) - len(ENCODING_COLORS)) % len(free)])
        variant = uses[base]
        uses[base] += 1
        short = plain(label, LONGEST_LABEL)
        if any(look["label"] == short for look in looks.values()):
            short = f"{plain(label, LONGEST_LABEL - 6)} ({index + 1})"
        looks[label] = {
            "color": shade(base, variant),
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
            "linestyle": LINES[variant % len(LINES)],
            "linewidth": 1.6,
            "label": short,
        }
    return {label: looks[label] for label in labels}


@contextmanager
def model_encodings(encodings: Mapping[str, str | None]) -> Iterator[None]:
    """Set the encoding of each model label, so that all pictures within the context show a model in
    the same style.
    """
    token = _ENCODINGS.set(encodings)
    try:
        yield
    finally:
        _ENCODINGS.reset(token)


def variant_styles(variants: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the plot styles of variants named as in `comparison.json`, such as
    `tape+increments=signed`.
    """
    variants = list(variants)
    with model_encodings({variant: variant.partition("+")[0] for variant in variants}):
        return styles(variants)


def encoding_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of a model's positional encoding, given its `config.json`; None if it is
    unknown.
    """
    for name in (config.get("position_encoding"), config.get("model_type")):
        if isinstance(name, str) and name in ENCODING_COLORS:
            return name
    if {"rope_theta", "rope_parameters"} & config.keys():
        return "rope"
    return None


def shade(color: str, number: int) -> str:
    """Return a shade of `color`: 0 is the color itself, and larger numbers cycle through
    `BLENDS`.
    """
    gray, fraction = BLENDS[number % len(BLENDS)]
    channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(
        f"{round((1 - fraction) * channel + fraction * 255 * gray):02x}" for channel in channels
    )


def shades(count: int) -> list[tuple[float, ...]]:
    """Return `count` RGBA colors for ordered curves, such as those of layers."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("shades", SHADES)
    return [colors(index / max(1, count - 1)) for index in range(count)]


def shorten(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a text as one line of at most `longest` characters, with an ellipsis in the middle if
    it is longer.
    """
    text = " ".join(text.split())
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return text[: longest - 1 - tail] + "\N{HORIZONTAL ELLIPSIS}" + text[len(text) - tail :]


def clean(text: str, longest: int = 10_000) -> str:
    """Return a text as one line, shortened, and with a replacement for characters that pages and
    pictures cannot show."""
    return shorten(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text), longest)


def plain(text: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a clean, short text for a figure. A space precedes a leading underscore, which would
    hide legend entries.

    Dollar signs stay, since `new_figure` disables math text.
    """
    text = clean(text, longest)
    if text.startswith("_"):
        return f" {text}"
    return text


def new_figure(
    rows: int = 1, columns: int = 1, *, width: float = 4.6, height: float = 3.2, **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes in reading order. `width` and `height` are the size of one panel
    in inches.

    Other arguments are those of `Figure.subplots`, such as `sharey=True`. Use at most three
    columns, since more are narrow on a page. Raises ValueError for more than MOST_PANELS panels.
    """
    if rows * columns > MOST_PANELS:
        raise ValueError(
            f"the figure has {rows * columns:,} panels, but at most {MOST_PANELS} are allowed"
        )
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = (
        False  # labels come from files, and a single $ would raise an error
    )
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
    """Return a figure with `count` axes in rows of at most `columns`."""
    columns = max(1, min(count, columns))
    figure, axes = new_figure(-(-count // columns), columns, **options)
    for one in axes[count:]:
        one.remove()
    return figure, axes[:count]


def model_panels(labels: Iterable[str], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with one titled panel for each model."""
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
    """Draw the curve of `y` over `x` with error bars from `low` to `high`.

    None in `y` leaves a gap; None in `low` or `high` omits the error bar.
    """
    values = np.array(_numbers(y))
    axes.plot(x, values, **style)
    if low is not None and high is not None:
        distances = np.clip([values - _numbers(low), np.array(_numbers(high)) - values], 0, None)
        axes.errorbar(
            x,
            values,
            distances,
            fmt="none",
            ecolor=style["color"],
            elinewidth=1,
            capsize=2.5,
            alpha=0.8,
        )


def length_axis(axes: Axes, lengths: Iterable[int]) -> None:
    """Format the x axis for lengths in tokens: logarithmic, with ticks at no more than ten of the
    `lengths`.
    """
    from matplotlib.ticker import NullLocator

    shown = sorted(set(lengths))
    shown = shown[:: -(-len(shown) // 10)] if shown else []
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [length_name(length) for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length (tokens)")


def log_scale(axes: Axes, which: Literal["x", "y"], base: float = 10) -> None:
    """Make an axis logarithmic, with plain numbers instead of matplotlib's powers at its ticks.

    With base 2, the numbers are exact, such as 131,072 instead of 1e+05.
    """
    from matplotlib.ticker import FuncFormatter, LogFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        set_formatter(
            FuncFormatter(lambda value, _: f"{value:,.12g}") if base == 2 else LogFormatter(base)
        )


def length_name(length: int) -> str:
    """Return a length in tokens as text, such as 1K for 1024 and 1,000 for 1000."""
    if length >= 1024 and length % 1024 == 0:
        return f"{length // 1024:,}K"
    return f"{length:,}"


def limits(values: Iterable[float], fraction: bool = False) -> tuple[float, float]:
    """Return the limits of an axis with a margin: around the values, or around 0 to 1 if they are
    fractions.

    The limits cover at least 2 % of the largest value, so that rounding errors do not look like
    differences.
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = (
        (0.0, 1.0)
        if fraction and all(0 <= value <= 1 for value in finite)
        else (min(finite), max(finite))
    )
    least = 0.02 * max(abs(low), abs(high)) or 1.0
    if high - low > least:
        margin = 0.05 * (high - low)
    else:
        margin = (least - (high - low)) / 2
    return low - margin, high + margin


def legend(figure: Figure) -> None:
    """Add one legend for all axes at the bottom of the figure, and increase the height of the
    figure for it.
    """
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
    """Draw a matrix of values, rows from top to bottom, with a color range from 0 to `high`.

    Cells with None or NaN show a cross. Small matrices also show the values as text. `bar` is the
    label of a color bar; by default, there is none. If several panels have the same range, add a
    color bar to the last one only.
    """
    matrix = np.array([_numbers(row) for row in values], dtype=float).reshape(
        len(rows), len(columns)
    )
    image = axes.imshow(
        matrix, vmin=0, vmax=high, cmap=COLOR_MAP, aspect="auto", interpolation="none"
    )
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
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color
            )
    if bar is not None:
        drawn: Any = axes.figure.colorbar(image, ax=[axes], label=bar, pad=0.02)
        drawn.outline.set_visible(False)
        drawn.ax.tick_params(labelsize=8)


def png(picture: Picture) -> bytes:
    """Return the contents of a PNG file that shows a picture on a white background."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as for characters missing in the font
        picture.figure.savefig(content, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return content.getvalue()


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
