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
    caches = _caches()
    obstacles = {
        name: obstacle
        for name, (_, path) in caches.items()
        if name not in os.environ and (obstacle := _obstacle(path)) is not None
    }
    if _is_readable(caches["HF_HOME"][1]):
        obstacles.pop("HF_HOME", None)  # what it has can be read, even where nothing can be added
    if not obstacles:
        return
    directory = private_directory(f"megatron-tape-caches-{os.getuid()}")
    os.environ.update({name: os.path.join(directory, name.lower()) for name in obstacles})
    if _is_readable(caches["HF_HOME"][1]):
        obstacles.pop("HF_MODULES_CACHE", None)  # a directory of models may be shared, and only be read by its users
    if obstacles and os.environ.get("RANK", "0") == "0":
        reasons = dict.fromkeys(_reason(caches[name][0], obstacle) for name, obstacle in obstacles.items())
        variables = dict.fromkeys(caches[name][0] for name in obstacles)
        where = f"libraries keep their caches in {directory}; set {' and '.join(variables)} to keep them elsewhere"
        print(f"{' and '.join(reasons)}, so that {where}", file=sys.stderr, flush=True)


def _caches() -> dict[str, tuple[str, str]]:
    """Return the directory of each cache by the variable that would set it, after the variable that it depends on."""
    home = ("HOME", "~")
    cache = _given("XDG_CACHE_HOME") or ("HOME", "~/.cache")
    hugging_face = _given("HF_HOME") or _below(cache, "huggingface")
    return {
        "MPLCONFIGDIR": _below(_given("XDG_CONFIG_HOME") or ("HOME", "~/.config"), "matplotlib"),
        "HF_HOME": hugging_face,
        "HF_MODULES_CACHE": _below(hugging_face, "modules"),
        "TORCH_EXTENSIONS_DIR": _below(cache, "torch_extensions"),
        "TRITON_CACHE_DIR": _below(_given("TRITON_HOME") or home, ".triton/cache"),
    }


def _given(variable: str) -> tuple[str, str] | None:
    return (variable, os.environ[variable]) if os.environ.get(variable) else None


def _below(directory: tuple[str, str], name: str) -> tuple[str, str]:
    return directory[0], f"{directory[1]}/{name}"


def _is_readable(path: str) -> bool:
    return os.access(os.path.expanduser(path), os.R_OK | os.X_OK)


def _obstacle(path: str) -> str | None:
    """Return what keeps a directory from being made, or written if it exists: the path that exists; None if nothing."""
    # These functions of os.path, unlike those of Path, take what cannot be searched for missing.
    whole = os.path.abspath(expanded := os.path.expanduser(path))
    existing = next(each for each in (whole, *map(str, Path(whole).parents)) if os.path.lexists(each))
    usable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)  # a link may lead nowhere
    return None if usable and not expanded.startswith("~") else existing


def _reason(variable: str, obstacle: str) -> str:
    """Return why the caches that follow a variable are elsewhere."""
    is_home = variable == "HOME"
    given = os.path.expanduser("~" if is_home else os.environ[variable])
    if given.startswith("~"):
        return "there is no home directory"
    if os.path.abspath(given) in map(str, Path(obstacle).parents):
        return f"{obstacle} cannot be written"
    return f"the home directory {given} cannot be written" if is_home else f"{given} ({variable}) cannot be written"
