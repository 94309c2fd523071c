"""`python -m pretrain.preflight` on one machine; tests/slurm/test_preflight.py runs it in jobs of
two nodes.
"""

import shutil
import signal

import pytest
import torch
from datasets_for_tests import write_all
from launch import environment, free_port
from training_cases import RECIPE

from megatron_tape.parallel import launcher
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import read_attempts
from megatron_tape.run.nodes import versions
from pretrain import preflight


@pytest.fixture
def start(tmp_path, monkeypatch, capfd):
    """Run rank 0 of a preflight in this process; return its exit status, its output, and the
    attempt's record.
    """
    monkeypatch.chdir(write_all(tmp_path))
    attempt = Attempt.claim("run", "run/checkpoints", {"job": "7"})
    handler = signal.getsignal(signal.SIGUSR1)

    def run(*options, size=1, **variables):
        for name, value in (
            environment(0, size, free_port()) | {"TAPE_ATTEMPT": "1"} | variables
        ).items():
            monkeypatch.setenv(name, value)
        status = preflight.main(
            ["--config", str(RECIPE), "--data.prefix=a", "--logging.directory=run", *options]
        )
        (record,) = read_attempts("run")
        return status, capfd.readouterr(), record

    run.attempt = attempt
    yield run
    signal.signal(signal.SIGUSR1, handler)


def test_a_healthy_node_passes_and_is_described(start):
    status, output, record = start()
    assert status == 0, output.err
    assert f"torch {versions()['torch']}" in output.out
    assert output.out.splitlines()[-1].startswith("preflight: passed in")
    assert list(start.attempt.staging.iterdir()) == []
    assert record.outcome is None


def test_unexpected_errors_are_recorded_with_the_node_and_the_job_continues(start, monkeypatch):
    monkeypatch.delattr(preflight, "code_digest")
    status, output, record = start()
    assert status == 1
    assert "NameError" in output.err
    assert record.outcome == "unready"
    assert "NameError" in record.message
    assert record.bad_nodes == ()


def test_a_node_that_cannot_write_to_the_checkpoint_directory_is_named(start):
    shutil.rmtree(start.attempt.staging)
    status, output, record = start()
    assert status == 1
    assert "checkpoint.directory run/checkpoints is not shared" in output.err
    assert record.outcome == "unready"
    assert len(record.bad_nodes) == 1


@pytest.mark.parametrize(
    "built, outcome, problem",
    [(True, "unready", "torch finds 0 of the 1 GPUs"), (False, "refused", "--force-reinstall")],
)
def test_missing_gpus_are_recorded_before_any_rank_ends(
    start, monkeypatch, built, outcome, problem
):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    status, output, record = start("--gpus", "1", "--nodes", "alpha")
    assert status == 1 and problem in output.err
    assert record.outcome == outcome
    assert record.message in output.err and len(record.bad_nodes) == 1


def test_a_rank_that_does_not_answer_marks_its_node_as_bad_and_the_job_continues(start):
    status, output, record = start("--nodes", "alpha,beta", "--timeout", "1", size=2)
    assert status == 1
    assert output.err.endswith("preflight: rank 1 on beta did not answer within 1 s\n")
    assert record.outcome == "unready"
    assert record.bad_nodes == ("beta",)


def test_a_node_that_cannot_find_rank_0_is_named_at_once(start, monkeypatch):
    monkeypatch.setattr(launcher, "TRIES", 1)
    monkeypatch.setenv("SLURMD_NODENAME", "beta")
    status, output, record = start("--nodes", "alpha,beta", size=2, MASTER_ADDR="alpha.invalid")
    assert status == 1
    assert "preflight: beta cannot resolve MASTER_ADDR, which is alpha.invalid (" in output.err
    assert record.outcome == "unready"
    assert record.bad_nodes == ("beta",)


@pytest.mark.parametrize(
    "hosts, found, bad",
    [
        ("ab", ("10.0.0.1", "127.0.1.1"), ("b",)),
        ("ab", ("127.0.1.1", "127.0.1.1"), ("a", "b")),
        ("aa", ("::1", "::1"), ()),
        ("ab", ("127.0.0.11", "127.0.0.12"), ()),
        ("ab", (None, None), ()),
    ],
)
def test_nodes_that_gloo_cannot_reach_are_named(hosts, found, bad):
    facts = {
        node: {"host": host, "gloo": address} for node, host, address in zip("ab", hosts, found)
    }
    problems = preflight._unreachable(facts)
    assert [(problem.nodes, problem.mistake) for problem in problems] == [
        (bad, len(bad) == 2)
    ] * bool(bad)


def test_a_mistake_in_the_configuration_stops_the_job(start):
    status, _, record = start("--train.global_batch_size=3", size=2)
    assert status == 1
    assert record.outcome == "refused"
    assert "train.global_batch_size 3" in record.message
