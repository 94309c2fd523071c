"""`python -m pretrain.train` on one process: rejected settings, written files, failures and
continued runs.
"""

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import configurations
import pytest
import torch
from datasets_for_tests import write_all
from launch import start_python
from torch.distributed import distributed_c10d
from training_cases import RECIPE, option, packed, rows, steps_saved

from megatron_tape import command_line
from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.errors import EXIT_DIVERGED, ConfigError
from megatron_tape.model import backend
from megatron_tape.ops import parity
from megatron_tape.ops.backends.choice import Choice
from megatron_tape.ops.kernels import triton_attention
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.planning import memory
from megatron_tape.run.judging import read_attempts
from megatron_tape.training import model_building
from megatron_tape.training.engine import Engine
from pretrain import train

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Datasets, `damaged` among them, and two tokenizers that differ in the token that ends
    documents.
    """
    folder = write_all(tmp_path_factory.mktemp("data"))
    shutil.copy(folder / "a.idx", folder / "damaged.idx")
    (folder / "damaged.bin").write_bytes((folder / "a.bin").read_bytes()[:100])
    text = (folder / "tokenizer.json").read_text()
    other_end = text.replace("<|endoftext|>", "<|w99|>").replace('w5"', '<|endoftext|>"')
    (folder / "other_end.json").write_text(other_end)
    return folder


@pytest.fixture
def run(data, tmp_path):
    def start(*overrides, name="run", **changes):
        prefix = option("data.prefix", f"{data}/a")
        directory = f"--logging.directory={tmp_path / name}"
        return train.main(["--config", str(RECIPE), prefix, directory, *overrides], **changes)

    start.folder = tmp_path / "run"
    return start


MISTAKES = {
    "--model.hidden_sise=32": "model.hidden_sise",
    "--model.num_attention_heads=5": "model.num_attention_heads",
    "--deepspeed.zero_stage=0": "zero_stage",
    "--parallel.tensor_model_parallel_size=2": "tensor_model_parallel_size",
    "--data.prefix=nowhere/x": "nowhere/x is not a dataset",
}
EACH = """
import sys
from pretrain.train import main
for given in sys.argv[2:]:
    try:
        status = main([*sys.argv[1].split(), *given.split()])
    except SystemExit as stop:
        status = stop.code
    print(status, 'torch' in sys.modules)
