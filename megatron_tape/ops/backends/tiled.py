"""Causal attention that averages several values with the same weights, in plain torch, one tile of
scores at a time.

The fused CPU kernels of torch's SDPA require values as wide as the keys, so that TAPE would need
two calls: for v and for z. Here the values are concatenated, and tiles of scores fit into a
processor's cache. This is faster than two calls on CPUs, and neither packed documents nor a bias
need S x T matrices. The algorithm is flash attention (Dao, 2023); the reference is `naive.py`.
Axes: B batch, G key/value groups, R query heads of a group, S queries, T keys (the last S of them
are the queries' own tokens), D head dimension.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends.products import LOG2_E, DecayedProducts, Products, query_block
from megatron_tape.ops.backends.rows import attend_by_rows
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.decay import Decay

QUERIES = 128
KEYS = 256
"""Rows and columns of a tile."""


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if averaged, z, each (S, B, H, D). bf16 and fp16 are
    computed in fp32.
    """
    log_decay = None
    if isinstance(x.rescore, Decay):
        log_decay = x.rescore.log_decay_TBHD
    elif x.rescore is not None:
        # It computes a score from all keys of a query, not only from those of a tile.
        return attend_by_rows(x, QUERIES)

    q, k, *values = (y.permute(1, 2, 0, 3) for y in x.prepared())
    G = k.shape[1]
    bias = None
    bias_tensors: tuple[Tensor, ...] = ()
    if x.bias is not None:
        # The tensors are passed apart from the bias, since autograd tracks only tensors that are
        # arguments.
        bias_tensors = x.bias.tensors
        bias = x.bias.without_tensors()

    q_BGRSD = q.unflatten(1, (G, -1))
    attend_in_tiles = partial(
        _TiledAttention.apply,
        len(values),
        bias,
        _Tiles(x),
    )
    averages = x.run(attend_in_tiles, q_BGRSD, k, log_decay, x.sink_H, *values, *bias_tensors)
    return tuple(y.flatten(1, 2).permute(2, 0, 1, 3) for y in averages)


