"""`make`: which Python it takes, what `make test` runs, how it reports outcomes. Dummy programs stand for Python."""

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAMPS = ("STAMP", "PLAIN_STAMP", "ECOSYSTEM_STAMP", "VLLM_STAMP")


@pytest.fixture
def make_test(tmp_path):
    def run(*arguments, slurm=0, others=0):
        script = (
            f'#!/bin/sh\necho "ran $*"\ncase "$*" in *--ignore=tests/slurm*) exit {others};; *) exit {slurm};; esac\n'
        )
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
        (tmp_path / "stamp").touch()
        stamps = [f"{name}={tmp_path}/stamp" for name in STAMPS]
        command = ["make", "-s", "test", f"BIN={tmp_path}", *stamps, *arguments]
        return run_make(command)

    return run


def run_make(command):
    # make itself runs these tests, and passes its own variables on.
    own = ("TESTS", "SLOW", "PYTHON", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def install_with(tmp_path):
    def write(python, version):
        says = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
        command = shlex.join([sys.executable, "-c", says])
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {command} "$2"\nexit 1\n')
        python.chmod(0o755)

    def run(version, existing=None):
        """Run `make install` with a Python that says that it has this version, and that has no venv.

        `existing` is the version of the environment there is, or "gone" if its Python has been removed.
        """
        python, installed = tmp_path / "python3", tmp_path / "venv" / "bin" / "python"
        write(python, version)
        if existing == "gone":
            installed.parent.mkdir(parents=True)
            installed.symlink_to("nowhere")
        elif existing:
            write(installed, existing)
        return run_make(["make", "-s", "install", f"PYTHON={python}", f"VENV={tmp_path}/venv"])

    return run


SUPPORTED = [(3, 11), (3, 12), (3, 13)]


def test_the_package_and_make_agree_on_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11,<3.14"
    assert project["tool"]["ruff"]["target-version"] == "py311"


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (3, 9)])
def test_another_python_is_refused_with_what_to_install_and_choose(install_with, version):
    done = install_with(version)
    assert done.returncode != 0 and f"is {version[0]}.{version[1]}." in done.stdout
    assert "make PYTHON=python3.13" in done.stdout and "apt-get install python3.13-venv" in done.stdout


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_python_without_venv_is_told_which_package_has_it(install_with, version):
    done = install_with(version)
    assert done.returncode != 0 and "needs Python" not in done.stdout
    assert done.stdout.strip().endswith("apt-get install python{}.{}-venv".format(*version))


@pytest.mark.parametrize("existing, said", [((3, 10), "3.10"), ((3, 12), "3.12"), ("gone", "broken")])
def test_an_environment_of_another_python_is_not_installed_into(install_with, tmp_path, existing, said):
    done = install_with((3, 11), existing)
    assert done.returncode != 0
    assert done.stdout.startswith(f"{tmp_path}/venv/bin/python is {said}, and {tmp_path}/python3 is 3.11.\n")
    assert "make clean" in done.stdout and "Could not create" not in done.stdout


def test_an_environment_of_the_same_python_is_kept(install_with):
    assert "Could not create" in install_with((3, 11), (3, 11)).stdout


def test_a_missing_python_is_refused_like_another_version(tmp_path):
    done = run_make(["make", "-s", "install", f"PYTHON={tmp_path}/none", f"VENV={tmp_path}/venv"])
    assert done.returncode != 0 and "is missing." in done.stdout and "apt-get install python3.13-venv" in done.stdout


@pytest.mark.parametrize("others, slurm", [(0, 0), (1, 0), (0, 2), (1, 5)])
def test_both_halves_run_and_are_reported_together(make_test, others, slurm):
    done = make_test("SLOW=1", others=others, slurm=slurm)
    first, _, second, summary = done.stdout.splitlines()
    assert first.startswith("ran -m pytest --ignore=tests/slurm") and second.startswith("ran -m pytest tests/slurm")
    results = [f"failed (pytest's exit status {status})" if status else "passed" for status in (slurm, others)]
    assert summary == f"make test: tests/slurm {results[0]}; all other tests {results[1]}"
    assert (done.returncode == 0) == (others == slurm == 0)


def test_slow_tests_are_left_out_by_default_and_this_is_said(make_test):
    first, _, second, _, last = make_test().stdout.splitlines()
    assert first.endswith("-m not slow") and second.endswith("-m not slow") and "make test SLOW=1" in last
    assert "not slow" not in make_test("SLOW=1").stdout
    first, _, second, _ = make_test("SLOW=only").stdout.splitlines()
    assert first.endswith("-m slow") and second.endswith("-m slow")


def test_chosen_tests_are_one_command(make_test):
    assert make_test("TESTS=tests/slurm -m 'not slow'").stdout == "ran -m pytest tests/slurm -m not slow\n"
    assert make_test("TESTS=tests/config", slurm=1).returncode != 0
