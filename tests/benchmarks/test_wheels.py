"""Wheels for a machine without a network are collected whole, and refused where they cannot be installed together."""

import base64
import hashlib
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import wheels

HERE = f"{sys.version_info.major}{sys.version_info.minor}"
MANYLINUX = f"manylinux_2_17_{platform.machine()}.manylinux2014_{platform.machine()}"


def write_wheel(folder, name="toy", version="1.0", tags="py3-none-any", code="VALUE = 1\n"):
    """Write a wheel that pip accepts, with one module."""
    path = folder / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {f"{name}.py": code, f"{info}/METADATA": metadata}
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n"
    rows = []
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{file},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def value(site, name="toy"):
    code = f"import {name}; print({name}.VALUE, {name}.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-B", "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    found, file = done.stdout.split()
    assert Path(file).is_relative_to(site)
    return int(found)


def test_wheels_are_installed_aside_and_again_only_if_they_have_changed(folder, tmp_path, monkeypatch):
    write_wheel(folder)
    site = tmp_path / "site"
    assert wheels.install(folder, site) == site and value(site) == 1
    assert not list(site.rglob("*.pyc"))
    calls = []
    pip = wheels._pip
    monkeypatch.setattr(wheels, "_pip", lambda *arguments, **named: calls.append(1) or pip(*arguments, **named))
    assert wheels.install(folder, site) == site and not calls
    write_wheel(folder, code="VALUE = 12\n")
    wheels.install(folder, site)
    assert calls and value(site) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"wheels", "site"}


def test_a_directory_that_holds_something_else_is_left_alone(folder, tmp_path):
    write_wheel(folder)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine").touch()
    with pytest.raises(FileExistsError, match="site exists"):
        wheels.install(folder, tmp_path / "site")
    assert (tmp_path / "site" / "mine").exists()


def test_what_pip_refuses_leaves_nothing_behind(folder, tmp_path):
    (folder / "toy-1.0-py3-none-any.whl").write_bytes(b"no zip file")
    with pytest.raises(ValueError, match="^pip install failed: .*toy"):
        wheels.install(folder, tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


@pytest.mark.parametrize(
    "names, message",
    [
        ([], "holds no wheels; collect them in a new folder with: python -m benchmarks.wheels DIR --python 3."),
        (
            ["a_b-1.0-py3-none-any", "A.b-1.1-py3-none-any"],
            "holds two wheels of a-b, A.b-1.1-.* and a_b-1.0-.*; remove one",
        ),
        (["toy-1.0-cp38-cp38-any"], r"toy-1.0-cp38-cp38-any.whl is not for Python 3\.\d+; collect"),
        ([f"toy-1.0-cp{HERE}-cp{HERE}-macosx_11_0_arm64"], "is not for Linux on a processor of type"),
        ([f"toy-1.0-cp{HERE}-cp{HERE}-manylinux2014_s390x"], "is not for Linux on a processor of type"),
        (["toy"], "is not named as a wheel is"),
    ],
)
def test_wheels_that_cannot_be_installed_together_are_refused(folder, tmp_path, names, message):
    for name in names:
        (folder / f"{name}.whl").touch()
    with pytest.raises(ValueError, match=message):
        wheels.install(folder, tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    "tags, python, fits",
    [
        ("py3-none-any", "3.12", True),
        ("py2.py3-none-any", "3.12", True),
        ("py2-none-any", "3.12", False),
        ("py312-none-any", "3.11", False),
        ("cp310-cp310", "3.12", False),
        ("cp312-cp312", "3.12", True),
        ("cp39-abi3", "3.12", True),
        ("cp313-abi3", "3.12", False),
    ],
)
def test_tags_tell_which_python_a_wheel_is_for(folder, tags, python, fits):
    path = folder / f"toy-1.0-{tags if tags.endswith('any') else f'{tags}-{MANYLINUX}'}.whl"
    path.touch()
    if fits:
        assert wheels.check(folder, python) == [path]
    else:
        with pytest.raises(ValueError, match=f"is not for Python {re.escape(python)}"):
            wheels.check(folder, python)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in place of the package index: packages that are collected, one of them built from its source."""
    index = tmp_path / "index"
    index.mkdir()
    for name in ("toy", "other"):
        write_wheel(index, name)
    source = tmp_path / "built-1.0"
    source.mkdir()
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n')
    (source / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='built', version='1.0', py_modules=['built'])\n"
    )
    (source / "built.py").write_text("VALUE = 3\n")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: built\nVersion: 1.0\n")
    subprocess.run(["tar", "-czf", index / "built-1.0.tar.gz", source.name], cwd=tmp_path, check=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(wheels, "CARRIED", ("toy", "other", "built"))
    monkeypatch.setattr(wheels, "BUILT", ("built",))
    monkeypatch.setattr(wheels, "_installed", lambda name: "1.0")
    return index


def test_wheels_are_collected_and_built_for_another_python(index, tmp_path, monkeypatch, capsys):
    output = tmp_path / "collected"
    monkeypatch.setattr("sys.argv", ["wheels", str(output), "--python", "3.12"])
    wheels.main()
    names = ["built-1.0-py3-none-any.whl", "other-1.0-py3-none-any.whl", "toy-1.0-py3-none-any.whl"]
    assert sorted(path.name for path in output.iterdir()) == names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "0.0 MiB in" in printed
    site = wheels.install(output, tmp_path / "site")
    assert value(site, "built") == 3


def test_what_cannot_be_collected_leaves_nothing_behind(index, tmp_path, monkeypatch):
    output = tmp_path / "collected"
    monkeypatch.setattr(wheels, "BUILT", ())
    monkeypatch.setattr(wheels, "CARRIED", ("toy", "missing"))
    with pytest.raises(ValueError, match="^pip download failed: .*missing==1.0"):
        wheels.collect(output, "3.12")
    monkeypatch.setattr(wheels, "CARRIED", ("toy",))
    monkeypatch.setattr(wheels, "LARGEST", 10)
    with pytest.raises(ValueError, match="more than 0; nothing was written"):
        wheels.collect(output, "3.12")
    assert not output.exists() and not output.with_name("collected.partial").exists()


def test_a_package_that_is_not_installed_cannot_be_collected(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "CARRIED", ("no-such-package-here",))
    with pytest.raises(ValueError, match="no-such-package-here is not installed here; run this in the project's"):
        wheels.collect(tmp_path / "wheels", "3.12")


def test_versions_that_differ_are_listed(folder, tmp_path, monkeypatch):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# exact\ntoy==1.1\nother==2.0\nno-such-package-here==1.0\npytest==0.1\n")
    monkeypatch.setattr(wheels, "_REQUIREMENTS", requirements)
    write_wheel(folder, version="1.0")
    write_wheel(folder, "other", version="2.0")
    found = wheels.differences(wheels.install(folder, tmp_path / "site"))
    assert found == {
        "toy": ("1.1", "1.0"),
        "no-such-package-here": ("1.0", None),
        "pytest": ("0.1", pytest.__version__),
    }
    assert wheels.described(found).startswith(
        "toy 1.0 instead of 1.1, no-such-package-here none instead of 1.0, pytest"
    )
