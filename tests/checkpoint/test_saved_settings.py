"""Tests of the comparison of a run's settings with those of a checkpoint."""

from pathlib import Path

import pytest
from configurations import MODEL, make, model_config

from megatron_tape.checkpoint import saved_settings
from megatron_tape.checkpoint.saved_settings import (
    changed_order_keys,
    changes,
    check_same_model,
    model_differences,
    only_size_changed,
    with_saved_size,
)
from megatron_tape.config.schema import config_dict
from megatron_tape.config.sections import as_dict
from megatron_tape.errors import ConfigError


def test_changed_settings_are_reported_with_both_values():
    saved = config_dict(make())
    assert changes(saved, make()) == []
    assert changes(saved, make(train__precision="fp32")) == [
        "train.precision: was 'bf16', is now 'fp32'"
    ]


def test_settings_that_change_the_order_of_the_data_are_named():
    assert changed_order_keys(config_dict(make()), make(train__seed=5)) == ["train.seed"]
    assert not only_size_changed(["train.seed"])
    assert changes(config_dict(make()), make(train__hang_timeout=5.0)) == []
    ramp = {"from": 1, "over_samples": 9}
    saved = config_dict(make(train__spikes={}, train__batch_ramp=ramp, train__steps=20))
    now = make(
        train__batch_ramp=ramp | {"from": 2},
        train__spikes={"action": "skip"},
        train__steps=30,
    )
    changed = [sentence.partition(":")[0] for sentence in changes(saved, now)]
    assert changed == ["train.steps", "train.batch_ramp.from", "train.spikes.action"]
    keys = changed_order_keys(saved, now)
    assert keys == changed[:2]
    assert only_size_changed(keys)
    before = with_saved_size(saved, now).train
    assert (before.steps, before.batch_ramp.from_, before.spikes.action) == (20, 1, "skip")
    generated = make(data__prefix=None, data__generator={"task": "addition"}, train__steps=30)
    assert changed_order_keys(saved, generated) == ["data.prefix", "data.generator"]


def test_differences_between_models_are_named_with_both_values():
    saved = as_dict(model_config(**MODEL))
    assert model_differences(saved, dict(saved)) == []
    per_head = saved["position"] | {"token_mixing": "per_head"}
    changed = saved | {"hidden_size": 512, "position": per_head}
    assert set(model_differences(saved, changed)) == {
        "model.hidden_size: checkpoint 64, configuration 512",
        "model.position.token_mixing: checkpoint full, configuration per_head",
    }
    t5 = saved["position"] | {"t5_num_buckets": 3}  # a setting of another encoding
    assert model_differences(saved | {"position": t5}, saved) == []
    assert model_differences(saved, saved | {"hidden_size": 512}, free=["hidden_size"]) == []


def test_a_default_spelled_out_is_not_a_difference():
    saved = as_dict(model_config(**MODEL))
    spelled = {
        "num_query_groups": 8,
        "kv_channels": 8,
        "position": saved["position"] | {"mlp_size": 32},
    }
    assert model_differences(saved, saved | spelled) == []
    assert model_differences(saved, saved | {"num_query_groups": 4}) == [
        "model.num_query_groups: checkpoint 8, configuration 4"
    ]


def test_a_checkpoint_from_before_windows_continues_without_one(monkeypatch):
    saved = {"model": as_dict(make().model)}
    for key in (
        "sliding_window",
        "full_attention_every",
        "temperature_scale",
        "temperature_floor_scale",
    ):
        del saved["model"][key]
    for key in ("rope_scaling_layers", "rope_local_theta"):
        del saved["model"]["position"][key]
    monkeypatch.setattr(
        saved_settings, "read_state", lambda path: {"optimizer_steps": 1, "config": saved}
    )
    check_same_model(Path("somewhere"), make())
    with pytest.raises(ConfigError, match="model.sliding_window: checkpoint None, configuration 8"):
        check_same_model(Path("somewhere"), make(model__sliding_window=8))


def test_a_run_cannot_continue_with_another_window(monkeypatch):
    window = {"model__sliding_window": 8, "model__full_attention_every": 2}
    saved = config_dict(make(**window))
    monkeypatch.setattr(
        saved_settings, "read_state", lambda path: {"optimizer_steps": 1, "config": saved}
    )
    check_same_model(Path("somewhere"), make(**window))
    for key, value in (("sliding_window", 9), ("full_attention_every", None)):
        with pytest.raises(ConfigError, match=f"model.{key}: checkpoint"):
            check_same_model(Path("somewhere"), make(**window | {f"model__{key}": value}))


def test_a_setting_that_is_newer_than_the_checkpoint_has_its_default(monkeypatch):
    saved = {"model": as_dict(make().model)}
    del saved["model"]["position"]["rope_share"], saved["model"]["layers_without_positions"]
    monkeypatch.setattr(
        saved_settings, "read_state", lambda path: {"optimizer_steps": 1, "config": saved}
    )
    check_same_model(Path("somewhere"), make())
    with pytest.raises(
        ConfigError, match="model.position.rope_share: checkpoint 1.0, configuration 0.5"
    ):
        check_same_model(Path("somewhere"), make(model__position__rope_share=0.5))
