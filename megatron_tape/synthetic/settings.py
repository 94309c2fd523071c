"""Read `data.generator`: the name of a synthetic task and its settings."""

import dataclasses
from typing import Any, get_type_hints

from megatron_tape.config.values import accept, shown
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.synthetic import GENERATORS, Generator


def generator_of(setting: dict[str, Any]) -> Generator:
    """Return the generator that `data.generator` describes; raises `ConfigError` if there is none."""
    key, settings = "data.generator", dict(setting)
    task = settings.pop("task", None)
    fix = f"give it the key task, one of {', '.join(GENERATORS)}"
    refuse(task not in GENERATORS, key, f"is {shown(setting)}", fix)
    kind = GENERATORS[task]
    types = {item.name: get_type_hints(kind)[item.name] for item in dataclasses.fields(kind)}
    for name in settings:
        fix = f"choose from {', '.join(types)}"
        refuse(name not in types, key, f"names {name}, which is not a setting of {task}", fix)
    generator = kind(**{name: accept(f"{key}.{name}", value, types[name]) for name, value in settings.items()})
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.subject}", error.problem, error.fix) from None
    return generator
