"""What a positional encoding is: one class in one file, declared without torch and computed with it.

Declared, and read when a run is configured, estimated, saved and exported: the settings and what is refused, the
parameters of each layer, what attention must be able to do, arithmetic and memory, and the export. Computed: the state
that tokens carry, what attention is given in each layer, and the next layer's state. A file of this folder imports
torch, and what computes, inside the functions that need them.

Axes: S all tokens of a sequence, s those of this rank, B batch, H query heads, h those of this rank, G groups, g those
of this rank, D head dimension, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_tape.ops.backends import AVERAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_tape.config.schema import ModelConfig
    from megatron_tape.parallel.tokens import TokenLayout


@dataclass(frozen=True)
class Parameter:
    """A parameter of one layer."""

    shape: tuple[int, ...]
    """Of the whole, before tensor parallelism cuts it."""
    std: float = 0.0
    """Standard deviation of the normal distribution that it is drawn from; 0 takes `value`."""
    value: float | tuple = 0.0
    """What it starts as: one number for all, or nested tuples of its shape."""
    head_axis: int | None = None
    """The axis of heads or groups that tensor parallelism cuts; without one every rank holds the whole."""
    decay: bool | None = None
    """Whether weight decay holds for it; None: where it has two axes or more."""


@dataclass(frozen=True)
class MicroBatch:
    """What one GPU computes of a micro-batch."""

    tokens: int
    """In attention: all tokens of the sequences."""
    local_tokens: int
    """Between matrices: under sequence parallelism this rank's share."""
    width: int
    """Bytes of a number in the precision of the run."""
    tensor_size: int
    """Ranks that share the model."""


@dataclass(frozen=True)
class Positions:
    """What attention is given in one layer; the fields are arguments of `ops.attention.attention`."""

    z_TBGD: Tensor | None = None
    """The position state of all tokens and this rank's groups, (S, B or 1, g or 1, D): rotates queries and keys."""
    average_state: bool = False
    """Whether the attention map averages it, too."""
    bias: Any = None
    """An `ops.bias.Bias`, added to the scores."""
    log_gate_TBH: Tensor | None = None
    """Logarithms of forget gates, (S, B, h)."""
    rescore: Any = None
    """A function of whole rows of scores."""


class PositionEncoding:
    """No positional encoding: what each of them overrides. One object per model.

    Nothing outside this package asks which encoding it is.
    """

    name: ClassVar[str]
    """What `model.position_encoding` calls it."""
    settings: ClassVar[type] = object
    """A dataclass of settings of its own, which become keys of `model`."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What attention must be able to do, of `ops.backends`."""
    exports_to: ClassVar[str | None] = None
    """`plain`: an architecture of transformers; `tape`: one that travels with its code; None: it cannot be exported."""

    def __init__(self, model: ModelConfig, tokens: TokenLayout | None = None, fused: bool = False):
        """`tokens` is needed to compute; `fused` asks for Triton kernels where the encoding has some."""
        self.model = model
        self.tokens = tokens
        self.fused = fused

    # Declared.

    def check(self) -> None:
        """Raise `ConfigError` where the model's settings do not fit this encoding."""

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the parameters of layer `layer`, from 0, by name, in the order in which they are drawn."""
        return {}

    def updates(self, layer: int) -> bool:
        """Tell whether layer `layer`, from 0, rewrites the state."""
        return False

    def multiply_adds(self, layer: int) -> int:
        """Count the multiply-adds for one token forward that this encoding adds to a layer of a full sequence."""
        return 0

    def state_size(self, layer: int) -> int:
        """Count the numbers of one token's state as layer `layer` gets it."""
        return 0

    def state_bytes(self, layer: int, width: int) -> int:
        """Return the bytes of one token's state as layer `layer` gets it, in a run whose numbers have `width` bytes."""
        return self.state_size(layer) * width

    def saved_bytes(self, layer: int, batch: MicroBatch) -> int:
        """Count the bytes that layer `layer` keeps for the backward pass outside attention."""
        return 0

    @property
    def num_updates(self) -> int:
        """Count the layers that rewrite the state."""
        return sum(self.updates(layer) for layer in range(self.model.num_layers))

    @property
    def needs_sharded_tokens(self) -> bool:
        """Whether tensor parallelism has to share the tokens between matrices, too.

        What every rank holds whole gets its gradient from its tokens, and is summed over the ranks only then.
        """
        parameters = (self.parameters(layer).values() for layer in range(self.model.num_layers))
        return any(parameter.head_axis is None for layer in parameters for parameter in layer)

    # Computed.

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the first layer's state for integer positions (S, B), or (S, 1) when all sequences share them."""
        return None

    def positions(
        self, layer: int, parameters: Mapping[str, Tensor], state: Tensor | None, hidden_states_sBC: Tensor
    ) -> Positions:
        """Return what attention gets in layer `layer` from its parameters, the state and its normalised input."""
        return Positions(state, average_state=AVERAGE in self.needs and self.updates(layer))

    def next_state(
        self,
        layer: int,
        parameters: Mapping[str, Tensor],
        state: Tensor | None,
        averaged_SBhD: Tensor | None,
        attention_output_sBC: Tensor,
        mlp_output_sBC: Tensor,
    ) -> Tensor | None:
        """Return the next layer's state; called where `updates`. The outputs are those before their residuals."""
        return state
