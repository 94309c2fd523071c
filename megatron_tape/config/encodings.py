"""The positional encodings by name. Exports include this module, which therefore imports nothing from the project."""

from typing import Any

ENCODINGS: dict[str, Any] = {}
"""Encoding classes, each with its `Settings`; `position.register` adds to them."""
