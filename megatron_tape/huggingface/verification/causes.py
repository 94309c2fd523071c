"""Known faults of inference engines, each as the model that an engine with this fault computes.

An engine has a fault if its logits agree with those of the faulty model. This needs nothing but
logits, so it works for every engine.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import as_dict
from megatron_tape.config.values import format_value
from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.model.shapes import hugging_face_shapes
from megatron_tape.position import PositionEncoding, encoding_of
from megatron_tape.position.encoding import SingleProcess
from megatron_tape.position.rope import FrequencySettings, RotaryPosition, ScaledSettings

DEFAULT_THETA = 10_000.0
"""The base of the frequencies that engines use if they do not find one."""
_REMAINING = 0.05
"""A fault explains a difference if at most this share of it remains between engine and faulty
model. More than rounding may remain, since engines round at different places."""


_WITHOUT_EFFECT = (
    "attention_backend",
    "init_std",
    "kv_channels",
    "num_query_groups",
    "seq_length",
    "unpadded_vocab_size",
    "vocab_size",
    "position.mlp_size",
    "position.mlp_zero",
    "position.token_mixing",
)
"""Settings that change no logit of a model whose weights have given shapes."""


@dataclass(frozen=True)
class Cause:
    """A fault of an engine."""

    sentence: str
    """What the engine does, for users."""
    model: ModelConfig
    """The settings with which it computes."""
    faulty: type[PlainModel] = PlainModel
    """The class of model that has the fault; `PlainModel` if `model` alone describes it."""


def find_cause(
    candidates: Iterable[Cause],
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    sequence: Sequence,
    error_of: Callable[[Tensor], float],
    allowed: float,
    rounded_to: torch.dtype,
    on_cause: Callable[[str], None],
) -> str | None:
    """Return the sentence about the fault that explains an engine's logits best, or None.

    Args:
        candidates: the faults to try; of two that agree up to rounding, the first.
        model: the settings with which the model was trained.
        weights: as for `PlainModel`.
        sequence: the tokens that the engine has read.
        error_of: returns the difference between given logits (P, V) of the compared tokens and
            those of the engine.
        allowed: the largest difference from rounding.
        rounded_to: as for `PlainModel`.
        on_cause: called with the sentence of each fault before it is tried, to show progress.
    """
    plain = PlainModel(model, weights, rounded_to=rounded_to)
    original_error = error_of(plain.run(sequence).logits)
    smallest_error = max(allowed, _REMAINING * original_error)
    best = None
    for cause in candidates:
        on_cause(cause.sentence)
        faulty = cause.faulty(cause.model, weights, rounded_to=rounded_to)
        error = error_of(faulty.run(sequence).logits)
        if error <= smallest_error:
            smallest_error = error
            best = cause.sentence
        # No other fault can agree better than up to rounding.
        if error <= allowed:
            break
    return best


def causes(model: ModelConfig) -> Iterator[Cause]:
    """Yield the faults that would change what a model with these settings computes, the most
    frequent ones first.
    """
    if isinstance(model.position, FrequencySettings):
        yield from _frequencies(model)
    if model.position_encoding == "tape":
        yield from _tape(model)
    yield from _layers(model)
    if model.temperature_scale:
        yield Cause(
            "it ignores the temperature of layers without positions",
            replace(model, temperature_scale=0.0),
        )
    yield from _default_settings(model)


def other_settings(model: ModelConfig, described: ModelConfig | None) -> Iterator[Cause]:
    """Yield the fault that the engine read the settings `described` instead of `model`, if they
    differ and weights have the same shapes with both.
    """
    if described is None or hugging_face_shapes(described) != hugging_face_shapes(model):
        return
    in_training = _flat(model)
    differences = []
    for key, value in _flat(described).items():
        expected = in_training.get(key)
        if value != expected and key not in _WITHOUT_EFFECT:
            found = f"model.{key} is {format_value(value)}"
            differences.append(f"{found}, in the training {format_value(expected)}")
    if differences:
        listed = "; ".join(differences)
        yield Cause(f"its config.json has other settings: {listed}", described)


def _flat(model: ModelConfig) -> dict[str, Any]:
    """Return the settings by key, those of the encoding with the prefix `position.`."""
    settings = as_dict(model)
    position = settings.pop("position")
    return settings | {f"position.{key}": value for key, value in position.items()}


def _with_position(model: ModelConfig, **settings: Any) -> ModelConfig:
    """Return `model` with other settings of its encoding."""
    return replace(model, position=replace(model.position, **settings))


# Frequencies and their scaling.


def _frequencies(model: ModelConfig) -> Iterator[Cause]:
    """Yield faults of the frequencies of rotary encodings."""
    settings = model.position
    if settings.rope_theta != DEFAULT_THETA:
        yield Cause(
            f"the base of its frequencies is {DEFAULT_THETA:,.0f} instead of"
            f" {settings.rope_theta:,.0f}: it did not find rope_theta",
            _with_position(model, rope_theta=DEFAULT_THETA),
        )
    if isinstance(settings, ScaledSettings):
        yield from _scaling(model)
    if settings.rope_share < 1:
        yield Cause(
            "it rotates all frequencies instead of a share of them: it ignores rope_share"
            " (partial_rotary_factor)",
            _with_position(model, rope_share=1.0),
        )
    if settings.rope_local_theta is not None:
        yield Cause(
            "layers with a window have the base of the frequencies of the other layers",
            _with_position(model, rope_local_theta=None),
        )
        yield Cause(
            "all layers have the base of the frequencies of layers with a window",
            _with_position(model, rope_local_theta=None, rope_theta=settings.rope_local_theta),
        )

    yield Cause("its frequencies are rounded to bf16", model, _mixed_in(_RoundedFrequencies))
    angles = "it computes angles, positions times frequencies, in bf16"
    yield Cause(angles, model, _mixed_in(_RoundedAngles))
    yield Cause(angles, model, _mixed_in(_RoundedAnglesAndPhases))
    yield Cause("its phases are rounded to bf16", model, _mixed_in(_RoundedPhases))
    yield Cause("it does not rotate queries and keys at all", model, _mixed_in(_NoRotation))


def _scaling(model: ModelConfig) -> Iterator[Cause]:
    """Yield faults of the scaling of positions."""
    settings = model.position
    kind = settings.rope_scaling_type
    if kind == "linear" and settings.rope_scaling_factor == 1:
        return

    scaling = f"the scaling of positions ({_scaling_name(model)})"
    unscaled = _with_position(model, rope_scaling_type="linear", rope_scaling_factor=1.0)
    # Without scaled layers, no layer can be the exception.
    if settings.rope_scaling_layers == "full":
        unscaled = _with_position(unscaled, rope_scaling_layers="all")
    yield Cause(f"it ignores {scaling}", unscaled)

    # There are three ways to do this wrong. With linear scaling, they are the same.
    twice = f"it applies {scaling} twice"
    yield Cause(twice, model, _mixed_in(_ScaledTwice))
    yield Cause(twice, model, _mixed_in(_ScaledTwiceWithFactor))
    squared = settings.rope_scaling_factor**2
    yield Cause(twice, _with_position(model, rope_scaling_factor=squared))

    if kind != "linear" and settings.rope_original_seq_length != model.seq_length:
        yield Cause(
            f"it scales as if the context before the extension had {model.seq_length:,} tokens"
            f" instead of {settings.rope_original_seq_length:,}: it did not find"
            " original_max_position_embeddings",
            _with_position(model, rope_original_seq_length=model.seq_length),
        )
    yield from _scaled_layers(model)
    if kind == "yarn":
        yield Cause(
            "it does not multiply queries and keys by yarn's attention factor",
            _with_position(model, rope_attention_factor=1.0),
        )
    if kind != "linear":
        yield Cause(
            f"it divides all frequencies by {settings.rope_scaling_factor:g}, as linear scaling"
            f" does, instead of scaling by {kind}",
            _with_position(model, rope_scaling_type="linear"),
        )


def _scaled_layers(model: ModelConfig) -> Iterator[Cause]:
    """Yield faults of the choice of the layers whose positions are scaled."""
    name = _scaling_name(model)
    if model.position.rope_scaling_layers == "full":
        yield Cause(
            f"it scales positions ({name}) in layers with a window, too",
            _with_position(model, rope_scaling_layers="all"),
        )
    elif model.full_attention_every is not None:
        yield Cause(
            f"it does not scale positions ({name}) in layers with a window",
            _with_position(model, rope_scaling_layers="full"),
        )


def _scaling_name(model: ModelConfig) -> str:
    """Return the type and factor of the scaling, for sentences."""
    settings = model.position
    return f"{settings.rope_scaling_type}, factor {settings.rope_scaling_factor:g}"


def _mixed_in(mixin: type) -> type[PlainModel]:
    """Return the class of models whose encoding has the methods of `mixin` before its own."""

    class Faulty(PlainModel):
        def make_encoding(self) -> PositionEncoding:
            own = type(encoding_of(self.model))
            # The class of an encoding without positions in some layers is made at run time, too.
            mixed = type(own.__name__, (mixin, own), {})
            return mixed(self.model, SingleProcess())

    return Faulty


# Only rotary encodings are mixed in; the methods of their base classes are those of RotaryPosition.
class _ScaledTwice(RotaryPosition):
    """Frequencies that are scaled again after they have been scaled."""

    def frequencies(self) -> Tensor:
        scaled = super().frequencies()
        unscaled_encoding = copy.copy(self)
        unscaled_encoding.settings = replace(
            self.settings, rope_scaling_type="linear", rope_scaling_factor=1.0
        )
        unscaled = super(_ScaledTwice, unscaled_encoding).frequencies()
        # Frequencies outside of `rope_share` are 0.
        return torch.where(unscaled > 0, scaled * scaled / unscaled, 0.0)


class _ScaledTwiceWithFactor(_ScaledTwice):
    """The same with the square of the attention factor."""

    @property
    def attention_factor(self) -> float:
        return super().attention_factor ** 2


class _RoundedFrequencies(RotaryPosition):
    """Frequencies in bf16, as after `model.to(torch.bfloat16)`."""

    def frequencies(self) -> Tensor:
        return super().frequencies().bfloat16().float()


class _RoundedAngles(RotaryPosition):
    """Positions, frequencies and their products in bf16."""

    def phases(self, positions: Tensor) -> Tensor:
        angles = positions.bfloat16()[..., None] * self.frequencies().bfloat16()
        angles = angles.to(positions.dtype)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.attention_factor


class _RoundedPhases(RotaryPosition):
    """Cosines and sines in bf16."""

    def phases(self, positions: Tensor) -> Tensor:
        phases = super().phases(positions)
        return phases.bfloat16().to(phases.dtype)


class _RoundedAnglesAndPhases(_RoundedPhases, _RoundedAngles):
    """Positions, frequencies, their products, cosines and sines in bf16."""


class _NoRotation(RotaryPosition):
    """Frequencies of 0."""

    def frequencies(self) -> Tensor:
        return torch.zeros_like(super().frequencies())


# Layers.


def _layers(model: ModelConfig) -> Iterator[Cause]:
    """Yield faults of the pattern of layers without positions and of layers with a window."""
    has_windows = model.full_attention_every is not None
    # With rope, no parameter belongs to a kind of layer.
    without_positions = (
        model.layers_without_positions is not None and model.position_encoding == "rope"
    )
    if without_positions:
        pattern = "the pattern of layers without positions is"
        yield from _shifts(model, pattern, windows=False)
        yield Cause(
            "it rotates in layers without positions, too",
            replace(model, layers_without_positions=None),
        )
    if has_windows:
        yield from _shifts(model, "the pattern of layers with a window is", positions=False)
    if has_windows and without_positions:
        patterns = "the patterns of layers with a window and of layers without positions are"
        yield from _shifts(model, patterns)
    if has_windows:
        yield Cause("all layers have the window", model, _WindowsEverywhere)
    if model.sliding_window is not None:
        yield from _window_sizes(model, model.sliding_window)


def _shifts(
    model: ModelConfig, subject: str, positions: bool = True, windows: bool = True
) -> Iterator[Cause]:
    """Yield that patterns of layers are shifted. `subject` begins the sentences; see `_shifted`."""
    to_front = _shifted(1, positions, windows)
    to_back = _shifted(-1, positions, windows)
    yield Cause(f"{subject} shifted by one layer to the front", model, to_front)
    yield Cause(f"{subject} shifted by one layer to the back", model, to_back)


def _window_sizes(model: ModelConfig, window: int) -> Iterator[Cause]:
    """Yield faults of the size of windows, which have `window` tokens."""
    yield Cause("no layer has the window", model, _resized(None))
    yield Cause(
        f"its windows have {window + 1:,} tokens instead of {window:,}: it does not count the token"
        " itself",
        model,
        _resized(1),
    )
    if window > 1:
        sentence = f"its windows have {window - 1:,} tokens instead of {window:,}"
        yield Cause(sentence, model, _resized(-1))


def _shifted(by: int, positions: bool = True, windows: bool = True) -> type[PlainModel]:
    """Return the class of models in which layer i is of the kind of layer i + `by`.

    `positions` and `windows` tell whether this holds for layers without positions, and for layers
    with a window.
    """

    class Faulty(PlainModel):
        def pattern_layer(self, layer: int) -> int:
            if not positions:
                return layer
            return layer + by

        def window_of(self, layer: int) -> int | None:
            if not windows:
                return super().window_of(layer)
            return super().window_of(layer + by)

    return Faulty


def _resized(by: int | None) -> type[PlainModel]:
    """Return the class of models whose windows have `by` more tokens; None removes the windows."""

    class Faulty(PlainModel):
        def window_of(self, layer: int) -> int | None:
            window = super().window_of(layer)
            if window is None or by is None:
                return None
            return window + by

    return Faulty


class _WindowsEverywhere(PlainModel):
    """A model all of whose layers have the window."""

    def window_of(self, layer: int) -> int | None:
        return self.model.sliding_window


# TAPE.


def _tape(model: ModelConfig) -> Iterator[Cause]:
    """Yield faults of TAPE's update of the position state."""
    gate_input = model.position.gate_input
    other = {"mlp": "attention", "attention": "mlp"}[gate_input]
    yield Cause(
        f"the gate of the position MLP reads the output of {other} instead of {gate_input}",
        _with_position(model, gate_input=other),
    )
    if model.query_groups == model.num_attention_heads:
        yield Cause("token_mixing is transposed", model, _TransposedMixing)
    yield Cause("its position state is in bf16", model, _RoundedState)
    yield Cause("it does not update the position state: it computes plain RoPE", model, _NoUpdates)
    if model.position.state_norm == "unit":
        yield Cause(
            "it does not rescale the position state",
            _with_position(model, state_norm="none"),
        )


