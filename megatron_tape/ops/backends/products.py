"""The products of queries and keys in the backend tiled, one tile at a time, and their gradients.

Tiles of scores are (B*G, R*rows, columns). Axes: B batch, G key/value groups, R query heads of a
group, A = B*G*R query heads of all sequences, S queries, T keys (the last S of them are the
queries' own tokens), D head dimension.
"""

import math

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
    """The same with decays of channels (`ops.decay`).

    Blocks of keys must be those of queries; blocks of cached keys may be smaller. A tile off the
    diagonal multiplies queries by exp(P - P_b), where b is the block's first query, keys by exp(P_e
    - P), where e is the last key, and then the queries by exp(P_b - P_e). No exponent is positive.
    A tile on the diagonal has one anchor, the middle of the block.
    """

    def __init__(
        self,
        q_BGRSD: Tensor,
        k_BGTD: Tensor,
        log_decay_TBHD: Tensor,
        dtype: torch.dtype,
        with_gradients: bool = False,
    ):
        S = q_BGRSD.shape[3]
        R = q_BGRSD.shape[2]
        self._q = q_BGRSD
        self._k = k_BGTD
        self._log_decay = log_decay_TBHD
        self._dtype = dtype
        self._scale = q_BGRSD.shape[-1] ** -0.5
        self._offset = k_BGTD.shape[2] - S
        self._smallest = math.log2(torch.finfo(dtype).smallest_normal) / 3
        """The smallest exponent of a factor. The product of the three factors of a tile is then a
        normal number, and factors that are this small do not change a score."""
        self._sums_ATD = (running_sums(log_decay_TBHD) * LOG2_E).flatten(0, 1)
        self._keys_ATD = k_BGTD.repeat_interleave(R, dim=1).flatten(0, 1).to(dtype)
        self._far_keys: dict[int, Tensor] = {}
        """The keys of each block, multiplied by their factors off the diagonal, by the block's
        start."""
        self._with_gradients = with_gradients
        if with_gradients:
            self._dq = torch.empty_like(q_BGRSD)
            self._dk = torch.zeros_like(self._keys_ATD)
            self._dfar_keys = torch.zeros_like(self._keys_ATD)
            self._dsums = torch.zeros_like(self._keys_ATD)

    def start(self, rows: slice) -> None:
        """Start a block of queries."""
        tokens = slice(rows.start + self._offset, rows.stop + self._offset)
        sums = self._sums_ATD[:, tokens]
        count = sums.shape[1]
        self._tokens = tokens
        self._first = sums[:, :1]
        self._middle = sums[:, count // 2, None]
        self._far_factors = self._exp2(sums - self._first)
        self._near_factors = self._exp2_exactly(sums - self._middle)
        queries = query_block(self._q, rows, self._dtype) * (self._scale * LOG2_E)
        self._queries = queries.view(-1, count, queries.shape[-1])
        self._far_queries = self._queries * self._far_factors
        if self._with_gradients:
            self._dqueries = torch.zeros_like(self._queries)
            self._dfar_queries = torch.zeros_like(self._queries)

    def scores(self, columns: slice) -> Tensor:
        """Return the scores of the block's queries and these keys."""
        sums = self._sums_ATD[:, columns]
        if columns.start == self._tokens.start:
            self._tile_queries = self._queries * self._near_factors
            self._tile_keys = self._keys_ATD[:, columns] * self._exp2_exactly(self._middle - sums)
            # Products of masked pairs may overflow, and infinities of both signs are NaN.
            scores = (self._tile_queries @ self._tile_keys.mT).tril_()
        else:
            if columns.start not in self._far_keys:
                factors = self._exp2(sums[:, -1:] - sums)
                self._far_keys[columns.start] = self._keys_ATD[:, columns] * factors
            self._tile_keys = self._far_keys[columns.start]
            self._tile_factors = self._exp2(self._first - sums[:, -1:])
            self._tile_queries = self._far_queries * self._tile_factors
            scores = self._tile_queries @ self._tile_keys.mT
        # The rows of all heads of a group follow each other, (B*G, R*rows, columns).
        return scores.view(self._k.shape[0] * self._k.shape[1], -1, scores.shape[-1])

    def add_gradient(self, ds: Tensor, columns: slice) -> None:
        """Add the gradients of the block's queries and these keys, given that of the scores without
        the factor LOG2_E.
        """
        ds = ds.view(len(self._tile_keys), -1, ds.shape[-1])
        dqueries = ds @ self._tile_keys
        if columns.start == self._tokens.start:
            self._dqueries.addcmul_(dqueries, self._near_factors)
            factors = self._exp2_exactly(self._middle - self._sums_ATD[:, columns])
            self._dk[:, columns].addcmul_(ds.mT @ self._tile_queries, factors)
        else:
            self._dfar_queries.addcmul_(dqueries, self._tile_factors)
            self._dfar_keys[:, columns].baddbmm_(ds.mT, self._tile_queries)

    def end(self, rows: slice) -> None:
        """Store the gradient of a block of queries."""
        self._dqueries.addcmul_(self._dfar_queries, self._far_factors)
        # The gradient of P_i is q_i dL/dq_i for queries and -k_i dL/dk_i for keys.
        self._dsums[:, self._tokens].addcmul_(self._queries, self._dqueries, value=1 / LOG2_E)
        self._dqueries.mul_(self._scale)
        gradient = self._dq[:, :, :, rows]
        gradient.copy_(self._dqueries.view_as(gradient))

    def gradients(self) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and the logarithms of the decays."""
        B, G, R, _, _ = self._q.shape
        for start, keys in self._far_keys.items():
            columns = slice(start, start + keys.shape[1])
            sums = self._sums_ATD[:, columns]
            factors = self._exp2(sums[:, -1:] - sums)
            self._dk[:, columns].addcmul_(self._dfar_keys[:, columns], factors)
        # The products with `_tile_queries` include LOG2_E, unlike `ds`.
        self._dk.div_(LOG2_E)
        self._dsums.addcmul_(self._keys_ATD, self._dk, value=-1)
        # A decay is part of the sums of its own and all later tokens.
        dlog_decay = self._dsums.double().flip(1).cumsum(1).flip(1)
        dlog_decay = dlog_decay.unflatten(0, (B, G * R)).permute(2, 0, 1, 3)
        dk = self._dk.unflatten(0, (B, G, R)).sum(2)
        return self._dq, dk.to(self._k.dtype), dlog_decay.to(self._log_decay.dtype)

    def _exp2_exactly(self, exponents: Tensor) -> Tensor:
        """Return the factors 2^x for exponents in float64."""
        return exponents.to(self._dtype).exp2_()

    def _exp2(self, exponents: Tensor) -> Tensor:
        """Return the factors 2^x for exponents in float64, with those below `_smallest` raised to
        it.
        """
        return exponents.to(self._dtype).clamp_(min=self._smallest).exp2_()


def query_block(
    x: Tensor,
    rows: slice,
    dtype: torch.dtype,
) -> Tensor:
    """Return the block (B*G, R*rows, ...) of x (B, G, R, S, ...)."""
    block = x[:, :, :, rows]
    return block.flatten(0, 1).flatten(1, 2).to(dtype)
