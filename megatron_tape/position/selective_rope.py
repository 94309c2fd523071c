"""Selective RoPE (Movahedi et al., 2026): rotation by running sums of steps that depend on the
content.

The normalized input of a layer is split into one slice for each key/value group, and each slice is
scaled to length 1. From these slices x, a layer computes a step for each token t, group g and
frequency f, and rotates queries and keys of token s by exp(i a_s):
    phi_t = W_g x_t,g    or, with a rank, U D x_t,
    step_t = sigmoid(w_g . x_t + c_g) (silu(convolution of phi up to t) + exp(b_gf)),
    a_s = theta^(-2f/D) sum_{t <= s} step_t.
The sigmoid is the phase gate. Attention depends only on differences of angles, so sums may include
tokens before a packed document, or padding. The convolution may not.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import ROTATION
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    Count,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    PositionInputs,
)
from megatron_tape.position.path import short_convolution

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_EPSILON = 1e-6
"""Added to |x|^2 when a slice x is normalized, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class SelectiveRotarySettings(EncodingSettings):
    """How a layer computes the steps. The defaults are those of the authors' language models, as
    set in configs/language_modeling/language_modeling.yaml of their code.
    """

    selective_rope_rank: Count | None = None
    """selective_rope: rank of a projection from the whole input to the steps of all groups.
    Default: no such projection, but one matrix for each group, which reads its slice of the input.
    """
    selective_rope_conv_size: Count = 4
    """selective_rope: kernel size in tokens of the causal convolution of the steps."""
    selective_rope_silu: bool = True
    """selective_rope: apply SiLU after the convolution."""
    selective_rope_bias: bool = False
    """selective_rope: add exp(b) to each step, with a learned b for each group and frequency. b
    starts at 0, which adds the step of RoPE.
    """
    selective_rope_gate: bool = True
    """selective_rope: multiply the steps of a token by its phase gate, a sigmoid for each group."""
    selective_rope_theta: Annotated[float, Bounds(ge=1)] = 500000.0
    """selective_rope: base of the frequencies by which sums of steps are multiplied."""


