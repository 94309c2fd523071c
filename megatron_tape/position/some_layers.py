"""Layers that get no positions among layers that do (`model.layers_without_positions`), for every encoding.

Such layers attend as `nope` does and hand the state on as it is. RoPE with one such layer in four is SmolLM3's.
"""

import functools

from megatron_tape.position.encoding import Costs, PositionEncoding, Positions


class _SomeLayers:
    """Goes before an encoding among the base classes of a class, and answers for the layers without positions."""

    @property
    def exports_to(self):
        """SmolLM3, which is otherwise a Llama, or the encoding's own file."""
        biased_or_normed = self.model.qkv_bias or self.model.qk_norm
        return "plain" if super().exports_to == "plain" and not biased_or_normed else "code"

    def without_positions(self, layer: int) -> bool:
        return (layer + 1) % self.model.layers_without_positions == 0  # type: ignore[attr-defined]

    def parameters(self, layer):
        return {} if self.without_positions(layer) else super().parameters(layer)

    def needs_in(self, layer):
        return frozenset() if self.without_positions(layer) else super().needs_in(layer)

    def updates(self, layer):
        read = not all(self.without_positions(later) for later in range(layer + 1, self.model.num_layers))
        return read and not self.without_positions(layer) and super().updates(layer)

    def costs(self, layer, batch):
        found = super().costs(layer, batch)
        bare = Costs(state=found.state, state_width=found.state_width)
        return bare if self.without_positions(layer) else found

    def enter(self, layer, parameters, state, hidden_states_sBC, cache):
        if self.without_positions(layer):
            return state
        return super().enter(layer, parameters, state, hidden_states_sBC, cache)

    def positions(self, layer, parameters, state, hidden_states_sBC, cache):
        if self.without_positions(layer):
            return Positions()
        return super().positions(layer, parameters, state, hidden_states_sBC, cache)


@functools.cache
def in_some_layers(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Return the class of this encoding for models of which some layers get no positions."""
    return type(encoding.__name__, (_SomeLayers, encoding), {"__module__": encoding.__module__})
