"""A toy: rotary phases that every layer scales by the token's content, with parameters in each
layer.
"""

from megatron_tape.ops.backends import ROTATION
from megatron_tape.position import Costs, Parameter, PositionInputs, register
from megatron_tape.position.rope import RotaryPosition


@register
class ToyStretch(RotaryPosition):
    name = "toy_stretch"
    needs = frozenset({ROTATION})
    restarts_in_documents = False
    exports_to = "code"

    def updates(self, layer):
        return layer < self.model.num_layers - 1

    def parameters(self, layer):
        shape = (self.model.query_groups, self.model.hidden_size)
        if self.updates(layer):
            return {"stretch": Parameter(shape, std=0.5)}
        return {}

    def costs(self, layer, batch):
        dim = self.model.head_dim
        groups = self.model.query_groups
        if not self.updates(layer):
            return Costs(state=groups * dim)
        elements = self.model.hidden_size + 2 * groups
        if batch.tensor_size > 1:
            elements += groups * dim  # the state that the all-to-all sends is not the saved one
        state = groups * dim
        if layer == 0:
            state = dim
        return Costs(
            multiply_adds=groups * (self.model.hidden_size + dim),
            saved=batch.local_tokens * elements * batch.width,
            state=state,
        )

    def initial_state(self, positions_SB, dtype):
        return self.token_layout.local_tokens(super().initial_state(positions_SB, dtype))

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        of_groups = state.expand(-1, -1, self.model.query_groups, -1)
        return PositionInputs(self.token_layout.to_heads(of_groups))

    def next_state(self, layer, parameters, state, inputs, averaged, attention_output, mlp_output):
        from torch.nn.functional import linear

        return state * (1 + linear(mlp_output, parameters["stretch"]).tanh())[..., None]
