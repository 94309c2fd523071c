"""TAPE's update of the position state, collapsed to one G x G matrix per token.

Axes: N tokens, H query heads, G groups, D head dimension, P inner width of the position MLP. With
the state z, its average u under the attention weights, the token mixing A, and g = silu(gate):
    z' = z + A u,    z'' = z' + M z',    M = W_down diag(g) W_up  in R^(G x G).
Per token, forming M costs G*G*P and applying it G*G*D multiply-adds, compared with 2*P*G*D for
projecting every frequency up and down. One matrix product computes M for all tokens: g (N, P) times
the (P, G*G) outer products of W_down's columns and W_up's rows. The backward pass keeps z, u, the
gate and M, and recomputes z'.

The state may be in fp32 while all other tensors are in bf16. It is then updated in fp32, which
keeps increments that bf16 would lose, and rounded to bf16 only as a factor of a product. Attention
and the backward pass read a copy rounded to bf16 (`UpdatedState`). The gradient of the state has
the dtype of this copy.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

MAX_GROUPS = 64
MAX_HEADS = 128
"""Largest numbers of groups and query heads for which the fused kernels' matrices fit into shared
memory, from compute capability 8.0 on.
"""


class UpdatedState(NamedTuple):
    """A position state after an update, and copies of it in the dtype of the other tensors.

    There is a copy for each reader in the next layer: attention and the update. The backward pass
    of `fused_update` then gets their gradients separately, and adds them up itself. The copies
    share memory.
    """

    state: Tensor
    for_attention: Tensor
    for_update: Tensor
    joined: Tensor | None = None
    """Memory for the next layer's [v | z] (..., 2D). The copies are its right half; its left half
    is uninitialized. None if the copies are not part of a larger tensor."""


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
    mixed_NGD = mix_tokens(z_NGD, u_NHD, mixing)
    M_NGG = matrices(gate_NP, up_PG, down_GP)
    return contextualize(mixed_NGD, M_NGG)


def compact_update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    rounded_NGD: Tensor | None = None,
) -> UpdatedState:
    """Return the result of `plain_update` and its copies, saving only z, u, the gate and M for the
    backward pass.

    `rounded_NGD` is z in the dtype of u; it may be None if z has this dtype. It is saved instead of
    z, and gets the gradient of z. Raises ValueError if shapes or dtypes do not match.
    """
    others = (gate_NP, mixing, up_PG, down_GP)
    z, rounded = _checked_state(z_NGD, rounded_NGD, u_NHD, *others)
    u = u_NHD.flatten(0, -3)
    new = _CompactUpdate.apply(z, rounded, u, *others)
    # Both copies are one tensor, so autograd adds up its gradients.
    copy = new.to(u.dtype)
    return UpdatedState(new, copy, copy)


def fused_update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    rounded_NGD: Tensor | None = None,
    join: bool = False,
) -> UpdatedState:
    """Return the result of `compact_update`, computed by Triton kernels on a GPU or in Triton's
    interpreter.

    With `join`, the copies are the right half of `UpdatedState.joined` (N, G, 2D).
    """
    from megatron_tape.ops.kernels.triton_position_update import update

    others = (gate_NP, mixing, up_PG, down_GP)
    z, rounded = _checked_state(z_NGD, rounded_NGD, u_NHD, *others)
    joined = None
    if join:
        N, G, D = z_NGD.shape
        joined = u_NHD.new_empty(N, G, 2 * D)
    state_and_copies = update(z, rounded, u_NHD, *others, joined)
    return UpdatedState(*state_and_copies, joined)


def _checked_state(
    z: Tensor,
    rounded: Tensor | None,
    u: Tensor,
    gate: Tensor,
    mixing: Tensor,
    up: Tensor,
    down: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the state, and its rounded copy, or None if the state has the dtype of u already.

    Raises ValueError if the shapes of an update's arguments do not match, or if `rounded` is
    missing.
    """
    N, G, D = z.shape
    P = gate.shape[1]
    # A is (G, H), or (H,) with one scale per head, where H = G.
    H = u.shape[-2]
    mixing_shape: tuple[int, ...] = (G, H)
    if mixing.dim() == 1:
        H = G
        mixing_shape = (H,)
    expected = [(N, H, D), (N, P), mixing_shape, (P, G), (G, P)]
    # u may have an axis for the sequence and one for the batch.
    u_shape = (u.shape[:-2].numel(), *u.shape[-2:])
    shapes = [u_shape]
    shapes += [tuple(x.shape) for x in (gate, mixing, up, down)]
    if shapes != expected:
        raise ValueError(f"u, gate, mixing, up and down have shapes {shapes}; expected {expected}")

    if z.dtype == u.dtype:
        # Both are equal. `rounded` is preferred, since attention has saved the same tensor.
        state = z if rounded is None else rounded
        return state, None
    if rounded is None or (rounded.shape, rounded.dtype) != (z.shape, u.dtype):
        raise ValueError(
            f"z is in {z.dtype} and u in {u.dtype}: rounded_NGD must be z in {u.dtype}"
        )
    return z, rounded


