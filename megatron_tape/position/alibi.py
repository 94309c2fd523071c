"""ALiBi: attention with linear biases (Press et al., 2022)."""

import math

from megatron_tape.ops.backends import POINTWISE
from megatron_tape.position.encoding import Costs, PositionEncoding, PositionInputs


class AlibiPosition(PositionEncoding):
    """Subtracts m_h (s - t) from the score of query s and key t in head h; the slopes m_h are
    fixed.
    """

    name = "alibi"
    needs = frozenset({POINTWISE})

    def costs(self, layer, batch):
        """Return the costs: one product per head and key that a query attends to."""
        heads = self.model.num_attention_heads
        return Costs(multiply_adds=int(heads * self.model.keys_per_query(layer)))

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the bias -m_h (s - t). It depends only on distances, so packed documents need no
        special handling.
        """
        import torch

        from megatron_tape.ops.bias import Bias

        all_slopes = self.constant("slopes", self._slopes, hidden_states_sBC.device)
        slopes = self.token_layout.local_heads(all_slopes)

        def tile(rows, columns, slopes):
            """Return the bias of a tile, (1, h, rows, columns). `rows` and `columns` are slices."""
            queries = torch.arange(rows.start, rows.stop, device=slopes.device)
            keys = torch.arange(columns.start, columns.stop, device=slopes.device)
            return slopes[None, :, None, None] * (keys - queries[:, None])

        def score(batch, head, query, key, slopes):
            """Return the bias of one pair of query and key."""
            return slopes[head] * (key - query)

        # `score` is the same bias for FlexAttention, which compiles it. Other backends call `tile`.
        return PositionInputs(bias=Bias(tile, (slopes,), score))

    def _slopes(self):
        """Return the slopes of all heads, (H,)."""
        import torch

        return torch.tensor(alibi_slopes(self.model.num_attention_heads))


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of H = `heads` heads: 2^(-8 h / H) for h = 1..H if H is a power of two.

    For any other H, as in the paper's code, they are the slopes for the next smaller power of two,
    followed by every other slope for the next larger one.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    # The slopes of 2 * power heads, without those that `slopes` has.
    between = [2.0 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: heads - power]
