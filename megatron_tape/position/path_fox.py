"""PaTH-FoX: PaTH with the forget gates of the Forgetting Transformer (Yang et al., 2025)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_tape.position.encoding import Costs, Parameter, PositionInputs
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

    def check(self) -> None:
        PathPosition.check(self)
        FoxPosition.check(self)

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        return {**PathPosition.parameters(self, layer), **FoxPosition.parameters(self, layer)}

    def costs(self, layer, batch) -> Costs:
        path, fox = (encoding.costs(self, layer, batch) for encoding in (PathPosition, FoxPosition))
        names = ("multiply_adds", "saved", "sent_forward", "sent_backward")
        return replace(path, **{name: getattr(path, name) + getattr(fox, name) for name in names})

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache) -> PositionInputs:
        inputs = (layer, parameters, state, hidden_states_sBC, cache)
        gates = FoxPosition.position_inputs(self, *inputs).log_gate_TBH
        return replace(PathPosition.position_inputs(self, *inputs), log_gate_TBH=gates)