"""


def test_mistakes_end_in_one_sentence_before_torch_is_imported(data):
    command = [sys.executable, "-c", EACH, f"--config {RECIPE} --data.prefix {data}/a", *MISTAKES]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["2 False"] * len(MISTAKES)
    for error, reported in zip(
        done.stderr.splitlines(),
        MISTAKES.values(),
        strict=True,
    ):
        assert error.startswith("error: ")
        assert reported in error


def test_other_ranks_wait_for_rank_0_to_report_errors_first(data, tmp_path, monkeypatch, capfd):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    arguments = ["--config", str(RECIPE), f"--logging.directory={tmp_path / 'run'}"]
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    for rank, prefix in (("0", "error: "), ("1", "error (rank 1): ")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            train.main([*arguments, f"--data.prefix={data}/a", "--model.num_attention_heads=3"])
        assert f"{prefix}{RECIPE}" in capfd.readouterr().err
        assert train.main([*arguments, "--data.prefix=nowhere"]) == 2
        assert capfd.readouterr().err.startswith(f"{prefix}data.prefix")
    assert waited == 2 * [command_line.REPORT_TIMEOUT]


def test_a_run_writes_metrics_checkpoints_and_configuration_and_a_finished_run_stays_unchanged(run):
    settings = ["--logging.interval=3", "--checkpoint.interval=2", "--checkpoint.keep=2"]
    assert run(*settings) == 0
    logged = rows(run.folder)
    assert [row["step"] for row in logged] == [1, 3, 5, 6, 9, 10]
    for row in logged:
        assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= row.keys()
        assert ("validation/loss" in row) == (row["step"] in (5, 10))
    assert '"throughput/tokens_per_second"' in (run.folder / "metrics.jsonl").read_text()
    assert logged[0]["position/state_norm/layer_01"] == pytest.approx(1, abs=1e-5)
    assert logged[0]["position/update_norm/layer_00"] == 0
    last = logged[-1]
    norms = [
        value for name, value in last.items() if name.startswith("position/update_norm/layer_")
    ]
    assert norms[0] > 0
    mean = math.hypot(*norms) / math.sqrt(len(norms))
    assert last["position/update_norm"] == pytest.approx(mean)
    assert last["validation/perplexity"] == pytest.approx(math.exp(last["validation/loss"]))
    assert steps_saved(run.folder) == [8, 10]

    again = parse_run_config(["--config", str(run.folder / "config.yaml")])
    assert again.logging.interval == 3
    assert again.logging.directory == str(run.folder)
    assert run(*settings) == 0
    assert rows(run.folder) == logged


def test_tensorboard_shows_curves_configuration_and_sample(run, data):
    sample = ["tensorboard=true", "sample_tokens=5", "sample_prompt=w3"]
    assert run(*(f"--logging.{setting}" for setting in sample), *packed(data)) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"validation/loss", "position/state_norm"} <= set(events.Tags()["scalars"])

    def text(tag):
        return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert "num_layers: 3" in text("configuration")
    assert text("sample").split()[0] == "w3"
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx(
        [row["train/loss"] for row in rows(run.folder)],
        rel=1e-6,
    )


def test_training_stops_with_an_error_after_max_bad_steps_in_a_row(run, capfd):
    stopped = run("--optimizer.lr=1e30", "--train.steps=30", "--train.max_bad_steps=3")
    assert stopped == EXIT_DIVERGED
    assert "3 steps in a row" in capfd.readouterr().err
    found = rows(run.folder)
    assert len(found) < 30
    assert found[-1]["train/loss"] is None


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used_and_without_any_the_run_fails(
    run, capfd, caplog
):
    assert run("--checkpoint.interval=2", name="whole") == 0
    assert run("--checkpoint.interval=2", "--checkpoint.keep=9") == 0
    folder = run.folder / "checkpoints"
    tensors = next((folder / "step-00000010").glob("tensors*"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    middle = next((folder / "step-00000008").glob("tensors*"))
    content = bytearray(middle.read_bytes())
    content[len(content) // 2] ^= 1
    middle.write_bytes(content)
    capfd.readouterr()
    assert run("--checkpoint.interval=2") == 0
    reported = capfd.readouterr().err + caplog.text
    for shown in ("step-00000010", "step-00000008", "step-00000006 at step 7"):
        assert shown in reported
    assert rows(run.folder) == rows(run.folder.parent / "whole")
    for broken in folder.glob("step-*/tensors*"):
        broken.unlink()
    assert run("--checkpoint.interval=2") == 1
    assert "no complete checkpoint" in capfd.readouterr().err


SHORT = ["--schedule.warmup_steps=0"]


def test_every_setting_changed_since_the_save_is_reported_on_its_own_line(run, data, capfd):
    assert run("--train.steps=2", *SHORT) == 0
    state = run.folder / "checkpoints" / "step-00000002" / "state.json"
    assert "tokenizer" not in json.loads(state.read_text())["progress"]
    capfd.readouterr()
    silent = [
        "--logging.interval=2",
        "--checkpoint.keep=3",
        "--data.num_workers=1",
        "--train.hang_timeout=99",
    ]
    assert run(*SHORT, *silent, "--optimizer.lr=0.002", "--train.steps=4", *packed(data)) == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines if " since step-00000002: " in line] == [
        f"data.tokenizer: was null, is now '{data}/tokenizer.json'",
        "data.reset_attention_mask: was false, is now true",
        "optimizer.lr: was 0.01, is now 0.002",
        "optimizer.z_loss: was 0.0, is now 0.01",
        "train.steps: was 2, is now 4",
    ]
    later = state.parent.with_name("step-00000004") / "state.json"
    assert "tokenizer" in json.loads(later.read_text())["progress"]


def test_another_order_of_the_data_is_reported_only_if_the_number_of_epochs_changes(run, capfd):
    """The dataset has about 2,500 training tokens, and a step reads 64."""
    short = ("--logging.interval=500", *SHORT)
    message = "the data is shuffled again, so the run repeats some sequences and skips others"
    assert run("--train.steps=2", "--train.eval_interval=0", *short) == 0
    for more, reported in (
        (["--train.steps=3", "--train.global_batch_size=8"], []),
        (["--train.steps=60"], ["train.steps, train.global_batch_size"]),
        (["--train.steps=61", "--train.seed=5"], ["train.steps, train.seed"]),
    ):
        capfd.readouterr()
        assert run(*more, "--train.eval_interval=0", *short) == 0
        lines = [line for line in capfd.readouterr().err.splitlines() if message in line]
        assert [line.partition(": ")[2].partition(": ")[0] for line in lines] == reported


@pytest.mark.parametrize("encoding", ["tape", "randpe"])
def test_validation_runs_at_the_chosen_steps_and_does_not_change_training(run, capfd, encoding):
    """RandPE draws random numbers in training."""
    cases = {
        "null": ([10], "the validation loss is computed after the last step, on 8 sequences; set"),
        "4": ([4, 8, 10], "the validation loss is computed every 4 steps and after the last step"),
        "0": ([], "the run computes no validation loss: train.eval_interval is 0; remove it, or"),
    }
    losses = []
    for interval, (steps, message) in cases.items():
        name = f"every-{interval}"
        chosen = [
            f"--model.position_encoding={encoding}",
            f"--train.eval_interval={interval}",
            "--checkpoint.interval=3",
            "--checkpoint.keep=9",
        ]
        capfd.readouterr()
        assert run(*chosen, name=name) == 0
        assert message in capfd.readouterr().err
        folder = run.folder.with_name(name)
        logged = rows(folder)
        assert [row["step"] for row in logged if "validation/loss" in row] == steps
        losses.append([row["train/loss"] for row in logged])
        # The resumed run equals the uninterrupted one.
        for number in (6, 9, 10):
            shutil.rmtree(folder / "checkpoints" / f"step-{number:08}")
        assert run(*chosen, name=name) == 0
        assert rows(folder) == logged
    assert losses[0] == losses[1] == losses[2]


def test_a_run_without_validation_data_says_which_setting_gives_some(run, data, capfd):
    split = ("--data.split=999,1,0", "--train.eval_interval=null")
    assert run(*split, "--train.steps=2", *SHORT) == 0
    message = (
        "the run computes no validation loss: data.split is 999,1,0, so the validation split has 0"
        f" tokens of {data}/a, in 0 of its "
    )
    assert message in capfd.readouterr().err
    assert not any("validation/loss" in row for row in rows(run.folder))


def test_a_run_continues_after_the_dataset_of_a_stage_was_moved(run, data, tmp_path, capfd):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{data}/a{suffix}", tmp_path / f"b{suffix}")
    stages = "--data.stages=[{{prefix: {0}, share: 0.5}}]"
    short = ("--train.eval_interval=null", *SHORT)
    assert run("--train.steps=4", stages.format(tmp_path / "b"), *short) == 0
    for suffix in (".bin", ".idx"):
        (tmp_path / f"b{suffix}").rename(tmp_path / f"c{suffix}")
    assert run("--train.steps=6", stages.format(tmp_path / "c"), *short) == 0
    assert "data.stages, train.steps: the data is shuffled again" in capfd.readouterr().err


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(run, capfd):
    assert run() == 0
    changed = ("--model.hidden_size=64", "--model.position.token_mixing=full")
    assert run(*changed, "--train.steps=12") == 2
    error = capfd.readouterr().err
    assert "model.hidden_size: checkpoint 32, configuration 64" in error
    assert "token_mixing" not in error  # its default
    assert error.endswith(", or start another run with --logging.directory NEW\n")


def test_resume_none_does_not_overwrite_a_run_and_resume_accepts_a_path(run, capfd):
    assert run("--checkpoint.interval=4") == 0
    assert run() == 0
    assert "nothing to do; to continue, raise train.steps above 10" in capfd.readouterr().err
    assert run("--checkpoint.resume=none") == 1
    error = capfd.readouterr().err
    assert "checkpoints up to step 10" in error
    assert ", start another run with --logging.directory NEW, " in error
    elsewhere = run.folder.parent / "elsewhere"
    shutil.copytree(run.folder / "checkpoints/step-00000008", elsewhere)
    assert run(f"--checkpoint.resume={elsewhere}", name="other") == 0
    assert rows(run.folder.parent / "other") == rows(run.folder)[8:]


@pytest.mark.parametrize(
    "override, reported",
    [
        ("data.split=999,1,0", "the validation split"),
        # Smaller than the tokenizer's vocabulary.
        ("model.vocab_size=60", "model.vocab_size is 60"),
        ("logging.directory={data}/a.bin/x", "logging.directory"),
        ("data.prefix={data}/damaged", "incomplete or damaged"),
        # No document ends with this token.
        ("data.tokenizer={data}/other_end.json", "--no-append-eod"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_by_the_trainer_too(
    run, data, capfd, override, reported
):
    assert run(*packed(data), f"--{override.format(data=data)}") == 2
    error = capfd.readouterr().err
    assert reported in error
    assert error.count("\n") == 1
    assert not run.folder.exists()


def test_kills_during_saves_lose_only_the_steps_since_the_last_complete_checkpoint(run, data):
    assert run("--train.steps=30", name="whole") == 0
    arguments = ["--config", str(RECIPE), option("data.prefix", f"{data}/a"), "--train.steps=30"]
    arguments += [f"--logging.directory={run.folder}", "--checkpoint.interval=1"]
    metrics = run.folder / "metrics.jsonl"

    def logged():
        """Return the logged steps; the last line may be incomplete after a kill."""
        if not metrics.exists():
            return []
        lines = metrics.read_text().splitlines()
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    for number, delay in enumerate((0.0, 0.02, 0.05)):
        in_background = number % 2 == 1
        count = len(logged())
        chosen = [*arguments, f"--checkpoint.asynchronous={str(in_background).lower()}"]
        process = start_python(["-m", "pretrain.train", *chosen], run.folder.parent / "log")
        while process.is_alive() and len(logged()) < count + 3:
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        newest = checkpoint_files.newest_complete(run.folder / "checkpoints", print)
        assert newest is not None
        saved = checkpoint_files.read_manifest(newest)["step"]
        assert saved >= max(logged()) - 1 - in_background
    assert run("--train.steps=30", "--checkpoint.interval=1") == 0
    assert rows(run.folder) == rows(run.folder.parent / "whole")
    assert all(math.isfinite(row["train/loss"]) for row in rows(run.folder))


def test_deterministic_kernels_are_required_only_during_the_run(run, monkeypatch):
    original = Engine.train_step
    seen = []

    def step(self, *args):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(self, *args)

    monkeypatch.setattr(Engine, "train_step", step)
    assert run("--train.deterministic=true", "--train.steps=5") == 0
    assert run("--train.steps=5", name="other") == 0
    assert seen == [True] * 5 + [False] * 5
    assert rows(run.folder) == rows(run.folder.parent / "other")


@contextlib.contextmanager
def failing_steps(error):
    def fail(self, *args):
        raise error

    with mock.patch.object(Engine, "train_step", fail):
        yield


def test_an_error_is_recorded_and_then_the_process_groups_are_aborted(run, monkeypatch):
    abort = distributed_c10d._abort_process_group
    attempts = []

    def aborted():
        attempts.extend(read_attempts(run.folder))
        abort()

    with monkeypatch.context() as patched, failing_steps(RuntimeError("made to fail")):
        patched.setattr(distributed_c10d, "_abort_process_group", aborted)
        with pytest.raises(RuntimeError, match="made to fail"):
            run()
    (attempt,) = attempts
    assert (attempt.outcome, attempt.message) == ("failed", "RuntimeError: made to fail")
    assert "in fail" in attempt.detail
    assert not torch.distributed.is_initialized()
    assert run("--train.steps=3") == 0


def test_out_of_memory_is_one_sentence_and_its_traceback_is_recorded(run, capfd):
    with failing_steps(torch.OutOfMemoryError("CUDA out of memory")):
        assert run() == 1
    reported = capfd.readouterr().err
    assert "error: memory ran out (CUDA out of memory); use smaller" in reported
    assert "Traceback" not in reported
    (attempt,) = read_attempts(run.folder)
    assert attempt.outcome == "failed"
    assert "CUDA out of memory" in attempt.message
    assert "in fail" in attempt.detail


@pytest.fixture
def wrong_kernel(monkeypatch):
    """Make the fused attention kernel return wrong numbers."""
    attend = triton_attention.attend
    monkeypatch.setattr(parity, "LENGTH", 16)
    monkeypatch.setattr(
        triton_attention, "attend", lambda *x: [y if y is None else 1.1 * y for y in attend(*x)]
    )


def test_the_automatic_backend_falls_back_to_torch_only_if_allowed(
    run, wrong_kernel, monkeypatch, capfd
):
    monkeypatch.setattr(
        backend, "backend_choice", lambda *_, **__: Choice("triton", "as this test says")
    )
    short = ("--train.steps=1", "--train.eval_interval=0", "--schedule.warmup_steps=0")
    short += ("--model.hidden_size=128", "--model.num_layers=1", "--train.global_batch_size=1")
    assert run(*short) == 2
    fix = "fix this, or choose another backend; to train with slower attention in plain torch, set"
    assert f"{fix} train.allow_slow_attention: true" in capfd.readouterr().err
    assert run(*short, "--train.allow_slow_attention=true") == 0
    log = capfd.readouterr().err
    warning = (
        "train.allow_slow_attention lets training continue with slower attention in plain torch"
    )
    assert f"WARNING: {warning}: model.attention_backend is triton" in log
    assert "attention backend: torch" in log


@pytest.mark.parametrize("capability, warns", [("avx2", True), ("avx512_bf16", False)])
def test_bf16_on_a_cpu_without_its_instructions_is_warned_about(
    monkeypatch, caplog, capability, warns
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    model_building._log_settings(configurations.make(), initialize_distributed(1))
    assert ("fp32 is faster: --train.precision fp32" in caplog.text) == warns


@pytest.mark.parametrize(
    "settings, key",
    [
        (
            ["train.micro_batch_size=1000000", "train.global_batch_size=1000000"],
            "train.micro_batch",
        ),
        (["model.seq_length=100000000", "train.micro_batch_size=1"], "model.seq_length"),
    ],
)
def test_a_step_that_exceeds_the_memory_of_the_node_is_refused(settings, key):
    given = ["--config", str(RECIPE), "--model.position_encoding=rope"]
    config = parse_run_config([*given, *(f"--{setting}" for setting in settings)])
    with pytest.raises(ConfigError) as error:
        memory.check_host_memory(config, 1)
    assert error.value.key.startswith(key)
    assert error.value.fix


def test_stages_of_different_size_that_fit_together_are_not_refused(monkeypatch):
    """The first stage needs more than half of the memory, because of its embedding."""
    settings = [
        "--model.position_encoding=rope",
        "--model.vocab_size=100000",
        "--model.tie_embeddings=false",
        "--model.num_layers=4",
        "--parallel.pipeline_model_parallel_size=2",
    ]
    config = parse_run_config(["--config", str(RECIPE), *settings])
    monkeypatch.setattr(memory, "local_world_size", lambda: 2)
    stages = [
        memory.memory_of_pipeline_stage(stage)
        for stage in memory.Plan(config, 2, generation=memory.CPU).pipeline_stages()
    ]
    needed = sorted(stage.peak - stage.buffers for stage in stages)
    assert needed[0] < needed[1]
    monkeypatch.setattr(memory, "host_memory", lambda: sum(needed))
    memory.check_host_memory(config, 2)
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * needed[0] - 2)
    with pytest.raises(ConfigError, match="of 2 processes here"):
        memory.check_host_memory(config, 2)


def test_the_memory_of_the_node_is_checked_before_training(run, monkeypatch, capfd):
    monkeypatch.setattr(memory, "host_memory", lambda: 2**10)
    assert run() == 2
    assert "1.00 KiB are available to each of 1 process here" in capfd.readouterr().err
