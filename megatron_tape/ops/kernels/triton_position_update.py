"""TAPE's update of the position state: two Triton kernels and a few matrix products of torch.

Axes: N tokens, H query heads, G groups, D head dimension, P inner width of the position MLP. For
each token, with the state z, its average u under the attention weights, and the token mixing A:
    z' = z + A u,    M = W_down diag(silu(gate)) W_up  in R^(G x G),    z'' = z' + M z'.
One matrix product computes M for all tokens, as in the reference (`ops/position_update.py`). The
forward kernel reads z, u and M once and writes z'' once. The backward kernel reads them and the
gradient of z'', recomputes z', and writes the gradients of z, u and M. Each program sums the
gradient of A over its tokens; torch sums over programs.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.kernels.triton_rotation import last_contiguous
from megatron_tape.ops.position_matrices import matrix_gradients, outer_products

PROGRAMS = 16
"""Maximum number of programs per multiprocessor."""

TOKENS = 4
"""Minimum number of tokens per program."""

COLUMNS = 64
"""Maximum number of elements of D per iteration; more would take too many registers and reduce
occupancy.
"""

MIXING_BYTES = 8192
"""Maximum bytes of A for `COLUMNS` columns; with a larger A, shared memory has room for only half
as many.
"""


@triton.jit
def _load_matrix(
    pointer,
    rows,
    columns,
    row_stride,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Load the elements at `rows` and `columns` of an (R, C) matrix; those outside are zero."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_matrix(
    pointer,
    rows,
    columns,
    value,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the elements at `rows` and `columns` of a contiguous (R, C) matrix."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    places = pointer + rows[:, None] * C + columns[None, :]
    tl.store(places, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _load_mixing(
    MIXING,
    groups,
    heads,
    G: tl.constexpr,
    H: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load A or, without FULL, one scale per head as a column."""
    if FULL:
        mixing = _load_matrix(MIXING, groups, heads, H, G, H)
    else:
        mixing = tl.load(MIXING + groups, mask=groups < G, other=0.0)[:, None]
    return mixing


@triton.jit
def _mixed(z, u, mixing, FULL: tl.constexpr):
    """Return z + A u in fp32; without FULL, A is one scale per head."""
    # "ieee": products of fp32 are not rounded to TF32.
    if FULL:
        added = tl.dot(mixing, u, input_precision="ieee")
    else:
        added = mixing.to(tl.float32) * u.to(tl.float32)
    return z.to(tl.float32) + added


