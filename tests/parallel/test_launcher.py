"""Programs refuse stale environment variables of a launcher before they create a process group."""

import re

import pytest
from launch import LAUNCHER

from megatron_tape.errors import UserError
from megatron_tape.parallel.launcher import check_launcher_environment
from pretrain import compare, evaluate, preflight, train


@pytest.fixture
def launched(monkeypatch):
    def set_variables(**variables):
        for name in (*LAUNCHER, "LOCAL_WORLD_SIZE", "SLURM_RESTART_COUNT", "TAPE_ATTEMPT"):
            monkeypatch.setenv(name, "")  # so that monkeypatch restores the values
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


LAUNCHED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SINGLE = [
    {},
    {"WORLD_SIZE": "1"},
    {"RANK": "0", "LOCAL_RANK": "0"},
    {"RANK": "0", "WORLD_SIZE": "1"},
]


@pytest.mark.parametrize("variables", [LAUNCHED, *SINGLE])
def test_a_launched_process_and_a_single_process_may_start(launched, variables):
    launched(**variables)
    check_launcher_environment()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_missing_launcher_variable_is_named(launched, missing, rank):
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    launched(**{name: value for name, value in (LAUNCHED | ranks).items() if name != missing})
    with pytest.raises(UserError, match=f"but {missing} is not set; .*unset") as error_info:
        check_launcher_environment()
    assert missing in error_info.value.subjects


INVALID_NUMBERS = ["x", "-1", "²", "01", "9" * 5000]


@pytest.mark.parametrize(
    "name, value",
    [
        ("RANK", "2"),
        ("LOCAL_RANK", "7"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ]
    + [
        (name, value)
        for name in ("RANK", "SLURM_RESTART_COUNT", "LOCAL_WORLD_SIZE")
        for value in INVALID_NUMBERS
    ],
)
def test_an_invalid_launcher_variable_is_named_with_its_value(launched, name, value):
    launched(**LAUNCHED | {name: value})
    with pytest.raises(UserError, match=re.escape(value[:40])) as error_info:
        check_launcher_environment()
    assert error_info.value.subject == name
    assert len(str(error_info.value)) < 300


RECIPE = "pretrain/recipes/tape_demo.yaml"
STARTS = {
    "train": lambda: train.main(["--config", RECIPE]),
    "evaluate": lambda: evaluate.main(["perplexity", "--model=nowhere"]),
    "preflight": lambda: preflight.main(["--config", RECIPE]),
    "compare": lambda: compare.main(["--recipe", RECIPE, "--encodings=rope"]),
}


@pytest.mark.parametrize("program", STARTS)
def test_programs_refuse_a_world_size_left_by_an_earlier_launcher(launched, program, capfd):
    launched(WORLD_SIZE="4")
    status, output = status_and_output(program, capfd)
    assert status == 2
    assert output.count("\n") == 1
    assert output.startswith("error: WORLD_SIZE is 4, but RANK is not set; ")


@pytest.mark.parametrize("program", STARTS)
def test_programs_refuse_a_rank_left_by_an_earlier_launcher(launched, program, capfd):
    launched(RANK="1")
    status, output = status_and_output(program, capfd)
    assert status == 2
    assert "RANK is " in output
    assert "unset the launcher's variables" in output


@pytest.mark.parametrize("number", ["abc", "", "7"])
@pytest.mark.parametrize("program", ["train", "preflight"])
def test_an_invalid_attempt_number_is_refused(launched, tmp_path, program, number, capfd):
    launched(TAPE_ATTEMPT=number)
    module = {"train": train, "preflight": preflight}[program]
    with pytest.raises(SystemExit) as stop:
        module.main(["--config", RECIPE, f"--logging.directory={tmp_path}"])
    assert stop.value.code == 2
    assert capfd.readouterr().err.startswith("error: TAPE_ATTEMPT is ")


def status_and_output(program, capfd):
    """Start a program, and return its exit status and its output on stderr."""
    try:
        return STARTS[program](), capfd.readouterr().err
    except SystemExit as stop:
        return stop.code, capfd.readouterr().err
    except UserError as error:
        return 2, f"error: {error}\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_program_that_starts_processes_refuses_a_launcher(launched, rank, capfd):
    launched(**LAUNCHED | {"RANK": rank})
    status, output = status_and_output("compare", capfd)
    assert status == 2
    assert "run it without torchrun or srun, and unset RANK and MASTER_ADDR" in output
