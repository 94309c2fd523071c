import json
import os

import pytest
from configurations import make
from datasets_for_tests import write_dataset, write_documents

from megatron_tape.checkpoint.locate import check_directories
from megatron_tape.checkpoint.saved_tokenizer import check_tokenizer_exists
from megatron_tape.config.schema import replace_settings
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.inputs import check_data_files, check_datasets
from megatron_tape.errors import ConfigError, FileError


def check_inputs(config):
    check_directories(config)
    check_data_files(config)
    check_tokenizer_exists(config)


def test_inputs_that_do_not_exist_are_named_one_by_one(tmp_path):
    config = make(
        data__prefix={str(tmp_path / "a"): 0.5, str(tmp_path / "b"): 0.5}, checkpoint__resume="auto"
    )
    config = replace_settings(config, {"data.tokenizer": str(tmp_path / "tokenizer.model")})
    for name in ("a.idx", "a.bin", "b.idx", "b.bin", "tokenizer.model"):
        with pytest.raises(ConfigError, match=f"{name}.* does not exist"):
            check_inputs(config)
        (tmp_path / name).write_text("")
    check_inputs(config)
    config = replace_settings(config, {"checkpoint.resume": str(tmp_path / "step-00000001")})
    with pytest.raises(
        ConfigError, match="checkpoint.resume .*step-00000001, which is not a directory"
    ):
        check_inputs(config)
    (tmp_path / "step-00000001").mkdir()
    check_inputs(config)


def test_a_cache_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "a.idx").touch(), (tmp_path / "a.bin").touch()
    config = make(data__prefix=str(tmp_path / "a"), data__tokenizer=None, checkpoint__resume="auto")
    for directory in ("a.bin", "a.bin/cache"):
        config = replace_settings(config, {"data.cache_directory": str(tmp_path / directory)})
        with pytest.raises(ConfigError, match="a.bin is not a writable directory") as error:
            check_inputs(config)
        assert error.value.key == "data.cache_directory"
    for directory in ("new/cache", ""):
        config = replace_settings(config, {"data.cache_directory": str(tmp_path / directory)})
        check_inputs(config)


@pytest.mark.parametrize(
    "key", ["logging.directory", "checkpoint.directory", "data.prefix", "data.tokenizer"]
)
def test_a_path_that_cannot_be_read_is_named_with_its_setting(tmp_path, key):
    (tmp_path / "a.idx").touch(), (tmp_path / "a.bin").touch()
    config = make(data__prefix=str(tmp_path / "a"), data__tokenizer=None, checkpoint__resume="auto")
    config = replace_settings(config, {key: str(tmp_path / ("x" * 300))})
    with pytest.raises(ConfigError, match="File name too long") as error:
        check_inputs(config)
    assert error.value.key == key


def test_checkpoints_of_another_run_are_not_written_into(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.idx").touch(), (tmp_path / "a.bin").touch()
    state = dict(
        step=4,
        optimizer_steps=4,
        consumed_samples=8,
        progress={},
        sharded={},
    )
    state |= dict(tensor_model_parallel_size=1, data_parallel_size=1)
    state["config"] = {"model": {}, "logging": {"directory": "runs/first"}}
    for directory in ("shared", "runs/moved/checkpoints"):
        checkpoint = tmp_path / directory / "step-00000004"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps(state))

    def check(run, checkpoints):
        settings = {"logging__directory": run, "checkpoint__directory": checkpoints}
        check_inputs(make(data__prefix="a", data__tokenizer=None, **settings))

    check("runs/second", "shared")  # the run that saved them is gone
    (tmp_path / "runs" / "first" / "attempts").mkdir(parents=True)
    for checkpoints in ("shared", "runs/first/checkpoints"):
        with pytest.raises(ConfigError, match="belongs to .*runs/first") as error:
            check("runs/second", checkpoints)
        assert error.value.key == "checkpoint.directory"
        check("runs/first", checkpoints)
    check("runs/moved", "runs/moved/checkpoints")
    check("runs/second", "runs/second/checkpoints")
    check("runs/second", "elsewhere")


def test_a_truncated_dataset_is_refused(tmp_path):
    write_dataset(tmp_path / "a")
    config = make(data__prefix=str(tmp_path / "a"), data__tokenizer=None)
    check_datasets(config)
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(
        ConfigError, match="incomplete or damaged: .*a.bin has 100 bytes, but its index describes"
    ):
        check_datasets(config)


@pytest.mark.parametrize(
    "bad, problem", [(-1, "ids cannot be negative"), (64, "model.vocab_size is 64")]
)
def test_ids_outside_the_vocabulary_are_refused_before_the_run_starts(tmp_path, bad, problem):
    write_documents(
        tmp_path / "a",
        [[*range(60)]] * 90 + [[*range(60), bad]] * 10,
        "<i4",
    )
    config = make(data__prefix=str(tmp_path / "a"), data__tokenizer=None, model__vocab_size=64)
    with pytest.raises(ConfigError, match=rf"document 9\d has the token id {bad}, but {problem}"):
        check_datasets(config)


def test_what_is_mistaken_for_a_dataset_is_named_with_the_command_that_makes_one(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("my texts.jsonl", "raw/a.txt.gz", "raw/b.parquet", "notes.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    write_dataset(tmp_path / "c4")
    (tmp_path / "many").mkdir()
    write_dataset(tmp_path / "many" / "web")
    command = "run `python tools/preprocess_data.py --input {} --tokenizer w.model"
    for prefix, fix in (
        ("my texts.jsonl", command.format("'my texts.jsonl'")),
        ("raw/a.txt.gz", command.format("raw/a.txt.gz")),
        ("raw/*.parquet", command.format("'raw/*.parquet'")),
        ("raw", command.format("'raw/*'")),
        ("notes.csv", command.format("notes.csv")),
        ("allenai/c4", command.format("hub:allenai/c4")),
        ("hub:allenai/c4", command.format("hub:allenai/c4")),
        ("c4.idx", "give c4, without the suffix"),
        ("c4.bin", "give c4, without the suffix"),
        ("many", "give a dataset in it, such as many/web, or many/*"),
        ("runs/demo/data/stdlib", "`make demo`"),
        ("web", f"(the path is relative to the current directory, {tmp_path})"),
    ):
        with pytest.raises(ConfigError) as error:
            check_data_files(make(data__prefix=prefix, data__tokenizer="w.model"))
        assert error.value.key == "data.prefix"
        assert prefix in error.value.problem
        assert fix in error.value.fix, prefix
        with pytest.raises(FileError):
            IndexedDatasetReader(prefix)