@triton.jit
def _update(
    Z,
    U,
    M,
    MIXING,
    OUT,
    N,
    tokens,
    B,
    u_sequence,
    u_batch,
    u_head,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write z'' of `tokens` adjacent tokens to OUT (N, G, D).

    Z is (N, G, D), M (N, G, G), and MIXING (G, H), or (H,) without FULL. U is (N / B, B, H, D) with
    the strides `u_sequence`, `u_batch` and `u_head` of the first three axes. BLOCK_G and BLOCK_H
    are G and H, rounded up to powers of two and at least 16. A loop visits D in pieces of BLOCK_D
    columns, so that they fit into registers.
    """
    groups = tl.arange(0, BLOCK_G)
    heads = tl.arange(0, BLOCK_H)
    # A stays in registers for all tokens of the program.
    mixing = _load_mixing(MIXING, groups, heads, G, H, FULL)
    first = tl.program_id(0).to(tl.int64) * tokens

    for token in range(first, tl.minimum(first + tokens, N)):
        m = _load_matrix(M + token * G * G, groups, groups, G, G, G)
        u_token = U + token // B * u_sequence + token % B * u_batch
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            z = _load_matrix(Z + token * G * D, groups, columns, D, G, D)
            u = _load_matrix(u_token, heads, columns, u_head, H, D)
            mixed = _mixed(z, u, mixing, FULL)
            out = mixed + tl.dot(m, mixed.to(m.dtype), input_precision="ieee")
            _store_matrix(OUT + token * G * D, groups, columns, out, G, D)


@triton.jit
def _update_backward(
    Z,
    U,
    M,
    MIXING,
    DOUT,
    DZ,
    DU,
    DM,
    DMIXING,
    N,
    tokens,
    B,
    u_sequence,
    u_batch,
    u_head,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write the gradients of z, u and M of `tokens` adjacent tokens, given DOUT (N, G, D), that of
    z''.

    DZ is (N, G, D), DM (N, G, G), and DU contiguous (N, H, D). DMIXING holds the sum over the
    program's tokens of the gradient of A, (programs, G, H), or (programs, H) without FULL. Z is (N,
    G, D), U (N / B, B, H, D) and M (N, G, G); the remaining arguments are those of `_update`.
    """
    groups = tl.arange(0, BLOCK_G)
    heads = tl.arange(0, BLOCK_H)
    mixing = _load_mixing(MIXING, groups, heads, G, H, FULL)
    if FULL:
        dmixing = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    else:
        dmixing = tl.zeros((BLOCK_G,), tl.float32)
    dtype = mixing.dtype
    program = tl.program_id(0).to(tl.int64)
    first = program * tokens

    for token in range(first, tl.minimum(first + tokens, N)):
        m = _load_matrix(M + token * G * G, groups, groups, G, G, G)
        u_token = U + token // B * u_sequence + token % B * u_batch
        dm = tl.zeros((BLOCK_G, BLOCK_G), tl.float32)
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            z = _load_matrix(Z + token * G * D, groups, columns, D, G, D)
            u = _load_matrix(u_token, heads, columns, u_head, H, D)
            dout = _load_matrix(DOUT + token * G * D, groups, columns, D, G, D)

            # z' is computed again, since the forward pass does not save it. Factors of products are
            # rounded to the dtype of A, sums are in fp32.
            mixed = _mixed(z, u, mixing, FULL).to(dtype)
            rounded_dout = dout.to(dtype)
            dm += tl.dot(rounded_dout, tl.trans(mixed), input_precision="ieee")
            # The gradient of z', which is also that of z and of A u.
            dmixed = dout.to(tl.float32) + tl.dot(tl.trans(m), rounded_dout, input_precision="ieee")
            _store_matrix(DZ + token * G * D, groups, columns, dmixed, G, D)

            if FULL:
                du = tl.dot(tl.trans(mixing), dmixed.to(dtype), input_precision="ieee")
                dmixing += tl.dot(dmixed.to(dtype), tl.trans(u), input_precision="ieee")
            else:
                du = mixing.to(tl.float32) * dmixed
                dmixing += tl.sum(dmixed * u.to(tl.float32), 1)
            _store_matrix(DU + token * H * D, heads, columns, du, H, D)
        _store_matrix(DM + token * G * G, groups, groups, dm, G, G)

    if FULL:
        _store_matrix(DMIXING + program * G * H, groups, heads, dmixing, G, H)
    else:
        tl.store(DMIXING + program * G + groups, dmixing, mask=groups < G)


class _Update(Function):
    """The differentiable form of `_update`; `kept`, which is z rounded to the dtype of u, is saved
    instead of z unless None.
    """

    @staticmethod
    def forward(ctx, z, u, gate, mixing, up, down, kept):
        # u may be a view of [o | u], with gaps between heads, and some libraries store one sequence
        # after the other.
        u = last_contiguous(u)
        z = z.contiguous()
        mixing = mixing.contiguous()
        saved = z if kept is None else kept.contiguous()
        ctx.save_for_backward(saved, u, gate, mixing, up, down)
        out = torch.empty_like(z)
        _launch(
            _update,
            z,
            u,
            F.silu(gate) @ outer_products(up, down),
            mixing,
            out,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        z, u, gate, mixing, up, down = ctx.saved_tensors
        dout = dout.contiguous()
        g = F.silu(gate)
        outer = outer_products(up, down)
        M = g @ outer
        dz = torch.empty_like(dout)
        du = u.new_empty(u.shape)
        dM = torch.empty_like(M)
        programs = triton.cdiv(len(z), _tokens_per_program(z))
        mixing_sums = z.new_empty(programs, *mixing.shape, dtype=torch.float32)
        _launch(_update_backward, z, u, M, mixing, dout, dz, du, dM, mixing_sums)

        d_mixing = mixing_sums.sum(0).to(mixing.dtype)
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


def _tokens_per_program(z: Tensor) -> int:
    """Return the number of tokens per program, given the state z (N, G, D)."""
    programs = PROGRAMS
    if z.is_cuda:
        programs *= torch.cuda.get_device_properties(z.device).multi_processor_count
    return max(TOKENS, triton.cdiv(len(z), programs))


def _launch(
    kernel: Any,
    z: Tensor,
    u: Tensor,
    M: Tensor,
    mixing: Tensor,
    *tensors: Tensor,
) -> None:
    """Launch `_update` or `_update_backward`; `tensors` are the kernel's tensors after `mixing`."""
    N, G, D = z.shape
    _, B, H, _ = u.shape
    tokens = _tokens_per_program(z)
    # Products of tiles need at least 16 rows and columns.
    block_g, block_h, block_d = (max(16, triton.next_power_of_2(n)) for n in (G, H, D))
    columns = COLUMNS
    if block_g * block_h * u.element_size() > MIXING_BYTES:
        columns = COLUMNS // 2
    # A warp for each 512 elements of the largest matrix.
    warps = min(8, max(1, block_g * max(block_g, block_h) // 512))
    kernel[(triton.cdiv(N, tokens),)](
        z,
        u,
        M,
        mixing,
        *tensors,
        N,
        tokens,
        B,
        *u.stride()[:3],
        G,
        H,
        D,
        block_g,
        block_h,
        min(block_d, columns),
        mixing.dim() == 2,
        num_warps=warps,
    )


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

    `u_NHD` may also be (S, B, H, D) with N = S * B, in any layout whose last axis is contiguous.
    All tensors must have one dtype, except that z may be in fp32. `kept_NGD` is z rounded to the
    dtype of the others; unless None, it is saved for the backward pass instead of z. Raises
    ValueError if shapes do not match.
    """
    N, G, D = z_NGD.shape
    P = gate_NP.shape[1]
    H = G if mixing.dim() == 1 else u_NHD.shape[-2]
    # The third shape is that of A: (G, H), or (H,) with one scale per head.
    expected = [(N, H, D), (N, P), (G, H)[-mixing.dim() :], (P, G), (G, P)]
    shapes = [tuple(x.shape) for x in (u_NHD, gate_NP, mixing, up_PG, down_GP)]
    # u may have an axis for the sequence and one for the batch.
    shapes[0] = (u_NHD.shape[:-2].numel(), *u_NHD.shape[-2:])
    if shapes != expected:
        raise ValueError(f"u, gate, mixing, up and down have shapes {shapes}; expected {expected}")

    if u_NHD.dim() == 3:
        u_NHD = u_NHD.unsqueeze(1)
    with torch.cuda.device_of(z_NGD):
        return _Update.apply(z_NGD, u_NHD, gate_NP, mixing, up_PG, down_GP, kept_NGD)
