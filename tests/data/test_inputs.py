import json

import pytest
from configurations import make

from megatron_tape.data.inputs import check_inputs
from megatron_tape.errors import ConfigError


def test_inputs_that_do_not_exist_are_named_one_by_one(tmp_path):
    config = make(data__prefix=[0.5, str(tmp_path / "a"), 0.5, str(tmp_path / "b")], checkpoint__resume="auto")
    config.data.tokenizer = str(tmp_path / "tokenizer.model")
    for name in ("a.idx", "a.bin", "b.idx", "b.bin", "tokenizer.model"):
        with pytest.raises(ConfigError, match=f"{name} does not exist"):
            check_inputs(config)
        (tmp_path / name).write_text("")
    check_inputs(config)
    config.checkpoint.resume = str(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match="checkpoint.resume .*step-00000001 is not a directory"):
        check_inputs(config)
    (tmp_path / "step-00000001").mkdir()
    check_inputs(config)


@pytest.mark.parametrize("key", ["logging.directory", "checkpoint.directory", "data.prefix", "data.tokenizer"])
def test_a_path_that_cannot_be_looked_at_is_named_with_its_setting(tmp_path, key):
    (tmp_path / "a.idx").touch(), (tmp_path / "a.bin").touch()
    config = make(data__prefix=str(tmp_path / "a"), data__tokenizer=None, checkpoint__resume="auto")
    section, name = key.split(".")
    setattr(getattr(config, section), name, str(tmp_path / ("x" * 300)))
    with pytest.raises(
        ConfigError, match=f"^{key} is .*x.*, which cannot be read \\(File name too long\\); correct it"
    ):
        check_inputs(config)


def test_checkpoints_of_another_run_are_not_written_into(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.idx").touch(), (tmp_path / "a.bin").touch()
    state = {"step": 4, "optimizer_steps": 4, "progress": {}, "sharded": {}}
    state |= {"tensor_model_parallel_size": 1, "data_parallel_size": 1}
    config = {"model": {}, "logging": {"directory": "runs/first"}}
    for directory in ("shared", "runs/moved/checkpoints"):
        (tmp_path / directory / "step-00000004").mkdir(parents=True)
        (tmp_path / directory / "step-00000004" / "state.json").write_text(json.dumps(state | {"config": config}))

    def check(run, checkpoints):
        settings = {"logging__directory": run, "checkpoint__directory": checkpoints}
        check_inputs(make(data__prefix="a", data__tokenizer=None, **settings))

    check("runs/second", "shared")  # the run that saved them is gone
    (tmp_path / "runs" / "first" / "attempts").mkdir(parents=True)
    for checkpoints in ("shared", "runs/first/checkpoints"):
        with pytest.raises(ConfigError, match=f"^checkpoint.directory is {checkpoints}, which belongs to .*runs/first"):
            check("runs/second", checkpoints)
        check("runs/first", checkpoints)
        check(str(tmp_path / "runs" / "first"), checkpoints)
    check("runs/moved", "runs/moved/checkpoints")
    check("runs/second", "runs/second/checkpoints")
    check("runs/second", "elsewhere")
