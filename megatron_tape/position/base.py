"""What a decoder asks of a positional encoding."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_tape.config.schema import ModelConfig


class PositionEncoding:
    """One object per model; nothing outside this package asks which encoding it is.

    The position state, if there is one, rides through Megatron's `TransformerBlock` as its `context`. In every layer
    attention takes `state_for_attention`, rotates queries and keys by it if there is one and, where the layer has an
    `update`, averages it as a second value; the update then gives the next layer's state. The defaults are those of an
    encoding that does nothing. `fused` asks for Triton kernels where the encoding has some.
    """

    def __init__(
        self, model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection, fused: bool = False
    ):
        self.model = model
        self.config = config
        self.groups = groups
        self.fused = fused

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the first layer's state for integer positions (S, B), or (S, 1) when all sequences share them."""
        return None

    def state_for_attention(self, state: Tensor | None) -> Tensor | None:
        """Return the state of all tokens and of this rank's groups (S, B or 1, local groups or 1, D)."""
        return state

    def build_update(self, layer_number: int) -> torch.nn.Module | None:
        """Return layer `layer_number`'s update (from 1), or None where the state stays as it is.

        The module maps (state, averaged (S, B, local heads, D), gate input (S, B, C)) to the next layer's state.
        """
        return None
