"""Selective RoPE with the forget gates of the Forgetting Transformer (Movahedi et al., 2026)."""

from dataclasses import dataclass

from megatron_tape.position.fox import FoxPosition, FoxSettings
from megatron_tape.position.selective_rope import (
    SelectiveRotaryPosition,
    SelectiveRotarySettings,
)


@dataclass(frozen=True, kw_only=True)
class SelectiveRotaryFoxSettings(SelectiveRotarySettings, FoxSettings):
    """The settings of Selective RoPE and FoX."""


class SelectiveRotaryFoxPosition(FoxPosition, SelectiveRotaryPosition):
    """Adds FoX's forget gates to the scores of Selective RoPE; parameters and costs are those of
    both.
    """

    name = "selective_rope_fox"
    Settings = SelectiveRotaryFoxSettings
    needs = SelectiveRotaryPosition.needs | FoxPosition.needs
