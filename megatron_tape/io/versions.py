"""The versions of what a process runs with, for records and for comparing nodes."""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def commit(source: Path = ROOT) -> str | None:
    """Return the commit of a directory, None where git does not know it."""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def versions_with_commit() -> dict[str, str]:
    """Return the versions together with this project's commit, where git knows it."""
    found = commit()
    return versions() | ({"commit": found} if found else {})


def code_digest(folders: Iterable[str]) -> str:
    """Return a short sha256 of the Python files in these folders of the code that runs here."""
    hasher = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        hasher.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:12]
