"""Read license and languages from the model card of an imported model, for the cards of later
exports.
"""

import re
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape import command_line
from megatron_tape.errors import UserError
from megatron_tape.io.records import parse_yaml, read_small

CARD = "README.md"
_CARD_BYTES = 4 << 20
_METADATA_CHARACTERS = 100_000
"""Maximum number of characters of a card's metadata; parsing more YAML would take seconds."""
# The YAML between two lines `---` at the beginning of a card, perhaps after a byte-order mark.
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Longer facts are not imported.
_FACT_CHARACTERS = 200


class CardFacts(TypedDict, total=False):
    """Facts about the imported model for the card of an export, with the keys of the Hub's
    metadata.
    """

    base_model: str
    license: str
    license_name: str
    license_link: str
    language: list[str]


def source_card(
    directory: Path, base_model: str | None = None, is_export: bool = False
) -> CardFacts:
    """Return license, languages and Hub name of the model in `directory`, as far as they are known.

    License and languages come from the metadata of its README.md. The Hub name is `base_model`. If
    that is None, an export of this project (`is_export`) has the name in its README.md. Raises
    UserError if `base_model` is not a valid Hub name.
    """
    if base_model is not None and not _HUB_NAME.fullmatch(base_model):
        raise UserError(
            "--base-model", f"is {base_model!r}, but names on the Hub have the form OWNER/NAME"
        )
    metadata = _metadata(directory / CARD)
    # In an export's card, base_model is the model of the Hub that was imported before; it is kept.
    # In any other card, it is the model from which this one was trained, so it is not used.
    name = base_model
    if name is None and is_export:
        name = _short_text(metadata.get("base_model"))
    facts: CardFacts = {}
    if name:
        facts["base_model"] = name
    for key in ("license", "license_name", "license_link"):
        if text := _short_text(metadata.get(key)):
            facts[key] = text
    # A relative link refers to a file that the export does not have.
    if "license_link" in facts and "://" not in facts["license_link"]:
        del facts["license_link"]

    listed = metadata.get("language")
    if not isinstance(listed, list):
        listed = [listed]
    # In YAML, an unquoted `no` (Norwegian) is false.
    texts = ["no" if item is False else _short_text(item) for item in listed]
    if languages := [text for text in texts if text]:
        facts["language"] = languages
    return facts


def _metadata(path: Path) -> dict:
    """Return the metadata at the top of a model card. If it cannot be read, print a message and
    return {}.
    """
    if not path.is_file():
        return {}
    try:
        match = _FRONT_MATTER.match(read_small(path, _CARD_BYTES).decode("utf-8"))
        if match is None:
            return {}
        if len(match[1]) > _METADATA_CHARACTERS:
            raise ValueError(f"its metadata has more than {_METADATA_CHARACTERS:,} characters")
        # Empty metadata is None in YAML.
        return parse_yaml(match[1], dict[str, Any] | None) or {}
    except (ValueError, OSError) as error:
        command_line.log(f"the license and languages in {path} are not imported: {error}")
        return {}


def _short_text(value: Any) -> str | None:
    """Return `value` without surrounding spaces if it is a short, printable text; otherwise, and
    for an empty text, None.
    """
    if isinstance(value, str) and value.isprintable() and len(value) <= _FACT_CHARACTERS:
        return value.strip() or None
    return None
