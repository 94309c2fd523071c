"""`python -m pretrain.compare --ladder`: points, learning rates, invalid recipes, interruption, job
arrays, and one real ladder.
"""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from datasets_for_tests import write_all
from launch import start_python

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.errors import EXIT_DIVERGED, EXIT_RESTART, ConfigError, FileError
from megatron_tape.evaluation.comparison_file import TRAINING, FinishedRun, write_comparison
from megatron_tape.evaluation.ladder_file import read_ladder
from megatron_tape.evaluation.report.ladder_tables import tuned_losses
from megatron_tape.evaluation.results import Score
from megatron_tape.text import duration
from pretrain import compare
from pretrain.comparison.ladder import CORE_FLOPS, START_SECONDS, plan_ladder
from pretrain.comparison.ladder_recipe import points_of, read_recipe, variants_of
from pretrain.comparison.planned_runs import ComparisonPlan

ROOT = Path(__file__).parents[2]
SMALL = {"model.hidden_size": 16, "model.num_attention_heads": 2, "model.ffn_hidden_size": 16}
LARGE = {"model.hidden_size": 32, "model.num_attention_heads": 2, "model.ffn_hidden_size": 32}


@pytest.fixture
def content(tmp_path):
    """The recipe of a ladder, as a mapping."""
    prefix = str(write_all(tmp_path) / "a")
    perplexity = {"data": prefix, "lengths": [8, 16], "documents": 2, "windows": 1}
    return {
        "recipe": str(ROOT / "tests" / "recipes" / "tiny.yaml"),
        "settings": {"data.prefix": prefix, "evaluation.perplexity": perplexity},
        "variants": {"rope": "rope", "content": "tape+increments=signed"},
        "sizes": {"small": SMALL, "large": LARGE},
        "tokens_per_parameter": [0.2, 0.4],
        "tuning": {"learning_rates": [0.01, 0.02, 0.04], "seeds": [9], "sizes": ["small"]},
        "seeds": [1, 2],
    }


@pytest.fixture
def recipe(content, tmp_path):
    return write_recipe(content, tmp_path)


def write_recipe(content, directory):
    path = directory / "ladder.yaml"
    # As JSON, which is YAML: yaml.dump would write repeated values as anchors.
    path.write_text(json.dumps(content))
    return path


def climb(recipe, output, *others):
    return compare.main([f"--ladder={recipe}", f"--output={output}", "--jobs=1", *others])


def plan_of(recipe, output, *others):
    return plan_ladder(str(recipe), Path(output), overrides=others)


class EndedProcess:
    """A process that has ended with `status`."""

    def __init__(self, status=0):
        self.status = status

    def poll(self):
        return self.status

    def terminate(self):
        pass


class FakeTraining:
    """Replaces training: runs finish at once. Their validation loss depends on the distance of the
    learning rate from `best`, by variant. Training with a rate above `highest` diverges. `seen` are
    the names of the runs. A signal is sent when run number `interrupt_at` starts.
    """

    def __init__(self, best, interrupt_at=None, highest=math.inf):
        self.best = best
        self.interrupt_at = interrupt_at
        self.highest = highest
        self.seen = []

    def loss(self, ratio):
        """Return the loss of a learning rate that is `ratio` times the best one."""
        return 3.0 + max(ratio, 1 / ratio)

    def start(self, module, arguments, log, slot, **_):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        if len(self.seen) == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if "--optimizer.lr" in arguments:
            rate = float(arguments[arguments.index("--optimizer.lr") + 1])
            if rate > self.highest:
                return EndedProcess(EXIT_DIVERGED)
        return EndedProcess()

    def record(self, plan, run, seconds, gpu_model):
        self.seen.append(run.name)
        settings = dict(run.variant.settings)
        rate = float(settings["optimizer.lr"])
        scores = []
        if rate <= self.highest:
            ratio = rate / self.best[run.variant.encoding]
            loss = self.loss(ratio)
            scores = [Score("validation loss", loss, "lower", task=TRAINING)]
        finished = FinishedRun(run.variant.label, run.seed, scores, 40.0, 0.0, "CPU", {})
        plan.results.runs.append(finished)
        write_comparison(run.result, replace(plan.results, runs=[finished]))


