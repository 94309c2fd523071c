import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

import cluster as clusters
from runs import TWO_STAGES, settings

MISSING = clusters.missing()
INJECTED = Path(__file__).parent / "injected"
TESTS = Path(__file__).parents[1]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and "cluster" in getattr(
            item, "fixturenames", ()
        ):
            item.add_marker(
                pytest.mark.timeout(3600)
            )  # long, for slow machines; Cluster.until fails earlier
            if MISSING:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs a Slurm on this machine: {MISSING}")
                )


@pytest.fixture
def cluster(request):
    """Start a Slurm cluster, by default of two nodes, for each test; `indirect` parameters are
    Cluster's arguments.
    """
    started = clusters.Cluster(**getattr(request, "param", {}))
    started.site()
    with started:
        yield started


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Return a function that returns a folder shared by pytest-xdist's workers; the first caller
    fills it.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")

    def folder(name, fill):
        if run:
            made = tmp_path_factory.getbasetemp().parent / f"{name}-{run}"
        else:
            made = tmp_path_factory.mktemp(name)
        done = made.with_suffix(".done")
        with FileLock(made.with_suffix(".lock")):
            if not done.exists():
                made.mkdir(exist_ok=True)
                fill(made)
                done.touch()
        return made

    return folder


def python(folder, *arguments):
    environment = {
        "PYTHONPATH": f"{TESTS}:{clusters.REPOSITORY}",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def inputs(shared):
    """Return a folder with a recipe and its data."""

    def fill(folder):
        shutil.copy(TESTS / "recipes" / "tiny.yaml", folder)
        (folder / "data").mkdir()
        # In a subprocess, so that no worker imports torch.
        python(
            folder,
            "-c",
            "import pathlib, datasets_for_tests as d; d.write_all(pathlib.Path('data'))",
        )

    return shared("inputs", fill)


def uninterrupted(shared, inputs, name, **overrides):
    """Return the folder of an uninterrupted run on two processes without Slurm."""

    def fill(folder):
        shutil.copytree(inputs, folder, dirs_exist_ok=True)
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
            "--local-addr=127.0.0.1",
        ]
        python(
            folder,
            *launcher,
            "-m",
            "pretrain.train",
            "--config",
            "tiny.yaml",
            *settings(**overrides),
        )

    return shared(name, fill)


@pytest.fixture(scope="session")
def whole(shared, inputs):
    return uninterrupted(shared, inputs, "whole")


@pytest.fixture(scope="session")
def whole_of_stages(shared, inputs):
    return uninterrupted(shared, inputs, "whole-of-stages", **TWO_STAGES)


@pytest.fixture
def prepare(cluster, inputs):
    """Return a function that fills the cluster's working directory; sitecustomize.py explains
    `inject`.
    """
    shutil.copytree(inputs, cluster.work, dirs_exist_ok=True)

    def write(*site, sleep=0.1, **inject):
        text = json.dumps({"sleep": sleep, **inject})
        cluster.site(*site, f"export PYTHONPATH={INJECTED} TEST_INJECT='{text}'")

    return write


@pytest.fixture
def start(cluster, prepare):
    """Return a function that prepares the working directory and submits a run on two nodes."""

    def submit(options=(), inject=None, overrides=None, site=()):
        prepare(*site, **(inject or {}))
        return cluster.submit(
            "pretrain_tape.sh", "tiny.yaml", *settings(**(overrides or {})), options=options
        )

    submit.run = cluster.work / "runs" / "tiny"
    return submit
