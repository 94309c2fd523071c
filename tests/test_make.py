"""`make test`: what it runs and how it reports the outcomes, with dummy programs in place of Python."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAMPS = ("STAMP", "PLAIN_STAMP", "ECOSYSTEM_STAMP", "VLLM_STAMP")


@pytest.fixture
def make_test(tmp_path):
    def run(*arguments, slurm=0, others=0):
        script = (
            f'#!/bin/sh\necho "ran $*"\ncase "$*" in *--ignore=tests/slurm*) exit {others};; *) exit {slurm};; esac\n'
        )
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
        (tmp_path / "stamp").touch()
        stamps = [f"{name}={tmp_path}/stamp" for name in STAMPS]
        command = ["make", "-s", "test", f"BIN={tmp_path}", *stamps, *arguments]
        # make itself runs these tests, and passes its own variables on.
        own = ("TESTS", "SLOW", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL")
        environment = {name: value for name, value in os.environ.items() if name not in own}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("others, slurm", [(0, 0), (1, 0), (0, 2), (1, 5)])
def test_both_halves_run_and_are_reported_together(make_test, others, slurm):
    done = make_test("SLOW=1", others=others, slurm=slurm)
    first, _, second, summary = done.stdout.splitlines()
    assert first.startswith("ran -m pytest --ignore=tests/slurm") and second.startswith("ran -m pytest tests/slurm")
    results = [f"failed (pytest's exit status {status})" if status else "passed" for status in (slurm, others)]
    assert summary == f"make test: tests/slurm {results[0]}; all other tests {results[1]}"
    assert (done.returncode == 0) == (others == slurm == 0)


def test_slow_tests_are_left_out_by_default_and_this_is_said(make_test):
    first, _, second, _, last = make_test().stdout.splitlines()
    assert first.endswith("-m not slow") and second.endswith("-m not slow") and "make test SLOW=1" in last
    assert "not slow" not in make_test("SLOW=1").stdout
    first, _, second, _ = make_test("SLOW=only").stdout.splitlines()
    assert first.endswith("-m slow") and second.endswith("-m slow")


def test_chosen_tests_are_one_command(make_test):
    assert make_test("TESTS=tests/slurm -m 'not slow'").stdout == "ran -m pytest tests/slurm -m not slow\n"
    assert make_test("TESTS=tests/config", slurm=1).returncode != 0
