"""The task `positions`: how far a TAPE model's position states are from RoPE, and how much the loss
depends on them.

Layers are counted from 0. The state of a layer is the position state that it reads: layer 0 reads
RoPE's phases, layer 1 the output state of layer 0, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_tape.config.evaluation import TokenDtype
from megatron_tape.config.values import Count, PathText
from megatron_tape.errors import ConfigError
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
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_group
from megatron_tape.evaluation.statistics import bootstrap_mean, bootstrap_ratio
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.evaluation.tasks.text_sources import (
    TextSource,
    check_sources,
    find_sources,
    long_documents,
)

if TYPE_CHECKING:
    from torch import Tensor

MAPS = "maps"
"""Key of the unit that compares attention maps."""
_CURVES = 6
"""Maximum number of layers with a curve in a picture."""
_BUCKETS = 32
"""Number of ranges of positions over which distances from RoPE's phases are averaged."""
_DISTANCES = 24
"""Maximum number of distances between tokens at which similarities are measured."""
_SHOWN_HEADS = 3
_DIGITS = 3
_LENGTH = 1024

MODEL_TYPE = "tape"
"""The `model_type` of TAPE models in `config.json`."""


@dataclass(kw_only=True)
class PositionSettings:
    """Distance of a TAPE model's position states from RoPE, and dependence of the loss on them."""

    data: PathText
    """Documents: a file of JSON lines, text or parquet, the prefix of an indexed dataset, or a .bin
    file of token ids, as in perplexity."""
    token_dtype: TokenDtype = "uint16"
    """Type of the token ids in a .bin file without an index, as in perplexity."""
    text_key: str = "text"
    """Key of the text in JSON lines, or its column in parquet."""
    split: str | None = None
    """Fractions of an indexed dataset's documents for training, validation and test (see
    data.split). Only validation documents are used. Default: all documents."""
    documents: Count = 8
    """Maximum number of documents; the first ones that are long enough are used."""
    length: int | None = None
    """Number of tokens of each document that are used. Default: the training length, or 1024 if the
    model's configuration does not contain it."""
    ablation: bool = True
    """Also compute the loss with RoPE's phases instead of the state of one layer, for each layer,
    and of all layers. This takes one forward pass per layer and document."""
    map_tokens: Count = 64
    """Number of tokens in attention maps: the first ones of the first document."""


