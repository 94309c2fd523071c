"""The task `positions`: how far a TAPE model's position states are from RoPE, and how much the loss
depends on them.

Layers are counted from 0. The state of a layer is the position state that it reads: layer 0 reads
RoPE's phases, layer 1 the output state of layer 0, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tape.config.evaluation import PositionSettings
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.figures import (
    heat_map,
    legend,
    log_scale,
    model_panels,
    shades,
)
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.score_pictures import pictures_by_group
from megatron_tape.evaluation.statistics import ratio_score
from megatron_tape.evaluation.task import (
    HuggingFaceModel,
    ModelInfo,
    Picture,
    Summary,
    TaskResults,
    Unit,
    Value,
    Values,
)
from megatron_tape.evaluation.tasks.document_task import NATS, DocumentTask
from megatron_tape.evaluation.tasks.text_sources import long_documents

if TYPE_CHECKING:
    from torch import Tensor

MAPS = "maps"
"""Key of the unit that compares attention maps."""
MODEL_TYPE = "tape"
"""The `model_type` of TAPE models in `config.json`."""
_CURVES = 6
"""Maximum number of layers with a curve in a picture."""
_BUCKETS = 32
"""Number of ranges of positions over which distances from RoPE's phases are averaged."""
_DISTANCES = 24
"""Maximum number of distances between tokens at which similarities are measured."""
_LENGTH = 1024
"""Number of tokens of each document if neither the settings nor the model say it."""


