"""Wheels for a machine without a network are collected whole."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from benchmarks import wheels
from megatron_tape.errors import FileError


def write_wheel(folder, name="toy", tags="py3-none-any", code="VALUE = 1\n"):
    """Write a wheel that pip accepts, with one module."""
    path, info = folder / f"{name}-1.0-{tags}.whl", f"{name}-1.0.dist-info"
    files = {f"{name}.py": code, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in place of the package index: packages that are collected, one of them built from its source."""
    index, source = tmp_path / "index", tmp_path / "built-1.0"
    index.mkdir()
    source.mkdir()
    for name in ("toy", "other"):
        write_wheel(index, name)
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n')
    setup = "from setuptools import setup\nsetup(name='built', version='1.0', py_modules=['built'])\n"
    (source / "setup.py").write_text(setup)
    (source / "built.py").write_text("VALUE = 3\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: built\nVersion: 1.0\n")
    subprocess.run(["tar", "-czf", index / "built-1.0.tar.gz", source.name], cwd=tmp_path, check=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(wheels, "CARRIED", ("toy", "other", "built"))
    monkeypatch.setattr(wheels, "BUILT", ("built",))
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: "1.0")


def test_wheels_are_collected_and_built_for_another_python(index, tmp_path, monkeypatch, capsys):
    output = tmp_path / "collected"
    monkeypatch.setattr("sys.argv", ["wheels", str(output), "--python", "3.12"])
    wheels.main()
    names = ["built-1.0-py3-none-any.whl", "other-1.0-py3-none-any.whl", "toy-1.0-py3-none-any.whl"]
    assert sorted(path.name for path in output.iterdir()) == names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "0.0 MiB in" in printed
    with zipfile.ZipFile(output / "built-1.0-py3-none-any.whl") as built:
        assert built.read("built.py") == b"VALUE = 3\n"


def test_what_cannot_be_collected_leaves_nothing_behind(index, tmp_path, monkeypatch):
    def pip(command, *options):
        if command == "download":
            write_wheel(Path(options[options.index("--dest") + 1]))

    output = tmp_path / "collected"
    with monkeypatch.context() as patch, pytest.raises(FileError, match="more than 0"):
        patch.setattr(wheels, "_pip", pip)
        patch.setattr(wheels, "LARGEST", 10)
        wheels.collect(output, "3.12")
    monkeypatch.setattr(wheels, "CARRIED", ("toy", "missing"))
    with pytest.raises(FileError, match="pip download failed:(.|\n)*missing==1.0"):
        wheels.collect(output, "3.12")
    monkeypatch.undo()
    monkeypatch.setattr(wheels, "CARRIED", ("no-such-package-here",))
    with pytest.raises(FileError, match="no-such-package-here is not installed here"):
        wheels.collect(output, "3.12")
    assert not output.exists() and not output.with_name("collected.partial").exists()