@pytest.fixture
def fake(monkeypatch):
    """Return a function that replaces training by `FakeTraining` and returns it."""

    def install(best, interrupt_at=None, highest=math.inf):
        training = FakeTraining(best, interrupt_at, highest)
        monkeypatch.setattr(compare, "start_program", training.start)
        monkeypatch.setattr(
            ComparisonPlan, "record", lambda plan, *arguments: training.record(plan, *arguments)
        )
        return training

    return install


def parameters_of(width):
    """Return the parameters of three layers and the last norm. Queries, keys, values and the output
    are square matrices, and the MLP has three of them.
    """
    return 3 * (7 * width**2 + 2 * width) + width


def test_points_have_steps_for_their_tokens(recipe, tmp_path):
    """The smallest size comes first, and the number of tokens follows from the parameters of the
    baseline, without embeddings.
    """
    ladder = plan_of(recipe, tmp_path / "out")
    names = [
        f"{size}, {amount} tokens per parameter"
        for size in ("small", "large")
        for amount in (0.2, 0.4)
    ]
    assert [point.name for point in ladder.points] == names
    for point in ladder.points:
        width = {"small": 16, "large": 32}[point.size]
        assert point.parameters == parameters_of(width)
        (run, *_) = ladder.reported[point.name].runs
        batch = run.config.train.global_batch_size * run.config.model.seq_length
        expected = point.tokens_per_parameter * point.parameters / batch
        assert run.config.train.steps == round(expected)
        assert point.tokens == run.config.train.steps * batch
        assert run.config.schedule.warmup_steps == round(0.1 * run.config.train.steps)


def test_reported_runs_have_the_best_rate_of_other_seeds(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.08})
    assert climb(recipe, tmp_path / "out", "--extend-grid") == 0
    ladder = read_ladder(tmp_path / "out" / "ladder.json")
    assert ladder.variants == {"rope": "rope", "content": "tape+increments=signed"}
    assert len(ladder.points) == 4
    for point in ladder.points:
        rates = {name: rate.rate for name, rate in point.learning_rates.items()}
        assert rates == {"rope": 0.02, "content": 0.08}
        assert {run.name for run in point.comparison.runs} == {
            (variant, seed) for variant in ("rope", "content") for seed in (1, 2)
        }
    tuned, *others = ladder.points
    assert {seed for runs in tuned.tuning.values() for seed in [run.seed for run in runs.runs]} == {
        9
    }
    # The grid was extended until the best rate was inside it.
    rates = {run.variant for run in tuned.tuning["content"].runs}
    assert rates == {"0.01", "0.02", "0.04", "0.08", "0.16"}
    assert tuned.learning_rates["content"].taken_from is None
    assert {point.learning_rates["content"].taken_from for point in others} == {tuned.name}
    # 3 + 5 rates, and two variants with two seeds at four points.
    assert len(training.seen) == len(set(training.seen)) == 8 + 16


def test_a_best_rate_at_the_end_of_the_grid_is_an_error(recipe, tmp_path, fake):
    training = fake({"rope": 0.005, "tape": 0.02})
    with pytest.raises(ConfigError) as error:
        climb(recipe, tmp_path / "out")
    assert error.value.subject == "tuning.learning_rates"
    assert "0.01 of rope" in error.value.problem
    assert "0.005" in error.value.fix
    # No run is reported, and what is finished is not repeated.
    assert len(training.seen) == 6
    climb(recipe, tmp_path / "out", "--extend-grid")
    assert len(training.seen) == len(set(training.seen)) == 6 + 2 + 16
    # The rates that were added count without the option, too.
    assert climb(recipe, tmp_path / "out") == 0
    assert len(training.seen) == 24


def test_a_rate_that_diverges_is_not_the_best(content, tmp_path, fake):
    content["tuning"]["checked_sizes"] = ["large"]
    training = fake({"rope": 0.02, "tape": 0.08}, highest=0.025)
    recipe = write_recipe(content, tmp_path)
    output = tmp_path / "out"
    assert climb(recipe, output) == 0
    ladder = read_ladder(output / "ladder.json")
    for point in ladder.points:
        # The best rate of TAPE diverges.
        assert {rate.rate for rate in point.learning_rates.values()} == {0.02}
    losses = tuned_losses(ladder.points[0].tuning["rope"])
    assert losses == {0.01: 5.0, 0.02: 4.0, 0.04: math.inf}
    assert "diverged" in (output / "ladder.md").read_text()
    assert "diverged" in (output / "report.html").read_text()
    # It is not tried again, here or on another machine.
    count = len(training.seen)
    assert climb(recipe, output) == 0
    (tmp_path / "new").mkdir()
    shutil.copy(output / "ladder.json", tmp_path / "new")
    assert climb(recipe, tmp_path / "new") == 0
    assert len(training.seen) == count