class PositionPictures(DocumentTask):
    """Distances of states from RoPE's phases, similarities of states, and effects of states on
    attention and loss.
    """

    name = "positions"
    Settings = PositionSettings
    generates = True

    def minimum_tokens(self, info: ModelInfo) -> int:
        """Return the number of tokens of each document that are used."""
        return self.settings.length or info.trained_length or _LENGTH

    def check(self, info: ModelInfo) -> None:
        """Raise UserError if the model is not a TAPE model, or if the data is invalid."""
        model_type = info.config.get("model_type")
        if model_type != MODEL_TYPE:
            raise ConfigError(
                self.name,
                f"requires a TAPE model, but {info.label} has the model_type {model_type}",
                "remove the task, or evaluate a TAPE model",
            )
        if self.minimum_tokens(info) < 2:
            raise ConfigError(
                self.key("length"), f"is {self.minimum_tokens(info)}", "set it to at least 2"
            )
        super().check(info)

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        """Read the documents, and return a unit for each of them and one for attention maps."""
        length = self.minimum_tokens(model.info)
        # The length includes the beginning-of-text token.
        size = length - len(model.bos)
        # `data` of this task is a single path, so there is one source.
        (text_source,) = self.text_sources
        documents, _ = long_documents(text_source, model, size, self.most_documents)
        self._tokens = [
            np.array([*model.bos, *document.tokens[:size]], np.int64) for document in documents
        ]

        # The cost is the number of tokens times the number of forward passes. Each ablated layer
        # takes another one.
        passes = 1
        if self.settings.ablation:
            passes += model.info.config["num_hidden_layers"]
        units = [
            Unit(f"document/{index}", float(length * passes)) for index in range(len(documents))
        ]
        # Each layer computes its maps twice.
        return [*units, Unit(MAPS, 2.0 * min(self.settings.map_tokens, length))]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> Value:
        """Measure the states of a document, or compare the attention maps of the first one."""
        import torch

        from megatron_tape.evaluation.tasks.position_probes import attention_changes

        if unit.key == MAPS:
            # Maps take memory quadratic in the length, so only the first tokens have them.
            tokens = torch.from_numpy(self._tokens[0][: self.settings.map_tokens])
            return {"change": attention_changes(model.model, tokens.to(model.device)[None])}
        index = int(unit.key.partition("/")[2])
        tokens = torch.from_numpy(self._tokens[index]).to(model.device)[None]
        return self._measure(model.model, tokens)

    def _measure(self, model: Any, tokens: Tensor) -> dict:
        """Return losses, and distances from RoPE's phases and similarities by layer, for tokens
        (1, N).
        """
        from megatron_tape.evaluation.tasks import position_probes as probes

        distances = distances_of(tokens.shape[1])
        # `on_state` adds one item per layer to each of these lists.
        distance_by_group = []
        distance_by_position = []
        similarity = []

        def on_state(_: int, state: Tensor, phases: Tensor) -> None:
            """Measure the state of a layer, (N, G, D)."""
            distance = probes.relative_distance(state, phases)
            distance_by_group.append(distance.mean(0).tolist())
            distance_by_position.append(_bucket_means(distance.mean(1)))
            similarity.append(probes.similarity(state, distances))

        def ablated_loss(layers: Sequence[int]) -> float:
            """Return the sum of losses if `layers` read RoPE's phases."""
            with probes.with_phases(model, layers):
                return float(probes.losses(model, tokens).sum())

        with probes.watching(model, on_state):
            loss = float(probes.losses(model, tokens).sum())
        value = {
            "tokens": tokens.shape[1] - 1,
            "loss": loss,
            "distance": distance_by_group,
            "by_position": distance_by_position,
            "similarity": similarity,
        }
        if self.settings.ablation:
            # Layer 0 always reads RoPE's phases, so its ablation does not change the loss.
            layers = range(1, len(probes.layers_of(model)))
            value["ablated"] = [loss, *(ablated_loss([layer]) for layer in layers)]
            value["all_ablated"] = ablated_loss(layers)
        return value

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return distances and losses by layer, and the data of the pictures."""
        length = self.minimum_tokens(info)
        documents = [value for key, value in values.items() if key != MAPS]
        count = len(documents)
        common = {"length": length, "count": count, "counted": "document"}

        def column(key: str) -> np.ndarray:
            """Return one field of the values of all documents, documents first."""
            return np.array([value[key] for value in documents])

        def loss_score(metric: str, sums: np.ndarray, better: str, group: str = "") -> Score:
            """Return a sum of losses by document as a score per token."""
            tokens = column("tokens")
            return ratio_score(metric, sums, tokens, better, group=group, unit=NATS, **common)

        # How far the states are from RoPE's phases, of shape (documents, layers, head groups).
        distance = column("distance")
        # With denominators of 1, `ratio_score` gives the mean over documents.
        ones = np.ones(count)
        scores = [
            ratio_score(
                "state_distance",
                by_document,
                ones,
                "neither",
                group=f"layer {layer}",
                **common,
            )
            # Means over head groups, of shape (layers, documents).
            for layer, by_document in enumerate(distance.mean(2).T)
        ]

        # How much the loss depends on the states.
        losses = column("loss")
        scores.append(loss_score("loss", losses, "lower"))
        if self.settings.ablation:
            increases = {
                f"layer {layer}": ablated - losses
                for layer, ablated in enumerate(column("ablated").T)
            }
            increases["all layers"] = column("all_ablated") - losses
            scores += [
                loss_score("loss_increase", increase, "neither", group)
                for group, increase in increases.items()
            ]

        # What the pictures show, as means over the documents.
        details = {
            "distance": distance.mean(0).tolist(),
            "distance_by_position": column("by_position").mean(0).tolist(),
            "positions": _bucket_means(np.arange(length)),
            "distances": distances_of(length),
            "similarity": column("similarity").mean(0).tolist(),
            "maps": values[MAPS],
        }
        return Summary(scores, details)

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of distances, similarities, losses and attention."""
        ablation = pictures_by_group(
            results,
            lambda score: score.metric == "loss_increase",
            file_name="positions-ablation",
            x_label="loss increase with RoPE's phases in a layer",
        )
        pictures = [
            _distances_by_layer(results),
            _distances_by_position(results),
            _similarities(results),
        ]
        return [*pictures, *ablation, _attention_changes(results)]


def distances_of(length: int) -> list[int]:
    """Return distances from 1 to `length` - 1, evenly spaced on a logarithmic scale."""
    spaced = np.geomspace(1, length - 1, _DISTANCES)
    # Small distances are repeated after rounding.
    return np.unique(spaced.round().astype(int)).tolist()


def _bucket_means(values: np.ndarray) -> list[float]:
    """Return the means over `_BUCKETS` ranges of positions of values (N,)."""
    parts = np.array_split(values, min(_BUCKETS, len(values)))
    return [float(part.mean()) for part in parts]


