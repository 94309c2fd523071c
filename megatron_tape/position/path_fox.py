"""PaTH-FoX: PaTH with the forget gates of the Forgetting Transformer (Yang et al., 2025)."""

from dataclasses import dataclass, replace

from megatron_tape.position.fox import FoxPosition, FoxSettings
from megatron_tape.position.path import PathPosition, PathSettings


@dataclass(frozen=True, kw_only=True)
class PathFoxSettings(PathSettings, FoxSettings):
    """The settings of PaTH and FoX."""


class PathFoxPosition(PathPosition, FoxPosition):
    """Adds FoX's forget gates to PaTH's scores; parameters and costs are those of both."""

    name = "path_fox"
    Settings = PathFoxSettings
    needs = PathPosition.needs | FoxPosition.needs

    def parameters(self, layer):
        """Return the parameters of both."""
        return {**PathPosition.parameters(self, layer), **FoxPosition.parameters(self, layer)}

    def costs(self, layer, batch):
        """Return the sum of both costs; the state and the other fields are those of PaTH."""
        path = PathPosition.costs(self, layer, batch)
        fox = FoxPosition.costs(self, layer, batch)
        return replace(
            path,
            multiply_adds=path.multiply_adds + fox.multiply_adds,
            saved=path.saved + fox.saved,
            sent_forward=path.sent_forward + fox.sent_forward,
            sent_backward=path.sent_backward + fox.sent_backward,
        )

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the inputs of PaTH, with the gates of FoX."""
        arguments = (layer, parameters, state, hidden_states_sBC, cache)
        gates = FoxPosition.position_inputs(self, *arguments).log_gate_TBH
        return replace(PathPosition.position_inputs(self, *arguments), log_gate_TBH=gates)
