"""TAPE: contextualized equivariant positional encoding (ICML 2025).

The state z (S, B, G, D) starts as RoPE's phases. Every layer except the last one updates it:
    z'  = z + A u                                       ("token mixing"),
    z'' = z' + W_down diag(silu(W_x m)) W_up z'         ("position contextualization"),
where u is the average of z under the attention weights and m the output of the token MLP (or
attention). Under sequence parallelism z is sharded like the hidden states, (s, B, G, D). The update
needs all heads of a token, and attention all tokens of a head, so an all-to-all of S*B*C/tp
elements switches between the two layouts.

The update sums over groups, so it is equivariant only to rotations that all groups share. Learned
increments are therefore the same for all groups.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import AVERAGE, ROTATION
from megatron_tape.position.encoding import Bounds, Costs, Parameter, PositionInputs
from megatron_tape.position.rope import RotaryPosition, RotarySettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TapeSettings(RotarySettings):
    """Settings of TAPE's position update."""

    mlp_size: Annotated[int, Bounds(ge=1, le=2**20)] | None = None
    """Hidden size of TAPE's position MLP (P). Default: 4 * num_attention_heads, as in the paper."""
    gate_input: Literal["mlp", "attention"] = "mlp"
    """Input of the gate of TAPE's position MLP. mlp: the output of the token MLP (released code);
    attention: the output of attention (paper)."""
    token_mixing: Literal["full", "per_head"] = "full"
    """TAPE's mixing of heads after attention. full: a matrix (paper); per_head: one scale per head
    (released code).
    """
    mlp_zero: Literal["down", "up"] = "down"
    """Matrix of TAPE's position MLP that starts at zero, so that the model starts as RoPE. With
    down, up_proj starts with standard deviation num_query_groups^-0.5; with up (released code),
    down_proj starts with init_std."""
    state_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which TAPE's position state accumulates updates; attention reads it rounded to
    train.precision. In bf16, updates below 2^-9 of the state are lost. If train.precision is fp32,
    the state is always in fp32."""
    state_norm: Literal["none", "unit"] = "none"
    """unit rescales every complex number of TAPE's position state after each update to its initial
    modulus (1, except with yarn), so that updates only rotate. none does not rescale."""


class TapePosition(RotaryPosition):
    """RoPE whose phases each layer updates from the content.

    Parameters: `token_mixing` A (G, H), or (H,) for one scale per head; `x_proj` W_x (P, C),
    `up_proj` W_up (P, G), `down_proj` W_down (G, P). A and either W_down or W_up start at zero, so
    that the model starts as RoPE. With learned increments the first layer also has `increments` w
    (1, C), which starts at zero.
    """

    name = "tape"
    Settings = TapeSettings
    needs = frozenset({ROTATION, AVERAGE})
    restarts_in_documents = False
    starts_as = "rope"

    def __init__(self, model, token_layout=None, fused=False):
        super().__init__(model, token_layout, fused)
        self._update = None
        """The result of `update_function`. It is None until the first call, since the function
        needs torch, which declarations do not import.
        """

    @property
    def exports_to(self) -> str | None:
        """`tape`, the TAPE architecture, if it supports the settings; otherwise `code`, this
        encoding's file.
        """
        settings = self.settings
        model = self.model
        # The TAPE architecture has none of these settings.
        rescales_or_skips = settings.state_norm == "unit" or settings.rope_share < 1
        if rescales_or_skips or self.learns_increments:
            return "code"
        if model.attention_output_gate or model.sliding_window is not None:
            return "code"
        return "tape"

    @property
    def mlp_width(self) -> int:
        """Hidden size of the position MLP (P)."""
        return self.settings.mlp_size or 4 * self.model.num_attention_heads

    @property
    def mixes_fully(self) -> bool:
        """Whether token mixing is a matrix, not one scale per head."""
        return self.settings.token_mixing == "full"

    @property
    def update_kernel_shape(self):
        """The sizes and options for which the kernel of the update is compiled."""
        fp32 = self.settings.state_precision == "fp32"
        return {"inner": self.mlp_width, "full_mixing": self.mixes_fully, "fp32_state": fp32}

    def check(self):
        """Raise ConfigError if one scale per head is set with grouped heads."""
        super().check()
        heads = self.model.num_attention_heads
        groups = self.model.query_groups
        if not self.mixes_fully and groups != heads:
            raise ConfigError(
                (
                    "model.position.token_mixing",
                    "model.num_query_groups",
                    "model.num_attention_heads",
                ),
                f"per_head requires model.num_query_groups {groups} to equal"
                f" model.num_attention_heads {heads}",
                "use token_mixing full",
            )

    def updates(self, layer):
        """Return whether layer `layer` (from 0) updates the state: all but the last one do."""
        return layer < self.model.num_layers - 1  # nothing reads the state after the last layer

    def parameters(self, layer):
        """Return the parameters, whose shapes the class describes; the last layer has none."""
        model = self.model
        heads = model.num_attention_heads
        groups = model.query_groups
        inner = self.mlp_width
        parameters = {}
        if self.learns_on_entry(layer):
            parameters["increments"] = Parameter((1, model.hidden_size))
        if not self.updates(layer):
            return parameters

        # A factor for each head, which exported models store as a diagonal matrix.
        mixing = Parameter((heads,), diagonal=True)
        if self.mixes_fully:
            mixing = Parameter((groups, heads))
        up_std = 0.0
        down_std = model.init_std
        if self.settings.mlp_zero == "down":
            up_std = groups**-0.5
            down_std = 0.0
        return {
            **parameters,
            "token_mixing": mixing,
            "x_proj": Parameter((inner, model.hidden_size), std=model.init_std),
            "up_proj": Parameter((inner, groups), std=up_std),
            "down_proj": Parameter((groups, inner), std=down_std),
        }

    def costs(self, layer, batch):
        """Return the costs: averaging the state, token mixing, and the position MLP: its gate, and
        forming and applying the matrix M of each token (see `ops.position_update`).

        Saved for the backward pass: the gate and its input, M, the state, and averages received
        from other ranks. The state costs nothing if attention saves the same tensor: it does unless
        all groups share the state or an all-to-all copies it. With learned increments, the first
        layer also saves increments and positions in float64, and the phases of one group, or of all
        groups if an all-to-all follows.

        All-to-alls send the state to attention and the averages back. In the first layer, all
        sequences share the phases, which need no gradient. With learned increments, the first layer
        also sends all logits to every rank, and positions in float64 back.

        A layer that rotates with other frequencies than the state also saves the state in its own
        frequencies, the averages in those of the state, and the inverse of `window_phases`.
        """
        model = self.model
        width = batch.width
        # Elements per token of the averages, which query heads have, and of the state.
        averages_size = model.num_attention_heads * model.head_dim
        state_size = model.query_groups * model.head_dim
        inner = self.mlp_width
        tokens = batch.local_tokens
        sharded = batch.head_shards > 1
        window_phases = self._window_phase_bytes(layer, 4)  # in fp32
        # Whether attention saves another tensor than the state, and another than the averages.
        separate = sharded or window_phases > 0
        # Multiply-adds per token, bytes saved, and bytes sent in the forward and again in the
        # backward pass.
        products = saved = sent = 0

        # The state on its way to attention; shared phases are sent once for all sequences.
        sent_state = batch.groups_in_all_to_all(model.query_groups) * model.head_dim * width
        if self.state_is_learned(layer):
            sent_state *= tokens
        else:
            sent_state *= model.seq_length // batch.head_shards

        # The increments.
        if self.learns_on_entry(layer):
            phases = model.head_dim
            if sharded:
                phases = state_size
            products += model.hidden_size
            saved += tokens * (self.position_bytes + phases * width)
            sent += batch.head_shards * (width + 8) * tokens  # a position takes 8 bytes

        # The state in the frequencies of this layer.
        if window_phases:
            state_tokens = model.seq_length
            if self.state_is_learned(layer):
                state_tokens = batch.tokens
            groups = batch.groups_per_rank(model.query_groups)
            saved += state_tokens * groups * model.head_dim * width

        # The update.
        if self.updates(layer):
            averaging = int(averages_size * model.keys_per_query(layer))
            mixing = averages_size
            if self.mixes_fully:
                mixing *= model.query_groups
            gate = inner * model.hidden_size
            forming_M = model.query_groups**2 * inner
            applying_M = model.query_groups * state_size
            products += averaging + mixing + gate + forming_M + applying_M

            # The gate's input, the gate, and M.
            elements = model.hidden_size + inner + model.query_groups**2
            # The averages, unless they are the tensor that attention returned.
            if separate:
                elements += averages_size
            # The state, unless attention saves the same tensor.
            if separate or not (layer > 0 or self.learns_on_entry(0)):
                elements += state_size
            saved += tokens * elements * width
            # The inverse of the phases.
            saved += model.seq_length * window_phases
            if self.settings.state_norm == "unit":
                saved += tokens * state_size * self._state_bytes(width)
            sent += averages_size * width * tokens

        # What enters the first layer is the same as in RoPE: phases that all groups share, or
        # nothing if increments are learned.
        state = state_size
        if layer == 0:
            state = super().costs(0, batch).state
        sent_backward = sent
        if self.state_is_learned(layer):
            sent_backward += sent_state
        return Costs(
            multiply_adds=products,
            saved=saved,
            sent_forward=sent_state + sent,
            sent_backward=sent_backward,
            state=state,
            state_width=self._state_bytes(width),
            window_phases=window_phases,
        )

    def _state_bytes(self, width):
        """Return the bytes per element of the state in a run with `width` bytes per element."""
        if self.settings.state_precision == "fp32":
            return 4
        return width

    def initial_state(self, positions_SB, dtype):
        """Return the phases of this rank's tokens, shared by all groups, (s, B or 1, 1, D)."""
        local = self.token_layout.local_tokens(positions_SB)
        return super().initial_state(local, self._state_dtype(dtype))

    def sent_state(self, layer, tokens, batch, dtype):
        """Return the shape and dtype of the state of this rank's tokens."""
        # All groups share the state until a layer updates it.
        groups = 1
        if any(self.updates(earlier) for earlier in range(layer)):
            groups = self.model.query_groups
        return (tokens, batch, groups, self.model.head_dim), self._state_dtype(dtype)

    def _state_dtype(self, dtype):
        """Return the dtype in which the state accumulates updates, in a run of `dtype`."""
        import torch

        # Wider dtypes stay as they are: tests use float64.
        if self.settings.state_precision == "fp32" and dtype.itemsize < 4:
            return torch.float32
        return dtype

    def enter(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the state; in the first layer with learned increments, the phases of local tokens
        (s, B, 1, D).
        """
        if not self.learns_on_entry(layer):
            return state
        from torch.nn.functional import linear

        # Every rank sums over all tokens: the all-to-all sends each rank one copy of the logits, as
        # if it were a group.
        logits = linear(hidden_states_sBC, parameters["increments"])
        copies = logits.expand(-1, -1, self.token_layout.sequence_shards)
        positions = self.running_sum(self.token_layout.to_heads(copies), cache)
        # All copies are equal.
        local = self.token_layout.to_tokens(positions)[..., :1]
        return self._exact_phases(local, self._state_dtype(hidden_states_sBC.dtype))

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the state of all tokens for this rank's groups, rounded to the precision of the
        hidden states.
        """
        from megatron_tape.ops.position_update import UpdatedState

        joined = None
        if isinstance(state, UpdatedState):
            rounded = state.for_attention
            joined = state.joined
        else:
            rounded = state.to(hidden_states_sBC.dtype)
            rounded = rounded.expand(-1, -1, self.model.query_groups, -1)
        return PositionInputs(
            self.token_layout.to_heads(rounded),
            average_state=self.updates(layer),
            joined_TBGE=joined,
        )

    def window_phases(self, positions_SB, dtype):
        """Return the phases of layers with a window divided by those of the other layers, in
        float32.

        The state is what layers have learned times the phases of the other layers. In a layer with
        a window, the ratio replaces these phases by its own.
        """
        from megatron_tape.ops.rotation import inverse, rotate

        if self.with_window_frequencies is None:
            return None
        positions = positions_SB.float().unsqueeze(2)
        phases = self.with_window_frequencies.phases(positions)
        return rotate(phases, inverse(self.phases(positions)))

    def inputs_in_window(self, inputs, phases):
        """Return inputs with the state times `phases`."""
        from megatron_tape.ops.rotation import rotate

        state = inputs.z_TBGD
        return replace(inputs, z_TBGD=rotate(state, phases).to(state.dtype), joined_TBGE=None)

    def average_from_window(self, averaged_SBhD, phases):
        """Return the average divided by the `phases` of the queries' tokens.

        Both averages turn by the phases of their frequencies if all positions are shifted, so the
        update remains equivariant.
        """
        from megatron_tape.ops.rotation import inverse, rotate

        return rotate(averaged_SBhD, inverse(phases)).to(averaged_SBhD.dtype)

    def next_state(
        self,
        layer,
        parameters,
        state,
        inputs,
        averaged_SBhD,
        attention_output_sBC,
        mlp_output_sBC,
    ):
        """Return the updated state z'' (s, B, G, D) as an `UpdatedState` or, if `state_norm` is
        unit, as a tensor.
        """
        from torch.nn.functional import linear

        from megatron_tape.ops.position_update import UpdatedState, fused_update

        u = self.token_layout.to_tokens(averaged_SBhD)
        S, B, _, D = u.shape

        def by_token(x):
            """Return a state (S, B, G or 1, D) as (S * B, G, D)."""
            return x.expand(S, B, self.model.query_groups, D).reshape(S * B, -1, D)

        z = self.state_tensor(state)
        # The update reads the rounded tensor that attention has read, so that autograd saves only
        # one. If an all-to-all has moved that of attention, the state is rounded again.
        if isinstance(state, UpdatedState):
            rounded = state.for_update
        elif state.dtype == u.dtype:
            # The state itself: gradients of attention are then summed before that of the update is
            # added, as for `UpdatedState`.
            rounded = state
        elif self.token_layout.sequence_shards > 1:
            rounded = state.to(u.dtype)
        else:
            rounded = inputs.z_TBGD

        gate_input = attention_output_sBC
        if self.settings.gate_input == "mlp":
            gate_input = mlp_output_sBC
        gate = linear(gate_input, parameters["x_proj"]).flatten(0, 1)
        matrices = (parameters[name] for name in ("token_mixing", "up_proj", "down_proj"))
        update = self.update_function()
        # The next layer's attention averages the result itself, unless it is rescaled.
        is_averaged = self.updates(layer + 1) and self.settings.state_norm == "none"
        if self.joins_values and update is fused_update and is_averaged:
            update = partial(update, join=True)
        by_token_new = update(by_token(z), u, gate, *matrices, by_token(rounded))

        # All tensors of `UpdatedState` have one axis of tokens; `joined` may be missing.
        tensors = []
        for x in by_token_new:
            tensors.append(None if x is None else x.unflatten(0, (S, B)))
        new = UpdatedState(*tensors)
        if self.settings.state_norm == "none":
            return new

        # Only a tensor, since the copies are not normalized.
        from megatron_tape.ops.rotation import with_modulus

        return with_modulus(new.state, self.attention_factor)

    def state_tensor(self, state):
        """Return the state without its rounded copies."""
        from megatron_tape.ops.position_update import UpdatedState

        if isinstance(state, UpdatedState):
            return state.state
        return state

    def update_function(self):
        """Return the function that computes the update: the fused kernel if `fused` and supported,
        else plain torch.
        """
        from megatron_tape.ops.position_update import compact_update, fits_fused, fused_update

        if self._update is None:
            groups = self.model.query_groups
            heads = self.model.num_attention_heads
            self._update = compact_update
            if self.fused and fits_fused(groups, heads):
                self._update = fused_update
            elif self.fused:
                logger.warning(
                    "the fused position update does not support %d groups and %d heads; plain torch"
                    " is used",
                    groups,
                    heads,
                )
        return self._update
