"""Differences between settings and those saved with a checkpoint, and how they are reported."""

import copy
import dataclasses

from configurations import MODEL
from models import small_model

from megatron_tape.checkpoint.settings import changes, model_differences
from megatron_tape.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig, config_dict


def config(**train):
    return RunConfig(
        model=small_model(), data=DataConfig(prefix="a"), train=TrainConfig(steps=4, global_batch_size=2, **train)
    )


def test_neither_equal_settings_nor_those_unknown_to_an_older_checkpoint_are_reported():
    saved = config_dict(config())
    assert changes(saved, config()) == []
    older = copy.deepcopy(saved)
    for section in older.values():
        for key in list(section)[1:]:
            del section[key]
    unknown = {"train.steps", "train.global_batch_size", "model.seq_length"}  # no defaults, always present
    found = [line for line in changes(older, config()) if "order" not in line]
    # What bf16 runs did before these settings existed.
    former = ("model.position_state_precision", "deepspeed.communication_precision")
    assert [line for line in found if line.startswith(former)] == [
        f'{key}: was "bf16", is now "fp32"' for key in former
    ]
    found = [line for line in found if not line.startswith(former)]
    older["train"]["precision"] = "fp32"
    assert not any(line.startswith(former) for line in changes(older, config()))
    assert {line.partition(":")[0] for line in found} <= unknown
    assert changes({}, config(precision="fp32"))[-2].startswith('train.precision: was "bf16", is now "fp32"')


def test_a_change_of_the_order_of_the_data_is_reported_last():
    *_, last = changes(config_dict(config()), config(seed=5))
    assert last == "train.seed: the data comes in another order than in an uninterrupted run"
    assert changes(config_dict(config()), config(hang_timeout=5.0)) == []


def test_differences_between_models_are_named_with_both_values():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, dict(saved)) == []
    assert set(model_differences(saved, saved | {"hidden_size": 512, "token_mixing": "per_head"})) == {
        "model.hidden_size: checkpoint 64, configuration 512",
        "model.token_mixing: checkpoint full, configuration per_head",
    }
    assert model_differences(saved, saved | {"new": 1}) == ["model.new: checkpoint absent, configuration 1"]
    assert model_differences(saved | {"old": None}, saved) == ["model.old: checkpoint None, configuration absent"]


def test_a_default_spelled_out_is_not_a_difference():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, saved | {"num_query_groups": 8, "position_mlp_size": 32, "kv_channels": 8}) == []
    assert model_differences(saved, saved | {"num_query_groups": 4}) == [
        "model.num_query_groups: checkpoint 8, configuration 4"
    ]