class _CompactUpdate(Function):
    """The differentiable form of `plain_update`. Unless `rounded` is None, it is saved instead of z
    and gets the gradient of z.
    """

    @staticmethod
    def forward(
        ctx,
        z,
        rounded,
        u,
        gate,
        mixing,
        up,
        down,
    ):
        ctx.z_is_rounded = rounded is not None
        saved = z
        if ctx.z_is_rounded:
            saved = rounded
        M = matrices(gate, up, down)
        ctx.save_for_backward(
            saved,
            u,
            gate,
            M,
            mixing,
            up,
            down,
        )
        mixed = mix_tokens(z, u, mixing)
        return contextualize(mixed, M)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        z, u, gate, M, mixing, up, down = ctx.saved_tensors
        G = z.shape[1]
        mixed = mix_tokens(z, u, mixing)
        g = F.silu(gate)

        # z'' = z' + M z'. The gradient of z' is also that of z. Factors of products are rounded to
        # the dtype of u.
        d_new = dz.to(u.dtype)
        dM = torch.bmm(d_new, mixed.mT).flatten(1)
        if dz.dtype == u.dtype:
            d_mixed = torch.baddbmm(dz, M.mT, d_new)
        else:
            d_mixed = (dz + torch.bmm(M.mT, d_new)).to(u.dtype)
        # As large as the state, and no longer needed.
        del d_new

        # z' = z + A u, with A a matrix or one scale per head. The next two are (G, N * D) and (H, N
        # * D).
        by_group = d_mixed.transpose(0, 1).flatten(1)
        by_head = u.transpose(0, 1).flatten(1)
        if mixing.dim() == 2:
            du = torch.matmul(mixing.T, d_mixed)
            d_mixing = by_group @ by_head.T
        else:
            du = d_mixed * mixing[:, None]
            # As a product of matrices, since these sum in fp32.
            rows = by_group.unsqueeze(1)
            columns = by_head.unsqueeze(2)
            d_mixing = torch.bmm(rows, columns).flatten()

        # M = g @ outer, where outer[p] is the product of column p of W_down and row p of W_up.
        outer = _outer_products(up, down)
        d_outer = (g.T @ dM).view(-1, G, G)
        d_gate = torch.ops.aten.silu_backward(dM @ outer.T, gate)
        d_up = (down.T.unsqueeze(1) @ d_outer).squeeze(1)
        d_down = (d_outer @ up.unsqueeze(2)).squeeze(2).T

        d_z = d_mixed
        d_rounded = None
        if ctx.z_is_rounded:
            d_z, d_rounded = None, d_mixed
        return d_z, d_rounded, du, d_gate, d_mixing, d_up, d_down


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


def matrices(gate_NP: Tensor, up_PG: Tensor, down_GP: Tensor) -> Tensor:
    """Return M = W_down diag(silu(gate)) W_up of each token, (N, G, G)."""
    G = len(down_GP)
    products = F.silu(gate_NP) @ _outer_products(up_PG, down_GP)
    return products.unflatten(1, (G, G))


def contextualize(z_NGD: Tensor, M_NGG: Tensor) -> Tensor:
    """Return z'' = z + M z (N, G, D); `z_NGD` is z' of the module's formula."""
    # `baddbmm` requires equal dtypes, as in `mix_tokens`.
    if z_NGD.dtype != M_NGG.dtype:
        rounded_NGD = z_NGD.to(M_NGG.dtype)
        return z_NGD + torch.bmm(M_NGG, rounded_NGD)
    return torch.baddbmm(z_NGD, M_NGG, z_NGD)


def _outer_products(up_PG: Tensor, down_GP: Tensor) -> Tensor:
    """Return the P outer products of W_down's columns and W_up's rows, (P, G*G), so that M =
    silu(gate) @ them.
    """
    columns_PG1 = down_GP.T.unsqueeze(2)
    rows_P1G = up_PG.unsqueeze(1)
    return (columns_PG1 * rows_P1G).flatten(1)
