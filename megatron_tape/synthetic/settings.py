"""Read `data.generator`: the name of a synthetic task and its settings."""

import dataclasses
from typing import Any, get_type_hints

from megatron_tape.config.values import accept, shown
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.synthetic import GENERATORS, Generator


def generator_of(setting: dict[str, Any]) -> Generator:
    """Return the generator that `data.generator` describes; raises `ConfigError` if there is none."""
    settings = dict(setting)
    task = settings.pop("task", None)
    refuse(
        task not in GENERATORS,
        f"data.generator is {shown(setting)}; give it the key task, one of {', '.join(GENERATORS)}",
    )
    kind = GENERATORS[task]
    types = {item.name: get_type_hints(kind)[item.name] for item in dataclasses.fields(kind)}
    for key in settings:
        refuse(
            key not in types,
            f"data.generator names {key}, which is not a setting of {task}; choose from {', '.join(types)}",
        )
    try:
        generator = kind(**{key: accept(key, value, types[key]) for key, value in settings.items()})
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"data.generator of {task}: {error}") from None
    return generator