class PositionPictures(Task):
    """Distances of states from RoPE's phases, similarities of states, and effects of states on
    attention and loss.
    """

    name = "positions"
    Settings = PositionSettings
    needs_tokenizer = False
    generates: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        model_type = info.config.get("model_type")
        if model_type != MODEL_TYPE:
            raise ConfigError(
                self.name,
                f"requires a TAPE model, but {info.label} has the model_type {model_type}",
                "remove the task, or evaluate a TAPE model",
            )
        length = self._length(info)
        if length < 2:
            raise ConfigError(self.key("length"), f"is {length}", "set it to at least 2")
        check_sources(self._sources(), info, settings.text_key, length, settings.documents)

    def inputs(self) -> list[Path]:
        return [file for source in self._sources() for file in source.files]

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        self._tokens = self._read(model)
        length = self._length(model.info)
        layers = model.info.config["num_hidden_layers"]
        cost = float(length * (1 + (layers if self.settings.ablation else 0)))
        documents = [Unit(f"document/{index}", cost) for index in range(len(self._tokens))]
        return [*documents, Unit(MAPS, 2.0 * min(self.settings.map_tokens, length))]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        import torch

        index = 0 if unit.key == MAPS else int(unit.key.partition("/")[2])
        tokens = torch.from_numpy(self._tokens[index]).to(model.device)[None]
        if unit.key == MAPS:
            return self._maps(model.model, tokens)
        return self._document(model.model, tokens)

    def _document(self, model: Any, tokens: Tensor) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks import position_probes as probes

        distances = distances_of(tokens.shape[1])
        found: dict[str, Any] = {
            "tokens": tokens.shape[1] - 1,
            "distance": [],
            "by_position": [],
            "similarity": [],
        }

        def on_state(_: int, state: Tensor, phases: Tensor) -> None:
            distance = probes.relative_distance(state, phases)
            found["distance"].append(distance.mean(0).tolist())
            parts = np.array_split(distance.mean(1), min(_BUCKETS, len(distance)))
            found["by_position"].append([float(part.mean()) for part in parts])
            found["similarity"].append(probes.similarity(state, distances))

        with probes.watching(model, on_state):
            found["loss"] = float(probes.losses(model, tokens).sum())
        if self.settings.ablation:
            layers = range(1, len(probes.layers_of(model)))
            # Layer 0 always reads RoPE's phases.
            found["ablated"] = [found["loss"]] + [
                self._ablated(model, tokens, [layer]) for layer in layers
            ]
            found["all_ablated"] = self._ablated(model, tokens, layers)
        return found

    @staticmethod
    def _ablated(model: Any, tokens: Tensor, layers: Sequence[int]) -> float:
        from megatron_tape.evaluation.tasks import position_probes as probes

        with probes.with_phases(model, layers):
            return float(probes.losses(model, tokens).sum())

    def _maps(self, model: Any, tokens: Tensor) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks import position_probes as probes

        changes: list[list[float]] = []
        shown: list[dict[str, Any]] = []

        def on_maps(layer: int, state: Tensor, phases: Tensor) -> None:
            # Total variation distance: the fraction of attention that moves to other keys, averaged
            # over queries.
            change = (state - phases).abs().sum(-1).mean(-1) / 2
            changes.append(change.tolist())
            shown.extend(
                {
                    "layer": layer,
                    "head": head,
                    "state": _triangle(state[head]),
                    "phases": _triangle(phases[head]),
                }
                for head in change.topk(min(_SHOWN_HEADS, len(change))).indices.tolist()
            )
            shown.sort(key=lambda one: -changes[one["layer"]][one["head"]])
            del shown[_SHOWN_HEADS:]

        probes.attention_maps(model, tokens[:, : self.settings.map_tokens], on_maps)
        return {"change": changes, "shown": shown}

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        found = [value for key, value in values.items() if key != MAPS]
        length = self._length(info)
        count = len(found)
        common = {"length": length, "count": count, "counted": "document"}
        distance = np.array([one["distance"] for one in found])
        scores = []
        for layer, by_document in enumerate(distance.mean(2).T):
            value = float(by_document.mean())
            interval = bootstrap_mean(by_document)
            scores.append(
                Score(
                    "state_distance", value, "neither", *interval, group=f"layer {layer}", **common
                )
            )
        tokens = [one["tokens"] for one in found]
        losses = np.array([one["loss"] for one in found])

        def loss(metric: str, sums: np.ndarray, better: Any, group: str = "") -> Score:
            value = float(np.sum(sums) / np.sum(tokens))
            interval = bootstrap_ratio(sums, tokens)
            return Score(
                metric, value, better, *interval, group=group, unit="nats per token", **common
            )

        scores.append(loss("loss", losses, "lower"))
        if self.settings.ablation:
            ablated = np.array([one["ablated"] for one in found])
            layers = range(ablated.shape[1])
            scores += [
                loss("loss_increase", ablated[:, at] - losses, "neither", f"layer {at}")
                for at in layers
            ]
            everywhere = np.array([one["all_ablated"] for one in found])
            scores.append(loss("loss_increase", everywhere - losses, "neither", "all layers"))
        details = {
            "distance": distance.mean(0).tolist(),
            "distance_by_position": np.mean([one["by_position"] for one in found], axis=0).tolist(),
            "positions": [
                float(part.mean())
                for part in np.array_split(np.arange(length), min(_BUCKETS, length))
            ],
            "distances": distances_of(length),
            "similarity": np.mean([one["similarity"] for one in found], axis=0).tolist(),
            "maps": values[MAPS],
        }
        notes = []
        if count < self.settings.documents:
            notes.append(
                f"Documents with at least {length:,} tokens: {count:,}, fewer than"
                f" positions.documents, {self.settings.documents:,}."
            )
        return Summary(scores, details, notes)

    def _sources(self) -> list[TextSource]:
        settings = self.settings
        return find_sources(settings.data, settings.split, settings.token_dtype, self.section)

    def _length(self, info: ModelInfo) -> int:
        length = self.settings.length
        if length is None:
            return info.trained_length or _LENGTH
        return length

    def _read(self, model: HuggingFaceModel) -> list[np.ndarray]:
        length = self._length(model.info)
        settings = self.settings
        needed, (source,) = length - len(model.bos), self._sources()
        documents, _ = long_documents(source, model, settings.text_key, needed, settings.documents)
        return [
            np.array([*model.bos, *document.tokens[:needed]], dtype=np.int64)
            for document in documents
        ]

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        pictures = [_distances(results), _by_position(results), _similarities(results)]
        title = "loss increase with RoPE's phases in a layer"
        pictures += by_group(
            results, lambda score: score.metric == "loss_increase", "positions-ablation", title
        )
        return [*pictures, _changes(results)] + [
            _maps(index, label, result) for index, (label, result) in enumerate(results.items())
        ]


def distances_of(length: int) -> list[int]:
    """Return distances from 1 to `length` - 1, evenly spaced on a logarithmic scale."""
    return np.unique(np.geomspace(1, length - 1, _DISTANCES).round().astype(int)).tolist()


def _triangle(attention: Tensor) -> list[list[float]]:
    """Return the lower triangle of an attention map (N, N) as rows of rounded values."""
    return [
        [round(value, _DIGITS) for value in row[: at + 1]]
        for at, row in enumerate(attention.tolist())
    ]


