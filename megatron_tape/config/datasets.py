"""Patterns in `data.prefix` and `data.stages`, such as data/web-*, and the datasets that they match."""

import fnmatch
import glob
import os
import re
from dataclasses import replace

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig

_ENDINGS = (".bin", ".idx", ".bin.partial", ".idx.partial")
"""Of complete and of incomplete datasets. A pattern matches both, so that incomplete ones are refused, not left out."""
_PART = re.compile(r"(.*-)[0-9]{5}(-of-([0-9]{5}))", re.DOTALL)
"""What a part of `tools/preprocess_data.py --part` is called."""


def is_pattern(prefix: str) -> bool:
    """Return whether a prefix may match several datasets."""
    return any(character in prefix for character in "*?[")


def matching(prefix: str) -> list[str]:
    """Return the prefixes of the datasets that a pattern matches, sorted; the prefix itself if there are none.

    Beside a part of several, it also matches those that do not exist, which are then refused.
    """
    if not is_pattern(prefix) or any(os.path.exists(prefix + ending) for ending in _ENDINGS):
        return [prefix]
    found = {path.removesuffix(end) for end in _ENDINGS for path in glob.glob(prefix + end, recursive=True)}
    for begin, end, count in {part.groups() for part in map(_PART.fullmatch, found) if part}:
        parts = (f"{begin}{number:05}{end}" for number in range(int(count)))
        found |= {part for part in parts if fnmatch.fnmatchcase(os.path.basename(part), os.path.basename(prefix))}
    return sorted(found) or [prefix]


def resolved(prefix: dict[str, float] | list[str] | str | None) -> dict[str, float] | list[str] | str | None:
    """Return a value of `data.prefix` with the matching datasets in place of each pattern.

    They share the pattern's weight in proportion to their tokens. A pattern that matches nothing stays.
    """
    prefixes, weights = blend(prefix)
    found = [matching(name) for name in prefixes]
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


def with_datasets(config: RunConfig) -> RunConfig:
    """Return a configuration with datasets in place of patterns, so that a run records and compares those."""
    stages = config.data.stages and [replace(stage, prefix=resolved(stage.prefix)) for stage in config.data.stages]
    data = replace(config.data, prefix=resolved(config.data.prefix), stages=stages)
    return replace(config, data=data)
