"""Escape untrusted text for Markdown, so that it does not become HTML, a link or table
structure.
"""

import re

_JOINERS = "\u200c\u200d"
"""Zero-width characters that join Persian letters and emoji; they are not printable, but must be
kept.
"""
# The characters of HTML, entities, links, code, emphasis, tables, headings, mathematics and
# addresses. Kept are underscores within a word such as a_b_c, which do not begin emphasis, and the
# sign in p < 0.05, since no tag begins with a space.
_SPECIAL = re.compile(r"[\\`*\[\]>&|~$#@]|<(?! )|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
# A list marker such as `-` or `1.`, or a rule, at the beginning of a line. Group 2 is the character
# to escape, `-` or `.`. The sign of a number such as +0.04 is neither.
_LIST_OR_LINE = re.compile(r"\A(\d*)([-+=](?!\d)|(?<=\d)[.)](?!\S))")
_MAX_LENGTH = 10_000


def escape_markdown(value: object) -> str:
    """Return a value as one line of Markdown that renders as plain text, truncated to `_MAX_LENGTH`
    characters.

    Special characters become character references, which Markdown never interprets. Line breaks and
    characters that are not printable become spaces.
    """
    text = str(value)
    if len(text) > _MAX_LENGTH:
        text = f"{text[:_MAX_LENGTH]}..."
    printable = (
        character if character.isprintable() or character in _JOINERS else " " for character in text
    )
    text = " ".join("".join(printable).split())
    text = _SPECIAL.sub(lambda match: _reference(match[0]), text)
    return _LIST_OR_LINE.sub(lambda match: match[1] + _reference(match[2]), text)


def _reference(character: str) -> str:
    """Return the character reference of HTML, such as `&#42;`."""
    return f"&#{ord(character)};"
