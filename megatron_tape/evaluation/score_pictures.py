"""Pictures for several tasks: scores by context length or by group, heat maps of fractions, losses
by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
"""Maximum number of rows (groups and metrics) of `pictures_by_group`."""


def pictures_by_length(
    results: Results,
    metric: str,
    file_name: str,
    y_label: str,
    log_ratio: float = math.inf,
) -> list[Picture]:
    """Return a picture of a metric by context length, with intervals and a panel for each group; an
    empty list if no model has the metric.

    `file_name` has no suffix. The y axis is logarithmic if the largest value is more than
    `log_ratio` times the smallest, so never by default.
    """
    shown = [
        score
        for result in results.values()
        for score in result.scores
        if score.metric == metric and score.length is not None
    ]
    groups = list(dict.fromkeys(score.group for score in shown))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        """Draw the curves of all models on one group; describe each in a sentence."""
        sentences = []
        lengths = []
        values = []
        for label, result in results.items():
            scores = {
                score.length: score
                for score in result.scores
                if (score.metric, score.group) == (metric, group) and score.length is not None
            }
            if not scores:
                continue

            x = sorted(scores)
            y = [scores[length].value for length in x]
            low = [scores[length].low for length in x]
            high = [scores[length].high for length in x]
            curve(axes, looks[label], x, y, low, high)
            lengths += x
            values += y
            points = [f"{value:.4g} at {length:,} tokens" for length, value in zip(x, y)]
            sentences.append(f"{label}: {', '.join(points)}")

        length_axis(axes, lengths)
        # Panels share the y axis, so the scores of all groups decide whether its limits are around
        # 0 to 1, which `limits` returns for fractions without values.
        if all(score.is_fraction for score in shown):
            axes.set_ylim(*limits((), fraction=True))
        # A logarithmic axis needs positive values.
        elif 0 < log_ratio * min(values) < max(values):
            log_scale(axes, "y")
        return sentences

    title = f"{y_label.capitalize()} by context length"
    return _group_panels(groups, draw, file_name, title, y_label)


def pictures_by_position(results: Results, file_name: str) -> list[Picture]:
    """Return a picture of mean losses by position in the first window of documents; an empty list
    without these data."""
    # The curves of each model by group: `tokens_before`, and the mean `loss` after so many tokens.
    by_label = {
        label: result.details.get("loss_by_position", {}) for label, result in results.items()
    }
    groups = list(dict.fromkeys(group for curves in by_label.values() for group in curves))
    looks = styles(results)

    def draw(axes: Axes, group: str) -> list[str]:
        """Draw the curves of all models on one group; describe each in a sentence."""
        sentences = []
        for label, curves in by_label.items():
            if group not in curves:
                continue
            losses = curves[group]["loss"]
            # Markers at every point would hide the curve.
            style = looks[label] | {"markevery": max(1, len(losses) // 8)}
            axes.plot(curves[group]["tokens_before"], losses, **style)
            quarter = max(1, len(losses) // 4)
            sentences.append(
                f"{label}: {np.mean(losses[:quarter]):.3f} over the first quarter of positions,"
                f" {np.mean(losses[-quarter:]):.3f} over the last"
            )
        axes.set_xlabel("number of tokens before")
        return sentences

    return _group_panels(
        groups, draw, file_name, title="Loss by position", y_label="loss (nats per token)"
    )


def _group_panels(
    groups: list[str],
    draw: Callable[[Axes, str], list[str]],
    file_name: str,
    title: str,
    y_label: str,
) -> list[Picture]:
    """Return a picture with a panel for each group; an empty list without groups.

    `draw` draws the panel of a group, and returns sentences that describe it. `title` begins the
    description of the picture.
    """
    if not groups:
        return []
    figure, shown = panels(min(len(groups), MOST_PANELS), sharey=True)
    descriptions = []
    if len(groups) > MOST_PANELS:
        descriptions.append(f"The first {MOST_PANELS} of {len(groups):,} panels.")
        figure.suptitle(descriptions[0], fontsize=10)
    for axes, group in zip(shown, groups):
        description = f"{'; '.join(draw(axes, group))}."
        if group:
            description = f"On {group}: {description}"
        descriptions.append(description)
        axes.set_title(plain(group, LONGEST_LABEL), fontsize=10)
        axes.set_ylabel(plain(y_label, LONGEST_AXIS_LABEL))
    legend(figure)
    return [Picture(file_name, f"{title}. {' '.join(descriptions)}", figure)]


def pictures_by_group(
    results: Results, is_shown: Callable[[Score], bool], file_name: str, x_label: str
) -> list[Picture]:
    """Return a picture of the scores for which `is_shown` is true, with a row for each group and
    metric; an empty list without such scores.

    At most the first `_MOST_ROWS` rows are shown. `x_label` also begins the description.
    """
    # Scores by model label and by the name of their row.
    by_label = {}
    for label, result in results.items():
        shown_scores = filter(is_shown, result.scores)
        by_label[label] = {f"{score.group} {score.metric}".strip(): score for score in shown_scores}
    all_rows = dict.fromkeys(row for scores in by_label.values() for row in scores)
    if not all_rows:
        return []

    rows = list(all_rows)[:_MOST_ROWS]
    # In inches: the axis and its label, and rows with a point for each model.
    height = 1.2 + (0.24 + 0.09 * len(results)) * len(rows)
    figure, (axes,) = new_figure(width=7.0, height=height)
    sentences = []
    for number, (label, look) in enumerate(styles(results).items()):
        # The points of models in one row are spread around its middle, at most 0.7 rows apart, so
        # that they do not cover each other.
        middle = (len(results) - 1) / 2
        offset = (number - middle) * 0.7 / max(2, len(results))
        scores = {row: score for row, score in by_label[label].items() if row in rows}
        values = [score.value for score in scores.values()]
        heights = [rows.index(row) + offset for row in scores]
        axes.plot(values, heights, **look | {"linestyle": "none"})
        for score, y in zip(scores.values(), heights):
            if score.low is not None and score.high is not None:
                axes.plot(
                    [score.low, score.high],
                    [y, y],
                    color=look["color"],
                    linewidth=1,
                )
        shown = [f"{score.value:.4g} {row}" for row, score in scores.items()]
        sentences.append(f"{label}: {', '.join(shown)}.")

    axes.set_yticks(range(len(rows)), [plain(row) for row in rows])
    # The first row is at the top.
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(plain(x_label, LONGEST_AXIS_LABEL))
    # Without values, the limits of fractions are around 0 to 1.
    if all(score.is_fraction for scores in by_label.values() for score in scores.values()):
        axes.set_xlim(*limits((), fraction=True))
    legend(figure)
    return [Picture(file_name, f"{x_label}. {' '.join(sentences)}", figure)]


def fraction_maps(
    results: Results,
    matrix_of: Callable[[TaskResult], tuple[list, list, list]],
    file_name: str,
    title: str,
    axes_labels: tuple[str, str] = ("", "context length (tokens)"),
) -> list[Picture]:
    """Return a picture with a heat map for each model.

    `matrix_of` returns a model's matrix of values from 0 to 1, or None for cells without samples,
    and the names of its rows and of its columns. `axes_labels` are what rows and columns stand for.
    """
    row_label, column_label = axes_labels
    figure, shown = model_panels(results, width=4.6, height=3.6)
    sentences = []
    for axes, (label, result) in zip(shown, results.items()):
        matrix, rows, columns = matrix_of(result)
        # Panels have the same range, so one color bar is enough.
        bar_label = "fraction" if axes is shown[-1] else None
        heat_map(
            axes,
            matrix,
            rows,
            columns,
            row_label=row_label,
            column_label=column_label,
            bar=bar_label,
        )

        # Cells without samples have no value.
        cells = [
            (value, f"{row}, {column}")
            for row, values in zip(rows, matrix)
            for column, value in zip(columns, values)
            if value is not None
        ]
        lowest, lowest_place = min(cells)
        highest, highest_place = max(cells)
        sentences.append(
            f"{label}: from {lowest:.2f} ({lowest_place}) to {highest:.2f} ({highest_place})."
        )
    return [Picture(file_name, f"{title}. {' '.join(sentences)}", figure)]
