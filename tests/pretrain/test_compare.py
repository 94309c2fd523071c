"""`python -m pretrain.compare`: invalid commands, concurrent runs, interruptions, and one real
comparison.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from datasets_for_tests import write_all
from launch import start_python

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.command_line import status_of
from megatron_tape.errors import EXIT_RESTART, ConfigError, UserError
from megatron_tape.evaluation.comparison_file import (
    changed_settings,
    read_comparison,
    write_comparison,
)
from megatron_tape.evaluation.results import read_results
from megatron_tape.io.files import fingerprint
from pretrain import compare, evaluate
from pretrain.comparison.jobs import Jobs, Programs
from pretrain.comparison.planned_runs import make_plan, parse_variants

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "pretrain" / "recipes" / "compare"
RECIPE = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 16, seq_length: 12, vocab_size: 6,
        init_std: 0.3}
data: {generator: {task: selective_copy, copied: 4, blanks: 4, symbols: 4}, loss_on: answers}
optimizer: {lr: 0.03, lr_scale_of: {position: 30.0}}
train: {steps: 4, micro_batch_size: 2, global_batch_size: 4, precision: fp32, eval_interval: 4, eval_steps: 1}
evaluation: {every: 4, selective_copy: {copied: 4, symbols: 4, blanks: {IID: 4, dense: 2}, samples: 20}}
checkpoint: {interval: 2}
logging: {interval: 1, sample_tokens: 0, tensorboard: false}
"""
VARIANTS = "rope,tape+token_mixing=per_head"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


def arguments(recipe, output, *others, encodings=VARIANTS, seeds=2):
    given = [
        "--recipe",
        str(recipe),
        "--encodings",
        encodings,
        "--seeds",
        str(seeds),
        "--output",
        str(output),
    ]
    return [*given, *map(str, others)]


def plan_of(recipe, output, *others, **changes):
    return make_plan(*compare.read_command(arguments(recipe, output, *others, **changes)))


@pytest.mark.parametrize(
    "encodings, others, key",
    [
        ("rope,tapee", (), "--encodings"),
        ("rope,tape,rope", (), "--encodings"),
        ("rope+token_mixing=full", (), "--encodings"),  # it has no effect
        ("rope,tape+token_miximg=full", (), "--encodings"),
        ("rope,tape+gate_input=mpl", (), "model.position.gate_input"),
        ("rope+train.steps=3", (), "--encodings"),
        ("rope+optimizer.lr=-1", (), "optimizer.lr"),
        ("rope,tape+seq_length=8", (), "data.generator"),
        *((VARIANTS, ("--seeds", text), "--seeds") for text in ("0", "3-2", "x", "1-")),
        (VARIANTS, ("--checkpoint.directory", "x"), "checkpoint.directory"),
        (VARIANTS, ("--evaluation.selective_copy", "null"), "evaluation"),
        (VARIANTS, ("--evaluation", "missing.yaml"), "missing.yaml"),
    ],
)
def test_invalid_settings_are_refused_before_the_first_run(
    recipe, tmp_path, encodings, others, key
):
    with pytest.raises((UserError, FileNotFoundError)) as error:
        plan_of(recipe, tmp_path / "out", *others, encodings=encodings)
    refused = error.value
    assert key in (
        " ".join(refused.subjects) if isinstance(refused, UserError) else refused.filename
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "others, reported",
    [
        (["--jobs", "0"], "--jobs is 0"),
        (["--only", "4"], "--only is 4; give a number from 0 to 3"),
        (["--fast"], "--fast is not an option"),
    ],
)
def test_mistakes_of_the_command_end_in_one_sentence(recipe, tmp_path, capsys, others, reported):
    assert status_of(lambda: compare.main(arguments(recipe, tmp_path / "out", *others))) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and reported in printed


