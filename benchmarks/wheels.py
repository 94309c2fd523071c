"""Collect the wheels that `benchmarks.gpu_trial --wheels DIR` needs on a GPU machine without a
network.

    python -m benchmarks.wheels DIR [--python 3.12]

Run it on a machine with a network, in the environment of `make install`; every wheel has the
version that is installed in this environment, or that requirements.txt pins for the other Python.
The GPU machine must have torch, Triton and numpy; transformers is used if it is installed.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from megatron_tape import command_line
from megatron_tape.errors import FileError
from megatron_tape.io.files import atomic_directory
from megatron_tape.io.versions import ROOT

PACKAGES = (
    "megatron-core",
    "deepspeed",
    "liger-kernel",
    "fla-core",
    "absl-py",
    "annotated-types",
    "einops",
    "hjson",
    "iniconfig",
    "msgpack",
    "packaging",
    "pluggy",
    "protobuf",
    "psutil",
    "py-cpuinfo",
    "pydantic",
    "pydantic-core",
    "Pygments",
    "pytest",
    "PyYAML",
    "safetensors",
    "sentencepiece",
    "tensorboard",
    "tqdm",
    "typing-extensions",
    "typing-inspection",
)
"""The packages to collect."""

SOURCE_PACKAGES = ("deepspeed",)
"""Packages to build from source, since the index has no wheels of them. Their compiled extensions
are not needed.
"""

GLIBC = (28, 27, 26, 24, 17, 12, 5)
"""Accepted manylinux platforms: the N of glibc 2.N. All must be listed, since pip compares platform
names exactly.
"""


def pins_of_python(python: str) -> dict[str, str]:
    """Return the requirements, by package, that requirements.txt pins for this version of Python,
    but not for all.

    `python` is a version such as 3.12.
    """
    pins = {}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if ";" not in line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker.evaluate({"python_version": python}):
            pins[requirement.name] = f"{requirement.name}{requirement.specifier}"
    return pins


def main() -> None:
    """Write the wheels to a new folder and print their size. Raises FileError if a package is not
    installed here, or if pip fails.
    """
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new directory to create")
    parser.add_argument(
        "--python", default="3.12", help="Python version of the GPU machine (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        installed = {name: f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        raise FileError(
            error.name, "is not installed here", "run this in the environment of make install"
        ) from None

    # pip must choose wheels for the Python and the platform of the GPU machine, not for this one's.
    pins = pins_of_python(arguments.python)
    requirements = {name: pins.get(name, requirement) for name, requirement in installed.items()}
    platforms = [f"manylinux_2_{minor}_{platform.machine()}" for minor in GLIBC]
    platforms += [
        f"{old}_{platform.machine()}" for old in ("manylinux2014", "manylinux2010", "manylinux1")
    ]
    target_options = [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={arguments.python}",
        *(f"--platform={name}" for name in platforms),
    ]

    with atomic_directory(arguments.directory) as partial:
        downloaded = [
            requirement for name, requirement in requirements.items() if name not in SOURCE_PACKAGES
        ]
        _pip("download", "--no-deps", *target_options, "--dest", str(partial), *downloaded)

        command_line.log("building deepspeed from source, which takes a minute ...")
        # In a new folder, since pip might otherwise use a wheel of an earlier build.
        with tempfile.TemporaryDirectory() as folder:
            # Without compiled extensions, for which DeepSpeed would search a compiler and a GPU.
            os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
            sources = [requirements[name] for name in SOURCE_PACKAGES]
            _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *sources)
            for wheel in Path(folder).glob("*.whl"):
                shutil.move(wheel, partial)
        size = sum(wheel.stat().st_size for wheel in partial.iterdir())
    print(f"{size / 2**20:.1f} MiB in {arguments.directory}")


def _pip(*arguments: str) -> None:
    """Run pip; the first of `arguments` is its command. Raises FileError if pip fails."""
    command = [
        sys.executable,
        "-m",
        "pip",
        arguments[0],
        "--disable-pip-version-check",
        "--quiet",
        *arguments[1:],
    ]
    if status := subprocess.run(command).returncode:
        raise FileError(
            f"pip {arguments[0]}", f"ended with exit status {status}", "see the output above"
        )


if __name__ == "__main__":
    command_line.run(main)
