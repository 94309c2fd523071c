"""Paths that users give: refuse addresses, and expand `~`. Provide cache directories if the home is
not writable.
"""

import getpass
import os
import re
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megatron_tape.errors import UserError


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~user` expanded. Raises UserError if the user has no
    home directory.

    A shell expands `~` at the beginning of an unquoted word, but not in a recipe or after
    `--option=`.
    """
    if not path.startswith("~"):
        return path
    # `expanduser` returns the path unchanged if it finds no home directory.
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        fix = f"give the full path, or ./{path} for a file of that name"
        raise UserError(path, "begins with ~, but no home directory was found for this user", fix)
    return expanded


def refuse_address(path: str) -> None:
    """Raise UserError for an address such as `s3://bucket/run`, which would be used as a local path
    named `s3:`.
    """
    if re.match("[A-Za-z][A-Za-z0-9+.-]*://", path):
        raise UserError(
            path,
            "is an address, and object stores and servers are not supported",
            "give a path, such as that of a shared or mounted directory, and copy with a program"
            " such as aws s3 sync between runs",
        )


def private_directory(name: str) -> str:
    """Create a directory for temporary files that only this user can write to, and return its path.

    It is called `name`, and later calls return it again. If a directory of that name belongs to
    another user, or others can write to it, each call creates a new one, called `name` with a
    random suffix.
    """
    # Other users know the name, and could have created a directory or a link of that name first.
    # It is used only if it is a directory of this user, to which no other user can write.
    path = Path(tempfile.gettempdir(), name)
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
        if is_private and status.st_uid == os.getuid():
            return str(path)
    return tempfile.mkdtemp(prefix=f"{name}-")


def provide_caches() -> None:
    """Move libraries' caches to a temporary directory if the home directory is not writable; set
    USER if it is unknown.

    Both cases are common in containers. Cache variables that are already set are not changed. Rank
    0 prints which caches have moved.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())  # torch's compiler asks for a name
    # Without HF_HOME, Hugging Face's libraries use ~/.cache/huggingface.
    home = os.path.expanduser("~")
    hf_home = os.environ.get("HF_HOME") or os.path.join(home, ".cache", "huggingface")
    variables = []
    if not _is_writable(home):
        variables += ["MPLCONFIGDIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"]
    if not _is_writable(hf_home):
        variables.append("HF_MODULES_CACHE")
        # HF_HOME may be a read-only directory of models that many users share.
        if not os.access(hf_home, os.R_OK | os.X_OK):
            variables.append("HF_HOME")
    moved = [name for name in variables if name not in os.environ]
    if not moved:
        return

    # The name contains the user's number, since several users of a node may need such a directory.
    directory = private_directory(f"megatron-tape-caches-{os.getuid()}")
    for name in moved:
        os.environ[name] = os.path.join(directory, name.lower())
    # If only the cache of modules has moved, no message is shown: it holds copies of small files.
    if moved != ["HF_MODULES_CACHE"] and os.environ.get("RANK", "0") == "0":
        unwritable = hf_home if _is_writable(home) else home
        message = f"{unwritable} is not writable; the caches {', '.join(moved)} are in {directory}"
        print(message, file=sys.stderr, flush=True)


def _is_writable(path: str) -> bool:
    """Return whether a directory is writable, or can be created if it does not exist."""
    if path.startswith("~"):  # no home directory was found
        return False
    # A directory can be created if its nearest existing parent is writable.
    # Unlike Path's methods, os.path.lexists returns False in directories that cannot be searched.
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
