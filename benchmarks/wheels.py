"""Collect, as wheels, what a GPU machine without a network may lack, for `benchmarks.gpu_trial --wheels DIR`.

    python -m benchmarks.wheels DIR [--python 3.12]

Run it in the project's environment (`make install`), on a machine with a network: every wheel has the version that is
installed here. The GPU machine must have torch, Triton and numpy; transformers is used where it is installed.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import FileError
from megatron_tape.io.files import atomic_directory

CARRIED = (
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
"""The packages that are collected."""

BUILT = ("deepspeed",)
"""Packages whose wheel is built here, as the index has only their source; none of their compiled parts is needed."""

GLIBC = (28, 27, 26, 24, 17, 12, 5)
"""Versions 2.N of glibc whose manylinux wheels are accepted; pip matches a platform's name exactly."""


def main() -> None:
    """Collect the wheels and print their size."""
    parser = command_line.Parser(description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to make, which must not exist yet")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        wanted = {name: f"{name}=={importlib.metadata.version(name)}" for name in CARRIED}
    except importlib.metadata.PackageNotFoundError as error:
        raise FileError(error.name, "is not installed here", "run this in the environment of make install") from None
    platforms = [f"manylinux_2_{minor}_{platform.machine()}" for minor in GLIBC]
    platforms += [f"{old}_{platform.machine()}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={arguments.python}"]
    target += [f"--platform={name}" for name in platforms]
    with atomic_directory(arguments.directory) as partial:
        downloaded = [each for name, each in wanted.items() if name not in BUILT]
        _pip("download", "--no-deps", *target, "--dest", str(partial), *downloaded)
        command_line.say("deepspeed is built from its source, which takes a minute ...")
        # Built in a folder of its own, as pip may find a wheel of an earlier build there.
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
            _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, *(wanted[name] for name in BUILT))
            for wheel in Path(folder).glob("*.whl"):
                shutil.move(wheel, partial)
        size = sum(wheel.stat().st_size for wheel in partial.iterdir())
    print(f"{size / 2**20:.1f} MiB in {arguments.directory}")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--disable-pip-version-check", "--quiet", *arguments[1:]]
    if status := subprocess.run(command).returncode:
        raise FileError(f"pip {arguments[0]}", f"ended with exit status {status}", "its output says why")


if __name__ == "__main__":
    command_line.run(main)
