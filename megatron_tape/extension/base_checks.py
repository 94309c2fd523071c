"""Check that a run's settings fit the model that it extends. Imports no torch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.saved_settings import (
    CHANGEABLE_MODEL_KEYS,
    change_sentence,
    model_differences,
)
from megatron_tape.checkpoint.saved_tokenizer import check_same_tokenizer, load_saved_tokenizer
from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.config.sections import as_dict
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError
from megatron_tape.extension.base_model import (
    FACTOR_KEY,
    KEY,
    LAYER_KEYS,
    Base,
    find_base,
    keys_of_position,
    scaling_of,
)
from megatron_tape.model.names import kind_of
from megatron_tape.model.shapes import parameter_shapes
from megatron_tape.position import ENCODINGS, encoding_of

_SCALING_KEYS = {
    "linear": (),
    "llama3": ("rope_original_seq_length", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": ("rope_original_seq_length", "rope_beta_slow", "rope_beta_fast", "rope_truncate"),
}
"""Settings of `model.position` that belong to a type of scaling, by the type. An extension that
keeps the type keeps their values.
"""
_LAYER_POSITION_KEYS = ("rope_scaling_layers", "rope_local_theta")
"""Settings of `model.position` that apply to some layers only."""


def check_base(config: RunConfig, base: Base | None = None) -> None:
    """Raise ConfigError if a run's settings do not fit the model that it extends.

    Checks the model, the context length, the tokenizer and the trained parameters. `base` is by
    default the model of `extension.from`. A shorter context and another scaling must be allowed by
    `extension`. Warns if positions are scaled by less than the context grows. Logs which changes of
    windows and layers change the model's outputs.
    """
    base = base or find_base(config.extension.from_)
    _check_same_model(config.model, base)
    _check_length(config, base)
    _check_scaling(config, base)
    _log_changed_layers(config.model, base)

    # Parameters of the encoding that the base model lacks are initialized, so they must be trained.
    new = _encoding_parameters(config.model) - _encoding_parameters(base.model)
    if new and not {"position", "all"} & set(config.extension.trains):
        raise ConfigError(
            ("extension.trains", KEY),
            f"does not include position, but {KEY} {base.path} does not have the parameter"
            f" {min(new)}, so new parameters would not be trained",
            "add position, or keep the base model's setting",
        )
    _check_tokenizer(config, base)


def _check_same_model(model: ModelConfig, base: Base) -> None:
    """Raise ConfigError if `model` differs from the base model in what must stay the same.

    The model may get another positional encoding that starts as the old one or replaces it.
    """
    base_encoding = base.model.position_encoding
    new_encoding = model.position_encoding
    # The encodings that the model may get instead of its own, such as `tape` instead of `rope`.
    possible_encodings = [
        name
        for name, encoding in ENCODINGS.items()
        if name != base_encoding
        and (encoding.starts_as == base_encoding or base_encoding in encoding.replaces)
    ]
    # `changeable` are the settings that the message lists, such as those of RoPE's scaling. Only
    # differences outside of `may_differ` are refused. It also contains settings that differ because
    # this extension changes the encoding or imports the model.
    changeable = {*CHANGEABLE_MODEL_KEYS, *LAYER_KEYS}
    changeable |= {f"position.{key}" for key in keys_of_position("rope")}
    changeable |= {f"position.{key}" for key in ENCODINGS[new_encoding].extended_by}
    may_differ = set(changeable)
    if new_encoding in possible_encodings:
        may_differ |= {
            "position_encoding",
            *(f"position.{key}" for key in keys_of_position(new_encoding)),
        }
    # Only some encodings have `increments`. Weights that were trained with learned increments would
    # mean something else with signed or fixed ones.
    if getattr(base.model.position, "increments", "fixed") != "fixed":
        changeable.discard("position.increments")
        may_differ.discard("position.increments")
    if base.state is None and model.vocab_size >= base.model.vocab_size:
        may_differ.add("vocab_size")  # an import adds the missing rows

    differences = model_differences(as_dict(base.model), as_dict(model), free=may_differ)
    if differences:
        keys = ", ".join(f"model.{key}" for key in sorted(changeable))
        fix = (
            "remove these settings from the recipe or the command line: an extension changes only"
            f" {keys}"
        )
        if possible_encodings:
            fix += (
                f", and model.position_encoding from {base_encoding} to one of:"
                f" {', '.join(possible_encodings)}"
            )
        if new_encoding != base_encoding:
            fix += f"; to keep its encoding, set model.position_encoding to {base_encoding}"
        raise ConfigError(
            KEY,
            f"{base.path} is another model than these settings describe ({'; '.join(differences)})",
            fix,
        )

    # The weights of the encoding in the base model must fit the new one.
    shapes = parameter_shapes(model)
    for name, shape in parameter_shapes(base.model).items():
        if kind_of(name) == "position" and shapes.get(name) != shape:
            raise ConfigError(
                (KEY, "model.position_encoding"),
                f"{base.path} has the parameter {name}, which {new_encoding} does not have or has"
                " in another shape",
                f"keep model.position_encoding {base_encoding}, or extend a model without it",
            )


def _check_length(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if a run's context is shorter than that of its base model.

    With `extension.allow_shorter_context`, it may be.
    """
    length = config.model.seq_length
    base_length = base.model.seq_length
    if length < base_length and not config.extension.allow_shorter_context:
        raise ConfigError(
            ("model.seq_length", "extension.allow_shorter_context", KEY),
            f"is {length}, but {KEY} {base.path} has contexts of {base_length} tokens",
            f"for contexts twice as long, set {FACTOR_KEY}: 2 instead of model.seq_length and"
            " model.position.rope_*; to train on shorter contexts, set"
            " extension.allow_shorter_context: true",
        )


