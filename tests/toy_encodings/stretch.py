"""A toy: rotary phases that every layer stretches by the content of its token, with parameters of its own."""

from megatron_tape.ops.backends import ROTATION
from megatron_tape.position import Parameter, Positions, register
from megatron_tape.position.rope import RotaryPosition


@register
class ToyStretch(RotaryPosition):
    name = "toy_stretch"
    needs = frozenset({ROTATION})
    exports_to = "code"

    def updates(self, layer):
        return layer < self.model.num_layers - 1

    def parameters(self, layer):
        shape = (self.model.query_groups, self.model.hidden_size)
        return {"stretch": Parameter(shape, std=0.5)} if self.updates(layer) else {}

    def multiply_adds(self, layer):
        groups, dim = self.model.query_groups, self.model.head_dim
        return groups * (self.model.hidden_size + dim) if self.updates(layer) else 0

    def state_size(self, layer):
        return self.model.head_dim * (self.model.query_groups if layer > 0 else 1)

    def saved_bytes(self, layer, batch):
        if not self.updates(layer):
            return 0
        model = self.model
        # What is sent to the heads is not what is kept of the state.
        state = model.query_groups * model.head_dim if batch.tensor_size > 1 else 0
        return batch.local_tokens * (model.hidden_size + 2 * model.query_groups + state) * batch.width

    def initial_state(self, positions_SB, dtype):
        return self.tokens.local_tokens(super().initial_state(positions_SB, dtype))

    def positions(self, layer, parameters, state, hidden_states_sBC, memory):
        return Positions(self.tokens.to_heads(state.expand(-1, -1, self.model.query_groups, -1)))

    def next_state(self, layer, parameters, state, positions, averaged_SBhD, attention_output_sBC, mlp_output_sBC):
        from torch.nn.functional import linear

        return state * (1 + linear(mlp_output_sBC, parameters["stretch"]).tanh())[..., None]
