"""A small valid configuration, to be changed by tests."""

from megatron_tape.config.schema import DataConfig, RunConfig, TrainConfig
from megatron_tape.position import model_config, replaced

MODEL = dict(num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, seq_length=32, vocab_size=128)
MINIMAL = {
    "model": MODEL,
    "data": {"prefix": "somewhere/corpus"},
    "train": {"steps": 100, "global_batch_size": 8},
}


def make(model=None, **changes):
    """A valid configuration, of a model if it is given, with `section__key=value` changed."""
    config = RunConfig(
        model=model or model_config(**MODEL),
        data=DataConfig(prefix="somewhere/corpus", tokenizer="somewhere/tokenizer.model"),
        train=TrainConfig(steps=100, global_batch_size=16, micro_batch_size=2, eval_interval=50),
    )
    return replaced(config, {name.replace("__", "."): value for name, value in changes.items()})


def make_alone(model, **changes):
    """As `make`, in fp32 and with one sequence in a step."""
    one = {"train__precision": "fp32", "train__global_batch_size": 1, "train__micro_batch_size": 1}
    return make(model, **one | changes)
