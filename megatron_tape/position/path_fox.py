"""PaTH-FoX: PaTH with the forget gates of the Forgetting Transformer (Yang et al., 2025)."""

from dataclasses import dataclass

from megatron_tape.position.fox import FoxPosition, FoxSettings
from megatron_tape.position.path import PathPosition, PathSettings


@dataclass(frozen=True, kw_only=True)
class PathFoxSettings(PathSettings, FoxSettings):
    """The settings of PaTH and FoX."""


class PathFoxPosition(FoxPosition, PathPosition):
    """Adds FoX's forget gates to PaTH's scores; parameters and costs are those of both."""

    name = "path_fox"
    Settings = PathFoxSettings
    needs = PathPosition.needs | FoxPosition.needs
