import importlib.metadata
import subprocess
import sys

import torch

from benchmarks import environment
from megatron_tape.io.versions import versions, versions_with_commit

METADATA = "2.13.0"
"""A version without a build, as in the metadata of PyPI's wheels."""


def test_records_have_torchs_own_version_with_its_build(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: METADATA)
    found = [versions(), versions_with_commit(), environment.describe()["packages"]]
    assert [one["torch"] for one in found] == ["2.13.0+cu130"] * 3
    assert all("megatron-core" in one for one in (versions(), versions_with_commit()))
    assert versions(["numpy"]).keys() == {"python", "numpy"}


def test_torchs_version_is_found_without_importing_torch():
    code = (
        "import sys, importlib.metadata\n"
        "importlib.metadata.version = lambda name: 'of the metadata'\n"
        "from megatron_tape.io.versions import versions\n"
        "print(versions()['torch'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__version__, "False"]
