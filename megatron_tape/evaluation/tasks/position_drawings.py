"""Pictures of the task `positions`."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_tape.evaluation.figures import (
    COLOR_MAP,
    LONGEST_LABEL,
    heat_map,
    legend,
    log_scale,
    model_panels,
    new_figure,
    plain,
    shades,
)
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.score_pictures import by_group
from megatron_tape.evaluation.task import Picture

_CURVES = 6
_MOST_TOKENS = 4096
"""Of an attention map."""


def draw(results: dict[str, TaskResult]) -> list[Picture]:
    """Return the pictures of several models' results by their labels."""
    pictures = [_distances(results), _by_position(results), _similarities(results)]
    title = "increase of the loss with RoPE's phases in a layer"
    pictures += by_group(results, lambda score: score.metric == "loss_increase", "positions-ablation", title)
    return [*pictures, _changes(results)] + [
        _maps(index, label, result) for index, (label, result) in enumerate(results.items())
    ]


def _heat_maps(values: dict[str, list[list[float]]], column: str, bar: str, high: float) -> tuple[Any, str]:
    """Return a figure of matrices (layers, columns) by the models' labels, and where each is highest."""
    figure, panels = model_panels(values)
    said = []
    for axes, (label, matrix) in zip(panels, values.items()):
        rows, columns = np.shape(matrix)
        names = {"row_label": "layer", "column_label": column, "bar": bar if axes is panels[-1] else None}
        heat_map(axes, matrix, range(rows), range(columns), high=high, **names)
        layer, at = np.unravel_index(np.argmax(matrix), (rows, columns))
        said.append(f"{label}: at most {np.max(matrix):.3g}, in layer {layer}, {column} {at}")
    return figure, "; ".join(said)


def _distances(results: dict[str, TaskResult]) -> Picture:
    distances = {label: result.details["distance"] for label, result in results.items()}
    high = max(np.max(distance) for distance in distances.values()) or 1.0
    figure, said = _heat_maps(distances, "head group", "|z - z0| / |z0|", high)
    text = "Heat map of the mean distance of the position state from RoPE's phases by layer and head group. "
    return Picture("positions-distance", f"{text}{said}.", figure)


def _by_position(results: dict[str, TaskResult]) -> Picture:
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        _layer_curves(axes, result.details["positions"], result.details["distance_by_position"])
        axes.set(xlabel="position", ylabel="|z - z0| / |z0|")
        axes.set_ylim(bottom=0)
    legend(figure)
    text = "Distance of the position state from RoPE's phases along the document, one curve per layer, for "
    return Picture("positions-along", f"{text}{', '.join(results)}.", figure)


def _similarities(results: dict[str, TaskResult]) -> Picture:
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        details = result.details
        _layer_curves(axes, details["distances"], details["similarity"])
        # What layer 0 reads are RoPE's phases themselves.
        axes.plot(details["distances"], details["similarity"][0], color="0.5", linestyle="--", label="RoPE")
        log_scale(axes, "x", 2)
        axes.set(xlabel="distance of two tokens", ylabel="similarity of their states", ylim=(0, 1.02))
    legend(figure)
    text = "Similarity of the states of two tokens by their distance, one curve per layer beside RoPE's, for "
    return Picture("positions-similarity", f"{text}{', '.join(results)}.", figure)


def _layer_curves(axes: Any, x: list[float], layers: list[list[float]]) -> None:
    """Draw the curves of some layers but the first."""
    later = range(1, len(layers))
    shown = sorted({later[at] for at in np.linspace(0, len(later) - 1, min(_CURVES, len(later))).astype(int)})
    for layer, color in zip(shown, shades(len(shown))):
        axes.plot(x, layers[layer], color=color, linewidth=1.4, label=f"layer {layer}")


def _changes(results: dict[str, TaskResult]) -> Picture:
    changes = {label: result.details["maps"]["change"] for label, result in results.items()}
    figure, said = _heat_maps(changes, "head", "share of attention that moves", high=1.0)
    text = "Heat map of the share of attention that the position state moves, by layer and head, compared with RoPE's "
    return Picture("positions-attention", f"{text}phases in its place. {said}.", figure)


def _maps(index: int, label: str, result: TaskResult) -> Picture:
    shown = result.details["maps"]["shown"]
    figure, axes = new_figure(2, len(shown), width=3, height=3)
    for axis, (kind, one) in zip(axes, [(kind, one) for kind in ("state", "phases") for one in shown]):
        size = len(one[kind])
        if size > _MOST_TOKENS:
            raise ValueError(f"a map has {size:,} tokens, and at most {_MOST_TOKENS:,} are drawn")
        weights = np.full((size, size), np.nan)
        for row, seen in enumerate(one[kind]):
            weights[row, : len(seen)] = seen
        # A square root shows small shares of attention, too.
        axis.imshow(np.sqrt(weights), vmin=0, vmax=1, cmap=COLOR_MAP, interpolation="none")
        axis.grid(False)
        name = "its state" if kind == "state" else "RoPE's phases"
        axis.set_title(f"layer {one['layer']}, head {one['head']}: {name}", fontsize=9)
        axis.set(xlabel="key", ylabel="query")
    figure.suptitle(plain(label, LONGEST_LABEL), fontsize=10)
    heads = ", ".join(f"head {one['head']} of layer {one['layer']}" for one in shown)
    text = (
        f"Attention maps of {label}, with its position state above and with RoPE's phases in its place below: {heads}."
    )
    return Picture(f"positions-maps-{index}", text, figure)
