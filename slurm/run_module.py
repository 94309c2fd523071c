"""Run a module of this repository. It replaces `python -m`, which would import the code from the
working directory, possibly another version.

    python slurm/run_module.py MODULE [ARGUMENT ...]

If Python is too old or lacks a package, this prints one sentence and exits with 1. This file itself
must also run on old versions of Python.
"""

import os
import runpy
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main():
    """Run the module that the first argument names with the other arguments."""
    # The first entry is the directory of this file. Modules such as `pretrain.train` are found from
    # the root instead.
    sys.path[0] = ROOT
    # The module then sees only its own arguments.
    module = sys.argv.pop(1)

    # Not every cluster's default Python is as new as this project needs.
    if sys.version_info < (3, 11):  # noqa: UP036
        refuse(
            f"is Python {sys.version_info[0]}.{sys.version_info[1]}", "choose Python 3.11 to 3.13"
        )

    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        # A missing submodule, or a module of this repository, is a bug, not a missing package.
        is_package = (
            error.name
            and "." not in error.name
            and not os.path.exists(os.path.join(ROOT, error.name))
        )
        if not is_package:
            raise

        requirements = os.path.join(ROOT, "requirements.txt")
        fix = f"install the packages with {sys.executable} -m pip install -r {requirements}"
        if os.environ.get("TAPE_CONTAINER"):
            fix = f"install {requirements} in the image, as slurm/apptainer.def does"
        refuse(f"lacks the package {error.name}", fix)


def refuse(problem, fix):
    """Exit with status 1 and a sentence: what is wrong with the Python that runs this file."""
    python = sys.executable
    container = os.environ.get("TAPE_CONTAINER")
    if container:
        python = f"{python} in TAPE_CONTAINER ({container})"
    fix += ", or set another TAPE_PYTHON in slurm/site.env"
    sys.exit(f"error: TAPE_PYTHON is {python}, which {problem}; {fix}")


if __name__ == "__main__":
    main()
