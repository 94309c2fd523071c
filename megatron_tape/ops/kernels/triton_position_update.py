"""TAPE's update of the position state: Triton kernels and three matrix products of torch.

Axes: N tokens, H query heads, G groups, D head dimension, P inner width of the position MLP. For
each token, with the state z, its average u under the attention weights, and the token mixing A:
    z' = z + A u,    M = W_down diag(silu(gate)) W_up  in R^(G x G),    z'' = z' + M z'.
As in the reference (`ops/position_update.py`), M of all tokens is one product: silu(gate) (N, P)
times the outer products (P, G*G) of W_down's columns and W_up's rows.

The forward pass is two launches: `_form_matrices` computes M, and `_update` reads z, u and M once
and writes z'', also rounded to the dtype of u.

The backward pass is three launches and a matrix product of torch. `_update_backward` reads z, u
and M again, sums the gradients of all copies of z'', recomputes z', and writes the gradients of z,
u and M. Each of its programs sums the gradient of A over its tokens. `_gate_backward` computes the
gradient of the gate. The product sums the gradient of the outer products over all tokens, and
`_parameters_backward` computes from it the gradients of W_up and W_down. It also adds up the
programs' sums of the gradient of A.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.kernels.triton_rotation import last_contiguous
from megatron_tape.ops.kernels.triton_split import empty_next_to_left_half

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

TILE = 64
"""Rows and columns of the tiles in which M and the gradient of the gate are computed."""


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
    row_stride,
    value,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the elements at `rows` and `columns` of an (R, C) matrix."""
    inside = (rows[:, None] < R) & (columns[None, :] < C)
    places = pointer + rows[:, None] * row_stride + columns[None, :]
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
def _silu(x):
    """Return silu(x) in fp32."""
    x = x.to(tl.float32)
    return x * tl.sigmoid(x)


@triton.jit
def _load_outer(
    UP,
    DOWN,
    inner,
    pairs,
    P,
    G: tl.constexpr,
):
    """Load W_down[i, p] W_up[p, j] for the p in `inner` and the pairs i * G + j in `pairs`.

    The product is rounded to the dtype of the matrices. What is outside of them is zero.
    """
    row = pairs // G
    column = pairs % G
    inside = (inner[:, None] < P) & (pairs[None, :] < G * G)
    down = tl.load(DOWN + row[None, :] * P + inner[:, None], mask=inside, other=0.0)
    up = tl.load(UP + inner[:, None] * G + column[None, :], mask=inside, other=0.0)
    return (down.to(tl.float32) * up.to(tl.float32)).to(UP.dtype.element_ty)


