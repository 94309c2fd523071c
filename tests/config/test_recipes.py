import difflib
from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position import BUILT_IN, encoding_of, with_values
from pretrain.evaluate import read_command

RECIPES = Path(__file__).parents[2] / "pretrain" / "recipes"
# Numbers of processes: what each recipe is meant for, then others that must work as well.
WORLD_SIZES = {
    "tape_demo": (1, 2),
    "rope_demo": (1, 2),
    "tape_155m": (4, 1, 8, 64),
    "tape_1b": (8, 2, 16, 64),
    "tape_7b": (64, 2, 8, 2048),
    "tape_70b": (512, 8, 64, 8192),
}


def recipe(name):
    return parse_run_config(["--config", str(RECIPES / f"{name}.yaml")])


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == WORLD_SIZES.keys()


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_a_recipe_parses_and_can_run_where_it_says(name):
    config = recipe(name)
    for world_size in WORLD_SIZES[name]:
        validate(config, world_size)
    assert config.logging.directory == f"runs/{name}"
    assert config.checkpoint.directory == f"runs/{name}/checkpoints"


def test_the_demos_differ_only_in_the_position_encoding():
    tape, rope = ((RECIPES / f"{name}_demo.yaml").read_text().splitlines() for name in ("tape", "rope"))
    changed = [line for line in difflib.ndiff(tape, rope) if line[:2] in ("- ", "+ ")]
    assert changed == ["-   position_encoding: tape", "+   position_encoding: rope"]


ENCODINGS = sorted(path.stem for path in (RECIPES / "encodings").glob("*.yaml"))


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encodings_recipe_differs_from_the_demo_in_its_line_alone(name):
    validate(recipe(f"encodings/{name}"), 1)
    validate(recipe(f"encodings/{name}"), 2)
    demo, own = (
        [line for line in (RECIPES / path).read_text().splitlines() if not line.startswith("#")]
        for path in ("tape_demo.yaml", f"encodings/{name}.yaml")
    )
    changed = [line for line in difflib.ndiff(demo, own) if line[:2] in ("- ", "+ ")]
    expected = ["-   position_encoding: tape", f"+   position_encoding: {'rope' if name == 'yarn' else name}"]
    if name == "yarn":
        expected += ["+   rope_scaling_type: yarn", "+   rope_scaling_factor: 4", "+   rope_original_seq_length: 64"]
    assert changed == ([] if name == "tape" else expected)


def test_every_encoding_has_a_recipe():
    assert set(ENCODINGS) == {"yarn", *(encoding.name for encoding in BUILT_IN)}


def test_the_155m_recipe_is_the_papers():
    config = recipe("tape_155m")
    model, train = config.model, config.train
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size) == (
        12,
        768,
        12,
        3072,
    )
    assert (encoding_of(model).mlp_width, model.seq_length) == (48, 1024)
    assert (train.global_batch_size, train.steps, train.precision) == (512, 10_000, "bf16")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.01)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("polynomial", 0.02 * train.steps)
    assert config.deepspeed.zero_stage == 2


def test_the_papers_flops_of_the_rope_model_are_counted_where_no_key_is_masked():
    # The paper's 321.10 GFLOPs are a forward pass over 1,024 tokens; it counts the masked half of the keys, too.
    model = with_values(recipe("tape_155m").model, position_encoding="rope")
    forward = flops_per_token(model) // 3 * model.seq_length
    masked_half = model.num_layers * 2 * 2 * model.hidden_size * model.seq_length**2 // 2
    assert (forward + masked_half) / 1e9 == pytest.approx(321.10, rel=1e-3)


@pytest.mark.parametrize("path", sorted((RECIPES / "evaluate").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_of_evaluations_parses(path):
    _, tasks = read_command(["--config", str(path), "--model", "runs/demo/tape"])
    assert tasks
