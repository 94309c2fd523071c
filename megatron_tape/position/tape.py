"""TAPE: contextualized equivariant positional encoding (ICML 2025).

The state z (S, B, G, D) starts as RoPE's phases and is rewritten by every layer but the last, whose update nobody
would read. Under sequence parallelism z is kept where the hidden states are, as (S/tp, B, G, D): the update mixes all
heads of one token, attention all tokens of one head, and an all-to-all of S*B*C/tp numbers leads from one to the other.
"""

import logging

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megatron_tape.model.weights import initial_update
from megatron_tape.ops.position_update import fits_fused, fused_update, plain_update
from megatron_tape.position.rope import RotaryPosition

logger = logging.getLogger(__name__)


def tokens_to_heads(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Turn (S/tp, B, n, D), local tokens and all heads, into (S, B, n/tp, D), all tokens and local heads."""
    size = group.size()
    if size == 1:
        return x
    by_rank = x.unflatten(2, (size, -1)).movedim(2, 0)
    return all_to_all(group, by_rank.contiguous()).flatten(0, 1)


def heads_to_tokens(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Turn (S, B, n/tp, D), all tokens and local heads, into (S/tp, B, n, D), local tokens and all heads."""
    size = group.size()
    if size == 1:
        return x
    by_rank = x.unflatten(0, (size, -1))
    return all_to_all(group, by_rank.contiguous()).movedim(0, 2).flatten(2, 3)


class TapePosition(RotaryPosition):
    """RoPE whose phases are rewritten by content."""

    def initial_state(self, positions_SB: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this rank's tokens' phases for all groups, (S/tp, B or 1, G, D)."""
        phases = super().initial_state(positions_SB, dtype)
        tp = self.groups.tp
        local = phases.chunk(tp.size(), dim=0)[tp.rank()]
        return local.expand(-1, -1, self.model.query_groups, -1)

    def state_for_attention(self, state: Tensor) -> Tensor:
        """Return all tokens' state for this rank's groups."""
        return tokens_to_heads(state, self.groups.tp)

    def build_update(self, layer_number: int) -> torch.nn.Module | None:
        """Return the layer's update; None in the last layer."""
        return TapeUpdate(self, layer_number) if layer_number < self.config.num_layers else None


class TapeUpdate(torch.nn.Module):
    """z' = z + A u ("token mixing"), z'' = z' + W_down diag(silu(W_x m)) W_up z' ("position contextualization").

    Parameters: `token_mixing` A (G, H), or (H,) one scale per head; `x_proj` W_x (P, C), `up_proj` W_up (P, G),
    `down_proj` W_down (G, P). A and W_down start at zero, so that the model starts as RoPE.
    """

    def __init__(self, encoding: TapePosition, layer_number: int):
        super().__init__()
        self.group = encoding.groups.tp
        model, dtype = encoding.model, encoding.config.params_dtype
        sizes = (model.query_groups, model.num_attention_heads, model.head_dim, model.position_mlp_width)
        self.fused = encoding.fused and fits_fused(*sizes, dtype)
        if encoding.fused and not self.fused and layer_number == 1:
            told = (
                "%d groups, %d heads of %d and a position MLP of %d do not fit the fused position update; it runs plain"
            )
            logger.warning(told, *sizes)
        for name, drawn in initial_update(encoding.model, layer_number, torch.initial_seed()).items():
            weight = torch.nn.Parameter(drawn.to(dtype))
            weight.sequence_parallel = encoding.config.sequence_parallel
            self.register_parameter(name, weight)
        self.record_norms = False
        self.norms: Tensor | None = None
        """When `record_norms` is set: [sum |z''|^2, sum |z'' - z|^2, complex numbers] of the local tokens."""
        self.group_norms: Tensor | None = None
        """The same by group (3, G)."""

    def forward(self, state: Tensor, averaged: Tensor, gate_input: Tensor) -> Tensor:
        """Return the next layer's state, of `gate_input`'s tokens."""
        u = heads_to_tokens(averaged, self.group)
        S, B, H, D = u.shape
        z = state.expand(S, B, -1, D).reshape(S * B, -1, D)
        gate = torch.nn.functional.linear(gate_input, self.x_proj).flatten(0, 1)
        update = fused_update if self.fused else plain_update
        updated = update(z, u.reshape(S * B, H, D), gate, self.token_mixing, self.up_proj, self.down_proj)
        if self.record_norms:
            with torch.no_grad():
                new, old = updated.float(), z.float()
                count = new.new_tensor(new.numel() / 2)
                squares, changes = new.square(), (new - old).square()
                self.norms = torch.stack([squares.sum(), changes.sum(), count])
                by_group = [squares.sum((0, 2)), changes.sum((0, 2)), (count / new.shape[1]).expand(new.shape[1])]
                self.group_norms = torch.stack(by_group)
        return updated.view(S, B, -1, D)
