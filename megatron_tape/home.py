"""The user's home directory: `~` in paths, and what libraries keep there, also where it cannot be written."""

import getpass
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megatron_tape.errors import UserError


def expand_home(path: str) -> str:
    """Return a path with the home directory that a leading `~` or `~user` stands for.

    A shell expands an unquoted `~` at the beginning of a word, but neither in a recipe nor after `--option=`. Raises
    UserError if that user has none.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        fix = f"write the whole path, or ./{path} for a file of that name"
        raise UserError(path, "begins with the home directory of a user who has none", fix)
    return expanded


def private_directory(name: str) -> str:
    """Return a directory of this name for temporary files, or another if somebody else can write there."""
    path = Path(tempfile.gettempdir(), name)
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return str(path)
    return tempfile.mkdtemp(prefix=f"{name}-")


def provide_caches() -> None:
    """Let libraries that are imported later write their caches, also without a home directory or a name for the user.

    Containers run programs as users who have neither. Variables that are set stay; rank 0 says where the caches are.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())  # torch's compiler asks for a name
    home = os.path.expanduser("~")
    models = os.environ.get("HF_HOME") or os.path.join(home, ".cache", "huggingface")
    names = [] if _is_writable(home) else ["MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"]
    if not _is_writable(models):
        # A directory of models may be shared, and only be read by its users.
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
    """Return whether a directory can be written, or made if it does not exist."""
    whole = os.path.abspath(path)
    # os.path's functions, unlike those of Path, take what cannot be searched for missing.
    existing = next(each for each in (whole, *map(str, Path(whole).parents)) if os.path.lexists(each))
    return not path.startswith("~") and os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
