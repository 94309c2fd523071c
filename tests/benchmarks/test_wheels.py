"""Wheels for a machine without a network are collected completely or not at all."""

import subprocess
import zipfile

import pytest

from benchmarks import wheels
from megatron_tape.errors import FileError


def write_wheel(folder, name="toy", tags="py3-none-any"):
    """Write a wheel that pip accepts, with one module."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "VALUE = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n"
    )
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.mark.parametrize("python, version", [("3.11", "0.16.1"), ("3.12", "0.19.2")])
def test_megatron_has_the_version_for_the_other_python(python, version):
    assert wheels.pins_of_python(python) == {"megatron-core": f"megatron-core=={version}"}


def test_all_wheels_are_collected_and_built_or_none(tmp_path, monkeypatch):
    index = tmp_path / "index"
    source = tmp_path / "built-1.0"
    output = tmp_path / "collected"
    index.mkdir()
    source.mkdir()
    for name in ("toy", "other"):
        write_wheel(index, name)
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
    )
    (source / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='built', version='1.0')\n"
    )
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: built\nVersion: 1.0\n")
    subprocess.run(
        ["tar", "-czf", index / "built-1.0.tar.gz", source.name], cwd=tmp_path, check=True
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(wheels, "SOURCE_PACKAGES", ("built",))
    monkeypatch.setattr("sys.argv", ["wheels", str(output), "--python", "3.12"])
    monkeypatch.setattr(wheels, "PACKAGES", ("toy", "missing"))
    with pytest.raises(FileError, match="toy is not installed here"):
        wheels.main()
    monkeypatch.setattr(wheels.importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(FileError, match="pip download"):
        wheels.main()
    assert not output.exists()
    monkeypatch.setattr(wheels, "PACKAGES", ("toy", "other", "built"))
    wheels.main()
    names = ["built-1.0-py3-none-any.whl", "other-1.0-py3-none-any.whl", "toy-1.0-py3-none-any.whl"]
    assert sorted(path.name for path in output.iterdir()) == names
