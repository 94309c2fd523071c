"""A toy: RoPE whose positions move by up to three tokens, depending on the content."""

from megatron_tape.ops.backends import ROTATION
from megatron_tape.position.encoding import Costs, Parameter, PositionEncoding, PositionInputs


class JitterPosition(PositionEncoding):
    """The position of token s in key/value group g is s + 3 tanh(w_g . x), x being the layer's
    normalized input.
    """

    name = "jitter"
    needs = frozenset({ROTATION})
    restarts_in_documents = False

    def parameters(self, layer):
        """Return a row for each group, which every tensor-parallel rank holds whole."""
        model = self.model
        return {"shift": Parameter((model.query_groups, model.hidden_size), std=model.init_std)}

    def costs(self, layer, batch):
        """Count the product with the rows; the state is a token's own position, a float32 in any
        precision.
        """
        products = self.model.query_groups * self.model.hidden_size
        return Costs(
            multiply_adds=products,
            state=1,
            state_width=4,
            learns_rotation=True,
            reads_hidden_states=True,
        )

    def initial_state(self, positions_SB, dtype):
        """Return the positions of all tokens, (S, B or 1); bf16 could not hold them."""
        return positions_SB.float()

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the phases of all tokens and this rank's groups, (S, B, g, D)."""
        import torch
        from torch.nn.functional import linear

        moved_SBg = self.token_layout.to_heads(
            3 * linear(hidden_states_sBC, parameters["shift"]).tanh()
        )
        exponents = (
            torch.arange(0, self.model.head_dim, 2, device=state.device) / self.model.head_dim
        )
        angles = (state[..., None] + moved_SBg)[..., None] * 10000.0**-exponents
        return PositionInputs(
            torch.cat([angles.cos(), angles.sin()], dim=-1).to(hidden_states_sBC.dtype)
        )
