"""Positional encodings, one file each, behind `PositionEncoding`; `model.position_encoding` chooses by name."""

from megatron_tape.position.base import PositionEncoding
from megatron_tape.position.nope import NoPosition
from megatron_tape.position.rope import RotaryPosition
from megatron_tape.position.tape import TapePosition

ENCODINGS: dict[str, type[PositionEncoding]] = {"tape": TapePosition, "rope": RotaryPosition, "nope": NoPosition}

__all__ = ["ENCODINGS", "PositionEncoding"]
