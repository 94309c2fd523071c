"""Pictures that several tasks share: scores by context length or by group, shares as heat maps, losses by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_tape.evaluation.figures import (
    LONGEST_AXIS_LABEL,
    LONGEST_LABEL,
    MOST_PANELS,
    curve,
    heat_map,
    legend,
    length_axis,
    limits,
    log_scale,
    model_panels,
    new_figure,
    panels,
    plain,
    styles,
)
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.task import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = dict[str, TaskResult]
"""The results of one task by the models' labels."""
_MOST_ROWS = 60


def by_length(results: Results, metric: str, name: str, axis: str, steep: float = math.inf) -> list[Picture]:
    """Return a picture of a metric by context length with intervals; none if no model has the metric.

    The y axis is logarithmic if the largest value is more than `steep` times the smallest.
    """
    found = {
        label: [score for score in result.scores if score.metric == metric and score.length is not None]
        for label, result in results.items()
    }
    groups = list(dict.fromkeys(score.group for scores in found.values() for score in scores))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        sentences, lengths, values = [], set(), []
        for label, scores in found.items():
            rows = sorted((score for score in scores if score.group == group), key=lambda score: score.length)
            if not rows:
                continue
            x, y = [row.length for row in rows], [row.value for row in rows]
            curve(axes, looks[label], x, y, [row.low for row in rows], [row.high for row in rows])
            lengths |= set(x)
            values += y
            sentences.append(f"{label}: " + ", ".join(f"{b:.4g} at {a:,} tokens" for a, b in zip(x, y)))
        length_axis(axes, lengths)
        if all(score.is_fraction for scores in found.values() for score in scores):
            axes.set_ylim(*limits((), share=True))
        elif 0 < steep * min(values) < max(values):
            log_scale(axes, "y")
        return sentences

    return _panels(groups, name, f"{axis.capitalize()} by context length", axis, draw)


def by_position(results: Results, name: str) -> list[Picture]:
    """Return a picture of mean losses by position in the first window of documents; none without such data."""
    found = {label: result.details.get("loss_by_position", {}) for label, result in results.items()}
    groups = list(dict.fromkeys(group for curves in found.values() for group in curves))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        sentences = []
        for label, curves in found.items():
            if group not in curves:
                continue
            x, y = curves[group]["tokens_before"], curves[group]["loss"]
            # Markers at every point would hide the curve.
            style = {**looks[label], "markevery": max(1, len(x) // 8)}
            axes.plot(x, y, **style)
            ends = [np.mean(part) for part in (y[: max(1, len(y) // 4)], y[-max(1, len(y) // 4) :])]
            sentences.append(f"{label}: {ends[0]:.3f} over the first quarter of positions, {ends[1]:.3f} over the last")
        axes.set_xlabel("tokens before")
        return sentences

    return _panels(groups, name, "Loss by position", "loss (nats per token)", draw)


def _panels(
    groups: list[str], name: str, title: str, axis: str, draw: Callable[[Axes, str], list[str]]
) -> list[Picture]:
    if not groups:
        return []
    figure, shown = panels(min(len(groups), MOST_PANELS), sharey=True)
    described = []
    if len(groups) > MOST_PANELS:
        described.append(f"The first {MOST_PANELS} of {len(groups):,} panels.")
        figure.suptitle(described[0], fontsize=10)
    for axes, group in zip(shown, groups):
        sentences = draw(axes, group)
        axes.set_title(plain(group, LONGEST_LABEL), fontsize=10)
        axes.set_ylabel(plain(axis, LONGEST_AXIS_LABEL))
        described.append(f"On {group}: {'; '.join(sentences)}." if group else f"{'; '.join(sentences)}.")
    legend(figure)
    return [Picture(name, f"{title}. {' '.join(described)}", figure)]


def by_group(results: Results, keep: Callable[[Score], bool], name: str, title: str) -> list[Picture]:
    """Return a picture of the scores selected by `keep`, with a row for each group and metric; none without any."""
    found: dict[str, dict[str, Score]] = {}
    for label, result in results.items():
        for score in filter(keep, result.scores):
            found.setdefault(f"{score.group} {score.metric}".strip(), {})[label] = score
    if not found:
        return []
    rows, looks, told = list(found)[:_MOST_ROWS], styles(results), []
    figure, (axes,) = new_figure(width=7.0, height=1.2 + (0.24 + 0.09 * len(results)) * len(rows))
    for number, (label, look) in enumerate(looks.items()):
        offset = (number - (len(looks) - 1) / 2) * 0.7 / max(2, len(looks))
        scores = {row: found[row][label] for row in rows if label in found[row]}
        places, values = [rows.index(row) + offset for row in scores], [score.value for score in scores.values()]
        axes.plot(values, places, **look | {"linestyle": "none"})
        spreads = list(zip(*(score.error_bar for score in scores.values())))
        axes.errorbar(values, places, xerr=spreads or None, fmt="none", ecolor=look["color"], elinewidth=1)
        told.append(f"{label}: {', '.join(f'{score.value:.4g} {row}' for row, score in scores.items())}.")
    axes.set_yticks(range(len(rows)), list(map(plain, rows)))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(plain(title, LONGEST_AXIS_LABEL))
    if all(score.is_fraction for scores in found.values() for score in scores.values()):
        axes.set_xlim(*limits((), share=True))
    legend(figure)
    if len(found) > len(rows):
        told.insert(0, f"The first {len(rows)} of {len(found):,} rows.")
        axes.set_title(told[0], fontsize=10)
    return [Picture(name, f"{title}. {' '.join(told)}", figure)]


def share_maps(
    results: Results,
    shares: Callable[[TaskResult], Sequence[Sequence[float | None]]],
    names: Callable[[TaskResult], tuple[Sequence[str], Sequence[str]]],
    name: str,
    title: str,
    axes_labels: tuple[str, str] = ("", "context length (tokens)"),
) -> list[Picture]:
    """Return a heat map of shares from 0 to 1 for each model; `names` returns the names of rows and columns."""
    figure, shown = model_panels(results, width=4.6, height=3.6)
    told = []
    for axes, (label, result) in zip(shown, results.items()):
        (rows, columns), matrix = names(result), shares(result)
        labels = {"row_label": axes_labels[0], "column_label": axes_labels[1]}
        heat_map(axes, matrix, rows, columns, bar="share" if axes is shown[-1] else None, **labels)
        cells = [(x, f"{r}, {c}") for r, of in zip(rows, matrix) for c, x in zip(columns, of) if x is not None]
        (least, at_least), (most, at_most) = min(cells), max(cells)
        told.append(f"{label}: from {least:.2f} ({at_least}) to {most:.2f} ({at_most}).")
    return [Picture(name, f"{title}. {' '.join(told)}", figure)]
