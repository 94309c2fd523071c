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
from megatron_tape.command_line import Interrupted
from megatron_tape.errors import EXIT_RESTART, ConfigError, UserError
from megatron_tape.evaluation.comparison_file import read_comparison, write_comparison
from megatron_tape.evaluation.results import read_results
from megatron_tape.io.files import fingerprint
from pretrain import compare, evaluate
from pretrain.comparison.jobs import Jobs, start_program
from pretrain.comparison.planned_runs import make_plan, parse_variants

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "pretrain" / "recipes" / "compare"
RECIPE = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 16, seq_length: 12,
        vocab_size: 6, init_std: 0.3}
data: {generator: {task: selective_copy, copied: 4, blanks: 4, symbols: 4}, loss_on: answers}
optimizer: {lr: 0.03, lr_scale_of: {position: 30.0}}
train: {steps: 4, micro_batch_size: 2, global_batch_size: 4, precision: fp32, eval_interval: 4,
        eval_steps: 1}
evaluation: {every: 4, selective_copy: {copied: 4, symbols: 4, blanks: {IID: 4, dense: 2},
             samples: 20}}
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
    options = {"recipe": recipe, "encodings": encodings, "seeds": seeds, "output": output}
    return [*(f"--{name}={value}" for name, value in options.items()), *others]


def plan_of(recipe, output, *others, **changes):
    return make_plan(*compare.read_command(arguments(recipe, output, *others, **changes)))


@pytest.mark.parametrize(
    "encodings, others, key",
    [
        ("rope,tapee", (), "--encodings"),
        ("rope,tape,rope", (), "--encodings"),
        ("rope+token_mixing=full", (), "model.token_mixing"),
        ("rope,tape+gate_input=mpl", (), "model.position.gate_input"),
        ("rope+train.steps=3", (), "model.train.steps"),
        ("rope,tape+position_encoding=rope", (), "--encodings"),
        ("rope,tape+seq_length=8", (), "data.generator"),
        *((VARIANTS, (f"--seeds={text}",), "--seeds") for text in ("0", "3-2", "x", "1-", "1234")),
        (VARIANTS, ("--checkpoint.directory=x",), "checkpoint.directory"),
        (VARIANTS, ("--evaluation.selective_copy=null",), "evaluation"),
        (VARIANTS, ("--fast",), "--fast"),
        (VARIANTS, ("--jobs=0",), "the command line"),
    ],
)
def test_invalid_settings_are_refused_before_the_first_run(
    recipe, tmp_path, encodings, others, key
):
    with pytest.raises(UserError) as error:
        plan_of(recipe, tmp_path / "out", *others, encodings=encodings)
    assert key in error.value.subjects
    assert error.value.fix
    assert not (tmp_path / "out").exists()


def test_a_run_that_does_not_exist_cannot_be_chosen(recipe, tmp_path):
    with pytest.raises(ConfigError, match="^--only is 4"):
        compare.main(arguments(recipe, tmp_path / "out", "--only=4"))


def test_variants_may_differ_in_how_they_learn_and_seeds_begin_anywhere(recipe, tmp_path):
    encodings = "rope,rope+optimizer.lr=0.1+schedule.kind=constant"
    plan = plan_of(
        recipe,
        tmp_path / "out",
        encodings=encodings,
        seeds="7-8",
    )
    assert [run.seed for run in plan.runs] == [7, 7, 8, 8]
    assert [run.config.train.seed for run in plan.runs] == [7, 7, 8, 8]
    learning = [(run.config.optimizer.lr, run.config.schedule.kind) for run in plan.runs[:2]]
    assert learning == [(0.03, "cosine"), (0.1, "constant")]


