"""A toy: forget gates from the hidden states, one for each head and token."""

from megatron_tape.ops.backends import GATE
from megatron_tape.position import Costs, Parameter, PositionEncoding, Positions, register


@register
class ToyGate(PositionEncoding):
    name = "toy_gate"
    needs = frozenset({GATE})

    def parameters(self, layer):
        model = self.model
        return {
            "gate": Parameter((model.num_attention_heads, model.hidden_size), std=model.init_std),
            "start": Parameter((model.num_attention_heads,), value=1.0, decay=False),
        }

    def costs(self, layer, batch):
        heads = self.model.num_attention_heads
        # Inputs of the log-sigmoid and what it keeps; the running sums in float64.
        saved = 2 * batch.local_tokens * heads * batch.width + batch.tokens * heads // batch.tensor_size * 8
        return Costs(multiply_adds=heads * self.model.hidden_size, saved=saved)

    def positions(self, layer, parameters, state, hidden_states_sBC, memory):
        from torch.nn.functional import linear, logsigmoid

        gates = logsigmoid(linear(hidden_states_sBC, parameters["gate"], parameters["start"]))
        return Positions(log_gate_TBH=memory.all_tokens("gates", self.tokens.to_heads(gates)))
