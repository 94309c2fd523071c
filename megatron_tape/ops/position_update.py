"""TAPE's update of the position state, collapsed to one G x G matrix per token.

Axes: N tokens, H query heads, G groups, D head dimension, P inner width of the position MLP. With
the state z, its average u under the attention weights, the token mixing A, and g = silu(gate):
    z' = z + A u,    z'' = z' + M z',    M = W_down diag(g) W_up  in R^(G x G).
Per token, forming M costs G*G*P and applying it G*G*D multiply-adds, compared with 2*P*G*D for
projecting every frequency up and down. One matrix product computes M for all tokens: g (N, P) times
the (P, G*G) outer products of W_down's columns and W_up's rows. The backward pass keeps z, u and
the gate, and recomputes z' and M.

The state may be in fp32 while all other tensors are in bf16. It is then updated in fp32, which
keeps increments that bf16 would lose, and rounded to bf16 only as a factor of a product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.position_matrices import matrix_gradients, outer_products

MAX_GROUPS = 64
MAX_HEADS = 128
"""Largest sizes for which the fused kernels' matrices fit into shared memory, from compute
capability 8.0 on.
"""


def fits_fused(groups: int, heads: int) -> bool:
    """Return whether the fused kernels support these numbers of key/value groups and query
    heads.
    """
    return groups <= MAX_GROUPS and heads <= MAX_HEADS


def plain_update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
) -> Tensor:
    """Return z'' (N, G, D), computed step by step: the reference. `u_NHD` may also be (S, B, H, D),
    N = S * B.
    """
    u_NHD = u_NHD.flatten(0, -3)
    return contextualize(mix_tokens(z_NGD, u_NHD, mixing), gate_NP, up_PG, down_GP)


def compact_update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    rounded_NGD: Tensor | None = None,
) -> Tensor:
    """Return the result of `plain_update`, saving only z (rounded to u's dtype), u and the gate for
    the backward pass.

    `rounded_NGD` is the rounded z if the caller has it already; it is then saved without a copy.
    """
    u_NHD = u_NHD.flatten(0, -3)
    return _CompactUpdate.apply(
        z_NGD,
        u_NHD,
        gate_NP,
        mixing,
        up_PG,
        down_GP,
        _z_to_save(z_NGD, u_NHD, rounded_NGD),
    )


def _z_to_save(
    z: Tensor,
    u: Tensor,
    rounded: Tensor | None,
) -> Tensor | None:
    """Return z in u's dtype to save for the backward pass, or None if z has that dtype and is saved
    itself.

    `rounded` is z in u's dtype, or None if the caller does not have it.
    """
    if z.dtype == u.dtype:
        return None
    if rounded is None:
        return z.detach().to(u.dtype)
    return rounded.detach()


class _CompactUpdate(Function):
    """The differentiable form of `plain_update`; `kept`, the result of `_z_to_save`, is saved
    instead of z unless None.
    """

    @staticmethod
    def forward(ctx, z, u, gate, mixing, up, down, kept):
        saved = z if kept is None else kept
        ctx.save_for_backward(saved, u, gate, mixing, up, down)
        return plain_update(z, u, gate, mixing, up, down)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        z, u, gate, mixing, up, down = ctx.saved_tensors
        N, G, _ = z.shape
        mixed = mix_tokens(z, u, mixing)
        g = F.silu(gate)
        outer = outer_products(up, down)
        M = (g @ outer).view(N, G, G)

        # z'' = z' + M z': `dz` is first the gradient of z'', then that of z', which is also that of
        # z. `rounded` is always `dz` in u's dtype, for products.
        rounded = dz.to(u.dtype)
        dM = torch.bmm(rounded, mixed.mT).flatten(1)
        if dz.dtype == u.dtype:
            dz = rounded = torch.baddbmm(dz, M.mT, rounded)
        else:
            dz = dz + torch.bmm(M.mT, rounded)
            rounded = dz.to(u.dtype)

        # z' = z + A u, with A a matrix or one scale per head.
        if mixing.dim() == 2:
            du = torch.matmul(mixing.T, rounded)
            # Matrices (G, N * D) and (H, N * D).
            by_group = rounded.transpose(0, 1).flatten(1)
            by_head = u.transpose(0, 1).flatten(1)
            d_mixing = by_group @ by_head.T
        else:
            du = rounded * mixing[:, None]
            d_mixing = (rounded * u).sum((0, 2))
        gradients = matrix_gradients(
            dM,
            d_mixing,
            g,
            outer,
            gate,
            up,
            down,
        )
        return dz, du, *gradients, None


def fused_update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    rounded_NGD: Tensor | None = None,
) -> Tensor:
    """Return the result of `compact_update`, computed by a Triton kernel on a GPU or in Triton's
    interpreter.
    """
    from megatron_tape.ops.kernels.triton_position_update import update

    return update(
        z_NGD,
        u_NHD,
        gate_NP,
        mixing,
        up_PG,
        down_GP,
        _z_to_save(z_NGD, u_NHD, rounded_NGD),
    )


def mix_tokens(
    z_NGD: Tensor,
    u_NHD: Tensor,
    mixing: Tensor,
) -> Tensor:
    """Return z' = z + A u (N, G, D); `mixing` is A (G, H), or (H,) for one scale per head when G =
    H.
    """
    if mixing.dim() == 1:
        return torch.addcmul(z_NGD, u_NHD, mixing[:, None])
    mixing_NGH = mixing.expand(u_NHD.shape[0], -1, -1)
    # `baddbmm` requires equal dtypes; z may be in fp32 while u is in bf16.
    if z_NGD.dtype != u_NHD.dtype:
        return z_NGD + torch.bmm(mixing_NGH, u_NHD)
    return torch.baddbmm(z_NGD, mixing_NGH, u_NHD)


def contextualize(
    z_NGD: Tensor,
    gate_NP: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
) -> Tensor:
    """Return z'' = z + W_down diag(silu(gate)) W_up z (N, G, D); `z_NGD` is z' of the module's
    formula.
    """
    G = z_NGD.shape[1]
    M = F.silu(gate_NP) @ outer_products(up_PG, down_GP)
    M_NGG = M.unflatten(1, (G, G))
    if z_NGD.dtype != M_NGG.dtype:
        return z_NGD + torch.bmm(M_NGG, z_NGD.to(M_NGG.dtype))
    return torch.baddbmm(z_NGD, M_NGG, z_NGD)
