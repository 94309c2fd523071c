"""A toy: forget gates with weights sharded by heads, so that each rank computes its gates from all
tokens.
"""

from megatron_tape.ops.backends import GATE
from megatron_tape.position import Parameter, PositionEncoding, PositionInputs, register


@register
class ToyHeadGate(PositionEncoding):
    name = "toy_head_gate"
    needs = frozenset({GATE})

    def parameters(self, layer):
        shape = (self.model.num_attention_heads, self.model.hidden_size)
        return {"gate": Parameter(shape, std=self.model.init_std, partition_dim=0)}

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        from torch.nn.functional import linear, logsigmoid

        gates = logsigmoid(linear(hidden_states_sBC, parameters["gate"]))
        return PositionInputs(log_gate_TBH=cache.append("gates", gates))