@triton.jit
def _form_matrices(
    GATE,
    UP,
    DOWN,
    M,
    N,
    P,
    G: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a tile of M (N, G*G), given GATE (N, P), UP (P, G) and DOWN (G, P).

    All are contiguous. The grid is (tiles of tokens, tiles of G*G).
    """
    tokens = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    pairs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, P, TILE):
        inner = start + tl.arange(0, TILE)
        inside = (tokens[:, None] < N) & (inner[None, :] < P)
        gate = tl.load(GATE + tokens[:, None] * P + inner[None, :], mask=inside, other=0.0)
        outer = _load_outer(UP, DOWN, inner, pairs, P, G)
        m += tl.dot(_silu(gate).to(outer.dtype), outer, input_precision="ieee")

    inside = (tokens[:, None] < N) & (pairs[None, :] < G * G)
    places = M + tokens[:, None] * (G * G) + pairs[None, :]
    tl.store(places, m.to(M.dtype.element_ty), mask=inside)


@triton.jit
def _update(
    Z,
    U,
    M,
    MIXING,
    OUT,
    ROUNDED,
    N,
    tokens,
    B,
    z_token,
    z_group,
    rounded_token,
    rounded_group,
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
    ROUNDS: tl.constexpr,
):
    """Write z'' of `tokens` adjacent tokens to ROUNDED (N, G, D), which has the dtype of u. With
    ROUNDS, z has another dtype; write z'' in this dtype to OUT (N, G, D), too.

    Z is (N, G, D), M (N, G, G), and MIXING (G, H), or (H,) without FULL. U is (N / B, B, H, D).
    Arguments such as `z_token` and `z_group` are the strides of all axes but the last; OUT, M and
    MIXING are contiguous. BLOCK_G and BLOCK_H are G and H, rounded up to powers of two and at least
    16. A loop visits D in pieces of BLOCK_D columns, so that they fit into registers.
    """
    groups = tl.arange(0, BLOCK_G)
    heads = tl.arange(0, BLOCK_H)
    # A stays in registers for all tokens of the program.
    mixing = _load_mixing(MIXING, groups, heads, G, H, FULL)
    first = tl.program_id(0).to(tl.int64) * tokens

    for token in range(first, tl.minimum(first + tokens, N)):
        m = _load_matrix(M + token * G * G, groups, groups, G, G, G)
        u_token = U + token // B * u_sequence + token % B * u_batch
        rounded = ROUNDED + token * rounded_token
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            z = _load_matrix(Z + token * z_token, groups, columns, z_group, G, D)
            u = _load_matrix(u_token, heads, columns, u_head, H, D)
            mixed = _mixed(z, u, mixing, FULL)
            out = mixed + tl.dot(m, mixed.to(m.dtype), input_precision="ieee")
            _store_matrix(rounded, groups, columns, rounded_group, out, G, D)
            if ROUNDS:
                _store_matrix(OUT + token * G * D, groups, columns, D, out, G, D)


@triton.jit
def _update_backward(
    Z,
    U,
    M,
    MIXING,
    DOUT,
    DOUT_UPDATE,
    DOUT_ATTENTION,
    DZ,
    DU,
    DM,
    DMIXING,
    N,
    tokens,
    B,
    z_token,
    z_group,
    u_sequence,
    u_batch,
    u_head,
    du_sequence,
    du_batch,
    du_head,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FULL: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    HAS_DOUT_UPDATE: tl.constexpr,
    HAS_DOUT_ATTENTION: tl.constexpr,
):
    """Write the gradients of z, u and M of `tokens` adjacent tokens.

    The gradient of z'' is the sum of those of its copies, (N, G, D) each: DOUT of OUT, and
    DOUT_UPDATE and DOUT_ATTENTION of ROUNDED, which the next layer's update and attention read.
    HAS_DOUT and so on are false for those that are missing.

    DZ is (N, G, D), DM (N, G, G), and DU (N / B, B, H, D) with the strides `du_*`; the gradients of
    z'' and z are contiguous. DMIXING holds the sum over the program's tokens of the gradient of A,
    (programs, G, H), or (programs, H) without FULL. The remaining arguments are those of `_update`.
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
        du_token = DU + token // B * du_sequence + token % B * du_batch
        offset = token * G * D
        dm = tl.zeros((BLOCK_G, BLOCK_G), tl.float32)
        for column in range(0, D, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            z = _load_matrix(Z + token * z_token, groups, columns, z_group, G, D)
            u = _load_matrix(u_token, heads, columns, u_head, H, D)
            dout = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
            if HAS_DOUT:
                dout += _load_matrix(DOUT + offset, groups, columns, D, G, D)
            if HAS_DOUT_UPDATE:
                dout += _load_matrix(DOUT_UPDATE + offset, groups, columns, D, G, D)
            if HAS_DOUT_ATTENTION:
                dout += _load_matrix(DOUT_ATTENTION + offset, groups, columns, D, G, D)

            # z' is computed again, since the forward pass does not save it. Factors of products are
            # rounded to the dtype of A; sums are in fp32.
            mixed = _mixed(z, u, mixing, FULL).to(dtype)
            rounded_dout = dout.to(dtype)
            dm += tl.dot(rounded_dout, tl.trans(mixed), input_precision="ieee")
            # The gradient of z', which is also that of z and of A u.
            dmixed = dout + tl.dot(tl.trans(m), rounded_dout, input_precision="ieee")
            _store_matrix(DZ + offset, groups, columns, D, dmixed, G, D)

            if FULL:
                du = tl.dot(tl.trans(mixing), dmixed.to(dtype), input_precision="ieee")
                dmixing += tl.dot(dmixed.to(dtype), tl.trans(u), input_precision="ieee")
            else:
                du = mixing.to(tl.float32) * dmixed
                dmixing += tl.sum(dmixed * u.to(tl.float32), 1)
            _store_matrix(du_token, heads, columns, du_head, du, H, D)
        _store_matrix(DM + token * G * G, groups, groups, G, dm, G, G)

    if FULL:
        _store_matrix(DMIXING + program * G * H, groups, heads, H, dmixing, G, H)
    else:
        tl.store(DMIXING + program * G + groups, dmixing, mask=groups < G)


@triton.jit
def _gate_backward(
    DM,
    GATE,
    UP,
    DOWN,
    DGATE,
    SILU,
    N,
    P,
    G: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a tile of the gate's gradient DGATE (N, P), given that of M, DM (N, G*G), and write
    silu(gate) to SILU (N, P).

    The remaining arguments are those of `_form_matrices`. The grid is (tiles of tokens, tiles of
    P).
    """
    tokens = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inner = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dsilu = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, G * G, TILE):
        pairs = start + tl.arange(0, TILE)
        inside = (tokens[:, None] < N) & (pairs[None, :] < G * G)
        dm = tl.load(DM + tokens[:, None] * (G * G) + pairs[None, :], mask=inside, other=0.0)
        outer = _load_outer(UP, DOWN, inner, pairs, P, G)
        dsilu += tl.dot(dm, tl.trans(outer), input_precision="ieee")

    inside = (tokens[:, None] < N) & (inner[None, :] < P)
    places = tokens[:, None] * P + inner[None, :]
    gate = tl.load(GATE + places, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dsilu * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(DGATE + places, dgate.to(DGATE.dtype.element_ty), mask=inside)
    tl.store(SILU + places, (gate * sigmoid).to(SILU.dtype.element_ty), mask=inside)


@triton.jit
def _parameters_backward(
    DOUTER,
    UP,
    DOWN,
    DUP,
    DDOWN,
    SUMS,
    DMIXING,
    programs,
    mixing_size,
    P,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the gradients of W_up, W_down and A: DUP (P, G), DDOWN (G, P) and DMIXING.

    DOUTER (P, G, G) is the gradient of the outer products. SUMS (programs, mixing_size) are the
    gradients of A that each program of `_update_backward` has summed. Each of the first P programs
    of the grid computes a row of DUP and a column of DDOWN; the others compute `TILE` elements of
    DMIXING each.
    """
    program = tl.program_id(0)
    if program < P:
        groups = tl.arange(0, BLOCK_G)
        inside = groups < G
        up = tl.load(UP + program * G + groups, mask=inside, other=0.0).to(tl.float32)
        down = tl.load(DOWN + groups * P + program, mask=inside, other=0.0).to(tl.float32)
        # The outer product of this column of W_down and row of W_up has the gradient `douter`.
        matrix = DOUTER + program.to(tl.int64) * G * G
        douter = _load_matrix(matrix, groups, groups, G, G, G).to(tl.float32)
        dup = tl.sum(douter * down[:, None], 0)
        ddown = tl.sum(douter * up[None, :], 1)
        tl.store(DUP + program * G + groups, dup.to(DUP.dtype.element_ty), mask=inside)
        tl.store(DDOWN + groups * P + program, ddown.to(DDOWN.dtype.element_ty), mask=inside)
    else:
        elements = (program - P) * TILE + tl.arange(0, TILE)
        total = tl.zeros((TILE,), tl.float32)
        for start in range(0, programs, TILE):
            rows = start + tl.arange(0, TILE)
            inside = (rows[:, None] < programs) & (elements[None, :] < mixing_size)
            places = SUMS + rows[:, None] * mixing_size + elements[None, :]
            total += tl.sum(tl.load(places, mask=inside, other=0.0), 0)
        dmixing = total.to(DMIXING.dtype.element_ty)
        tl.store(DMIXING + elements, dmixing, mask=elements < mixing_size)


class _Update(Function):
    """The differentiable form of the kernels; see `update`."""

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
        joined,
    ):
        # Gradients of copies of z'' that nothing used are None, not zeros.
        ctx.set_materialize_grads(False)
        # u may be a view of [o | u], with gaps between heads, and some libraries store one sequence
        # after the other.
        u = last_contiguous(u)
        z = last_contiguous(z)
        gate, mixing, up, down = (x.contiguous() for x in (gate, mixing, up, down))
        ctx.gets_gradient_of_z = "z"
        saved = z
        if rounded is not None:
            ctx.gets_gradient_of_z = "rounded"
            saved = last_contiguous(rounded)
        M = _matrices(gate, up, down)

        if joined is None:
            new_rounded = u.new_empty(z.shape)
        else:
            _, new_rounded = joined.chunk(2, dim=-1)
        # If z has the dtype of u, z'' and its copies are one tensor.
        rounds = z.dtype != u.dtype
        new = new_rounded
        if rounds:
            new = z.new_empty(z.shape)
        sizes, options = _sizes(z, u, mixing)
        _update[_grid(z)](
            z,
            u,
            M,
            mixing,
            new,
            new_rounded,
            *sizes,
            *z.stride()[:2],
            *new_rounded.stride()[:2],
            *u.stride()[:3],
            **options,
            ROUNDS=rounds,
        )
        ctx.save_for_backward(
            saved,
            u,
            gate,
            M,
            mixing,
            up,
            down,
        )
        # Separate outputs with the same memory, so that the gradients of their readers arrive
        # separately.
        return new.detach(), new_rounded.detach(), new_rounded.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_copies):
        z, u, gate, M, mixing, up, down = ctx.saved_tensors
        d_copies = [None if d is None else d.contiguous() for d in d_copies]
        has_copies = [d is not None for d in d_copies]

        dz = z.new_empty(z.shape)
        du = empty_next_to_left_half(u)
        dM = torch.empty_like(M)
        (programs,) = _grid(z)
        sums = z.new_empty(programs, mixing.numel(), dtype=torch.float32)
        sizes, options = _sizes(z, u, mixing)
        _update_backward[_grid(z)](
            z,
            u,
            M,
            mixing,
            *d_copies,
            dz,
            du,
            dM,
            sums,
            *sizes,
            *z.stride()[:2],
            *u.stride()[:3],
            *du.stride()[:3],
            **options,
            HAS_DOUT=has_copies[0],
            HAS_DOUT_UPDATE=has_copies[1],
            HAS_DOUT_ATTENTION=has_copies[2],
        )

        d_gate, silu = _gate_gradient(dM, gate, up, down)
        d_outer = silu.T @ dM
        d_mixing, d_up, d_down = _parameter_gradients(
            d_outer,
            sums,
            mixing,
            up,
            down,
            options["BLOCK_G"],
        )
        dz_of = {"z": None, "rounded": None, ctx.gets_gradient_of_z: dz}
        return dz_of["z"], dz_of["rounded"], du, d_gate, d_mixing, d_up, d_down, None


def _matrices(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return M of all tokens, (N, G*G)."""
    N, P = gate.shape
    G = up.shape[1]
    M = gate.new_empty(N, G * G)
    grid = (triton.cdiv(N, TILE), triton.cdiv(G * G, TILE))
    _form_matrices[grid](
        gate,
        up,
        down,
        M,
        N,
        P,
        G,
        TILE,
    )
    return M


def _gate_gradient(
    dM: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the gate (N, P), given that of M (N, G*G), and silu(gate)."""
    N, P = gate.shape
    G = up.shape[1]
    d_gate = torch.empty_like(gate)
    silu = torch.empty_like(gate)
    grid = (triton.cdiv(N, TILE), triton.cdiv(P, TILE))
    _gate_backward[grid](
        dM,
        gate,
        up,
        down,
        d_gate,
        silu,
        N,
        P,
        G,
        TILE,
    )
    return d_gate, silu


def _parameter_gradients(
    d_outer: Tensor,
    sums: Tensor,
    mixing: Tensor,
    up: Tensor,
    down: Tensor,
    block_g: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of A, W_up and W_down.

    `d_outer` (P, G*G) is the gradient of the outer products, and `sums` (programs, elements of A)
    are the sums of A's gradient that each program of `_update_backward` has written. `block_g` is
    BLOCK_G.
    """
    P, G = up.shape
    programs, mixing_size = sums.shape
    d_mixing, d_up, d_down = (torch.empty_like(x) for x in (mixing, up, down))
    grid = (P + triton.cdiv(mixing_size, TILE),)
    _parameters_backward[grid](
        d_outer,
        up,
        down,
        d_up,
        d_down,
        sums,
        d_mixing,
        programs,
        mixing_size,
        P,
        G,
        block_g,
        TILE,
    )
    return d_mixing, d_up, d_down


def _grid(z: Tensor) -> tuple[int]:
    """Return the number of programs that share the tokens of the state z (N, G, D)."""
    return (triton.cdiv(len(z), _tokens_per_program(z)),)


def _tokens_per_program(z: Tensor) -> int:
    """Return the number of tokens per program, given the state z (N, G, D)."""
    programs = PROGRAMS
    if z.is_cuda:
        programs *= torch.cuda.get_device_properties(z.device).multi_processor_count
    return max(TOKENS, triton.cdiv(len(z), programs))


def _sizes(
    z: Tensor,
    u: Tensor,
    mixing: Tensor,
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the arguments that `_update` and `_update_backward` share: N, tokens per program and
    B, and options by name.
    """
    N, G, D = z.shape
    _, B, H, _ = u.shape
    # Products of tiles need at least 16 rows and columns.
    block_g, block_h, block_d = (max(16, triton.next_power_of_2(n)) for n in (G, H, D))
    columns = COLUMNS
    if block_g * block_h * u.element_size() > MIXING_BYTES:
        columns = COLUMNS // 2
    options = {
        "G": G,
        "H": H,
        "D": D,
        "BLOCK_G": block_g,
        "BLOCK_H": block_h,
        "BLOCK_D": min(block_d, columns),
        "FULL": mixing.dim() == 2,
        # A warp for each 512 elements of the largest matrix was fastest on an H200. With 32 heads,
        # twice as many would spill fewer registers.
        "num_warps": min(8, max(1, block_g * max(block_g, block_h) // 512)),
    }
    return (N, _tokens_per_program(z), B), options


def update(
    z_NGD: Tensor,
    rounded_NGD: Tensor | None,
    u_NHD: Tensor,
    gate_NP: Tensor,
    mixing: Tensor,
    up_PG: Tensor,
    down_GP: Tensor,
    joined_NGE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z'' (N, G, D), and two copies in the dtype of u, which share memory.

    With `joined_NGE` (N, G, 2D), also in this dtype, the copies are its right half.

    `mixing` is A (G, H), or (H,) for one scale per head when G = H. `u_NHD` may also be (S, B, H,
    D) with N = S * B, in any layout whose last axis is contiguous. All tensors have one dtype,
    except that z may be in fp32. `rounded_NGD` is then z in the dtype of u; otherwise it is None.
    It is saved for the backward pass instead of z, and gets the gradient of z. The last axes of
    both must be contiguous.
    """
    if u_NHD.dim() == 3:
        u_NHD = u_NHD.unsqueeze(1)
    with torch.cuda.device_of(z_NGD):
        return _Update.apply(
            z_NGD,
            rounded_NGD,
            u_NHD,
            gate_NP,
            mixing,
            up_PG,
            down_GP,
            joined_NGE,
        )
