"""FIRE: functional interpolation for relative positional encoding (Li et al., 2024)."""

from dataclasses import dataclass

from megatron_tape.ops.backends import BIAS
from megatron_tape.position.encoding import (
    Costs,
    Count,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
    Positive,
)

_EPSILON = 1e-6
"""Added to the divisor of distances, which is 0 if c is 0."""


@dataclass(frozen=True, kw_only=True)
class FireSettings(EncodingSettings):
    """Settings of the MLP that maps normalized distances to biases."""

    fire_mlp_size: Count = 32
    """fire: hidden size of the MLP that maps a normalized distance to the biases of all heads."""
    fire_threshold: Positive = 512.0
    """fire: initial threshold L in tokens. For queries at positions below L, distances are
    normalized by L instead of the query's position. The model learns a factor of L."""


class FirePosition(PositionEncoding):
    """The bias of query s and key t is an MLP of log(c (s - t) + 1) / log(c max(s, L) + 1).

    Parameters: the scalars `log_scale` c and `threshold_scale` (a factor of L); `up_weight` and
    `up_bias` (W,) and `down_weight` (H, W) of the MLP, whose activation is ReLU. Its output has no
    bias, which softmax would cancel.
    """

    name = "fire"
    Settings = FireSettings
    # FIRE cannot use POINTWISE: a function of a single pair cannot compute the MLP's matrix
    # product.
    needs = frozenset({BIAS})
    restarts_in_documents = True

    def parameters(self, layer):
        """Return the parameters. As in the released code, weights start normally distributed and
        the bias at zero.
        """
        heads = self.model.num_attention_heads
        width = self.settings.fire_mlp_size
        std = self.model.init_std
        return {
            "log_scale": Parameter((1,), value=0.1),
            "threshold_scale": Parameter((1,), value=1.0),
            "up_weight": Parameter((width,), std=std),
            "up_bias": Parameter((width,)),
            "down_weight": Parameter((heads, width), std=std, partition_dim=0),
        }

    def costs(self, layer, batch):
        """Return the costs: the MLP for each visible pair of query and key; the state is a token's
        position.
        """
        mlp = self.settings.fire_mlp_size * (1 + self.model.num_attention_heads)
        products = int(mlp * self.model.keys_per_query(layer))
        return Costs(multiply_adds=products, state=1, state_width=4)

    def initial_state(self, positions_SB, dtype):
        """Return the positions (S, B or 1) in float32, which represents them exactly."""
        return positions_SB.float()

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the bias of all pairs of query and key, from the positions of all tokens."""
        import torch

        from megatron_tape.ops.bias import Bias

        # From `log_scale` on, the arguments are the parameters that `parameters` returns, in its
        # order; `down_hW` has only the h heads of this rank.
        def tile(
            rows,
            columns,
            positions_BT,
            log_scale,
            threshold_scale,
            up_W,
            up_bias_W,
            down_hW,
        ):
            """Return the bias of a tile, (B or 1, h, rows, columns)."""
            queries = positions_BT[:, rows].to(log_scale.dtype)
            keys = positions_BT[:, columns].to(log_scale.dtype)
            threshold = (threshold_scale * self.settings.fire_threshold).abs()
            # Keys after a query are masked; their distances only have to be finite.
            distances = (queries[:, :, None] - keys[:, None]).abs()
            largest = torch.maximum(queries, threshold)
            divisors = (log_scale * largest).abs().log1p() + _EPSILON
            normalized = (log_scale * distances).abs().log1p() / divisors[:, :, None]

            # Batched matrix products are used instead of broadcasting, in which the parameters'
            # gradients would be as large as `inner` before they are summed.
            batch = len(normalized)
            up = up_W[:, None].expand(batch, -1, -1)
            up_bias = up_bias_W[:, None].expand(batch, -1, -1)
            inner = torch.relu(torch.baddbmm(up_bias, up, normalized.flatten(1)[:, None]))
            return (down_hW @ inner).unflatten(2, normalized.shape[1:])

        positions_TB = cache.append("positions", state)
        return PositionInputs(bias=Bias(tile, (positions_TB.T, *parameters.values())))