def test_a_grid_is_extended_to_rates_that_do_not_diverge(recipe, tmp_path, fake):
    fake({"rope": 0.02, "tape": 0.02}, highest=0.003)
    assert climb(recipe, tmp_path / "out", "--extend-grid") == 0
    (tuned, *_) = read_ladder(tmp_path / "out" / "ladder.json").points
    assert tuned.learning_rates["rope"].rate == 0.0025
    assert tuned_losses(tuned.tuning["rope"])[0.005] == math.inf


def test_only_runs_of_tunings_may_diverge(recipe, tmp_path):
    ladder = plan_of(recipe, tmp_path / "out")
    assert all(run.may_diverge for run in ladder.tuning_runs)
    assert not any(run.may_diverge for run in ladder.final_runs)


def test_checked_sizes_try_half_and_twice_the_rate(content, tmp_path, fake):
    content["tuning"]["checked_sizes"] = ["large"]
    fake({"rope": 0.02, "tape": 0.02})
    assert climb(write_recipe(content, tmp_path), tmp_path / "out") == 0
    ladder = read_ladder(tmp_path / "out" / "ladder.json")
    checked = [point for point in ladder.points if point.size == "large"]
    assert [sorted(point.tuning) for point in checked] == [["content", "rope"], []]
    assert {run.variant for run in checked[0].tuning["rope"].runs} == {"0.01", "0.02", "0.04"}
    assert checked[0].learning_rates["rope"].taken_from == "small, 0.2 tokens per parameter"


def test_an_interrupted_ladder_continues(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02}, interrupt_at=10)
    assert climb(recipe, tmp_path / "out") == EXIT_RESTART
    assert 6 < len(training.seen) < 22
    ladder = read_ladder(tmp_path / "out" / "ladder.json")
    assert sum(len(point.comparison.runs) for point in ladder.points) == len(training.seen) - 6
    training.interrupt_at = None
    assert climb(recipe, tmp_path / "out") == 0
    assert len(training.seen) == len(set(training.seen)) == 22


def test_a_ladder_continues_elsewhere_from_its_record(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.08})
    climb(recipe, tmp_path / "out", "--extend-grid")
    count = len(training.seen)
    (tmp_path / "new").mkdir()
    record = (tmp_path / "out" / "ladder.json").read_text()
    (tmp_path / "new" / "ladder.json").write_text(record)
    assert climb(recipe, tmp_path / "new") == 0
    assert len(training.seen) == count
    assert json.loads((tmp_path / "new" / "ladder.json").read_text()) == json.loads(record)


def test_a_record_completes_a_ladder_that_has_begun(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02})
    climb(recipe, tmp_path / "out")
    climb(recipe, tmp_path / "new", "--encodings=rope")
    count = len(training.seen)
    shutil.copy(tmp_path / "out" / "ladder.json", tmp_path / "new")
    assert climb(recipe, tmp_path / "new") == 0
    assert len(training.seen) == count


def test_a_record_with_other_settings_is_refused(content, tmp_path, fake):
    fake({"rope": 0.02, "tape": 0.02})
    climb(write_recipe(content, tmp_path), tmp_path / "out", "--encodings=rope")
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "out" / "ladder.json", tmp_path / "new")
    content["settings"]["optimizer.weight_decay"] = 0.2
    with pytest.raises(FileError, match="other settings .*weight_decay"):
        climb(write_recipe(content, tmp_path), tmp_path / "new")


def test_more_variants_add_runs(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02})
    assert climb(recipe, tmp_path / "out", "--encodings=rope") == 0
    assert len(training.seen) == 3 + 8
    assert climb(recipe, tmp_path / "out") == 0
    assert len(training.seen) == len(set(training.seen)) == 22


def test_results_of_variants_that_are_not_selected_stay_in_the_record(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02})
    assert climb(recipe, tmp_path / "out") == 0
    record = read_ladder(tmp_path / "out" / "ladder.json")
    # The baseline, whose parameters determine the numbers of steps, stays that of the recipe.
    assert climb(recipe, tmp_path / "out", "--encodings=content") == 0
    assert read_ladder(tmp_path / "out" / "ladder.json") == record
    assert len(training.seen) == 22


