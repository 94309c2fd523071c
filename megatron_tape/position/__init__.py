"""Positional encodings, one file each, behind `PositionEncoding`; `model.position_encoding` chooses by name.

Importing this does not import torch. `register` adds an encoding from another package; call it before a configuration
that names the encoding is checked.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING

from megatron_tape.errors import ConfigError, refuse
from megatron_tape.position.alibi import AlibiPosition
from megatron_tape.position.base import Memory, MicroBatch, Parameter, PositionEncoding, Positions
from megatron_tape.position.cope import CopePosition
from megatron_tape.position.fire import FirePosition
from megatron_tape.position.fox import FoxPosition
from megatron_tape.position.nope import NoPosition
from megatron_tape.position.path import PathPosition
from megatron_tape.position.path_fox import PathFoxPosition
from megatron_tape.position.randpe import RandomizedPosition
from megatron_tape.position.registry import ENCODINGS, register
from megatron_tape.position.repo import Reposition
from megatron_tape.position.rope import RotaryPosition
from megatron_tape.position.sincos import SinusoidalPosition
from megatron_tape.position.t5 import T5Position
from megatron_tape.position.tape import TapePosition
from megatron_tape.position.xpos import XposPosition

if TYPE_CHECKING:
    from megatron_tape.config.schema import ModelConfig

BUILT_IN: tuple[type[PositionEncoding], ...] = (
    TapePosition,
    RotaryPosition,
    NoPosition,
    AlibiPosition,
    T5Position,
    FirePosition,
    SinusoidalPosition,
    XposPosition,
    PathPosition,
    CopePosition,
    FoxPosition,
    RandomizedPosition,
    Reposition,
    PathFoxPosition,
)
"""Add the class of a new file here; the settings of these classes are keys of `model`."""
_VARIANTS = ("position_increments", "position_state_norm")
for _encoding in BUILT_IN:
    register(_encoding)


def encoding_of(model: ModelConfig) -> PositionEncoding:
    """Return a model's encoding, for its declarations; raises `ConfigError` if no encoding has that name."""
    name = model.position_encoding
    if name not in ENCODINGS:
        close = difflib.get_close_matches(name.lower(), ENCODINGS, n=1)
        meant = f"did you mean {close[0]}? There are" if close else "choose one of"
        meant += f" {', '.join(ENCODINGS)}"
        if name.lower() == "yarn":
            meant = "YaRN is rope with model.rope_scaling_type yarn and model.rope_scaling_factor"
        raise ConfigError(f"model.position_encoding is {name!r}; {meant}")
    return ENCODINGS[name](model)


def check_encoding(model: ModelConfig) -> None:
    """Raise `ConfigError` if the model's settings do not fit its encoding.

    An encoding does not read the settings of others, which may stand in a recipe for several. But some of them make
    another encoding of one, and whoever sets these expects that.
    """
    encoding_of(model).check()
    own = setting_names(model.position_encoding)
    for item in dataclasses.fields(model):
        value = getattr(model, item.name)
        refuse(
            item.name in _VARIANTS and item.name not in own and value != item.default,
            f"model.{item.name} {value} does not apply to {model.position_encoding}; set it to {item.default}",
        )


def unread_settings(model: ModelConfig) -> list[str]:
    """Return the settings of other encodings that differ from their defaults and that the model's does not read."""
    others = {name for encoding in ENCODINGS for name in setting_names(encoding)}
    unread = others - setting_names(model.position_encoding)
    return [
        item.name
        for item in dataclasses.fields(model)
        if item.name in unread and getattr(model, item.name) != item.default
    ]


def setting_classes() -> tuple[type, ...]:
    """Return the settings classes of the built-in encodings as bases of a class, without those that others extend."""
    classes = dict.fromkeys(encoding.settings for encoding in BUILT_IN if encoding.settings is not object)
    return tuple(a for a in classes if not any(b is not a and issubclass(b, a) for b in classes))


def setting_names(encoding: str) -> set[str]:
    """Return the keys of `model` that are settings of an encoding; none for an encoding that does not exist."""
    settings = ENCODINGS[encoding].settings if encoding in ENCODINGS else object
    return {item.name for item in dataclasses.fields(settings)} if settings is not object else set()


__all__ = [
    "BUILT_IN",
    "ENCODINGS",
    "Memory",
    "MicroBatch",
    "Parameter",
    "PositionEncoding",
    "Positions",
    "check_encoding",
    "encoding_of",
    "register",
    "setting_classes",
    "setting_names",
    "unread_settings",
]
