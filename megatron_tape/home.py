"""The user's home directory: expand `~` in paths, and provide cache directories if it is not writable."""

import getpass
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megatron_tape.errors import UserError


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~user` expanded. Raises UserError if the user has no home directory.

    A shell expands an unquoted `~` at the beginning of a word, but not in a recipe or after `--option=`.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        fix = f"give the full path, or ./{path} for a file of that name"
        raise UserError(path, "starts with the home directory of a user who has none", fix)
    return expanded


def private_directory(name: str) -> str:
    """Return a temporary directory with this name, or with another name if other users could write to it."""
    path = Path(tempfile.gettempdir(), name)
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return str(path)
    return tempfile.mkdtemp(prefix=f"{name}-")


def provide_caches() -> None:
    """Set cache directories and the user's name for libraries if the user has no writable home directory or no name.

    This is common in containers. Variables that are already set are not changed. Rank 0 reports the directories.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())  # torch's compiler asks for a name
    home = os.path.expanduser("~")
    models = os.environ.get("HF_HOME") or os.path.join(home, ".cache", "huggingface")
    names = [] if _is_writable(home) else ["MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"]
    if not _is_writable(models):
        # A shared directory of models may be read-only.
        names += ["HF_MODULES_CACHE"] if os.access(models, os.R_OK | os.X_OK) else ["HF_MODULES_CACHE", "HF_HOME"]
    names = [name for name in names if name not in os.environ]
    if not names:
        return
    directory = private_directory(f"megatron-tape-caches-{os.getuid()}")
    os.environ.update({name: os.path.join(directory, name.lower()) for name in names})
    if names != ["HF_MODULES_CACHE"] and os.environ.get("RANK", "0") == "0":
        place = models if _is_writable(home) else home
        print(
            f"{place} cannot be written: libraries keep {', '.join(names)} in {directory}", file=sys.stderr, flush=True
        )


def _is_writable(path: str) -> bool:
    """Return whether a directory is writable, or can be created if it does not exist."""
    whole = os.path.abspath(path)
    # Unlike Path's methods, os.path.lexists returns False for paths in directories that cannot be searched.
    existing = next(each for each in (whole, *map(str, Path(whole).parents)) if os.path.lexists(each))
    return not path.startswith("~") and os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