def test_check_does_not_import_torch_and_counts_the_runs(recipe, tmp_path):
    program = (
        "import sys\nfrom pretrain.compare import main\nprint(main(sys.argv[1:]), 'torch' in"
        " sys.modules)"
    )
    command = [sys.executable, "-c", program, *arguments(recipe, tmp_path / "out", "--check")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("4 runs, 0 finished, output in ")
    assert second == "0 False"
    assert not (tmp_path / "out").exists()


def test_directory_names_of_variants_are_safe_and_unique():
    variants = parse_variants(
        "tape+token_mixing=per_head,rope+rope_scaling_type=a/b,rope+rope_scaling_type=a b,alibi"
    )
    names = [variant.directory for variant in variants]
    assert names[0] == variants[0].label == "tape+token_mixing=per_head"
    assert names[3] == "alibi"
    assert all(re.fullmatch(r"[\w.+=-]+", name) for name in names)
    assert len(set(names)) == 4


def test_a_setting_of_a_variant_may_have_commas_in_brackets_and_an_exponent():
    scale = "{position: 0.1, position.increments: 1e+1}"
    text = f"tape+optimizer.lr_scale_of={scale}+mlp_zero=up,rope"
    scaled, rope = parse_variants(text)
    assert scaled.settings == (("optimizer.lr_scale_of", scale), ("mlp_zero", "up"))
    assert rope.label == "rope"


def test_variants_may_have_windows():
    (variant,) = parse_variants(
        "rope+sliding_window=128+full_attention_every=3+layers_without_positions=3"
        "+rope_local_theta=1e+3"
    )
    config = parse_run_config(["--config=compare/language", *variant.arguments])
    model = config.model
    assert (model.sliding_window, model.full_attention_every) == (128, 3)
    assert (model.layers_without_positions, model.position.rope_local_theta) == (3, 1000.0)


class FakeProcess:
    """A process that ends with `status` after two calls of `poll`."""

    def __init__(self, status):
        self.status = status
        self.polls = 2

    def poll(self):
        self.polls -= 1
        if self.polls < 0:
            return self.status
        return None


class FakePrograms:
    """Replaces `start_program`; records which phases were started, and `most`, how many ran at the
    same time. `statuses` are the exit statuses other than 0 by phase, one for each start.
    """

    def __init__(self, statuses=None):
        self.statuses = statuses or {}
        self.started = []
        self.most = 0
        self.processes = []

    def __call__(self, module, arguments, log, slot):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("step 1\nValueError: it broke\n")
        phase = (log.parent.parent.name, log.parent.name, module)
        self.started.append(phase)
        statuses = self.statuses.get(phase, [])
        self.processes.append(FakeProcess(statuses.pop(0) if statuses else 0))
        self.most = max(
            self.most,
            sum(process.polls >= 0 for process in self.processes),
        )
        return self.processes[-1]


def run_jobs(runs, programs, slots=2, **options):
    """Execute runs with simulated programs; return the jobs and the names of the finished runs."""
    names = []
    jobs = Jobs(
        runs,
        slots,
        programs,
        lambda run, _: names.append(run.name),
        pause=0,
        **options,
    )
    jobs.run()
    return jobs, names


def test_a_continued_comparison_counts_the_runs_that_were_finished_before(recipe, tmp_path, capsys):
    first, *others = plan_of(recipe, tmp_path).runs
    run_jobs(others, FakePrograms(), 1, finished_before=[first])
    lines = [line.partition(" runs: ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["2 of 4", "3 of 4", "4 of 4"]


def test_runs_are_trained_then_evaluated_with_limited_concurrency(recipe, tmp_path):
    plan = plan_of(recipe, tmp_path)
    programs = FakePrograms()
    jobs, names = run_jobs(plan.unfinished, programs)
    assert sorted(names) == sorted(run.name for run in plan.runs)
    assert programs.most == 2
    assert not jobs.failed
    for run in plan.runs:
        place = [run.variant.directory, f"seed-{run.seed}"]
        modules = [module for *directory, module in programs.started if directory == place]
        assert modules == ["pretrain.train", "pretrain.evaluate"]
    # All variants with one seed come before the next seed.
    assert [run.seed for run in plan.runs] == [1, 1, 2, 2]


def test_other_runs_finish_if_one_fails_and_a_phase_that_exits_with_75_is_restarted(
    recipe, tmp_path, capsys
):
    repeated = ("tape+token_mixing=per_head", "seed-1", "pretrain.train")
    statuses = {
        ("rope", "seed-1", "pretrain.train"): [1],
        ("rope", "seed-2", "pretrain.evaluate"): [-9],
        repeated: [EXIT_RESTART],
    }
    programs = FakePrograms(statuses)
    jobs, names = run_jobs(plan_of(recipe, tmp_path).unfinished, programs)
    assert names == [f"tape+token_mixing=per_head, seed {seed}" for seed in (1, 2)]
    assert programs.started.count(repeated) == 2
    assert jobs.stopped is None
    reason = "training ended with status 1 (ValueError: it broke); the output is"
    assert jobs.failed["rope, seed 1"].startswith(reason)
    assert jobs.failed["rope, seed 2"].startswith("evaluation ended with status -9")
    assert ("rope", "seed-1", "pretrain.evaluate") not in programs.started
    assert "failed: rope, seed 1" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("cut"), KeyError("cut"), OSError("cut")])
def test_other_runs_finish_if_the_results_of_one_cannot_be_recorded(recipe, tmp_path, error):
    names = []

    def finish(run, seconds):
        if run.name == "rope, seed 1":
            raise error
        names.append(run.name)

    plan = plan_of(recipe, tmp_path)
    jobs = Jobs(plan.unfinished, 2, FakePrograms(), finish, pause=0)
    jobs.run()
    assert len(names) == 3
    assert list(jobs.failed) == ["rope, seed 1"]
    assert "cut" in jobs.failed["rope, seed 1"]


def test_a_run_with_an_unreadable_record_counts_as_not_finished(recipe, tmp_path, capsys):
    result = tmp_path / "rope" / "seed-1" / "comparison.json"
    result.parent.mkdir(parents=True)
    result.write_text("{")
    assert len(plan_of(recipe, tmp_path).unfinished) == 4
    assert f"rope, seed 1 counts as not finished: {result}" in capsys.readouterr().err


def test_tasks_may_come_from_a_file(recipe, tmp_path):
    file = tmp_path / "tasks.yaml"
    file.write_text("selective_copy: {copied: 4, symbols: 4, blanks: {far: 7}, samples: 3}")
    plan = plan_of(recipe, tmp_path / "out", f"--evaluation={file}")
    assert [task.settings.blanks for task in plan.tasks] == [{"far": 7}]
    assert plan.runs[0].evaluation_arguments[:2] == ["--config", str(file)]
    # The recipe's tasks are not evaluated during training.
    assert all(run.config.evaluation.enabled_tasks() == {} for run in plan.runs)


def test_lm_eval_tasks_in_the_users_files_need_trust_remote_code(recipe, tmp_path):
    file = tmp_path / "evaluation.yaml"
    file.write_text("lm_eval: {tasks: [mine], include_path: mytasks}")
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        plan_of(recipe, tmp_path / "out", f"--evaluation={file}")
    # Then refused for another reason: the model has 12 tokens and no tokenizer.
    with pytest.raises(ConfigError) as refused:
        plan_of(recipe, tmp_path / "out", f"--evaluation={file}", "--trust-remote-code")
    assert "--trust-remote-code" not in str(refused.value)


def test_a_language_model_without_tasks_is_compared_by_its_validation_loss(tmp_path):
    prefix = write_all(tmp_path) / "a"
    tiny = ROOT / "tests" / "recipes" / "tiny.yaml"
    given = (tiny, tmp_path / "out", f"--data.prefix={prefix}")
    with pytest.raises(ConfigError, match="^train.eval_interval"):
        plan_of(*given, "--train.eval_interval=0", encodings="rope")
    plan = plan_of(*given, encodings="rope,tape", seeds=1)
    run = plan.runs[1]
    assert [name for name, _, _ in run.phases] == ["training"]
    assert plan.tasks == []

    run.directory.mkdir(parents=True)
    rows = [
        {"step": 1, "throughput/tokens_per_second": 10.0},
        {"step": 9, "throughput/tokens_per_second": 640.0},
        {"step": 10, "throughput/tokens_per_second": 640.0, "validation/loss": 2.5},
    ]
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan.record(run, 3.0, "GPU x")
    (recorded,) = read_comparison(run.result).runs
    values = {score.metric: score.value for score in recorded.scores}
    # 4 sequences of 16 tokens in a step.
    assert values["validation loss"] == 2.5
    assert values["seconds per step"] == 0.1
    assert recorded.hardware == "GPU x"
    files = [f"{prefix}{suffix}" for suffix in (".idx", ".bin")]
    assert recorded.data == {file: fingerprint(file) for file in files}
    assert [run.name for run in plan.unfinished] == ["rope, seed 1"]


# ----- a real comparison -----


def start_forked(module, arguments, log, slot, **_):
    """Replace `start_program`, whose new processes take seconds to import the libraries."""
    return start_python(["-m", module, *arguments], log)


@pytest.fixture(scope="module")
def compared(recipe, tmp_path_factory):
    """The output directory of a comparison of two variants with two seeds, and the output of the
    program.
    """
    output = tmp_path_factory.mktemp("compared") / "out"
    printed = io.StringIO()
    errors = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        patched.setattr(compare, "start_program", start_forked)
        assert compare.main(arguments(recipe, output, "--jobs=2")) == 0
    assert "4 of 4 runs" in errors.getvalue()
    assert "Traceback" not in errors.getvalue()
    return output, printed.getvalue()


def test_a_comparison_contains_the_results_of_its_runs(compared):
    output, _ = compared
    runs = read_comparison(output / "comparison.json").runs
    names = [(variant, seed) for variant in VARIANTS.split(",") for seed in (1, 2)]
    assert [run.name for run in runs] == names
    losses = set()
    for run in runs:
        directory = output / run.variant / f"seed-{run.seed}"
        results = read_results(directory / "evaluation" / "step-00000004")
        scores = results.tasks["selective_copy"].scores
        assert run.scores[: len(scores)] == scores
        values = {score.metric: score.value for score in run.scores[len(scores) :]}
        last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
        assert values["validation loss"] == last["validation/loss"]
        assert values["seconds per step"] > 0
        assert values["arithmetic"] > 0
        assert values["parameters"] > 1000
        assert run.hardware.startswith("CPU")
        assert "torch" in run.versions
        assert "step 4/4" in (directory / "log.txt").read_text()
        losses.add(values["validation loss"])
    assert len(losses) == 4  # each run has another variant or seed
    assert (output / "comparison.json").stat().st_size < 20_000


def test_tables_and_page_show_every_metric(compared):
    output, printed = compared
    text = (output / "comparison.md").read_text()
    html = (output / "report.html").read_text()
    assert "# Comparison" in printed and "p < 0.05 only if" in printed
    for shown in (
        "accuracy",
        "exact match",
        "2 blanks",
        "4 blanks (as trained)",
        "validation loss (nats per token)",
        "seconds per step",
        "tape+token_mixing=per_head",
        "difference from rope",
        "With 2 seeds",
    ):
        assert shown in text
        assert shown in html
    assert "<img" in html


def test_repeating_the_command_does_nothing_and_more_seeds_add_runs(compared, recipe, capsys):
    output, _ = compared
    before = (output / "comparison.json").read_bytes()
    assert compare.main(arguments(recipe, output)) == 0
    assert "all runs are finished already" in capsys.readouterr().err
    assert (output / "comparison.json").read_bytes() == before
    assert plan_of(recipe, output, "--logging.interval=2").unfinished == []
    left = [run.name for run in plan_of(recipe, output, seeds=3).unfinished]
    assert left == ["rope, seed 3", "tape+token_mixing=per_head, seed 3"]


@pytest.mark.parametrize(
    "change, difference",
    [
        ("--train.steps=6", "train.steps: was 4, is now 6"),
        ("--evaluation.selective_copy.samples=9", "selective_copy.samples: was 20, is now 9"),
    ],
)
def test_results_of_other_settings_are_not_mixed(compared, recipe, change, difference):
    output, _ = compared
    with pytest.raises(UserError) as error:
        plan_of(recipe, output, change)
    assert difference in error.value.problem
    assert "another --output" in error.value.fix


def test_results_from_another_machine_are_reused(compared, recipe, tmp_path, capsys):
    output, _ = compared
    content = read_comparison(output / "comparison.json")
    content.runs[:] = [run for run in content.runs if run.seed == 1 or run.variant == "rope"]
    (tmp_path / "new").mkdir()
    write_comparison(tmp_path / "new" / "comparison.json", content)
    plan = plan_of(recipe, tmp_path / "new")
    missing = "tape+token_mixing=per_head, seed 2"
    assert [run.name for run in plan.unfinished] == [missing]

    assert compare.main(arguments(recipe, tmp_path / "new", "--report-only")) == 1
    printed = capsys.readouterr()
    assert f"Not finished: {missing}." in printed.out
    assert "not finished: 1 of 4 runs; run the same command to continue" in printed.err
    assert len(read_comparison(tmp_path / "new" / "comparison.json").runs) == 3
    assert f"Not finished: {missing}." in (tmp_path / "new" / "report.html").read_text()


def test_a_job_of_an_array_records_only_its_own_run(compared, recipe, tmp_path):
    """With --only, results of other runs are not collected; the last job of an array collects
    them.
    """
    output, _ = compared
    target = tmp_path / "out" / "rope" / "seed-1"
    target.parent.mkdir(parents=True)
    target.symlink_to(output / "rope" / "seed-1")
    assert len(plan_of(recipe, tmp_path / "out").unfinished) == 3
    assert compare.main(arguments(recipe, tmp_path / "out", "--only=0")) == 0
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_a_run_started_with_other_settings_is_not_continued(compared, recipe, tmp_path):
    output, _ = compared
    started = tmp_path / "out" / "rope" / "seed-1"
    started.mkdir(parents=True)
    settings = (output / "rope" / "seed-1" / "config.yaml").read_text()
    (started / "config.yaml").write_text(settings)
    assert len(plan_of(recipe, tmp_path / "out").unfinished) == 4
    with pytest.raises(UserError) as error:
        plan_of(recipe, tmp_path / "out", "--optimizer.lr=0.1")
    assert error.value.subject == str(started)
    assert "(optimizer.lr: was 0.03, is now 0.1)" in error.value.problem


def start_long(recipe, tmp_path, steps):
    """Start a comparison of one long run, and wait until the run has logged a step. Return the
    arguments, the run's directory and the process.
    """
    long = [
        f"--train.steps={steps}",
        f"--train.eval_interval={steps}",
        f"--checkpoint.interval={steps}",
        "--jobs=1",
    ]
    given = arguments(recipe, tmp_path / "out", *long, encodings="rope", seeds=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "pretrain.compare", *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "out" / "rope" / "seed-1"
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.05)
    return given, run, process


def steps_saved(run):
    checkpoints = (run / "checkpoints").glob("step-*")
    return [int(path.name.removeprefix("step-")) for path in checkpoints]


def test_an_interrupted_run_continues_from_its_checkpoint(recipe, tmp_path, monkeypatch):
    """After a signal, the comparison terminates the training, which saves. The same command then
    finishes the run.
    """
    given, run, process = start_long(recipe, tmp_path, 150)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == EXIT_RESTART, error
    assert "SIGTERM: saving and ending" in error
    assert "not finished: 1 of 1 run" in error
    step = max(steps_saved(run))
    assert 0 < step < 150
    monkeypatch.setattr(compare, "start_program", start_forked)
    assert compare.main(given) == 0
    assert f"continuing from {run}/checkpoints/step-{step:08}" in (run / "log.txt").read_text()
    assert len(read_comparison(tmp_path / "out" / "comparison.json").runs) == 1


def test_tables_are_printed_only_if_no_signal_ended_the_comparison(
    compared, recipe, tmp_path, monkeypatch, capsys
):
    output, _ = compared
    (tmp_path / "new").mkdir()
    content = read_comparison(output / "comparison.json")
    content.runs[:] = content.runs[:3]
    write_comparison(tmp_path / "new" / "comparison.json", content)
    given = arguments(recipe, tmp_path / "new")
    monkeypatch.setattr(compare, "_execute", lambda *_: signal.SIGTERM)
    assert compare.main(given) == EXIT_RESTART
    printed = capsys.readouterr()
    assert "| variant" not in printed.out
    assert "not finished: 1 of 4 runs" in printed.err
    assert "| variant" in (tmp_path / "new" / "comparison.md").read_text()
    monkeypatch.setattr(compare, "_execute", lambda *_: None)
    assert compare.main(given) == 1
    assert "| variant" in capsys.readouterr().out


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, EXIT_RESTART), (signal.SIGINT, 130)])
def test_a_signal_while_no_run_is_active_asks_to_continue(
    recipe, tmp_path, monkeypatch, capsys, number, status
):
    def interrupt(*_):
        raise Interrupted(number)

    monkeypatch.setattr(compare, "_execute", interrupt)
    assert compare.main(arguments(recipe, tmp_path / "out")) == status
    error = capsys.readouterr().err
    assert error == f"ended by {number.name}; run the same command to continue\n"