def test_only_selected_variants_are_executed(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02})
    assert climb(recipe, tmp_path / "out", "--encodings= content") == 0
    assert len(training.seen) == 3 + 8
    assert all("tape" in name for name in training.seen)


def test_seeds_of_an_earlier_recipe_are_not_recorded(content, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02})
    content["tokens_per_parameter"] = [0.2]
    assert climb(write_recipe(content, tmp_path), tmp_path / "out") == 0
    # Seed 1 was reported, and now rates are chosen from it.
    content["seeds"] = [3]
    content["tuning"]["seeds"] = [1]
    assert climb(write_recipe(content, tmp_path), tmp_path / "out") == 0
    ladder = read_ladder(tmp_path / "out" / "ladder.json")
    reported = {run.seed for point in ladder.points for run in point.comparison.runs}
    tuned = {
        run.seed for point in ladder.points for part in point.tuning.values() for run in part.runs
    }
    assert (reported, tuned) == ({3}, {1})
    assert len(training.seen) == (6 + 8) + (6 + 4)


def test_a_signal_at_the_end_of_tuning_ends_the_ladder(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02}, interrupt_at=5)
    # The last run of the tuning still finishes.
    assert climb(recipe, tmp_path / "out") == EXIT_RESTART
    assert len(training.seen) == 6


def test_tasks_of_an_array_tune_first(recipe, tmp_path, fake, capsys):
    training = fake({"rope": 0.02, "tape": 0.08})
    output = tmp_path / "out"
    assert climb(recipe, output, "--check") == 0
    assert capsys.readouterr().out.startswith("2 tunings of learning rates (6 runs), 16 other runs")
    with pytest.raises(ConfigError, match="^--only"):
        climb(recipe, output, "--only=2")
    assert climb(recipe, output, "--only=0") == 0
    assert len(training.seen) == 3
    assert climb(recipe, output, "--only=1", "--extend-grid") == 0
    assert len(training.seen) == 3 + 5
    for task in range(2, 18):
        assert climb(recipe, output, f"--only={task}") == 0
    assert len(training.seen) == len(set(training.seen)) == 24
    with pytest.raises(ConfigError, match="^--only is 18"):
        climb(recipe, output, "--only=18")
    assert not (output / "ladder.json").exists()
    assert climb(recipe, output, "--report-only") == 0
    assert len(training.seen) == 24
    assert (
        sum(len(point.comparison.runs) for point in read_ladder(output / "ladder.json").points)
        == 16
    )


def test_an_interrupted_tuning_of_an_array_is_to_be_restarted(recipe, tmp_path, fake):
    training = fake({"rope": 0.02, "tape": 0.02}, interrupt_at=1)
    assert climb(recipe, tmp_path / "out", "--only=0") == EXIT_RESTART
    assert len(training.seen) < 3
    training.interrupt_at = None
    assert climb(recipe, tmp_path / "out", "--only=0") == 0
    assert len(training.seen) == len(set(training.seen)) == 3


def test_the_estimate_counts_the_runs_that_are_not_finished(recipe, tmp_path, fake):
    fake({"rope": 0.02, "tape": 0.02})
    ladder = plan_of(recipe, tmp_path / "out")
    flops = sum(run.flops for run in ladder.runs)
    # 22 runs on two cores.
    seconds = (22 * START_SECONDS + flops / CORE_FLOPS) / 2
    expected = f"{flops:.2g} FLOPs of training, about {duration(seconds)} on 2 CPU cores"
    assert expected in ladder.estimate(2, None)
    assert "about" not in ladder.estimate(2, "unknown")
    climb(recipe, tmp_path / "out", "--encodings=rope")
    ladder = plan_of(recipe, tmp_path / "out")
    done = sum(run.flops for run in ladder.runs if run not in ladder.unfinished)
    # The 11 finished runs took 40 s each.
    speed = done / (11 * (40 - START_SECONDS))
    assert f": {speed / 1e9:.2g} GFLOP/s" in ladder.estimate(2, None)


