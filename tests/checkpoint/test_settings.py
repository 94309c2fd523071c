import dataclasses

from configurations import MODEL

from megatron_tape.checkpoint.settings import model_differences
from megatron_tape.config.schema import ModelConfig


def test_differences_between_models_are_named_with_both_values():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, dict(saved)) == []
    assert model_differences(saved, saved | {"hidden_size": 512, "token_mixing": "per_head"}) == [
        "model.hidden_size: checkpoint 64, configuration 512",
        "model.token_mixing: checkpoint full, configuration per_head",
    ]
    assert model_differences(saved, saved | {"new": 1}) == ["model.new: checkpoint absent, configuration 1"]
    assert model_differences(saved | {"old": None}, saved) == ["model.old: checkpoint None, configuration absent"]


def test_a_default_spelled_out_is_no_difference():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, saved | {"num_query_groups": 8, "position_mlp_size": 32, "kv_channels": 8}) == []
    assert model_differences(saved, saved | {"num_query_groups": 4}) == [
        "model.num_query_groups: checkpoint 8, configuration 4"
    ]
