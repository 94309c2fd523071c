"""Rotary positional encoding (Su et al., 2021) as in Llama, with position scaling and learned
increments.

Positions are 0, 1, ... or, with learned increments, cumulative sums
    p[s,g] = sum_{t<=s} 2 sigmoid(w_g . x[t])    ("learned": each increment is between 0 and 2),
    p[s,g] = sum_{t<=s} 1 + w_g . x[t]           ("signed": increments may be negative),
where x is the first layer's normalized input and g a key/value group. These are "accumulated
rotations" (MapFormer, arXiv 2511.19279; arXiv 2606.24975). With w = 0 every increment is 1.
Attention depends only on position differences, so a sum may include tokens before a packed
document, or padding.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import ROTATION
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    Count,
    EncodingSettings,
    Parameter,
    PositionEncoding,
    TokenCache,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Bounded = Annotated[float, Bounds(ge=1e-9, le=1e12)]
"""A positive number for which yarn's logarithms are finite."""


@dataclass(frozen=True, kw_only=True)
class FrequencySettings(EncodingSettings):
    """The frequencies of the rotation, for encodings that neither scale positions nor learn
    increments.
    """

    rope_scaling_type = "linear"
    rope_scaling_factor = 1.0
    rope_scaling_layers = "all"
    rope_local_theta: ClassVar[float | None] = None
    increments = "fixed"

    rope_theta: Bounded = 10000.0
    """Base of the rotary frequencies. A larger base slows the rotation, which suits longer
    contexts.
    """
    rope_share: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    """Fraction of the frequencies that rotate, starting with the fastest; the others are set to 0
    (p-RoPE, Barbero et al., 2025)."""


@dataclass(frozen=True, kw_only=True)
class ScaledSettings(FrequencySettings):
    """The frequencies of the rotation, and their scaling for longer contexts."""

    rope_scaling_type: Literal["linear", "llama3", "yarn"] = "linear"
    """Scaling for longer contexts by rope_scaling_factor. linear divides all frequencies by it.
    llama3 (Llama 3.1) and yarn divide only slow frequencies; yarn also sharpens attention."""
    rope_scaling_factor: Annotated[float, Bounds(ge=1, le=1e12)] = 1.0
    """Divisor of the scaled frequencies; 2 doubles the context of a trained model. The context of a
    model that was trained with a factor doubles with twice that factor, whatever the type of the
    scaling."""
    rope_original_seq_length: Count = 8192
    """llama3 and yarn: context length in tokens before the extension."""
    rope_low_freq_factor: Bounded = 1.0
    """llama3: frequencies with fewer full turns than this in rope_original_seq_length tokens are
    fully scaled.
    """
    rope_high_freq_factor: Bounded = 4.0
    """llama3: frequencies with more full turns than this are not scaled; in between, scaling is
    interpolated.
    """
    rope_beta_slow: Bounded = 1.0
    """yarn: frequencies with fewer full turns than this in rope_original_seq_length tokens are
    fully scaled.
    """
    rope_beta_fast: Bounded = 32.0
    """yarn: frequencies with more full turns than this are not scaled; in between, scaling is
    interpolated.
    """
    rope_truncate: bool = True
    """yarn: round the ends of the interpolated range to whole frequency indices, as most models
    with yarn do.
    """
    rope_attention_factor: Bounded | None = None
    """yarn: factor by which rotated queries and keys are multiplied. Default: 0.1
    ln(rope_scaling_factor) + 1.
    """


@dataclass(frozen=True, kw_only=True)
class RotarySettings(ScaledSettings):
    """The frequencies of the rotation, their scaling, and the position increments."""

    rope_scaling_layers: Literal["all", "full"] = "all"
    """Layers whose frequencies are scaled: all, or only those that attend to all tokens, as in
    OLMo 3 and Gemma 3. full requires model.full_attention_every."""
    rope_local_theta: Bounded | None = None
    """Base of the rotary frequencies in layers with a sliding window, 10,000 in Gemma 3. Default:
    rope_theta. Requires model.full_attention_every."""
    increments: Literal["fixed", "learned", "signed"] = "fixed"
    """Increment from the position of one token to the next. fixed: 1. learned and signed: computed
    from the token's content, initially 1; learned increments stay between 0 and 2, signed ones are
    unbounded and may be negative."""


