"""Collect, as wheels, what a GPU machine without a network may lack: megatron-core, deepspeed and what they import.

    python -m benchmarks.wheels DIR [--python 3.12]

Run it in the project's environment (`make install`), on a machine with a network: every wheel has the version that is
installed here. torch, Triton, numpy, sentencepiece, tokenizers and TensorBoard are not collected; they must be on the
GPU machine. There, `install` puts the wheels into a directory for PYTHONPATH and leaves the machine's own packages as
they are.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_tape.command_line import run, say
from megatron_tape.io.files import atomic_directory, remove

CARRIED = (
    "megatron-core",
    "deepspeed",
    "annotated-types",
    "einops",
    "hjson",
    "msgpack",
    "packaging",
    "psutil",
    "py-cpuinfo",
    "pydantic",
    "pydantic-core",
    "PyYAML",
    "safetensors",
    "tqdm",
    "typing-extensions",
    "typing-inspection",
)
"""The packages that are collected."""

BUILT = ("deepspeed",)
"""Packages whose wheel is built here, as the index has only their source; none of their compiled parts is needed."""

LARGEST = 40 * 2**20
"""Bytes that all wheels together may have: what is sent to a machine is often limited."""

GLIBC = (28, 27, 26, 24, 17, 12, 5)
"""Versions 2.N of glibc whose manylinux wheels are accepted."""

_MARK = "installed-wheels.txt"
_REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


def collect(directory: Path, python: str) -> list[Path]:
    """Fill `directory`, which must not exist yet, with a wheel of every package in `CARRIED`; return their paths.

    `python` is the version of Python on the GPU machine, such as 3.12. Raises ValueError if a package is not installed
    here, if there is no wheel for that Python, or if the wheels have more than `LARGEST` bytes.
    """
    wanted = {name: _installed(name) for name in CARRIED}
    with atomic_directory(directory) as partial:
        downloaded = [f"{name}=={version}" for name, version in wanted.items() if name not in BUILT]
        platforms = [f"manylinux_2_{minor}_{platform.machine()}" for minor in GLIBC]
        platforms += [f"{old}_{platform.machine()}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
        target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        target += [option for name in platforms for option in ("--platform", name)]
        _pip("download", "--no-deps", *target, "--dest", str(partial), *downloaded)
        for name in BUILT:
            # Built in a folder of its own, as pip may find a wheel of an earlier build there.
            with tempfile.TemporaryDirectory() as folder:
                without_ops = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
                options = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder]
                _pip("wheel", *options, f"{name}=={wanted[name]}", environment=without_ops)
                for wheel in Path(folder).glob("*.whl"):
                    shutil.move(wheel, partial)
        size = sum(wheel.stat().st_size for wheel in check(partial, python))
        if size > LARGEST:
            raise ValueError(
                f"the wheels have {size / 2**20:.1f} MiB, more than {LARGEST // 2**20}; nothing was written"
            )
    return check(directory, python)


def check(directory: Path, python: str | None = None) -> list[Path]:
    """Return the wheels in `directory` if they can be installed together on Python `python` (None: this one).

    Raises ValueError if there are none, if there are two of one package, or if one is for another Python or processor.
    """
    wheels = sorted(directory.glob("*.whl"))
    python = python or f"{sys.version_info.major}.{sys.version_info.minor}"
    again = f"collect them in a new folder with: python -m benchmarks.wheels DIR --python {python}"
    if not wheels:
        state = "holds no wheels" if directory.is_dir() else "does not exist"
        raise ValueError(f"{directory} {state}; {again}")
    packages: dict[str, Path] = {}
    for wheel in wheels:
        parts = wheel.stem.split("-")
        if len(parts) not in (5, 6):
            raise ValueError(f"{wheel} is not named as a wheel is (NAME-VERSION-PYTHON-ABI-PLATFORM.whl); remove it")
        name = re.sub(r"[-_.]+", "-", parts[0]).lower()
        if other := packages.get(name):
            raise ValueError(f"{directory} holds two wheels of {name}, {other.name} and {wheel.name}; remove one")
        packages[name] = wheel
        tags, abis, platforms = (part.split(".") for part in parts[-3:])
        if not any(_runs(tag, abis, python) for tag in tags):
            raise ValueError(f"{wheel.name} is not for Python {python}; {again}")
        machine = platform.machine()
        if not any(name == "any" or re.fullmatch(rf"(many)?linux.*_{machine}", name) for name in platforms):
            raise ValueError(f"{wheel.name} is not for Linux on a processor of type {machine}; {again}")
    return wheels


def install(directory: Path, site: Path) -> Path:
    """Install the wheels in `directory` into `site`, for PYTHONPATH; return `site`.

    Does nothing if `site` already holds these wheels. Raises ValueError if the wheels cannot be installed here (see
    `check`), or if pip is missing or fails; FileExistsError if `site` holds anything else.
    """
    wheels = check(directory)
    listing = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    mark = site / _MARK
    if mark.is_file():
        if mark.read_text(encoding="utf-8") == listing:
            return site
        remove(site)
    with atomic_directory(site) as partial:
        # Modules would be compiled all at once, although a program imports only a few of them.
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(partial)]
        _pip("install", *options, *map(str, wheels))
        (partial / _MARK).write_text(listing, encoding="utf-8")
    return site


def differences(site: Path | None = None) -> dict[str, tuple[str, str | None]]:
    """Return the packages whose version is not the one in requirements.txt: that one, and the one here or None.

    A program that has `site` in its PYTHONPATH finds its packages first.
    """
    places = [*([str(site)] if site else []), *sys.path]
    found = {}
    for line in _REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        name, exact, wanted = line.partition("==")
        if not exact or name.startswith("#"):
            continue
        here = next((one.version for one in importlib.metadata.distributions(name=name, path=places)), None)
        # A local version, as in 2.11.0+cu130, is the same code, built for another device.
        if here is None or here.partition("+")[0] != wanted:
            found[name] = (wanted, here)
    return found


def described(found: dict[str, tuple[str, str | None]]) -> str:
    """Write differences as a list, such as `torch 2.11.0 instead of 2.13.0`."""
    here = {name: "none" if version is None else version for name, (_, version) in found.items()}
    return ", ".join(f"{name} {here[name]} instead of {wanted}" for name, (wanted, _) in found.items())


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"{name} is not installed here; run this in the project's environment (make install)"
        ) from None


def _runs(tag: str, abis: list[str], python: str) -> bool:
    """Return whether a wheel's tag for Python, such as cp39 with abi3, suits Python `python`."""
    kind, number = tag[:2], tag[2:]
    major, minor = python.split(".")
    if not number.isdecimal() or number[0] != major:
        return False
    if kind == "py":
        return len(number) == 1 or int(number[1:]) <= int(minor)
    return kind == "cp" and (number[1:] == minor or ("abi3" in abis and int(number[1:]) <= int(minor)))


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--disable-pip-version-check", "--quiet", *arguments[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        errors = [line for line in lines if "error" in line.lower() or "No module named pip" in line]
        why = (errors or lines or ["no reason given"])[-1].strip()
        raise ValueError(f"pip {arguments[0]} failed: {why.removeprefix('ERROR: ')}")


def main() -> None:
    """Collect the wheels and print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to make, which must not exist yet")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine (default: %(default)s)")
    arguments = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", arguments.python):
        parser.error(f"--python is {arguments.python!r}; give a version such as 3.12")
    say("collecting wheels; deepspeed is built from its source, which takes a minute ...")
    wheels = collect(arguments.directory, arguments.python)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**10:8.0f} KiB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:.1f} MiB in {arguments.directory}")


if __name__ == "__main__":
    run(main)
