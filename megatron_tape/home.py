"""The user's home directory: `~` in paths, and what libraries keep there, also where it cannot be written."""

import getpass
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


class PathError(LookupError):
    """Paths that cannot be expanded. Not a ValueError, which pydantic would reword."""

    def __init__(self, problem: str, fix: str):
        super().__init__(f"{problem}; {fix}")
        self.problem, self.fix = problem, fix


class NoHome(PathError):
    """A path begins with the home directory of a user who has none."""


def expand_home(path: str) -> str:
    """Return a path with the home directory that a leading `~` or `~user` stands for.

    A shell expands an unquoted `~` at the beginning of a word, but neither in a recipe nor after `--option=`. Raises
    NoHome.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path[1:].partition("/")[0]
        problem = f"there is no user {user}" if user else "this user has no home directory"
        raise NoHome(problem, f"write the whole path, or ./{path} for a file of that name")
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
    missing = [name for name, path in _caches().items() if name not in os.environ and not _can_write(path)]
    if not missing:
        return
    directory = private_directory(f"megatron-tape-caches-{os.getuid()}")
    os.environ.update({name: os.path.join(directory, name.lower()) for name in missing})
    if os.environ.get("RANK", "0") == "0":
        home = os.path.expanduser("~")
        why = "there is no home directory" if home == "~" else f"the home directory {home} cannot be written"
        where = f"libraries keep their caches in {directory}; set HOME to keep them elsewhere"
        print(f"{why}, so that {where}", file=sys.stderr, flush=True)


def _caches() -> dict[str, str]:
    """Return where libraries write unless a variable says otherwise, by the variable."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hugging_face = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    found = {
        "MPLCONFIGDIR": f"{os.environ.get('XDG_CONFIG_HOME') or '~/.config'}/matplotlib",
        "HF_HOME": hugging_face,
        "HF_MODULES_CACHE": f"{hugging_face}/modules",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
        "TRITON_CACHE_DIR": f"{os.environ.get('TRITON_HOME') or '~'}/.triton/cache",
    }
    if os.access(os.path.expanduser(hugging_face), os.R_OK | os.X_OK):
        del found["HF_HOME"]  # its models can be read, even where nothing can be added
    return found


def _can_write(path: str) -> bool:
    """Return whether a directory can be made, or written if it exists."""
    # These functions of os.path, unlike those of Path, take what cannot be searched for missing.
    whole = os.path.expanduser(path)
    existing = next((each for each in (whole, *map(str, Path(whole).parents)) if os.path.lexists(each)), None)
    usable = existing is not None and os.path.isdir(existing)  # a link may lead nowhere
    return os.path.isabs(whole) and usable and os.access(existing, os.W_OK | os.X_OK)
