"""Tensor parallelism of TAPE models, where each process has some of the heads.

The position state of all groups is on every process, and so are the matrices that rewrite it, except token mixing:
each process has its columns for its own heads, and the processes' products are summed. Axes as in modeling_tape.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class _Share(torch.autograd.Function):
    """One process's groups of a state that all processes have; gradients of all processes' groups are joined."""

    @staticmethod
    def forward(ctx, state: Tensor, mesh) -> Tensor:
        ctx.mesh = mesh
        return state.chunk(mesh.size(), dim=2)[mesh.get_local_rank()].contiguous()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        shares = [torch.empty_like(gradient) for _ in range(ctx.mesh.size())]
        dist.all_gather(shares, gradient, group=ctx.mesh.get_group())
        return torch.cat(shares, dim=2), None


def share_of(state: Tensor, weight: Tensor) -> Tensor:
    """Return this process's groups of a state (B, S, G, D), given a projection's weight that is cut by heads.

    Raises ValueError if the groups cannot be divided among the processes.
    """
    mesh = weight.device_mesh if weight.device_mesh.ndim == 1 else weight.device_mesh["tp"]
    if state.shape[2] % mesh.size():
        raise ValueError(
            f"num_key_value_heads {state.shape[2]} is not a multiple of {mesh.size()} tensor-parallel processes; use "
            "a number of processes that divides it"
        )
    return _Share.apply(state, mesh)
