"""Recipes of fine-tuning: complete with the models that they begin with, and the paper's has the paper's numbers."""

from pathlib import Path

import pytest
import yaml

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.config.examples import examples_of
from megatron_tape.config.schema import config_dict
from megatron_tape.extension.base import with_base_settings

RECIPES = Path(__file__).parents[2] / "pretrain" / "recipes"
BEGINS_WITH = {"scrolls": "tape_155m", "tiny": "tape_demo"}
"""The recipe of the model that each one trains further."""


@pytest.fixture(scope="module", params=BEGINS_WITH)
def recipe(request, tmp_path_factory):
    """The name of a recipe, what it begins with, and its settings, those of the model as if read from that."""
    base = parse_run_config(["--config", str(RECIPES / f"{BEGINS_WITH[request.param]}.yaml")])
    model = tmp_path_factory.mktemp(request.param) / "model.yaml"
    model.write_text(yaml.safe_dump({"model": config_dict(base)["model"]}))
    recipe = RECIPES / "finetune" / f"{request.param}.yaml"
    return request.param, base, parse_run_config(["--config", str(model), "--config", str(recipe)], with_base_settings)


def test_every_recipe_is_tested():
    assert {path.stem for path in (RECIPES / "finetune").glob("*.yaml")} == BEGINS_WITH.keys()


def test_a_recipe_trains_all_of_its_model_on_targets(recipe):
    name, base, config = recipe
    for world_size in (1, 4) if name == "scrolls" else (1, 2):
        validate(config, world_size)
    assert config.model.hidden_size == base.model.hidden_size and config.extension.trains == ["all"]
    assert config.data.source == "examples" and config.data.loss_on == "answers"
    assert config.model.position.rope_scaling_factor == 1
    assert config.data.tokenizer == base.data.tokenizer


def test_the_paper_s_numbers(recipe):
    name, base, config = recipe
    if name != "scrolls":
        assert config.model.seq_length == base.model.seq_length
        return
    train, examples = config.train, examples_of(config.data.examples)
    assert (train.steps, train.global_batch_size, config.optimizer.lr) == (1000, 64, 1e-5)
    assert config.schedule.warmup_steps == 0.1 * train.steps
    # The released code's.
    assert (config.model.seq_length, examples.target_tokens, examples.template) == (8192, 200, "{input}")
