"""Pictures of a ladder: losses and their differences from the baseline, along model size and
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import VariantResult
from megatron_tape.evaluation.ladder_file import Ladder, LadderPoint
from megatron_tape.evaluation.report.ladder_results import Series, language_points
from megatron_tape.evaluation.task import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class PictureAxis:
    """The x axis of a picture, and what distinguishes the lines of a variant."""

    name: str
    value: Callable[[LadderPoint], int]
    line: Callable[[LadderPoint], str]
    """Points with the same value of this are connected."""


PICTURE_AXES = (
    PictureAxis("parameters", lambda point: point.parameters, lambda point: point.training),
    PictureAxis("tokens", lambda point: point.tokens, lambda point: point.size),
)
_CLOSEST = 0.1
"""Distance of error bars at the same point, in doublings of x."""
_WIDEST = 0.6
"""Maximum distance of the first from the last of them. Sizes are at least one doubling apart."""


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

    A variant has a line for each training or size; the darkest is the last in the ladder. Values
    are means over the seeds that all variants of a point have, so that a seed that only some have
    does not make these look better or worse.
    """
    shown = all_series[: figures.MOST_PANELS]
    ladder = shown[0].ladder
    encodings = {name: variant.partition("+")[0] for name, variant in ladder.variants.items()}
    with figures.model_encodings(encodings):
        looks = figures.styles(ladder.variants)
    what = f"difference from {ladder.baseline}" if differences else shown[0].subject.metric

    figure, panels = figures.panels(len(shown), width=4.4, height=3.4)
    descriptions = []
    for axes, series in zip(panels, shown):
        variants = series.compared if differences else series.variants
        if differences:
            axes.axhline(0, color=looks[ladder.baseline]["color"], linewidth=1)
        curves_of = {variant: _curves(series, axis, variant, differences) for variant in variants}
        # Intervals at the same x would cover each other.
        shifts = iter(_shifts(sum(map(len, curves_of.values()))))
        ends = []
        for variant, curves in curves_of.items():
            for curve in curves:
                shift = next(shifts) if differences else 1.0
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
        axes.set_xlabel(axis.name, fontsize=9)
        y_label = f"{what} ({series.subject.unit})"
        axes.set_ylabel(figures.plain(y_label, figures.LONGEST_AXIS_LABEL), fontsize=9)
        axes.set_title(figures.plain(series.name, figures.LONGEST_LABEL), fontsize=10)
        descriptions.append(f"{series.name}: {', '.join(ends)}")
        if axes is panels[0]:
            _explain_opacity(axes, list(_lines(ladder, axis)))
    figures.legend(figure)
    name = f"{'difference' if differences else 'loss'}-by-{axis.name}"
    description = f"{what.capitalize()} by {axis.name}. {'; '.join(descriptions)}."
    return [Picture(name, description, figure)]


def _shifts(count: int) -> list[float]:
    """Return factors of x that separate `count` points, with a mean of 0 doublings."""
    step = min(_CLOSEST, _WIDEST / max(1, count - 1))
    return [2 ** (step * (index - (count - 1) / 2)) for index in range(count)]


def _lines(ladder: Ladder, axis: PictureAxis) -> dict[str, list[LadderPoint]]:
    """Return the points of each line by what they have in common, such as `5 tokens per parameter`,
    in the order of the ladder.
    """
    lines = {}
    for point in language_points(ladder):
        lines.setdefault(axis.line(point), []).append(point)
    return lines


def _opacity(index: int, count: int) -> float:
    """Return the opacity of one of `count` lines of a variant."""
    return 0.3 + 0.7 * (index + 1) / count


def _explain_opacity(axes: Axes, names: Sequence[str]) -> None:
    """Add an entry to the legend for each line of a variant, if there are several."""
    if len(names) > 1:
        for index, name in enumerate(names):
            label = figures.plain(name, figures.LONGEST_LABEL)
            axes.plot([], [], color="black", alpha=_opacity(index, len(names)), label=label)


def _curves(series: Series, axis: PictureAxis, variant: str, differences: bool) -> list[_Curve]:
    """Return the lines of a variant: its means, or its differences from the baseline."""
    results = series.results()
    lines = _lines(series.ladder, axis)
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
                value = _shared_mean(result, results[point.name].values())
            y.append(value)
            low.append(estimate.low if estimate is not None else None)
            high.append(estimate.high if estimate is not None else None)
        curves.append(_Curve(points, y, low, high, _opacity(index, len(lines))))
    return curves


def _shared_mean(result: VariantResult, of_point: Iterable[VariantResult]) -> float:
    """Return the mean of a result over the seeds that all results of its point have; over all of
    its seeds if none is shared.
    """
    shared = set.intersection(*(set(other.values) for other in of_point))
    if not shared:
        return result.mean
    return sum(result.values[seed] for seed in shared) / len(shared)


def _short_count(value: float) -> str:
    """Return a number of parameters or tokens as text, such as `4.2M`."""
    # Rounded first, so that 999,700 is 1M instead of 1e+03k.
    rounded = float(f"{value:.3g}")
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= factor:
            return f"{rounded / factor:.3g}{unit}"
    return f"{rounded:g}"
