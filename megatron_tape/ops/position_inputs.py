"""The inputs that a positional encoding provides to the attention of one layer. Imports no torch.

Axes: S all tokens of a sequence, T keys (in training the same S tokens), B batch, H query heads, G
key/value groups, D head dimension; heads and groups are those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tape.ops.bias import Bias
    from megatron_tape.ops.rescore import Rescore


@dataclass(frozen=True)
class PositionInputs:
    """What a positional encoding changes in the attention of one layer. By default it changes
    nothing.
    """

    z_TBGD: Tensor | None = None
    """The position state, (T, B or 1, G or 1, D), which rotates queries and keys."""
    average_state: bool = False
    """Whether the attention weights also average the position state."""
    joined_TBGE: Tensor | None = None
    """Memory for [v | z] (T, B, G, 2D): its right half is z, its left half uninitialized. Attention
    may write v into the left half, and then need not copy z. None if there is none."""
    factor_TB1D: Tensor | None = None
    """Real factors, (T, B or 1, 1, D), by which rotated queries are multiplied and rotated keys
    divided. The real and the imaginary part of a number must have the same factor."""
    bias: Bias | None = None
    """Bias that is added to the scores."""
    log_gate_TBH: Tensor | None = None
    """Logarithms of forget gates, (T, B, H), which lower the scores."""
    rescore: Rescore | None = None
    """Function that replaces the scores, whole rows at a time: those of a query and all its keys.
    """
    sink_H: Tensor | None = None
    """Logits (H,) of a sink, a key that all queries see and whose value is zero."""
