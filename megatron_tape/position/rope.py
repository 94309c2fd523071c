"""Rotary positional encoding (Su et al., 2021), as Llama applies it, with its scalings of positions.

Positions are 0, 1, ... or, with increments that are learned, running sums of what each token adds,
    p[s,g] = sum_{t<=s} 2 sigmoid(w_g . x[t])    ("learned": between 0 and 2),
    p[s,g] = sum_{t<=s} 1 + w_g . x[t]           ("signed": a token may also go back),
where x is the first layer's normalised input: "accumulated rotations" (MapFormer, arXiv 2511.19279; arXiv 2606.24975).
With w = 0 each token adds 1. Only differences of positions enter, so a sum may begin anywhere: before the document of a
pack, or with padding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_tape.errors import refuse
from megatron_tape.ops.backends import ROTATION
from megatron_tape.position.encoding import Costs, EncodingSettings, Parameter, PositionEncoding, TokenCache

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FrequencySettings(EncodingSettings):
    """Frequencies of the rotation. Encodings with these settings alone neither scale positions nor learn increments."""

    rope_scaling_type = "linear"
    rope_scaling_factor = 1.0
    increments = "fixed"

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_share: float = 1.0
    """Share of the frequencies, the fastest, that rotate; the others stay 0 (p-RoPE, Barbero et al., 2025)."""


@dataclass(frozen=True, kw_only=True)
class ScaledSettings(FrequencySettings):
    """Frequencies, and how they are scaled, so that longer contexts fit a trained model."""

    rope_scaling_type: Literal["linear", "llama3", "yarn"] = "linear"
    """linear divides all positions by rope_scaling_factor; llama3 (Llama 3.1) only those of slow frequencies, and so
    does yarn, which also makes attention sharper."""
    rope_scaling_factor: float = 1.0
    """Divisor of the positions; 2 doubles the context of a trained model."""
    rope_original_seq_length: int = 8192
    """llama3 and yarn: tokens of the context before it was extended."""
    rope_low_freq_factor: float = 1.0
    """llama3: frequencies that turn fewer times than this in rope_original_seq_length tokens are scaled fully."""
    rope_high_freq_factor: float = 4.0
    """llama3: frequencies that turn more times than this are not scaled; between the two, scaling changes gradually."""
    rope_beta_slow: float = 1.0
    """yarn: frequencies that turn fewer times than this in rope_original_seq_length tokens are scaled fully."""
    rope_beta_fast: float = 32.0
    """yarn: frequencies that turn more times than this are not scaled; between the two, scaling changes gradually."""
    rope_truncate: bool = True
    """yarn: begin and end the gradual change at whole frequencies, as most models with yarn do."""
    rope_attention_factor: float | None = None
    """yarn: factor of rotated queries and keys; null means 0.1 ln(rope_scaling_factor) + 1."""


@dataclass(frozen=True, kw_only=True)
class RotarySettings(ScaledSettings):
    """Frequencies, their scaling, and by how much positions grow."""

    increments: Literal["fixed", "learned", "signed"] = "fixed"
    """By how much the position grows with each token: fixed is 1; learned and signed depend on the token
    and start at 1; learned is between 0 and 2, signed has no bounds, so that positions may also go back."""


class RotaryPosition(PositionEncoding):
    """Every layer rotates by the same phases exp(i s theta_f), or exp(i p[s,g] theta_f) with learned increments.

    Parameters of the first layer with learned increments: `increments` w (G, C), which starts at zero.
    """

    name = "rope"
    Settings = RotarySettings
    needs = frozenset({ROTATION})

    @property
    def exports_to(self) -> str | None:
        """A model of transformers if it has one: with fixed positions, no gate, and all frequencies or none scaled."""
        settings = self.settings
        unknown = settings.rope_share < 1 and settings.rope_scaling_type != "linear"
        return "code" if self.learns_increments or self.model.attention_output_gate or unknown else "plain"

    @property
    def learns_increments(self) -> bool:
        """Whether the position grows with each token by what its content says."""
        return self.settings.increments != "fixed"

    def check(self) -> None:
        settings = self.settings
        for key, value in vars(settings).items():
            if key.startswith("rope_") and isinstance(value, (int, float)) and not isinstance(value, bool):
                fix = "set it to a number from 1e-9 to 1e12"  # beyond, the logarithms of yarn may fail
                refuse(not 1e-9 <= value <= 1e12, f"model.position.{key}", f"is {value}", fix)
        refuse(
            settings.rope_scaling_factor < 1,
            "model.position.rope_scaling_factor",
            f"is {settings.rope_scaling_factor}, which would shorten the context",
            "set it to at least 1, the new length over the old",
        )
        share, dim = settings.rope_share, self.model.head_dim
        problem = f"is {share}, and leaves none of {dim // 2} frequencies" if share < 1 else f"is {share}"
        fix = f"set it to a number from {2 / dim:.4g} to 1"
        refuse(share > 1 or share * dim // 2 < 1, "model.position.rope_share", problem, fix)
        pairs = ("rope_low_freq_factor", "rope_high_freq_factor"), ("rope_beta_slow", "rope_beta_fast")
        for lower, upper in pairs if isinstance(settings, ScaledSettings) else ():
            low, high = getattr(settings, lower), getattr(settings, upper)
            keys = f"model.position.{lower}", f"model.position.{upper}"
            refuse(low >= high, keys, f"{low} is not below {keys[1]} {high}", "change one of them")
        refuse(
            settings.rope_scaling_type == "yarn" and settings.rope_theta <= 1,
            ("model.position.rope_theta", "model.position.rope_scaling_type"),
            f"{settings.rope_theta} is not above 1, as model.position.rope_scaling_type yarn needs",
            "raise it",
        )

    def learns_on_entry(self, layer: int) -> bool:
        return layer == 0 and self.learns_increments

    def parameters(self, layer: int) -> Mapping[str, Parameter]:
        if not self.learns_on_entry(layer):
            return {}
        return {"increments": Parameter((self.model.query_groups, self.model.hidden_size))}

    def costs(self, layer, batch) -> Costs:
        """Count one head's phases, which all heads share, as the state; with learned increments, those of every group.

        Then the first layer keeps increments and positions, in float64, and the phases that are made of them, and sends
        what increments are computed from to the ranks that add up all tokens.
        """
        model = self.model
        every_group = model.query_groups * model.head_dim if layer > 0 else 0
        state = every_group if self.learns_increments else model.head_dim
        if not self.learns_on_entry(layer):
            return Costs(state=state)
        sent = batch.sent_groups(model.query_groups) * batch.width * batch.local_tokens
        per_group = self.bytes_of_sums + model.head_dim * batch.width
        return Costs(
            multiply_adds=model.query_groups * model.hidden_size,
            saved=batch.tokens * batch.groups(model.query_groups) * per_group,
            sent_forward=sent,
            sent_backward=sent,
            state=state,
        )

    @property
    def bytes_of_sums(self) -> int:
        """What is kept of one token and group: the position and, if sigmoids need it, the increment, in float64."""
        return {"fixed": 0, "learned": 16, "signed": 8}[self.settings.increments]

    def initial_state(self, positions_SB, dtype) -> "Tensor | None":
        """Return the phases times the attention factor, (S, B or 1, 1, D), computed in float32.

        With learned increments, return None: the first layer makes them.
        """
        if self.learns_increments:
            return None
        return self.phases(positions_SB.float().unsqueeze(2)).to(dtype)

    def sent_state(self, layer, tokens, batch, dtype):
        """The phases of all tokens for this rank's groups, which learned increments make."""
        import torch

        groups = len(self.tokens.local_heads(torch.empty(self.model.query_groups, device="meta")))
        return (tokens * self.tokens.sequence_shards, batch, groups, self.model.head_dim), dtype

    def phases(self, positions: "Tensor") -> "Tensor":
        """Return the phases (..., D), times the attention factor, of real positions (...), in their precision."""
        import torch

        angles = positions[..., None] * self.constant("frequencies", self.frequencies, positions.device)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.attention_factor

    def enter(self, layer, parameters, state, hidden_states_sBC, cache) -> "Tensor | None":
        """Return the state; in the first layer with learned increments, the phases of all tokens (S, B, g, D)."""
        if not self.learns_on_entry(layer):
            return state
        from torch.nn.functional import linear

        logits_SBG = self.tokens.to_heads(linear(hidden_states_sBC, parameters["increments"]))
        return self._exact_phases(self.running_sum(logits_SBG, cache), hidden_states_sBC.dtype)

    def running_sum(self, logits_SBN: "Tensor", cache: TokenCache) -> "Tensor":
        """Return the positions of the tokens given for N groups, (S, B, N), in float64.

        In float32, positions of 100,000 would be rounded to 1/128.
        """
        logits_SBN = logits_SBN.double()
        signed = self.settings.increments == "signed"
        increments_SBN = 1 + logits_SBN if signed else 2 * logits_SBN.sigmoid()
        # The increments are kept, not their sum, so that a cache can also forget its last tokens.
        return cache.append("increments", increments_SBN).cumsum(0)[-len(increments_SBN) :]

    def _exact_phases(self, positions_SBG: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the phases of real positions times the attention factor, (S, B, G, D)."""
        from megatron_tape.ops.rotation import phases

        frequencies = self.constant("frequencies", self.frequencies, positions_SBG.device)
        return phases(positions_SBG, frequencies, self.attention_factor, dtype)

    @property
    def attention_factor(self) -> float:
        """The modulus of the initial state's complex numbers: 1, except with yarn.

        It scales queries as well as keys, so that its square divides the temperature of attention (YaRN, Peng et al.,
        2023).
        """
        settings = self.settings
        if settings.rope_scaling_type != "yarn":
            return 1.0
        if settings.rope_attention_factor is not None:
            return settings.rope_attention_factor
        return yarn_attention_factor(settings.rope_scaling_factor)

    def frequencies(self) -> "Tensor":
        """Return the angles per position theta_f, float32 (D/2,).

        llama3 and yarn keep fast frequencies and divide slow ones, depending on how often they turn in the original
        context: llama3 changes gradually with the number of turns, yarn with the index of the frequency. Those beyond
        rope_share are 0.
        """
        frequencies = self._scaled_frequencies()
        frequencies[int(self.settings.rope_share * self.model.head_dim // 2) :] = 0
        return frequencies

    def _scaled_frequencies(self) -> "Tensor":
        import torch

        model, settings = self.model, self.settings
        inverse = settings.rope_theta ** (torch.arange(0, model.head_dim, 2).float() / model.head_dim)
        frequencies = 1.0 / inverse
        if settings.rope_scaling_type == "linear":
            return frequencies / settings.rope_scaling_factor
        if settings.rope_scaling_type == "yarn":
            # In the order of transformers' own operations, so that not a bit differs.
            kept = self._kept_by_yarn()
            return 1.0 / (settings.rope_scaling_factor * inverse) * (1 - kept) + frequencies * kept
        low, high = settings.rope_low_freq_factor, settings.rope_high_freq_factor
        turns = settings.rope_original_seq_length / (2 * torch.pi / frequencies)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / settings.rope_scaling_factor + kept * frequencies

    def _kept_by_yarn(self) -> "Tensor":
        """Return the share of each frequency that yarn does not scale, (D/2,), falling linearly from 1 to 0."""
        import torch

        model, settings = self.model, self.settings

        def index(turns: float) -> float:
            """Return where among the frequencies one is that turns so often in the original context."""
            wavelength = settings.rope_original_seq_length / (turns * 2 * math.pi)
            return model.head_dim * math.log(wavelength) / (2 * math.log(settings.rope_theta))

        first, last = index(settings.rope_beta_fast), index(settings.rope_beta_slow)
        if settings.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        # The upper bound is that of transformers, although there are only half as many frequencies.
        first, last = max(first, 0), min(last, model.head_dim - 1)
        last = last + 0.001 if first == last else last
        return 1 - ((torch.arange(model.head_dim // 2).float() - first) / (last - first)).clamp(0, 1)


def yarn_attention_factor(scaling_factor: float, mscale: float = 1.0) -> float:
    """Return the attention factor that YaRN recommends, 0.1 ln(s) + 1; some models multiply the logarithm."""
    return 0.1 * mscale * math.log(scaling_factor) + 1.0 if scaling_factor > 1 else 1.0
