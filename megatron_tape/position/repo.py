"""RePo, context re-positioning (Li et al., 2025): each layer predicts every token's position from
its content.

From layer `repo_first_layer` on, a layer predicts the position z_g of a token in each key/value
group g from its normalized input h (C,):
    r = silu(W_gate h) * (W_content h),    z = W_position r.
Queries and keys are rotated by exp(i z_g theta_f), not by RoPE's exp(i s theta_f). Earlier layers
use RoPE.
"""

from dataclasses import dataclass, replace

from megatron_tape.errors import ConfigError
from megatron_tape.position.encoding import Count, Parameter, PositionInputs
from megatron_tape.position.rope import RotaryPosition, ScaledSettings


@dataclass(frozen=True, kw_only=True)
class RepositionSettings(ScaledSettings):
    """Settings of the MLP that predicts positions."""

    repo_width: Count | None = None
    """repo: hidden size of the MLP that predicts a token's positions. Default: hidden_size // 8, as
    in the paper.
    """
    repo_first_layer: int | None = None
    """repo: first layer (from 0) that predicts positions. Default: num_layers // 3, as in the
    paper's 16-layer model, but at least 1, since token embeddings contain no order."""


class Reposition(RotaryPosition):
    """RoPE on positions predicted by each layer, one for each token and group.

    Parameters of the MLP, with hidden size W: `gate_proj` and `content_proj` (W, C), and
    `position_proj` (G, W).
    """

    name = "repo"
    Settings = RepositionSettings
    exports_to = "code"

    def check(self):
        """Raise ConfigError if the first layer that predicts positions does not exist."""
        super().check()
        last = self.model.num_layers - 1
        if not 0 <= self.predicts_from <= last:
            raise ConfigError(
                ("model.position.repo_first_layer", "model.num_layers"),
                f"is {self.predicts_from}, but layers are numbered from 0 to {last}",
                "choose one of these layers",
            )

    @property
    def inner_width(self) -> int:
        """Hidden size of the MLP that predicts a token's positions (W)."""
        return self.settings.repo_width or max(1, self.model.hidden_size // 8)

    @property
    def predicts_from(self) -> int:
        """First layer (from 0) that predicts positions."""
        first = self.settings.repo_first_layer
        layers = self.model.num_layers
        if first is None:
            # At least layer 1, unless the model has only one layer, which is layer 0.
            return min(max(1, layers // 3), layers - 1)
        return first

    def predicts(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) predicts positions."""
        return layer >= self.predicts_from

    def parameters(self, layer):
        """Return the matrices of the MLP; layers that use RoPE have none."""
        if not self.predicts(layer):
            return {}
        model = self.model
        inner = (self.inner_width, model.hidden_size)
        outer = (model.query_groups, self.inner_width)
        return {
            "gate_proj": Parameter(inner, std=model.init_std),
            "content_proj": Parameter(inner, std=model.init_std),
            "position_proj": Parameter(outer, std=model.init_std),
        }

    def costs(self, layer, batch):
        """Return the costs: the MLP, and the all-to-alls of positions and their gradients.

        The gate before and after silu, the content, their product, and the angles are saved in fp32
        for the backward pass. The phases are counted with the rotation of queries and keys.
        """
        base = super().costs(layer, batch)
        model = self.model
        width = self.inner_width
        if not self.predicts(layer):
            return base
        # A rank computes angles for all tokens, but only for the groups that it holds in attention.
        angles = batch.groups_per_rank(model.query_groups) * model.head_dim // 2
        # All-to-alls exchange one position, 4 bytes in fp32, per token and group.
        sent = 4 * batch.groups_in_all_to_all(model.query_groups) * batch.local_tokens
        # Saved, 4 bytes each: the elements of four tensors of hidden size W, and the angles.
        return replace(
            base,
            multiply_adds=width * (2 * model.hidden_size + model.query_groups),
            saved=4 * (batch.local_tokens * 4 * width + batch.tokens * angles),
            sent_forward=sent,
            sent_backward=sent,
            learns_rotation=True,
            reads_hidden_states=True,
        )

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the phases of all tokens for this rank's groups: predicted, or those of RoPE."""
        if not self.predicts(layer):
            return PositionInputs(state)
        positions_SBg = self.token_layout.to_heads(
            self.predicted_positions(parameters, hidden_states_sBC)
        )
        return PositionInputs(self.phases(positions_SBg).to(hidden_states_sBC.dtype))

    def predicted_positions(self, parameters, hidden_states_sBC):
        """Return the predicted positions of this rank's tokens, (s, B, G), at least in float32."""
        import torch
        from torch.nn.functional import linear, silu

        gate = linear(hidden_states_sBC, parameters["gate_proj"])
        content = linear(hidden_states_sBC, parameters["content_proj"])
        precision = torch.promote_types(gate.dtype, torch.float32)
        inner = silu(gate.to(precision)) * content.to(precision)
        return linear(inner, parameters["position_proj"].to(precision))
