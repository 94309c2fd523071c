import subprocess
import sys

import torch

from benchmarks import environment
from megatron_tape.io.versions import versions, versions_with_commit


def test_records_have_torchs_own_version_with_its_build():
    for packages in (versions_with_commit(), environment.describe_environment()["packages"]):
        assert packages["torch"] == torch.__version__
        assert "megatron-core" in packages
    assert versions(["numpy"]).keys() == {"python", "numpy"}


def test_torchs_version_is_found_without_importing_torch():
    code = (
        "import sys, importlib.metadata\n"
        "importlib.metadata.version = lambda name: 'of the metadata'\n"
        "from megatron_tape.io.versions import versions\n"
        "print(versions()['torch'], 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [torch.__version__, "False"]
