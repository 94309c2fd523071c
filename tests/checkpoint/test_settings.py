"""What is said of settings that changed since a checkpoint was saved."""

import copy

from models import small_model

from megatron_tape.checkpoint.settings import changes
from megatron_tape.config.schema import DataConfig, RunConfig, TrainConfig, config_dict


def config(**train):
    return RunConfig(
        model=small_model(), data=DataConfig(prefix="a"), train=TrainConfig(steps=4, global_batch_size=2, **train)
    )


def test_the_same_settings_say_nothing_nor_do_those_that_an_older_checkpoint_does_not_know():
    saved = config_dict(config())
    assert changes(saved, config()) == []
    older = copy.deepcopy(saved)
    for section in older.values():
        for key in list(section)[1:]:
            del section[key]
    unknown = {"train.steps", "train.global_batch_size", "model.seq_length"}  # without defaults, and never absent
    assert {line.partition(":")[0] for line in changes(older, config()) if "order" not in line} <= unknown
    assert changes({}, config(precision="fp32"))[-2].startswith('train.precision: was "bf16", is now "fp32"')


def test_a_change_of_what_decides_the_order_of_the_data_says_so_in_the_end():
    *_, last = changes(config_dict(config()), config(seed=5))
    assert last == "train.seed: the data comes in another order than in an uninterrupted run"
    assert changes(config_dict(config()), config(hang_timeout=5.0)) == []
