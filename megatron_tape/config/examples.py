"""Read `data.examples`: where examples of inputs and targets are, and how they become sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from megatron_tape.config.values import accept, shown
from megatron_tape.errors import refuse

PLACE = "{input}"
"""Where a template has the input."""
TEMPLATE = PLACE + "\n\nAnswer:"


@dataclass(kw_only=True)
class ExampleSettings:
    """The keys of `data.examples`."""

    path: str
    """JSON lines, each with `input`, and `output` or `target`; uncompressed."""
    validation: str | None = None
    """The same for validation; needed where the validation loss is computed."""
    template: str = TEMPLATE
    """What the model reads before the target."""
    target_tokens: int = 200
    """Tokens of the sequence that are kept for the target; longer targets are cut."""
    bos: bool = False
    """Begin every sequence with the tokenizer's token for that, as Llama does."""


def examples_of(setting: dict[str, Any]) -> ExampleSettings:
    """Return what `data.examples` describes; raises `ConfigError` for what it cannot have."""
    types = get_type_hints(ExampleSettings)
    names = [item.name for item in fields(ExampleSettings)]
    refuse("path" not in setting, f"data.examples is {shown(setting)}; give it the key path, a file of JSON lines")
    for key in setting:
        refuse(key not in names, f"data.examples names {shown(key)}; choose from {', '.join(names)}")
    values = {key: accept(f"data.examples.{key}", value, types[key]) for key, value in setting.items()}
    settings = ExampleSettings(**values)
    check_template(settings.template, "data.examples.template")
    refuse(
        settings.target_tokens < 1,
        f"data.examples.target_tokens is {settings.target_tokens}; set it to 1 or more",
    )
    return settings


def check_template(template: str, name: str) -> None:
    """Raise ConfigError, which names the setting, if a template does not have exactly one place for the input."""
    refuse(
        template.count(PLACE) != 1,
        f"{name} is {shown(template)}; write {PLACE} in it exactly once, such as {TEMPLATE!r}",
    )
