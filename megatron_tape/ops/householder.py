"""Scores with the Householder-like transformations of all tokens between query and key (PaTH, Yang et al., 2025).

The score of query s and key t is q_s^T H_s H_(s-1) ... H_(t+1) k_t / sqrt(D), where H_l = I - beta_l w_l w_l^T. Tokens
are split into blocks of C. Inside a block the product has the closed form of the UT transform (section 3 of the paper);
across blocks, queries transformed to the start of their block are multiplied by the products of whole blocks, from
right to left. No S x T matrix is saved, and S queries take O(S T D) operations.
Axes: T tokens, B batch, G key/value groups, R query heads of a group, r the queries of a block of rows, N blocks of C
tokens, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_tape.ops.backends import REFLECTIONS
from megatron_tape.ops.rescore import Rescore

BLOCK = 64
"""C, the tokens per block, as in the paper's kernels."""


@dataclass(frozen=True)
class Reflections(Rescore):
    """Scores with transformations; `directions(*tensors)` returns their w (T, B, G, D) and beta (T, B, G)."""

    need: ClassVar[str] = REFLECTIONS
    directions: Callable[..., tuple[Tensor, Tensor]] | None = None

    def w_and_beta(self) -> tuple[Tensor, Tensor]:
        """Return w and beta, for kernels that compute the scores themselves."""
        return self.directions(*self.tensors)


def through_reflections(directions: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...]) -> Reflections:
    """Return the `Reflections` of `directions(*tensors)`, which are recomputed in the backward pass."""

    def blocks(k_BGTD: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        w_TBGD, beta_TBG = directions(*given)
        return blocks_of_reflections(k_BGTD.to(w_TBGD.dtype), w_TBGD.permute(1, 2, 0, 3), beta_TBG.permute(1, 2, 0))

    def prepare(q_BHSD: Tensor, k_BGTD: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(blocks, k_BGTD, *given, use_reentrant=False, preserve_rng_state=False)

    def rows(scores: None, q: Tensor, k: Tensor, seen: Tensor, tokens: slice, *prepared: Tensor) -> Tensor:
        return scores_through_reflections(q, tokens, *prepared)

    return Reflections(rows, tensors, prepare, takes_scores=False, directions=directions)


def blocks_of_reflections(k_BGTD: Tensor, w_BGTD: Tensor, beta_BGT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Precompute the query-independent factors of the scores, block by block.

    W and K (C, D) are the rows w and k of a block, and U solves (I + tril(diag(beta) W W^T, -1)) U = diag(beta)
    [tril(W K^T, -1) | W]. Returns, with leading axes (N, B*G), [K; W] (2C, D), U (C, C + D), and [K^T | I] - W^T U (D,
    C + D): the keys transformed to the end of the block, followed by the product of the block's transformations.
    """
    D = k_BGTD.shape[-1]
    keys, w = (_blocks(x) for x in (k_BGTD, w_BGTD))
    wb = w * _blocks(beta_BGT[..., None])
    written = torch.cat([(wb @ keys.mT).tril(-1), wb], dim=-1)
    # With unitriangular=True the diagonal is not read.
    solved = torch.linalg.solve_triangular((wb @ w.mT).tril(-1), written, upper=False, unitriangular=True)
    unit = torch.eye(D, dtype=w.dtype, device=w.device).expand(*w.shape[:2], -1, -1)
    return torch.cat([keys, w], dim=2), solved, torch.cat([keys.mT, unit], dim=-1) - w.mT @ solved


def scores_through_reflections(q_BHrD: Tensor, tokens: slice, local: Tensor, solved: Tensor, carried: Tensor) -> Tensor:
    """Return the scores (B, H, r, t) of the queries in `tokens` with all keys up to the last query.

    The other arguments are the results of `blocks_of_reflections`. Scores of keys after a query are finite.
    """
    (B, _, r, D), C, first = q_BHrD.shape, BLOCK, tokens.start
    count = -(-tokens.stop // C)
    # The rows of a token are contiguous, so that the queries of a block and of later blocks are slices.
    q_ArRD = (q_BHrD.to(local.dtype) * D**-0.5).reshape(local.shape[1], -1, r, D).transpose(1, 2)
    R = q_ArRD.shape[2]
    q_AxD = q_ArRD.reshape(len(q_ArRD), r * R, D)
    local, solved, carried = (x[:count].unbind(0) for x in (local, solved, carried))
    later, columns = q_AxD[:, r * R :], []
    for j in reversed(range(count)):
        low, high = (min(max(x * C - first, 0), r) for x in (j, j + 1))
        parts = [q_AxD.new_zeros(len(q_AxD), low * R, C)]
        moved, later = (later @ carried[j]).split([C, D], dim=-1) if later.shape[1] else (later[..., :0], later)
        if low < high:
            own = q_AxD[:, low * R : high * R]
            products, of_w = (own @ local[j].mT).split([C, C], dim=-1)
            place = torch.arange(first + low - j * C, first + high - j * C, device=own.device).repeat_interleave(R)
            of_w = of_w.masked_fill(torch.arange(C, device=own.device) > place[:, None], 0.0)
            undone, start = (of_w @ solved[j]).split([C, D], dim=-1)
            parts.append(products - undone)
            later = torch.cat([own - start, later], dim=1)
        if moved.shape[1]:
            parts.append(moved)
        columns.append(torch.cat(parts, dim=1))
    scores = torch.cat(columns[::-1], dim=-1)[..., : tokens.stop]
    return scores.unflatten(1, (r, R)).transpose(1, 2).reshape(B, -1, r, tokens.stop)


def _blocks(x_BGTE: Tensor) -> Tensor:
    """Return the blocks (N, B*G, C, E) of all tokens, the last one padded with zeros."""
    x = F.pad(x_BGTE, (0, 0, 0, -x_BGTE.shape[2] % BLOCK)).flatten(0, 1)
    return x.unflatten(1, (-1, BLOCK)).transpose(0, 1)
