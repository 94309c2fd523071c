"""Pictures of a ladder: losses and their differences from the baseline, along model size and
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.ladder_file import LadderPoint
from megatron_tape.evaluation.report.ladder_results import Series, language_points
from megatron_tape.evaluation.task import Picture


@dataclass(frozen=True)
class PictureAxis:
    """The x axis of a picture, and what distinguishes the lines of a variant."""

    name: str
    value: Callable[[LadderPoint], int]
    line: Callable[[LadderPoint], str]
    """Points with the same value of this are connected."""
    darker: str
    """What the darker lines of a variant have more of."""


PICTURE_AXES = (
    PictureAxis(
        "parameters",
        lambda point: point.parameters,
        lambda point: point.training,
        "tokens per parameter",
    ),
    PictureAxis("tokens", lambda point: point.tokens, lambda point: point.size, "parameters"),
)


@dataclass(frozen=True)
class _Curve:
    """A line of a picture: values by point, with the ends of their intervals."""

    points: list[LadderPoint]
    y: list[float | None]
    low: list[float | None]
    high: list[float | None]
    alpha: float
    """Opacity, 1 for the last line of a variant."""


def picture(
    all_series: Sequence[Series], axis: PictureAxis, differences: bool = False
) -> list[Picture]:
    """Return a picture with a panel for each series: its values, or their `differences` from the
    baseline with 95 % intervals, along an axis.

    A variant has a line for each training or size; the darkest is the last in the ladder.
    """
    shown = all_series[: figures.MOST_PANELS]
    ladder = shown[0].ladder
    encodings = {name: variant.partition("+")[0] for name, variant in ladder.variants.items()}
    with figures.model_encodings(encodings):
        looks = figures.styles(ladder.variants)
    line_count = len({axis.line(point) for point in language_points(ladder)})
    x_label = axis.name
    if line_count > 1:
        x_label += f" (darker: more {axis.darker})"
    what = f"difference from {ladder.baseline}" if differences else shown[0].subject.metric

    figure, panels = figures.panels(len(shown), width=4.4, height=3.4)
    descriptions = []
    for axes, series in zip(panels, shown):
        variants = series.compared if differences else series.variants
        if differences:
            axes.axhline(0, color=looks[ladder.baseline]["color"], linewidth=1)
        ends = []
        for index, variant in enumerate(variants):
            # Intervals of several variants at the same point would cover each other.
            shift = 1.0
            if differences:
                shift = 2 ** (0.1 * (index - (len(variants) - 1) / 2))
            curves = _curves(series, axis, variant, differences)
            for curve in curves:
                # Each variant has one entry in the legend.
                label = looks[variant]["label"] if curve is curves[-1] else "_nolegend_"
                figures.curve(
                    axes,
                    looks[variant] | {"alpha": curve.alpha, "label": label},
                    [shift * axis.value(point) for point in curve.points],
                    curve.y,
                    curve.low if differences else None,
                    curve.high if differences else None,
                )
            known = [value for curve in curves for value in curve.y if value is not None]
            if known:
                ends.append(f"{variant} {min(known):.4g} to {max(known):.4g}")

        figures.log_ticks(axes, map(axis.value, series.points), _short_count)
        if len(series.points) > 6:  # their labels may overlap
            axes.tick_params(axis="x", rotation=45)
        axes.set_xlabel(figures.plain(x_label, figures.LONGEST_AXIS_LABEL), fontsize=9)
        y_label = f"{what} ({series.subject.unit})"
        axes.set_ylabel(figures.plain(y_label, figures.LONGEST_AXIS_LABEL), fontsize=9)
        axes.set_title(figures.plain(series.name, figures.LONGEST_LABEL), fontsize=10)
        descriptions.append(f"{series.name}: {', '.join(ends)}")
    figures.legend(figure)
    name = f"{'difference' if differences else 'loss'}-by-{axis.name}"
    description = f"{what.capitalize()} by {axis.name}. {'; '.join(descriptions)}."
    return [Picture(name, description, figure)]


def _curves(series: Series, axis: PictureAxis, variant: str, differences: bool) -> list[_Curve]:
    """Return the lines of a variant: its means, or its differences from the baseline."""
    results = series.results()
    # The points of each line, in the order of the ladder.
    lines = {}
    for point in language_points(series.ladder):
        lines.setdefault(axis.line(point), []).append(point)

    curves = []
    for index, points in enumerate(lines.values()):
        y = []
        low = []
        high = []
        for point in points:
            result = results.get(point.name, {}).get(variant)
            value = None
            estimate = None
            if result is not None and differences:
                estimate = result.difference
                value = estimate.value if estimate is not None else None
            elif result is not None:
                value = result.mean
            y.append(value)
            low.append(estimate.low if estimate is not None else None)
            high.append(estimate.high if estimate is not None else None)
        alpha = 0.3 + 0.7 * (index + 1) / len(lines)
        curves.append(_Curve(points, y, low, high, alpha))
    return curves


def _short_count(value: float) -> str:
    """Return a number of parameters or tokens as text, such as `4.2M`."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:g}"
