"""Recipes: each is valid for its numbers of processes, and those of the papers have the settings of
the papers.
"""

import difflib
import re
import shlex
from pathlib import Path

import pytest
import yaml
from configurations import with_values
from plans import RECIPES, recipe

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.combinations import validate
from megatron_tape.config.schema import config_dict
from megatron_tape.evaluation.model_source import info_of_run
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position import BUILT_IN, encoding_of
from pretrain import evaluate

WINDOW = ("sliding_window: 64", "full_attention_every: 3")
LAYER_TYPES = {
    "swan": ("rope", (*WINDOW, "layers_without_positions: 3")),
    "tape_window": ("tape", WINDOW),
}
"""Encoding and settings of recipes whose layers differ from each other."""
ENCODINGS = ["yarn", *LAYER_TYPES, *(encoding.name for encoding in BUILT_IN)]
SYNTHETIC = [
    f"synthetic/{task}{size}"
    for task in ("addition", "selective_copy", "grid_navigation")
    for size in ("", "_small")
]
# Numbers of processes: first the one in the recipe's description, then others that must be valid
# too.
WORLD_SIZES = {
    "tape_demo": (1, 2),
    "rope_demo": (1, 2),
    "tape_155m": (4, 1, 8, 16),
    "tape_1b": (8, 1, 16, 128),
    "tape_7b": (64, 8, 16, 512),
    "tape_70b": (512, 32, 64, 4096),
    "tape_405b": (4096, 256, 1024),
}
WORLD_SIZES |= {f"encodings/{name}": (1, 2) for name in ENCODINGS}
WORLD_SIZES |= {f"{name}_{encoding}": (1, 2) for name in SYNTHETIC for encoding in ("tape", "rope")}


def lines_of(name):
    return [
        line
        for line in (RECIPES / f"{name}.yaml").read_text().splitlines()
        if not line.startswith("#")
    ]


def changed_lines(a, b):
    return [line for line in difflib.ndiff(lines_of(a), lines_of(b)) if line[:2] in ("- ", "+ ")]


def test_every_recipe_is_tested():
    found = {
        path
        for pattern in ("*", "encodings/*", "synthetic/*")
        for path in RECIPES.glob(f"{pattern}.yaml")
    }
    assert {str(path.relative_to(RECIPES).with_suffix("")) for path in found} == WORLD_SIZES.keys()
    assert {path.stem for path in (RECIPES / "finetune").glob("*")} == BASE_RECIPES.keys()


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_recipe_is_valid_for_its_numbers_of_processes(name):
    config = recipe(name)
    for world_size in WORLD_SIZES[name]:
        validate(config, world_size)
    assert config.logging.directory == f"runs/{Path(name).name}"
    assert config.checkpoint.directory == f"runs/{Path(name).name}/checkpoints"


@pytest.mark.parametrize(
    "tape, rope",
    [("tape_demo", "rope_demo"), *((f"{name}_tape", f"{name}_rope") for name in SYNTHETIC)],
)
def test_recipes_of_tape_and_rope_differ_in_one_line(tape, rope):
    assert changed_lines(tape, rope) == [
        "-   position_encoding: tape",
        "+   position_encoding: rope",
    ]


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_recipe_of_an_encoding_differs_from_the_demo_only_in_the_encoding(name):
    if name == "tape":
        expected = []
    elif name == "yarn":
        scaling = ["rope_scaling_type: yarn", "rope_scaling_factor: 4"]
        scaling.append("rope_original_seq_length: 64")
        changed = ["-   position_encoding: tape", "+   position_encoding: rope", "+   position:"]
        expected = [*changed, *(f"+     {line}" for line in scaling)]
    elif name in LAYER_TYPES:
        encoding, settings = LAYER_TYPES[name]
        expected = [f"+   {line}" for line in settings]
        if encoding != "tape":
            changed = ["-   position_encoding: tape", f"+   position_encoding: {encoding}"]
            expected = [*changed, *expected]
    else:
        expected = ["-   position_encoding: tape", f"+   position_encoding: {name}"]
    assert changed_lines("tape_demo", f"encodings/{name}") == expected


def test_the_155m_recipe_has_the_settings_of_the_paper():
    config = recipe("tape_155m")
    model = config.model
    train = config.train
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (12, 768, 12)
    assert (model.ffn_hidden_size, train.steps, train.global_batch_size) == (3072, 10_000, 512)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.01)
    assert (encoding_of(model).mlp_width, model.seq_length, train.precision) == (48, 1024, "bf16")
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("polynomial", 200)
    assert config.deepspeed.zero_stage == 2


def test_the_flops_of_the_rope_model_equal_those_of_the_paper_without_masking():
    # The paper reports 321.10 GFLOPs for a forward pass over 1,024 tokens, including the masked
    # half of the keys.
    model = with_values(recipe("tape_155m").model, position_encoding="rope")
    forward = flops_per_token(model) // 3 * model.seq_length
    masked_half = model.num_layers * 2 * 2 * model.hidden_size * model.seq_length**2 // 2
    assert (forward + masked_half) / 1e9 == pytest.approx(321.10, rel=1e-3)


@pytest.mark.parametrize(
    "path", sorted((RECIPES / "evaluate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_recipe_of_evaluations_is_valid(path):
    _, tasks = evaluate.read_command(["--config", str(path), "--model", "runs/demo/tape"])
    assert tasks


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_evaluation_in_the_recipe_of_a_synthetic_task_matches_its_training(name):
    config = recipe(f"{name}_tape")
    generator = config.data.generator
    assert generator.vocab_size == config.model.vocab_size
    assert config.data.cache_directory is None
    text = (RECIPES / f"{name}_tape.yaml").read_text().replace("\\\n#", "")
    (command,) = re.findall(r"#\s+python -m pretrain.evaluate (.*)", text)
    options, (task,) = evaluate.read_command(shlex.split(command))
    assert options.model == config.logging.directory
    task.check(info_of_run(config))
    if task.name == "addition":
        assert task.settings.digits == generator.digits
    else:
        assert task.generators()["IID"] == generator


BASE_RECIPES = {"scrolls": "tape_155m", "tiny": "tape_demo"}
"""Recipe of the model that each recipe of fine-tuning starts from."""


@pytest.mark.parametrize("name", BASE_RECIPES)
def test_a_recipe_of_fine_tuning_trains_all_parameters_on_the_targets(name, tmp_path):
    base = recipe(BASE_RECIPES[name])
    # The settings that a run would read from the model that it starts from.
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump({"model": config_dict(base)["model"]}))
    config = parse_run_config(
        ["--config", str(model), "--config", str(RECIPES / "finetune" / f"{name}.yaml")]
    )
    for world_size in (1, 2):
        validate(config, world_size)
    assert config.model.hidden_size == base.model.hidden_size
    assert config.extension.trains == ["all"]
    assert config.data.source == "examples"
    assert config.data.loss_on == "answers"
    assert config.data.tokenizer == base.data.tokenizer


def test_fine_tuning_for_scrolls_has_the_settings_of_the_released_code():
    text = (RECIPES / "finetune" / "scrolls.yaml").read_text()
    settings = yaml.safe_load(text)
    assert (settings["train"]["steps"], settings["train"]["global_batch_size"]) == (1000, 64)
    assert settings["optimizer"]["lr"] == 1e-5
    assert settings["schedule"]["warmup_steps"] == 100
    examples = settings["data"]["examples"]
    assert settings["model"]["seq_length"] == 8192
    assert (examples["target_tokens"], examples["template"]) == (200, "{input}")