class SelectiveRotaryPosition(PositionEncoding):
    """Rotates queries and keys of each layer by running sums of steps, one sum for each group and
    frequency.

    With F = D/2 frequencies, the parameters are `phase_weight` (G, C/G, F), whose columns are
    normalized, and `phase_scale` (G,), by which they are multiplied, or `phase_down` (rank, C) and
    `phase_up` (G F, rank); `conv` (G, F, width); `step_bias` (G, F); `phase_gate` (G, C) and
    `phase_gate_bias` (G,). Scales and biases have no weight decay.
    """

    name = "selective_rope"
    Settings = SelectiveRotarySettings
    needs = frozenset({ROTATION})
    restarts_in_documents = True
    sums_over_tokens = True

    def check(self):
        """Raise ConfigError if the hidden states cannot be split into one slice per group."""
        hidden = self.model.hidden_size
        groups = self.model.query_groups
        if hidden % groups != 0:
            raise ConfigError(
                ("model.hidden_size", "model.num_query_groups"),
                f"is {hidden}, which cannot be split into {groups} equal slices, one for each"
                " key/value group",
                f"set model.hidden_size to a multiple of {groups}",
            )

    @property
    def num_frequencies(self) -> int:
        """Number of frequencies of a head (F)."""
        return self.model.head_dim // 2

    def parameters(self, layer):
        """Return the parameters. They start as in the authors' code: the columns of `phase_weight`
        with a length of about 2 sqrt(C/(G D)), other weights with the model's standard deviation.
        """
        model = self.model
        settings = self.settings
        groups = model.query_groups
        hidden = model.hidden_size
        width = self.num_frequencies
        rank = settings.selective_rope_rank
        std = model.init_std

        if rank is None:
            # Kaiming's initialization. Only the speed of training depends on it, since columns are
            # normalized.
            kaiming = math.sqrt(2 / width)
            parameters = {
                "phase_weight": Parameter((groups, hidden // groups, width), std=kaiming),
                "phase_scale": Parameter((groups,), value=1.0, decay=False),
            }
        else:
            parameters = {
                "phase_down": Parameter((rank, hidden), std=std),
                "phase_up": Parameter((groups * width, rank), std=std),
            }
        size = settings.selective_rope_conv_size
        parameters["conv"] = Parameter((groups, width, size), std=std, partition_dim=0)
        if settings.selective_rope_bias:
            parameters["step_bias"] = Parameter((groups, width), partition_dim=0, decay=False)
        if settings.selective_rope_gate:
            parameters["phase_gate"] = Parameter((groups, hidden), std=std)
            parameters["phase_gate_bias"] = Parameter((groups,), decay=False)
        return parameters

    def costs(self, layer, batch):
        """Return the costs: the projections and the convolution.

        Saved for the backward pass are the slices of unit length with two factors of each, the
        normalized weights, and the inputs of the convolution and of the gate for all tokens; the
        rest is computed again. The phases are counted with the rotation of queries and keys. The
        state is a token's position, from which the convolution finds the start of the document.
        """
        model = self.model
        settings = self.settings
        groups = model.query_groups
        hidden = model.hidden_size
        rank = settings.selective_rope_rank
        steps = groups * self.num_frequencies

        # Elements per token of the slices, and bytes in fp32 of a slice's factors.
        slices = hidden * batch.width + 2 * 4 * groups
        if rank is None:
            products = hidden * self.num_frequencies
            # In fp32 and in the precision of the run.
            weights = products * (4 + batch.width)
        else:
            products = rank * (hidden + steps)
            slices += rank * batch.width
            weights = 0
        products += steps * settings.selective_rope_conv_size

        # Numbers per token and group that enter attention.
        numbers = self.num_frequencies
        if settings.selective_rope_gate:
            products += groups * hidden
            numbers += 1
        inputs = batch.tokens * batch.groups_per_rank(groups) * numbers * batch.width
        sent = batch.local_tokens * batch.groups_in_all_to_all(groups) * numbers * batch.width
        return Costs(
            multiply_adds=products,
            saved=batch.local_tokens * slices + weights + inputs,
            sent_forward=sent,
            sent_backward=sent,
            state=1,
            state_width=4,
            learns_rotation=True,
            reads_hidden_states=True,
        )

    def initial_state(self, positions_SB, dtype):
        """Return the positions (S, B or 1) in float32, which represents them exactly."""
        return positions_SB.float()

    def position_inputs(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the phases of all tokens for this rank's groups."""
        from torch.nn.functional import linear
        from torch.utils.checkpoint import checkpoint

        from megatron_tape.ops.rotation import phases_of_angles

        unit_sBGE = self._unit_slices(hidden_states_sBC)
        phi_SBGF = self.token_layout.to_heads(self._projected(parameters, unit_sBGE))
        gate_SBG = None
        if "phase_gate" in parameters:
            gate_sBG = linear(
                unit_sBGE.flatten(2), parameters["phase_gate"], parameters["phase_gate_bias"]
            )
            gate_SBG = self.token_layout.to_heads(gate_sBG)

        # The convolution of a token reads this number of tokens before it.
        before = parameters["conv"].shape[-1] - 1
        # A checkpoint saves only these inputs; the intermediate results of the convolution take
        # many times their memory.
        steps_SBGF = checkpoint(
            self._steps,
            cache.append("phi", phi_SBGF, before),
            cache.append("positions", state, before),
            gate_SBG,
            parameters["conv"],
            parameters.get("step_bias"),
            len(phi_SBGF),
            use_reentrant=False,
            preserve_rng_state=False,
        )

        # In float32, sums of many steps would be rounded.
        sums = cache.cumsum("steps", steps_SBGF)
        theta = self.constant("frequencies", self.frequencies, sums.device)
        return PositionInputs(phases_of_angles(sums * theta, hidden_states_sBC.dtype))

    def frequencies(self) -> "Tensor":
        """Return the frequencies theta_f by which sums of steps are multiplied, float64 (F,)."""
        import torch

        exponents = torch.arange(self.num_frequencies, dtype=torch.float64) / self.num_frequencies
        return self.settings.selective_rope_theta**-exponents

    def _unit_slices(self, hidden_states_sBC: "Tensor") -> "Tensor":
        """Return the slices of the hidden states for each group, of length 1, (s, B, G, C/G)."""
        import torch

        x = hidden_states_sBC.unflatten(2, (self.model.query_groups, -1))
        # In contrast to squaring a copy in fp32, this saves only x itself.
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_at_least_fp32(x.dtype))
        return (x * (lengths.square() + _EPSILON).rsqrt()).to(x.dtype)

    def _projected(self, parameters, unit_sBGE: "Tensor") -> "Tensor":
        """Return phi of this rank's tokens, (s, B, G, F), given the slices of unit length."""
        import torch
        from torch.nn.functional import linear, normalize

        if "phase_down" in parameters:
            narrow = linear(unit_sBGE.flatten(2), parameters["phase_down"])
            wide = linear(narrow, parameters["phase_up"])
            return wide.unflatten(2, (self.model.query_groups, -1))
        weight = parameters["phase_weight"]
        columns = normalize(weight.to(_at_least_fp32(weight.dtype)), dim=1)
        scaled_GEF = (parameters["phase_scale"][:, None, None] * columns).to(weight.dtype)
        return torch.einsum("sbge,gef->sbgf", unit_sBGE, scaled_GEF)

    def _steps(self, phi_TBGF, positions_TB, gate_SBG, conv_GFW, bias_GF, new_tokens: int):
        """Return the steps of the last S = `new_tokens` tokens, (S, B, G, F), at least in
        float32.

        phi and positions are also those of tokens before them, `gate_SBG` is the gate's logits or
        None, and `bias_GF` is b or None.
        """
        from torch.nn.functional import silu

        # The convolution of the new tokens also needs the last tokens before them.
        first = -(new_tokens + conv_GFW.shape[-1] - 1)
        dtype = _at_least_fp32(phi_TBGF.dtype)
        recent = phi_TBGF[first:].to(dtype)
        steps = short_convolution(recent, positions_TB[first:], conv_GFW)[-new_tokens:]
        if self.settings.selective_rope_silu:
            steps = silu(steps)
        if bias_GF is not None:
            steps = steps + bias_GF.to(dtype).exp()
        if gate_SBG is not None:
            steps = steps * gate_SBG.to(dtype).sigmoid()[..., None]
        return steps


def _at_least_fp32(dtype: "torch.dtype") -> "torch.dtype":
    """Return float32, or `dtype` if it is wider."""
    import torch

    return torch.promote_types(dtype, torch.float32)
