"""A positional encoding of a user's own has settings like any other: keys of `model`, which recipes and --help know."""

import dataclasses
from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import model_dict
from megatron_tape.errors import ConfigError
from megatron_tape.position import (
    ENCODINGS,
    EncodingSettings,
    PositionEncoding,
    encoding_of,
    model_config,
    register,
    with_values,
)

RECIPE = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteepSettings(EncodingSettings):
    """How steep it is."""

    steep_slope: float = 1.0
    """steep: how fast far keys count less."""


class Steep(PositionEncoding):
    name = "steep"
    Settings = SteepSettings


@pytest.fixture(autouse=True)
def steep():
    yield register(Steep)
    del ENCODINGS["steep"]


def read(*arguments):
    return parse_run_config(["--config", RECIPE, "--data.prefix=x", *arguments]).model


def test_a_recipe_and_the_command_line_set_them(capsys):
    model = read("--model.steep_slope=2", "--model.position_encoding=steep")
    assert model.position == SteepSettings(steep_slope=2.0) and encoding_of(model).settings.steep_slope == 2
    assert model_dict(model)["steep_slope"] == 2.0 and model_config(**model_dict(model)) == model
    with pytest.raises(ConfigError) as refused:
        read("--model.steep_slope=much")
    assert refused.value.key == "model.steep_slope"
    with pytest.raises(SystemExit):
        parse_run_config(["--help"])
    assert "steep: how fast far keys count less." in " ".join(capsys.readouterr().out.split())


def test_another_encoding_does_not_read_them_but_keeps_what_was_given():
    model = read("--model.steep_slope=2")
    assert model.position_encoding == "tape" and model.unread == {"steep_slope": 2.0}
    assert read("--model.steep_slope=1").unread == {}
    assert with_values(model, position_encoding="steep").position == SteepSettings(steep_slope=2.0)
    assert "steep_slope" not in model_dict(model, unread=False)


@pytest.mark.parametrize("name, default", [("bad_size", dataclasses.MISSING), ("rope_theta", 1), ("steep_slope", 1.0)])
def test_each_has_a_default_and_a_name_of_its_own(name, default):
    item = (name, float, dataclasses.field(default=default))
    settings = dataclasses.make_dataclass("Settings", [item], bases=(EncodingSettings,), frozen=True)
    with pytest.raises(ValueError, match=name):
        register(type("Bad", (PositionEncoding,), {"name": "bad", "Settings": settings}))
    assert "bad" not in ENCODINGS
