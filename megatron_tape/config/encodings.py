"""The positional encodings by name. Imports nothing: exports bring it along with the file of an encoding."""

from typing import Any

ENCODINGS: dict[str, Any] = {}
"""The classes of encodings, each with its `Settings`; `position.register` adds to them."""
