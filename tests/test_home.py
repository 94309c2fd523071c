"""megatron_tape.home: expansion of `~` in arguments and settings, and caches without a home
directory.
"""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tape import command_line, home
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.home import expand_home, provide_caches

CACHES = ("MPLCONFIGDIR", "HF_HOME", "HF_MODULES_CACHE", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
PACKAGES = ("pretrain", "tools")
NOBODY = "~no-such-user/x"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Remove variables of caches from the environment, and use a separate folder for temporary
    files.
    """
    for name in (*CACHES, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TRITON_HOME", "RANK"):
        monkeypatch.setenv(name, "")  # so that what is set in the test is undone
        monkeypatch.delenv(name)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return monkeypatch


def test_a_tilde_is_expanded_only_at_the_beginning(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert [expand_home(path) for path in ("~", "~/x", "~/x/~", "x~", "./~", "/~/x")] == [
        *("/home/me", "/home/me/x", "/home/me/x/~", "x~", "./~", "/~/x")
    ]
    with pytest.raises(UserError, match="or ./~no-such-user/x"):
        expand_home(NOBODY)


def test_options_of_all_programs_expand_only_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = command_line.Parser()
    verb = parser.add_subparsers().add_parser("verb")
    verb.add_argument("paths", nargs="*")
    verb.add_argument("--file", type=Path)
    verb.add_argument("--prompt", type=str)
    given = parser.parse_args(["verb", "a", "~/b", "--file=~/c", "--prompt=~/d"])
    assert given.paths == ["a", "/home/me/b"]
    assert (given.file, given.prompt) == (Path("/home/me/c"), "~/d")
    with pytest.raises(ConfigError, match="argument --file: ~no-such-user/x begins with ~"):
        parser.parse_args(["verb", f"--file={NOBODY}"])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_a_home_directory_caches_are_temporary_and_rank_0_says_so(
    environment, tmp_path, capsys, rank
):
    environment.setenv("HOME", "/dev/null")
    environment.setenv("RANK", rank)
    environment.setenv("MPLCONFIGDIR", "/mine")
    provide_caches()
    assert os.environ["MPLCONFIGDIR"] == "/mine"
    for name in CACHES[1:]:
        assert os.environ[name].startswith(f"{tmp_path}/temporary/"), name
    assert ("/dev/null" in capsys.readouterr().err) == (rank == "0")
    provide_caches()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shared", [False, True])
def test_models_in_a_read_only_cache_can_be_read(environment, tmp_path, capsys, shared):
    models = tmp_path / ".cache" / "huggingface"
    models.mkdir(parents=True)
    read_only = models if shared else tmp_path
    access = os.access

    def without_writing(path, mode):
        return access(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(read_only))

    environment.setattr(os, "access", without_writing)
    environment.setenv("HOME", str(tmp_path))
    if shared:
        environment.setenv("HF_HOME", str(models))
    provide_caches()
    assert os.environ["HF_MODULES_CACHE"].startswith(f"{tmp_path}/temporary/")
    assert ("HF_HOME" in os.environ) == shared
    assert (capsys.readouterr().err == "") == shared == ("TRITON_CACHE_DIR" not in os.environ)


def test_an_unreadable_cache_of_models_is_named_although_the_home_is_writable(
    environment, tmp_path, capsys
):
    models = tmp_path / ".cache" / "huggingface"
    models.parent.mkdir()
    models.write_text("not a directory")
    environment.setenv("HOME", str(tmp_path))
    provide_caches()
    assert os.environ["HF_HOME"].startswith(f"{tmp_path}/temporary/")
    assert capsys.readouterr().err.startswith(f"{models} is not writable")


def test_a_user_without_a_name_gets_one(environment, tmp_path):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 12345")

    environment.setenv("HOME", str(tmp_path))
    environment.setenv("USER", "")
    environment.setattr(getpass, "getuser", unknown)
    provide_caches()
    assert os.environ["USER"] == str(os.getuid())


def test_no_other_user_can_write_to_a_private_directory(environment):
    made = home.private_directory("caches")
    assert made == home.private_directory("caches")
    assert os.stat(made).st_mode & 0o077 == 0
    os.chmod(made, 0o777)
    assert home.private_directory("caches") != made


def test_no_program_imports_matplotlib_transformers_or_torch_at_the_top():
    folder = Path(__file__).parents[1]
    modules = [f"{name}.{path.stem}" for name in PACKAGES for path in (folder / name).glob("*.py")]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "print(sys.modules.keys() & {'matplotlib', 'transformers', 'torch'})"
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
