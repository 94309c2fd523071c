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
