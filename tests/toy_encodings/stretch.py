"""A toy: rotary phases that every layer scales by the token's content, with parameters in each
layer.
"""

from dataclasses import replace

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
        model, groups = self.model, self.model.query_groups
        found = Costs(state=model.head_dim * (groups if layer > 0 else 1))
        if not self.updates(layer):
            return found
        # The state that the all-to-all sends is not the one that is saved.
        state = groups * model.head_dim if batch.tensor_size > 1 else 0
        saved = batch.local_tokens * (model.hidden_size + 2 * groups + state) * batch.width
        return replace(
            found, multiply_adds=groups * (model.hidden_size + model.head_dim), saved=saved
        )

    def initial_state(self, positions_SB, dtype):
        return self.token_layout.local_tokens(super().initial_state(positions_SB, dtype))

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        return PositionInputs(
            self.token_layout.to_heads(state.expand(-1, -1, self.model.query_groups, -1))
        )

    def next_state(
        self,
        layer,
        parameters,
        state,
        positions,
        averaged_SBhD,
        attention_output_sBC,
        mlp_output_sBC,
    ):
        from torch.nn.functional import linear

        return state * (1 + linear(mlp_output_sBC, parameters["stretch"]).tanh())[..., None]
