"""`pip install .` installs every module and recipe, and commands that run from any directory."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_tape

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"megatron_tape": "megatron_tape", "pretrain": "pretrain", "tools": "pretrain/tools"}
"""Where the files of each folder are installed."""
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
RUN_ALL = """
import importlib, sys
for script in sys.argv[1:]:
    command, _, function = script.partition("=")
    module, _, name = function.partition(":")
    sys.argv = [command, "--version"]
    try:
        getattr(importlib.import_module(module), name)()
    except SystemExit as stop:
        assert stop.code == 0, command
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install from a copy, as building leaves files in the source; return the folder with the
    packages.
    """
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("packages")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "setup.py",
        "requirements.txt",
        "README.md",
        "LICENSE",
        "NOTICE",
    ):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--no-compile", "--target", target, source],
        check=True,
        timeout=300,
    )
    return target


def run(installed, tmp_path, *command):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )


def test_every_module_and_data_file_is_installed(installed):
    for folder, place in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.*"):
            if "__pycache__" not in path.parts and path.suffix != ".sh":
                assert (installed / place / path.relative_to(ROOT / folder)).exists(), path


def test_each_python_gets_its_version_of_megatron(installed):
    (information,) = installed.glob("megatron_tape-*.dist-info")
    requirements = [Requirement(line) for line in PathDistribution(information).requires]
    versions = {}
    for python in ("3.11", "3.12", "3.13"):
        for requirement in requirements:
            here = requirement.marker is None or requirement.marker.evaluate(
                {"python_version": python}
            )
            if requirement.name == "megatron-core" and here:
                versions[python] = str(requirement.specifier)
    assert versions == {"3.11": "==0.16.1", "3.12": "==0.19.2", "3.13": "==0.19.2"}


def test_only_two_top_level_packages_are_installed(installed):
    packages = {
        path.name for path in installed.iterdir() if path.is_dir() and path.suffix != ".dist-info"
    }
    assert packages == {"megatron_tape", "pretrain", "bin"}


def test_every_command_prints_the_version(installed, tmp_path):
    scripts = [f"{command}={function}" for command, function in SCRIPTS.items()]
    done = run(installed, tmp_path, sys.executable, "-c", RUN_ALL, *scripts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"megatron-tape {megatron_tape.__version__}"] * len(scripts)


def test_a_command_runs_from_any_directory_under_its_own_name(installed, tmp_path):
    command = (installed / "bin" / "tape-train", "tape_demo", "--print_config")
    done = run(installed, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "position_encoding: tape" in done.stdout
    done = run(installed, tmp_path, installed / "bin" / "tape-convert", "to-hf", "--help")
    assert done.stdout.startswith("usage: tape-convert to-hf ")
