"""Strict YAML: the settings of a recipe with their lines; anything ambiguous is rejected.

Keys that are given twice, anchors and aliases (nested aliases can expand to gigabytes), and files that are too large
for a recipe are rejected. Numbers are decimal, 1e-3 is a number, and dates are text.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from megatron_tape.errors import ConfigError

MAX_BYTES = 1_000_000
_NUMBERS = {
    "int": (re.compile(r"[-+]?[0-9][0-9_]*$"), int),
    "float": (
        re.compile(
            r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
        ),
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    ),
}


class _Loader(yaml.SafeLoader):
    """YAML without anchors, duplicate keys, dates, and numbers in other bases."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal("anchors and aliases (& and *) are not supported; write the value out", event)
        if event.tag is not None:
            raise _refusal("tags (!) are not supported; write the value without one", event)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a list or a mapping cannot be a key; correct it", key)
            if key.value in lines:
                raise _refusal(f"{key.value} is given twice, first in line {lines[key.value]}; remove one", key)
            lines[key.value] = key.start_mark.line + 1
        return node


def _read_number(number: Callable[[str], float], node: yaml.ScalarNode) -> float:
    try:
        return number(node.value)
    except ValueError as error:  # more digits than Python reads
        raise _refusal(str(error), node) from None


def _refusal(sentence: str, where: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=sentence, problem_mark=where.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """YAML in which text is quoted wherever this loader or another YAML loader would not read it as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, (_pattern, _number) in _NUMBERS.items():
    _tag = f"tag:yaml.org,2002:{_name}"
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
    _Loader.add_constructor(_tag, lambda loader, node, number=_number: _read_number(number, node))


def parse_value(text: str | bytes) -> Any:
    """Return `text` read as YAML; raises ValueError if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump(settings: dict[str, dict[str, Any]]) -> str:
    """Return sections of settings as a recipe that `read_recipe` and other YAML readers read in the same way."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)


def read_recipe(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a YAML file, nested, and by dotted keys the file and line that each is in.

    Raises `ConfigError` that names the file and the line.
    """
    loader, places = None, {}
    try:
        loader = _Loader(_text(path))
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(path, "must hold sections such as model: and data:, each with keys", "add them")
        for key, node in _keys(root):
            places[key] = f"{path}:{node.start_mark.line + 1}"
            if "." in key and key == node.value:
                fix = "write a recipe's keys below their section"
                raise ConfigError(key, "is not a section", fix, places[key])
        return loader.construct_document(root), places
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}", f"cannot be read: {' '.join(str(error.problem).split())}") from None
    except yaml.YAMLError as error:
        raise ConfigError(path, f"cannot be read: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(path, "is nested too deeply for a recipe", "correct it") from None
    finally:
        if loader is not None:
            loader.dispose()


def _keys(node: yaml.MappingNode, name: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    for key, value in node.value:
        dotted = f"{name}.{key.value}" if name else key.value
        yield dotted, key
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, dotted)


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(path, f"is larger than {MAX_BYTES:,} bytes, so it is not a recipe", "correct --config")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}", "is not UTF-8 text", "save the recipe as UTF-8") from None
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ConfigError(f"--config {path}", reason, "give the path of a YAML file") from None
