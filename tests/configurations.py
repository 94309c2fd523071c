"""A small valid configuration for tests to modify."""

import dataclasses

from megatron_tape import position
from megatron_tape.config import sections
from megatron_tape.config.data import DataConfig
from megatron_tape.config.schema import ENCODINGS, ModelConfig, RunConfig, replace_settings
from megatron_tape.config.train import TrainConfig

MODEL = dict(
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    seq_length=32,
    vocab_size=128,
)
MINIMAL = {
    "model": MODEL,
    "data": {"prefix": "somewhere/corpus"},
    "train": {"steps": 100, "global_batch_size": 8},
}


def nested(encoding="tape", **values):
    """Return settings of a model with those of its encoding under `position`, without those of
    other encodings.
    """
    fields = {item.name for item in dataclasses.fields(ModelConfig)}
    own = {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}
    others = {
        item.name for one in ENCODINGS.values() for item in dataclasses.fields(one.Settings)
    } - own
    of_encoding = values.pop("position", {}) | {
        key: value for key, value in values.items() if key not in fields | others
    }
    return {key: value for key, value in values.items() if key in fields} | {
        "position": of_encoding
    }


def model_config(**values):
    """Return a model's settings from flat ones; settings of other encodings are ignored."""
    return position.model_config(nested(values.get("position_encoding", "tape"), **values))


def with_values(model, **values):
    """Return the model's settings with some values replaced."""
    changed = nested(values.get("position_encoding", model.position_encoding), **values)
    return position.model_config(sections.merge(ModelConfig, sections.as_dict(model), changed))


def make(model=None, **changes):
    """Return a valid configuration, optionally of `model`, with changes as `section__key=value`."""
    config = RunConfig(
        model=model or model_config(**MODEL),
        data=DataConfig(prefix="somewhere/corpus", tokenizer="somewhere/tokenizer.model"),
        train=TrainConfig(steps=100, global_batch_size=16, micro_batch_size=2, eval_interval=50),
    )
    return replace_settings(
        config, {name.replace("__", "."): value for name, value in changes.items()}
    )


def make_alone(model, **changes):
    """As `make`, in fp32 with one sequence per step."""
    one = {"train__precision": "fp32", "train__global_batch_size": 1, "train__micro_batch_size": 1}
    return make(model, **one | changes)
