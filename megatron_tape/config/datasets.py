"""Resolve patterns in `data.prefix` and `data.stages`, such as data/web-*, to datasets."""

import fnmatch
import glob
import os
import re
from dataclasses import replace

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig

_ENDINGS = (".bin", ".idx", ".bin.partial", ".idx.partial")
"""Files of complete and incomplete datasets. Patterns match both, so that incomplete datasets raise an error."""
_PART = re.compile(r"(.*-)[0-9]{5}(-of-([0-9]{5}))", re.DOTALL)
"""The name of a dataset written by `tools/preprocess_data.py --part`."""


def is_pattern(prefix: str) -> bool:
    """Return whether a prefix contains wildcards."""
    return any(character in prefix for character in "*?[")


def match_datasets(prefix: str) -> list[str]:
    """Return the sorted prefixes of the datasets that a pattern matches, or the prefix itself if there are none.

    If it matches one part of a dataset in several parts, missing parts are included, so that they raise an error.
    """
    if not is_pattern(prefix) or any(os.path.exists(prefix + ending) for ending in _ENDINGS):
        return [prefix]
    found = {path.removesuffix(end) for end in _ENDINGS for path in glob.glob(prefix + end, recursive=True)}
    for begin, end, count in {part.groups() for part in map(_PART.fullmatch, found) if part}:
        parts = (f"{begin}{number:05}{end}" for number in range(int(count)))
        found |= {part for part in parts if fnmatch.fnmatchcase(os.path.basename(part), os.path.basename(prefix))}
    return sorted(found) or [prefix]


def resolve_patterns(prefix: dict[str, float] | list[str] | str | None) -> dict[str, float] | list[str] | str | None:
    """Replace each pattern in a value of `data.prefix` by the datasets it matches.

    The pattern's weight is divided among them in proportion to their tokens. A pattern without matches is kept.
    """
    prefixes, weights = blend(prefix)
    found = [match_datasets(name) for name in prefixes]
    if found == [[name] for name in prefixes]:
        return prefix
    if weights is None:
        return list(dict.fromkeys(name for names in found for name in names))
    result: dict[str, float] = {}
    for names, weight in zip(found, weights):
        sizes = [os.path.getsize(f"{name}.bin") if os.path.isfile(f"{name}.bin") else 1 for name in names]
        for name, size in zip(names, sizes):
            result[name] = result.get(name, 0.0) + weight * (size / max(1, sum(sizes)))
    return result


def resolve_datasets(config: RunConfig) -> RunConfig:
    """Return a configuration whose patterns are resolved, so that the run records and compares actual datasets."""
    stages = config.data.stages and [
        replace(stage, prefix=resolve_patterns(stage.prefix)) for stage in config.data.stages
    ]
    data = replace(config.data, prefix=resolve_patterns(config.data.prefix), stages=stages)
    return replace(config, data=data)
