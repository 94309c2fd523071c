"""Training on examples: the loss is on the targets, and every epoch has another order."""

import json

import configurations
import pytest
from datasets_for_tests import EOD, write_tokenizer
from models import small_model

from megatron_tape.config.schema import replace_settings
from megatron_tape.data.batches import build_batches
from megatron_tape.data.inputs import check_data_files, check_datasets, missing_validation
from megatron_tape.data.samples import sample_source
from megatron_tape.errors import ConfigError
from megatron_tape.parallel.layout import initialize_distributed

LINES = [
    {"id": "1", "input": "w1 w2 w3", "output": "w4"},
    {"id": "2", "input": "w5 w6", "target": "w7 w8"},
    {"id": "3", "input": " ".join(["w10"] * 40), "output": "w11 w12 w13 w14 w15"},
]


@pytest.fixture
def make(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "train.jsonl").write_text("\n" + text)
    (tmp_path / "held.jsonl").write_text(text)

    def made(loss_on="answers", **changes):
        examples = {
            "path": str(tmp_path / "train.jsonl"),
            "validation": str(tmp_path / "held.jsonl"),
        }
        examples |= {"template": "{input} w9", "target_tokens": 4, **changes}
        data = {"prefix": None, "examples": examples, "loss_on": loss_on}
        config = configurations.make(
            small_model(), data__tokenizer=str(tmp_path / "tokenizer.json")
        )
        return replace_settings(config, {f"data.{key}": value for key, value in data.items()})

    return made


def sequences(source, count):
    """Return the first samples' tokens, and the labels that enter the loss."""
    samples = [source[i] for i in range(count)]
    return [
        (sample["tokens"].tolist(), sample["labels"][sample["loss_mask"]].tolist())
        for sample in samples
    ]


def test_validation_goes_through_the_file_and_only_targets_and_their_end_are_in_the_loss(make):
    config = make()
    check_data_files(config)
    check_datasets(config)
    assert sequences(sample_source(config, validation=True), 4) == [
        ([1, 2, 3, 9, 4, EOD] + [0] * 10, [4, EOD]),
        ([5, 6, 9, 7, 8, EOD] + [0] * 10, [7, 8, EOD]),
        # 11 tokens of the input, the template, 4 of the target. The model must not learn to end a
        # truncated target.
        ([10] * 11 + [9, 11, 12, 13, 14], [11, 12, 13, 14]),
        ([1, 2, 3, 9, 4, EOD] + [0] * 10, [4, EOD]),
    ]


def test_the_epochs_of_a_run_over_examples_are_warned_about(make, caplog):
    config = replace_settings(make(), {"train.steps": 9, "train.eval_interval": None})
    build_batches(config, initialize_distributed(1), EOD)
    assert f"warning: the run trains 48.00 epochs on {config.data.examples.path}" in caplog.text


def test_a_file_of_validation_examples_is_optional_unless_an_interval_is_set(make):
    config = replace_settings(make(validation=None), {"train.eval_interval": None})
    assert build_batches(config, initialize_distributed(1), EOD).validation is None
    assert missing_validation(config).key == "data.examples.validation"
    assert missing_validation(make()) is None


def test_every_epoch_has_all_examples_in_another_order_which_only_the_seed_decides(make):
    found, again = (sequences(sample_source(make(), validation=False), 30) for _ in range(2))
    assert found == again
    epochs = [tuple(map(str, found[i : i + 3])) for i in range(0, 30, 3)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1
    assert len(frozenset(epochs[0])) == 3
    assert len(set(epochs)) > 1
    config = make()
    config = replace_settings(config, {"train.seed": config.train.seed + 1})
    assert sequences(sample_source(config, validation=False), 30) != found


def test_what_cannot_be_read_is_refused_by_file_and_line(make, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(LINES[0]) + '\n{"input": "w1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    for changes, key in (
        ({"path": str(tmp_path / "bad.jsonl")}, "data.examples.path"),
        ({"validation": str(tmp_path / "empty.jsonl")}, "data.examples.validation"),
        ({"target_tokens": 15}, "target_tokens"),
        ({"bos": True}, "data.examples.bos"),
    ):
        with pytest.raises(ConfigError) as error:
            check_datasets(make(**changes))
        assert error.value.key == key
    for name in ("none.jsonl", "qasper.zip"):
        with pytest.raises(ConfigError) as error:
            check_data_files(make(path=str(tmp_path / name)))
        assert error.value.key == "data.examples.path"
        assert error.value.fix
