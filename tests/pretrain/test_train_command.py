"""`python -m pretrain.train` on one process: rejected settings, written files, failures and
continued runs.
"""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError
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
    ends = (
        (folder / "tokenizer.json")
        .read_text()
        .replace("<|endoftext|>", "w99")
        .replace('w5"', '<|endoftext|>"')
    )
    (folder / "other_end.json").write_text(ends)
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
    "--data.prefix=nowhere/x": "nowhere/x.idx",
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
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 False"] * len(MISTAKES)
    for error, reported in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert error.startswith("error: ") and reported in error


def test_other_ranks_wait_for_rank_0_to_report_errors_first(data, tmp_path, monkeypatch, capfd):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    arguments = [
        "--config",
        str(RECIPE),
        f"--data.prefix={data}/a",
        f"--logging.directory={tmp_path / 'run'}",
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for rank, prefix in (("0", "error: "), ("1", "error (rank 1): ")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            train.main([*arguments, "--model.num_attention_heads=3"])
        assert f"{prefix}{RECIPE}" in capfd.readouterr().err
        assert train.main([*arguments, "--data.prefix=nowhere"]) == 2
        assert capfd.readouterr().err.startswith(f"{prefix}data.prefix")
    assert waited == 2 * [command_line.REPORT_TIMEOUT]


def test_a_run_writes_metrics_checkpoints_and_configuration_and_a_finished_run_stays_unchanged(run):
    settings = ["--logging.interval=3", "--checkpoint.interval=2", "--checkpoint.keep=2"]
    assert run(*settings) == 0
    found = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 3, 5, 6, 9, 10]
    for row in found:
        assert {"step", "train/loss", "train/grad_norm", "train/learning_rate"} <= set(row)
        assert "throughput/tokens_per_second" in row
        assert ("validation/loss" in row) == (row["step"] in (5, 10))
    assert (
        found[-1]["position/update_norm/layer_00"] > found[0]["position/update_norm/layer_00"] == 0
    )
    assert found[0]["position/state_norm/layer_01"] == pytest.approx(1, abs=1e-5)
    norms = [
        value for name, value in found[-1].items() if name.startswith("position/update_norm/layer_")
    ]
    assert found[-1]["position/update_norm"] == pytest.approx(
        math.sqrt(sum(x**2 for x in norms) / len(norms))
    )
    assert found[-1]["validation/perplexity"] == pytest.approx(
        math.exp(found[-1]["validation/loss"])
    )
    assert steps_saved(run.folder) == [8, 10]
    again = train.parse_run_config(["--config", str(run.folder / "config.yaml")])
    assert again.logging.interval == 3 and again.logging.directory == str(run.folder)
    before = rows(run.folder)
    assert run(*settings) == 0
    assert rows(run.folder) == before


def test_tensorboard_shows_curves_configuration_and_sample(run, data):
    sample = [
        "--logging.tensorboard=true",
        "--logging.sample_tokens=5",
        "--logging.sample_prompt=w3",
    ]
    assert run(*sample, *packed(data)) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(run.folder / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    assert {"validation/loss", "position/state_norm"} <= set(events.Tags()["scalars"])

    def text(tag):
        return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()

    assert "num_layers: 3" in text("configuration")
    assert text("sample").split()[0] == "w3"
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([row["train/loss"] for row in rows(run.folder)], rel=1e-6)


def test_training_stops_with_an_error_after_max_bad_steps_in_a_row(run, capfd):
    assert run("--optimizer.lr=1e30", "--train.steps=30", "--train.max_bad_steps=3") == 1
    assert "3 steps in a row" in capfd.readouterr().err
    found = rows(run.folder)
    assert len(found) < 30 and found[-1]["train/loss"] is None


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
    assert (
        "step-00000010" in reported
        and "step-00000008" in reported
        and "step-00000006 at step 7" in reported
    )
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
        (["--train.steps=3", "--train.global_batch_size=8"], None),
        (["--train.steps=60"], "train.steps, train.global_batch_size"),
        (["--train.steps=61", "--train.seed=5"], "train.steps, train.seed"),
    ):
        capfd.readouterr()
        assert run(*more, "--train.eval_interval=0", *short) == 0
        lines = [
            line.split(": ", 1)[1]
            for line in capfd.readouterr().err.splitlines()
            if message in line
        ]
        assert lines == ([f"{reported}: {message}"] if reported else [])


@pytest.mark.parametrize("encoding", ["tape", "randpe"])
def test_validation_runs_at_the_chosen_steps_and_does_not_change_training(run, capfd, encoding):
    """RandPE draws random numbers in training."""
    steps_of = {"null": [10], "4": [4, 8, 10], "0": []}
    losses = {}
    for interval, expected in steps_of.items():
        name = f"every-{interval}"
        chosen = [f"--model.position_encoding={encoding}", f"--train.eval_interval={interval}"]
        capfd.readouterr()
        assert run(*chosen, "--checkpoint.interval=3", "--checkpoint.keep=9", name=name) == 0
        line = {
            "null": (
                "the validation loss is computed after the last step, on 8 sequences; set"
                " train.eval_interval to"
            ),
            "4": (
                "the validation loss is computed every 4 steps and after the last step, on 8"
                " sequences"
            ),
            "0": "the run computes no validation loss: train.eval_interval is 0; remove it, or",
        }
        assert line[interval] in capfd.readouterr().err
        folder = run.folder.with_name(name)
        found = rows(folder)
        assert [row["step"] for row in found if "validation/loss" in row] == expected
        losses[interval] = [row["train/loss"] for row in found]
        # The resumed run equals the uninterrupted one.
        for number in (6, 9, 10):
            shutil.rmtree(folder / "checkpoints" / f"step-{number:08}")
        assert run(*chosen, "--checkpoint.interval=3", "--checkpoint.keep=9", name=name) == 0
        assert rows(folder) == found
    assert losses["null"] == losses["4"] == losses["0"]


@pytest.mark.parametrize(
    "split, reason",
    [
        ("1,0,0", "data.split is 1,0,0, without validation documents; raise its second number"),
        (
            "999,1,0",
            "data.split is 999,1,0, so the validation split has 0 tokens of {data}/a, in 0 of its ",
        ),
    ],
)
def test_a_run_without_validation_data_says_which_setting_gives_some(
    run, data, capfd, split, reason
):
    assert (
        run(f"--data.split={split}", "--train.steps=2", "--train.eval_interval=null", *SHORT) == 0
    )
    assert (
        f"the run computes no validation loss: {reason.format(data=data)}" in capfd.readouterr().err
    )
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


def test_another_tokenizer_is_refused_and_a_missing_one_is_not_needed(run, data, tmp_path, capfd):
    original = tmp_path / "original.json"
    other = tmp_path / "other.json"
    text = (data / "tokenizer.json").read_text()
    original.write_text(text)
    other.write_text(text.replace('"w1"', '"changed"'))
    assert run("--train.steps=2", *SHORT, f"--data.tokenizer={original}") == 0
    capfd.readouterr()
    assert run("--train.steps=4", *SHORT, f"--data.tokenizer={other}") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"data.tokenizer {other} encodes text in another way than that of checkpoint" in line
    original.write_text(other.read_text())
    assert run("--train.steps=4", *SHORT, f"--data.tokenizer={original}") == 2
    original.unlink()
    assert run("--train.steps=4", *SHORT, f"--data.tokenizer={original}") == 0
    kept = run.folder / "checkpoints" / "step-00000004" / "tokenizer"
    original.write_text(text)
    assert load_tokenizer(kept).digest == load_tokenizer(original).digest


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(run, capfd):
    assert run() == 0
    assert (
        run("--model.hidden_size=64", "--model.position.token_mixing=full", "--train.steps=12") == 2
    )
    error = capfd.readouterr().err
    assert (
        "model.hidden_size: checkpoint 32, configuration 64" in error
        and "token_mixing" not in error
    )
    assert error.endswith(", or start another run with --logging.directory NEW\n")


def test_resume_none_does_not_overwrite_a_run_and_resume_accepts_a_path(run, capfd):
    assert run("--checkpoint.interval=4") == 0
    assert run() == 0
    finished = (
        "step 10 and train.steps is 10: nothing to do; to continue, raise train.steps above 10"
    )
    assert finished in capfd.readouterr().err
    assert run("--checkpoint.resume=none") == 1
    error = capfd.readouterr().err
    assert (
        "checkpoints up to step 10" in error
        and ", start another run with --logging.directory NEW, " in error
    )
    elsewhere = run.folder.parent / "elsewhere"
    shutil.copytree(run.folder / "checkpoints/step-00000008", elsewhere)
    assert run(f"--checkpoint.resume={elsewhere}", name="other") == 0
    assert rows(run.folder.parent / "other") == rows(run.folder)[8:]


@pytest.mark.parametrize(
    "override, reported",
    [
        ("data.split=999,1,0", "the validation split"),
        (
            "model.vocab_size=60",
            "model.vocab_size is 60",
        ),  # smaller than the tokenizer's vocabulary
        (
            "data.tokenizer=null --data.reset_attention_mask=false --model.vocab_size=32",
            "model.vocab_size is 32",
        ),
        ("logging.directory={data}/a.bin/x", "logging.directory"),
        ("data.prefix={data}/damaged", "incomplete or damaged"),
        (
            "data.tokenizer={data}/other_end.json",
            "--no-append-eod",
        ),  # no document ends with this token
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused_by_the_trainer_too(
    run, data, capfd, override, reported
):
    assert run(*packed(data), *f"--{override.format(data=data)}".split()) == 2
    error = capfd.readouterr().err
    assert reported in error and error.count("\n") == 1
    assert not run.folder.exists()


def test_kills_during_saves_lose_only_the_steps_since_the_last_complete_checkpoint(run, data):
    assert run("--train.steps=30", name="whole") == 0
    arguments = ["--config", str(RECIPE), option("data.prefix", f"{data}/a"), "--train.steps=30"]
    arguments += [f"--logging.directory={run.folder}", "--checkpoint.interval=1"]
    metrics = run.folder / "metrics.jsonl"
    for number, delay in enumerate((0.0, 0.02, 0.05)):
        in_background = number % 2 == 1
        count = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        chosen = [*arguments, f"--checkpoint.asynchronous={str(in_background).lower()}"]
        process = start_python(["-m", "pretrain.train", *chosen], run.folder.parent / "log")
        while process.is_alive() and (
            not metrics.exists() or metrics.read_text().count("\n") < count + 3
        ):
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        reached = rows_written(metrics)
        newest = checkpoint_files.newest_complete(run.folder / "checkpoints", print)
        assert (
            newest is not None
            and checkpoint_files.read_manifest(newest)["step"] >= reached - 1 - in_background
        )
    assert run("--train.steps=30", "--checkpoint.interval=1") == 0
    assert rows(run.folder) == rows(run.folder.parent / "whole")
    assert all(math.isfinite(row["train/loss"]) for row in rows(run.folder))


def rows_written(metrics):
    """Return the last step in a metrics.jsonl whose last line may be incomplete after a kill."""
    return max(
        json.loads(line)["step"] for line in metrics.read_text().splitlines() if line.endswith("}")
    )


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


def test_an_error_is_recorded_and_then_the_process_groups_are_aborted(run, monkeypatch):
    abort = distributed_c10d._abort_process_group
    found = []

    def aborted():
        found.extend(read_attempts(run.folder))
        abort()

    def fail(self, *args):
        raise RuntimeError("made to fail")

    with monkeypatch.context() as patched:
        patched.setattr(distributed_c10d, "_abort_process_group", aborted)
        patched.setattr(Engine, "train_step", fail)
        with pytest.raises(RuntimeError, match="made to fail"):
            run()
    (attempt,) = found
    assert (attempt.outcome, attempt.message) == ("failed", "RuntimeError: made to fail")
    assert "in fail" in attempt.detail
    assert not torch.distributed.is_initialized()
    assert run("--train.steps=3") == 0


def test_out_of_memory_is_one_sentence_and_its_traceback_is_recorded(run, monkeypatch, capfd):
    error = torch.OutOfMemoryError("CUDA out of memory")

    def fail(self, *args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "train_step", fail)
        assert run() == 1
    reported = capfd.readouterr().err
    assert (
        f"error: memory ran out ({error}); use smaller" in reported and "Traceback" not in reported
    )
    (attempt,) = read_attempts(run.folder)
    assert (
        attempt.outcome == "failed"
        and str(error) in attempt.message
        and "in fail" in attempt.detail
    )


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
    monkeypatch.setattr(backend, "choice", lambda *_: Choice("triton", "as this test says"))
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
    "setting, key",
    [
        (
            "--train.micro_batch_size=1000000 --train.global_batch_size=1000000",
            "train.micro_batch_size is 1000000",
        ),
        (
            "--model.num_layers=1000 --model.hidden_size=65536 --model.num_attention_heads=512",
            "model.hidden_size is 65536",
        ),
        (
            "--model.seq_length=100000000 --train.micro_batch_size=1",
            "model.seq_length is 100000000",
        ),
    ],
)
def test_a_step_that_exceeds_the_memory_of_the_node_is_refused(setting, key):
    given = ["--config", str(RECIPE), "--model.position_encoding=rope", *setting.split()]
    config = parse_run_config(given)
    with pytest.raises(
        ConfigError, match=f"{key}, with which a step needs at least .* of 1 process here; lower it"
    ):
        memory.check_host_memory(config, 1)


def test_stages_of_different_size_that_fit_together_are_not_refused(monkeypatch):
    """The first stage needs more than half of the memory, because of its embedding."""
    given = [
        "--model.vocab_size=100000",
        "--model.tie_embeddings=false",
        "--parallel.pipeline_model_parallel_size=2",
    ]
    given.append("--model.num_layers=4")
    config = parse_run_config(["--config", str(RECIPE), "--model.position_encoding=rope", *given])
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
