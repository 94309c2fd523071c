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
