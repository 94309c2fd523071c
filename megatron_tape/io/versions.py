"""The versions of what a process runs with, for records and for comparing nodes."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("torch", "transformers", "lm_eval", "tokenizers", "megatron-tape")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions_with_commit() -> dict[str, str]:
    """Return the versions together with this project's commit, where git knows it."""
    command = ["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return versions()
    return versions() | ({"commit": answer.stdout.strip()} if answer.returncode == 0 else {})
