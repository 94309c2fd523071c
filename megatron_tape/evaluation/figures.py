"""The style of pictures: the color of each encoding, heat maps, axes of lengths.

Tasks draw with matplotlib's objects, without pyplot and global styles. matplotlib is imported with
the first figure.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "wall": "#604ea2",
    "selective_rope": "#8cb866",
    "selective_rope_fox": "#4d0dff",
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
ON_DARK = "#fdfdfd"
ON_LIGHT = "#050505"
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
"""The encoding of each model, by label, within `model_encodings`; None if it is unknown."""
DOTS_PER_INCH = 150


def styles(labels: Iterable[str]) -> dict[str, dict]:
    """Return the plot style of each model: `axes.plot(x, y, **styles(results)[label])`.

    The color is that of the model's encoding, as set by `model_encodings`. Models of one encoding
    differ in shade and line style. The keys are `color`, `marker`, `markersize`, `linestyle`,
    `linewidth` and `label`. Use `label` in legends and titles: it is short, and contains no markup
    of matplotlib.
    """
    labels = list(labels)
    encodings = dict(_ENCODINGS.get())
    # Models set by `model_encodings` come first, so that their styles do not depend on `labels`.
    for label in labels:
        encodings.setdefault(label, None)
    # Models of unknown encodings never get the colors of RoPE and TAPE.
    other_colors = itertools.cycle(
        color for name, color in ENCODING_COLORS.items() if name not in ("rope", "tape")
    )

    uses = Counter()  # the number of models so far with each color
    looks = {}
    for index, (label, encoding) in enumerate(encodings.items()):
        color = ENCODING_COLORS.get(encoding or "") or next(other_colors)
        # If two labels are equal after shortening, the second one gets a number.
        shown = plain(label, LONGEST_LABEL)
        if any(look["label"] == shown for look in looks.values()):
            # The number, with brackets and space, takes at most 6 characters.
            shown = f"{plain(label, LONGEST_LABEL - 6)} ({index + 1})"
        looks[label] = {
            "color": shade(color, uses[color]),
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
            "linestyle": LINES[uses[color] % len(LINES)],
            "linewidth": 1.6,
            "label": shown,
        }
        uses[color] += 1
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


def variant_styles(variants: Iterable[str]) -> dict[str, dict]:
    """Return the plot styles of variants named as in `comparison.json`, such as
    `tape+increments=signed`.
    """
    variants = list(variants)
    with model_encodings({variant: variant.partition("+")[0] for variant in variants}):
        return styles(variants)


def encoding_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of a model's positional encoding, given its `config.json` or the section
    `model` of its run; None if it is unknown.
    """
    for key in ("position_encoding", "model_type"):
        # A list, because values from files, such as lists, may not be hashable.
        if config.get(key) in list(ENCODING_COLORS):
            return config[key]
    # Models of transformers, such as Llama.
    if "rope_theta" in config or "rope_parameters" in config:
        return "rope"
    return None


def shade(color: str, number: int) -> str:
    """Return a shade of `color`: 0 is the color itself, and larger numbers cycle through
    `BLENDS`.
    """
    gray, fraction = BLENDS[number % len(BLENDS)]
    channels = np.array(list(bytes.fromhex(color[1:])))
    # Channels are from 0 to 255, and `gray` is from 0 to 1.
    blended = (1 - fraction) * channels + fraction * 255 * gray
    return "#" + bytes(map(round, blended)).hex()


