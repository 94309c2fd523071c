"""Build the settings of a model, and the positional encoding that the settings select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import build
from megatron_tape.ops.backends import WINDOW
from megatron_tape.position.encoding import PositionEncoding
from megatron_tape.position.some_layers import in_some_layers

if TYPE_CHECKING:
    from megatron_tape.parallel.token_layout import TokenLayout


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of the section `model` of a recipe or checkpoint; raise ConfigError
    if it is invalid.
    """
    return build(ModelConfig, values, "model")


def encoding_of(
    model: ModelConfig,
    token_layout: TokenLayout | None = None,
    fused: bool = False,
) -> PositionEncoding:
    """Return the positional encoding of `model`.

    `token_layout` is the layout of tokens and heads over ranks, which only computations require.
    With `fused`, the encoding uses its Triton kernels, if it has any.
    """
    encoding = ENCODINGS[model.position_encoding]
    assert isinstance(model.position, encoding.Settings), (
        "a model's encoding and its settings change together"
    )
    # A subclass overrides the methods for the layers that the encoding skips.
    if model.layers_without_positions is not None:
        encoding = in_some_layers(encoding)
    return encoding(model, token_layout, fused)


def attention_needs(model: ModelConfig) -> frozenset[str]:
    """Return the capabilities (see `ops.backends`) that attention needs for the positional encoding
    of `model` and its window.
    """
    needs = encoding_of(model).needs
    if model.needs_window:
        needs |= {WINDOW}
    return needs
