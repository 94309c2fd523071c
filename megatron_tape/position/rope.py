"""Rotary positional encoding (Su et al., 2021), as Llama applies it, with its scalings of positions."""

import torch
from torch import Tensor

from megatron_tape.model.reference import rope_frequencies, rope_phases
from megatron_tape.position.base import PositionEncoding


class RotaryPosition(PositionEncoding):
    """Every layer rotates by the same phases exp(i s theta_f)."""

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the phases (S, B or 1, 1, D), computed in float32."""
        phases = rope_phases(positions_SB, rope_frequencies(self.model, self.model.head_dim))
        return phases.to(dtype).unsqueeze(2)
