"""TAPE: contextualized equivariant positional encoding (ICML 2025).

The state z (S, B, G, D) starts as RoPE's phases and is rewritten by every layer but the last, whose update would never
be read:
    z' = z + A u ("token mixing"),    z'' = z' + W_down diag(silu(W_x m)) W_up z' ("position contextualization"),
where u is z averaged by the attention map. Under sequence parallelism z is kept where the hidden states are, as
(s, B, G, D): the update needs all heads of a token, attention needs all tokens of a head, and an all-to-all of S*B*C/tp
numbers switches between the two.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import AVERAGE, ROTATION
from megatron_tape.position.base import Memory, MicroBatch, Parameter, Positions
from megatron_tape.position.rope import RotaryPosition, RotarySettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TapeSettings(RotarySettings):
    """Settings of the position update."""

    position_mlp_size: int | None = None
    """Inner width of TAPE's position MLP (P); null means 4 * num_attention_heads, as in the paper."""
    gate_input: Literal["mlp", "attention"] = "mlp"
    """What gates TAPE's position MLP: the token MLP's output (released code) or attention's output (paper)."""
    token_mixing: Literal["full", "per_head"] = "full"
    """TAPE's map over heads after attention: a full matrix (paper) or one scale per head (released code)."""
    position_state_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which TAPE's position state accumulates updates; attention always reads it rounded to
    train.precision. In bf16, updates below 2^-9 of the state are lost. An fp32 run always uses fp32."""

    @property
    def position_mlp_width(self) -> int:
        """Inner width of TAPE's position MLP (P)."""
        return 4 * self.num_attention_heads if self.position_mlp_size is None else self.position_mlp_size


