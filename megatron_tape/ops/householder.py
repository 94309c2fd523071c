"""Scores between which Householder-like transformations of all tokens in between are applied (PaTH, Yang et al., 2025).

The score of query s and key t is q_s^T H_s H_(s-1) ... H_(t+1) k_t / sqrt(D), where H_l = I - beta_l w_l w_l^T. Tokens
are cut into blocks of C. Inside a block the product has the closed form of the UT transform (section 3 of the paper);
between blocks, queries carried to the start of their block are multiplied by whole blocks' products, from right to
left. No S x T numbers are kept, and S queries take O(S T D) work.
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
"""C, the tokens of a block; the paper's kernels use the same."""


@dataclass(frozen=True)
class Reflections(Rescore):
    """Scores through the transformations whose w (T, B, G, D) and beta (T, B, G) `directions` computes of `tensors`."""

    need: ClassVar[str] = REFLECTIONS
    directions: Callable[..., tuple[Tensor, Tensor]] | None = None

    def w_and_beta(self) -> tuple[Tensor, Tensor]:
        """Return w and beta, for kernels that compute the scores themselves."""
        return self.directions(*self.tensors)


def through_reflections(directions: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...]) -> Reflections:
    """Return the scores for what `directions` computes from `tensors`; this is computed again in the backward pass."""

    def blocks(k_BGTD: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        w_TBGD, beta_TBG = directions(*given)
        return blocks_of_reflections(k_BGTD.to(w_TBGD.dtype), w_TBGD.permute(1, 2, 0, 3), beta_TBG.permute(1, 2, 0))

    def prepare(q_BHSD: Tensor, k_BGTD: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(blocks, k_BGTD, *given, use_reentrant=False, preserve_rng_state=False)

    def rows(scores: None, q: Tensor, k: Tensor, seen: Tensor, tokens: slice, *prepared: Tensor) -> Tensor:
        return scores_through_reflections(q, tokens, *prepared)

    return Reflections(rows, tensors, prepare, takes_scores=False, directions=directions)


def blocks_of_reflections(k_BGTD: Tensor, w_BGTD: Tensor, beta_BGT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the scores of any queries need of the keys and of the transformations.

    With W, K (C, D) the rows w and k of a block and U the solution of (I + tril(diag(beta) W W^T, -1)) U = diag(beta)
    [tril(W K^T, -1) | W], these are (N, B*G, ...): the rows [K; W] (2C, D), U (C, C + D), and [K^T | I] - W^T U (D, C +
    D), which is the keys carried to the end of the block, beside the product of its transformations.
    """
    D = k_BGTD.shape[-1]
    keys, w = (_blocks(x) for x in (k_BGTD, w_BGTD))
    wb = w * _blocks(beta_BGT[..., None])
    written = torch.cat([(wb @ keys.mT).tril(-1), wb], dim=-1)
    # The diagonal is not read: it is taken as ones.
    solved = torch.linalg.solve_triangular((wb @ w.mT).tril(-1), written, upper=False, unitriangular=True)
    unit = torch.eye(D, dtype=w.dtype, device=w.device).expand(*w.shape[:2], -1, -1)
    return torch.cat([keys, w], dim=2), solved, torch.cat([keys.mT, unit], dim=-1) - w.mT @ solved


def scores_through_reflections(q_BHrD: Tensor, tokens: slice, local: Tensor, solved: Tensor, carried: Tensor) -> Tensor:
    """Return the scores (B, H, r, t) of the queries of `tokens` and all keys up to the last of them.

    The other arguments are the results of `blocks_of_reflections`. Scores of later keys are finite.
    """
    (B, _, r, D), C, first = q_BHrD.shape, BLOCK, tokens.start
    count = -(-tokens.stop // C)
    # Rows of one token lie together, so that the queries of a block, and those after it, are slices.
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
    """Return the blocks (N, B*G, C, E) of all tokens; the last is filled with zeros, which change nothing."""
    x = F.pad(x_BGTE, (0, 0, 0, -x_BGTE.shape[2] % BLOCK)).flatten(0, 1)
    return x.unflatten(1, (-1, BLOCK)).transpose(0, 1)