def _distances_by_layer(results: TaskResults) -> Picture:
    """Return a picture of distances from RoPE's phases by layer and head group."""
    distances = {label: result.details["distance"] for label, result in results.items()}
    # The color range is from 0 to the largest distance, or to 1 if all distances are 0.
    high = max(np.max(distance) for distance in distances.values()) or 1.0
    return _heat_maps(
        distances,
        file_name="positions-distance",
        description="Mean distance of the position state from RoPE's phases by layer and head"
        " group",
        column_label="head group",
        bar_label="|z - z0| / |z0|",
        high=high,
    )


def _attention_changes(results: TaskResults) -> Picture:
    """Return a picture of the attention that the states move, by layer and head."""
    changes = {label: result.details["maps"]["change"] for label, result in results.items()}
    return _heat_maps(
        changes,
        file_name="positions-attention",
        description="Heat map by layer and head: the fraction of attention moved if RoPE's phases"
        " replace the state",
        column_label="head",
        bar_label="fraction of attention moved to other tokens",
    )


def _heat_maps(
    values: dict[str, list[list[float]]],
    file_name: str,
    description: str,
    column_label: str,
    bar_label: str,
    high: float = 1.0,
) -> Picture:
    """Return a picture with a heat map of each model's matrix (layers, columns), whose colors range
    from 0 to `high`. `description` begins the description of the picture.
    """
    figure, panels = model_panels(values)
    maxima = []
    for axes, (label, matrix) in zip(panels, values.items()):
        rows, columns = np.shape(matrix)
        # Panels have the same range, so one color bar is enough.
        shown_bar = bar_label if axes is panels[-1] else None
        heat_map(
            axes,
            matrix,
            range(rows),
            range(columns),
            row_label="layer",
            column_label=column_label,
            high=high,
            bar=shown_bar,
        )
        layer, index = np.unravel_index(np.argmax(matrix), (rows, columns))
        maxima.append(
            f"{label}: at most {np.max(matrix):.3g}, in layer {layer}, {column_label} {index}"
        )
    return Picture(file_name, f"{description}. {'; '.join(maxima)}.", figure)


def _distances_by_position(results: TaskResults) -> Picture:
    """Return a picture of distances from RoPE's phases by position in the document."""
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        _layer_curves(axes, result.details["positions"], result.details["distance_by_position"])
        axes.set(xlabel="position", ylabel="|z - z0| / |z0|")
        axes.set_ylim(bottom=0)
    legend(figure)
    return Picture(
        "positions-along",
        "Distance of the position state from RoPE's phases by position in the document, one curve"
        f" per layer, for {', '.join(results)}.",
        figure,
    )


def _similarities(results: TaskResults) -> Picture:
    """Return a picture of the similarity of states by the distance of their tokens."""
    figure, panels = model_panels(results)
    for axes, result in zip(panels, results.values()):
        distances = result.details["distances"]
        similarity = result.details["similarity"]
        _layer_curves(axes, distances, similarity)
        # Layer 0 reads RoPE's phases, so its curve is that of RoPE.
        axes.plot(distances, similarity[0], color="0.5", linestyle="--", label="RoPE")
        log_scale(axes, "x", base=2)
        axes.set(xlabel="distance of two tokens", ylabel="similarity of their states")
        axes.set_ylim(0, 1.02)
    legend(figure)
    return Picture(
        "positions-similarity",
        "Similarity of the states of two tokens by their distance, one curve per layer and one for"
        f" RoPE, for {', '.join(results)}.",
        figure,
    )


def _layer_curves(axes: Any, x: list[float], layers: list[list[float]]) -> None:
    """Draw the curves of at most `_CURVES` layers, evenly spaced, without layer 0."""
    # Layer 0 reads RoPE's phases themselves, so its curve shows nothing of TAPE.
    count = min(_CURVES, len(layers) - 1)
    shown = np.linspace(1, len(layers) - 1, count).astype(int)
    for layer, color in zip(shown, shades(count)):
        axes.plot(x, layers[layer], color=color, linewidth=1.4, label=f"layer {layer}")