class _TransposedMixing(PlainModel):
    """TAPE with the transposed matrix of token mixing."""

    def changed_parameter(self, name: str, parameter: Tensor) -> Tensor:
        # A diagonal is its own transpose.
        if name == "token_mixing" and parameter.dim() == 2:
            return parameter.mT
        return parameter


class _RoundedState(PlainModel):
    """TAPE with a position state in bf16 between layers."""

    def changed_state(self, state: Any) -> Any:
        return state.bfloat16().to(state.dtype)


class _NoUpdates(PlainModel):
    """TAPE whose layers pass on the state that enters them."""

    def changed_parameter(self, name: str, parameter: Tensor) -> Tensor:
        # With these two at zero, an update changes nothing.
        if name in ("token_mixing", "down_proj"):
            return torch.zeros_like(parameter)
        return parameter


# All encodings.


def _default_settings(model: ModelConfig) -> Iterator[Cause]:
    """Yield the fault that the encoding has its default settings, if some are not, and weights have
    the same shapes with both. Those of frequencies have faults of their own.
    """
    settings = model.position
    if isinstance(settings, FrequencySettings):
        return
    changed = [
        field.name
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    ]
    if not changed:
        return

    default = replace(model, position=type(settings)())
    if hugging_face_shapes(default) == hugging_face_shapes(model):
        names = ", ".join(changed)
        yield Cause(f"the encoding has its default settings: it did not find {names}", default)