def shades(count: int) -> list[tuple[float, ...]]:
    """Return `count` RGBA colors for ordered curves, such as those of layers."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("shades", SHADES)
    return [colors(index / max(1, count - 1)) for index in range(count)]


def clean(text: str, longest: int = 10_000) -> str:
    """Return a text as one line of at most `longest` characters, with an ellipsis in the middle if
    it is longer, and with a replacement for characters that pages and pictures cannot show."""
    text = " ".join(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text).split())
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2  # 1 for the ellipsis
    return text[: longest - 1 - tail] + "\N{HORIZONTAL ELLIPSIS}" + text[len(text) - tail :]


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
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = 4.6,
    height: float = 3.2,
    **subplots: Any,
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

    # Labels come from files, and a single $ would raise an error.
    matplotlib.rcParams["text.parse_math"] = False
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    # A figure needs a canvas, which pyplot would create. The canvas connects itself to the figure.
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **subplots)

    axes = grid.ravel().tolist()
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, linewidth=0.6, alpha=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=9)
    return figure, axes


def panels(count: int, columns: int = 3, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes in rows of at most `columns`."""
    columns = max(1, min(count, columns))
    figure, axes = new_figure(math.ceil(count / columns), columns, **options)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def model_panels(labels: Iterable[str], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with one titled panel for each model."""
    labels = list(labels)
    figure, axes = panels(len(labels), **options)
    for panel, label in zip(axes, labels):
        panel.set_title(plain(label, LONGEST_LABEL), fontsize=10)
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
    # NumPy converts None to NaN, which matplotlib leaves out.
    values = np.array(y, dtype=float)
    axes.plot(x, values, **style)
    if low is not None and high is not None:
        # Rounding may put a value slightly outside of its interval, and matplotlib refuses negative
        # lengths of error bars.
        below = values - np.array(low, dtype=float)
        above = np.array(high, dtype=float) - values
        distances = np.clip([below, above], 0, None)
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
    log_ticks(axes, lengths, length_name)
    axes.set_xlabel("context length (tokens)")


def log_ticks(axes: Axes, values: Iterable[int], name: Callable[[int], str]) -> None:
    """Make the x axis logarithmic, with ticks at no more than ten of the `values`. `name` returns
    the label of a value.
    """
    from matplotlib.ticker import NullLocator

    known = sorted(set(values))
    # At least 1, since the step of a slice must not be 0.
    shown = known[:: math.ceil(len(known) / 10) or 1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [name(value) for value in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def log_scale(axes: Axes, which: Literal["x", "y"], base: float = 10) -> None:
    """Make an axis logarithmic, with plain numbers instead of matplotlib's powers at its ticks.

    With base 2, the numbers are exact, such as 131,072 instead of 1e+05.
    """
    from matplotlib.ticker import FuncFormatter, LogFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = axes.xaxis if which == "x" else axes.yaxis
    formatter: Any = LogFormatter(base)
    if base == 2:
        # With 12 digits, no number below 10**12 has an exponent.
        formatter = FuncFormatter(lambda value, _: f"{value:,.12g}")
    axis.set_major_formatter(formatter)
    axis.set_minor_formatter(formatter)


def length_name(length: int) -> str:
    """Return a length in tokens as text, such as 1K for 1024 and 1,000 for 1000."""
    if length >= 1024 and length % 1024 == 0:
        return f"{length // 1024:,}K"
    return f"{length:,}"


def limits(values: Iterable[float], fraction: bool) -> tuple[float, float]:
    """Return the limits of an axis with a margin: around the values, or around 0 to 1 if they are
    fractions.

    The limits cover at least 2 % of the largest value, so that rounding errors do not look like
    differences.
    """
    finite = [value for value in values if math.isfinite(value)]
    if fraction and all(0 <= value <= 1 for value in finite):
        finite = [0.0, 1.0]
    low = min(finite)
    high = max(finite)
    # The shortest length of the axis without margins; 1 if all values are 0.
    shortest = 0.02 * max(abs(low), abs(high)) or 1.0
    # 5 % at each end, or more if the range is shorter than `shortest`.
    margin = max(0.05 * (high - low), (shortest - (high - low)) / 2)
    return low - margin, high + margin


def legend(figure: Figure) -> None:
    """Add one legend for all axes at the bottom of the figure, and increase the height of the
    figure for it.
    """
    handles = {}
    # Panels share most labels; each is shown once.
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    longest = max(map(len, handles))

    # An inch has room for 12 characters. The line and the space of an entry take that of 6.
    fitting = int(figure.get_figwidth() * 12 / (longest + 6))
    columns = max(1, min(len(handles), fitting))
    rows = math.ceil(len(handles) / columns)
    # A row is 0.2 inches high.
    figure.set_figheight(figure.get_figheight() + 0.2 * rows + 0.1)
    figure.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=2.4,
    )


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
    label of a color bar; None for no color bar. If several panels have the same range, add a color
    bar to the last one only.
    """
    # NumPy converts None to NaN. `reshape` gives a matrix without rows its number of columns.
    matrix = np.array(values, dtype=float).reshape(len(rows), len(columns))

    image = axes.imshow(
        matrix,
        vmin=0,
        vmax=high,
        cmap=COLOR_MAP,
        aspect="auto",
        interpolation="none",
    )
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9)
    axes.set(xlabel=column_label, ylabel=row_label)

    # At most 12 names fit along an axis.
    for set_ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        shown = range(0, len(names), math.ceil(len(names) / 12) or 1)
        set_ticks(shown, [plain(str(names[index])) for index in shown])
    # Names with more characters in total would overlap, so they are rotated.
    if sum(len(label.get_text()) for label in axes.get_xticklabels()) > 44:
        axes.tick_params(axis="x", rotation=45)

    if matrix.size <= CELLS_WITH_TEXT:
        for (row, column), value in np.ndenumerate(matrix):
            text = "\N{MULTIPLICATION SIGN}" if np.isnan(value) else f"{value:.2f}"
            # Weights of red, green and blue in perceived brightness (ITU-R BT.601).
            luminance = np.dot(image.to_rgba(value)[:3], (0.299, 0.587, 0.114))
            color = ON_LIGHT if luminance > 0.5 or np.isnan(value) else ON_DARK
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color=color,
            )

    if bar is not None:
        drawn: Any = axes.figure.colorbar(
            image,
            ax=[axes],
            label=bar,
            pad=0.02,
        )
        drawn.outline.set_visible(False)
        drawn.ax.tick_params(labelsize=8)


def png(picture: Picture) -> bytes:
    """Return the contents of a PNG file that shows a picture on a white background."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as for characters missing in the font
        picture.figure.savefig(
            content,
            format="png",
            dpi=DOTS_PER_INCH,
            facecolor="white",
        )
    return content.getvalue()
