"""How far activations move at several widths, with muP and without."""

import re

import pytest

from megatron_tape.errors import ConfigError
from pretrain import coordinate_check

RECIPE = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 1, ffn_hidden_size: 32, seq_length: 18, vocab_size: 32}
data: {generator: {task: addition, digits: 5}}
optimizer: {lr: 4.0e-3}
train: {steps: 100, micro_batch_size: 16, global_batch_size: 32, precision: fp32, eval_interval: null}
logging: {sample_tokens: 0, tensorboard: false}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return ["--recipe", str(path), "--output", str(tmp_path / "out")]


def test_activations_move_equally_far_at_all_widths_with_mup_and_further_in_wider_models_without(
    recipe, tmp_path, capsys
):
    coordinate_check.main([*recipe, "--widths", "1,4,16", "--steps", "3"])
    found = re.findall(r"^(\w[\w ]*?) +(-?\d\.\d\d) +(-?\d\.\d\d)$", capsys.readouterr().out, re.M)
    slopes = {name: (float(with_mup), float(without)) for name, with_mup, without in found}
    assert slopes.keys() == {"attention output", "MLP output", "last hidden state", "position state", "logits"}
    for name in ("attention output", "MLP output", "last hidden state"):
        with_mup, without = slopes[name]
        assert abs(with_mup) < 0.35 and without > 0.6, (name, slopes)
    assert (tmp_path / "out" / "coordinate_check.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_the_recipe_asks_for_is_left_out(recipe):
    _, configs = coordinate_check.read_command([*recipe, "--train.profile", "{steps: [10, 12]}"])
    profiles = [config.train.profile for of_width in configs.values() for config in of_width.values()]
    assert profiles and not any(profiles)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--widths", "2"], "--widths is 2; give at least two different whole numbers, such as 1,2,4"),
        (["--widths", "1,\u0662"], "--widths is 1,\u0662; give"),
        (["--widths", "1," + "9" * 5000], "give at least two different whole numbers"),
        (["--optimizer.mup_base", "{hidden_size: 16}"], "optimizer.mup_base is set"),
        (["--optimizer.kind", "muon"], "at 1 times the width: optimizer.mup_base"),
    ],
)
def test_mistakes_are_refused_before_anything_is_trained(recipe, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        coordinate_check.read_command([*recipe, *given])