def test_a_killed_comparison_leaves_nothing_behind(recipe, tmp_path):
    """If a comparison is killed, its training saves and ends."""
    _, run, process = start_long(recipe, tmp_path, 2000)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while not steps_saved(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert 0 < min(steps_saved(run)) < 2000


def test_each_program_uses_one_gpu_and_its_own_process(tmp_path, monkeypatch):
    lines = [
        "import os, sys",
        "def main():",
        "    arguments = sys.argv[1:]",
        "    print(arguments, os.environ['CUDA_VISIBLE_DEVICES'])",
        "    return len(arguments)",
    ]
    (tmp_path / "shown.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "x" / "log.txt"
    for slot, (arguments, status) in enumerate(([["--x", "1"], 2], [[], 0])):
        gpus = ["GPU-a", "GPU-b"]
        process = start_program(
            "shown",
            arguments,
            log,
            slot,
            gpus=gpus,
            lock=0,
        )
        assert process.wait(120) == status
    assert log.read_text() == "['--x', '1'] GPU-a\n[] GPU-b\n"


@pytest.mark.parametrize(
    "name",
    # The ladder is not a recipe of pretrain.train; see test_ladder.py.
    [path.stem for path in sorted(RECIPES.glob("*")) if path.stem != "ladder"],
)
def test_a_recipe_can_run_and_its_evaluation_fits_the_model(name, tmp_path):
    file = RECIPES / f"{name}.yaml"
    config = parse_run_config(["--config", str(file)])
    validate(config, 1)
    assert config.model.position_encoding == "rope"
    if config.data.prefix is not None:  # the data does not exist
        settings = config.evaluation.perplexity
        if name == "language":
            evaluation = RECIPES.with_name("evaluate") / "compare_language.yaml"
            command = ["--config", str(evaluation), "--model", "x"]
            settings = evaluate.read_command(command)[1][0].settings
        assert (settings.data, settings.split) == (config.data.prefix, config.data.split)
        return
    plan = plan_of(
        file,
        tmp_path,
        encodings="rope,tape",
        seeds=3,
    )
    assert len(plan.runs) == 6
    (task,) = plan.tasks
    generator = config.data.generator
    if task.name == "addition":
        assert (task.settings.digits, task.settings.hints) == (generator.digits, generator.hints)
    elif task.name == "recall":
        assert replace(generator, shortest=None) in task.generators().values()
    else:
        assert generator == task.generators()["IID"]
