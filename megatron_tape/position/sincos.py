"""Sinusoidal positional encoding (Vaswani et al., 2017), added to the token embeddings."""

from megatron_tape.errors import ConfigError
from megatron_tape.position.encoding import PositionEncoding

_BASE = 10000.0


class SinusoidalPosition(PositionEncoding):
    """Adds sin(s / 10000^(2i/C)) to element 2i of token s's embedding, and the cosine to element 2i
    + 1.
    """

    name = "sincos"
    restarts_in_documents = True

    def check(self):
        """Raise ConfigError for an odd hidden size, as elements are pairs of sine and cosine."""
        size = self.model.hidden_size
        if size % 2 == 1:
            raise ConfigError(
                "model.hidden_size", f"is {size}, which is odd", "choose an even size for sincos"
            )

    def embedding(self, positions_sB, dtype):
        """Return the sines and cosines of each token, (s, B or 1, C), computed in float32."""
        import torch

        size = self.model.hidden_size
        wavelengths = _BASE ** (torch.arange(0, size, 2, device=positions_sB.device).float() / size)
        angles = positions_sB.float()[..., None] / wavelengths
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(2).to(dtype)
