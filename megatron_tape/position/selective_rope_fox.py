"""Selective RoPE with the forget gates of the Forgetting Transformer (Movahedi et al., 2026)."""

from dataclasses import dataclass, replace

from megatron_tape.position.fox import FoxPosition, FoxSettings
from megatron_tape.position.selective_rope import (
    SelectiveRotaryPosition,
    SelectiveRotarySettings,
)


@dataclass(frozen=True, kw_only=True)
class SelectiveRotaryFoxSettings(SelectiveRotarySettings, FoxSettings):
    """The settings of Selective RoPE and FoX."""


class SelectiveRotaryFoxPosition(SelectiveRotaryPosition, FoxPosition):
    """Adds FoX's forget gates to the scores of Selective RoPE; parameters and costs are those of
    both.
    """

    name = "selective_rope_fox"
    Settings = SelectiveRotaryFoxSettings
    needs = SelectiveRotaryPosition.needs | FoxPosition.needs

    def parameters(self, layer):
        """Return the parameters of both."""
        return {
            **SelectiveRotaryPosition.parameters(self, layer),
            **FoxPosition.parameters(self, layer),
        }

    def costs(self, layer, batch):
        """Return the sum of both costs; the state and the other fields are those of Selective
        RoPE.
        """
        rotation = SelectiveRotaryPosition.costs(self, layer, batch)
        fox = FoxPosition.costs(self, layer, batch)
        return replace(
            rotation,
            multiply_adds=rotation.multiply_adds + fox.multiply_adds,
            saved=rotation.saved + fox.saved,
            sent_forward=rotation.sent_forward + fox.sent_forward,
            sent_backward=rotation.sent_backward + fox.sent_backward,
        )

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the inputs of Selective RoPE, with the gates of FoX."""
        arguments = (layer, parameters, state, hidden_states_sBC, cache)
        gates = FoxPosition.position_inputs(self, *arguments).log_gate_TBH
        return replace(
            SelectiveRotaryPosition.position_inputs(self, *arguments), log_gate_TBH=gates
        )
