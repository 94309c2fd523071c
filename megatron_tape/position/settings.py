"""The settings of positional encodings, which are keys of `model`, and of models that have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_tape.config.schema import ModelConfig, RunConfig, build_model, default_of, key_of, keys_of, model_dict
from megatron_tape.errors import refuse
from megatron_tape.position.base import PositionEncoding
from megatron_tape.position.registry import ENCODINGS
from megatron_tape.position.some_layers import in_some_layers

if TYPE_CHECKING:
    from megatron_tape.parallel.token_layout import TokenLayout


def _settings() -> dict[str, dataclasses.Field]:
    return {item.name: item for settings in encoding_settings().values() for item in dataclasses.fields(settings)}


def encoding_settings() -> dict[str, type]:
    """Return the settings of each encoding, a dataclass, by the encoding's name.

    Raises ValueError if one of them has the name of a setting that every model has.
    """
    for encoding in ENCODINGS.values():
        if taken := {item.name for item in keys_of(ModelConfig)} & setting_names(encoding.name):
            raise ValueError(
                f"the positional encoding {encoding.name} has a setting {taken.pop()}, but every model has one of that "
                "name; choose another name"
            )
    return {name: encoding.Settings for name, encoding in ENCODINGS.items()}


def setting_names(encoding: str) -> set[str]:
    """Return the keys of `model` that are settings of an encoding; none for an encoding that does not exist."""
    return {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)} if encoding in ENCODINGS else set()


def model_config(**values: Any) -> ModelConfig:
    """Return the settings of a model from the values of its keys; see `config.schema.build_model`."""
    return build_model(encoding_settings(), values)


def replaced(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return `config` with other values of these keys, `section.key`."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: with_values(getattr(config, name), **changes) for name, changes in sections.items()}
    return dataclasses.replace(config, **changed)


def with_values(section: Any, **values: Any) -> Any:
    """Return a section of a configuration with other values of its keys."""
    if isinstance(section, ModelConfig):
        return model_config(**(model_dict(section) | values))
    fields = {key_of(item.name): item.name for item in keys_of(type(section))}
    return dataclasses.replace(section, **{fields[key]: value for key, value in values.items()})


def encoding_of(model: ModelConfig, tokens: TokenLayout | None = None, fused: bool = False) -> PositionEncoding:
    """Return a model's encoding; for its declarations alone, without `tokens` (see `PositionEncoding`)."""
    encoding = ENCODINGS[model.position_encoding]
    assert isinstance(model.position, encoding.Settings), "a model's encoding and its settings change together"
    if model.layers_without_positions is not None:
        encoding = in_some_layers(encoding)
    return encoding(model, tokens, fused)


def check_encoding(model: ModelConfig) -> None:
    """Raise `ConfigError` if the model's settings do not fit its encoding."""
    encoding, every = encoding_of(model), model.layers_without_positions
    problem = f"does not apply to {encoding.name}, with which no layer gets positions"
    refuse(every is not None and not encoding.needs, "model.layers_without_positions", problem, "remove it")
    problem = f"is {every}, more than model.num_layers {model.num_layers}, so that every layer would get positions"
    refuse((every or 0) > model.num_layers, "model.layers_without_positions", problem, "lower it, or remove it")
    encoding.check()
    values = model_dict(model)
    defaults = {key: default_of(item) for key, item in _settings().items()}
    for key in sorted(encoding.refuses & values.keys()):
        different = values[key] != defaults[key]
        refuse(different, f"model.{key}", f"{values[key]} does not apply to {encoding.name}", "remove it")
