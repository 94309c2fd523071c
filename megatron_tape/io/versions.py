"""Software and hardware versions of a process, for records and for comparing nodes."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The directory that contains megatron_tape: a clone of the repository, or site-packages."""
PACKAGES = ("torch", "megatron-core", "transformers", "lm_eval", "tokenizers", "megatron-tape")


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of Python, and the version of each of the `packages` that is installed.

    The version of torch contains its build, such as 2.13.0+cu130.
    """
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue

    if "torch" in installed:
        # The metadata of the wheels on PyPI leave out the build. torch's file `version.py` has it.
        # Running that file takes milliseconds, importing torch seconds.
        spec = importlib.util.find_spec("torch")
        installed["torch"] = runpy.run_path(f"{Path(spec.origin).parent}/version.py")["__version__"]
    return installed


def cuda_build_fix() -> str:
    """Return how to replace torch's CPU build by the same version with CUDA, as the last clause of
    an error or a warning.
    """
    # Remove the build: the version of a CPU build is such as 2.13.0+cpu.
    version = importlib.metadata.version("torch").partition("+")[0]
    # PIP_EXTRA_INDEX_URL may point to an index of CPU builds. `-c requirements.txt` keeps the
    # versions of all other packages.
    return (
        "install the build with CUDA from pip's default index, without PIP_EXTRA_INDEX_URL: "
        f"pip install --force-reinstall -c requirements.txt torch=={version}"
    )


def toolchain() -> dict[str, str]:
    """Return the versions of the C compiler that Triton uses on this node, and of NVIDIA's driver,
    if it is loaded.
    """
    tools = {"C compiler": "none that runs"}
    # In the order in which Triton looks for a compiler.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler and (version := _output(compiler, "-dumpfullversion")):
        tools["C compiler"] = f"{Path(compiler).name} {version}"

    driver = Path("/sys/module/nvidia/version")
    if driver.is_file():
        tools["driver"] = driver.read_text().strip()
    return tools


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if the system tells no model."""
    cpus = Path("/proc/cpuinfo")
    if cpus.exists() and (model := re.search("model name.*: (.+)", cpus.read_text())):
        return model[1]
    return platform.processor() or platform.machine()


def node_name() -> str:
    """Return the name of this node in the scheduler, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def commit() -> str | None:
    """Return the git commit of this code, or None if it is not in this project's repository."""
    git = ("git", "-C", str(ROOT))
    # An installed package may be in an environment inside another repository, whose commit says
    # nothing about this code. `git ls-files` prints the file only if it belongs to the repository.
    if not _output(*git, "ls-files", "megatron_tape/__init__.py"):
        return None
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=12")


def _output(*command: str) -> str | None:
    """Return what a command prints, without spaces around it. Return None if it fails, prints
    nothing, or takes 10 seconds.
    """
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() or None


def versions_with_commit() -> dict[str, str]:
    """Return the result of `versions()`, with this project's commit, if there is one."""
    installed = versions()
    if revision := commit():
        installed["commit"] = revision
    return installed


def code_digest(folders: Iterable[str]) -> str:
    """Return a short sha256 of this project's Python files in `folders`, paths such as
    "megatron_tape/ops".
    """
    hasher = hashlib.sha256()
    # Sorted, since file systems list files in different orders. Zero bytes separate names and
    # contents.
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        hasher.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:12]
