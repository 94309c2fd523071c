"""Read `data.generator`: the name of a synthetic task and its settings."""

from typing import Any

from megatron_tape.config.parse import read_section
from megatron_tape.config.values import shown
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.synthetic import GENERATORS, Generator


def generator_of(setting: dict[str, Any]) -> Generator:
    """Return the generator that `data.generator` describes; raises `ConfigError` if there is none."""
    key, settings = "data.generator", dict(setting)
    task = settings.pop("task", None)
    fix = f"give it the key task, one of {', '.join(GENERATORS)}"
    refuse(task not in GENERATORS, key, f"is {shown(setting)}", fix)
    generator = read_section(key, GENERATORS[task], settings)
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.subject}", error.problem, error.fix) from None
    return generator