def _check_scaling(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if a run's RoPE scaling does not fit that of its base model.

    The scaling may be replaced only with `extension.allow_other_scaling`. A larger
    `rope_scaling_factor` or `rope_theta` does not count as replacing it. `rope_original_seq_length`
    must not exceed the base model's context. It may be smaller, because some models state a longer
    context than they were trained on. Warns if positions leave the trained range.
    """
    position = config.model.position
    if "rope_theta" not in keys_of_position(config.model.position_encoding):
        return
    if not config.extension.allow_other_scaling:
        _check_not_replaced(position, base)

    base_position = base.model.position
    scaling = scaling_of(base.model)
    kind = position.rope_scaling_type
    factor = position.rope_scaling_factor
    # With a factor of 1 there is no scaling, so a type that the run has chosen itself is a mistake.
    # The run has not chosen `linear`, the default, or the base model's type, which it inherits.
    if factor == 1.0 and kind not in ("linear", base_position.rope_scaling_type):
        raise ConfigError(
            ("model.position.rope_scaling_factor", "model.position.rope_scaling_type"),
            f"is 1, so model.position.rope_scaling_type {kind} has no effect",
            "set it to the new context length divided by the old one",
        )

    # Positions stay in the trained range if the factor grows at least as much as the context. The
    # factors cannot be compared if the base model has another type of scaling. A larger
    # `rope_theta` may replace a larger factor.
    growth = config.model.rotated_length / base.model.rotated_length
    needed_factor = base_position.rope_scaling_factor * growth
    if (
        scaling in (None, kind)
        and factor < needed_factor
        and position.rope_theta <= base_position.rope_theta
    ):
        command_line.log(
            f"warning: model.position.rope_scaling_factor is {factor:g}, but contexts of {KEY}"
            f" {base.path} grow from {base.model.rotated_length} to"
            f" {config.model.rotated_length} tokens; set it to {needed_factor:g} unless this is"
            " intended"
        )

    # llama3 and yarn scale relative to the context on which the model was trained without scaling.
    if factor != 1.0 and kind != "linear":
        trained_length = base.model.seq_length
        if scaling in ("llama3", "yarn"):
            trained_length = base_position.rope_original_seq_length
        if position.rope_original_seq_length > trained_length:
            raise ConfigError(
                ("model.position.rope_original_seq_length", KEY),
                f"is {position.rope_original_seq_length}, but contexts of {KEY} {base.path} have"
                f" {trained_length} tokens",
                f"set it to {trained_length}",
            )


def _check_not_replaced(position: Any, base: Base) -> None:
    """Raise ConfigError if a run replaces the RoPE scaling of its base model.

    `position` are the run's settings of `model.position`.
    """
    base_position = base.model.position
    scaling = scaling_of(base.model)

    # A larger `rope_theta` or factor continues the scaling of the base model for longer contexts. A
    # smaller one undoes it. `rope_share` decides how many frequencies rotate at all.
    replaced = []
    if position.rope_share != base_position.rope_share:
        replaced.append("rope_share")
    if position.rope_theta < base_position.rope_theta:
        replaced.append("rope_theta")
    if _local_theta(position) < _local_theta(base_position):
        replaced.append("rope_local_theta")
    if scaling is not None and position.rope_scaling_type != scaling:
        replaced.append("rope_scaling_type")
    if scaling is not None and position.rope_scaling_layers != base_position.rope_scaling_layers:
        replaced.append("rope_scaling_layers")
    if scaling is not None and position.rope_scaling_factor < base_position.rope_scaling_factor:
        replaced.append("rope_scaling_factor")
    # Compare the settings of a scaling type only if the type is the same: they have no meaning for
    # another type.
    if position.rope_scaling_type == scaling:
        keys = _SCALING_KEYS[scaling]
        replaced += [key for key in keys if getattr(position, key) != getattr(base_position, key)]

    if not replaced:
        return
    first = replaced[0]
    raise ConfigError(
        (*(f"model.position.{key}" for key in replaced), "extension.allow_other_scaling", KEY),
        f"is {getattr(position, first)}, but {KEY} {base.path} has {getattr(base_position, first)}",
        f"to keep its scaling, remove model.position.rope_*, and set {FACTOR_KEY}: 2 instead of"
        " model.seq_length for contexts twice as long; to replace it, set"
        " extension.allow_other_scaling: true",
    )


def _local_theta(position: Any) -> float:
    """Return the base of the frequencies in layers with a window, for settings of
    `model.position`.
    """
    if position.rope_local_theta is None:
        return position.rope_theta
    return position.rope_local_theta


def _log_changed_layers(model: ModelConfig, base: Base) -> None:
    """Log which settings of windows and layers differ from those of the base model, and whether
    this changes the model's outputs.
    """
    sentences = []
    for section, new, old, keys in (
        ("model", model, base.model, LAYER_KEYS),
        ("model.position", model.position, base.model.position, _LAYER_POSITION_KEYS),
    ):
        for key in keys:
            # Only encodings with a rotation have the settings of `model.position`.
            was = getattr(old, key, None)
            now = getattr(new, key, was)
            if now != was:
                sentences.append(change_sentence(f"{section}.{key}", was, now))
    if not sentences:
        return

    unchanged = _unchanged_length(base.model, model)
    if unchanged is None:
        effect = "outputs do not change"
    elif unchanged == 0:
        effect = "outputs change"
    else:
        effect = f"outputs change for texts of more than {unchanged:,} tokens"
    command_line.log(f"{'; '.join(sentences)}: {effect}")


def _unchanged_length(old: ModelConfig, new: ModelConfig) -> int | None:
    """Return the number of tokens up to which texts have the same outputs in both models, as far as
    windows, layers without positions, temperature and frequencies decide. None if all texts do.
    """
    # One number for each difference.
    lengths = []
    windows_have_frequencies = _have_window_frequencies(old) or _have_window_frequencies(new)
    for layer in range(new.num_layers):
        windows = {old.window_of(layer), new.window_of(layer)}
        if len(windows) > 1:
            lengths.append(min(windows - {None}))
        if old.has_positions(layer) != new.has_positions(layer):
            lengths.append(0)
        # A layer that gets or loses a window then rotates by other angles.
        gets_or_loses_window = len(windows) > 1 and None in windows
        if gets_or_loses_window and windows_have_frequencies and new.has_positions(layer):
            lengths.append(0)

    temperatures = {
        (model.temperature_scale, model.temperature_floor_scale)
        for model in (old, new)
        if model.temperature_scale > 0
    }
    if len(temperatures) > 1 or (old.temperature_scale > 0) != (new.temperature_scale > 0):
        # The factor of a text's last token differs from 1 first.
        lengths.append(min(floor_scale for _, floor_scale in temperatures) - 1)

    # Where frequencies or positions change, outputs of all lengths do.
    if old.position_encoding in ENCODINGS[new.position_encoding].replaces:
        lengths.append(0)
    unscaled = scaling_of(old) is None and scaling_of(new) is None
    for key in keys_of_position("rope"):
        was = getattr(old.position, key, None)
        differs = getattr(new.position, key, was) != was
        if differs and not (unscaled and key == "rope_scaling_layers"):
            lengths.append(0)
    return min(lengths, default=None)


def _have_window_frequencies(model: ModelConfig) -> bool:
    """Return whether layers with a window have other frequencies than layers without one."""
    # Encodings without a rotation have no frequencies.
    return getattr(encoding_of(model), "with_window_frequencies", None) is not None


def _encoding_parameters(model: ModelConfig) -> set[str]:
    """Return the names of the parameters of a model's positional encoding."""
    return {name for name in parameter_shapes(model) if kind_of(name) == "position"}


def _check_tokenizer(config: RunConfig, base: Base) -> None:
    """Raise ConfigError if `data.tokenizer` differs from the tokenizer of the base model.

    Do nothing if one of them does not exist, or if the base model is a Hugging Face model whose
    tokenizer cannot be loaded.
    """
    path = config.data.tokenizer
    directory = base.tokenizer
    if path is None or directory is None or not Path(path).exists():
        return

    tokenizer = None
    if base.state is not None and base.path.is_dir():
        tokenizer = load_saved_tokenizer(base.path)
    else:  # a Hugging Face model, or a run that has not started
        with suppress(ValueError, OSError):
            tokenizer = load_tokenizer(directory)
    if tokenizer is not None:
        check_same_tokenizer(path, tokenizer, f"that of {KEY} {base.path}", f"give {directory}")
