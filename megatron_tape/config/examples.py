"""Read `data.examples`: where examples of inputs and targets are, and how they become sequences."""

from dataclasses import dataclass
from typing import Any

from megatron_tape.config.parse import read_section
from megatron_tape.config.values import Count, shown
from megatron_tape.errors import refuse

PLACE = "{input}"
"""Where a template has the input."""
TEMPLATE = PLACE + "\n\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """The keys of `data.examples`."""

    path: str
    """JSON lines, each with `input`, and `output` or `target`; uncompressed."""
    validation: str | None = None
    """The same for validation; needed where the validation loss is computed."""
    template: str = TEMPLATE
    """What the model reads before the target."""
    target_tokens: Count = 200
    """Tokens of the sequence that are kept for the target; longer targets are cut."""
    bos: bool = False
    """Begin every sequence with the tokenizer's token for that, as Llama does."""


def examples_of(setting: dict[str, Any]) -> ExampleSettings:
    """Return what `data.examples` describes; raises `ConfigError` for what it cannot have."""
    settings = read_section("data.examples", ExampleSettings, setting)
    check_template(settings.template, "data.examples.template")
    return settings


def check_template(template: str, name: str) -> None:
    """Raise ConfigError, which names the setting, if a template does not have exactly one place for the input."""
    wrong = template.count(PLACE) != 1
    refuse(wrong, name, f"is {shown(template)}", f"write {PLACE} in it exactly once, such as {TEMPLATE!r}")
