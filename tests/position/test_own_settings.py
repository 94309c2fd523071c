"""Settings of a user's positional encoding work in recipes, on the command line and in --help."""

import dataclasses
from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.sections import as_dict
from megatron_tape.errors import ConfigError
from megatron_tape.position import (
    ENCODINGS,
    EncodingSettings,
    PositionEncoding,
    encoding_of,
    model_config,
    register,
)

RECIPE = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteepSettings(EncodingSettings):
    """The slope."""

    steep_slope: float = 1.0
    """steep: slope of the decay with distance."""


class Steep(PositionEncoding):
    name = "steep"
    Settings = SteepSettings


@pytest.fixture(autouse=True)
def steep():
    yield register(Steep)
    del ENCODINGS["steep"]


def read(*arguments):
    return parse_run_config(["--config", RECIPE, "--data.prefix=x", *arguments]).model


def test_recipes_and_the_command_line_set_them(capsys):
    model = read("--model.position.steep_slope=2", "--model.position_encoding=steep")
    assert model.position == SteepSettings(steep_slope=2.0)
    assert encoding_of(model).settings.steep_slope == 2
    assert model_config(as_dict(model)) == model
    with pytest.raises(SystemExit):
        parse_run_config(["--help"])
    assert "steep: slope of the decay with distance." in " ".join(capsys.readouterr().out.split())


def test_other_encodings_reject_them():
    with pytest.raises(ConfigError) as refused:
        read("--model.position.steep_slope=2")
    assert refused.value.key == "model.position.steep_slope"
