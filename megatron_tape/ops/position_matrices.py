"""Products of the position MLP's matrices in TAPE's update, and their gradients, for plain torch
and the kernel.

The formulas are in `ops/position_update.py`. Axes: N tokens, G groups, P inner width of the
position MLP.
"""

import torch
from torch import Tensor


def outer_products(up_PG: Tensor, down_GP: Tensor) -> Tensor:
    """Return the P outer products of W_down's columns and W_up's rows, (P, G*G), so that M =
    silu(gate) @ them.
    """
    return (down_GP.T.unsqueeze(2) * up_PG.unsqueeze(1)).flatten(1)


def matrix_gradients(
    dM: Tensor,
    d_mixing: Tensor,
    g: Tensor,
    outer: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `gate` (N, P), the mixing matrix A, `up` W_up (P, G) and `down`
    W_down (G, P).

    `dM` is the gradient of M = silu(gate) @ outer, (N, G*G). `d_mixing` is already A's gradient; it
    is passed through, so that the results have the order of the arguments of an update. `g` is
    silu(gate), and `outer` is `outer_products(up, down)`.
    """
    # outer[p] is the product of column p of W_down and row p of W_up.
    G = len(down)
    d_outer = (g.T @ dM).view(-1, G, G)
    d_gate = torch.ops.aten.silu_backward(dM @ outer.T, gate)
    d_up = (down.T.unsqueeze(1) @ d_outer).squeeze(1)
    d_down = (d_outer @ up.unsqueeze(2)).squeeze(2).T
    return d_gate, d_mixing, d_up, d_down
