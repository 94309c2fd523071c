"""Variants of all encodings that skip every n-th layer, where n is
`model.layers_without_positions`.

Skipped layers attend as with `nope` and leave the state unchanged. SmolLM3 uses RoPE and skips
every fourth layer.
"""

import functools
from typing import TYPE_CHECKING

from megatron_tape.position.encoding import Costs, PositionEncoding, PositionInputs

if TYPE_CHECKING:
    from torch import Tensor


def temperature(positions: "Tensor", scale: float, floor_scale: int) -> "Tensor":
    """Return the factor of the queries at these positions in layers without positions, in float32.

    It is 1 + scale * log(floor((position + 1) / floor_scale) + 1), as in Llama 4 (see
    `model.temperature_scale`).
    """
    steps = (positions + 1) // floor_scale
    return 1 + scale * steps.float().log1p()


class _SomeLayers:
    """Mixin that overrides an encoding's methods for the skipped layers."""

    @property
    def exports_to(self):
        """SmolLM3's architecture if it supports the settings, otherwise the encoding's file."""
        if self.model.qkv_bias or self.model.qk_norm or super().exports_to != "plain":
            return "code"
        return "plain"

    def without_positions(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) is skipped."""
        return not self.model.has_positions(layer)  # type: ignore[attr-defined]

    def parameters(self, layer):
        """Return no parameters for a skipped layer."""
        if self.without_positions(layer):
            return {}
        return super().parameters(layer)

    def needs_in(self, layer):
        """Return no capabilities for a skipped layer."""
        if self.without_positions(layer):
            return frozenset()
        return super().needs_in(layer)

    def updates(self, layer):
        """Return False for a skipped layer, and if all later layers are skipped."""
        if self.without_positions(layer):
            return False
        # If no later layer uses the state, it need not be updated.
        later = range(layer + 1, self.model.num_layers)
        return not all(map(self.without_positions, later)) and super().updates(layer)

    def costs(self, layer, batch):
        """Return only the size of the state for a skipped layer."""
        costs = super().costs(layer, batch)
        # The state passes through a skipped layer.
        if self.without_positions(layer):
            return Costs(state=costs.state, state_width=costs.state_width)
        return costs

    def enter(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the unchanged state for a skipped layer."""
        if self.without_positions(layer):
            return state
        return super().enter(layer, parameters, state, hidden_states_sBC, cache)

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return inputs that change nothing for a skipped layer."""
        if self.without_positions(layer):
            return PositionInputs()
        return super().position_inputs(layer, parameters, state, hidden_states_sBC, cache)


@functools.cache
def in_some_layers(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Return the subclass of `encoding` that skips the layers without positions."""
    # The module of `encoding`, since an export contains the file of the class's module.
    return type(encoding.__name__, (_SomeLayers, encoding), {"__module__": encoding.__module__})
