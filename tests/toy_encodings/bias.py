"""A toy: a learned slope for each head, which makes far keys count less."""

from megatron_tape.ops.backends import BIAS
from megatron_tape.position import Costs, Parameter, PositionEncoding, Positions, register


@register
class ToyBias(PositionEncoding):
    name = "toy_bias"
    needs = frozenset({BIAS})

    def parameters(self, layer):
        heads = self.model.num_attention_heads
        slopes = tuple(2.0**-head for head in range(heads))
        return {"slopes": Parameter((heads,), value=slopes, head_axis=0)}

    def costs(self, layer, batch):
        return Costs(multiply_adds=self.model.num_attention_heads * self.model.seq_length // 2)

    def positions(self, layer, parameters, state, hidden_states_sBC, memory):
        import torch

        from megatron_tape.ops.bias import Bias

        def tile(rows, columns, slopes):
            at = [torch.arange(x.start, x.stop, device=slopes.device) for x in (rows, columns)]
            return slopes[None, :, None, None] * (at[1] - at[0][:, None])

        return Positions(bias=Bias(tile, (parameters["slopes"],)))
