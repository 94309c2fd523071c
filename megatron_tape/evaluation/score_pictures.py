"""Pictures for several tasks: scores by context length or by group, heat maps of fractions, losses
by position.
"""

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
"""The results of one task by model label."""
_MOST_ROWS = 60
"""Maximum number of rows (groups and metrics) of `by_group`."""


def by_length(
    results: Results, metric: str, name: str, axis: str, steep: float = math.inf
) -> list[Picture]:
    """Return a picture of a metric by context length, with intervals; an empty list if no model has
    the metric.

    `name` is the file name, and `axis` the label of the y axis. The y axis is logarithmic if the
    largest value is more than `steep` times the smallest.
    """
    by_label = {
        label: [
            score for score in result.scores if score.metric == metric and score.length is not None
        ]
        for label, result in results.items()
    }
    groups = list(dict.fromkeys(score.group for scores in by_label.values() for score in scores))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        sentences = []
        lengths = set()
        values = []
        for label, scores in by_label.items():
            of_group = sorted(
                (score for score in scores if score.group == group), key=lambda score: score.length
            )
            if not of_group:
                continue
            x = [score.length for score in of_group]
            y = [score.value for score in of_group]
            curve(
                axes,
                looks[label],
                x,
                y,
                [score.low for score in of_group],
                [score.high for score in of_group],
            )
            lengths |= set(x)
            values += y
            sentences.append(
                f"{label}: " + ", ".join(f"{b:.4g} at {a:,} tokens" for a, b in zip(x, y))
            )
        length_axis(axes, lengths)
        if all(score.is_fraction for scores in by_label.values() for score in scores):
            axes.set_ylim(*limits((), fraction=True))
        elif 0 < steep * min(values) < max(values):
            log_scale(axes, "y")
        return sentences

    return _panels(groups, name, f"{axis.capitalize()} by context length", axis, draw)


def by_position(results: Results, name: str) -> list[Picture]:
    """Return a picture of mean losses by position in the first window of documents; an empty list
    without these data."""
    by_label = {
        label: result.details.get("loss_by_position", {}) for label, result in results.items()
    }
    groups = list(dict.fromkeys(group for curves in by_label.values() for group in curves))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        sentences = []
        for label, curves in by_label.items():
            if group not in curves:
                continue
            x = curves[group]["tokens_before"]
            y = curves[group]["loss"]
            # Markers at every point would hide the curve.
            style = {**looks[label], "markevery": max(1, len(x) // 8)}
            axes.plot(x, y, **style)
            ends = [np.mean(part) for part in (y[: max(1, len(y) // 4)], y[-max(1, len(y) // 4) :])]
            sentences.append(
                f"{label}: {ends[0]:.3f} over the first quarter of positions, {ends[1]:.3f} over"
                " the last"
            )
        axes.set_xlabel("number of tokens before")
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
        described.append(
            f"On {group}: {'; '.join(sentences)}." if group else f"{'; '.join(sentences)}."
        )
    legend(figure)
    return [Picture(name, f"{title}. {' '.join(described)}", figure)]


def by_group(
    results: Results, keep: Callable[[Score], bool], name: str, title: str
) -> list[Picture]:
    """Return a picture of the scores that `keep` selects, a row per group and metric; no picture
    without scores.
    """
    by_row: dict[str, dict[str, Score]] = {}
    for label, result in results.items():
        for score in filter(keep, result.scores):
            by_row.setdefault(f"{score.group} {score.metric}".strip(), {})[label] = score
    if not by_row:
        return []
    rows = list(by_row)[:_MOST_ROWS]
    looks = styles(results)
    sentences = []
    figure, (axes,) = new_figure(width=7.0, height=1.2 + (0.24 + 0.09 * len(results)) * len(rows))
    for number, (label, look) in enumerate(looks.items()):
        offset = (number - (len(looks) - 1) / 2) * 0.7 / max(2, len(looks))
        scores = {row: by_row[row][label] for row in rows if label in by_row[row]}
        y = [rows.index(row) + offset for row in scores]
        values = [score.value for score in scores.values()]
        axes.plot(values, y, **look | {"linestyle": "none"})
        spreads = list(zip(*(score.error_bar for score in scores.values())))
        axes.errorbar(
            values, y, xerr=spreads or None, fmt="none", ecolor=look["color"], elinewidth=1
        )
        sentences.append(
            f"{label}: {', '.join(f'{score.value:.4g} {row}' for row, score in scores.items())}."
        )
    axes.set_yticks(range(len(rows)), list(map(plain, rows)))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(plain(title, LONGEST_AXIS_LABEL))
    if all(score.is_fraction for scores in by_row.values() for score in scores.values()):
        axes.set_xlim(*limits((), fraction=True))
    legend(figure)
    if len(by_row) > len(rows):
        sentences.insert(0, f"The first {len(rows)} of {len(by_row):,} rows.")
        axes.set_title(sentences[0], fontsize=10)
    return [Picture(name, f"{title}. {' '.join(sentences)}", figure)]


def fraction_maps(
    results: Results,
    fractions: Callable[[TaskResult], Sequence[Sequence[float | None]]],
    names: Callable[[TaskResult], tuple[Sequence[str], Sequence[str]]],
    name: str,
    title: str,
    axes_labels: tuple[str, str] = ("", "context length (tokens)"),
) -> list[Picture]:
    """Return a picture with a heat map for each model.

    `fractions` returns a result's matrix of values from 0 to 1, and `names` the names of the rows
    and the columns.
    """
    figure, shown = model_panels(results, width=4.6, height=3.6)
    sentences = []
    for axes, (label, result) in zip(shown, results.items()):
        (rows, columns), matrix = names(result), fractions(result)
        labels = {"row_label": axes_labels[0], "column_label": axes_labels[1]}
        heat_map(
            axes, matrix, rows, columns, bar="fraction" if axes is shown[-1] else None, **labels
        )
        cells = [
            (x, f"{r}, {c}")
            for r, of in zip(rows, matrix)
            for c, x in zip(columns, of)
            if x is not None
        ]
        (least, at_least), (most, at_most) = min(cells), max(cells)
        sentences.append(f"{label}: from {least:.2f} ({at_least}) to {most:.2f} ({at_most}).")
    return [Picture(name, f"{title}. {' '.join(sentences)}", figure)]