class TapePosition(RotaryPosition):
    """RoPE whose phases are rewritten by content.

    Parameters: `token_mixing` A (G, H), or (H,) one scale per head; `x_proj` W_x (P, C), `up_proj` W_up (P, G),
    `down_proj` W_down (G, P). A and W_down start at zero, so that the model starts as RoPE.
    """

    name = "tape"
    settings = TapeSettings
    needs = frozenset({ROTATION, AVERAGE})
    starts_as = "rope"
    exports_to = "tape"

    def __init__(self, model, tokens=None, fused=False):
        super().__init__(model, tokens, fused)
        self._update = None

    def check(self) -> None:
        """Reject a scale per head if heads share groups."""
        super().check()
        heads, groups = self.model.num_attention_heads, self.model.query_groups
        refuse(
            self.model.token_mixing == "per_head" and groups != heads,
            f"model.token_mixing per_head needs model.num_query_groups {groups} to equal model.num_attention_heads "
            f"{heads}; use token_mixing full",
        )

    def updates(self, layer: int) -> bool:
        """Return whether the layer is not the last."""
        return layer < self.model.num_layers - 1

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        """Return the parameters of the update."""
        if not self.updates(layer):
            return {}
        model = self.model
        heads, groups, inner = model.num_attention_heads, model.query_groups, model.position_mlp_width
        return {
            "token_mixing": Parameter((groups, heads) if model.token_mixing == "full" else (heads,)),
            "x_proj": Parameter((inner, model.hidden_size), std=model.init_std),
            "up_proj": Parameter((inner, groups), std=groups**-0.5),
            "down_proj": Parameter((groups, inner)),
        }

    def multiply_adds(self, layer: int) -> int:
        """Count averaging the state, token mixing, and the collapsed position MLP (gate, forming M, applying M)."""
        if not self.updates(layer):
            return 0
        model = self.model
        heads, groups, dim, inner = (
            model.num_attention_heads,
            model.query_groups,
            model.head_dim,
            model.position_mlp_width,
        )
        averages = heads * dim * model.seq_length // 2
        mixing = (heads * groups if model.token_mixing == "full" else heads) * dim
        return averages + mixing + inner * model.hidden_size + groups * groups * (inner + dim)

    def state_size(self, layer: int) -> int:
        """Count the states of all groups; the first layer gets RoPE's phases, which all groups share."""
        return self.model.head_dim * (self.model.query_groups if layer > 0 else 1)

    def state_bytes(self, layer: int, width: int) -> int:
        """Return the bytes of the state, which is in fp32 if it accumulates in fp32."""
        return self.state_size(layer) * (4 if self.model.position_state_precision == "fp32" else width)

    def saved_bytes(self, layer: int, batch: MicroBatch) -> int:
        """Count what the update keeps: the gate and its input, the states, M, and averages from other ranks."""
        if not self.updates(layer):
            return 0
        model, groups, inner = self.model, self.model.query_groups, self.model.position_mlp_width
        received = model.num_attention_heads * model.head_dim if batch.tensor_size > 1 else 0
        per_token = received + model.hidden_size + 2 * inner + groups * groups + groups * model.head_dim
        return (batch.local_tokens * per_token + inner * groups * groups) * batch.width

    def exchanged_bytes(self, layer: int, batch: MicroBatch) -> tuple[int, int]:
        """Count the state on its way to attention and the averages on theirs back.

        All sequences share the first layer's phases, which need no gradient.
        """
        model, sequence = self.model, self.model.seq_length // batch.tensor_size
        state = model.query_groups * model.head_dim * batch.width * (batch.local_tokens if layer > 0 else sequence)
        average = model.num_attention_heads * model.head_dim * batch.width * batch.local_tokens
        sent = average if self.updates(layer) else 0
        return state + sent, (state if layer > 0 else 0) + sent

    def initial_state(self, positions_SB: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the phases of this rank's tokens, the same for all groups, (s, B or 1, 1, D)."""
        import torch

        dtype = torch.float32 if self.model.position_state_precision == "fp32" and dtype.itemsize < 4 else dtype
        return self.tokens.local_tokens(super().initial_state(positions_SB, dtype))

    def positions(
        self,
        layer: int,
        parameters: Mapping[str, "Tensor"],
        state: "Tensor",
        hidden_states_sBC: "Tensor",
        memory: Memory,
    ) -> Positions:
        """Return the state of all tokens for this rank's groups, rounded to the precision of the hidden states."""
        rounded = state.to(hidden_states_sBC.dtype).expand(-1, -1, self.model.query_groups, -1)
        return Positions(self.tokens.to_heads(rounded), average_state=self.updates(layer))

    def next_state(
        self,
        layer: int,
        parameters: Mapping[str, "Tensor"],
        state: "Tensor",
        averaged_SBhD: "Tensor",
        attention_output_sBC: "Tensor",
        mlp_output_sBC: "Tensor",
    ) -> "Tensor":
        """Return z'' (s, B, G, D)."""
        from torch.nn.functional import linear

        u = self.tokens.to_tokens(averaged_SBhD)
        S, B, H, D = u.shape
        z = state.expand(S, B, self.model.query_groups, D).reshape(S * B, -1, D)
        gate_input = mlp_output_sBC if self.model.gate_input == "mlp" else attention_output_sBC
        gate = linear(gate_input, parameters["x_proj"]).flatten(0, 1)
        matrices = (parameters[name] for name in ("token_mixing", "up_proj", "down_proj"))
        return self._update_function(u.dtype)(z, u.reshape(S * B, H, D), gate, *matrices).view(S, B, -1, D)

    def _update_function(self, dtype: "torch.dtype"):
        from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update

        if self._update is None:
            model = self.model
            sizes = (model.query_groups, model.num_attention_heads, model.head_dim, model.position_mlp_width)
            fits = fits_fused(*sizes, dtype)
            if self.fused and not fits:
                logger.warning(
                    "the fused position update has no room for %d groups, %d heads of %d and a position MLP of %d; "
                    "plain torch computes the update",
                    *sizes,
                )
            self._update = fused_update if self.fused and fits else plain_update
        return self._update
