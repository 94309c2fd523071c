"""TAPE's whole update of the position state as one Triton kernel forward and one backward.

Axes: N tokens, H query heads, G groups, D head dimension, P inner width of the position MLP. For each token
    z' = z + A u,    M = W_down diag(silu(gate)) W_up  in R^(G x G),    z'' = z' + M z'.
The forward kernel reads z, u and the gate once and writes z'' once. The backward kernel reads them and the gradient of
z'', recomputes z' and M, and writes the gradients of z, u and the gate. Each program adds up the gradients of the
matrices over its tokens; these sums are added afterwards. The plain form is in `ops/position_update.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_tape.ops.kernels.triton_rotation import last_contiguous

PROGRAMS = 4
"""Maximum number of programs per multiprocessor; each loads the matrices and writes its sums of gradients once."""

TOKENS = 16
"""Minimum number of tokens per program."""


@triton.jit
def _matrix(pointer, rows, columns, row_stride, R: tl.constexpr, C: tl.constexpr):
    """Load an (R, C) matrix into a larger block, filled up with zeros."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_matrix(pointer, rows, columns, value, R: tl.constexpr, C: tl.constexpr):
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    tl.store(pointer + rows[:, None] * C + columns[None, :], value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _mixed(z, u, mixing, FULL: tl.constexpr):
    """Return z + A u in fp32; without FULL, A is one scale per head."""
    if FULL:
        added = tl.dot(mixing, u, input_precision="ieee")
    else:
        added = mixing.to(tl.float32) * u.to(tl.float32)
    return z.to(tl.float32) + added


@triton.jit
def _update(
    Z, U, GATE, MIXING, UP, DOWN, OUT, N, tokens, u_token, u_head,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    groups, heads = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    columns, inner = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    down, up = _matrix(DOWN, groups, inner, P, G, P), _matrix(UP, inner, groups, G, P, G)
    if FULL:
        mixing = _matrix(MIXING, groups, heads, H, G, H)
    else:
        mixing = tl.load(MIXING + groups, mask=groups < G, other=0.0)[:, None]
    first = tl.program_id(0).to(tl.int64) * tokens
    for token in range(first, tl.minimum(first + tokens, N)):
        gate = tl.load(GATE + token * P + inner, mask=inner < P, other=0.0).to(tl.float32)
        silu = gate * tl.sigmoid(gate)
        M = tl.dot((down * silu[None, :]).to(down.dtype), up, input_precision="ieee")
        z = _matrix(Z + token * G * D, groups, columns, D, G, D)
        u = _matrix(U + token * u_token, heads, columns, u_head, H, D)
        mixed = _mixed(z, u, mixing, FULL)
        out = mixed + tl.dot(M.to(down.dtype), mixed.to(down.dtype), input_precision="ieee")
        _store_matrix(OUT + token * G * D, groups, columns, out, G, D)


@triton.jit
def _update_backward(
    Z, U, GATE, MIXING, UP, DOWN, DOUT, DZ, DU, DGATE, DMIXING, DUP, DDOWN, N, tokens, u_token, u_head,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    groups, heads = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    columns, inner = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    down, up = _matrix(DOWN, groups, inner, P, G, P), _matrix(UP, inner, groups, G, P, G)
    dtype = down.dtype
    if FULL:
        mixing = _matrix(MIXING, groups, heads, H, G, H)
        dmixing = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    else:
        mixing = tl.load(MIXING + groups, mask=groups < G, other=0.0)[:, None]
        dmixing = tl.zeros((BLOCK_G,), tl.float32)
    dup = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    ddown = tl.zeros((BLOCK_G, BLOCK_P), tl.float32)
    program = tl.program_id(0).to(tl.int64)
    first = program * tokens
    for token in range(first, tl.minimum(first + tokens, N)):
        gate = tl.load(GATE + token * P + inner, mask=inner < P, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        M = tl.dot((down * silu[None, :]).to(dtype), up, input_precision="ieee")
        z = _matrix(Z + token * G * D, groups, columns, D, G, D)
        u = _matrix(U + token * u_token, heads, columns, u_head, H, D)
        dout = _matrix(DOUT + token * G * D, groups, columns, D, G, D)
        mixed = _mixed(z, u, mixing, FULL).to(dtype)
        factor = dout.to(dtype)
        dM = tl.dot(factor, tl.trans(mixed), input_precision="ieee")
        dmixed = dout.to(tl.float32) + tl.dot(tl.trans(M).to(dtype), factor, input_precision="ieee")
        _store_matrix(DZ + token * G * D, groups, columns, dmixed, G, D)
        if FULL:
            du = tl.dot(tl.trans(mixing), dmixed.to(dtype), input_precision="ieee")
            dmixing += tl.dot(dmixed.to(dtype), tl.trans(u), input_precision="ieee")
        else:
            du = mixing.to(tl.float32) * dmixed
            dmixing += tl.sum(dmixed * u.to(tl.float32), 1)
        _store_matrix(DU + token * H * D, heads, columns, du, H, D)
        raised = tl.dot(tl.trans(down), dM.to(dtype), input_precision="ieee")
        dsilu = tl.sum(raised * up.to(tl.float32), 1)
        dgate = dsilu * (sigmoid + silu * (1 - sigmoid))
        tl.store(DGATE + token * P + inner, dgate.to(DGATE.dtype.element_ty), mask=inner < P)
        dup += silu[:, None] * raised
        ddown += tl.dot(dM.to(dtype), tl.trans(up), input_precision="ieee") * silu[None, :]
    _store_matrix(DUP + program * P * G, inner, groups, dup, P, G)
    _store_matrix(DDOWN + program * G * P, groups, inner, ddown, G, P)
    if FULL:
        _store_matrix(DMIXING + program * G * H, groups, heads, dmixing, G, H)
    else:
        tl.store(DMIXING + program * G + groups, dmixing, mask=groups < G)


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, u, gate, mixing, up, down, kept):
        # As a half of [o | u], u is a view whose heads lie apart.
        u = last_contiguous(u)
        z, gate, mixing, up, down = (x.contiguous() for x in (z, gate, mixing, up, down))
        tensors = u, gate, mixing, up, down
        out = torch.empty_like(z)
        ctx.save_for_backward(z if kept is None else kept.contiguous(), *tensors)
        _launch(_update, z, *tensors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        z, u, gate, mixing, up, down = tensors
        dout = dout.contiguous()
        dz, du, dgate = (
            torch.empty_like(dout),
            torch.empty(u.shape, dtype=u.dtype, device=u.device),
            torch.empty_like(gate),
        )
        programs = triton.cdiv(len(z), _tokens(z))
        sums = [torch.empty(programs, *x.shape, dtype=torch.float32, device=x.device) for x in (mixing, up, down)]
        _launch(_update_backward, *tensors, dout, dz, du, dgate, *sums)
        return dz, du, dgate, *(x.sum(0).to(x_of.dtype) for x, x_of in zip(sums, (mixing, up, down))), None


def _tokens(z: Tensor) -> int:
    """Return the number of tokens per program."""
    multiprocessors = torch.cuda.get_device_properties(z.device).multi_processor_count if z.is_cuda else 1
    return max(TOKENS, triton.cdiv(len(z), PROGRAMS * multiprocessors))


def _launch(kernel, z: Tensor, u: Tensor, gate: Tensor, mixing: Tensor, *tensors: Tensor) -> None:
    N, G, D = z.shape
    H, P, tokens = u.shape[1], gate.shape[1], _tokens(z)

    def block(n: int) -> int:
        return max(16, triton.next_power_of_2(n))

    kernel[(triton.cdiv(N, tokens),)](
        z, u, gate, mixing, *tensors, N, tokens, u.stride(0), u.stride(1),
        G, H, D, P, block(G), block(H), block(D), block(P),
        mixing.dim() == 2,
        num_warps=8 if max(block(G), block(H)) * max(block(P), block(D)) >= 2048 else 4,
    )  # fmt: skip


def update(
    z_NGD: Tensor,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    kept_NGD: Tensor | None = None,
) -> Tensor:
    """Return z'' (N, G, D); `mixing` is A (G, H), or (H,) for one scale per head when G = H.

    `kept_NGD` is z rounded to the type of the others, if that is kept for the backward pass instead of z itself.
    z may be in fp32 where the others are in bf16 or fp16. Raises ValueError for other combinations of types, as
    the kernel multiplies operands of equal types, and for shapes that do not fit.
    """
    (N, G, D), H, P = z_NGD.shape, u_NHD.shape[1], gate_NP.shape[1]
    matrices = ((G, H) if mixing.dim() == 2 else (G,), (P, G), (G, P))
    wanted = ((N, H, D), (N, P), *matrices)
    shapes = tuple(tuple(x.shape) for x in (u_NHD, gate_NP, mixing, up_PG, down_GP))
    if shapes != wanted or (mixing.dim() == 1 and G != H):
        raise ValueError(f"a state {tuple(z_NGD.shape)} does not fit u, gate, mixing, up and down {shapes}")
    types = {x.dtype for x in (u_NHD, gate_NP, mixing, up_PG, down_GP)}
    if len(types) > 1 or z_NGD.dtype not in (*types, torch.float32):
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in {*types, z_NGD.dtype}))
        raise ValueError(f"the fused position update takes tensors of one type, but for a state in fp32, not {names}")
    with torch.cuda.device_of(z_NGD):
        return _Update.apply(z_NGD, u_NHD, gate_NP, mixing, up_PG, down_GP, kept_NGD)