def test_the_description_has_the_steps_of_each_point(recipe, tmp_path):
    ladder = plan_of(recipe, tmp_path / "out")
    _, *lines = ladder.describe().splitlines()
    steps = ladder.reported["small, 0.2 tokens per parameter"].runs[0].config.train.steps
    parameters = f"{parameters_of(16):,} parameters"
    expected = (
        f"small, 0.2 tokens per parameter: {parameters}, {steps} steps, {64 * steps:,} tokens"
    )
    assert lines[0].strip() == expected
    assert len(lines) == 4


def test_equal_losses_extend_no_grid(recipe, tmp_path, fake):
    """A model that learns nothing has no best rate."""
    training = fake({"rope": 0.02, "tape": 0.02})
    training.loss = lambda ratio: 3.0
    with pytest.raises(ConfigError) as error:
        climb(recipe, tmp_path / "out", "--extend-grid")
    assert error.value.subject == "tuning.learning_rates"
    assert "learn nothing" in error.value.fix
    assert len(training.seen) == 6
    # The tables show the rates and losses.
    assert "0.04" in (tmp_path / "out" / "ladder.md").read_text()


CHANGES = {
    "a typo": ({"seed": [1]}, "seed"),
    "no baseline": ({"variants": {"rope": "rope"}}, "variants"),
    "an unknown encoding": ({"variants": {"a": "rope", "b": "ropee"}}, "variants.b"),
    "a rate of its own": ({"variants": {"a": "rope", "b": "rope+optimizer.lr=1"}}, "variants.b"),
    "a comma": ({"variants": {"a": "rope", "b,c": "tape"}}, "variants.b,c"),
    "a path": ({"sizes": {"../x": SMALL}}, "sizes.../x"),
    "a repeated variant": ({"variants": {"a": "rope", "b": "rope"}}, "variants.b"),
    "a repeated seed": ({"seeds": [1, 1]}, "seeds"),
    "shared seeds": ({"seeds": [9]}, "tuning.seeds"),
    "descending sizes": ({"sizes": {"large": LARGE, "small": SMALL}}, "tuning.sizes"),
    "equal sizes": ({"sizes": {"small": SMALL, "other": SMALL}}, "sizes"),
    "too few steps": ({"tokens_per_parameter": [0.01]}, "tokens_per_parameter"),
    "descending amounts": ({"tokens_per_parameter": [2.0, 1.0]}, "tokens_per_parameter"),
    "an unknown setting": ({"settings": {"model.x": 1}}, "model.x"),
    "an unknown recipe": ({"recipe": "missing"}, "recipe missing"),
    "a task's size": (
        {"tasks": {"copying": {"recipe": "compare/selective_copy", "sizes": ["x"]}}},
        "tasks.copying.sizes",
    ),
}


@pytest.mark.parametrize("change, key", CHANGES.values(), ids=CHANGES)
def test_invalid_recipes_are_refused(content, tmp_path, change, key):
    recipe = write_recipe({**content, **change}, tmp_path)
    with pytest.raises(ConfigError) as error:
        plan_of(recipe, tmp_path / "out")
    assert key in error.value.subjects
    assert not (tmp_path / "out").exists()


def test_tuning_requires_a_validation_loss(content, tmp_path):
    settings = {"train.eval_interval": 0}
    content["tasks"] = {"copying": {"recipe": "compare/selective_copy", "settings": settings}}
    with pytest.raises(ConfigError, match="tuned by the validation loss") as error:
        plan_of(write_recipe(content, tmp_path), tmp_path / "out")
    assert error.value.subject == "train.eval_interval"


@pytest.mark.parametrize("key", ["train.steps", "optimizer.lr"])
def test_settings_that_the_ladder_determines_are_refused(content, tmp_path, key):
    recipe = write_recipe(content, tmp_path)
    with pytest.raises(ConfigError, match=key):
        plan_of(recipe, tmp_path / "out", f"--{key}=1")
    with pytest.raises(ConfigError, match=key):
        plan_of(recipe, tmp_path / "out", f"--{key}", "1")
    content["settings"][key] = 1
    with pytest.raises(ConfigError, match=key):
        plan_of(write_recipe(content, tmp_path), tmp_path / "out")


