"""Positional encodings, one file each, behind `PositionEncoding`; `model.position_encoding` selects
one by name.

Importing this package does not import torch. To use an encoding of another package, call `register`
before parsing a configuration that selects it.
"""

from megatron_tape.position.alibi import AlibiPosition
from megatron_tape.position.cope import CopePosition
from megatron_tape.position.encoding import (
    Bounds,
    Costs,
    Count,
    EncodingSettings,
    MicroBatchSizes,
    Parameter,
    PositionEncoding,
    PositionInputs,
    Positive,
    TokenCache,
)
from megatron_tape.position.fire import FirePosition
from megatron_tape.position.fox import FoxPosition
from megatron_tape.position.from_config import attention_needs, encoding_of, model_config
from megatron_tape.position.nope import NoPosition
from megatron_tape.position.path import PathPosition
from megatron_tape.position.path_fox import PathFoxPosition
from megatron_tape.position.randpe import RandomizedPosition
from megatron_tape.position.registry import ENCODINGS, register
from megatron_tape.position.repo import Reposition
from megatron_tape.position.rope import RotaryPosition
from megatron_tape.position.selective_rope import SelectiveRotaryPosition
from megatron_tape.position.selective_rope_fox import SelectiveRotaryFoxPosition
from megatron_tape.position.sincos import SinusoidalPosition
from megatron_tape.position.t5 import T5Position
from megatron_tape.position.tape import TapePosition
from megatron_tape.position.wall import WallPosition
from megatron_tape.position.xpos import XposPosition

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
    WallPosition,
    SelectiveRotaryPosition,
    SelectiveRotaryFoxPosition,
)
"""All built-in encodings. Add the class of a new file here."""
for _encoding in BUILT_IN:
    register(_encoding)

__all__ = [
    "BUILT_IN",
    "ENCODINGS",
    "Bounds",
    "Costs",
    "Count",
    "EncodingSettings",
    "TokenCache",
    "MicroBatchSizes",
    "Parameter",
    "PositionEncoding",
    "PositionInputs",
    "Positive",
    "attention_needs",
    "encoding_of",
    "model_config",
    "register",
]
