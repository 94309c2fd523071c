"""The model that an engine should compute: its settings and weights, from a checkpoint of this
project or from a directory in transformers format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.values import format_value
from megatron_tape.errors import FileError
from megatron_tape.huggingface.export.saved_weights import SavedWeights
from megatron_tape.huggingface.imports.config_json import (
    DEFAULTS,
    cannot_import,
    errors_of_settings,
    model_settings,
    read_settings,
)
from megatron_tape.huggingface.imports.model_weights import open_model
from megatron_tape.huggingface.imports.weight_files import (
    LazyTensors,
    check_weights,
    open_directory,
)
from megatron_tape.huggingface.verification.plain_model import NORM
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.model.weights import from_megatron

if TYPE_CHECKING:
    from torch import Tensor


_SIZES = (
    "position_encoding",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "query_groups",
    "head_dim",
    "tie_embeddings",
)
"""Settings of a model that determine the shapes of its weights, except for the vocabulary."""


@dataclass(frozen=True)
class Trained:
    """A model as it was trained."""

    name: str
    """Where its settings and weights are, for messages."""
    model: ModelConfig
    """Its settings."""
    weights: Mapping[str, Tensor]
    """Unsharded weights by Hugging Face's names of Llama, which are read when they are accessed."""


def trained_by(saved: SavedWeights) -> Trained:
    """Return the model of an open checkpoint, with its LoRA layers merged."""
    parameter_of = {}
    for parameter, shape in parameter_shapes(saved.model).items():
        # Only the names are needed.
        for name in from_megatron(parameter, torch.empty(shape, device="meta"), saved.model):
            parameter_of[name] = parameter

    # One parameter becomes several weights, which are read one after the other.
    @lru_cache(maxsize=1)
    def read(parameter: str) -> dict[str, Tensor]:
        """Return the weights of one parameter by name."""
        return saved.exported(parameter, with_lora=True)

    weights = LazyTensors(parameter_of, lambda name: read(parameter_of[name])[name])
    return Trained(f"the checkpoint {saved.path}", saved.model, weights)


def described_by(directory: Path) -> Trained:
    """Return the model in a directory in transformers format, as this project understands its
    config.json.

    Raises UserError if the model cannot be imported.
    """
    path = directory / "config.json"
    settings = read_settings(path)
    with errors_of_settings(path):
        model = model_settings(settings, path)
    weights = open_model(directory, model)
    check_weights(weights, model, str(directory))
    return Trained(f"{path} and its weights", model, weights)


def vocab_size_of(directory: Path) -> int:
    """Return the number of embedding rows of a model in transformers format. Raises FileError if
    its config.json does not say it, or UserError if it is not of an importable architecture.
    """
    path = directory / "config.json"
    settings = read_settings(path)
    if settings.get("model_type") not in DEFAULTS:
        raise cannot_import(settings, path, "model_type", ", ".join(DEFAULTS))
    size = settings.get("vocab_size")
    # `type`, because True is an int.
    if type(size) is not int or size < 1:
        raise FileError(path, f"has vocab_size {size!r}", "set it to an integer above 0")
    return size


def check_sizes(trained: Trained, model: ModelConfig, directory: Path) -> None:
    """Raise FileError if `model`, the settings in `directory`, has other sizes than the trained
    model.
    """
    differences = []
    for name in _SIZES:
        found = getattr(model, name)
        expected = getattr(trained.model, name)
        if found != expected:
            differences.append(f"{name} {format_value(found)} instead of {format_value(expected)}")
    if differences:
        raise FileError(
            directory,
            f"is another model than {trained.name}: it has {', '.join(differences)}",
            "give the checkpoint that it was exported from",
        )


def different_weight(trained: Trained, directory: Path) -> str | None:
    """Return the name of the first weight that differs in `directory` by more than rounding in
    float32, or None. Rows that only one of them has, and weights with other names, are ignored.
    """
    stored = described_by(directory).weights
    for name in stored:
        if name not in trained.weights:
            continue
        weight = stored[name].float()
        # The vocabulary of one of them may be padded.
        expected = trained.weights[name][: len(weight)].float()
        if not torch.allclose(weight[: len(expected)], expected, rtol=1e-5, atol=1e-7):
            return name
    return None


def rounded_as(directory: Path, trained: Trained) -> Trained:
    """Return the model with its weights rounded to the dtype of those in `directory`, an export of
    this model, since an engine cannot know what rounding has removed.
    """
    stored = open_directory(directory, allow_pickle=False)
    if NORM not in stored:
        return trained
    # All weights of an export have the same dtype, and the norm is small.
    dtype = stored[NORM].dtype
    weights = LazyTensors(trained.weights, lambda name: trained.weights[name].to(dtype))
    return replace(trained, weights=weights)
