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


class _Loader(yaml.SafeLoader):
    """A loader that rejects anchors, tags and duplicate keys, and reads dates and non-decimal
    numbers as text.
    """

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or event.tag is not None:
            raise _refusal(
                "anchors, aliases and tags (&, * and !) are not supported; write the value out",
                event,
            )
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a list or a mapping cannot be a key; correct it", key)
            if key.value in lines:
                raise _refusal(
                    f"{key.value} is given twice, first in line {lines[key.value]}; remove one", key
                )
            lines[key.value] = key.start_mark.line + 1
            key.tag = "tag:yaml.org,2002:str"  # a path such as 1.10 is not the number 1.1
        return node


def _refusal(sentence: str, where: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=sentence, problem_mark=where.start_mark)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text if this loader or another YAML loader would not read it as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBERS = {
    "int": (r"[-+]?[0-9][0-9_]*$", lambda loader, node: int(node.value)),
    "float": (
        r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        lambda loader, node: float(re.sub(r"\.(?=[iInN])", "", node.value)),
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _read) in _NUMBERS.items():
    _tag = f"tag:yaml.org,2002:{_name}"
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))
    _Loader.add_constructor(_tag, _read)


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
    """Return the nested settings of a YAML file, and the file and line of each setting by its
    dotted key.

    Raises `ConfigError` with the file and the line.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                path,
                f"is larger than {MAX_BYTES:,} bytes, so it is not a recipe",
                "correct --config",
            )
        loader = _Loader(content.decode())
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                path, "must contain sections such as model: and data:, each with keys", "add them"
            )
        places = {key: f"{path}:{node.start_mark.line + 1}" for key, node in _keys(root)}
        for key, _ in root.value:
            if "." in key.value:
                fix = "write a recipe's keys below their section"
                raise ConfigError(key.value, "is not a section", fix, places[key.value])
        return loader.construct_document(root), places
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            reason = "does not exist"
        else:
            reason = f"cannot be read ({error.strerror})"
        raise ConfigError(f"--config {path}", reason, "give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}", "is not UTF-8 text", "save the recipe as UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(
            path,
            "is nested too deeply to be read",
            "write it as sections with keys, like the recipes in pretrain/recipes",
        ) from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: more digits than Python converts
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            problem = str(error)
        else:
            problem = str(getattr(error, "problem", error))
        place = path if mark is None else f"{path}:{mark.line + 1}"
        fix = ""
        if isinstance(error, (ParserError, ScannerError)):
            fix = (
                "check the indentation, colons, quotes and brackets of this line and the one before"
            )
            problem = (
                "it is not valid YAML" if "<" in problem else problem
            )  # names such as <block end>
        raise ConfigError(place, f"cannot be read: {' '.join(problem.split())}", fix) from None


def _keys(node: yaml.MappingNode, name: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    for key, value in node.value:
        dotted = f"{name}.{key.value}" if name else key.value
        yield dotted, key
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, dotted)
