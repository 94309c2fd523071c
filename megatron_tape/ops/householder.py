"""Scores with the Householder-like transformations of all tokens between query and key (PaTH, Yang
et al., 2025).

The score of query s and key t is q_s^T H_s H_(s-1) ... H_(t+1) k_t / sqrt(D), where H_l = I -
beta_l w_l w_l^T is a reflection if beta_l = 2 and |w_l| = 1. Tokens are split into blocks of C.
Within a block, the product of the H has a closed form, the UT transform (section 3 of the paper). A
query is transformed to the start of its block and then, block by block, by the product of each
earlier block. No S x T matrix is saved, and S queries take O(S T D) operations. Axes: T tokens, B
batch, G key/value groups, A = B * G, R query heads of a group, r queries of one call, t keys that
end with the last of them, N blocks of C tokens, D head dimension.
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
    """A `Rescore` with PaTH's scores; `directions(*tensors)` returns w (T, B, G, D) and beta (T, B,
    G) of the H.
    """

    need: ClassVar[str] = REFLECTIONS
    directions: Callable[..., tuple[Tensor, Tensor]] | None = None

    def w_and_beta(self) -> tuple[Tensor, Tensor]:
        """Return w and beta, for kernels that compute the scores themselves."""
        return self.directions(*self.tensors)


def through_reflections(
    directions: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...]
) -> Reflections:
    """Return `Reflections` with w and beta of `directions(*tensors)`, which the backward pass calls
    again.
    """

    def blocks(k_BGTD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the three results of `blocks_of_reflections`; `inputs` are the tensors of
        `directions`.
        """
        w_TBGD, beta_TBG = directions(*inputs)
        w_BGTD = w_TBGD.permute(1, 2, 0, 3)
        return blocks_of_reflections(k_BGTD.to(w_TBGD.dtype), w_BGTD, beta_TBG.permute(1, 2, 0))

    def prepare(q_BHSD: Tensor, k_BGTD: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the result of `blocks`, with its intermediate results recomputed in the backward
        pass.
        """
        # A checkpoint saves only the inputs; the intermediate results of `blocks` take several
        # times their memory.
        return checkpoint(blocks, k_BGTD, *inputs, use_reentrant=False, preserve_rng_state=False)

    def rows(
        scores: None,
        q: Tensor,
        k: Tensor,
        seen: Tensor,
        tokens: slice,
        *prepared: Tensor,
    ) -> Tensor:
        """Return the scores of a block of queries; `prepared` is the result of `prepare`."""
        first_key = tokens.stop - k.shape[2]
        return scores_through_reflections(q, tokens, first_key, *prepared)

    return Reflections(rows, tensors, prepare, takes_scores=False, directions=directions)


def blocks_of_reflections(
    k_BGTD: Tensor,
    w_BGTD: Tensor,
    beta_BGT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of the scores that do not depend on queries, for each block of tokens.

    K and W (C, D) hold the keys k and the vectors w of a block, and U solves
        (I + tril(diag(beta) W W^T, -1)) U = diag(beta) [tril(W K^T, -1) | W].
    The three results have the leading axes (N, B*G): [K; W] (2C, D), U (C, C + D), and [K^T | I] -
    W^T U (D, C + D). The last one holds the keys transformed to the end of the block, and then the
    product of the block's H.
    """
    D = k_BGTD.shape[-1]
    keys = _blocks(k_BGTD)
    w = _blocks(w_BGTD)
    beta_w = w * _blocks(beta_BGT[..., None])
    right_side = torch.cat([(beta_w @ keys.mT).tril(-1), beta_w], dim=-1)
    # The identity on the diagonal is implied: with unitriangular=True the diagonal is not read.
    matrix = (beta_w @ w.mT).tril(-1)
    U = torch.linalg.solve_triangular(matrix, right_side, upper=False, unitriangular=True)

    identity = torch.eye(D, dtype=w.dtype, device=w.device).expand(*w.shape[:2], -1, -1)
    at_end = torch.cat([keys.mT, identity], dim=-1) - w.mT @ U
    return torch.cat([keys, w], dim=2), U, at_end


def scores_through_reflections(
    q_BHrD: Tensor,
    tokens: slice,
    first_key: int,
    keys_and_w: Tensor,
    U: Tensor,
    at_end: Tensor,
) -> Tensor:
    """Return the scores (B, H, r, t) of the queries at `tokens` with the keys from `first_key` to
    the last query.

    `keys_and_w`, `U` and `at_end` are the results of `blocks_of_reflections`. Scores of keys after
    a query are meaningless, but finite.
    """
    B, _, r, D = q_BHrD.shape
    C = BLOCK
    first = tokens.start
    # The blocks from that of the first key to that of the last query.
    first_block = first_key // C
    end_block = -(-tokens.stop // C)
    # The R queries of a token are adjacent, so that the queries of a block, and those of later
    # blocks, are slices.
    scaled = q_BHrD.to(U.dtype) * D**-0.5
    q_ArRD = scaled.reshape(U.shape[1], -1, r, D).transpose(1, 2)
    R = q_ArRD.shape[2]
    queries = q_ArRD.reshape(len(q_ArRD), r * R, D)
    # The queries after block j, transformed to its end; none after the last block.
    later = queries[:, r * R :]
    # Blocks are separated by `unbind`: indexing one block at a time would create a gradient as
    # large as the whole tensor for each of them.
    blocks = slice(first_block, end_block)
    keys_and_w, U, at_end = (x[blocks].unbind() for x in (keys_and_w, U, at_end))
    scores_of_blocks = []

    for j in reversed(range(first_block, end_block)):
        i = j - first_block
        # Queries below `low` come before block j, those from `high` on after it.
        low = min(max(j * C - first, 0), r)
        high = min(max((j + 1) * C - first, 0), r)
        # The scores of block j's keys: zeros for queries before it, then those inside and after it.
        parts = [queries.new_zeros(len(queries), low * R, C)]
        later_scores = None
        if later.shape[1]:
            # One product computes these queries' scores with the block's keys, and transforms them
            # to the block's start.
            later_scores, later = (later @ at_end[i]).split([C, D], dim=-1)

        if low < high:
            inside = queries[:, low * R : high * R]
            products, w_products = (inside @ keys_and_w[i].mT).split([C, C], dim=-1)
            # Only the H up to its own token apply to a query; `own` is that token's index in the
            # block.
            index = torch.arange(C, device=inside.device)
            own = index[first + low - j * C : first + high - j * C].repeat_interleave(R)
            w_products = w_products.masked_fill(index > own[:, None], 0.0)
            reflected, change = (w_products @ U[i]).split([C, D], dim=-1)
            parts.append(products - reflected)
            later = torch.cat([inside - change, later], dim=1)

        if later_scores is not None:
            parts.append(later_scores)
        scores_of_blocks.append(torch.cat(parts, dim=1))

    # The last block was computed first. (B*G, r*R, t) becomes (B, H, r, t).
    start = first_block * C
    scores = torch.cat(scores_of_blocks[::-1], dim=-1)
    scores = scores[..., first_key - start : tokens.stop - start]
    scores_ARrt = scores.unflatten(1, (r, R)).transpose(1, 2)
    return scores_ARrt.reshape(B, -1, r, tokens.stop - first_key)


def _blocks(x_BGTE: Tensor) -> Tensor:
    """Split the tokens into blocks (N, B*G, C, E), and pad the last block with zeros; E is any
    width.
    """
    x = F.pad(x_BGTE, (0, 0, 0, -x_BGTE.shape[2] % BLOCK)).flatten(0, 1)
    return x.unflatten(1, (-1, BLOCK)).transpose(0, 1)
