"""The products of queries and keys in the backend tiled, one tile at a time, and their gradients.

Tiles of scores are (B*G, R*rows, columns). Axes: B batch, G key/value groups, R query heads of a
group, A = B*G*R query heads of all sequences, S queries, T keys (the last S of them are the
queries' own tokens), D head dimension.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tape.ops.decay import running_sums

LOG2_E = 1 / math.log(2)
"""log2(e), to compute exp(x) as exp2(x LOG2_E): on CPUs, exp2 takes a third of the time of exp."""


class Products:
    """Products of queries and keys, divided by sqrt(D), as base-2 logarithms: they include the
    factor LOG2_E.

    For each block of queries, call `start`, then `scores` for every block of keys. In the backward
    pass, construct with `with_gradients`, call `add_gradient` after `scores`, and `end` after each
    block of queries.
    """

    def __init__(
        self,
        q_BGRSD: Tensor,
        k_BGTD: Tensor,
        dtype: torch.dtype,
        with_gradients: bool = False,
    ):
        self._q = q_BGRSD
        self._k = k_BGTD
        self._dtype = dtype
        self._scale = q_BGRSD.shape[-1] ** -0.5
        self._with_gradients = with_gradients
        self._keys = k_BGTD.flatten(0, 1).to(dtype)
        if with_gradients:
            self._dq = torch.empty_like(q_BGRSD)
            self._dk = torch.zeros_like(self._keys)

    def start(self, rows: slice) -> None:
        """Start a block of queries."""
        self._queries = query_block(self._q, rows, self._dtype) * (self._scale * LOG2_E)
        if self._with_gradients:
            self._dqueries = torch.zeros_like(self._queries)

    def scores(self, columns: slice) -> Tensor:
        """Return the scores of the block's queries and these keys."""
        return self._queries @ self._keys[:, columns].mT

    def add_gradient(self, ds: Tensor, columns: slice) -> None:
        """Add the gradients of the block's queries and these keys, given that of the scores without
        the factor LOG2_E.
        """
        self._dqueries.baddbmm_(ds, self._keys[:, columns])
        self._dk[:, columns].baddbmm_(ds.mT, self._queries)

    def end(self, rows: slice) -> None:
        """Store the gradient of a block of queries."""
        self._dqueries.mul_(self._scale)
        gradient = self._dq[:, :, :, rows]
        gradient.copy_(self._dqueries.view_as(gradient))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and the decays, which do not exist here."""
        # `_dk` is a sum of products with `_queries`, which include LOG2_E, unlike `ds`.
        dk = self._dk.div_(LOG2_E).view_as(self._k).to(self._k.dtype)
        return self._dq, dk, None


class DecayedProducts:
    """The same with decays of channels (`ops.decay`); `blocks` are the blocks of keys.

    From the first query on, these must be the blocks of queries. P are the running sums of the
    decays; exponents are at most 0 but for tiles on the diagonal:

    - On the diagonal, the anchor is the middle m of the block: queries are multiplied by exp(P -
      P_m), and keys are divided by it.
    - Off the diagonal, queries are multiplied by exp(P - P_b), where b is the first query of the
      block, keys by exp(P_e - P), where e is the last key of its block, and the queries of each
      tile by exp(P_b - P_e).
    """

    def __init__(
        self,
        q_BGRSD: Tensor,
        k_BGTD: Tensor,
        log_decay_TBHD: Tensor,
        blocks: list[slice],
        dtype: torch.dtype,
        with_gradients: bool = False,
    ):
        self._q = q_BGRSD
        self._k = k_BGTD
        self._log_decay = log_decay_TBHD
        self._dtype = dtype
        self._scale = q_BGRSD.shape[-1] ** -0.5
        self._offset = k_BGTD.shape[2] - q_BGRSD.shape[3]
        self._smallest = torch.finfo(dtype).smallest_normal ** (1 / 3)
        """The smallest factor off the diagonal. The product of a tile's three factors is then a
        normal number, and products that are this small do not change a score."""
        # The keys of each query head.
        k_BGRTD = k_BGTD[:, :, None].expand(-1, -1, q_BGRSD.shape[2], -1, -1)
        self._keys = k_BGRTD.flatten(0, 2).to(dtype)
        sums = running_sums(log_decay_TBHD).flatten(0, 1)
        self._blocks = {tokens.start: self._block(tokens, sums[:, tokens]) for tokens in blocks}
        self._with_gradients = with_gradients
        if with_gradients:
            self._dq = torch.empty_like(q_BGRSD)
            self._dk = torch.zeros_like(self._keys)
            self._dfar_keys = torch.zeros_like(self._keys)
            self._dsums = torch.zeros_like(self._keys)

    def _block(self, tokens: slice, sums: Tensor) -> "_Block":
        """Return the factors of a block of tokens, given its running sums (A, c, D) in float64."""
        middle = sums[:, sums.shape[1] // 2, None]
        first = sums[:, :1]
        last = sums[:, -1:]
        factors = self._exp(sums - middle)
        of_far_queries = factors * self._exp(middle - first)
        of_far_keys = self._exp(last - middle) / factors
        of_far_keys.clamp_(min=self._smallest)
        return _Block(
            tokens,
            factors,
            of_far_queries.clamp_(min=self._smallest),
            of_far_keys,
            self._keys[:, tokens] * of_far_keys,
            first.clone(),
            last.clone(),
        )

    def start(self, rows: slice) -> None:
        """Start a block of queries."""
        block = self._blocks[rows.start + self._offset]
        self._block_of_queries = block
        queries = query_block(self._q, rows, self._dtype) * (self._scale * LOG2_E)
        self._queries = queries.view_as(block.factors)
        self._far_queries = self._queries * block.of_far_queries
        if self._with_gradients:
            self._dqueries = torch.zeros_like(self._queries)
            self._dfar_queries = torch.zeros_like(self._queries)

    def scores(self, columns: slice) -> Tensor:
        """Return the scores of the block's queries and these keys."""
        own = self._block_of_queries
        if columns == own.tokens:
            self._tile_queries = self._queries * own.factors
            self._tile_keys = self._keys[:, columns] / own.factors
            # Products of masked pairs may overflow, and infinities of both signs are NaN.
            scores = (self._tile_queries @ self._tile_keys.mT).tril_()
        else:
            block = self._blocks[columns.start]
            self._tile_factors = self._exp(own.first - block.last).clamp_(min=self._smallest)
            self._tile_queries = self._far_queries * self._tile_factors
            self._tile_keys = block.far_keys
            scores = self._tile_queries @ self._tile_keys.mT
        # The rows of all heads of a group follow each other, (B*G, R*rows, columns).
        B, G = self._k.shape[:2]
        return scores.view(B * G, -1, scores.shape[-1])

    def add_gradient(self, ds: Tensor, columns: slice) -> None:
        """Add the gradients of the block's queries and these keys, given that of the scores without
        the factor LOG2_E.
        """
        ds = ds.view(len(self._keys), -1, ds.shape[-1])
        dqueries = ds @ self._tile_keys
        own = self._block_of_queries
        if columns == own.tokens:
            self._dqueries.addcmul_(dqueries, own.factors)
            self._dk[:, columns].addcdiv_(ds.mT @ self._tile_queries, own.factors)
        else:
            self._dfar_queries.addcmul_(dqueries, self._tile_factors)
            self._dfar_keys[:, columns].baddbmm_(ds.mT, self._tile_queries)

    def end(self, rows: slice) -> None:
        """Store the gradient of a block of queries."""
        own = self._block_of_queries
        self._dqueries.addcmul_(self._dfar_queries, own.of_far_queries)
        # The gradient of P is q dL/dq for queries and -k dL/dk for keys.
        self._dsums[:, own.tokens].addcmul_(self._queries, self._dqueries, value=1 / LOG2_E)
        self._dqueries.mul_(self._scale)
        gradient = self._dq[:, :, :, rows]
        gradient.copy_(self._dqueries.view_as(gradient))

    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and the logarithms of the decays."""
        B, G, R, _, _ = self._q.shape
        for block in self._blocks.values():
            tokens = block.tokens
            self._dk[:, tokens].addcmul_(self._dfar_keys[:, tokens], block.of_far_keys)
        # The products with `_tile_queries` include LOG2_E, unlike `ds`.
        self._dk.div_(LOG2_E)
        self._dsums.addcmul_(self._keys, self._dk, value=-1)
        # A decay is part of the sums of its own and all later tokens.
        up_to_token = self._dsums.cumsum(1, dtype=torch.float64)
        dlog_decay = self._dsums - up_to_token.sub_(up_to_token[:, -1:].clone())
        dlog_decay = dlog_decay.unflatten(0, (B, G * R)).permute(2, 0, 1, 3)
        dk = self._dk.unflatten(0, (B, G, R)).sum(2)
        return self._dq, dk.to(self._k.dtype), dlog_decay.to(self._log_decay.dtype)

    def _exp(self, exponents: Tensor) -> Tensor:
        """Return the exponentials of natural logarithms in float64."""
        return exponents.to(self._dtype).mul_(LOG2_E).exp2_()


@dataclass(frozen=True)
class _Block:
    """Factors of a block of c tokens in `DecayedProducts`, (A, c, D) unless stated otherwise."""

    tokens: slice
    factors: Tensor
    """Factors on the diagonal of queries, by which keys are divided."""
    of_far_queries: Tensor
    of_far_keys: Tensor
    """Factors off the diagonal."""
    far_keys: Tensor
    """The keys, multiplied by `of_far_keys`."""
    first: Tensor
    last: Tensor
    """The sums of the first and the last token, (A, 1, D), in float64."""


def query_block(
    x: Tensor,
    rows: slice,
    dtype: torch.dtype,
) -> Tensor:
    """Return the block (B*G, R*rows, ...) of x (B, G, R, S, ...)."""
    block = x[:, :, :, rows]
    return block.flatten(0, 1).flatten(1, 2).to(dtype)