def _heat_maps(
    values: dict[str, list[list[float]]], column: str, bar: str, high: float
) -> tuple[Any, str]:
    """Return a figure with a heat map of each model's matrix (layers, columns), and a sentence on
    the maxima.
    """
    figure, panels = model_panels(values)
    maxima = []
    for axes, (label, matrix) in zip(panels, values.items()):
        rows, columns = np.shape(matrix)
        names = {
            "row_label": "layer",
            "column_label": column,
            "bar": bar if axes is panels[-1] else None,
        }
        heat_map(axes, matrix, range(rows), range(columns), high=high, **names)
        layer, at = np.unravel_index(np.argmax(matrix), (rows, columns))
        maxima.append(f"{label}: at most {np.max(matrix):.3g}, in layer {layer}, {column} {at}")
    return figure, "; ".join(maxima)


def _distances(results: dict[str, TaskResult]) -> Picture:
    distances = {label: result.details["distance"] for label, result in results.items()}
    high = max(np.max(distance) for distance in distances.values()) or 1.0
    figure, maxima = _heat_maps(distances, "head group", "|z - z0| / |z0|", high)
    text = (
        "Heat map of the mean distance of the position state from RoPE's phases by layer and head"
        " group. "
    )
    return Picture("positions-distance", f"{text}{maxima}.", figure)


def _by_position(results: dict[str, TaskResult]) -> Picture:
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        _layer_curves(axes, result.details["positions"], result.details["distance_by_position"])
        axes.set(xlabel="position", ylabel="|z - z0| / |z0|")
        axes.set_ylim(bottom=0)
    legend(figure)
    text = (
        "Distance of the position state from RoPE's phases by position in the document, one curve"
        " per layer, for "
    )
    return Picture("positions-along", f"{text}{', '.join(results)}.", figure)


def _similarities(results: dict[str, TaskResult]) -> Picture:
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        details = result.details
        _layer_curves(axes, details["distances"], details["similarity"])
        # Layer 0 reads RoPE's phases.
        axes.plot(
            details["distances"],
            details["similarity"][0],
            color="0.5",
            linestyle="--",
            label="RoPE",
        )
        log_scale(axes, "x", 2)
        axes.set(
            xlabel="distance of two tokens", ylabel="similarity of their states", ylim=(0, 1.02)
        )
    legend(figure)
    text = (
        "Similarity of the states of two tokens by their distance, one curve per layer and one for"
        " RoPE, for "
    )
    return Picture("positions-similarity", f"{text}{', '.join(results)}.", figure)


def _layer_curves(axes: Any, x: list[float], layers: list[list[float]]) -> None:
    """Draw the curves of at most `_CURVES` layers, evenly spaced, without layer 0."""
    later = range(1, len(layers))
    shown = sorted(
        {later[at] for at in np.linspace(0, len(later) - 1, min(_CURVES, len(later))).astype(int)}
    )
    for layer, color in zip(shown, shades(len(shown))):
        axes.plot(x, layers[layer], color=color, linewidth=1.4, label=f"layer {layer}")


def _changes(results: dict[str, TaskResult]) -> Picture:
    changes = {label: result.details["maps"]["change"] for label, result in results.items()}
    figure, maxima = _heat_maps(
        changes, "head", "fraction of attention moved to other tokens", high=1.0
    )
    text = (
        "Heat map by layer and head: the fraction of attention moved if RoPE's phases replace the"
        " state. "
    )
    return Picture("positions-attention", f"{text}{maxima}.", figure)


def _maps(index: int, label: str, result: TaskResult) -> Picture:
    shown = result.details["maps"]["shown"]
    figure, axes = new_figure(2, len(shown), width=3, height=3)
    for axis, (kind, one) in zip(
        axes, [(kind, one) for kind in ("state", "phases") for one in shown]
    ):
        size = len(one[kind])
        weights = np.full((size, size), np.nan)
        for row, visible in enumerate(one[kind]):
            weights[row, : len(visible)] = visible
        # The square root makes small weights visible.
        axis.imshow(np.sqrt(weights), vmin=0, vmax=1, cmap=COLOR_MAP, interpolation="none")
        axis.grid(False)
        name = "position state" if kind == "state" else "RoPE's phases"
        axis.set_title(f"layer {one['layer']}, head {one['head']}: {name}", fontsize=9)
        axis.set(xlabel="key", ylabel="query")
    figure.suptitle(plain(label, LONGEST_LABEL), fontsize=10)
    heads = ", ".join(f"head {one['head']} of layer {one['layer']}" for one in shown)
    text = (
        f"Attention maps of {label}, with its position state (top) and with RoPE's phases instead"
        f" (bottom): {heads}."
    )
    return Picture(f"positions-maps-{index}", text, figure)
