"""The output and requirements of training programs at start, in processes started like a user's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets_for_tests import write_all
from launch import alone, free_port
from training_cases import RECIPE

REPOSITORY = Path(__file__).parents[2]
OWN_LINES = (
    "loading torch",
    "building ",
    "index ready",
    "the run trains ",
    "training with ",
    "attention backend: ",
    "saved ",
    "step ",
    "the validation loss is computed ",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def program(*arguments, environment=None):
    """Run a program without the settings that silence warnings in tests; return its stdout and
    stderr together.
    """
    environment = {"OMP_NUM_THREADS": "1", **(environment or alone())}
    environment.pop("PYTHONWARNINGS", None)
    environment.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        timeout=600,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_two_processes_print_no_library_warnings(data, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    settings = [
        f"--data.prefix={data}/a",
        f"--logging.directory={tmp_path}/run",
        "--train.steps=4",
        "--deepspeed.zero_stage=1",
        "--train.micro_batch_size=1",
    ]
    output = program(*launcher, "-m", "pretrain.train", "--config", RECIPE, *settings)
    expected = (*OWN_LINES, f"warning: {data}")  # datasets that these tests have written themselves
    dated = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
    lines = output.splitlines()
    assert lines
    assert [line for line in lines if not dated.match(line)] == []
    assert [line for line in lines if not dated.sub("", line, count=1).startswith(expected)] == []


def test_indexing_prints_no_library_warnings(data, tmp_path):
    settings = [f"--data.prefix={data}/a", f"--data.cache_directory={tmp_path}/cache"]
    output = program("tools/build_index.py", "--config", RECIPE, *settings)
    expected = (*OWN_LINES, f"warning: {data}", "the index is in ")
    assert [line for line in output.splitlines() if not line.startswith(expected)] == []


@pytest.mark.slow
def test_programs_need_no_home_directory(data, tmp_path):
    run = tmp_path / "run"
    exported = tmp_path / "exported"
    tokenizer = data / "tokenizer.json"
    # As in a container that does not know its user. Nobody can write to this home directory, not
    # even root.
    environment = {
        name: value for name, value in alone().items() if not name.startswith(("HF_", "XDG_"))
    }
    environment |= {"HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    training = [
        f"--config={RECIPE}",
        f"--data.prefix={data}/a",
        f"--data.tokenizer={tokenizer}",
        f"--logging.directory={run}",
        "--train.steps=4",
        "--train.eval_interval=4",
    ]
    generation = ["tools/generate.py", "--prompt", "w1 ", "--max-new-tokens=2", "--model"]
    perplexity = [
        f"--perplexity.data={data}/a",
        "--perplexity.documents=1",
        "--perplexity.lengths=[16]",
        "--trust-remote-code",
        f"--output={tmp_path}/results",
    ]
    for arguments in (
        ["-m", "pretrain.train", *training],
        ["tools/convert_checkpoint.py", "to-hf", "--checkpoint", run, "--output", exported],
        [*generation, run],
        [*generation, exported],
        ["-m", "pretrain.evaluate", "perplexity", "--model", exported, *perplexity],
        ["-m", "pretrain.report", run, tmp_path / "results", "--output", tmp_path / "report.html"],
    ):
        output = program(*arguments, environment=environment)
        assert output.count("/dev/null is not writable; the caches") == 1
        assert "/dev/null/" not in output