def test_names_of_a_record_lead_nowhere_else(recipe, tmp_path, fake):
    fake({"rope": 0.02, "tape": 0.02})
    climb(recipe, tmp_path / "out", "--encodings=rope")
    record = json.loads((tmp_path / "out" / "ladder.json").read_text())
    record["points"][0]["size"] = ".."
    new = tmp_path / "parent" / "new"
    new.mkdir(parents=True)
    (new / "ladder.json").write_text(json.dumps(record))
    plan_of(recipe, new)
    assert list(new.parent.iterdir()) == [new]


def test_a_record_with_unknown_variants_is_refused(recipe, tmp_path, fake):
    fake({"rope": 0.02, "tape": 0.02})
    climb(recipe, tmp_path / "out", "--encodings=rope")
    file = tmp_path / "out" / "ladder.json"
    record = json.loads(file.read_text())
    for variants in ({}, {"other": "rope"}):
        file.write_text(json.dumps({**record, "variants": variants}))
        with pytest.raises(FileError, match="variants"):
            plan_of(recipe, tmp_path / "out")


TUNING_CHANGES = {
    "steps of the grid": ({"learning_rates": [0.01, 0.03, 0.09]}, "tuning.learning_rates"),
    "two rates": ({"learning_rates": [0.01, 0.02]}, "tuning.learning_rates"),
    "an unknown size": ({"sizes": ["small", "x"]}, "tuning.sizes"),
    "not the smallest size": ({"sizes": ["large"]}, "tuning.sizes"),
    "an unknown amount": ({"tokens_per_parameter": [0.2, 7.0]}, "tuning.tokens_per_parameter"),
    "a repeated seed": ({"seeds": [9, 9]}, "tuning.seeds"),
    "a size that is tuned and checked": ({"checked_sizes": ["small"]}, "tuning.checked_sizes"),
    "an unknown checked size": ({"checked_sizes": ["x"]}, "tuning.checked_sizes"),
}


@pytest.mark.parametrize("change, key", TUNING_CHANGES.values(), ids=TUNING_CHANGES)
def test_invalid_tunings_are_refused(content, tmp_path, change, key):
    content["tuning"] |= change
    with pytest.raises(ConfigError) as error:
        plan_of(write_recipe(content, tmp_path), tmp_path / "out")
    assert key in error.value.subjects


@pytest.mark.parametrize(
    "options",
    [["--recipe=x"], ["--seeds=3"], ["--evaluation=x"], ["--encodings=alibi"], ["--jobs=0"]],
)
def test_options_that_do_not_apply_are_refused(recipe, tmp_path, options):
    with pytest.raises(ConfigError):
        climb(recipe, tmp_path / "out", *options)


def test_the_recipe_of_the_repository_is_valid(tmp_path):
    config = read_recipe("compare/ladder")
    variants = variants_of(config)
    points = points_of(config, variants["rope"], tmp_path / "out", ())
    assert list(variants)[0] == "rope"
    assert len({point.size for point in points}) >= 3
    for point in points:
        # Sizes are named after their parameters.
        assert f"{round(point.parameters / 1000)}k" == point.size
        for variant in variants.values():
            parsed = parse_run_config([*point.recipe, *variant.arguments])
            validate(parsed, 1)
            settings = parsed.evaluation.perplexity
            if point.tokens_per_parameter is not None:
                assert (settings.data, settings.split) == (parsed.data.prefix, parsed.data.split)
                length = parsed.model.seq_length
                assert settings.lengths == [length, 2 * length, 4 * length]


def test_a_real_ladder(content, tmp_path, monkeypatch):
    """Trained and evaluated by the programs; the page has a table of rates."""
    monkeypatch.setattr(
        compare,
        "start_program",
        lambda module, arguments, log, slot, **_: start_python(["-m", module, *arguments], log),
    )
    content["variants"] = {"rope": "rope", "alibi": "alibi"}
    content["tokens_per_parameter"] = [0.2]
    content["seeds"] = [1]
    output = tmp_path / "out"
    compare.main(
        [f"--ladder={write_recipe(content, tmp_path)}", f"--output={output}", "--extend-grid"]
    )
    ladder = read_ladder(output / "ladder.json")
    for point in ladder.points:
        tasks = {score.task for run in point.comparison.runs for score in run.scores}
        assert tasks == {"perplexity", TRAINING}
        assert len(point.comparison.runs) == 2
    page = (output / "report.html").read_text()
    tables = (output / "ladder.md").read_text()
    for text in (page, tables):
        assert "alibi" in text
        assert "large, 0.2 tokens per parameter" in text
