"""Rotary positional encoding (Su et al., 2021), as Llama applies it, with its scalings of positions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import ROTATION
from megatron_tape.position.base import PositionEncoding

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(kw_only=True)
class RotarySettings:
    """Frequencies of the rotation."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling_type: Literal["linear", "llama3"] = "linear"
    """linear divides all positions by rope_scaling_factor; llama3 (Llama 3.1) only those of slow frequencies."""
    rope_scaling_factor: float = 1.0
    """Divisor of the positions; 2 doubles the context of a trained model."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times than this in rope_original_seq_length tokens are scaled fully."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies that turn more times than this are not scaled; between the two, scaling changes gradually."""
    rope_original_seq_length: int = 8192
    """llama3: tokens of the context before it was extended."""


class RotaryPosition(PositionEncoding):
    """Every layer rotates by the same phases exp(i s theta_f)."""

    name = "rope"
    settings = RotarySettings
    needs = frozenset({ROTATION})
    exports_to = "plain"

    def check(self) -> None:
        """Reject llama3's bounds in the wrong order."""
        low, high = self.model.rope_low_freq_factor, self.model.rope_high_freq_factor
        refuse(
            low >= high,
            f"model.rope_low_freq_factor {low} is not below model.rope_high_freq_factor {high}; change one of them",
        )

    def state_size(self, layer: int) -> int:
        """Return the size of one head's phases, which all heads share."""
        return self.model.head_dim

    def initial_state(self, positions_SB: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the phases (S, B or 1, 1, D), computed in float32."""
        import torch

        angles = positions_SB.float()[..., None] * self._frequencies_on(positions_SB.device)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype).unsqueeze(2)

    def _frequencies_on(self, device: "torch.device") -> "Tensor":
        """Return the frequencies on `device`; copied there once, as a copy in every forward pass would stall it."""
        if getattr(self, "_frequencies", None) is None or self._frequencies.device != device:
            self._frequencies = self.frequencies().to(device)
        return self._frequencies

    def frequencies(self) -> "Tensor":
        """Return the angles per position theta_f, float32 (D/2,).

        llama3 keeps fast frequencies and divides slow ones, depending on how often they turn in the original context.
        """
        import torch

        model = self.model
        frequencies = 1.0 / model.rope_theta ** (torch.arange(0, model.head_dim, 2).float() / model.head_dim)
        scaled = frequencies / model.rope_scaling_factor
        if model.rope_scaling_type == "linear":
            return scaled
        low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
        turns = model.rope_original_seq_length / (2 * torch.pi / frequencies)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / model.rope_scaling_factor + kept * frequencies
