"""A variant of a recipe: a positional encoding and settings of the model, such as `tape+token_mixing=per_head`, or of
how it learns, such as `tape+optimizer.lr=1e-3`."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass

from megatron_tape.config.schema import ModelConfig, OptimizerConfig, ScheduleConfig
from megatron_tape.config.sections import settings_of
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.position import ENCODINGS

OPTION = "--encodings"
_LEARNING = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}
"""Sections besides `model` whose settings may differ between variants, written with the section."""
_LONGEST_DIRECTORY = 120


@dataclass(frozen=True)
class Variant:
    """A variant; `settings` are keys, of the model, its encoding or with another section before them, and texts."""

    encoding: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return "+".join([self.encoding, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def directory(self) -> str:
        """The label as the name of a directory; one that had to be changed or is very long ends in a digest."""
        safe = re.sub(r"[^\w.+=-]", "_", self.label, flags=re.ASCII)
        if safe == self.label and len(safe) <= _LONGEST_DIRECTORY:
            return safe
        return f"{safe[:_LONGEST_DIRECTORY]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def arguments(self) -> list[str]:
        given = (("position_encoding", self.encoding), *self.settings)
        return [text for key, value in given for text in (f"--{_dotted(key, self.encoding)}", value)]


def parse_variants(text: str) -> list[Variant]:
    """Return the variants that `--encodings` names, between commas that are not in {} or [].

    Raises ConfigError for one that is unknown or given twice.
    """
    found = [_parse(item.strip()) for item in re.split(r",(?![^{[]*[]}])", text)]
    for variant in found:
        refuse(found.count(variant) > 1, OPTION, f"names {variant.label} twice", "remove one")
    return found


def _parse(text: str) -> Variant:
    refuse(not text, OPTION, "names nothing between two commas", "give encodings such as rope,tape")
    encoding, *given = re.split("\\+(?![0-9])", text)  # that of 1e+3 is no separator
    unknown = encoding not in ENCODINGS
    refuse(unknown, OPTION, f"names {encoding}, which is not an encoding", f"choose from {', '.join(ENCODINGS)}")
    settings: dict[str, str] = {}
    for item in given:
        key, _, value = item.partition("=")
        refuse(not value, OPTION, f"names {text}, where {item!r} sets nothing", "write it as setting=value")
        refuse(key in settings, OPTION, f"names {text}, which sets {key} twice", "remove one")
        _check_key(key, encoding, text)
        settings[key] = value
    return Variant(encoding, tuple(settings.items()))


def _check_key(key: str, encoding: str, text: str) -> None:
    sections = {"model": ModelConfig, **_LEARNING}
    known = {setting.key for name, section in sections.items() for setting in settings_of(section, name)}
    known -= {"model.position_encoding"}
    owners = [name for name in ENCODINGS if key in _own(name)]
    if not owners and _dotted(key, encoding) not in known:
        raise ConfigError(OPTION, f"names {text}, but {key} is no setting in which variants may differ", "correct it")
    problem = f"names {text}, but {key} has no effect on {encoding}"
    refuse(bool(owners) and encoding not in owners, OPTION, problem, "remove it")


def _own(encoding: str) -> set[str]:
    return {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}


def _dotted(key: str, encoding: str) -> str:
    """Return the whole key of a variant's setting: of its encoding, or else of its model, unless it has a section."""
    if key.partition(".")[0] in _LEARNING:
        return key
    return f"model.position.{key}" if key in _own(encoding) else f"model.{key}"
