"""Packages that only some tasks need: refused in a sentence where they are missing."""

from __future__ import annotations

import importlib.util

from megatron_tape.errors import ConfigError


def require(task: str, *packages: str) -> None:
    """Raise ConfigError if one of the packages, by the names that Python imports, is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{task} needs {' and '.join(missing)}; install what is missing: pip install {' '.join(missing)}"
        )
