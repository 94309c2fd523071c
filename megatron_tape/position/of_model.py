"""The settings of a model with its positional encoding, and the encoding of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import build
from megatron_tape.errors import refuse
from megatron_tape.position.encoding import PositionEncoding
from megatron_tape.position.some_layers import in_some_layers

if TYPE_CHECKING:
    from megatron_tape.parallel.token_layout import TokenLayout


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return the settings of a model from those that a recipe or a checkpoint has in `model`. Raises ConfigError."""
    return build(ModelConfig, values, "model")


def encoding_of(model: ModelConfig, tokens: TokenLayout | None = None, fused: bool = False) -> PositionEncoding:
    """Return a model's encoding; for its declarations alone, without `tokens` (see `PositionEncoding`)."""
    encoding = ENCODINGS[model.position_encoding]
    assert isinstance(model.position, encoding.Settings), "a model's encoding and its settings change together"
    if model.layers_without_positions is not None:
        encoding = in_some_layers(encoding)
    return encoding(model, tokens, fused)


def check_encoding(model: ModelConfig) -> None:
    """Raise `ConfigError` if the model's settings do not fit its encoding."""
    encoding, every = encoding_of(model), model.layers_without_positions
    problem = f"does not apply to {encoding.name}, with which no layer gets positions"
    refuse(every is not None and not encoding.needs, "model.layers_without_positions", problem, "remove it")
    problem = f"is {every}, more than model.num_layers {model.num_layers}, so that every layer would get positions"
    refuse((every or 0) > model.num_layers, "model.layers_without_positions", problem, "lower it, or remove it")
    encoding.check()
