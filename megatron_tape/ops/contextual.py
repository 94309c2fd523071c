"""The scores of contextual position encoding (CoPE, Golovneva et al., 2024), with a manual backward
pass.

Gathers, and scatters of their gradients, take most of the time, so both process two numbers at
once. Axes: B batch, H query heads, r queries of a block, t keys up to the last of these, p = P + 1
positions from 0 to P.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

_QUERIES = 32
_KEYS = 64
"""Queries and keys of a tile of scores that fits into a CPU's cache. On GPUs a tile has all r
queries, so that there are few tiles: the host waits for the device after each."""


def add_contextual_positions(
    scores_BHrt: Tensor,
    of_positions_BHrp: Tensor,
    seen: Tensor,
) -> Tensor:
    """Return the scores plus the values of the keys' positions, (B, H, r, t).

    `of_positions_BHrp` holds the values of positions 0 to P for each query. Positions are
    fractional, and values are interpolated between the two nearest integers. The position of key t
    is the sum of the sigmoids of the scores from key t to the query's own token, clamped to P; keys
    where `seen` (B or 1, 1, r, t) is False do not count. The last r keys are the queries' own
    tokens. Scores of keys after a query are meaningless, but finite.
    """
    return _ContextualPositions.apply(scores_BHrt, of_positions_BHrp, seen, torch.is_grad_enabled())


class _ContextualPositions(Function):
    """Computes positions tile by tile, from the nearest key to the farthest, as positions grow with
    distance.

    Once all queries of a tile have reached the largest position or have no keys left, all earlier
    keys have the largest position, too. `scores` and `seen` are (B, H or 1, r, t), `of_positions`
    (B, H, r, p). With `saves`, tensors are saved for a backward pass.
    """

    @staticmethod
    def forward(ctx, scores, of_positions, seen, saves):
        r, t = scores.shape[-2:]
        largest = of_positions.shape[-1] - 1
        result = torch.empty_like(scores)
        # A value and the difference to the next one form a complex number, so that one gather reads
        # both.
        differences = of_positions.diff(dim=-1)
        pairs = torch.complex(of_positions, F.pad(differences, (0, 1)))
        tiles = []
        saved = []

        height = r
        if scores.device.type == "cpu":
            height = _QUERIES
        width = max(_KEYS, height)  # every query's own token is in its first tile

        for first in range(0, r, height):
            rows = slice(first, min(first + height, r))
            # Keys from `stop` on come after all of these queries, so any finite score will do.
            stop = t - r + rows.stop
            result[..., rows, stop:] = scores[..., rows, stop:]
            gate_sum = 0.0
            all_done = False

            while stop > 0 and not all_done:
                keys = slice(max(stop - width, 0), stop)
                tile_scores = scores[..., rows, keys]
                visible = seen[..., rows, keys]
                gates = tile_scores.sigmoid()
                if not visible.all():
                    gates.mul_(visible)

                # A position is the sum of the gates from its key to the query. The keys are flipped
                # to sum from the right; `gate_sum` is the sum over the tiles further right.
                from_right = gates.flip(-1).cumsum(-1)
                position = from_right.flip(-1).add_(gate_sum)
                # Copied, since `position` is overwritten below.
                gate_sum = position[..., :1].clone()
                stop = keys.start

                # Interpolate between the values of the nearest integers. From `largest` on, the
                # difference to the next value is zero, whatever the fraction.
                integer = position.floor().clamp_(max=largest)
                index = integer.long()
                pair = pairs[..., rows, :].gather(-1, index)
                fraction = position.sub_(integer)
                slope = pair.imag.contiguous()
                interpolated = torch.addcmul(pair.real, slope, fraction)
                result[..., rows, keys] = interpolated.add_(tile_scores)

                if saves:
                    tiles.append((rows, keys))
                    saved += gates, fraction, index, slope
                # A query is done if all earlier keys have the largest position or are masked.
                has_keys = seen[..., rows, :stop].any(-1, keepdim=True)
                all_done = ((gate_sum >= largest) | ~has_keys).all()

            # All keys further left have the largest position, or are masked.
            far = scores[..., rows, :stop]
            torch.add(far, of_positions[..., rows, -1:], out=result[..., rows, :stop])

        ctx.save_for_backward(*saved)
        ctx.tiles = tiles
        ctx.shape = of_positions.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, dresult):
        # The gradients of scores, of pairs of a value and a slope, and of the values that far keys
        # share.
        dscores = dresult.clone()
        dpairs = dresult.new_zeros(ctx.shape, dtype=dresult.dtype.to_complex())
        dfar = dresult.new_zeros(ctx.shape[:-1])
        saved = ctx.saved_tensors
        previous_rows = None

        # Tiles are visited in the reverse order of the forward pass, from the farthest to the
        # nearest.
        for i, (rows, keys) in reversed(list(enumerate(ctx.tiles))):
            gates, fraction, index, slope = saved[4 * i : 4 * i + 4]
            if rows != previous_rows:  # the farthest tile of these queries
                previous_rows = rows
                dposition_sum = 0.0
                dfar[..., rows] = dresult[..., rows, : keys.start].sum(-1)

            dtile = dresult[..., rows, keys]
            dpair = torch.complex(dtile, fraction * dtile)
            dpairs[..., rows, :].scatter_add_(-1, index, dpair)

            # A gate contributes to the positions of its key and of all farther keys.
            # `dposition_sum` is the sum over the farther tiles.
            dgates = slope.mul(dtile).cumsum(-1)
            dgates.add_(dposition_sum)
            dposition_sum = dgates[..., -1:]
            dscores[..., rows, keys] += torch.ops.aten.sigmoid_backward(dgates, gates)

        # The slope of position p is value[p + 1] - value[p].
        dof_positions = dpairs.real.contiguous()
        dslopes = dpairs.imag[..., :-1]
        dof_positions[..., :-1] -= dslopes
        dof_positions[..., 1:] += dslopes
        dof_positions[..., -1] += dfar
        return dscores, dof_positions, None, None
