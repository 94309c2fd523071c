"""Replace patterns such as `data/web-*` in `data.prefix` and `data.stages` by the datasets that
they match.

A prefix is the path of a dataset without `.idx` and `.bin`, or such a pattern.
"""

import fnmatch
import glob
import itertools
import os
import re
from dataclasses import replace

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig, replace_settings

_ENDINGS = (".bin", ".idx", ".bin.partial", ".idx.partial")
"""Endings of the files of complete and of unfinished datasets. A pattern also matches unfinished
datasets, so that the run refuses them instead of training without them."""
_PART = re.compile(r"(.*-)[0-9]{5}(-of-([0-9]{5}))", re.DOTALL)
"""Prefix of a dataset written by `tools/preprocess_data.py --part`, such as `web-00000-of-00008`.
"""


def is_pattern(prefix: str) -> bool:
    """Return whether a prefix contains a wildcard (`*`, `?` or `[`)."""
    return any(character in prefix for character in "*?[")


def match_datasets(prefix: str) -> list[str]:
    """Return the sorted prefixes of the datasets that the pattern `prefix` matches.

    A dataset that was preprocessed in parts may lack parts, for example of a failed job. If the
    pattern matches some of its parts, the missing ones that it would match are included, so that
    the run refuses to start without them. Returns [prefix] if nothing matches, if `prefix` has no
    wildcards, or if it is the literal name of a dataset.
    """
    if not is_pattern(prefix) or any(os.path.exists(prefix + ending) for ending in _ENDINGS):
        return [prefix]

    matches = {
        path.removesuffix(ending)
        for ending in _ENDINGS
        for path in glob.glob(prefix + ending, recursive=True)
    }
    # For data/web-00003-of-00008, the groups are `data/web-`, `-of-00008` and `00008`. They lack
    # the number of the part, so all parts of a dataset have the same groups.
    datasets_in_parts = {part.groups() for part in map(_PART.fullmatch, matches) if part}
    for begin, end, count in datasets_in_parts:
        parts = [f"{begin}{number:05}{end}" for number in range(int(count))]
        # Add the parts that the pattern matches, also missing ones. They are in the directory of a
        # match, so only their names are compared with the last part of the pattern. In a whole
        # path, a `*` of fnmatch would also match slashes.
        name_pattern = os.path.basename(prefix)
        matches.update(
            part for part in parts if fnmatch.fnmatchcase(os.path.basename(part), name_pattern)
        )
    return sorted(matches) or [prefix]


def resolve_patterns(
    prefix: dict[str, float] | list[str] | str | None,
) -> dict[str, float] | list[str] | str | None:
    """Return a value of `data.prefix` with each pattern replaced by the datasets that it matches.

    If a pattern has a weight, the datasets share it in proportion to their sizes. A pattern without
    matches is kept, and refused later as a missing dataset.
    """
    prefixes, weights = blend(prefix)
    # For each prefix, the datasets that it matches.
    matches = [match_datasets(name) for name in prefixes]
    # No pattern was replaced.
    if matches == [[name] for name in prefixes]:
        return prefix
    # Several patterns may match the same dataset, which must be read only once.
    if weights is None:
        return list(dict.fromkeys(itertools.chain(*matches)))

    resolved = {}
    for names, weight in zip(matches, weights):
        sizes = [_size(name) for name in names]
        for name, size in zip(names, sizes):
            # A dataset that several patterns match gets the sum of its weights. `max` prevents a
            # division by 0 if all datasets of a pattern are empty.
            resolved[name] = resolved.get(name, 0.0) + weight * (size / max(1, sum(sizes)))
    return resolved


def _size(prefix: str) -> int:
    """Return the size of a dataset's tokens in bytes, or 1 if the dataset is missing."""
    try:
        return os.path.getsize(f"{prefix}.bin")
    except FileNotFoundError:
        return 1  # any number will do, since the run refuses to start without the dataset


def resolve_datasets(config: RunConfig) -> RunConfig:
    """Return the configuration with all patterns in `data.prefix` and `data.stages` replaced by
    datasets.

    The run's saved settings then list its datasets, and a restart notices if they change.
    """
    stages = config.data.stages
    if stages:
        stages = [replace(stage, prefix=resolve_patterns(stage.prefix)) for stage in stages]
    prefix = resolve_patterns(config.data.prefix)
    return replace_settings(config, {"data.prefix": prefix, "data.stages": stages})