class _Tiles:
    """The tiles of attention that have a visible pair of query and key, and the masks inside
    them.
    """

    def __init__(self, x: AttentionInputs):
        self.S, self.B, H, _ = x.q_SBHD.shape
        T, _, G, _ = x.k_TBGD.shape
        self.R = H // G
        self.keys = torch.arange(T, device=x.q_SBHD.device)
        # The token of the first query: slices of queries count from it, slices of keys from the
        # first key, which may be cached.
        self.offset = T - self.S
        self.queries = self.keys[self.offset :]
        self.window = x.window
        # The size of blocks of keys, and a token at which one starts.
        self.block_of_keys = KEYS
        self.origin = 0
        if isinstance(x.rescore, Decay):
            # `DecayedProducts` needs the same blocks of keys and of queries.
            self.block_of_keys = QUERIES
            self.origin = self.offset % QUERIES

        # Without documents, all sequences have the same masks.
        self.starts = None
        if x.documents is not None:
            self.starts = x.documents.bounds_2BT[0, :, self.offset :]
        # The first key that each query may attend to: the smallest and the largest in the batch.
        self.first_seen = [0] * self.S
        self.latest_first_seen = self.first_seen
        if x.visibility is not None:
            self.first_seen, self.latest_first_seen = x.visibility.first_seen(self.S)
        self._bands: dict[tuple, Tensor] = {}
        """The results of `_band` by its arguments."""

    def of_tokens(self, rows: slice) -> slice:
        """Return the slice of the T tokens to which the queries `rows` belong."""
        return slice(rows.start + self.offset, rows.stop + self.offset)

    def blocks_of_keys(self) -> list[slice]:
        """Return all blocks of keys."""
        T = len(self.keys)
        size = self.block_of_keys
        starts = range(self.origin, T, size)
        blocks = [slice(start, min(start + size, T)) for start in starts]
        if self.origin > 0:
            blocks.insert(0, slice(0, self.origin))
        return blocks

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield each block of queries, and the blocks of keys to which they attend."""
        for start in range(0, self.S, QUERIES):
            stop = min(start + QUERIES, self.S)
            # The first visible key, rounded down to the start of a block of keys.
            size = self.block_of_keys
            low = (self.first_seen[start] - self.origin) // size * size + self.origin
            high = stop + self.offset
            # The block before `origin` may be smaller.
            columns = [slice(max(c, 0), min(c + size, high)) for c in range(low, high, size)]
            yield slice(start, stop), columns

    def add_bias(self, scores: Tensor, bias: Tensor) -> None:
        """Add a bias (B or 1, H or 1, rows or 1, columns or 1) to scores (B*G, R*rows, columns), in
        place.

        The scores are base-2 logarithms, the bias is a natural one.
        """
        rows = scores.shape[1] // self.R
        columns = scores.shape[2]
        scores.view(self.B, -1, rows, columns).add_(bias, alpha=LOG2_E)

    def hide(
        self,
        scores: Tensor,
        rows: slice,
        columns: slice,
        value: float,
    ) -> None:
        """Overwrite the masked elements of `scores` (B*G, R*rows, columns) with `value`, in
        place.
        """
        # Starts never decrease, so that of the last query is the latest one.
        all_attend_from_here = columns.start >= self.latest_first_seen[rows.stop - 1]
        own_token = rows.start + self.offset
        all_attend_up_to_here = columns.stop <= own_token + 1
        if all_attend_from_here and all_attend_up_to_here:
            return

        # A view, (B, G, R, rows, columns).
        by_head = scores.unflatten(-2, (self.R, -1)).unflatten(0, (self.B, -1))
        if not all_attend_from_here and self.starts is not None:
            keys = self.keys[columns]
            hidden = keys > self.queries[rows, None]
            # Each sequence of the batch has bounds of its own: (B, 1, 1, rows, columns).
            hidden = hidden | (keys < self.starts[:, None, None, rows, None])
            by_head.masked_fill_(hidden, value)
            return

        # The mask depends only on the difference between query and key. What follows takes a tenth
        # of the time of masked_fill_.
        diagonal = own_token - columns.start
        if value == float("-inf"):
            by_head.add_(self._band(by_head, diagonal, not all_attend_from_here))
            return
        by_head.tril_(diagonal)
        if not all_attend_from_here:
            by_head.triu_(diagonal - self.window + 1)

    def _band(self, like: Tensor, diagonal: int, in_window: bool) -> Tensor:
        """Return a tile (rows, columns) that is zero where key - query <= diagonal, counted from
        the start of the tile, and minus infinity elsewhere.

        With `in_window`, it is minus infinity outside the window, too. `like` is (..., rows,
        columns).
        """
        key = (*like.shape[-2:], diagonal, in_window)
        if key not in self._bands:
            hidden = like.new_full(like.shape[-2:], float("-inf"))
            band = hidden.triu(diagonal + 1)
            if in_window:
                band += hidden.tril(diagonal - self.window)
            self._bands[key] = band
        return self._bands[key]


class _TiledAttention(Function):
    """Maps q (B, G, R, S, D), k (B, G, T, D) and `value_count` values (B, G, T, E) to averages of
    the values, (B, G, R, S, E).

    `log_decay` (T, B, H, D) and `sink` (H,) may be None. `tensors` are the values, then the tensors
    of `bias`. Scores are base-2 logarithms: they include the factor LOG2_E.
    """

    @staticmethod
    def forward(
        ctx,
        value_count: int,
        bias: Bias | None,
        tiles: _Tiles,
        q,
        k,
        log_decay,
        sink,
        *tensors,
    ):
        values = tensors[:value_count]
        bias_tensors = tensors[value_count:]
        B, G, R, S, _ = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        products = _products(q, k, log_decay, tiles, dtype)
        value = torch.cat(values, dim=-1).flatten(0, 1).to(dtype)
        widths = [v.shape[-1] for v in values]

        # In memory, the sequence axis of the outputs comes first, as the output projection expects:
        # it would copy other layouts.
        outputs = []
        for v in values:
            shape = (S, B, G, R, v.shape[-1])
            output = torch.empty(shape, dtype=v.dtype, device=q.device)
            outputs.append(output.permute(1, 2, 3, 0, 4))
        lse = torch.empty(B, G, R, S, dtype=dtype, device=q.device)

        for rows, blocks in tiles.blocks():
            products.start(rows)
            # For each query: its largest score so far, and relative to it the sum of its weights
            # and the weighted sum of the values.
            row_count = R * (rows.stop - rows.start)
            if sink is None:
                largest = value.new_full((B * G, row_count, 1), float("-inf"))
                total = torch.zeros_like(largest)
            else:
                # The sink is like a key whose value is zero.
                sinks = sink.to(dtype).view(G, R, 1).expand(B, G, R, rows.stop - rows.start)
                largest = sinks.reshape(B * G, row_count, 1) * LOG2_E
                total = torch.ones_like(largest)
            averaged = value.new_zeros(B * G, row_count, value.shape[-1])

            for columns in blocks:
                scores = products.scores(columns)
                if bias is not None:
                    tokens = tiles.of_tokens(rows)
                    tile = bias.tile(tokens, columns, *bias_tensors)
                    tiles.add_bias(scores, tile)
                tiles.hide(scores, rows, columns, float("-inf"))

                largest_of_tile = scores.amax(-1, keepdim=True)
                new_largest = torch.maximum(largest, largest_of_tile)
                # A query without any visible key so far has no largest score to subtract; the
                # difference of two infinities would be NaN.
                shift = new_largest.masked_fill(new_largest == float("-inf"), 0.0)
                p = _exp2(scores.sub_(shift))
                # `_exp2` gives masked keys a small weight instead of zero.
                tiles.hide(p, rows, columns, 0.0)

                # `total` and `averaged` are still relative to the previous largest score.
                shrink = largest.sub_(shift).exp2_()
                total.mul_(shrink)
                total.add_(p.sum(-1, keepdim=True))
                averaged.mul_(shrink)
                averaged.baddbmm_(p, value[:, columns])
                largest = new_largest

            averages = averaged.div_(total).view(B, G, R, -1, value.shape[-1])
            for output, average in zip(outputs, averages.split(widths, dim=-1)):
                output[:, :, :, rows] = average
            row_lse = total.log2_().add_(largest)
            lse[:, :, :, rows] = row_lse.view(B, G, R, -1)

        ctx.save_for_backward(
            q,
            k,
            log_decay,
            sink,
            lse,
            *values,
            *outputs,
            *bias_tensors,
        )
        ctx.value_count = value_count
        ctx.bias = bias
        ctx.tiles = tiles
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        q, k, log_decay, sink, lse, *rest = ctx.saved_tensors
        values = rest[: ctx.value_count]
        outputs = rest[ctx.value_count : 2 * ctx.value_count]
        bias_tensors = rest[2 * ctx.value_count :]
        B, G, R, _, _ = q.shape
        dtype = lse.dtype
        tiles = ctx.tiles
        products = _products(q, k, log_decay, tiles, dtype, with_gradients=True)
        value = torch.cat(values, dim=-1).flatten(0, 1).to(dtype)
        dvalue = torch.zeros_like(value)
        # The gradient of the softmax subtracts the dot product of each output and its gradient,
        # (B, G, R, S).
        delta = sum((do.to(dtype) * o).sum(-1) for do, o in zip(gradients, outputs))
        bias = None
        if ctx.bias is not None:
            needed = ctx.needs_input_grad[-len(bias_tensors) :]
            bias = _BiasGradient(ctx.bias, bias_tensors, needed)

        for rows, blocks in tiles.blocks():
            products.start(rows)
            gradient = torch.cat([query_block(do, rows, dtype) for do in gradients], dim=-1)
            row_lse = lse[:, :, :, rows].reshape(B * G, -1, 1)
            row_delta = delta[:, :, :, rows].reshape(B * G, -1, 1)

            for columns in blocks:
                scores = products.scores(columns)
                if bias is not None:
                    tile = bias.tile(tiles.of_tokens(rows), columns)
                    tiles.add_bias(scores, tile)
                p = _exp2(scores.sub_(row_lse))
                tiles.hide(p, rows, columns, 0.0)
                dvalue[:, columns].baddbmm_(p.mT, gradient)

                # The gradient of the scores without the factor LOG2_E.
                ds = gradient @ value[:, columns].mT
                ds.sub_(row_delta)
                ds.mul_(p)
                if bias is not None:
                    bias.add(ds.view(B, G * R, -1, ds.shape[-1]))
                products.add_gradient(ds, columns)

            if bias is not None:
                bias.end(tiles.of_tokens(rows))
            products.end(rows)

        dsink = None
        if sink is not None:
            weight_of_sink = (sink.to(dtype).view(G, R, 1) * LOG2_E - lse).exp2_()
            dsink = -(weight_of_sink * delta).sum((0, 3)).flatten().to(sink.dtype)
        widths = [v.shape[-1] for v in values]
        dvalues = dvalue.view(B, G, k.shape[2], -1).split(widths, dim=-1)
        # The first three arguments, `value_count` to `tiles`, have no gradients.
        return (
            None,
            None,
            None,
            *products.gradients(),
            dsink,
            *(dv.to(v.dtype) for dv, v in zip(dvalues, values)),
            *(bias.gradients if bias else ()),
        )


def _products(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    tiles: _Tiles,
    dtype: torch.dtype,
    with_gradients: bool = False,
) -> Products | DecayedProducts:
    """Return the products of queries and keys, with decays unless `log_decay` is None."""
    if log_decay is None:
        return Products(q, k, dtype, with_gradients)
    return DecayedProducts(q, k, log_decay, tiles.blocks_of_keys(), dtype, with_gradients)


def _exp2(x: Tensor) -> Tensor:
    """Compute exp2(x) in place, clamped from below to 2^-90, since CPUs are several times slower
    for denormal results.

    The clamped weights are negligible, because the largest weight of a row is 1.
    """
    return x.clamp_(min=-90.0).exp2_()


class _BiasGradient:
    """Recomputes the tiles of a bias in the backward pass and accumulates the gradients of its
    tensors.

    For each block of queries, call `tile` and `add` for every block of keys, then `end`.
    """

    def __init__(
        self,
        bias: Bias,
        tensors: list[Tensor],
        needed: tuple[bool, ...],
    ):
        self._bias = bias
        self._leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needed)]
        """The tensors of the bias, as leaves of the graphs of its tiles."""
        self._learned = [i for i, need in enumerate(needed) if need]
        """Indices of the tensors that need a gradient."""
        self.gradients = [torch.zeros_like(x) if need else None for x, need in zip(tensors, needed)]
        """The gradients of the tensors; None for tensors that need none."""
        self._row_sums: Tensor | float = 0.0
        """For the current block of queries, the gradients of the scores, summed over the keys so
        far, (B, H, rows); 0.0 at the start of a block.
        """

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the bias of a tile, and keep its graph for `add`."""
        # In a backward pass, autograd disables gradients, so they must be enabled again.
        with torch.enable_grad():
            self._tile = self._bias.tile(rows, columns, *self._leaves)
        return self._tile.detach()

    def add(self, ds_BHrc: Tensor) -> None:
        """Add the gradient `ds_BHrc` of the scores of the last `tile` to `gradients`."""
        if self._learned and self._tile.requires_grad:
            self._add(self._tile, ds_BHrc.sum_to_size(self._tile.shape))
            if self._bias.left_out is not None:
                self._row_sums = self._row_sums + ds_BHrc.sum(-1)

    def end(self, rows: slice) -> None:
        """Add the gradient of the constants that the tiles of the queries `rows` omit
        (`Bias.left_out`).
        """
        if isinstance(self._row_sums, Tensor):
            with torch.enable_grad():
                constants = self._bias.left_out(rows, *self._leaves)
            if constants.requires_grad:
                self._add(constants, self._row_sums.sum_to_size(constants.shape))
            self._row_sums = 0.0

    def _add(self, output: Tensor, gradient: Tensor) -> None:
        """Add to `gradients` those of the tensors, given the `gradient` of an `output` of `Bias`'s
        functions.
        """
        leaves = [self._leaves[i] for i in self._learned]
        parts = torch.autograd.grad(
            output,
            leaves,
            gradient.to(output.dtype),
            allow_unused=True,
        )
        for i, part in zip(self._learned, parts):
            if part is not None:
                self.gradients[i] += part
