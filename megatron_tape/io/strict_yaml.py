"""Read and write recipes, YAML files of settings, and reject ambiguous YAML.

Duplicate keys, anchors and aliases (nested aliases can expand to gigabytes), tags, and files that
are too large for a recipe are rejected. Numbers are decimal, 1e-3 is a number, and dates and keys
are text.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from megatron_tape.errors import ConfigError

MAX_BYTES = 1_000_000
"""Maximum size of a recipe in bytes."""


class _Loader(yaml.SafeLoader):
    """A loader that rejects anchors, tags and duplicate keys, and reads dates and non-decimal
    numbers as text.
    """

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        """Compose the next node as PyYAML does. Raises MarkedYAMLError if it has an anchor or a
        tag, or is an alias.
        """
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or event.tag is not None:
            problem = (
                "anchors, aliases and tags (&, * and !) are not supported; write the value out"
            )
            raise _refusal(problem, event)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping whose keys are all text. Raises MarkedYAMLError for a duplicate key, of
        which PyYAML would keep only the last value.
        """
        node = super().compose_mapping_node(anchor)
        # The line of each key, counted from 1.
        lines = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a list or a mapping cannot be a key; correct it", key)
            if key.value in lines:
                first_line = lines[key.value]
                raise _refusal(
                    f"{key.value} is given twice, first in line {first_line}; remove one", key
                )
            lines[key.value] = key.start_mark.line + 1  # PyYAML counts lines from 0
            key.tag = "tag:yaml.org,2002:str"  # a path such as 1.10 is not the number 1.1
        return node


def _refusal(sentence: str, where: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    """Return an error whose message is `sentence`, and whose line is the first line of `where`."""
    return yaml.MarkedYAMLError(problem=sentence, problem_mark=where.start_mark)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text if this loader or another YAML loader would not read it as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: an object that occurs twice is written twice, since the loader rejects
        aliases.
        """
        return True


# PyYAML's resolvers decide by a text's first character and a pattern which type it has. Keep only
# those of booleans and null: YAML 1.1 also knows octal, hexadecimal and base-60 numbers, and dates.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# `_FLOAT` matches 1e-3, which YAML 1.1 reads as text. Neither pattern matches 0x10 or 1:30, which
# YAML 1.1 reads as numbers.
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
# The dumper keeps the resolvers of YAML 1.1 as well, so that it also quotes text that other parsers
# would convert. The list has the first characters of numbers.
for _class in (_Loader, _Dumper):
    for _tag, _pattern in (("tag:yaml.org,2002:int", _INT), ("tag:yaml.org,2002:float", _FLOAT)):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
# Remove the dot of .inf and .nan, which Python's `float` reads as inf and nan.
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(re.sub(r"\.(?=[iInN])", "", node.value)),
)


def parse_value(text: str | bytes) -> Any:
    """Parse `text` as YAML. Raises ValueError if it is not valid."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump(settings: dict[str, dict[str, Any]]) -> str:
    """Return settings by section as YAML text, which `read_recipe` and other YAML parsers read
    alike.
    """
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)


def read_recipe(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the nested settings of a YAML file, and the place of each setting (`file:line`) by its
    dotted key.

    Raises `ConfigError` with the file and, if it is known, the line.
    """
    content = _read_bytes(path)
    try:
        loader = _Loader(content.decode())
        # Read the nodes first: they know their lines, the values constructed from them do not.
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                path, "must contain sections such as model: and data:, each with keys", "add them"
            )
        places = {key: f"{path}:{node.start_mark.line + 1}" for key, node in _keys(root)}
        # Dotted keys belong to the command line. In a file, they would be unknown sections.
        for key, _ in root.value:
            if "." in key.value:
                fix = "write a recipe's keys below their section"
                raise ConfigError(key.value, "is not a section", fix, places[key.value])
        return loader.construct_document(root), places
    except ConfigError:  # a ValueError, like the errors that are converted below
        raise
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}", "is not UTF-8 text", "save the recipe as UTF-8"
        ) from None
    except RecursionError:
        fix = "write it as sections with keys, like the recipes in pretrain/recipes"
        raise ConfigError(path, "is nested too deeply to be read", fix) from None
    except yaml.MarkedYAMLError as error:
        problem = f"cannot be read: {error.problem}"
        fix = ""
        # Errors of `_Loader` name the fix themselves.
        if isinstance(error, (ParserError, ScannerError)):
            fix = (
                "check the indentation, colons, quotes and brackets of this line and the one before"
            )
            if "<" in problem:  # PyYAML's name of a token, such as <block end>
                problem = "cannot be read: it is not valid YAML"
        line = error.problem_mark.line + 1
        raise ConfigError(f"{path}:{line}", problem, fix) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: more digits than Python converts
        raise ConfigError(path, f"cannot be read: {' '.join(str(error).split())}") from None


def _read_bytes(path: str) -> bytes:
    """Return the contents of a recipe. Raises ConfigError if it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            problem = "does not exist"
        raise ConfigError(f"--config {path}", problem, "give the path of a YAML file") from None

    if len(content) > MAX_BYTES:
        problem = f"is larger than {MAX_BYTES:,} bytes, so it is not a recipe"
        raise ConfigError(path, problem, "correct --config")
    return content


def _keys(node: yaml.MappingNode, section: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield the dotted key and the node of each key in a mapping and in those inside it.

    `section` is the dotted key of the mapping followed by a dot, or "" for a whole file.
    """
    for key, value in node.value:
        dotted = f"{section}{key.value}"
        yield dotted, key
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, f"{dotted}.")
