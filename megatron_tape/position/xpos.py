"""xPos (Sun et al., 2023): RoPE with a decay for each frequency, stronger for faster
frequencies.
"""

import math
from dataclasses import dataclass

from megatron_tape.errors import ConfigError
from megatron_tape.position.encoding import Costs, PositionInputs
from megatron_tape.position.rope import FrequencySettings, RotaryPosition

_GAMMA = 0.4
"""The paper's gamma, which keeps the decay of the fastest frequency above zero."""
_LARGEST_LOGARITHM = 40.0
"""Largest logarithm of a query's factor, for which products of queries and keys stay within
float32's range.
"""


@dataclass(frozen=True, kw_only=True)
class XposSettings(FrequencySettings):
    """The frequencies of the rotation, and the decay of scores."""

    xpos_scale_base: float = 2048.0
    """xpos: distance in tokens over which the fastest frequency decays to 0.4 / 1.4; slower ones
    decay less.
    """


class XposPosition(RotaryPosition):
    """Multiplies rotated queries by zeta_f^(s/b) and divides keys by it, so that scores depend only
    on distances.

    zeta_f = (2f/D + 0.4) / 1.4 for f = 0..D/2-1, and b is `xpos_scale_base`. The state (2 D) is
    [phases | factors].
    """

    name = "xpos"
    Settings = XposSettings
    # transformers has no architecture with xPos.
    exports_to = "code"
    restarts_in_documents = False

    def check(self):
        """Raise ConfigError if factors would exceed float32's range at the ends of a sequence."""
        super().check()
        length = self.model.seq_length
        base = self.settings.xpos_scale_base
        # The largest factor is that of the fastest decay, length / 2 tokens from the middle.
        fastest_decay = math.log((1 + _GAMMA) / _GAMMA)
        least = length / 2 * fastest_decay / _LARGEST_LOGARITHM
        # `not >=` instead of `<`, so that NaN is refused, too.
        if not base >= least:
            raise ConfigError(
                ("model.position.xpos_scale_base", "model.seq_length"),
                f"{base:g} is too small for model.seq_length {length}: query factors would overflow"
                " float32",
                f"set it to at least {math.ceil(least)}",
            )

    def costs(self, layer, batch):
        """Return the costs: the state has a phase and a factor for each element of a head."""
        return Costs(state=2 * self.model.head_dim)

    def initial_state(self, positions_SB, dtype):
        """Return the phases and the query factors, (S, B or 1, 1, 2 D), computed in float32.

        Factors use positions relative to the middle of a sequence: they stay small, and scores do
        not change.
        """
        import torch

        model = self.model
        phases = super().initial_state(positions_SB, dtype)
        ratios = torch.arange(0, model.head_dim, 2, device=positions_SB.device) / model.head_dim
        # Like phases, factors have equal halves: one for real parts, one for imaginary parts.
        zeta = (ratios + _GAMMA) / (1 + _GAMMA)
        centered = positions_SB.float() - model.seq_length // 2
        exponents = centered[..., None, None] / self.settings.xpos_scale_base
        factors = (zeta**exponents).to(dtype)
        return torch.cat([phases, factors, factors], dim=-1)

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the phases and the factors, which attention applies to queries and keys."""
        phases, factors = state.chunk(2, dim=-1)
        return PositionInputs(phases, factor_TB1D=factors)
