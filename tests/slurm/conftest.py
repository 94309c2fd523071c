import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cluster as clusters

MISSING = clusters.missing()


def pytest_collection_modifyitems(items):
    for item in items:
        if MISSING and Path(__file__).parent in item.path.parents and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"needs a Slurm on this machine: {MISSING}"))


@pytest.fixture
def cluster(request):
    """A separate Slurm cluster of two nodes for each test; `indirect` parameters are Cluster's arguments."""
    made = clusters.Cluster(**getattr(request, "param", {}))
    made.site()
    with made:
        yield made