class RotaryPosition(PositionEncoding):
    """Rotates all layers' queries and keys by exp(i s theta_f), or by exp(i p[s,g] theta_f) with
    learned increments.

    With learned increments the first layer has the parameter `increments` w (G, C), which starts at
    zero.
    """

    name = "rope"
    Settings: ClassVar[type] = RotarySettings
    needs = frozenset({ROTATION})
    restarts_in_documents = False

    @property
    def exports_to(self) -> str | None:
        """An architecture of transformers if one supports the settings, otherwise this encoding's
        file.
        """
        settings = self.settings
        model = self.model
        # In transformers, RoPE in a share of the frequencies is a `rope_type` of its own, so it
        # excludes the types llama3 and yarn.
        shares_and_scales = settings.rope_share < 1 and settings.rope_scaling_type != "linear"
        if shares_and_scales or self.learns_increments:
            return "code"
        # A plain export is Llama, Mistral, Qwen2, Qwen3 or SmolLM3. These have no output gate, no
        # temperature, and one set of frequencies for all layers.
        if model.attention_output_gate or model.temperature_scale:
            return "code"
        if self.with_window_frequencies is not None:
            return "code"
        # transformers' cache of a window of one token keeps all tokens instead of none.
        if model.sliding_window == 1:
            return "code"
        return "plain"

    @property
    def sums_over_tokens(self) -> bool:
        """True if positions are running sums of learned increments."""
        return self.learns_increments

    @property
    def learns_increments(self) -> bool:
        """Whether position increments depend on the tokens' content."""
        return self.settings.increments != "fixed"

    def check(self):
        """Raise ConfigError if no frequency rotates, or the scaling's bounds are not in order."""
        settings = self.settings
        self._check_window_frequencies()
        dim = self.model.head_dim
        if settings.rope_share * dim // 2 < 1:
            raise ConfigError(
                "model.position.rope_share",
                f"is {settings.rope_share}, which keeps none of the {dim // 2} frequencies",
                f"set it to a number from {2 / dim:.4g} to 1",
            )

        if settings.rope_scaling_type == "llama3":
            lower, upper = "rope_low_freq_factor", "rope_high_freq_factor"
        elif settings.rope_scaling_type == "yarn":
            lower, upper = "rope_beta_slow", "rope_beta_fast"
        else:
            return
        # The interpolation between both bounds divides by their difference.
        if getattr(settings, lower) >= getattr(settings, upper):
            raise ConfigError(
                (f"model.position.{lower}", f"model.position.{upper}"),
                f"{getattr(settings, lower)} is not below model.position.{upper}"
                f" {getattr(settings, upper)}",
                f"set it below model.position.{upper}",
            )
        # yarn divides by the logarithm of the base.
        for key in ("rope_theta", "rope_local_theta"):
            theta = getattr(settings, key)
            if settings.rope_scaling_type == "yarn" and theta is not None and theta <= 1:
                raise ConfigError(
                    (f"model.position.{key}", "model.position.rope_scaling_type"),
                    f"{theta} is not above 1, which model.position.rope_scaling_type yarn requires",
                    f"raise model.position.{key}",
                )

    def _check_window_frequencies(self) -> None:
        """Raise ConfigError if layers with a window should have frequencies of their own, but all
        layers have a window, none has one, or increments are learned.
        """
        settings = self.settings
        if settings.rope_local_theta is not None:
            setting = "model.position.rope_local_theta"
            value = f"{settings.rope_local_theta}"
            default = "null"
        elif settings.rope_scaling_layers == "full":
            setting = "model.position.rope_scaling_layers"
            value = "full"
            default = "all"
        else:
            return

        if self.model.full_attention_every is None:
            raise ConfigError(
                (setting, "model.full_attention_every"),
                f"is {value}, which requires layers with a sliding window and layers without one",
                f"set model.sliding_window and model.full_attention_every, or set {setting} to"
                f" {default}",
            )
        if self.learns_increments:
            raise ConfigError(
                (setting, "model.position.increments"),
                f"is {value}, which requires model.position.increments fixed, not"
                f" {settings.increments}",
                f"set {setting} to {default}, or model.position.increments to fixed",
            )

    def learns_on_entry(self, layer):
        """Return True for the first layer if increments are learned."""
        return layer == 0 and self.learns_increments

    def parameters(self, layer):
        """Return the parameter `increments` in the first layer if increments are learned."""
        if not self.learns_on_entry(layer):
            return {}
        return {"increments": Parameter((self.model.query_groups, self.model.hidden_size))}

    def costs(self, layer, batch):
        """Return the costs. Without learned increments, the state is one set of phases for all
        heads.

        With learned increments, every group has its own phases. The first layer then saves
        positions and phases for the backward pass. Cumulative sums need all tokens, so an
        all-to-all exchanges the logits of the increments.
        """
        model = self.model
        state = model.head_dim
        if self.learns_on_entry(layer):
            state = 0  # the first layer computes the state, so none enters it
        elif self.learns_increments:
            state *= model.query_groups
        if not self.learns_on_entry(layer):
            window_phases = self._window_phase_bytes(layer, batch.width)
            return Costs(state=state, window_phases=window_phases)
        sent = batch.groups_in_all_to_all(model.query_groups) * batch.width * batch.local_tokens
        per_group = self.position_bytes + model.head_dim * batch.width
        return Costs(
            multiply_adds=model.query_groups * model.hidden_size,
            saved=batch.tokens * batch.groups_per_rank(model.query_groups) * per_group,
            sent_forward=sent,
            sent_backward=sent,
            state=state,
        )

    def _window_phase_bytes(self, layer: int, width: int) -> int:
        """Return the bytes per token of the result of `window_phases`, or 0 if layer `layer` (from
        0) does not use it. `width` is that of an element.
        """
        model = self.model
        if self.with_window_frequencies is None:
            return 0
        if model.window_of(layer) is None or not model.has_positions(layer):
            return 0
        return model.head_dim * width

    @property
    def position_bytes(self) -> int:
        """Bytes per token and group saved in float64: the position and, if learned, the sigmoid of
        the increment.
        """
        return {"fixed": 0, "learned": 16, "signed": 8}[self.settings.increments]

    def initial_state(self, positions_SB, dtype):
        """Return the phases times the attention factor, (S, B or 1, 1, D), computed in float32.

        With learned increments this returns None, and `enter` computes the phases in the first
        layer.
        """
        if self.learns_increments:
            return None
        return self.phases(positions_SB.float().unsqueeze(2)).to(dtype)

    def sent_state(self, layer, tokens, batch, dtype):
        """Return the shape and dtype of the phases of all tokens for this rank's groups."""
        import torch

        # A tensor without memory, to count what the layout gives to this rank.
        all_groups = torch.empty(self.model.query_groups, device="meta")
        groups = len(self.token_layout.local_heads(all_groups))
        all_tokens = tokens * self.token_layout.sequence_shards
        return (all_tokens, batch, groups, self.model.head_dim), dtype

    @cached_property
    def with_window_frequencies(self) -> "RotaryPosition | None":
        """This encoding with the frequencies of layers with a window, or None if these are the same
        as in other layers.
        """
        settings = self.settings
        changes: dict[str, Any] = {}
        if settings.rope_local_theta is not None:
            changes["rope_theta"] = settings.rope_local_theta
        if settings.rope_scaling_layers == "full":
            changes |= {"rope_scaling_type": "linear", "rope_scaling_factor": 1.0}
        changed_settings = replace(settings, **changes)
        if changed_settings == settings:
            return None
        changed = copy.copy(self)
        changed.settings = changed_settings
        # The cached frequencies are those of the other layers.
        changed._constants = {}
        return changed

    def window_phases(self, positions_SB, dtype):
        """Return the phases times the attention factor, computed in float32."""
        if self.with_window_frequencies is None:
            return None
        return self.with_window_frequencies.phases(positions_SB.float().unsqueeze(2)).to(dtype)

    def inputs_in_window(self, inputs, phases):
        """Return inputs that rotate by `phases`."""
        return replace(inputs, z_TBGD=phases)

    def phases(self, positions: "Tensor") -> "Tensor":
        """Return the phases times the attention factor, (..., D), in the dtype of the real
        `positions` (...).
        """
        import torch

        frequencies = self.constant("frequencies", self.frequencies, positions.device)
        angles = positions[..., None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.attention_factor

    def enter(self, layer, parameters, state, hidden_states_sBC, cache):
        """Return the state; in the first layer with learned increments, the phases of all tokens
        (S, B, g, D).
        """
        if not self.learns_on_entry(layer):
            return state
        from torch.nn.functional import linear

        # Sums need all tokens of a group, so tokens are exchanged for heads.
        logits_SBG = self.token_layout.to_heads(linear(hidden_states_sBC, parameters["increments"]))
        return self._exact_phases(self.running_sum(logits_SBG, cache), hidden_states_sBC.dtype)

    def running_sum(self, logits_SBN: "Tensor", cache: TokenCache) -> "Tensor":
        """Return the positions of the tokens of `logits_SBN` for N groups, (S, B, N), in float64.

        In float32, positions near 100,000 would be rounded to multiples of 1/128.
        """
        logits_SBN = logits_SBN.double()
        if self.settings.increments == "signed":
            increments_SBN = 1 + logits_SBN
        else:
            increments_SBN = 2 * logits_SBN.sigmoid()
        return cache.cumsum("increments", increments_SBN)

    def _exact_phases(self, positions_SBG: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the phases of real positions times the attention factor, (S, B, G, D), rounded
        once to `dtype`.
        """
        from megatron_tape.ops.rotation import phases

        frequencies = self.constant("frequencies", self.frequencies, positions_SBG.device)
        return phases(positions_SBG, frequencies, self.attention_factor, dtype)

    @property
    def attention_factor(self) -> float:
        """Modulus of the complex numbers in the initial state: 1, except with yarn.

        It scales both queries and keys, so attention scores are multiplied by its square (YaRN,
        Peng et al., 2023).
        """
        settings = self.settings
        if settings.rope_scaling_type != "yarn":
            return 1.0
        if settings.rope_attention_factor is not None:
            return settings.rope_attention_factor
        return yarn_attention_factor(settings.rope_scaling_factor)

    def frequencies(self) -> "Tensor":
        """Return the frequencies theta_f in radians per position, float32 (D/2,); those outside
        `rope_share` are 0.

        llama3 and yarn keep frequencies with many full turns in the original context, and divide
        those with few by the scaling factor. In between, llama3 interpolates by the number of
        turns, yarn by the index of the frequency.
        """
        frequencies = self._scaled_frequencies()
        # The fastest frequencies come first.
        rotating = int(self.settings.rope_share * self.model.head_dim // 2)
        frequencies[rotating:] = 0
        return frequencies

    def _scaled_frequencies(self) -> "Tensor":
        """Return `frequencies` for a `rope_share` of 1."""
        import torch

        settings = self.settings
        factor = settings.rope_scaling_factor
        dim = self.model.head_dim
        # These and the following formulas compute in transformers' order of operations, so that
        # results are bitwise equal.
        inverse_frequencies = settings.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
        frequencies = 1.0 / inverse_frequencies
        if settings.rope_scaling_type == "linear":
            return frequencies / factor

        if settings.rope_scaling_type == "yarn":
            unscaled = self._yarn_unscaled_weights()
            scaled = 1.0 / (factor * inverse_frequencies)
            return scaled * (1 - unscaled) + frequencies * unscaled

        # llama3: the weight of the unscaled frequency rises from 0 at `low` turns to 1 at `high`.
        low = settings.rope_low_freq_factor
        high = settings.rope_high_freq_factor
        turns = settings.rope_original_seq_length / (2 * torch.pi / frequencies)
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - unscaled) * frequencies / factor + unscaled * frequencies

    def _yarn_unscaled_weights(self) -> "Tensor":
        """Return the weight of each unscaled frequency in yarn's interpolation, (D/2,), falling
        from 1 to 0.
        """
        import torch

        settings = self.settings
        dim = self.model.head_dim

        def index(turns: float) -> float:
            """Return the (fractional) index of the frequency with `turns` full turns in the
            original context.
            """
            wavelength = settings.rope_original_seq_length / (turns * 2 * math.pi)
            return dim * math.log(wavelength) / (2 * math.log(settings.rope_theta))

        first = index(settings.rope_beta_fast)
        last = index(settings.rope_beta_slow)
        if settings.rope_truncate:
            first = math.floor(first)
            last = math.ceil(last)
        # transformers has the same upper bound, D - 1, although there are only D/2 frequencies.
        first = max(first, 0)
        last = min(last, dim - 1)
        # A division by zero below is avoided as in transformers.
        if first == last:
            last += 0.001
        return 1 - ((torch.arange(dim // 2).float() - first) / (last - first)).clamp(0, 1)


def yarn_attention_factor(scaling_factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's recommended attention factor, 0.1 ln(s) + 1; some models scale the logarithm by
    `mscale`.
    """
    if scaling_factor > 1:
        return 0.1 * mscale * math.log(scaling_factor) + 1.0
    return 1.0
