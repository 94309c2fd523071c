"""The registry of positional encodings.

Hugging Face exports contain a copy of this file, so it must not import other modules of the
project.
"""

from typing import Any

ENCODINGS: dict[str, Any] = {}
"""Subclasses of `PositionEncoding` by name. `position.register` adds an entry."""
