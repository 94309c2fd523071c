"""Recipes of synthetic tasks: each can run, and the evaluation that its head names is of what it trains."""

import difflib
import re
import shlex
from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.evaluation.model_source import made_by
from megatron_tape.synthetic.settings import generator_of
from pretrain import evaluate

RECIPES = Path(__file__).parents[2] / "pretrain" / "recipes" / "synthetic"
TASKS = ("addition", "selective_copy", "grid_navigation")
NAMES = [f"{task}{size}" for task in TASKS for size in ("", "_small")]
FILES = [f"{name}_{encoding}" for name in NAMES for encoding in ("tape", "rope")]


def read(file, *overrides):
    return parse_run_config(["--config", str(RECIPES / f"{file}.yaml"), *overrides])


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES.glob("*")} == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_can_run_on_one_process_and_on_more(file):
    config = read(file)
    for world_size in (1, 2):
        validate(config, world_size)
    assert config.logging.directory == f"runs/{file}" and config.data.cache_directory is None
    assert generator_of(config.data.generator).vocab_size == config.model.vocab_size


@pytest.mark.parametrize("name", NAMES)
def test_tape_and_rope_differ_in_one_line(name):
    tape, rope = ((RECIPES / f"{name}_{encoding}.yaml").read_text().splitlines() for encoding in ("tape", "rope"))
    changed = [line for line in difflib.ndiff(tape, rope) if line[:2] in ("- ", "+ ")]
    assert changed == ["-   position_encoding: tape", "+   position_encoding: rope"]


@pytest.mark.parametrize("name", NAMES)
def test_the_evaluation_that_a_recipe_names_is_of_what_it_trains(name):
    config = read(f"{name}_tape")
    text = (RECIPES / f"{name}_tape.yaml").read_text().replace("\\\n#", "")
    (command,) = re.findall(r"#\s+python -m pretrain.evaluate (.*)", text)
    options, (task,) = evaluate.read_command(shlex.split(command))
    assert options.model == config.logging.directory
    task.check(made_by(config).info)
    generator = generator_of(config.data.generator)
    trained = task.generators()["IID"] if task.name != "addition" else task.settings.digits
    assert trained == (generator if task.name != "addition" else generator.digits)


@pytest.mark.parametrize(
    "file, overrides, trained",
    [
        ("addition_tape", ["--data.generator", "{task: addition, digits: 20}", "--model.seq_length", "64"], 64),
        ("grid_navigation_tape", ["--data.generator", "{task: grid_navigation, dimensions: 1}"], 256),
    ],
)
def test_the_variants_that_a_recipe_names_can_run(file, overrides, trained):
    config = read(file, *overrides)
    validate(config, 1)
    assert config.model.seq_length == trained
    head = " ".join((RECIPES / f"{file}.yaml").read_text().partition("\nmodel:")[0].replace("\n#", "").split())
    assert overrides[1] in head


def test_paper_size_recipes_are_the_papers():
    config = read("addition_tape")
    model, train = config.model, config.train
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size) == (
        16,
        1024,
        16,
        2048,
    )
    assert (train.global_batch_size, train.steps, config.optimizer.lr) == (512, 20_000, 1e-4)
    config = read("selective_copy_tape")
    model, train = config.model, config.train
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 64, 2)
    assert (train.steps * train.global_batch_size) // 1000 == 100 and train.global_batch_size == 64
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 0.05)
    config = read("grid_navigation_tape")
    assert config.model.num_layers == 4 and config.train.steps * config.train.global_batch_size // 1000 == 700
    assert (config.train.global_batch_size, config.optimizer.lr, config.optimizer.weight_decay) == (128, 3e-4, 0.05)