def test_variants_may_differ_in_how_they_learn_and_seeds_begin_anywhere(recipe, tmp_path):
    plan = plan_of(
        recipe,
        tmp_path / "out",
        encodings="rope,rope+optimizer.lr=0.1+schedule.kind=constant",
        seeds="7-8",
    )
    assert (
        [run.seed for run in plan.runs]
        == [run.config.train.seed for run in plan.runs]
        == [7, 7, 8, 8]
    )
    learning = [(run.config.optimizer.lr, run.config.schedule.kind) for run in plan.runs[:2]]
    assert learning == [(0.03, "cosine"), (0.1, "constant")]


def test_check_does_not_import_torch_and_counts_the_runs(recipe, tmp_path):
    program = (
        "import sys\nfrom pretrain.compare import main\nprint(main(sys.argv[1:]), 'torch' in"
        " sys.modules)"
    )
    command = [sys.executable, "-c", program, *arguments(recipe, tmp_path / "out", "--check")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[0].startswith("4 runs, 0 finished, output in ")
    assert done.stdout.splitlines()[1] == "0 False" and not (tmp_path / "out").exists()


def test_an_array_has_a_task_for_each_of_many_runs(tmp_path):
    lines = {
        "python": "echo 1,200 runs, 0 finished, output in out",
        "sbatch": 'echo "$@" >&2; echo 7',
    }
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TAPE_PYTHON": str(tmp_path / "python"),
    }
    environment.pop("SLURM_JOB_ID", None)
    command = ["bash", str(ROOT / "slurm" / "compare.sh"), "--at-once", "5", "--recipe", "x.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "--array=0-1199%5 " in done.stderr, done.stdout + done.stderr
    assert "--dependency=afterany:7 " in done.stderr and "report  job 7, after 7" in done.stdout


def test_directory_names_of_variants_are_safe_and_unique():
    variants = parse_variants(
        "tape+token_mixing=per_head,rope+rope_scaling_type=a/b,rope+rope_scaling_type=a b,alibi"
    )
    names = [variant.directory for variant in variants]
    assert names[0] == variants[0].label == "tape+token_mixing=per_head" and names[3] == "alibi"
    assert all(re.fullmatch(r"[\w.+=-]+", name) for name in names) and len(set(names)) == 4


def test_a_setting_of_a_variant_may_have_commas_in_brackets():
    rates = "optimizer.lr_scale_of={position: 0.1, position.increments: 1.0}"
    scaled, rope = parse_variants(f"tape+{rates}+mlp_zero=up,rope")
    assert scaled.settings == (
        ("optimizer.lr_scale_of", rates.partition("=")[2]),
        ("mlp_zero", "up"),
    )
    assert rope.label == "rope"
    (scaled,) = parse_variants("rope+optimizer.lr_scale_of={matrices: 1e+1}+optimizer.lr=1e-3")
    assert scaled.settings == (
        ("optimizer.lr_scale_of", "{matrices: 1e+1}"),
        ("optimizer.lr", "1e-3"),
    )


class FakeProcess:
    """A process that ends with `status` after `polls` calls of `poll`."""

    def __init__(self, status, polls):
        self.status = status
        self.polls = polls

    def poll(self):
        self.polls -= 1
        if self.polls < 0:
            return self.status
        return None


class Stage:
    """Replaces `Programs`; records which stages were started, and `most`, how many ran at the same
    time.
    """

    def __init__(self, statuses=None):
        self.statuses = statuses or {}
        self.started = []
        self.most = 0
        self.processes = []

    def __call__(self, module, arguments, log, slot):
        log.parent.mkdir(parents=True, exist_ok=True)
        key = (log.parent.parent.name, log.parent.name, module)
        self.started.append(key)
        if key in self.statuses:
            log.write_text("step 1\nValueError: it broke\n")
        status = self.statuses.get(key, 0)
        status = status.pop(0) if isinstance(status, list) else status
        self.processes.append(FakeProcess(status, polls=2))
        self.most = max(self.most, sum(process.polls >= 0 for process in self.processes))
        return self.processes[-1]


def run_jobs(plan, stage, slots=2):
    """Execute the runs of a plan with simulated programs; return the jobs and the names of the
    finished runs.
    """
    finished = []
    jobs = Jobs(plan.left, slots, stage, lambda run, seconds: finished.append(run.name), pause=0)
    jobs.run()
    return jobs, finished


def test_a_continued_comparison_counts_the_runs_that_were_finished_before(recipe, tmp_path, capsys):
    left = plan_of(recipe, tmp_path).left[1:]
    Jobs(left, 1, Stage(), lambda run, seconds: None, finished=1, pause=0).run()
    lines = [line.partition(" runs: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["2 of 4", "3 of 4", "4 of 4"]


def test_runs_are_trained_then_evaluated_with_limited_concurrency(recipe, tmp_path):
    plan = plan_of(recipe, tmp_path)
    stage = Stage()
    jobs, finished = run_jobs(plan, stage)
    assert (
        sorted(finished) == sorted(run.name for run in plan.runs)
        and stage.most == 2
        and not jobs.failed
    )
    for run in plan.runs:
        key = [run.variant.directory, f"seed-{run.seed}"]
        modules = [module for *directory, module in stage.started if directory == key]
        assert modules == ["pretrain.train", "pretrain.evaluate"]
    # All variants with one seed come before the next seed.
    assert [run.seed for run in plan.runs] == [1, 1, 2, 2]


def test_other_runs_finish_if_one_fails(recipe, tmp_path, capsys):
    stage = Stage(
        {("rope", "seed-1", "pretrain.train"): 1, ("rope", "seed-2", "pretrain.evaluate"): -9}
    )
    jobs, finished = run_jobs(plan_of(recipe, tmp_path), stage)
    assert finished == ["tape+token_mixing=per_head, seed 1", "tape+token_mixing=per_head, seed 2"]
    assert jobs.failed["rope, seed 1"].startswith(
        "training ended with status 1 (ValueError: it broke); the output is"
    )
    assert (
        jobs.failed["rope, seed 2"].startswith("evaluation ended with status -9")
        and jobs.stopped is None
    )
    assert ("rope", "seed-1", "pretrain.evaluate") not in stage.started
    assert "failed: rope, seed 1" in capsys.readouterr().err


def test_a_stage_that_exits_with_75_is_restarted(recipe, tmp_path):
    key = ("rope", "seed-1", "pretrain.train")
    stage = Stage({key: [EXIT_RESTART, 0]})
    jobs, finished = run_jobs(plan_of(recipe, tmp_path), stage)
    assert len(finished) == 4 and stage.started.count(key) == 2 and not jobs.failed


def test_tasks_may_come_from_a_file(recipe, tmp_path):
    file = tmp_path / "tasks.yaml"
    file.write_text("selective_copy: {copied: 4, symbols: 4, blanks: {far: 7}, samples: 3}")
    plan = plan_of(recipe, tmp_path / "out", "--evaluation", file)
    assert [task.settings.blanks for task in plan.tasks] == [{"far": 7}]
    assert plan.runs[0].evaluation[:2] == ["--config", str(file)]
    # The recipe's tasks are not evaluated during training.
    assert all(run.config.evaluation.enabled_tasks() == {} for run in plan.runs)


def test_lm_eval_tasks_in_the_users_files_need_trust_remote_code(recipe, tmp_path):
    file = tmp_path / "evaluation.yaml"
    file.write_text("lm_eval: {tasks: [mine], include_path: mytasks}")
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        plan_of(recipe, tmp_path / "out", "--evaluation", file)
    with pytest.raises(
        ConfigError
    ) as refused:  # for another reason: the model has 12 tokens and no tokenizer
        plan_of(recipe, tmp_path / "out", "--evaluation", file, "--trust-remote-code")
    assert "--trust-remote-code" not in str(refused.value)


def test_a_language_model_without_tasks_is_compared_by_its_validation_loss(tmp_path):
    prefix = write_all(tmp_path) / "a"
    tiny = ROOT / "tests" / "recipes" / "tiny.yaml"
    plan = plan_of(tiny, tmp_path / "out", "--data.prefix", prefix, encodings="rope,tape", seeds=1)
    with pytest.raises(ConfigError, match="^train.eval_interval"):
        plan_of(
            tiny,
            tmp_path / "out",
            "--data.prefix",
            prefix,
            "--train.eval_interval",
            "0",
            encodings="rope",
        )
    run = plan.runs[1]
    assert [name for name, _, _ in run.stages] == ["training"] and plan.tasks == []
    run.directory.mkdir(parents=True)
    rows = [
        {"step": step, "throughput/tokens_per_second": speed}
        for step, speed in ((1, 10.0), (9, 640.0), (10, 640.0))
    ]
    rows[-1]["validation/loss"] = 2.5
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan.record(run, 3.0, "GPU x")
    (found,) = read_comparison(run.result).runs
    values = {score.metric: score.value for score in found.scores}
    # 4 sequences of 16 tokens in a step.
    assert (
        values["validation loss"] == 2.5
        and values["seconds per step"] == 0.1
        and found.hardware == "GPU x"
    )
    assert found.data == {
        f"{prefix}{suffix}": fingerprint(f"{prefix}{suffix}") for suffix in (".idx", ".bin")
    }
    assert [other.name for other in plan.left] == ["rope, seed 1"]
    for evaluations, alike in ((["validation_loss"], True), (["sample"], False)):
        other = replace(
            run.config, train=replace(run.config.train, evaluations=evaluations, seed=0)
        )
        assert (changed_settings(read_comparison(run.result).settings, other) == []) is alike


# ----- a real comparison -----


def without_imports(gpus, lock):
    """Replace `Programs`, whose new processes take seconds to import the libraries."""
    return lambda module, arguments, log, slot: start_python(["-m", module, *arguments], log)


@pytest.fixture(scope="module")
def compared(recipe, tmp_path_factory):
    """The output directory of a comparison of two variants with two seeds, and the output of the
    program.
    """
    output = tmp_path_factory.mktemp("compared") / "out"
    output_text = io.StringIO()
    errors = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(output_text),
        redirect_stderr(errors),
    ):
        patched.setattr(compare, "Programs", without_imports)
        status = compare.main(arguments(recipe, output, "--jobs", "2"))
    assert status == 0, errors.getvalue()
    return output, subprocess.CompletedProcess(
        (), status, output_text.getvalue(), errors.getvalue()
    )


def test_a_comparison_contains_the_results_of_its_runs(compared):
    output, done = compared
    found = read_comparison(output / "comparison.json")
    assert [run.name for run in found.runs] == [
        (variant, seed) for variant in VARIANTS.split(",") for seed in (1, 2)
    ]
    losses = set()
    for run in found.runs:
        directory = output / run.variant / f"seed-{run.seed}"
        scores = (
            read_results(directory / "evaluation" / "step-00000004").tasks["selective_copy"].scores
        )
        assert run.scores[: len(scores)] == scores
        values = {score.metric: score.value for score in run.scores[len(scores) :]}
        last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
        assert (
            values["validation loss"] == last["validation/loss"] and values["seconds per step"] > 0
        )
        assert (
            values["parameters"] > 1000
            and values["arithmetic"] > 0
            and run.hardware.startswith("CPU")
            and "torch" in run.versions
        )
        losses.add(last["validation/loss"])
        assert "step 4/4" in (directory / "log.txt").read_text()
    assert len(losses) == 4  # each run has another variant or seed
    assert (output / "comparison.json").stat().st_size < 20_000
    assert "4 of 4 runs" in done.stderr and "Traceback" not in done.stderr


def test_tables_and_page_show_every_metric(compared):
    output, done = compared
    text = (output / "comparison.md").read_text()
    html = (output / "report.html").read_text()
    assert "# Comparison" in done.stdout and "p < 0.05 only if" in done.stdout
    for shown in (
        "accuracy",
        "exact match",
        "2 blanks",
        "4 blanks (as trained)",
        "validation loss (nats per token)",
        "seconds per step",
    ):
        assert shown in text and shown in html
    assert "tape+token_mixing=per_head" in text and "difference from rope" in text
    assert "With 2 seeds" in html and "<img" in html


def test_repeating_the_command_does_nothing_and_more_seeds_add_runs(compared, recipe, capsys):
    output, _ = compared
    before = (output / "comparison.json").read_bytes()
    assert compare.main(arguments(recipe, output)) == 0
    assert "all runs are finished already" in capsys.readouterr().err
    assert (output / "comparison.json").read_bytes() == before
    assert [run.name for run in plan_of(recipe, output, seeds=3).left] == [
        "rope, seed 3",
        "tape+token_mixing=per_head, seed 3",
    ]


@pytest.mark.parametrize(
    "change, reported",
    [
        (["--train.steps", "6"], "train.steps: was 4, is now 6"),
        (
            [
                "--evaluation.selective_copy",
                "{copied: 4, symbols: 4, blanks: {IID: 4}, samples: 9}",
            ],
            "samples",
        ),
    ],
)
def test_results_of_other_settings_are_not_mixed(compared, recipe, capsys, change, reported):
    output, _ = compared
    before = (output / "comparison.json").read_bytes()
    assert status_of(lambda: compare.main(arguments(recipe, output, *change))) == 2
    printed = capsys.readouterr().err
    assert reported in printed and printed.count("\n") == 1
    assert "change these settings back, or choose another --output" in printed
    assert (output / "comparison.json").read_bytes() == before
    assert plan_of(recipe, output, "--logging.interval", "2").left == []


def test_results_from_another_machine_are_reused(compared, recipe, tmp_path, capsys):
    output, _ = compared
    content = read_comparison(output / "comparison.json")
    content.runs[:] = [run for run in content.runs if run.seed == 1 or run.variant == "rope"]
    (tmp_path / "new").mkdir()
    write_comparison(tmp_path / "new" / "comparison.json", content)
    plan = plan_of(recipe, tmp_path / "new")
    assert [run.name for run in plan.left] == ["tape+token_mixing=per_head, seed 2"]
    assert compare.main(arguments(recipe, tmp_path / "new", "--report-only")) == 1
    printed = capsys.readouterr()
    assert "Not finished: tape+token_mixing=per_head, seed 2." in printed.out
    assert "1 run of 4 not finished; run the same command to continue" in printed.err
    assert len(read_comparison(tmp_path / "new" / "comparison.json").runs) == 3
    assert (
        "Not finished: tape+token_mixing=per_head, seed 2."
        in (tmp_path / "new" / "report.html").read_text()
    )


def test_a_job_of_an_array_records_only_its_own_run(compared, recipe, tmp_path, monkeypatch):
    """With --only, results of other runs are not collected; the last job of an array collects
    them.
    """
    output, _ = compared
    source = output / "rope" / "seed-1"
    target = tmp_path / "out" / "rope" / "seed-1"
    target.parent.mkdir(parents=True)
    target.symlink_to(source)
    plan = plan_of(recipe, tmp_path / "out")
    assert len(plan.left) == 3 and not (tmp_path / "out" / "comparison.json").exists()
    assert compare.main(arguments(recipe, tmp_path / "out", "--only", 0)) == 0
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_a_run_started_with_other_settings_is_not_continued(compared, recipe, tmp_path, capsys):
    output, _ = compared
    run_directory = tmp_path / "out" / "rope" / "seed-1"
    run_directory.mkdir(parents=True)
    (run_directory / "config.yaml").write_text(
        (output / "rope" / "seed-1" / "config.yaml").read_text()
    )
    assert len(plan_of(recipe, tmp_path / "out").left) == 4
    assert (
        status_of(
            lambda: compare.main(arguments(recipe, tmp_path / "out", "--optimizer.lr", "0.1"))
        )
        == 2
    )
    assert (
        "contains a run with other settings (optimizer.lr: was 0.03, is now 0.1)"
        in capsys.readouterr().err
    )


def wait_for_a_step(process, run):
    """Wait until a run of a comparison has logged a step."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.05)


def test_an_interrupted_run_continues_from_its_checkpoint(recipe, tmp_path, monkeypatch):
    """After a signal, the comparison terminates the training, which saves. The same command then
    finishes the run.
    """
    output = tmp_path / "out"
    long = [
        "--train.steps",
        "150",
        "--train.eval_interval",
        "150",
        "--checkpoint.interval",
        "150",
        "--jobs",
        "1",
    ]
    given = arguments(recipe, output, *long, encodings="rope", seeds=1)
    command = [sys.executable, "-m", "pretrain.compare", *given]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for_a_step(process, output / "rope" / "seed-1")
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 75, error
    assert "1 run of 1 not finished; run the same command to continue" in error
    saved = max((output / "rope" / "seed-1" / "checkpoints").glob("step-*")).name
    assert 0 < int(saved.removeprefix("step-")) < 150
    monkeypatch.setattr(compare, "Programs", without_imports)
    assert compare.main(given) == 0
    log = (output / "rope" / "seed-1" / "log.txt").read_text()
    assert f"continuing from {output}/rope/seed-1/checkpoints/{saved}" in log
    assert len(read_comparison(output / "comparison.json").runs) == 1


def test_each_program_uses_one_gpu_and_its_own_process(tmp_path, monkeypatch):
    shown = (
        "def main(arguments):\n    print(arguments, os.environ['CUDA_VISIBLE_DEVICES'])\n    return"
        " len(arguments)\n"
    )
    (tmp_path / "shown.py").write_text(f"import os\n{shown}")
    monkeypatch.syspath_prepend(tmp_path)
    programs = Programs(["GPU-a", "GPU-b"], lock=0)
    for slot, (arguments, status) in enumerate(([["--x", "1"], 2], [[], 0])):
        assert programs("shown", arguments, tmp_path / "x" / "log.txt", slot).wait(120) == status
    assert (tmp_path / "x" / "log.txt").read_text() == "['--x', '1'] GPU-a\n[] GPU-b\n"


def test_a_killed_comparison_leaves_nothing_behind(recipe, tmp_path):
    """If a comparison is killed, its training saves and ends."""
    long = [
        "--train.steps",
        "2000",
        "--train.eval_interval",
        "2000",
        "--checkpoint.interval",
        "2000",
        "--jobs",
        "1",
    ]
    command = [sys.executable, "-m", "pretrain.compare"]
    command += arguments(recipe, tmp_path / "out", *long, encodings="rope", seeds=1)
    run = tmp_path / "out" / "rope" / "seed-1"
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as process:
        wait_for_a_step(process, run)
        process.kill()
    deadline = time.monotonic() + 120
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 0 < int(min((run / "checkpoints").glob("step-*")).name.removeprefix("step-")) < 2000


COMPARED = (
    *(
        "selective_copy",
        "selective_copy_published",
        "grid_navigation_1d",
        "grid_navigation_2d",
        "recall",
        "addition",
        "addition_5_digits",
        "addition_hints",
        "language",
        "language_512",
    ),
)


@pytest.mark.parametrize("name", COMPARED)
def test_a_recipe_can_run_and_its_evaluation_fits_the_model(name, tmp_path):
    file = RECIPES / f"{name}.yaml"
    config = parse_run_config(["--config", str(file)])
    validate(config, 1)
    assert config.model.position_encoding == "rope"
    if name == "language":
        evaluation = ROOT / "pretrain" / "recipes" / "evaluate" / "compare_language.yaml"
        (task,) = evaluate.read_command(["--config", str(evaluation), "--model", "x"])[1]
        assert task.settings.data == config.data.prefix and task.settings.split == config.data.split
        return
    if name == "language_512":  # its data does not exist
        settings = config.evaluation.perplexity
        assert (settings.data, settings.split) == (config.data.prefix, config.data.split)
        return
    plan = plan_of(file, tmp_path, encodings="rope,tape", seeds=3)
    assert len(plan.runs) == 6
    (task,) = plan.tasks
    generator = config.data.generator
    if task.name == "addition":
        assert (task.settings.digits, task.settings.hints) == (generator.digits, generator.hints)
    elif task.name == "recall":
        assert replace(generator, shortest=None) in task.generators().values()
    else:
        assert generator == task.generators()["IID"]


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES.glob("*")} == set(COMPARED)
