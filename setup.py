"""Name the packages to install; everything else is in pyproject.toml.

The command-line tools are installed as `pretrain.tools`, since a top-level package `tools` could
hide that of another project.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_tape*", "pretrain*"]), "pretrain.tools"],
    package_dir={"pretrain.tools": "tools"},
)
